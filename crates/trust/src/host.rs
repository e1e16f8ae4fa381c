//! The IOhost's side of the handshake.

use std::fmt;

use sidecore_vrio::handshake::{HostHandshake, code};
use sidecore_vrio::wire::{Hello, Welcome};
use snow::HandshakeState;
use zeroize::Zeroizing;

use crate::crypto::fill_random;
use crate::handshake::{HELLO_MESSAGE_BYTES, SECRET_BYTES, WELCOME_BYTES, responder};
use crate::keys::{PrivateKey, PublicKey};
use crate::name::ClientName;
use crate::schedule::{Binding, Sender, first_secrets};
use crate::seal::{Aead, FRAMES_PER_KEY, SessionSeal};

/// The proof that an IOhost asks of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// The private key that belongs to this public key.
    Key(PublicKey),
    /// None: encryption is off for the client, and its name is believed.
    Name,
}

/// An IOhost's trust in its clients. Each link queue has one, of the clients that may come there.
#[derive(Debug)]
pub struct HostTrust {
    key: Option<PrivateKey>,
    clients: Vec<(ClientName, Admission)>,
    frames_per_key: u64,
}

impl HostTrust {
    /// Admits these clients. An IOhost whose clients all have encryption off needs no key.
    #[must_use]
    pub fn new(key: Option<PrivateKey>, clients: Vec<(ClientName, Admission)>) -> Self {
        Self { key, clients, frames_per_key: FRAMES_PER_KEY }
    }

    /// Changes keys after fewer frames than [`FRAMES_PER_KEY`]. Tests see a change of keys so.
    #[must_use]
    pub fn frames_per_key(mut self, frames: u64) -> Self {
        self.frames_per_key = frames;
        self
    }

    /// Admits these clients from now on, and no others. Sessions that exist go on: the caller ends
    /// those of clients that were revoked.
    pub fn admit(&mut self, clients: Vec<(ClientName, Admission)>) {
        self.clients = clients;
    }

    /// Replaces this host's key. The clients that are admitted stay so.
    pub fn set_key(&mut self, key: PrivateKey) {
        self.key = Some(key);
    }

    fn admits(&self, name: &[u8; ClientName::MAX_BYTES], admission: Admission) -> bool {
        let mut clients = self.clients.iter();
        clients.any(|(client, asked)| client.to_wire() == *name && *asked == admission)
    }

    fn open(&self, message: &[u8]) -> Option<(Hello, Pending)> {
        // Nothing may follow what is proved: a HELLO is known again by the whole of its message.
        let message: &[u8; HELLO_MESSAGE_BYTES] = message.try_into().ok()?;
        let mut state = responder(self.key.as_ref()?)?;
        let mut payload = [0; Hello::BYTES];
        state.read_message(message, &mut payload).ok()?;
        let fields = Hello::decode(&payload);
        let key = PublicKey(*state.get_remote_static()?.first_chunk()?);
        let pending = Pending { state: Some(Box::new(state)), queue: fields.queue.into() };
        self.admits(&fields.client, Admission::Key(key)).then_some((fields, pending))
    }
}

/// A handshake whose HELLO was opened.
pub struct Pending {
    /// `None` for a client without encryption.
    state: Option<Box<HandshakeState>>,
    queue: u64,
}

impl fmt::Debug for Pending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pending").field("queue", &self.queue).finish_non_exhaustive()
    }
}

impl HostHandshake for HostTrust {
    type Seal = SessionSeal;
    type Pending = Pending;

    fn hello(&mut self, code: u8, message: &[u8]) -> Option<(Hello, Pending)> {
        match code {
            code::NOISE => self.open(message),
            code::PLAIN => {
                let fields = Hello::decode(message.first_chunk()?);
                let pending = Pending { state: None, queue: fields.queue.into() };
                self.admits(&fields.client, Admission::Name).then_some((fields, pending))
            }
            _ => None,
        }
    }

    fn welcome(
        &mut self,
        pending: Pending,
        fields: &Welcome,
        message: &mut [u8],
    ) -> Option<(usize, SessionSeal)> {
        let Some(mut state) = pending.state else {
            *message.first_chunk_mut()? = fields.encode();
            return Some((Welcome::BYTES, SessionSeal::Plain));
        };
        let mut payload = Zeroizing::new([0; WELCOME_BYTES]);
        *payload.first_chunk_mut()? = fields.encode();
        let secret: &mut [u8; SECRET_BYTES] = payload.last_chunk_mut()?;
        if !fill_random(secret) {
            return None;
        }
        let secret = Zeroizing::new(*secret);
        let len = state.write_message(payload.as_slice(), message).ok()?;
        let binding = Binding { session: fields.session, queue: pending.queue };
        let (client, host) = first_secrets(&secret, state.get_handshake_hash(), binding)?;
        let aead = Aead::new(Sender::Host, (&client, &host), self.frames_per_key)?;
        Some((len, SessionSeal::Aead(Box::new(aead))))
    }
}
