//! Keys from passphrases: argon2 (RFC 9106) and PBKDF2 (RFC 8018), within limits.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use argon2::{Algorithm, Argon2, Params, Version};
use sha2::{Sha256, Sha512};

use crate::error::LuksError;
use crate::split::Hash;

/// The most memory that a key slot may ask for: the default of cryptsetup.
pub const MAX_MEMORY_KIB: u32 = 1 << 20;
/// The most work of argon2 in KiB written, about a minute of a CPU.
const MAX_WORK_KIB: u64 = 64 << 20;
const MAX_LANES: u32 = 64;
/// About a minute of a CPU.
const MAX_ITERATIONS: u32 = 50_000_000;

/// The derivation of a key from a passphrase, with its costs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kdf {
    /// For passphrases that people choose: costs time and memory.
    Argon2id {
        /// Passes over the memory.
        passes: u32,
        /// In KiB.
        memory_kib: u32,
        /// Lanes of the memory, which may be computed side by side.
        lanes: u32,
    },
    /// For machines with little memory, and older programs: PBKDF2 with HMAC-SHA-256.
    Pbkdf2 {
        /// Repetitions of the hash.
        iterations: u32,
    },
}

impl Default for Kdf {
    /// The second recommendation of RFC 9106, 4: 64 MiB, so that a host with many disks can open
    /// them while its memory belongs to guests.
    fn default() -> Self {
        Self::Argon2id { passes: 3, memory_kib: 64 << 10, lanes: 4 }
    }
}

/// A derivation that a header asks for, within the limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Derivation {
    Argon2 { algorithm: Algorithm, passes: u32, memory_kib: u32, lanes: u32 },
    Pbkdf2 { hash: Hash, iterations: u32 },
}

/// One derivation at a time, so that a daemon that opens a hundred disks needs the memory of one.
/// In the order of arrival: a header with many expensive key slots delays others by one of them.
static DERIVING: Queue = Queue::new();

/// A lock that is given in the order in which it was asked for.
struct Queue {
    numbers: Mutex<Numbers>,
    changed: Condvar,
}

/// Each caller draws a number.
struct Numbers {
    next: u64,
    /// The number of the caller that has the lock, or gets it next.
    serving: u64,
}

/// The lock, until its drop.
struct Turn<'a>(&'a Queue);

impl Queue {
    const fn new() -> Self {
        Self { numbers: Mutex::new(Numbers { next: 0, serving: 0 }), changed: Condvar::new() }
    }

    fn numbers(&self) -> MutexGuard<'_, Numbers> {
        self.numbers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self) -> Turn<'_> {
        let mut numbers = self.numbers();
        let own = numbers.next;
        numbers.next = own.wrapping_add(1);
        let waits = |numbers: &mut Numbers| numbers.serving != own;
        drop(self.changed.wait_while(numbers, waits).unwrap_or_else(PoisonError::into_inner));
        Turn(self)
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut numbers = self.0.numbers();
        numbers.serving = numbers.serving.wrapping_add(1);
        drop(numbers);
        self.0.changed.notify_all();
    }
}

/// The time of a CPU that derivations may take, about four minutes: cryptsetup's defaults ask for
/// two seconds in each of 32 key slots.
pub(crate) const MAX_HEADER_WORK: u64 = 4 * WORK_OF_A_MINUTE;
const WORK_OF_A_MINUTE: u64 = 1_000_000;

impl Derivation {
    /// The work for a key of `key_bytes`: PBKDF2 repeats its iterations for each block of the hash
    /// (RFC 8018, 5.2).
    pub(crate) fn work(self, key_bytes: usize) -> u64 {
        let (amount, max) = match self {
            Self::Argon2 { passes, memory_kib, .. } => {
                (u64::from(memory_kib).saturating_mul(passes.into()), MAX_WORK_KIB)
            }
            Self::Pbkdf2 { hash, iterations } => {
                let blocks = key_bytes.div_ceil(hash.bytes()) as u64;
                (u64::from(iterations).saturating_mul(blocks), MAX_ITERATIONS.into())
            }
        };
        amount.saturating_mul(WORK_OF_A_MINUTE).div_ceil(max)
    }

    pub(crate) fn argon2(
        algorithm: Algorithm,
        (passes, memory_kib, lanes): (u32, u32, u32),
    ) -> Result<Self, LuksError> {
        let too_much =
            |cost: &'static str, value: u64, max: u64| LuksError::Cost { cost, value, max };
        if memory_kib > MAX_MEMORY_KIB {
            return Err(too_much("memory in KiB", memory_kib.into(), MAX_MEMORY_KIB.into()));
        }
        let work_kib = u64::from(memory_kib).saturating_mul(passes.into());
        if work_kib > MAX_WORK_KIB {
            return Err(too_much("memory times passes in KiB", work_kib, MAX_WORK_KIB));
        }
        if lanes > MAX_LANES {
            return Err(too_much("lanes", lanes.into(), MAX_LANES.into()));
        }
        Ok(Self::Argon2 { algorithm, passes, memory_kib, lanes })
    }

