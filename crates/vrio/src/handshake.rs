//! The seam to the handshake that begins a session: it proves both sides to each other and makes
//! the session's [seal](Seal).
//!
//! HELLO and WELCOME carry one message each, in which the fields of [`Hello`] and [`Welcome`] are
//! sealed. The client's HELLO has a cookie in its clear part: an IOhost asks its handshake nothing
//! before the sender has shown its address, and for no more messages than it has time for.
//!
//! A client makes one message for each session that it wants and may send it often, so an IOhost
//! may have to open it several times, and makes one WELCOME for it. Damaged and forged messages
//! arrive at any time.

use crate::port::{Plain, Seal};
use crate::wire::{Hello, Welcome};

/// Longest message of a handshake.
pub const MESSAGE_MAX: usize = 512;

/// Codes of handshakes, in a HELLO's clear part.
pub mod code {
    /// None: the fields are in clear, and the client's name is believed.
    pub const PLAIN: u8 = 0;
    /// Noise, as `crates/trust` does it.
    pub const NOISE: u8 = 1;
}

/// The client's side.
pub trait ClientHandshake {
    /// The seal of a session.
    type Seal: Seal;

    /// See [`code`]; it never changes.
    fn code(&self) -> u8;

    /// Begins a new handshake, in place of one that did not end: writes the message of a HELLO with
    /// these fields to `message`, which has room for [`MESSAGE_MAX`] bytes. Returns its size, or
    /// `None` if there can be none now.
    fn hello(&mut self, fields: &Hello, message: &mut [u8]) -> Option<usize>;

    /// Opens the message of a WELCOME to the newest [`hello`](Self::hello). Returns its fields and
    /// the session's seal, or `None` if the message is not the IOhost's, which changes nothing: the
    /// right one may follow.
    fn welcome(&mut self, message: &[u8]) -> Option<(Welcome, Self::Seal)>;
}

/// The IOhost's side, for all of its clients.
pub trait HostHandshake {
    /// The seal of a session.
    type Seal: Seal;
    /// A handshake whose HELLO was opened and which has no WELCOME yet. It may be dropped.
    type Pending;

    /// Opens the message of a HELLO whose handshake has this [`code`]. Returns its fields, in which
    /// `client` is proved; `None` if the message is of no client that may have a session here.
    fn hello(&mut self, code: u8, message: &[u8]) -> Option<(Hello, Self::Pending)>;

    /// Writes the message of a WELCOME with these fields to `message`, which has room for
    /// [`MESSAGE_MAX`] bytes. Returns its size and the session's seal.
    fn welcome(
        &mut self,
        pending: Self::Pending,
        fields: &Welcome,
        message: &mut [u8],
    ) -> Option<(usize, Self::Seal)>;
}

/// No handshake: for sessions without encryption.
impl ClientHandshake for Plain {
    type Seal = Self;

    fn code(&self) -> u8 {
        code::PLAIN
    }

    fn hello(&mut self, fields: &Hello, message: &mut [u8]) -> Option<usize> {
        *message.first_chunk_mut()? = fields.encode();
        Some(Hello::BYTES)
    }

    fn welcome(&mut self, message: &[u8]) -> Option<(Welcome, Self)> {
        Some((Welcome::decode(message.first_chunk()?), Self))
    }
}

impl HostHandshake for Plain {
    type Seal = Self;
    type Pending = ();

    fn hello(&mut self, code: u8, message: &[u8]) -> Option<(Hello, ())> {
        (code == code::PLAIN).then_some(())?;
        Some((Hello::decode(message.first_chunk()?), ()))
    }

    fn welcome(&mut self, (): (), fields: &Welcome, message: &mut [u8]) -> Option<(usize, Self)> {
        *message.first_chunk_mut()? = fields.encode();
        Some((Welcome::BYTES, Self))
    }
}
