//! The requests of a recording, in the order of their arrival, and what can be compared.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::BufReader;

use anyhow::{Result, bail};
use serde::Serialize;
use sidecore_recording::{
    DATA_MAX, EndReason, FRAME_BYTES, Header, Outcome, REQUEST_BYTES, Reader, Record, Request,
    RequestKind,
};

use super::ranges::Ranges;

/// More requests than a disk ever has in flight: a file with more is no recording of one.
const IN_FLIGHT_MAX: usize = 1 << 16;

/// A request to replay.
#[derive(Clone, Copy, Debug)]
pub(super) struct Step {
    pub(super) request: Request,
    /// The place of the data in the file.
    pub(super) data_at: Option<u64>,
    /// Whether the request is replayed.
    pub(super) replays: bool,
    /// Whether a read's data is compared: it is known what it has to be.
    pub(super) compares: bool,
}

impl Step {
    /// The first byte, and the one behind the last.
    pub(super) fn range(&self) -> (u64, u64) {
        let start = self.request.offset_bytes;
        (start, start.saturating_add(self.request.len_bytes))
    }

    /// Whether the order of two requests matters: they overlap, and one changes the disk.
    pub(super) fn conflicts(&self, other: &Self) -> bool {
        let ((start, end), (first, last)) = (self.range(), other.range());
        let changes = self.request.kind.is_write() || other.request.kind.is_write();
        changes && start < last && first < end
    }

    /// Whether an earlier request has to end first: one with which this one conflicts, or in front
    /// of a flush, a write that the flush had covered when it was recorded.
    pub(super) fn waits_for(&self, earlier: &Self) -> bool {
        let is_covered = self.request.kind == RequestKind::Flush
            && earlier.request.kind.is_write()
            && earlier.ended_ns() <= self.request.arrival_ns;
        is_covered || self.conflicts(earlier)
    }

    /// When the request ended in the recording.
    pub(super) fn ended_ns(&self) -> u64 {
        self.request.arrival_ns.saturating_add(self.request.latency_ns)
    }

    /// Whether the data of the disk is known where the request was, once it has been replayed.
    fn leaves_known(&self) -> bool {
        let is_known = match self.request.kind {
            RequestKind::Write => self.data_at.is_some(),
            RequestKind::WriteZeroes | RequestKind::WriteZeroesUnmap => true,
            RequestKind::Read | RequestKind::Flush | RequestKind::Discard => false,
        };
        self.replays && is_known && self.request.outcome == Outcome::Ok
    }
}

/// The abilities of a device, and the permission to write to it.
pub(super) struct Limits {
    pub(super) writes: bool,
    pub(super) capacity_bytes: u64,
    pub(super) block_bytes: u64,
    pub(super) flush: bool,
    /// The largest discard; `None` if there are none.
    pub(super) discard_bytes: Option<u64>,
    /// The largest write of zeros; `None` if there are none.
    pub(super) zero_bytes: Option<u64>,
}

/// Requests that are not replayed, by the reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct Skipped {
    /// They change the disk, and that was not asked for.
    pub(super) writes: u64,
    /// The device is too small, or has larger blocks, or takes no request of that size.
    pub(super) unfit: u64,
    /// The device has no such request.
    pub(super) unsupported: u64,
}

/// The requests of a recording.
pub(super) struct Steps {
    pub(super) header: Header,
    /// In the order of their arrival.
    pub(super) steps: Vec<Step>,
    /// Requests that the recording has not.
    pub(super) missing: u64,
    pub(super) end: Option<EndReason>,
    /// Why there are no more records.
    pub(super) fault: Option<String>,
}