    pub(crate) fn pbkdf2(hash: Hash, iterations: u32) -> Result<Self, LuksError> {
        if iterations > MAX_ITERATIONS {
            let (value, max) = (iterations.into(), MAX_ITERATIONS.into());
            return Err(LuksError::Cost { cost: "iterations", value, max });
        }
        Ok(Self::Pbkdf2 { hash, iterations })
    }

    /// Fills `key`. Takes seconds, and memory.
    pub(crate) fn derive(
        self,
        passphrase: &[u8],
        salt: &[u8],
        key: &mut [u8],
    ) -> Result<(), LuksError> {
        let _turn = DERIVING.take();
        match self {
            Self::Argon2 { algorithm, passes, memory_kib, lanes } => {
                let malformed = |error: argon2::Error| LuksError::Derivation(error.to_string());
                let params = Params::new(memory_kib, passes, lanes, None).map_err(malformed)?;
                let mut memory = argon2_memory(&params)?;
                Argon2::new(algorithm, Version::V0x13, params)
                    .hash_password_into_with_memory(passphrase, salt, key, &mut memory)
                    .map_err(malformed)
            }
            Self::Pbkdf2 { hash: Hash::Sha256, iterations } => {
                pbkdf2::pbkdf2_hmac::<Sha256>(passphrase, salt, iterations, key);
                Ok(())
            }
            Self::Pbkdf2 { hash: Hash::Sha512, iterations } => {
                pbkdf2::pbkdf2_hmac::<Sha512>(passphrase, salt, iterations, key);
                Ok(())
            }
        }
    }
}

/// Memory for argon2: an error if there is none, where a vector would end the process.
fn argon2_memory(params: &Params) -> Result<Vec<argon2::Block>, LuksError> {
    let mut memory = Vec::new();
    let blocks = params.block_count();
    memory
        .try_reserve_exact(blocks)
        .map_err(|_| LuksError::Derivation(format!("no memory for {} KiB", params.m_cost())))?;
    memory.resize(blocks, argon2::Block::default());
    Ok(memory)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn costs_beyond_the_limits_are_refused() {
        let argon2 = |costs| Derivation::argon2(Algorithm::Argon2id, costs);
        assert!(argon2((4, MAX_MEMORY_KIB, 4)).is_ok());
        for costs in [(1, MAX_MEMORY_KIB + 1, 4), (65, MAX_MEMORY_KIB, 4), (1, 1 << 16, 65)] {
            assert!(matches!(argon2(costs), Err(LuksError::Cost { .. })), "{costs:?}");
        }
        assert!(Derivation::pbkdf2(Hash::Sha512, MAX_ITERATIONS).is_ok());
        assert!(Derivation::pbkdf2(Hash::Sha512, MAX_ITERATIONS + 1).is_err());
    }

    #[test]
    fn work_is_in_minutes_and_counts_the_blocks_of_a_hash() {
        let argon2 = Derivation::argon2(Algorithm::Argon2id, (64, MAX_MEMORY_KIB, 4)).unwrap();
        assert_eq!(argon2.work(64), WORK_OF_A_MINUTE);
        let pbkdf2 = |hash| Derivation::pbkdf2(hash, MAX_ITERATIONS).unwrap();
        assert_eq!(pbkdf2(Hash::Sha512).work(64), WORK_OF_A_MINUTE);
        assert_eq!(pbkdf2(Hash::Sha256).work(64), 2 * WORK_OF_A_MINUTE);
    }

    /// A thread that takes the lock again and again gets it behind those that wait.
    #[test]
    fn the_lock_is_given_in_the_order_of_arrival() {
        let queue = Queue::new();
        let order = Mutex::new(Vec::new());
        std::thread::scope(|scope| {
            let turn = queue.take();
            scope.spawn(|| {
                let _turn = queue.take();
                order.lock().unwrap().push("other");
            });
            while queue.numbers().next < 2 {
                std::thread::yield_now();
            }
            drop(turn);
            let _turn = queue.take();
            order.lock().unwrap().push("again");
        });
        assert_eq!(*order.lock().unwrap(), ["other", "again"]);
    }

    #[test]
    fn impossible_costs_are_errors() {
        for costs in [(0, 64, 1), (1, 0, 1), (1, 64, 0), (1, 7, 1), (1, 64, 60)] {
            let derivation = Derivation::argon2(Algorithm::Argon2id, costs).unwrap();
            let refused = derivation.derive(b"secret", &[1; 16], &mut [0; 64]);
            assert!(matches!(refused, Err(LuksError::Derivation(_))), "{costs:?}");
        }
        let derivation = Derivation::argon2(Algorithm::Argon2id, (1, 64, 1)).unwrap();
        assert!(derivation.derive(b"secret", &[1; 3], &mut [0; 64]).is_err(), "a short salt");
    }
}
