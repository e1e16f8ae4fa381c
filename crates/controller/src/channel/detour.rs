//! The fast path: whole requests in the queue's last extent, which only need another offset.
//!
//! A store in memory carries them out in one call, at their place in the extent, while the channel
//! holds nothing else ([`BlockChannel::exchange_mapped`]): there is no state to keep. In front of
//! any other store such a request carries its own state (`Detour`), so that neither direction reads
//! a table.

use std::rc::Rc;

use sidecore_block::{Batch, BlockChannel, BlockRequest};
use sidecore_units::Nanos;

use super::FunctionChannel;
use crate::shares::units;

impl FunctionChannel {
    /// Has the store carry out the requests at the front of `batch` that lie in the last extent.
    /// Nothing is in flight before, and nothing of it after.
    #[inline]
    pub(super) fn exchange_mapped_extent(&mut self, batch: &mut Batch, completed: &mut Batch) {
        self.quiescence.enter_idle();
        if self.last_bytes.is_valid(&self.root) {
            let already = completed.len();
            self.stores.physical.exchange_mapped(&self.mapped, batch, completed);
            self.stats.last_hits.add(completed.len().wrapping_sub(already) as u64);
        }
        self.quiescence.leave_idle();
    }

    /// The fast path of requests that may stay in flight where it applies, else
    /// [`submit`](BlockChannel::submit) and [`poll`](BlockChannel::poll).
    #[inline(never)]
    pub(super) fn exchange_detours(
        &mut self,
        now: Nanos,
        batch: &mut Batch,
        completed: &mut Batch,
    ) {
        if !self.is_plain || batch.len() > self.depth.saturating_sub(self.detours) {
            self.submit(now, batch);
            return self.poll(now, completed);
        }
        if self.is_shared() || self.shown > 0 {
            return self.exchange_beside_others(now, batch, completed);
        }
        self.exchange_plain(now, batch, completed);
    }

    /// Exchanges a batch that fits the depth while every request in flight is on a detour. Returns
    /// false if a request needed the slow path, in which case [`poll`](BlockChannel::poll) has run
    /// already.
    #[inline]
    pub(super) fn exchange_plain(
        &mut self,
        now: Nanos,
        batch: &mut Batch,
        completed: &mut Batch,
    ) -> bool {
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
            // The store is full. Translated requests stay in this channel: the front end would
            // offer them again, and they would be translated twice.
            self.start_rest(batch, batch.len());
        }
        self.quiescence.leave();
        true
    }

    /// [`exchange_plain`](Self::exchange_plain) while other functions share the sidecore or the
    /// store, if the shares admit the whole batch.
    #[inline(never)]
    pub(super) fn exchange_beside_others(
        &mut self,
        now: Nanos,
        batch: &mut Batch,
        completed: &mut Batch,
    ) {
        self.now = self.now.max(now);
        let multiplexer = Rc::clone(&self.multiplexer);
        let wanted =
            batch.iter().map(|request| units(request.len_bytes)).fold(0, i64::saturating_add);
        if wanted > 0 {
            let multiplexer = &mut *multiplexer.borrow_mut();
            if self.allowance(multiplexer).is_ok_and(|allowed| wanted <= allowed) {
                self.charge(multiplexer, wanted);
            } else {
                self.is_plain = false;
            }
        }
        if !self.is_plain {
            self.submit(now, batch);
            return self.poll(now, completed);
        }
        if self.takes_mapped && self.detours == 0 {
            let already = completed.len();
            self.exchange_mapped_extent(batch, completed);
            let count = completed.len().wrapping_sub(already);
            self.publish(&mut multiplexer.borrow_mut(), count);
            if batch.is_empty() {
                return;
            }
        }
        let already = completed.len();
        if self.exchange_plain(now, batch, completed) {
            self.publish(&mut multiplexer.borrow_mut(), completed.len().saturating_sub(already));
        }
    }

    /// The mark of requests translated now: one plus the parity of the current epoch, so never
    /// zero.
    #[inline]
    pub(super) fn mark(&self) -> u32 {
        1_u32.wrapping_add(self.quiescence.parity().into())
    }

    /// Redirects requests from the front on, up to the first that is not a whole request in the
    /// last extent. Returns their number; the caller accounts for them with
    /// [`sent_on`](Self::sent_on).
    #[inline]
    pub(super) fn translate_front(&self, requests: &mut [Box<BlockRequest>]) -> usize {
        if !self.last_bytes.is_valid(&self.root) {
            return 0;
        }
        let mark = self.mark();
        let mut count = 0_usize;
        for request in requests {
            let Some(offset_bytes) = self.mapped.place(request) else { break };
            if !request.send_on(offset_bytes, mark) {
                break;
            }
            count = count.wrapping_add(1);
        }
        self.stats.last_hits.add(count as u64);
        count
    }

    /// Accounts for `count` requests that were redirected.
    #[inline]
    pub(super) fn sent_on(&mut self, count: usize) {
        self.quiescence.began(count);
        self.detours = self.detours.wrapping_add(count);
    }

    /// Ends the detours of `returned`, and accounts for them and for the `sent_on` requests of the
    /// same call.
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

    /// Starts the rest of a batch on the slow path: the first `translated` requests are on their
    /// detours already; the next one is not in the last extent, or the store is full.
    #[inline(never)]
    fn start_rest(&mut self, batch: &mut Batch, translated: usize) {
        self.start_behind(batch, translated, batch.len());
        self.submit_translated();
        self.is_plain = false;
    }
}
