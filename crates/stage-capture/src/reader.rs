//! The reader: from the ring to a file.

use std::sync::Arc;

use sidecore_net::{Dropped, Way};
use sidecore_telemetry::CounterSet as _;

use crate::pcapng::{self, Direction, Packet};
use crate::record::Seen;
use crate::{CaptureCounts, CaptureStats};
use sidecore_spool::Consumer;

/// Reads the frames of a capture, and writes them as pcapng.
pub struct CaptureReader {
    ring: Consumer<{ Seen::WORDS }>,
    snaplen: u32,
    stats: Arc<CaptureStats>,
    bytes: Vec<u8>,
    /// The time of day at the sidecore's time 0, in nanoseconds since 1970.
    epoch_ns: u64,
}

impl CaptureReader {
    pub(crate) fn new(
        ring: Consumer<{ Seen::WORDS }>,
        snaplen: u32,
        stats: Arc<CaptureStats>,
    ) -> Self {
        let bytes = Vec::with_capacity((snaplen as usize).next_multiple_of(8));
        Self { ring, snaplen, stats, bytes, epoch_ns: 0 }
    }

    /// The counters.
    #[must_use]
    pub const fn stats(&self) -> &Arc<CaptureStats> {
        &self.stats
    }

    /// Sets the time of day at the sidecore's time 0, in nanoseconds since 1970.
    pub const fn set_epoch(&mut self, epoch_ns: u64) {
        self.epoch_ns = epoch_ns;
    }

    /// Appends the beginning of the file, about the port of this name.
    pub fn start(&self, out: &mut Vec<u8>, port: &str) {
        let application = concat!("Sidecore ", env!("CARGO_PKG_VERSION"));
        pcapng::start(out, application, port, self.snaplen);
    }

    /// Appends frames to the file until there are no more, or `most` of them, or `out` has
    /// `len_bytes` bytes. Returns their number.
    pub fn read(&mut self, out: &mut Vec<u8>, most: u64, len_bytes: usize) -> u64 {
        let mut count = 0_u64;
        while count < most
            && out.len() < len_bytes
            && let Some(header) = self.ring.pop(&mut self.bytes)
        {
            let seen = Seen::decode(header);
            let comment = seen.dropped.map(comment);
            pcapng::packet(
                out,
                &Packet {
                    at_ns: self.epoch_ns.saturating_add(seen.at.0),
                    direction: match seen.way {
                        Way::FromStation => Direction::Inbound,
                        Way::ToStation => Direction::Outbound,
                    },
                    len_bytes: seen.len_bytes,
                    bytes: &self.bytes,
                    lost: seen.lost.into(),
                    comment: comment.as_deref(),
                },
            );
            count = count.saturating_add(1);
        }
        count
    }

    /// Appends the end of the file, with this time of day: the numbers of frames.
    pub fn end(&self, out: &mut Vec<u8>, at_ns: u64) {
        let CaptureCounts { captured, lost } = self.stats.counts();
        pcapng::statistics(out, at_ns, captured.saturating_add(lost), lost);
    }

    /// Whether the stage is gone: no frames come after those that are there by now.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.ring.is_closed()
    }
}

fn comment(dropped: Dropped) -> String {
    let reason = dropped.reason.name().trim_start_matches("dropped_");
    match dropped.rule {
        Some(rule) => format!("dropped: {reason}, rule {}", u32::from(rule).saturating_add(1)),
        None => format!("dropped: {reason}"),
    }
}
