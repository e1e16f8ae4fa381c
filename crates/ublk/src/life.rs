//! The life of a device in the kernel: made, taken over, removed.
//!
//! A daemon may be killed at each point of it. The next one looks at what the kernel has, and
//! decides by that alone ([`next_step`]). The kernel carries out a command of a killed process to
//! its end, so a look can be out of date: a step that fails is decided again.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use sidecore_linux::{UblkError, UblkInfo, UblkParameters, UblkState};

use crate::Control;

/// The number of [pauses](Server::pause) for which a device may stay in an earlier daemon's hands.
const PAUSES_MAX: u32 = 1500;

/// How long a removed device may stay open.
const STILL_OPEN: Duration = Duration::from_secs(5);

/// The upper half of the word of each device that a daemon of Sidecore has made, in ASCII.
const OURS: u64 = 0x5349_4443_0000_0000;

const BUSY: i32 = 16;
const EXISTS: i32 = 17;
const NO_DEVICE: i32 = 19;
/// START_USER_RECOVERY: a recovery was begun by a daemon that was killed, and no queue has fetched
/// since. The device is as another begin would make it.
const BEGUN: i32 = 22;

/// The word in the kernel's device by which a later daemon recognizes it.
#[must_use]
pub fn server_word(name: &str) -> u64 {
    let hash = twox_hash::XxHash3_64::oneshot(format!("sidecore {name}").as_bytes());
    OURS | hash >> 32
}

/// Whether a daemon of Sidecore has made a device, by its word.
fn is_ours(word: u64) -> bool {
    word >> 32 == OURS >> 32
}

/// A step towards a device that is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Make the device.
    Make,
    /// Take the device over, with its requests.
    Recover(UblkInfo),
    /// Remove the device, and look again.
    Delete,
    /// A process serves the device, and may have ended a moment ago.
    Wait(UblkInfo),
    /// The device is of another program, or has another name.
    Refuse,
}

/// The step that follows from what the kernel has. `word` is the device's
/// [`server_word`]; `contents_stay` says whether the contents of its store outlive a daemon.
#[must_use]
pub fn next_step(seen: Option<&UblkInfo>, word: u64, contents_stay: bool) -> Step {
    let Some(info) = seen else { return Step::Make };
    if info.server_word != word {
        return Step::Refuse;
    }
    match info.state() {
        // The daemon was killed before it has started the device, or after it has stopped it.
        UblkState::Dead => Step::Delete,
        UblkState::Quiesced if contents_stay => Step::Recover(*info),
        UblkState::Quiesced => Step::Delete,
        UblkState::Live | UblkState::Other(_) => Step::Wait(*info),
    }
}

/// Whether a device that no daemon is to serve was left half made or half removed by a daemon that
/// was killed. `is_alive` says whether the process of a number lives.
#[must_use]
pub fn is_remnant(info: &UblkInfo, is_alive: impl Fn(i32) -> bool) -> bool {
    // The kernel forgets the process when a device is stopped.
    let has_process = info.server > 0 && is_alive(info.server);
    is_ours(info.server_word) && info.state() == UblkState::Dead && !has_process
}

/// Removes the devices of these numbers that are [remnants](is_remnant). No device of the numbers
/// may be brought up meanwhile.
pub fn remove_remnants(
    control: &impl Control,
    numbers: impl IntoIterator<Item = u32>,
    is_alive: impl Fn(i32) -> bool,
) {
    let begun = Instant::now();
    for number in numbers {
        match control.info(number) {
            Ok(Some(info)) if is_remnant(&info, &is_alive) => {}
            _ => continue,
        }
        tracing::warn!("ublk device {number} is removed, which a killed daemon has left");
        // The kernel removes it in any case, when nothing has it open any longer.
        if let Err(error) = deleted(control, number, &|| begun.elapsed() > STILL_OPEN) {
            tracing::warn!("{error}");
        }
    }
}

/// The daemon's side of a device while it is brought up.
pub trait Server {
    /// Whether the device is to end: each wait is given up.
    fn ends(&self) -> bool;

    /// Waits for 20 ms.
    fn pause(&self);

