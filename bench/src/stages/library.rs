//! The cipher of the stage `encrypt` alone.

use std::time::Instant;

use anyhow::Result;
use sidecore_block::Operation;
use sidecore_luks::{Tweaks, Xts};
use sidecore_units::SECTOR_BYTES;

use super::Plan;
use super::cases::{Case, SECTOR, key};
use crate::load::Places;
use crate::stop;

const REQUESTS_PER_READING: u32 = 64;

/// A store's bytes, to which the cipher is applied in place, at the places of the stage's requests:
/// nothing is copied.
pub(super) struct Library {
    arena: Vec<u8>,
    cipher: Xts,
    tweaks: Tweaks,
    places: Places,
    bytes: usize,
    operation: Operation,
}

impl Library {
    /// The cipher on a store of this size.
    ///
    /// # Errors
    /// A request is larger than the machine's memory.
    pub(super) fn new(case: Case, store_bytes: u64) -> Result<Self> {
        Ok(Self {
            // Of other bytes than zeros, whose pages the kernel would share.
            arena: vec![0x5a; usize::try_from(store_bytes)?],
            cipher: key(),
            tweaks: Tweaks::default(),
            places: Places::new(store_bytes / case.load.bytes),
            bytes: usize::try_from(case.load.bytes)?,
            operation: case.load.operation,
        })
    }

    /// Applies the cipher for the time of the plan. Returns the requests a second.
    ///
    /// # Errors
    /// An interrupt.
    pub(super) fn run(&mut self, plan: &Plan) -> Result<f64> {
        let (start, mut count) = (Instant::now(), 0_u64);
        loop {
            for _ in 0..REQUESTS_PER_READING {
                let block = self.places.next_block();
                let from = usize::try_from(block)? * self.bytes;
                let data = &mut self.arena[from..from + self.bytes];
                let unit = block * self.bytes as u64 / SECTOR_BYTES;
                match self.operation {
                    Operation::Write => {
                        self.cipher.encrypt(unit, SECTOR, data, &mut self.tweaks)?
                    }
                    _ => self.cipher.decrypt(unit, SECTOR, data, &mut self.tweaks)?,
                }
            }
            count += u64::from(REQUESTS_PER_READING);
            if start.elapsed() >= plan.measured {
                return Ok(count as f64 / start.elapsed().as_secs_f64());
            }
            stop::check()?;
        }
    }
}