impl Steps {
    /// Reads all records in front of a fault.
    pub(super) fn read(file: &File) -> Result<Self> {
        let mut reader = Reader::new(BufReader::with_capacity(1 << 20, file))?;
        let header = reader.header().clone();
        let (steps, missing, end, fault) = (Vec::new(), 0, None, None);
        let mut this = Self { header, steps, missing, end, fault };
        loop {
            let at_bytes = reader.at_bytes();
            match reader.read() {
                Ok(Some(Record::Request(request))) => {
                    let data = (FRAME_BYTES + REQUEST_BYTES) as u64;
                    let data_at = (!reader.data().is_empty()).then_some(at_bytes + data);
                    let (replays, compares) = (false, false);
                    this.steps.push(Step { request, data_at, replays, compares });
                }
                Ok(Some(Record::Gap { requests, .. })) => {
                    this.missing = this.missing.saturating_add(requests);
                }
                Ok(Some(Record::End { reason, dropped, .. })) => {
                    this.end = Some(reason);
                    this.missing = this.missing.max(dropped);
                }
                Ok(None) => break,
                Err(error) => {
                    this.fault = Some(error.to_string());
                    break;
                }
            }
        }
        // Of two requests that arrived at one moment, the one that ended first may have been ended
        // before the other was made, but in the file the writer has mixed the queues. Stable: a
        // queue's requests of one moment stay in the order of the file.
        this.steps.sort_by_key(|step| (step.request.arrival_ns, step.ended_ns()));
        Ok(this)
    }

    /// The size of the largest read or write that may be replayed, as that of a buffer.
    pub(super) fn largest_transfer(&self, writes: bool) -> u32 {
        let kinds = |kind| kind == RequestKind::Read || (writes && kind == RequestKind::Write);
        let requests = self.steps.iter().map(|step| step.request);
        let transfers = requests.filter(|it| kinds(it.kind) && it.len_bytes <= DATA_MAX as u64);
        let largest = transfers.map(|request| request.len_bytes).max().unwrap_or(0);
        u32::try_from(largest.next_multiple_of(512)).unwrap_or(0).max(4096)
    }

    /// Decides which requests a device gets, and which of their data is compared.
    pub(super) fn prepare(&mut self, limits: &Limits) -> Result<Skipped> {
        let mut skipped = Skipped::default();
        for step in &mut self.steps {
            let count = match fate(&step.request, limits) {
                Fate::Replayed => {
                    step.replays = true;
                    continue;
                }
                Fate::Write => &mut skipped.writes,
                Fate::Unfit => &mut skipped.unfit,
                Fate::Unsupported => &mut skipped.unsupported,
            };
            *count += 1;
        }
        self.find_comparable()?;
        Ok(skipped)
    }

    /// Finds the reads whose data is known: none of it is of a write that is not replayed, failed,
    /// or was in flight together with the read or with another write there.
    fn find_comparable(&mut self) -> Result<()> {
        let mut unknown = Ranges::default();
        let mut active: Vec<usize> = Vec::new();
        for index in 0..self.steps.len() {
            let step = self.steps[index];
            active.retain(|other| self.steps[*other].ended_ns() > step.request.arrival_ns);
            let (start, end) = step.range();
            let is_read = step.request.kind == RequestKind::Read;
            let is_write = step.request.kind.is_write();
            let mut compares = is_read && step.replays && step.request.checksum.is_some();
            if is_write && step.leaves_known() {
                unknown.remove(start, end);
            } else if is_write {
                unknown.insert(start, end);
            }
            for &other in &active {
                if !self.steps[other].conflicts(&step) {
                    continue;
                }
                compares = false;
                if self.steps[other].request.kind.is_write() && is_write {
                    let (first, last) = self.steps[other].range();
                    unknown.insert(start.max(first), end.min(last));
                }
                self.steps[other].compares = false;
            }
            self.steps[index].compares = compares && !unknown.overlaps(start, end);
            active.push(index);
            if active.len() > IN_FLIGHT_MAX {
                bail!("over {IN_FLIGHT_MAX} requests are in flight at once: this is no recording");
            }
        }
        Ok(())
    }

    /// Requests and bytes by kind.
    pub(super) fn kinds(&self, counts: impl Fn(&Step) -> bool) -> BTreeMap<&'static str, Kind> {
        let mut kinds: BTreeMap<&'static str, Kind> = BTreeMap::new();
        for Step { request, .. } in self.steps.iter().filter(|step| counts(step)) {
            let kind = kinds.entry(request.kind.word()).or_default();
            kind.requests += 1;
            // The range of a flush is that of the request which it makes durable.
            if request.kind != RequestKind::Flush {
                kind.bytes = kind.bytes.saturating_add(request.len_bytes);
            }
            kind.failed += u64::from(request.outcome != Outcome::Ok);
        }
        kinds
    }
}

/// The requests of a kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct Kind {
    pub(super) requests: u64,
    pub(super) bytes: u64,
    /// Those that failed when they were recorded.
    pub(super) failed: u64,
}

