//! The anti-forensic splitter (TKS1, 2.4): a key becomes stripes, all of which are needed.

use sha2::digest::Digest;
use sha2::{Sha256, Sha512};
use zeroize::Zeroizing;

use crate::xts::KEY_BYTES;

/// A hash that headers name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hash {
    Sha256,
    Sha512,
}

impl Hash {
    /// The size of a hash.
    pub(crate) const fn bytes(self) -> usize {
        match self {
            Self::Sha256 => 32,
            Self::Sha512 => 64,
        }
    }

    pub(crate) fn from_name(name: &str) -> Option<Self> {
        match name {
            "sha256" => Some(Self::Sha256),
            "sha512" => Some(Self::Sha512),
            _ => None,
        }
    }

    /// Makes each bit of the stripe depend on those of its part of the stripe.
    fn diffuse(self, stripe: &mut [u8; KEY_BYTES]) {
        match self {
            Self::Sha256 => diffuse::<Sha256>(stripe),
            Self::Sha512 => diffuse::<Sha512>(stripe),
        }
    }
}

fn diffuse<H: Digest>(stripe: &mut [u8; KEY_BYTES]) {
    for (index, part) in (0_u32..).zip(stripe.chunks_mut(<H as Digest>::output_size())) {
        let digest = H::new().chain_update(index.to_be_bytes()).chain_update(&*part).finalize();
        part.iter_mut().zip(digest).for_each(|(to, from)| *to = from);
    }
}

fn mask(to: &mut [u8; KEY_BYTES], with: &[u8]) {
    to.iter_mut().zip(with).for_each(|(to, with)| *to ^= with);
}

/// The key that these stripes make.
pub(crate) fn merge(stripes: &[u8], hash: Hash) -> Zeroizing<[u8; KEY_BYTES]> {
    let mut key = Zeroizing::new([0; KEY_BYTES]);
    let mut stripes = stripes.chunks_exact(KEY_BYTES).peekable();
    while let Some(stripe) = stripes.next() {
        mask(&mut key, stripe);
        if stripes.peek().is_some() {
            hash.diffuse(&mut key);
        }
    }
    key
}

/// Fills the last stripe, so that all of them make `key`. The others are random bytes.
pub(crate) fn split(key: &[u8; KEY_BYTES], stripes: &mut [u8], hash: Hash) {
    let Some((others, last)) =
        stripes.len().checked_sub(KEY_BYTES).and_then(|at| stripes.split_at_mut_checked(at))
    else {
        return;
    };
    let mut state = Zeroizing::new([0; KEY_BYTES]);
    for stripe in others.chunks_exact(KEY_BYTES) {
        mask(&mut state, stripe);
        hash.diffuse(&mut state);
    }
    mask(&mut state, key);
    last.iter_mut().zip(*state).for_each(|(to, from)| *to = from);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_stripes_together_make_the_key() {
        for hash in [Hash::Sha256, Hash::Sha512] {
            for count in [1, 2, 5, 4000] {
                let key: [u8; KEY_BYTES] = std::array::from_fn(|at| at as u8);
                let mut stripes: Vec<u8> =
                    (0..count * KEY_BYTES).map(|at| (at * at / 3) as u8).collect();
                split(&key, &mut stripes, hash);
                assert_eq!(*merge(&stripes, hash), key);
                stripes[count * KEY_BYTES / 2] ^= 1;
                assert_ne!(*merge(&stripes, hash), key);
            }
        }
        assert!(Hash::from_name("md5").is_none());
    }
}
