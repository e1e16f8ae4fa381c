//! A handshake and a seal that notice damage, as encrypting ones would.

use sidecore_vrio::handshake::{ClientHandshake, HostHandshake};
use sidecore_vrio::port::{Plain, Seal};
use sidecore_vrio::wire::{Hello, Welcome};

/// A checksum over counter, headers and payload, and over messages of the handshake.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Checksum {
    /// The session that it seals, which is in the sum: a frame of another one is noticed.
    session: u64,
}

const TAG_BYTES: usize = 16;
/// The code of this handshake.
const CODE: u8 = 99;

impl Checksum {
    fn of(welcome: &Welcome) -> Self {
        Self { session: welcome.session }
    }
}

impl Seal for Checksum {
    fn tag_bytes(&self) -> usize {
        TAG_BYTES
    }

    fn phase(&mut self, counter: u64) -> u8 {
        (counter >> 6) as u8 & 1
    }

    fn seal(&mut self, counter: u64, head: &[u8], sealed: &mut [u8]) {
        let (payload, tag) = sealed.split_at_mut(sealed.len() - TAG_BYTES);
        tag.fill(0);
        tag[..8].copy_from_slice(&sum(self.session ^ counter, head, payload).to_le_bytes());
    }

    fn open(&mut self, counter: u64, head: &[u8], sealed: &mut [u8]) -> bool {
        let (payload, tag) = sealed.split_at(sealed.len() - TAG_BYTES);
        tag[..8] == sum(self.session ^ counter, head, payload).to_le_bytes()
    }
}

/// Appends the sum of a message to it.
fn close(len: usize, message: &mut [u8]) -> usize {
    let sum = sum(0, &[], &message[..len]);
    message[len..len + 8].copy_from_slice(&sum.to_le_bytes());
    len + 8
}

/// The message without its sum, if that is right.
fn checked(message: &[u8]) -> Option<&[u8]> {
    let (message, found) = message.split_last_chunk::<8>()?;
    (*found == sum(0, &[], message).to_le_bytes()).then_some(message)
}

impl ClientHandshake for Checksum {
    type Seal = Self;

    fn code(&self) -> u8 {
        CODE
    }

    fn hello(&mut self, fields: &Hello, message: &mut [u8]) -> Option<usize> {
        Some(close(ClientHandshake::hello(&mut Plain, fields, message)?, message))
    }

    fn welcome(&mut self, message: &[u8]) -> Option<(Welcome, Self)> {
        let (welcome, _) = ClientHandshake::welcome(&mut Plain, checked(message)?)?;
        Some((welcome, Self::of(&welcome)))
    }
}

impl HostHandshake for Checksum {
    type Seal = Self;
    type Pending = ();

    fn hello(&mut self, code: u8, message: &[u8]) -> Option<(Hello, ())> {
        (code == CODE).then_some(())?;
        HostHandshake::hello(&mut Plain, 0, checked(message)?)
    }

    fn welcome(&mut self, (): (), fields: &Welcome, message: &mut [u8]) -> Option<(usize, Self)> {
        let (len, _) = HostHandshake::welcome(&mut Plain, (), fields, message)?;
        Some((close(len, message), Self::of(fields)))
    }
}

/// FNV-1a over words.
fn sum(counter: u64, associated: &[u8], payload: &[u8]) -> u64 {
    let mut sum = 0xcbf2_9ce4_8422_2325 ^ counter;
    for part in [associated, payload] {
        let (words, rest) = part.as_chunks::<8>();
        let mut last = [0; 8];
        last[..rest.len()].copy_from_slice(rest);
        for word in words.iter().chain([&last]) {
            sum = (sum ^ u64::from_le_bytes(*word)).wrapping_mul(0x0100_0000_01b3);
            sum ^= sum >> 29;
        }
    }
    sum
}