    /// Whether requests of an earlier daemon's device may be answered. They wait until then.
    fn may_recover(&self) -> bool;

    /// The device to make, with this word.
    fn wanted(&self, word: u64) -> UblkInfo;

    /// The size and the properties of a device that was made.
    fn parameters(&self, made: &UblkInfo) -> UblkParameters;

    /// Checks that the store can still be behind an earlier daemon's device.
    ///
    /// # Errors
    /// The reason, with the remedy.
    fn fits(&self, shown: &UblkParameters) -> Result<(), String>;

    /// Has the queues fetch requests.
    ///
    /// # Errors
    /// The reason.
    fn start_queues(&self, info: &UblkInfo, parameters: &UblkParameters) -> Result<(), String>;

    /// Stops the queues, if there are any, when their requests in flight are done.
    fn stop_queues(&self);
}

/// How a device came up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Up {
    /// The device is new.
    Made,
    /// The device was taken over.
    Recovered,
    /// The device did not come up, because it is to end.
    Ends,
}

/// The life of one device.
#[derive(Debug)]
pub struct Life {
    number: u32,
    word: u64,
    contents_stay: bool,
    is_made: AtomicBool,
}

impl Life {
    /// The life of the device of this number and name. `contents_stay`: the contents of its store
    /// outlive this process.
    #[must_use]
    pub fn new(number: u32, name: &str, contents_stay: bool) -> Self {
        Self { number, word: server_word(name), contents_stay, is_made: AtomicBool::new(false) }
    }

    /// Whether the kernel has the device, made by this configuration.
    #[must_use]
    pub fn is_made(&self) -> bool {
        self.is_made.load(Ordering::Relaxed)
    }

    /// Brings the device up: afterwards it can be used.
    ///
    /// # Errors
    /// The reason, with the remedy.
    pub fn bring_up(&self, control: &impl Control, server: &impl Server) -> Result<Up, String> {
        match self.come_up(control, server) {
            Err(_) if server.ends() => Ok(Up::Ends),
            up => up,
        }
    }

    fn come_up(&self, control: &impl Control, server: &impl Server) -> Result<Up, String> {
        let mut pauses = 0_u32;
        while !server.ends() {
            let up = match self.look(control)? {
                Step::Make => self.make(control, server)?,
                Step::Recover(info) => self.recover(control, server, &info)?,
                Step::Delete => {
                    let deleted = deleted(control, self.number, &|| server.ends());
                    deleted.map(|()| None).map_err(words)?
                }
                Step::Wait(info) if pauses >= PAUSES_MAX => return Err(self.is_served(&info)),
                Step::Wait(_) => None,
                Step::Refuse => return Err(self.is_foreign()),
            };
            if let Some(up) = up {
                return Ok(up);
            }
            pauses = pauses.saturating_add(1);
            server.pause();
        }
        Ok(Up::Ends)
    }

    /// Removes the device from the kernel. The pages that the kernel has cached must be written
    /// before. `stop_queues` is that of a [`Server`]. The log has the errors.
    pub fn remove(&self, control: &impl Control, stop_queues: impl Fn()) {
        let complain = |error| tracing::error!("{error}");
        if let Err(error) = gone_is_fine(control.stop(self.number)) {
            complain(error);
        }
        stop_queues();
        // The kernel closes a queue a moment after this process has closed it.
        let begun = Instant::now();
        if let Err(error) = deleted(control, self.number, &|| begun.elapsed() > STILL_OPEN) {
            complain(error);
        }
        self.is_made.store(false, Ordering::Relaxed);
    }

    fn look(&self, control: &impl Control) -> Result<Step, String> {
        let seen = control.info(self.number).map_err(words)?;
        let step = next_step(seen.as_ref(), self.word, self.contents_stay);
        self.is_made.store(!matches!(step, Step::Make | Step::Refuse), Ordering::Relaxed);
        Ok(step)
    }

    fn is_foreign(&self) -> String {
        format!(
            "ublk device {} belongs to another program or to a device of another name; give this \
             one another `number`",
            self.number
        )
    }

