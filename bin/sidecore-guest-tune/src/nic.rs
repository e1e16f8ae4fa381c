//! NICs: threads that poll NAPI instances, interrupts that are put off, sockets that poll.

use crate::boot::{Next, Parameter};
use crate::memory::Former;
use crate::napi::{BUSY_POLL, Napi};
use crate::report::{Finding, State};
use crate::system::System;
use crate::tree::Tree;
use anyhow::{Result, bail};
use clap::ValueEnum;

/// Linux has threaded busy polling since this version.
const THREADED_SINCE: (u32, u32) = (6, 19);
const NICS: &str = "/sys/class/net";
/// How long a NAPI instance without frames keeps its interrupt off: a timer polls it so often, at
/// this interval.
const DEFERRED: [(&str, &str); 2] =
    [("gro_flush_timeout", "50000"), ("napi_defer_hard_irqs", "100")];
/// If 0, a frame that was sent is taken back when the next one is sent, without an interrupt.
const TRANSMIT: Parameter = Parameter { driver: "virtio_net", name: "napi_tx" };
/// How long a read or a poll of a socket polls the NIC, in microseconds.
const SOCKETS: [&str; 2] = ["/proc/sys/net/core/busy_read", "/proc/sys/net/core/busy_poll"];
const SOCKET_US: &str = "50";

/// The way in which NICs are polled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Nics {
    /// `busy-poll` where the kernel can, else `defer`.
    #[default]
    Auto,
    /// A thread for each receive queue polls it all the time (Linux 6.19).
    BusyPoll,
    /// A timer polls for a while after each frame, and sockets poll while they wait.
    Defer,
    /// NICs stay as they are.
    Off,
}

/// A NIC with a device behind it.
struct Nic {
    name: String,
    napis: Napis,
}

/// The NAPI instances of a NIC whose modes can be set, or the reason why there are none.
enum Napis {
    Some(Vec<Napi>),
    None(String),
}

impl Nic {
    fn all(system: &mut System) -> Result<Vec<Nic>> {
        let names = system.tree.names(NICS);
        let real = names.into_iter().filter(|name| system.tree.exists(&of(name, "device")));
        let real: Vec<String> = real.collect();
        real.into_iter().map(|name| Nic::find(system, name)).collect()
    }

    fn find(system: &mut System, name: String) -> Result<Nic> {
        let napis = Nic::napis(system, &name)?;
        Ok(Nic { name, napis })
    }

    fn napis(system: &mut System, name: &str) -> Result<Napis> {
        if system.release() < THREADED_SINCE {
            let (major, minor) = THREADED_SINCE;
            let release = system.release_text();
            return Ok(Napis::None(format!(
                "Linux {release} cannot: it came with {major}.{minor}"
            )));
        }
        let number = system.tree.number(&of(name, "ifindex"));
        let Some(number) = number.and_then(|number| u32::try_from(number).ok()) else {
            return Ok(Napis::None("the kernel shows no number of the interface".to_owned()));
        };
        let mut napis = system.napis.list(number)?.unwrap_or_default();
        napis.retain(|napi| napi.threaded.is_some());
        Ok(match napis.is_empty() {
            false => Napis::Some(napis),
            true if system.tree.read(&of(name, "operstate")).as_deref() == Some("down") => {
                Napis::None("the interface is down: set it up first".to_owned())
            }
            true => Napis::None("its driver shows no NAPI instances".to_owned()),
        })
    }

    /// Whether threads of the kernel poll all receive queues.
    fn is_polled(&self) -> bool {
        match &self.napis {
            Napis::Some(napis) => napis.iter().all(|napi| napi.threaded == Some(BUSY_POLL)),
            Napis::None(_) => false,
        }
    }

    fn findings(&self, system: &System) -> [Finding; 3] {
        [self.threaded(), self.deferred(system), self.transmit(system)]
    }

    fn threaded(&self) -> Finding {
        let finding = Finding::new(&self.name, "threaded busy polling");
        match &self.napis {
            Napis::None(reason) => finding.cannot(reason),
            Napis::Some(napis) => {
                let polled = napis.iter().filter(|napi| napi.threaded == Some(BUSY_POLL)).count();
                let state = if self.is_polled() { State::InForce } else { State::Off };
                finding.is(state, format!("{polled} of {} NAPI instances", napis.len()))
            }
        }
    }

    fn deferred(&self, system: &System) -> Finding {
        let finding = Finding::new(&self.name, "deferred interrupts");
        let values = DEFERRED.map(|(file, _)| system.tree.number(&of(&self.name, file)));
        match values {
            [Some(timeout), Some(defer)] => {
                let state = if timeout > 0 && defer > 0 { State::InForce } else { State::Off };
                finding.is(state, format!("{defer} times {timeout} ns"))
            }
            _ => {
                finding.cannot(format!("Linux {} cannot: it came with 5.8", system.release_text()))
            }
        }
    }