enum Fate {
    Replayed,
    Write,
    Unfit,
    Unsupported,
}

fn fate(request: &Request, limits: &Limits) -> Fate {
    let range_limit = match request.kind {
        RequestKind::Flush if limits.flush => return Fate::Replayed,
        RequestKind::Flush => return Fate::Unsupported,
        kind if kind.is_write() && !limits.writes => return Fate::Write,
        RequestKind::Read | RequestKind::Write => Some(DATA_MAX as u64),
        RequestKind::Discard => limits.discard_bytes,
        RequestKind::WriteZeroes | RequestKind::WriteZeroesUnmap => limits.zero_bytes,
    };
    let Some(most) = range_limit else { return Fate::Unsupported };
    let (start, len) = (request.offset_bytes, request.len_bytes);
    let is_aligned = (start | len).is_multiple_of(limits.block_bytes);
    let is_inside = start.checked_add(len).is_some_and(|end| end <= limits.capacity_bytes);
    if len > 0 && len <= most && is_aligned && is_inside { Fate::Replayed } else { Fate::Unfit }
}

#[cfg(test)]
mod tests {
    use std::io::{Seek as _, Write as _};

    use sidecore_recording::DataMode;

    use super::*;

    const ALL: Limits = Limits {
        writes: true,
        capacity_bytes: 1 << 20,
        block_bytes: 512,
        flush: true,
        discard_bytes: Some(1 << 20),
        zero_bytes: Some(1 << 20),
    };

    /// A request of 4096 bytes at a block of that size, from a time on, for so long.
    fn step(kind: RequestKind, block: u64, arrival_ns: u64, latency_ns: u64) -> Step {
        let request = Request {
            kind,
            queue: 0,
            write_through: false,
            outcome: Outcome::Ok,
            errno: 0,
            checksum: (kind == RequestKind::Read).then_some(1),
            arrival_ns,
            latency_ns,
            offset_bytes: block * 4096,
            len_bytes: if kind == RequestKind::Flush { 0 } else { 4096 },
        };
        let data_at = (kind == RequestKind::Write).then_some(200);
        Step { request, data_at, replays: false, compares: false }
    }

    fn steps(steps: Vec<Step>) -> Steps {
        let header = Header { data: DataMode::Full, ..Header::default() };
        Steps { header, steps, missing: 0, end: None, fault: None }
    }

    fn compared(list: Vec<Step>, limits: &Limits) -> Vec<bool> {
        let mut steps = steps(list);
        steps.prepare(limits).unwrap();
        let reads = steps.steps.iter().filter(|step| step.request.kind == RequestKind::Read);
        reads.map(|step| step.compares).collect()
    }

    #[test]
    fn a_read_is_compared_if_all_of_its_data_is_known() {
        use RequestKind::{Discard, Read, Write, WriteZeroes};
        let after = |first: RequestKind| vec![step(first, 1, 0, 5), step(Read, 1, 10, 5)];
        for (kind, is_known) in [(Write, true), (WriteZeroes, true), (Discard, false)] {
            assert_eq!(compared(after(kind), &ALL), [is_known], "{kind:?}");
            let reads_only = Limits { writes: false, ..ALL };
            assert_eq!(compared(after(kind), &reads_only), [false], "{kind:?}");
        }
        let mut without_data = after(Write);
        without_data[0].data_at = None;
        assert_eq!(compared(without_data.clone(), &ALL), [false]);
        // A later write makes the data known again.
        without_data.insert(1, step(Write, 1, 6, 1));
        assert_eq!(compared(without_data, &ALL), [true]);
        let mut failed = after(Write);
        failed[0].request.outcome = Outcome::Io;
        assert_eq!(compared(failed, &ALL), [false]);
        let elsewhere = vec![step(Discard, 2, 0, 5), step(Read, 1, 10, 5)];
        assert_eq!(compared(elsewhere, &ALL), [true]);
    }

