//! The state of an interface, for any thread.

use std::io;

use sidecore_linux::{Interface, PacketSocket, TapMonitor};

/// The state of an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InterfaceState {
    /// It carries frames.
    Up,
    /// It is up, and has no carrier.
    NoCarrier,
    /// The host has not set it up.
    Down,
    /// It was deleted, perhaps with a new one of its name behind it.
    Gone,
}

/// Sees the state of an interface, also after its queue was closed.
#[derive(Debug)]
pub enum InterfaceMonitor {
    /// Of a TAP interface.
    Tap(TapMonitor),
    /// Of an Ethernet interface.
    Ethernet(EthernetMonitor),
}

impl InterfaceMonitor {
    /// The state.
    #[must_use]
    pub fn state(&self) -> InterfaceState {
        match self {
            Self::Ethernet(monitor) => monitor.state(),
            Self::Tap(monitor) => match monitor.state() {
                state if state.is_gone => InterfaceState::Gone,
                state if state.is_up => InterfaceState::Up,
                _ => InterfaceState::Down,
            },
        }
    }
}

/// Looks an Ethernet interface up.
#[derive(Debug)]
pub struct EthernetMonitor {
    name: String,
    index: u32,
    socket: PacketSocket,
}

impl EthernetMonitor {
    /// Looks at this interface of this thread's network namespace.
    ///
    /// # Errors
    /// The process lacks CAP_NET_RAW.
    pub(crate) fn new(name: &str, interface: &Interface) -> io::Result<Self> {
        Ok(Self { name: name.to_owned(), index: interface.index, socket: PacketSocket::new()? })
    }

    /// Another one of the same interface.
    ///
    /// # Errors
    /// The process has no descriptor left.
    pub(crate) fn again(&self) -> io::Result<Self> {
        Ok(Self { name: self.name.clone(), index: self.index, socket: PacketSocket::new()? })
    }

    /// The state. Five system calls.
    #[must_use]
    pub fn state(&self) -> InterfaceState {
        let is_same = self.socket.interface(&self.name).is_ok_and(|now| now.index == self.index);
        match self.socket.is_running(&self.name) {
            Ok((true, true)) if is_same => InterfaceState::Up,
            Ok((true, false)) if is_same => InterfaceState::NoCarrier,
            Ok((false, _)) if is_same => InterfaceState::Down,
            _ => InterfaceState::Gone,
        }
    }
}
