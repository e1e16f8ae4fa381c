//! The primitives that `snow` runs on: those of `ring`, and X25519 of `curve25519-dalek`, because
//! ring's can have no static keys.

use curve25519_dalek::MontgomeryPoint;
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use ring::digest;
use ring::rand::{SecureRandom, SystemRandom};
use snow::params::{CipherChoice, DHChoice, HashChoice};
use snow::resolvers::CryptoResolver;
use snow::types::{Cipher, Dh, Hash, Random};
use zeroize::Zeroizing;

/// Size of the tag of a sealed message.
pub(crate) const TAG_BYTES: usize = 16;
/// Size of a nonce.
pub(crate) const NONCE_BYTES: usize = 12;

/// Random bytes of the kernel. False if it has none.
pub(crate) fn fill_random(bytes: &mut [u8]) -> bool {
    SystemRandom::new().fill(bytes).is_ok()
}

/// The public key of a private one (RFC 7748, section 5).
pub(crate) fn x25519_public(private: &[u8; 32]) -> [u8; 32] {
    MontgomeryPoint::mul_base_clamped(*private).to_bytes()
}

/// Seals in place: `sealed` is a message and room for its tag. False if it has no such room; then
/// it is all zeros.
pub(crate) fn seal(
    key: &LessSafeKey,
    nonce: [u8; NONCE_BYTES],
    associated: &[u8],
    sealed: &mut [u8],
) -> bool {
    let Some((message, room)) = sealed.split_last_chunk_mut::<TAG_BYTES>() else {
        sealed.fill(0);
        return false;
    };
    let nonce = Nonce::assume_unique_for_key(nonce);
    match key.seal_in_place_separate_tag(nonce, Aad::from(associated), message) {
        Ok(tag) => {
            room.iter_mut().zip(tag.as_ref()).for_each(|(to, from)| *to = *from);
            true
        }
        // Too long for the cipher.
        Err(_) => {
            sealed.fill(0);
            false
        }
    }
}

/// Opens in place. False if the key has not sealed it; then the message is lost.
pub(crate) fn open(
    key: &LessSafeKey,
    nonce: [u8; NONCE_BYTES],
    associated: &[u8],
    sealed: &mut [u8],
) -> bool {
    let nonce = Nonce::assume_unique_for_key(nonce);
    key.open_in_place(nonce, Aad::from(associated), sealed).is_ok()
}

/// A key of AES-256-GCM.
pub(crate) fn aead_key(key: &[u8; 32]) -> Option<LessSafeKey> {
    UnboundKey::new(&AES_256_GCM, key).ok().map(LessSafeKey::new)
}

/// Finds the primitives of `Noise_IK_25519_AESGCM_SHA256`, and no others.
pub(crate) struct Primitives;

impl CryptoResolver for Primitives {
    fn resolve_rng(&self) -> Option<Box<dyn Random>> {
        Some(Box::new(KernelRandom))
    }

    fn resolve_dh(&self, choice: &DHChoice) -> Option<Box<dyn Dh>> {
        matches!(choice, DHChoice::Curve25519).then(|| Box::<X25519>::default() as _)
    }

    fn resolve_hash(&self, choice: &HashChoice) -> Option<Box<dyn Hash>> {
        matches!(choice, HashChoice::SHA256).then(|| Box::<Sha256>::default() as _)
    }

    fn resolve_cipher(&self, choice: &CipherChoice) -> Option<Box<dyn Cipher>> {
        matches!(choice, CipherChoice::AESGCM).then(|| Box::<AesGcm>::default() as _)
    }
}

struct KernelRandom;

impl Random for KernelRandom {
    fn try_fill_bytes(&mut self, bytes: &mut [u8]) -> Result<(), snow::Error> {
        if fill_random(bytes) { Ok(()) } else { Err(snow::Error::Rng) }
    }
}

#[derive(Default)]
struct X25519 {
    private: Zeroizing<[u8; 32]>,
    public: [u8; 32],
}

