//! A client's link that loses frames both ways.
//!
//! It stands between a session and a link of any kind, on the client's core: a lossy wire as a
//! program of its own would need a third core.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use sidecore_link::{Buffer, Frame, Link, LinkAddress};
use sidecore_units::Nanos;

use super::client::BUDGET;
use super::through::pass_through;

/// The frames of a link, counted.
#[derive(Debug, Default)]
pub(super) struct Losses {
    passed: AtomicU64,
    lost: AtomicU64,
}

impl Losses {
    /// The share of the frames so far that were lost.
    pub(super) fn share(&self) -> f64 {
        let lost = self.lost.load(Ordering::Relaxed);
        lost as f64 / (lost + self.passed.load(Ordering::Relaxed)).max(1) as f64
    }
}

/// A link with faults.
pub(super) struct FaultyLink {
    link: Box<dyn Link>,
    losses: Arc<Losses>,
    /// A frame is lost if the next number is below this one.
    loss: u64,
    random: u64,
    frames: Vec<Frame>,
    lost_frames: Vec<Frame>,
    buffers: Vec<Buffer>,
    lost_buffers: Vec<Buffer>,
}

impl FaultyLink {
    /// A link that loses so many percent of the frames of each direction.
    pub(super) fn new(link: Box<dyn Link>, loss_percent: u8) -> Self {
        Self {
            link,
            losses: Arc::default(),
            loss: u64::MAX / 100 * u64::from(loss_percent),
            random: 0x9e37_79b9_7f4a_7c15,
            frames: Vec::with_capacity(BUDGET),
            lost_frames: Vec::with_capacity(BUDGET),
            buffers: Vec::with_capacity(BUDGET),
            lost_buffers: Vec::with_capacity(BUDGET),
        }
    }

    pub(super) fn losses(&self) -> Arc<Losses> {
        Arc::clone(&self.losses)
    }

    /// Whether the next frame is lost.
    #[inline]
    fn loses(&mut self) -> bool {
        // xorshift64: the same losses in every run of the program.
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        let is_lost = self.random < self.loss;
        let count = if is_lost { &self.losses.lost } else { &self.losses.passed };
        count.fetch_add(1, Ordering::Relaxed);
        is_lost
    }
}

impl Link for FaultyLink {
    pass_through!();

    fn receive(&mut self, now: Nanos, limit: usize, frames: &mut Vec<Frame>) {
        let mut arrived = std::mem::take(&mut self.frames);
        self.link.receive(now, limit, &mut arrived);
        for frame in arrived.drain(..) {
            if self.loses() {
                self.lost_frames.push(frame);
            } else {
                frames.push(frame);
            }
        }
        self.frames = arrived;
        self.link.give_back(&mut self.lost_frames);
    }

    fn send(&mut self, now: Nanos, buffers: &mut Vec<Buffer>) {
        let mut passing = std::mem::take(&mut self.buffers);
        for buffer in buffers.drain(..) {
            if self.loses() {
                self.lost_buffers.push(buffer);
            } else {
                passing.push(buffer);
            }
        }
        self.link.cancel(&mut self.lost_buffers);
        self.link.send(now, &mut passing);
        self.buffers = passing;
    }
}

#[cfg(test)]
mod tests {
    use sidecore_link::{LinkOptions, MemoryLink};
    use sidecore_linux::peer_event;
    use sidecore_vrio::wire::DATA_HEADER_BYTES;

    use super::*;

    const PEER: LinkAddress = LinkAddress::Peer(0);

    fn pair(loss_percent: u8) -> (MemoryLink, FaultyLink) {
        let options = LinkOptions::new(DATA_HEADER_BYTES);
        let (host, client) = MemoryLink::pair(&options, peer_event).unwrap();
        (host, FaultyLink::new(Box::new(client), loss_percent))
    }

    /// Sends a frame that begins with `number`.
    fn send(link: &mut dyn Link, number: u32) {
        let mut buffers = Vec::new();
        link.buffers(PEER, 1, &mut buffers);
        buffers[0].pieces().write(link.memory(), 0, &number.to_le_bytes());
        buffers[0].address(PEER, DATA_HEADER_BYTES);
        link.send(Nanos::ZERO, &mut buffers);
    }

    /// The numbers of the frames that have come.
    fn receive(link: &mut dyn Link) -> Vec<u32> {
        let mut frames = Vec::new();
        link.receive(Nanos::ZERO, BUDGET, &mut frames);
        let number = |frame: &Frame| {
            let mut number = [0; 4];
            frame.pieces().read(link.memory(), 0, &mut number);
            u32::from_le_bytes(number)
        };
        let numbers = frames.iter().map(number).collect();
        link.give_back(&mut frames);
        numbers
    }

    #[test]
    fn frames_are_lost_both_ways_at_the_given_rate_and_none_leaks() {
        let (mut host, mut client) = pair(10);
        let (mut sent, mut received) = (0, 0);
        // More frames than any ring has: lost ones are used again.
        for slot in 0..20_000 {
            send(&mut client, slot);
            let came = receive(&mut host);
            assert!(came.is_empty() || came == [slot]);
            sent += came.len();
            send(&mut host, slot);
            received += receive(&mut client).len();
        }
        for count in [sent, received] {
            assert!((17_500..18_500).contains(&count), "{count}");
        }
        assert!((0.09..0.11).contains(&client.losses().share()));
    }

    #[test]
    fn a_link_without_loss_passes_all_frames() {
        let (mut host, mut client) = pair(0);
        (0..1000).for_each(|slot| {
            send(&mut client, slot);
            assert_eq!(receive(&mut host), [slot]);
        });
    }
}
