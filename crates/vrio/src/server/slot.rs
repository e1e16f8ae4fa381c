//! A slot at the IOhost: the last request, how far it is, and how it ended.

use sidecore_block::{BlockError, Operation};
use sidecore_spec_virtio::blk::Range;
use sidecore_units::Nanos;

use crate::channel::message;
use crate::port::Port;
use crate::request::status_of;
use crate::segmentation::segment_bytes;
use crate::wire::{AnswerBody, DeviceEntry, RequestBody, answer_state, request_flag, status};
use crate::{Neglected, Reason, Request, Rule, Segmentation};

/// A sequence that is at least so far ahead of another one is older: sequences wrap.
const OLDER: u32 = 1 << 31;

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

/// A frame of a request, opened, and the request's place for the port.
pub(super) struct Arrival<'a, P: Port> {
    pub(super) body: &'a RequestBody,
    pub(super) payload_bytes: usize,
    pub(super) received: &'a mut P::Received,
    pub(super) place: u64,
    pub(super) port: &'a mut P,
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
    /// Takes a frame for this slot, whose device is `entry`.
    pub(super) fn take<P: Port>(
        &mut self,
        now: Nanos,
        frame: Arrival<'_, P>,
        (entry, terms): (&DeviceEntry, &Terms),
    ) -> Result<Step, Reason> {
        match frame.body.sequence.wrapping_sub(self.body.sequence) {
            0 if self.state != State::Idle => self.again(now, frame, (entry, terms)),
            0 | OLDER.. => Err(Reason::Sequence),
            // A client that closes a device, or that is told of its end, gives up its requests. The
            // IOhost may have a part of them, or none.
            _ if self.state == State::Executing => Err(Reason::Slot),
            _ => self.begin(now, frame, (entry, terms)),
        }
    }

    fn begin<P: Port>(
        &mut self,
        now: Nanos,
        frame: Arrival<'_, P>,
        (entry, terms): (&DeviceEntry, &Terms),
    ) -> Result<Step, Reason> {
        let body = frame.body;
        let refuse = |slot: &mut Self, error| {
            let is_listed = slot.is_listed;
            let fresh = Self { body: *body, arrived_at: now, is_listed, ..Self::default() };
            Ok(slot.refuse(fresh, error))
        };
        let request = match Request::parse(body) {
            Ok(request) => request,
            Err(error) => return refuse(self, error),
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
            (Err(error), _) => return refuse(self, error),
            (Ok(()), None) => return refuse(self, BlockError::OutOfBounds),
        };
        if !request.has_payload() && frame.payload_bytes > 0 {
            return Err(Reason::Segment);
        }
        self.state = State::Assembling;
        self.body = *body;
        (self.request, self.cut, self.arrived_at) = (request, cut, now);
        (self.received, self.segments, self.status) = (0, 0, 0);
        (self.is_acknowledged, self.owes_answer, self.owes_busy) = (false, false, false);
        if self.request.has_payload() {
            self.segment(frame, (entry, terms))
        } else {
            Ok(self.execute(terms, frame.place, frame.port))
        }
    }

    /// Whether a frame of this request is answered without the store: the store has the request, or
    /// the request's status is known.
    pub(super) fn needs_no_store(&self, body: &RequestBody) -> bool {
        let is_known = match self.state {
            State::Idle | State::Assembling => false,
            State::Executing => true,
            State::Done => self.request.operation != Operation::Read,
        };
        is_known && body.sequence == self.body.sequence
    }

    /// Ends a request that the store is not asked for.
    fn refuse(&mut self, fresh: Self, error: BlockError) -> Step {
        *self =
            Self { state: State::Done, status: status_of(Err(error)), owes_answer: true, ..fresh };
        Step::Send
    }

    /// A frame of the request that the slot has already.
    fn again<P: Port>(
        &mut self,
        now: Nanos,
        frame: Arrival<'_, P>,
        (entry, terms): (&DeviceEntry, &Terms),
    ) -> Result<Step, Reason> {
        let body = frame.body;
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
                self.segment(frame, (entry, terms))
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
                    return Ok(self.execute(terms, frame.place, frame.port));
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
    fn segment<P: Port>(
        &mut self,
        frame: Arrival<'_, P>,
        (entry, terms): (&DeviceEntry, &Terms),
    ) -> Result<Step, Reason> {
        let Arrival { body, payload_bytes, received, place, port } = frame;
        let asks = body.flags & request_flag::ASK != 0;
        let mut is_duplicate = false;
        if payload_bytes > 0 {
            let index =
                self.cut.index_of(body.offset_bytes, payload_bytes).ok_or(Reason::Segment)?;
            let bit = 1_u64.checked_shl(index).unwrap_or(0);
            is_duplicate = self.received & bit != 0;
            if !is_duplicate {
                self.received |= bit;
                if self.request.operation == Operation::Write {
                    if self.cut.count() == 1 {
                        port.store_all(received, place);
                    } else {
                        port.store(received, place, body.offset_bytes);
                    }
                } else if let Err(error) = self.take_range(message(port, received)?, entry) {
                    let Self { body, arrived_at, is_listed, .. } = *self;
                    return Ok(
                        self.refuse(Self { body, arrived_at, is_listed, ..Self::default() }, error)
                    );
                }
            }
        }
        if self.received == self.cut.all() {
            Ok(self.execute(terms, place, port))
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
    fn take_range(
        &mut self,
        range: [u8; Range::BYTES],
        entry: &DeviceEntry,
    ) -> Result<(), BlockError> {
        self.request = self.request.with_range(&Range::decode(&range))?;
        self.request.check(entry)
    }

    fn execute(&mut self, terms: &Terms, place: u64, port: &mut impl Port) -> Step {
        if self.request.operation == Operation::Read && terms.neglected.keeps(Rule::CleanBuffers) {
            port.clear(place, self.cut.len_bytes());
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
    fn missing(&self) -> u64 {
        self.cut.all() & !self.received
    }

    /// Whether the request has begun and not ended.
    pub(super) const fn is_unfinished(&self) -> bool {
        matches!(self.state, State::Assembling | State::Executing)
    }

    /// The BUSY of an unfinished request, which `named` names.
    pub(super) fn busy(&self, named: &AnswerBody) -> AnswerBody {
        let is_assembling = self.state == State::Assembling;
        let state = if is_assembling { answer_state::ASSEMBLING } else { answer_state::EXECUTING };
        let segments = if is_assembling { self.missing() } else { 0 };
        AnswerBody { state, segments, ..*named }
    }

    /// Whether something is to be sent.
    pub(super) const fn owes(&self) -> bool {
        self.segments != 0 || self.owes_answer || self.owes_busy
    }
}
