//! The floor: a responder that takes requests from the same rings and answers them, with no parser
//! and no store. The responder polls at a fixed interval.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result};
use quanta::Clock;
use sidecore_driver::{
    BlkQueue, ClientOptions, Loopback, NvmeLoopback, NvmeOptions, NvmeQueue, features,
};
use sidecore_memory::{GuestMemory, RegionHint};
use sidecore_ring::driver::nvme::DoorbellWords;
use sidecore_ring::nvme::{Completion, CompletionQueue, SubmissionQueue};
use sidecore_ring::{Chain, DeviceRing, RingState};

use super::client::{self, Cost, Guest};
use crate::cores::{Gate, Gated, Partner};
use crate::process::watched;

/// A chain has a header, data and a status byte.
const DESCRIPTORS: usize = 3;

/// A queue with both of its ends.
pub(super) enum Floor {
    Virtio { queue: Box<BlkQueue>, responder: Option<VirtioResponder> },
    Nvme { queue: Box<NvmeQueue>, responder: Option<NvmeResponder> },
}

/// The device's end of a virtqueue.
pub(super) struct VirtioResponder {
    memory: GuestMemory,
    ring: DeviceRing,
    chain: Chain,
    hint: RegionHint,
}

/// The controller's end of an NVMe queue pair.
pub(super) struct NvmeResponder {
    commands: SubmissionQueue,
    completions: CompletionQueue,
    tail: DoorbellWords,
}

/// The device's end of a queue.
trait Respond: Send {
    /// Answers all queued requests.
    fn poll(&mut self) -> Result<()>;
}

impl Respond for VirtioResponder {
    #[inline]
    fn poll(&mut self) -> Result<()> {
        let mut found = false;
        while let Some(token) = self.ring.pop(&self.memory, &mut self.chain)? {
            let status =
                self.chain.writable().last().context("a chain without a status byte")?.address;
            self.memory.write_slice(status, &[0], &mut self.hint)?;
            self.ring.complete(token, 1);
            found = true;
        }
        if found {
            self.ring.publish();
            self.ring.keep_suppressed();
        }
        Ok(())
    }
}

impl Respond for NvmeResponder {
    #[inline]
    fn poll(&mut self) -> Result<()> {
        self.commands.set_tail(self.tail.load(0))?;
        while let Some(command) = self.commands.pop() {
            let command_id = u16::from_le_bytes([command[2], command[3]]);
            let sq_head = self.commands.head();
            self.completions.push(Completion {
                sq_head,
                sq_id: 1,
                command_id,
                ..Completion::default()
            });
            // The queue has twice as many entries as there are slots: no entry is overwritten
            // before the client has taken it.
            let _ = self.completions.set_head(self.completions.position().tail);
        }
        Ok(())
    }
}

impl Floor {
    /// Makes a virtqueue of the format that `options` select.
    ///
    /// # Errors
    /// The machine has not enough memory.
    pub(super) fn virtio(options: &ClientOptions) -> Result<Self> {
        let offered = features::RING_PACKED
            | features::EVENT_IDX
            | features::INDIRECT_DESC
            | features::VERSION_1;
        let Loopback { queue, memory, layout, .. } = Loopback::new(options, offered)?;
        let mut ring = DeviceRing::new(&memory, &layout, RingState::fresh(layout.format))?;
        ring.suppress_kicks();
        let chain = Chain::with_limit(DESCRIPTORS);
        let responder = VirtioResponder { memory, ring, chain, hint: RegionHint::default() };
        Ok(Self::Virtio { queue: Box::new(queue), responder: Some(responder) })
    }

    /// Makes an NVMe queue pair.
    ///
    /// # Errors
    /// The machine has not enough memory.
    pub(super) fn nvme(options: &NvmeOptions) -> Result<Self> {
        let NvmeLoopback { queue, memory, commands, completions, tail } =
            NvmeLoopback::new(options)?;
        let responder = NvmeResponder {
            commands: SubmissionQueue::new(&memory, commands.0, commands.1, 0)?,
            completions: CompletionQueue::new(&memory, completions.0, completions.1)?,
            tail,
        };
        Ok(Self::Nvme { queue: Box::new(queue), responder: Some(responder) })
    }

    /// Runs `guest` with the responder, which polls every `interval_ns`.
    ///
    /// # Errors
    /// An interrupt; the partner died.
    pub(super) fn run(
        &mut self,
        gate: &mut Gate,
        guest: &Guest,
        interval_ns: u64,
        clock: &Clock,
    ) -> Result<Gated<Cost>> {
        gate.run(|partner| {
            watched(|| match self {
                Self::Virtio { queue, responder } => {
                    against(partner, responder, interval_ns, clock, || {
                        client::run(queue.as_mut(), guest, clock)
                    })
                }
                Self::Nvme { queue, responder } => {
                    against(partner, responder, interval_ns, clock, || {
                        client::run(queue.as_mut(), guest, clock)
                    })
                }
            })
        })
    }
}

/// Runs `responder` on the server's core while `load` runs on this one.
fn against<R: Respond + 'static>(
    partner: &Partner,
    responder: &mut Option<R>,
    interval_ns: u64,
    clock: &Clock,
    load: impl FnOnce() -> Result<Cost>,
) -> Result<Cost> {
    let mut theirs = responder.take().context("an earlier measurement died")?;
    let stop = Arc::new(AtomicBool::new(false));
    let (their_stop, their_clock) = (Arc::clone(&stop), clock.clone());
    let done = partner.run(move || {
        let result = respond(&mut theirs, interval_ns, &their_stop, &their_clock);
        (theirs, result)
    })?;
    let cost = load();
    stop.store(true, Ordering::Relaxed);
    let (theirs, result) = done.recv().context("the partner thread died")?;
    *responder = Some(theirs);
    result?;
    cost
}

fn respond(
    ring: &mut impl Respond,
    interval_ns: u64,
    stop: &AtomicBool,
    clock: &Clock,
) -> Result<()> {
    let mut polled_at = clock.raw();
    while !stop.load(Ordering::Relaxed) {
        ring.poll()?;
        if interval_ns == 0 {
            std::hint::spin_loop();
            continue;
        }
        while clock.delta_as_nanos(polled_at, clock.raw()) < interval_ns {
            std::hint::spin_loop();
        }
        polled_at = clock.raw();
    }
    Ok(())
}
