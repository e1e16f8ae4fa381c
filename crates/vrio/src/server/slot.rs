//! A slot at the IOhost: the last request, how far it is, and how it ended.

use sidecore_block::{BlockError, Operation};
use sidecore_spec_virtio::blk::Range;
use sidecore_units::Nanos;
use sidecore_units::layout::Field as _;

use crate::request::status_of;
use crate::segmentation::segment_bytes;
use crate::wire::{DeviceEntry, RequestBody, request_flag, status};
use crate::{Data, Neglected, Reason, Request, Rule, Segmentation};

/// How far a slot's request is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum State {
    /// There was none.
    #[default]
    Idle,
    /// Segments are missing.
    Assembling,
    /// The store has it.
    Executing,
    /// It ended.
    Done,
}

/// The consequence of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Nothing further.
    None,
    /// The store is to execute the request.
    Execute,
    /// Something is to be sent.
    Send,
}

/// The terms that a session fixes for all of its slots.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Terms {
    pub(super) frame_bytes: u32,
    pub(super) tag_bytes: usize,
    pub(super) neglected: Neglected,
}

/// A slot.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Slot {
    pub(super) state: State,
    /// The frame that named the request: those of the same request agree with it.
    pub(super) body: RequestBody,
    pub(super) request: Request,
    pub(super) cut: Segmentation,
    /// Segments of a write that have arrived.
    received: u64,
    /// See [`AnswerBody::status`](crate::wire::AnswerBody::status).
    pub(super) status: u8,
    /// When the newest frame of the newest attempt arrived.
    pub(super) arrived_at: Nanos,
    /// The attempt was acknowledged.
    pub(super) is_acknowledged: bool,
    /// Segments of a read's answer that are to be sent.
    pub(super) segments: u64,
    /// An answer without data is to be sent.
    pub(super) owes_answer: bool,
    /// A BUSY is to be sent.
    pub(super) owes_busy: bool,
    /// The slot is in the list of those that have something to send.
    pub(super) is_listed: bool,
}

impl Slot {
    /// Takes a frame for this slot, whose device is `entry`. `place` is the caller's name for it.
    pub(super) fn take(
        &mut self,
        now: Nanos,
        (body, payload): (&RequestBody, &[u8]),
        (entry, terms): (&DeviceEntry, &Terms),
        (place, data): (u64, &mut impl Data),
    ) -> Result<Step, Reason> {
        match body.sequence.wrapping_sub(self.body.sequence) {
            0 if self.state != State::Idle => {
                self.again(now, (body, payload), terms, (place, data), entry)
            }
            1 => match self.state {
                State::Assembling | State::Executing => Err(Reason::Slot),
                State::Idle | State::Done => {
                    self.begin(now, (body, payload), (entry, terms), (place, data))
                }
            },
            _ => Err(Reason::Sequence),
        }
    }

    fn begin(
        &mut self,
        now: Nanos,
        (body, payload): (&RequestBody, &[u8]),
        (entry, terms): (&DeviceEntry, &Terms),
        (place, data): (u64, &mut impl Data),
    ) -> Result<Step, Reason> {
        let fresh =
            Self { body: *body, arrived_at: now, is_listed: self.is_listed, ..Self::default() };
        let request = match Request::parse(body) {
            Ok(request) => request,
            Err(error) => return Ok(self.refuse(fresh, error)),
        };
        // The range of a discard has not arrived.
        let checked = match request.operation {
            Operation::Discard | Operation::WriteZeroes { .. } => Ok(()),
            _ => request.check(entry),
        };
        let segment = segment_bytes(terms.frame_bytes, terms.tag_bytes, entry.block_bytes);
        let cut = Segmentation::new(request.data_bytes(), segment, entry.block_bytes);
        let cut = match (checked, cut) {
            (Ok(()), Some(cut)) => cut,
            (Err(error), _) => return Ok(self.refuse(fresh, error)),
            (Ok(()), None) => return Ok(self.refuse(fresh, BlockError::OutOfBounds)),
        };
        if !request.has_payload() && !payload.is_empty() {
            return Err(Reason::Segment);
        }
        *self = Self { state: State::Assembling, request, cut, ..fresh };
        if self.request.has_payload() {
            self.segment((body, payload), (entry, terms), (place, data))
        } else {
            Ok(self.execute(terms, place, data))
        }
    }

    /// Ends a request that the store is not asked for.
    fn refuse(&mut self, fresh: Self, error: BlockError) -> Step {
        *self =
            Self { state: State::Done, status: status_of(Err(error)), owes_answer: true, ..fresh };
        Step::Send
    }