    fn transmit(&self, system: &System) -> Finding {
        let finding = Finding::new(&self.name, "transmission without interrupts");
        let tree = &system.tree;
        if !is_virtio(tree, &self.name) {
            return finding.cannot("its driver is not virtio_net");
        }
        match (tree.read(&TRANSMIT.path()).as_deref(), TRANSMIT.of_next_boot(tree)) {
            (None, _) => {
                let release = system.release_text();
                finding.cannot(format!("virtio_net of Linux {release} has no parameter napi_tx"))
            }
            (Some("N"), _) => finding.is(State::InForce, "napi_tx=0"),
            (Some(_), Some((value, path))) => {
                finding.is(State::AfterReboot, format!("napi_tx={value}, by {path}"))
            }
            (Some(_), None) if TRANSMIT.is_built_in(tree) => {
                let reason = "virtio_net is built into the kernel: use --next-boot as well";
                finding.is(State::Off, "").because(reason)
            }
            (Some(_), None) => finding.is(State::Off, ""),
        }
    }

    /// The changes for a mode.
    fn changes(&self, system: &System, nics: Nics) -> Result<Vec<(Former, String)>> {
        match (&self.napis, nics) {
            (Napis::Some(napis), Nics::Auto | Nics::BusyPoll) => {
                let others = napis.iter().filter(|napi| napi.threaded != Some(BUSY_POLL));
                let former = |napi: &Napi| Former::Threaded {
                    nic: self.name.clone(),
                    napi: napi.id,
                    mode: napi.threaded.unwrap_or_default(),
                };
                Ok(others.map(|napi| (former(napi), BUSY_POLL.to_string())).collect())
            }
            (Napis::None(reason), Nics::BusyPoll) => {
                bail!("{} cannot be polled by threads: {reason}; use --nics defer", self.name)
            }
            (_, Nics::Off) => Ok(Vec::new()),
            _ => {
                let files = DEFERRED.map(|(file, value)| (of(&self.name, file), value));
                Ok(files.iter().filter_map(|(path, value)| change(system, path, value)).collect())
            }
        }
    }
}

fn is_virtio(tree: &Tree, nic: &str) -> bool {
    tree.target(&of(nic, "device/driver")).as_deref() == Some(TRANSMIT.driver)
}

/// The parameter of the driver of NICs, if it is wanted, and the driver is in use and has it.
pub(crate) fn parameter(tree: &Tree, next: &Next) -> Option<Parameter> {
    let is_used = next.is_quiet && tree.names(NICS).iter().any(|nic| is_virtio(tree, nic));
    (is_used && tree.exists(&TRANSMIT.path())).then_some(TRANSMIT)
}

/// The path of a file of a NIC.
fn of(name: &str, file: &str) -> String {
    format!("{NICS}/{name}/{file}")
}

/// The change of a file; `None` if it has the value, or does not exist.
fn change(system: &System, path: &str, value: &str) -> Option<(Former, String)> {
    let former = system.tree.read(path).filter(|former| former != value)?;
    Some((Former::File { path: path.to_owned(), value: former }, value.to_owned()))
}

/// The state of all NICs, and of their sockets.
pub(crate) fn status(system: &mut System) -> Result<Vec<Finding>> {
    let nics = Nic::all(system)?;
    let mut found: Vec<Finding> = nics.iter().flat_map(|nic| nic.findings(system)).collect();
    let finding = Finding::new("sockets", "busy polling");
    found.push(match SOCKETS.map(|path| system.tree.number(path)) {
        [Some(read), Some(poll)] => {
            let state = if read > 0 && poll > 0 { State::InForce } else { State::Off };
            finding.is(state, format!("{read} us of a read, {poll} us of a poll"))
        }
        _ => finding.cannot("the kernel is built without CONFIG_NET_RX_BUSY_POLL"),
    });
    Ok(found)
}

/// The changes that a mode needs, with the new values.
pub(crate) fn changes(system: &mut System, mode: Nics) -> Result<Vec<(Former, String)>> {
    if mode == Nics::Off {
        return Ok(Vec::new());
    }
    let nics = Nic::all(system)?;
    let mut changes = Vec::new();
    for nic in &nics {
        changes.extend(nic.changes(system, mode)?);
    }
    let has_threads =
        mode != Nics::Defer && nics.iter().all(|nic| matches!(nic.napis, Napis::Some(_)));
    // A thread polls for all sockets.
    if !has_threads {
        changes.extend(SOCKETS.iter().filter_map(|path| change(system, path, SOCKET_US)));
    }
    Ok(changes)
}
