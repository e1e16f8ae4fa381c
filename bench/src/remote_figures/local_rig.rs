//! A guest's driver and a local sidecore in one process and on one core, with readings of the time
//! stamp counter between the stages of their requests.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use quanta::Clock;
use sidecore_block::{BlockDevice, Operation};
use sidecore_driver::{ClientOptions, Loopback, Queue, Slot};
use sidecore_reactor::{CoreContext, IdleMode, Pollable as _};
use sidecore_ring::RingState;
use sidecore_units::{Nanos, SECTOR_BYTES, Sector};
use sidecore_virtio::QueueResources;
use sidecore_virtio::blk::{BlkDevice, BlkOptions, BlkQueue};

use crate::load::Places;
use crate::stop;

/// As a sidecore polls.
const BUDGET: usize = 32;
/// Polls in which a request has to end.
const PATIENCE: u32 = 1 << 20;

/// A disk with one virtqueue.
pub(super) struct LocalRig {
    clock: Clock,
    capacity_bytes: u64,
    driver: sidecore_driver::BlkQueue,
    device: BlkQueue,
}

impl LocalRig {
    /// Makes a disk on `store` for at most `slots` requests of `slot_bytes` each.
    ///
    /// # Errors
    /// There is not enough memory.
    pub(super) fn new(
        clock: &Clock,
        store: &dyn BlockDevice,
        slots: u16,
        slot_bytes: u32,
    ) -> Result<Self> {
        let options = ClientOptions { slots, slot_bytes, ..ClientOptions::default() };
        let geometry = store.geometry();
        let disk = Arc::new(BlkDevice::new("disk", BlkOptions::default(), geometry));
        let features = disk.features();
        let Loopback { queue: driver, memory, layout, kick, call, error } =
            Loopback::new(&options, features)?;
        let depth = usize::from(layout.size);
        let fresh = RingState::fresh(layout.format);
        let channel = store.open_channel(&CoreContext::default(), depth)?;
        let (kick, call, err) = (Some(kick), Some(call), Some(error));
        let (log, is_enabled) = (None, true);
        let resources =
            QueueResources { memory, layout, features, kick, call, err, log, is_enabled };
        let (mode, signal) = (IdleMode::Poll, sidecore_linux::peer_event);
        let device = BlkQueue::new(&disk, 0, resources, fresh, channel, mode, signal)?;
        let capacity_bytes = geometry.capacity_bytes;
        Ok(Self { clock: clock.clone(), capacity_bytes, driver, device })
    }

    /// Carries out so many requests of an operation and a size, in batches of `depth`. Returns the
    /// nanoseconds of a request at the guest and at the sidecore.
    ///
    /// # Errors
    /// A request fails or does not end; an interrupt.
    pub(super) fn run(
        &mut self,
        (operation, bytes, depth): (Operation, u32, u64),
        count: usize,
    ) -> Result<[f64; 2]> {
        let slots: Vec<Slot> = (0..depth).map_while(|_| self.driver.take_slot()).collect();
        ensure!(slots.len() as u64 == depth, "a queue has too few slots");
        let mut places = Places::new(self.capacity_bytes / u64::from(bytes));
        let mut completions = Vec::with_capacity(slots.len());
        let (mut guest, mut sidecore, mut done) = (0_u64, 0_u64, 0_usize);
        while done < count {
            stop::check()?;
            let start = self.clock.raw();
            for slot in &slots {
                let sector = Sector(places.next_block() * u64::from(bytes) / SECTOR_BYTES);
                if operation == Operation::Write {
                    self.driver.submit_write(*slot, sector, bytes)?;
                } else {
                    self.driver.submit_read(*slot, sector, bytes)?;
                }
            }
            self.driver.publish()?;
            guest += self.clock.raw() - start;
            completions.clear();
            let mut polls = 0;
            while completions.len() < slots.len() {
                let polled = self.clock.raw();
                self.device.poll(Nanos(polled), BUDGET);
                let ended = self.clock.raw();
                self.driver.poll_completions(&mut completions)?;
                sidecore += ended - polled;
                guest += self.clock.raw() - ended;
                polls += 1;
                ensure!(polls < PATIENCE, "the device does not answer");
            }
            for completion in &completions {
                let (_, is_ok) = <sidecore_driver::BlkQueue as Queue>::outcome(*completion);
                ensure!(is_ok, "the device fails a request: {completion:?}");
            }
            done += completions.len();
        }
        slots.into_iter().for_each(|slot| self.driver.release_slot(slot));
        self.driver.take_calls();
        let done = u64::try_from(done).context("too many requests")?;
        let ns = |ticks| self.clock.delta_as_nanos(0, ticks) as f64 / done as f64;
        Ok([ns(guest), ns(sidecore)])
    }
}