    /// A frame of the request that the slot has already.
    fn again(
        &mut self,
        now: Nanos,
        (body, payload): (&RequestBody, &[u8]),
        terms: &Terms,
        (place, data): (u64, &mut impl Data),
        entry: &DeviceEntry,
    ) -> Result<Step, Reason> {
        let ahead = body.attempt.wrapping_sub(self.body.attempt);
        let is_newer = (1..0x8000).contains(&ahead);
        if !self.is_same_request(body) {
            return Err(Reason::Segment);
        }
        if is_newer {
            self.body.attempt = body.attempt;
            self.body.wanted = body.wanted;
            self.is_acknowledged = false;
            self.arrived_at = now;
        }
        match self.state {
            State::Assembling => {
                // An older attempt has the same data.
                if ahead == 0 {
                    self.arrived_at = now;
                }
                self.segment((body, payload), (entry, terms), (place, data))
            }
            State::Executing if is_newer => {
                self.owes_busy = true;
                Ok(Step::Send)
            }
            State::Done if is_newer => {
                let reads = self.request.operation == Operation::Read && self.status == status::OK;
                let repeats =
                    self.request.has_payload() && !terms.neglected.keeps(Rule::AtMostOnce);
                if reads || repeats {
                    return Ok(self.execute(terms, place, data));
                }
                self.owes_answer = true;
                Ok(Step::Send)
            }
            _ => Err(if ahead == 0 { Reason::Duplicate } else { Reason::Attempt }),
        }
    }

    fn is_same_request(&self, body: &RequestBody) -> bool {
        let (first, durable) = (&self.body, request_flag::FUA);
        (first.device, first.epoch, first.len_bytes) == (body.device, body.epoch, body.len_bytes)
            && first.header == body.header
            && first.flags & durable == body.flags & durable
    }

    /// Takes a segment of a write, or a frame without one that asks what is missing.
    fn segment(
        &mut self,
        (body, payload): (&RequestBody, &[u8]),
        (entry, terms): (&DeviceEntry, &Terms),
        (place, data): (u64, &mut impl Data),
    ) -> Result<Step, Reason> {
        let asks = body.flags & request_flag::ASK != 0;
        let mut is_duplicate = false;
        if !payload.is_empty() {
            let index =
                self.cut.index_of(body.offset_bytes, payload.len()).ok_or(Reason::Segment)?;
            let bit = 1_u64.checked_shl(index).unwrap_or(0);
            is_duplicate = self.received & bit != 0;
            if !is_duplicate {
                self.received |= bit;
                if self.request.operation == Operation::Write {
                    data.store(place, body.offset_bytes, payload);
                } else if let Err(error) = self.take_range(payload, entry) {
                    let Self { body, arrived_at, is_listed, .. } = *self;
                    return Ok(
                        self.refuse(Self { body, arrived_at, is_listed, ..Self::default() }, error)
                    );
                }
            }
        }
        if self.received == self.cut.all() {
            Ok(self.execute(terms, place, data))
        } else if asks {
            self.owes_busy = true;
            Ok(Step::Send)
        } else if is_duplicate {
            Err(Reason::Duplicate)
        } else {
            Ok(Step::None)
        }
    }

    /// The data of a discard or a write of zeros.
    fn take_range(&mut self, payload: &[u8], entry: &DeviceEntry) -> Result<(), BlockError> {
        self.request = self.request.with_range(&Range::read(payload, 0))?;
        self.request.check(entry)
    }

    fn execute(&mut self, terms: &Terms, place: u64, data: &mut impl Data) -> Step {
        if self.request.operation == Operation::Read && terms.neglected.keeps(Rule::CleanBuffers) {
            data.clear(place, self.cut.len_bytes());
        }
        // A repeated read has nothing of its last answer left to send.
        self.segments = 0;
        self.owes_answer = false;
        self.state = State::Executing;
        Step::Execute
    }

    /// The store has ended the request.
    pub(super) fn complete(&mut self, result: Result<(), BlockError>) {
        self.state = State::Done;
        self.status = status_of(result);
        self.owes_busy = false;
        if self.request.operation == Operation::Read && result.is_ok() {
            let wanted = self.body.wanted & self.cut.all();
            self.segments = if wanted == 0 { self.cut.all() } else { wanted };
        } else {
            self.owes_answer = true;
        }
    }

    /// The segments of a write that have not arrived.
    pub(super) fn missing(&self) -> u64 {
        self.cut.all() & !self.received
    }

    /// Whether something is to be sent.
    pub(super) const fn owes(&self) -> bool {
        self.segments != 0 || self.owes_answer || self.owes_busy
    }
}
