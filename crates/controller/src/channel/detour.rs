//! Requests that go to the store as they are, but to another offset: nearly all.
//!
//! Such a request carries what has to be remembered of it, so that neither way takes a look into a table; a batch of them
//! goes there and, from a store that carries it out at once, comes back in one call.

use std::rc::Rc;

use sidecore_block::{Batch, BlockChannel, BlockRequest, Operation};
use sidecore_units::Nanos;

use super::FunctionChannel;
use crate::shares::units;

impl FunctionChannel {
    /// Sends a batch that fits, and takes back what is done, while all that is under way is on a detour. False if that
    /// was not all there was to do, and [`poll`](BlockChannel::poll) did it.
    #[inline]
    pub(super) fn exchange_plain(&mut self, now: Nanos, batch: &mut Batch, completed: &mut Batch) -> bool {
        self.quiescence.enter();
        let translated = self.translate_front(batch);
        if translated < batch.len() {
            self.sent_on(translated);
            self.start_rest(batch, translated);
            self.poll(now, completed);
            return false;
        }
        let already = completed.len();
        self.stores.physical.exchange(now, batch, completed);
        self.end_detours(translated, completed.get_mut(already..).unwrap_or_default());
        if !batch.is_empty() {
            // A translated request stays here, or it would be translated again.
            self.start_rest(batch, batch.len());
        }
        self.quiescence.leave();
        true
    }

    /// The same while other functions are served here, or from the same store: if the shares have room for all of it.
    #[inline(never)]
    pub(super) fn exchange_beside_others(&mut self, now: Nanos, batch: &mut Batch, completed: &mut Batch) {
        self.now = self.now.max(now);
        let multiplexer = Rc::clone(&self.multiplexer);
        let wanted = batch.iter().map(|request| units(request.len_bytes)).fold(0, i64::saturating_add);
        if wanted > 0 {
            let multiplexer = &mut *multiplexer.borrow_mut();
            if self.allowance(multiplexer).is_ok_and(|allowed| wanted <= allowed) {
                self.charge(multiplexer, wanted);
            } else {
                self.is_plain = false;
            }
        }
        if !self.is_plain {
            self.submit(batch);
            return self.poll(now, completed);
        }
        let already = completed.len();
        if self.exchange_plain(now, batch, completed) {
            self.tell_others(&mut multiplexer.borrow_mut(), completed.len().saturating_sub(already));
        }
    }

    /// What a request is sent on with: what the grace period wants to know of it, and never zero.
    #[inline]
    pub(super) fn mark(&self) -> u32 {
        1_u32.wrapping_add(self.quiescence.parity().into())
    }

    /// Sends requests from the front on to where they lie, up to the first that does not simply lie in the last extent;
    /// how many there were. They are not accounted for yet.
    #[inline]
    pub(super) fn translate_front(&self, requests: &mut [Box<BlockRequest>]) -> usize {
        if !self.last_bytes.is_valid(&self.function.root) {
            return 0;
        }
        let mark = self.mark();
        let mut count = 0_usize;
        for request in requests {
            match request.operation {
                Operation::Read => {}
                Operation::Write if self.takes_writes => {}
                _ => break,
            }
            let Some(offset_bytes) = self.last_bytes.locate(request.offset_bytes, request.len_bytes) else { break };
            if !request.send_on(offset_bytes, mark) {
                break;
            }
            count = count.wrapping_add(1);
        }
        self.stats.last_hits.add(count as u64);
        count
    }

    /// So many requests were sent on.
    #[inline]
    pub(super) fn sent_on(&mut self, count: usize) {
        self.quiescence.began(count);
        self.detours = self.detours.wrapping_add(count);
    }

    /// Takes requests back that were on detours, and accounts for those that were `sent_on` in the same breath.
    #[inline]
    pub(super) fn end_detours(&mut self, sent_on: usize, returned: &mut [Box<BlockRequest>]) {
        let count = returned.len();
        let mark = self.mark();
        let mut since = 0_usize;
        for request in returned {
            since = since.wrapping_add(usize::from(request.come_back() == mark));
        }
        self.detours = self.detours.wrapping_add(sent_on).saturating_sub(count);
        self.quiescence.exchanged(sent_on, since, count.wrapping_sub(since));
    }

    /// Starts what a batch of the plain kind has left: behind `translated` requests that are on their detours already
    /// comes one that is not simply in the last extent; or the store takes no more.
    #[inline(never)]
    fn start_rest(&mut self, batch: &mut Batch, translated: usize) {
        self.start_behind(batch, translated, batch.len());
        self.hand_over();
        self.is_plain = false;
    }
}