    fn is_served(&self, info: &UblkInfo) -> String {
        // A removal must not take the device away from that process.
        self.is_made.store(false, Ordering::Relaxed);
        format!("/dev/ublkb{} is served by process {}; end that process", self.number, info.server)
    }

    /// `None` if the device has to be looked at again.
    fn make(&self, control: &impl Control, server: &impl Server) -> Result<Option<Up>, String> {
        let info = match control.add(server.wanted(self.word)) {
            // A killed process has made it after the look.
            Err(error) if error.errno() == Some(EXISTS) => match self.look(control)? {
                Step::Make => return Err(words(error)),
                _ => return Ok(None),
            },
            made => made.map_err(words)?,
        };
        self.is_made.store(true, Ordering::Relaxed);
        let parameters = server.parameters(&info);
        let started = control
            .set_parameters(self.number, parameters)
            .map_err(words)
            .and_then(|()| server.start_queues(&info, &parameters))
            .and_then(|()| control.start(self.number, &|| server.ends()).map_err(words));
        match started {
            Ok(()) => Ok(Some(Up::Made)),
            // The end decides whether the device is removed.
            Err(reason) if server.ends() => Err(reason),
            Err(reason) => {
                self.remove(control, || server.stop_queues());
                Err(reason)
            }
        }
    }

    /// Takes over a device with the requests that it has: the kernel sends those again that an
    /// earlier daemon had taken and not completed. The store was opened before, which waits until
    /// nothing of that daemon is in flight to it, so that no old write can land behind a repeated
    /// one. `None` if the device has to be looked at again.
    fn recover(
        &self,
        control: &impl Control,
        server: &impl Server,
        info: &UblkInfo,
    ) -> Result<Option<Up>, String> {
        while !server.may_recover() {
            if server.ends() {
                return Ok(Some(Up::Ends));
            }
            server.pause();
        }
        match self.take_over(control, server, info) {
            Ok(true) => Ok(Some(Up::Recovered)),
            Ok(false) => Ok(None),
            Err(reason) if server.ends() => Err(reason),
            Err(reason) if matches!(self.look(control)?, Step::Recover(_)) => Err(reason),
            // The kernel has carried out a killed daemon's last command.
            Err(_) => {
                server.stop_queues();
                Ok(None)
            }
        }
    }

    /// False if the device has to be looked at again.
    fn take_over(
        &self,
        control: &impl Control,
        server: &impl Server,
        info: &UblkInfo,
    ) -> Result<bool, String> {
        let shown = control.parameters(self.number).map_err(words)?;
        server.fits(&shown)?;
        if !self.begin_recovery(control, server)? {
            return Ok(false);
        }
        server.start_queues(info, &shown)?;
        control.end_recovery(self.number, &|| server.ends()).map_err(words)?;
        Ok(true)
    }

    /// Waits until the kernel has cleaned up after the process that has served the device. False if
    /// the device has to be looked at again.
    fn begin_recovery(&self, control: &impl Control, server: &impl Server) -> Result<bool, String> {
        let mut pauses = 0_u32;
        loop {
            let begun = control.begin_recovery(self.number);
            match begun.as_ref().map_err(UblkError::errno) {
                Err(Some(BEGUN)) => return Ok(true),
                Err(Some(BUSY)) if pauses < PAUSES_MAX && !server.ends() => {}
                _ => return begun.map(|()| true).map_err(words),
            }
            if !matches!(self.look(control)?, Step::Recover(_)) {
                return Ok(false);
            }
            pauses = pauses.saturating_add(1);
            server.pause();
        }
    }
}

fn words(error: UblkError) -> String {
    error.to_string()
}

/// A device that is gone needs no command to end it: a killed daemon's command has done that.
fn gone_is_fine(result: Result<(), UblkError>) -> Result<(), UblkError> {
    match result {
        Err(error) if error.errno() == Some(NO_DEVICE) => Ok(()),
        result => result,
    }
}

fn deleted(
    control: &impl Control,
    number: u32,
    gives_up: &dyn Fn() -> bool,
) -> Result<(), UblkError> {
    gone_is_fine(control.delete(number, gives_up))
}

#[cfg(test)]
mod tests;
