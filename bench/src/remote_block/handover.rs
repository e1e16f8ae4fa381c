//! The peer `handover`: one core writes the data of a request into shared memory, the other one
//! copies them out, and nothing else happens.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use anyhow::{Context, Result};
use quanta::Clock;
use sidecore_memory::{GuestAddress, GuestMemory, RegionHint, SharedPages};

use super::client::Silence;
use super::exchange::RoundTrips;
use crate::cores::{Gate, Gated};
use crate::load::{Sample, Work};
use crate::process::watched;

/// Requests that the memory has room for.
const SLOTS: u64 = 128;

/// A counter alone on its cache line (and on the line that the prefetcher pairs it with).
#[repr(align(128))]
#[derive(Debug, Default)]
struct Line(AtomicU64);

/// The state that both cores share.
#[derive(Debug)]
struct Shared {
    memory: GuestMemory,
    asked: Line,
    answered: Line,
    is_over: AtomicBool,
}

impl Shared {
    fn place(&self, number: u64, bytes: u32) -> GuestAddress {
        GuestAddress(number % SLOTS * u64::from(bytes))
    }

    #[inline]
    fn put(&self, number: u64, data: &[u8], hint: &mut RegionHint) -> Result<()> {
        Ok(self.memory.write_slice(self.place(number, data.len() as u32), data, hint)?)
    }

    #[inline]
    fn take(&self, number: u64, data: &mut [u8], hint: &mut RegionHint) -> Result<()> {
        Ok(self.memory.read_slice(self.place(number, data.len() as u32), data, hint)?)
    }

    /// The other core: answers each request.
    fn serve(&self, work: &Work) -> Result<()> {
        let (mut data, mut hint) = (vec![0x5a; work.bytes as usize], RegionHint::default());
        let mut answered = self.answered.0.load(Ordering::Relaxed);
        while !self.is_over.load(Ordering::Relaxed) {
            let asked = self.asked.0.load(Ordering::Acquire);
            if asked == answered {
                std::hint::spin_loop();
            }
            while answered < asked {
                if work.write {
                    self.take(answered, &mut data, &mut hint)?;
                } else {
                    self.put(answered, &data, &mut hint)?;
                }
                answered += 1;
                self.answered.0.store(answered, Ordering::Release);
            }
        }
        Ok(())
    }

    /// This core: keeps `work.depth` requests in flight.
    fn ask(&self, work: &Work, clock: &Clock) -> Result<Sample> {
        let (mut data, mut hint) = (vec![0xa5; work.bytes as usize], RegionHint::default());
        let (depth, mut silence) = (u64::from(work.depth), Silence::default());
        let (mut asked, mut taken) = (0, 0);
        let mut round_trips = RoundTrips::new(work, clock);
        while !round_trips.is_over() {
            while asked < taken + depth {
                if work.write {
                    self.put(asked, &data, &mut hint)?;
                }
                asked += 1;
                self.asked.0.store(asked, Ordering::Release);
            }
            let answered = self.answered.0.load(Ordering::Acquire);
            let count = answered - taken;
            while taken < answered {
                if !work.write {
                    self.take(taken, &mut data, &mut hint)?;
                }
                taken += 1;
            }
            silence.look(count > 0)?;
            round_trips.add(usize::try_from(count)?);
        }
        Ok(round_trips.sample())
    }
}

/// Hands the data of `work` over between this core and the partner's.
///
/// # Errors
/// The machine has not enough memory; the partner died; an interrupt.
pub(super) fn run(gate: &mut Gate, work: &Work, clock: &Clock) -> Result<Gated<Sample>> {
    let bytes = usize::try_from(SLOTS * u64::from(work.bytes))?;
    gate.run(|partner| {
        watched(|| {
            let shared = Arc::new(Shared {
                memory: SharedPages::new("handover", bytes)?.memory().clone(),
                asked: Line::default(),
                answered: Line::default(),
                is_over: AtomicBool::new(false),
            });
            let (theirs, their_work) = (Arc::clone(&shared), *work);
            let serving = partner.run(move || theirs.serve(&their_work))?;
            let sample = shared.ask(work, clock);
            shared.is_over.store(true, Ordering::Relaxed);
            serving.recv().context("the partner thread died")??;
            sample
        })
    })
}
