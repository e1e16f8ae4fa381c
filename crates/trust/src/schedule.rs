//! The keys of frames: HKDF with SHA-256 (RFC 5869) from the secret of a handshake.
//!
//! ```text
//! secret, hash ─ extract ─┬─ "client", session, queue ─► secret 0 ─ "ratchet" ─► secret 1 ...
//!                         │                                └─ "key", "iv"          └─ ...
//!                         └─ "IOhost", session, queue ─► secret 0 ...
//! ```

use ring::aead::LessSafeKey;
use ring::hkdf::{HKDF_SHA256, KeyType, Prk, Salt};
use sidecore_vrio::wire::VERSION;
use zeroize::Zeroizing;

use crate::crypto::{NONCE_BYTES, aead_key, open, seal};

/// A secret of 32 bytes, wiped when it is dropped.
pub(crate) type Secret = Zeroizing<[u8; 32]>;

/// The sender of the frames that a chain of keys is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sender {
    /// The client.
    Client,
    /// The IOhost.
    Host,
}

/// The facts of a session that its keys depend on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Binding {
    /// The session's name.
    pub(crate) session: u64,
    /// The client's link queue.
    pub(crate) queue: u64,
}

/// The first secret of each direction: of the client's frames, and of the IOhost's.
pub(crate) fn first_secrets(
    secret: &[u8; 32],
    handshake_hash: &[u8],
    binding: Binding,
) -> Option<(Secret, Secret)> {
    let root = Salt::new(HKDF_SHA256, handshake_hash).extract(secret);
    let of = |sender| {
        let label: &[u8] = match sender {
            Sender::Client => b"client",
            Sender::Host => b"IOhost",
        };
        let (session, queue) = (binding.session.to_le_bytes(), binding.queue.to_le_bytes());
        expand::<32>(&root, &[b"sidecore vrio ", &[VERSION], label, &session, &queue])
    };
    Some((of(Sender::Client)?, of(Sender::Host)?))
}

/// A length of output.
struct Bytes(usize);

impl KeyType for Bytes {
    fn len(&self) -> usize {
        self.0
    }
}

fn expand<const N: usize>(prk: &Prk, info: &[&[u8]]) -> Option<Zeroizing<[u8; N]>> {
    let mut bytes = Zeroizing::new([0; N]);
    prk.expand(info, Bytes(N)).ok()?.fill(bytes.as_mut_slice()).ok()?;
    Some(bytes)
}

/// The key of one direction for some time, and the secret of the next one.
pub(crate) struct FrameKey {
    key: LessSafeKey,
    iv: [u8; NONCE_BYTES],
    next: Secret,
}

impl FrameKey {
    pub(crate) fn new(secret: &[u8; 32]) -> Option<Self> {
        let prk = Prk::new_less_safe(HKDF_SHA256, secret);
        Some(Self {
            key: aead_key(&*expand(&prk, &[b"key"])?)?,
            iv: *expand(&prk, &[b"iv"])?,
            next: expand(&prk, &[b"ratchet"])?,
        })
    }

    /// The following key. This one cannot be computed from it.
    pub(crate) fn next(&self) -> Option<Self> {
        Self::new(&self.next)
    }

    /// As in TLS 1.3 (RFC 8446, 5.3): the counter, big-endian, on a secret start.
    #[inline]
    fn nonce(&self, counter: u64) -> [u8; NONCE_BYTES] {
        let mut nonce = self.iv;
        let counter = counter.to_be_bytes();
        nonce.iter_mut().rev().zip(counter.iter().rev()).for_each(|(to, byte)| *to ^= byte);
        nonce
    }

    /// See [`seal`]. No counter may be used twice.
    #[inline]
    pub(crate) fn seal(&self, counter: u64, head: &[u8], sealed: &mut [u8]) -> bool {
        seal(&self.key, self.nonce(counter), head, sealed)
    }

    /// See [`open`].
    #[inline]
    pub(crate) fn open(&self, counter: u64, head: &[u8], sealed: &mut [u8]) -> bool {
        open(&self.key, self.nonce(counter), head, sealed)
    }
}
