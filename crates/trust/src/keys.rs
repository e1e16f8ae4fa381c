//! Keys of X25519.

use std::fmt;

use zeroize::Zeroizing;

use crate::crypto::{fill_random, x25519_public};
use crate::error::KeyError;

/// The public key of a client or an IOhost.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PublicKey(pub [u8; 32]);

impl fmt::Display for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The private key of a client or an IOhost. It is wiped when it is dropped, and never printed.
#[derive(Clone)]
pub struct PrivateKey {
    private: Zeroizing<[u8; 32]>,
    public: PublicKey,
}

impl PrivateKey {
    /// A new key.
    ///
    /// # Errors
    /// The kernel has no random bytes.
    pub fn generate() -> Result<Self, KeyError> {
        let mut private = Zeroizing::new([0; 32]);
        if !fill_random(private.as_mut_slice()) {
            return Err(KeyError::NoRandomBytes);
        }
        Ok(Self::from_bytes(&private))
    }

    /// The key with these bytes.
    #[must_use]
    pub fn from_bytes(private: &[u8; 32]) -> Self {
        let public = PublicKey(x25519_public(private));
        Self { private: Zeroizing::new(*private), public }
    }

    /// Its public key.
    #[must_use]
    pub const fn public(&self) -> PublicKey {
        self.public
    }

    pub(crate) fn as_bytes(&self) -> &[u8; 32] {
        &self.private
    }
}

impl fmt::Debug for PrivateKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PrivateKey(of {})", self.public)
    }
}
