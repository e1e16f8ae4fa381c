//! Child processes that cannot outlive the demo, and a channel for the lines that they print.

use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, kill_process_group};
use sidecore_kit::interrupt;
use sidecore_kit::process::{Process, tied_to_this_process};
use std::collections::VecDeque;
use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::Stdio;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

/// The origin of a line. Guests have names, because a run may have several.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Source {
    /// A guest, on its serial line.
    Guest(&'static str),
    /// The QEMU of that guest.
    Qemu(&'static str),
    /// A program on the host, by its name.
    Host(&'static str),
}

#[derive(Debug)]
pub(crate) enum Event {
    Line(Source, String),
    /// An output is closed: the process has ended or is about to.
    Closed(Source),
}

impl Event {
    /// Whether the event waits for a call that wants it. The lines of other programs than guests
    /// are of use to a call that waits for them at the time, and to error messages.
    fn is_kept(&self) -> bool {
        matches!(self, Event::Line(Source::Guest(_), _) | Event::Closed(_))
    }
}

/// The channel of all processes' lines, in order.
pub(crate) struct Inbox {
    sender: Sender<Event>,
    receiver: Receiver<Event>,
    /// Received events that no call has taken, in order.
    kept: VecDeque<Event>,
    /// The last lines of QEMU and the daemon, for error messages.
    recent: VecDeque<(Source, String)>,
}

impl Inbox {
    pub(crate) fn new() -> Inbox {
        let (sender, receiver) = mpsc::channel();
        Inbox { sender, receiver, kept: VecDeque::new(), recent: VecDeque::new() }
    }

    /// The first event for which `is_wanted` holds; `None` if the deadline passes first. The events
    /// before it wait for later calls, except lines that only error messages need. Fails once a
    /// signal has arrived.
    pub(crate) fn find(
        &mut self,
        deadline: Instant,
        is_wanted: impl Fn(&Event) -> bool,
    ) -> Result<Option<Event>> {
        interrupt::check()?;
        if let Some(index) = self.kept.iter().position(&is_wanted) {
            return Ok(self.kept.remove(index));
        }
        while let Some(event) = self.receive(deadline)? {
            if is_wanted(&event) {
                return Ok(Some(event));
            }
            if event.is_kept() {
                self.kept.push_back(event);
            }
        }
        Ok(None)
    }

    /// Adds an event, as a process would.
    #[cfg(test)]
    pub(crate) fn post(&self, event: Event) {
        self.sender.send(event).unwrap();
    }

    /// The next event from the processes.
    fn receive(&mut self, deadline: Instant) -> Result<Option<Event>> {
        loop {
            interrupt::check()?;
            let left = deadline.saturating_duration_since(Instant::now());
            // Signals do not wake this wait, so it is cut into pieces too short for a user to
            // notice.
            match self.receiver.recv_timeout(left.min(Duration::from_millis(100))) {
                Ok(event) => {
                    if let Event::Line(source, line) = &event
                        && !matches!(source, Source::Guest(_))
                    {
                        self.recent.push_back((*source, line.clone()));
                        if self.recent.len() > 30 {
                            self.recent.pop_front();
                        }
                    }
                    return Ok(Some(event));
                }
                Err(RecvTimeoutError::Timeout) if left.is_zero() => return Ok(None),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    unreachable!("the inbox holds a sender itself")
                }
            }
        }
    }

    /// Waits until a process has closed its output; `false` if it has not by the deadline.
    pub(crate) fn wait_closed(&mut self, source: Source, deadline: Instant) -> Result<bool> {
        let is_closed = |event: &Event| matches!(event, Event::Closed(closed) if *closed == source);
        Ok(self.find(deadline, is_closed)?.is_some())
    }

    /// The last lines of QEMU and the daemon, for the end of an error message.
    pub(crate) fn last_words(&mut self) -> String {
        while let Ok(event) = self.receiver.try_recv() {
            if let Event::Line(source, line) = event {
                self.recent.push_back((source, line));
            }
        }
        self.recent.iter().map(|(source, line)| format!("\n  {source:?}: {line}")).collect()
    }
}

/// A child process; dropping it kills and reaps it.
pub(crate) struct Running {
    name: String,
    child: Process,
}

impl Running {
    /// Starts a program whose standard output and error become lines of the given sources.
    pub(crate) fn start<A: AsRef<OsStr>>(
        inbox: &Inbox,
        program: &OsStr,
        arguments: impl IntoIterator<Item = A>,
        stdout: Source,
        stderr: Source,
    ) -> Result<Running> {
        let name = program.to_string_lossy().into_owned();
        let mut command = tied_to_this_process(program);
        command.args(arguments);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        // A Ctrl-C in the terminal must only reach this process, which ends its children in order.
        command.process_group(0);
        let mut child =
            Process::start(&mut command).with_context(|| format!("cannot start {name}"))?;
        if let Some(pipe) = child.stdout.take() {
            read_lines(stdout, pipe, inbox.sender.clone());
        }
        if let Some(pipe) = child.stderr.take() {
            read_lines(stderr, pipe, inbox.sender.clone());
        }
        Ok(Running { name, child })
    }

    /// Writes to the program's standard input.
    pub(crate) fn write(&mut self, text: &str) -> Result<()> {
        let stdin =
            self.child.stdin.as_mut().with_context(|| format!("{} takes no input", self.name))?;
        stdin
            .write_all(text.as_bytes())
            .and_then(|()| stdin.flush())
            .with_context(|| format!("cannot write to {}", self.name))
    }

    /// The number of the program's process.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Ends the program at once.
    pub(crate) fn kill(&self) -> Result<()> {
        self.signal(Signal::KILL)
    }

    /// Asks the program to end.
    pub(crate) fn terminate(&self) -> Result<()> {
        self.signal(Signal::TERM)
    }

    /// Sends SIGHUP, on which a service starts again.
    pub(crate) fn hang_up(&self) -> Result<()> {
        self.signal(Signal::HUP)
    }

    /// Sends SIGUSR1, on which an owner hands over.
    pub(crate) fn hand_over(&self) -> Result<()> {
        self.signal(Signal::USR1)
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        self.child.signal(signal).with_context(|| format!("cannot send a signal to {}", self.name))
    }

    /// Waits for the exit status of a program that has closed its output.
    pub(crate) fn reap(mut self) -> Result<std::process::ExitStatus> {
        self.child.wait().with_context(|| format!("cannot wait for {}", self.name))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // If the program has started others, they are in its group. The call fails only if the
        // process is already gone.
        let _ = kill_process_group(Pid::from_child(&self.child), Signal::KILL);
    }
}

/// Reads lines in a thread that ends with the last process that holds the pipe's other end.
fn read_lines(source: Source, pipe: impl Read + Send + 'static, sender: Sender<Event>) {
    std::thread::spawn(move || {
        let mut pipe = BufReader::new(pipe);
        let mut line = Vec::new();
        // A guest may send bytes that are not UTF-8: those are replaced.
        while pipe.read_until(b'\n', &mut line).is_ok_and(|length| length > 0) {
            let text = String::from_utf8_lossy(&line).trim_end().to_owned();
            if sender.send(Event::Line(source, text)).is_err() {
                return;
            }
            line.clear();
        }
        // A send without a receiver fails, and that is no error.
        let _ = sender.send(Event::Closed(source));
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    const GUEST: Source = Source::Guest("guest");

    fn shell(inbox: &Inbox, script: &str) -> Running {
        Running::start(inbox, OsStr::new("sh"), ["-c", script], GUEST, Source::Qemu("guest"))
            .unwrap()
    }

    #[test]
    fn lines_arrive_and_answers_go_back() {
        let mut inbox = Inbox::new();
        let mut running = shell(&inbox, "echo one; read answer; echo got $answer");
        let deadline = Instant::now() + Duration::from_secs(20);
        let mut lines = Vec::new();
        while let Some(event) = inbox.find(deadline, |_| true).unwrap() {
            match event {
                Event::Line(GUEST, line) => {
                    if line == "one" {
                        running.write("two\n").unwrap();
                    }
                    lines.push(line);
                }
                Event::Closed(GUEST) => break,
                _ => {}
            }
        }
        assert_eq!(lines, ["one", "got two"]);
        assert!(running.reap().unwrap().success());
    }

    #[test]
    fn dropping_ends_the_process() {
        let mut inbox = Inbox::new();
        let running = shell(&inbox, "echo up; exec sleep 600");
        let deadline = Instant::now() + Duration::from_secs(20);
        let said = inbox.find(deadline, |_| true).unwrap();
        assert!(matches!(said, Some(Event::Line(GUEST, line)) if line == "up"));
        let pid = running.child.id();
        drop(running);
        assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists());
        assert!(inbox.wait_closed(GUEST, deadline).unwrap());
    }

    #[test]
    fn a_silent_process_meets_the_deadline() {
        let mut inbox = Inbox::new();
        let _running = shell(&inbox, "exec sleep 600");
        let soon = Instant::now() + Duration::from_millis(50);
        assert!(inbox.find(soon, |_| true).unwrap().is_none());
    }

    #[test]
    fn an_event_waits_for_the_call_that_wants_it() {
        let mut inbox = Inbox::new();
        let _running = shell(&inbox, "echo one; echo two; echo why >&2; exec 1>&- 2>&-");
        let deadline = Instant::now() + Duration::from_secs(20);
        assert!(inbox.wait_closed(GUEST, deadline).unwrap());
        assert!(inbox.wait_closed(Source::Qemu("guest"), deadline).unwrap());
        let line = |event: &Event| matches!(event, Event::Line(GUEST, line) if line == "two");
        assert!(inbox.find(deadline, line).unwrap().is_some());
        let rest = inbox.find(deadline, |_| true).unwrap();
        assert!(matches!(rest, Some(Event::Line(GUEST, line)) if line == "one"));
        let soon = Instant::now() + Duration::from_millis(1);
        assert!(inbox.find(soon, |_| true).unwrap().is_none(), "another program's line waits");
        assert!(inbox.last_words().contains("why"));
    }
}
