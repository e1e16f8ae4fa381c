//! A terminal to draw on: no echo, keys at once, a screen of its own; its state is restored in any
//! case.

use std::io::{self, IsTerminal as _, Read as _, Write as _};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};

/// Switches to the alternate screen, and hides the cursor.
const ENTER: &str = "\x1b[?1049h\x1b[?25l";
/// Undoes [`ENTER`].
const LEAVE: &str = "\x1b[?25h\x1b[?1049l";

/// The terminal, in the mode for drawing. Dropping it restores the terminal.
pub(crate) struct Terminal {
    before: Termios,
}

impl Terminal {
    /// Takes the terminal; `None` if the standard input or output is no terminal.
    pub(crate) fn take() -> io::Result<Option<Self>> {
        if !io::stdin().is_terminal() || !io::stdout().is_terminal() {
            return Ok(None);
        }
        let before = tcgetattr(io::stdin())?;
        let mut raw = before.clone();
        // Ctrl-C is read as a key, so that it cannot end the program before the terminal is
        // restored.
        raw.local_modes -= LocalModes::ECHO | LocalModes::ICANON | LocalModes::ISIG;
        tcsetattr(io::stdin(), OptionalActions::Now, &raw)?;
        let terminal = Self { before };
        terminal.write(ENTER)?;
        Ok(Some(terminal))
    }

    /// Shows as much of the text as fits.
    pub(crate) fn draw(&self, text: &str) -> io::Result<()> {
        let (rows, columns) = match tcgetwinsize(io::stdout()) {
            Ok(size) if size.ws_row > 0 && size.ws_col > 0 => {
                (usize::from(size.ws_row), usize::from(size.ws_col))
            }
            _ => (24, 80),
        };
        // New lines overwrite old ones, which flickers less than clearing.
        let mut screen = String::from("\x1b[H");
        for (index, line) in text.lines().take(rows).enumerate() {
            if index > 0 {
                screen.push_str("\r\n");
            }
            screen.extend(line.chars().take(columns));
            screen.push_str("\x1b[K");
        }
        screen.push_str("\x1b[J");
        self.write(&screen)
    }

    /// Waits this long for a key that quits. Returns whether there was one.
    pub(crate) fn quits_within(&self, time: Duration) -> io::Result<bool> {
        let end = Instant::now() + time;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(false);
            }
            let left = Timespec::try_from(left).unwrap_or_default();
            let stdin = io::stdin();
            let ready = match poll(&mut [PollFd::new(&stdin, PollFlags::IN)], Some(&left)) {
                // Interrupted by a signal, for instance because the window was resized.
                Err(rustix::io::Errno::INTR) => continue,
                ready => ready?,
            };
            if ready == 0 {
                return Ok(false);
            }
            let mut keys = [0; 64];
            let count = stdin.lock().read(&mut keys)?;
            let quits = |key: &u8| matches!(key, b'q' | b'Q' | 0x03);
            // An escape alone is the key; more bytes behind it make it an arrow or the like.
            if count == 0 || keys[..count].iter().any(quits) || keys[..count] == [0x1b] {
                return Ok(true);
            }
        }
    }

    fn write(&self, text: &str) -> io::Result<()> {
        let mut out = io::stdout().lock();
        out.write_all(text.as_bytes())?;
        out.flush()
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.write(LEAVE);
        let _ = tcsetattr(io::stdin(), OptionalActions::Now, &self.before);
    }
}