impl Dh for X25519 {
    fn name(&self) -> &'static str {
        "25519"
    }

    fn pub_len(&self) -> usize {
        32
    }

    fn priv_len(&self) -> usize {
        32
    }

    fn set(&mut self, private: &[u8]) {
        if let Some(private) = private.first_chunk() {
            self.private = Zeroizing::new(*private);
            self.public = x25519_public(private);
        }
    }

    fn generate(&mut self, random: &mut dyn Random) -> Result<(), snow::Error> {
        random.try_fill_bytes(self.private.as_mut_slice())?;
        self.public = x25519_public(&self.private);
        Ok(())
    }

    fn pubkey(&self) -> &[u8] {
        &self.public
    }

    fn privkey(&self) -> &[u8] {
        self.private.as_slice()
    }

    /// Fails for the few public keys whose secret is zero whatever the private key is: a peer that
    /// sends one would make the secret known to all (RFC 7748, section 6.1).
    fn dh(&self, public: &[u8], secret: &mut [u8]) -> Result<(), snow::Error> {
        let public = public.first_chunk().ok_or(snow::Error::Dh)?;
        let to = secret.first_chunk_mut().ok_or(snow::Error::Dh)?;
        let shared = Zeroizing::new(MontgomeryPoint(*public).mul_clamped(*self.private).to_bytes());
        let any = shared.iter().fold(0, |any, byte| any | byte);
        if any == 0 {
            return Err(snow::Error::Dh);
        }
        *to = *shared;
        Ok(())
    }
}

struct Sha256(digest::Context);

impl Default for Sha256 {
    fn default() -> Self {
        Self(digest::Context::new(&digest::SHA256))
    }
}

impl Hash for Sha256 {
    fn name(&self) -> &'static str {
        "SHA256"
    }

    fn block_len(&self) -> usize {
        64
    }

    fn hash_len(&self) -> usize {
        32
    }

    fn reset(&mut self) {
        *self = Self::default();
    }

    fn input(&mut self, data: &[u8]) {
        self.0.update(data);
    }

    fn result(&mut self, out: &mut [u8]) {
        let digest = self.0.clone().finish();
        out.iter_mut().zip(digest.as_ref()).for_each(|(to, from)| *to = *from);
    }
}

/// Without a key it seals nothing and opens nothing.
#[derive(Default)]
struct AesGcm(Option<LessSafeKey>);

impl AesGcm {
    /// Noise, section 12.4: 32 zero bits, then the counter, big-endian.
    fn nonce(counter: u64) -> [u8; NONCE_BYTES] {
        let mut nonce = [0; NONCE_BYTES];
        if let Some(low) = nonce.last_chunk_mut() {
            *low = counter.to_be_bytes();
        }
        nonce
    }
}

impl Cipher for AesGcm {
    fn name(&self) -> &'static str {
        "AESGCM"
    }

    fn set(&mut self, key: &[u8; 32]) {
        self.0 = aead_key(key);
    }

    fn encrypt(&self, counter: u64, associated: &[u8], message: &[u8], out: &mut [u8]) -> usize {
        let len = message.len().saturating_add(TAG_BYTES);
        let Some(sealed) = out.get_mut(..len) else { return 0 };
        sealed.iter_mut().zip(message).for_each(|(to, from)| *to = *from);
        match &self.0 {
            Some(key) => _ = seal(key, Self::nonce(counter), associated, sealed),
            None => sealed.fill(0),
        }
        len
    }

    fn decrypt(
        &self,
        counter: u64,
        associated: &[u8],
        sealed: &[u8],
        out: &mut [u8],
    ) -> Result<usize, snow::Error> {
        let key = self.0.as_ref().ok_or(snow::Error::Decrypt)?;
        let mut copy = Zeroizing::new(sealed.to_vec());
        let nonce = Nonce::assume_unique_for_key(Self::nonce(counter));
        let message = key
            .open_in_place(nonce, Aad::from(associated), &mut copy)
            .map_err(|_| snow::Error::Decrypt)?;
        let out = out.get_mut(..message.len()).ok_or(snow::Error::Decrypt)?;
        out.copy_from_slice(message);
        Ok(out.len())
    }
}
