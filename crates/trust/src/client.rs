//! The client's side of the handshake.

use std::fmt;

use sidecore_vrio::handshake::{ClientHandshake, code};
use sidecore_vrio::wire::{Hello, Welcome};
use snow::HandshakeState;
use zeroize::Zeroizing;

use crate::files::Invitation;
use crate::handshake::{SECRET_BYTES, WELCOME_BYTES, WELCOME_MESSAGE_BYTES, initiator};
use crate::keys::{PrivateKey, PublicKey};
use crate::schedule::{Binding, Sender, first_secrets};
use crate::seal::{Aead, FRAMES_PER_KEY, SessionSeal};

/// A client's trust in its IOhost. Each engine of the client has one.
#[derive(Debug, Default)]
pub struct ClientTrust(Option<Invited>);

/// Keys, and the handshake that has begun.
struct Invited {
    own: PrivateKey,
    iohost: PublicKey,
    frames_per_key: u64,
    begun: Option<(HandshakeState, u64)>,
}

impl ClientTrust {
    /// Encryption is off: the IOhost is believed.
    #[must_use]
    pub const fn off() -> Self {
        Self(None)
    }

    /// Trusts the IOhost that has written this invitation, and no other.
    #[must_use]
    pub fn invited(invitation: &Invitation) -> Self {
        Self(Some(Invited {
            own: invitation.key.clone(),
            iohost: invitation.iohost,
            frames_per_key: FRAMES_PER_KEY,
            begun: None,
        }))
    }

    /// Changes keys after fewer frames than [`FRAMES_PER_KEY`]. Tests see a change of keys so.
    #[must_use]
    pub fn frames_per_key(mut self, frames: u64) -> Self {
        if let Some(invited) = &mut self.0 {
            invited.frames_per_key = frames;
        }
        self
    }
}

impl fmt::Debug for Invited {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "client {} of IOhost {}", self.own.public(), self.iohost)
    }
}

impl ClientHandshake for ClientTrust {
    type Seal = SessionSeal;

    fn code(&self) -> u8 {
        if self.0.is_some() { code::NOISE } else { code::PLAIN }
    }

    fn hello(&mut self, fields: &Hello, message: &mut [u8]) -> Option<usize> {
        let Some(invited) = &mut self.0 else {
            *message.first_chunk_mut()? = fields.encode();
            return Some(Hello::BYTES);
        };
        let mut state = initiator(&invited.own, &invited.iohost)?;
        let len = state.write_message(&fields.encode(), message).ok()?;
        invited.begun = Some((state, fields.queue.into()));
        Some(len)
    }

    fn welcome(&mut self, message: &[u8]) -> Option<(Welcome, SessionSeal)> {
        let Some(invited) = &mut self.0 else {
            return Some((Welcome::decode(message.first_chunk()?), SessionSeal::Plain));
        };
        let (state, queue) = invited.begun.as_mut()?;
        let mut payload = Zeroizing::new([0; WELCOME_BYTES]);
        // A message that is not the IOhost's leaves the state as it was.
        let message: &[u8; WELCOME_MESSAGE_BYTES] = message.try_into().ok()?;
        state.read_message(message, payload.as_mut_slice()).ok()?;
        let fields = Welcome::decode(payload.first_chunk()?);
        let binding = Binding { session: fields.session, queue: *queue };
        let secret: &[u8; SECRET_BYTES] = payload.last_chunk()?;
        let (client, host) = first_secrets(secret, state.get_handshake_hash(), binding)?;
        invited.begun = None;
        let aead = Aead::new(Sender::Client, (&client, &host), invited.frames_per_key)?;
        Some((fields, SessionSeal::Aead(Box::new(aead))))
    }
}