    #[test]
    fn data_of_requests_that_raced_is_not_compared() {
        use RequestKind::{Read, Write};
        let race = |list: Vec<Step>| compared(list, &ALL);
        assert_eq!(race(vec![step(Write, 1, 0, 20), step(Read, 1, 10, 5)]), [false]);
        assert_eq!(race(vec![step(Read, 1, 0, 20), step(Write, 1, 10, 5)]), [false]);
        assert_eq!(race(vec![step(Read, 2, 0, 20), step(Write, 1, 10, 5)]), [true]);
        assert_eq!(race(vec![step(Read, 1, 0, 20), step(Read, 1, 10, 5)]), [true, true]);
        let writes = vec![step(Write, 1, 0, 20), step(Write, 1, 10, 5), step(Read, 1, 30, 5)];
        assert_eq!(race(writes.clone()), [false], "either write may have been the last");
        let settled = [writes, vec![step(Write, 1, 40, 5), step(Read, 1, 50, 5)]].concat();
        assert_eq!(race(settled), [false, true]);
    }

    #[test]
    fn what_a_device_cannot_do_is_skipped_by_its_reason() {
        use RequestKind::{Discard, Flush, Read, Write, WriteZeroes};
        let list = || {
            let mut list: Vec<Step> =
                [Read, Write, Flush, Discard, WriteZeroes].map(|kind| step(kind, 1, 0, 0)).to_vec();
            list.push(step(Read, 256, 0, 0));
            let mut odd = step(Read, 1, 0, 0);
            odd.request.len_bytes = 100;
            list.push(odd);
            list
        };
        let skipped = |limits: &Limits| steps(list()).prepare(limits).unwrap();
        assert_eq!(skipped(&ALL), Skipped { writes: 0, unfit: 2, unsupported: 0 });
        let reads_only = Limits { writes: false, ..ALL };
        assert_eq!(skipped(&reads_only), Skipped { writes: 3, unfit: 2, unsupported: 0 });
        let old = Limits { flush: false, discard_bytes: None, zero_bytes: Some(512), ..ALL };
        assert_eq!(skipped(&old), Skipped { writes: 0, unfit: 3, unsupported: 2 });
        assert_eq!(steps(list()).largest_transfer(false), 4096);
    }

    #[test]
    fn requests_of_one_moment_are_in_the_order_of_their_ends() {
        use RequestKind::{Flush, Read, Write};
        let mut of_write = step(Flush, 0, 7, 9);
        (of_write.request.offset_bytes, of_write.request.len_bytes) = (4096, 4096);
        let mut file = tempfile::tempfile().unwrap();
        let mut bytes = Header::default().encode().to_vec();
        for step in [of_write, step(Write, 1, 7, 3), step(Read, 1, 7, 0), step(Read, 1, 2, 90)] {
            let request = Request { checksum: None, ..step.request };
            Record::Request(request).append_to(&mut bytes, &[]);
        }
        file.write_all(&bytes).unwrap();
        file.rewind().unwrap();
        let steps = Steps::read(&file).unwrap();
        let kinds: Vec<RequestKind> = steps.steps.iter().map(|step| step.request.kind).collect();
        assert_eq!(kinds, [Read, Read, Write, Flush]);
        let counted = steps.kinds(|_| true);
        let bytes = |kind: RequestKind| counted[kind.word()].bytes;
        assert_eq!((bytes(Read), bytes(Write), bytes(Flush)), (8192, 4096, 0));
    }

    #[test]
    fn conflicts_are_overlaps_with_a_change() {
        use RequestKind::{Flush, Read, Write};
        let is = |one: Step, other: Step| one.conflicts(&other) && other.conflicts(&one);
        assert!(is(step(Write, 1, 0, 0), step(Read, 1, 0, 0)));
        assert!(!step(Read, 1, 0, 0).conflicts(&step(Read, 1, 0, 0)));
        assert!(!step(Write, 1, 0, 0).conflicts(&step(Write, 2, 0, 0)));
        assert!(!step(Write, 0, 0, 0).conflicts(&step(Flush, 0, 0, 0)));
        assert!(step(Write, 1, 9, 0).waits_for(&step(Write, 1, 0, 9)));
        assert!(!step(Write, 1, 9, 0).waits_for(&step(Write, 2, 0, 9)));
        assert!(step(Flush, 0, 9, 0).waits_for(&step(Write, 2, 0, 9)));
        assert!(!step(Flush, 0, 9, 0).waits_for(&step(Write, 2, 0, 10)), "in flight, too");
        assert!(!step(Flush, 0, 9, 0).waits_for(&step(Read, 2, 0, 9)));
    }
}
