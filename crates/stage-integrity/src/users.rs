//! The channels of a store, and whether its state in memory is that of the store.
//!
//! The stage does not know what the store has kept after a failed flush, after a write that failed
//! and could not be read back, and if the store may miss answered writes of a guest that was
//! killed. Such a store is no longer *current* for the next user: the next channel that is opened
//! when a user has said that it is gone, and all of its channels are. A read or a write of that
//! channel opens the store again, and the requests of the others wait for that.
//!
//! A guest without channels may be paused, or its driver may reset the disk. It relies on writes
//! that the store has lost, so it must not be told that all is well. For that a loss stays known
//! until the next user writes: a channel that has only read may be that of a device that is
//! read-only, while the user with the loss lives on.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::rules::Rule;
use crate::shared::Shared;

/// The users that have said that they are gone.
type Departures = u64;

#[derive(Debug)]
struct State {
    channels: usize,
    departures: Departures,
    /// The last user is gone, and the next one has neither read nor written.
    is_left: bool,
    /// A store that had failed was opened again, and the next user has not written.
    has_lost: bool,
    is_current: bool,
    /// A channel opens the store again.
    is_opening: bool,
}

/// The next step of a channel that has not read or written yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// Nothing: the state in memory is that of the store. It stays so while there is a channel.
    Current,
    /// It may open the store again.
    Open,
    /// Another channel opens it.
    Wait,
    /// Its user is gone: the store may belong to another host.
    Gone,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Users(Mutex<State>);

impl Default for Users {
    /// Of a store that is open.
    fn default() -> Self {
        Self(Mutex::new(State {
            channels: 0,
            departures: 0,
            is_left: false,
            has_lost: false,
            is_current: true,
            is_opening: false,
        }))
    }
}

impl Users {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a channel. `is_doubtful` is asked when no other one comes or goes.
    fn enter(&self, is_doubtful: impl FnOnce() -> bool) -> Departures {
        let mut state = self.lock();
        state.is_current &= state.channels > 0 || !state.is_left || !is_doubtful();
        state.channels = state.channels.saturating_add(1);
        state.departures
    }

    fn leave(&self) {
        let mut state = self.lock();
        state.channels = state.channels.saturating_sub(1);
    }

    /// The user is gone for good.
    pub(crate) fn user_gone(&self) {
        let mut state = self.lock();
        state.departures = state.departures.saturating_add(1);
        state.is_left = true;
    }

    /// Whether a user that lives on must not go on: a store that `has_failed` was left by its last
    /// user, and no other one has begun, or it was opened again, and not written since.
    pub(crate) fn have_lost(&self, has_failed: bool) -> bool {
        let state = self.lock();
        state.has_lost || (has_failed && state.is_left)
    }

    fn turn(&self, departures: Departures) -> Turn {
        match &*self.lock() {
            state if state.is_current => Turn::Current,
            state if state.departures != departures => Turn::Gone,
            state if state.is_opening => Turn::Wait,
            _ => Turn::Open,
        }
    }

    /// The first read or write of a channel.
    fn begin(&self, departures: Departures) {
        let mut state = self.lock();
        state.is_left &= state.departures != departures;
    }

    /// The first write of a channel.
    fn begin_writing(&self, departures: Departures) {
        let mut state = self.lock();
        state.has_lost &= state.departures != departures;
    }

    fn is_gone(&self, departures: Departures) -> bool {
        self.lock().departures != departures
    }

    /// Takes the right to open the store again.
    fn begin_opening(&self, departures: Departures) -> bool {
        let mut state = self.lock();
        let may = !state.is_current && state.departures == departures;
        may && !std::mem::replace(&mut state.is_opening, true)
    }

    fn end_opening(&self, is_current: bool) {
        let mut state = self.lock();
        (state.is_opening, state.is_current) = (false, is_current);
    }

    /// A store that has failed works again.
    pub(crate) fn keep_loss(&self) {
        self.lock().has_lost = true;
    }
}

/// A channel, as a user of its store.
pub(crate) struct User {
    shared: Arc<Shared>,
    /// Those before it.
    departures: Departures,
    is_opening: bool,
}

impl User {
    /// One more channel. `may_miss_writes` says that answered writes of the last guest may be
    /// missing.
    pub(crate) fn new(shared: &Arc<Shared>, may_miss_writes: bool) -> Self {
        if !shared.neglected.keeps(Rule::UserGone) {
            shared.users.user_gone();
        }
        let departures = shared.users.enter(|| may_miss_writes || shared.journal.is_doubtful());
        Self { shared: Arc::clone(shared), departures, is_opening: false }
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// The next step before the channel's first read or write.
    pub(crate) fn turn(&self) -> Turn {
        self.shared.users.turn(self.departures)
    }

    /// The channel reads or writes from now on.
    pub(crate) fn begin(&self) {
        self.shared.users.begin(self.departures);
    }

    /// The channel writes from now on.
    pub(crate) fn begin_writing(&self) {
        self.shared.users.begin_writing(self.departures);
    }

    /// Whether the channel's user, or another one since, is gone.
    pub(crate) fn is_gone(&self) -> bool {
        self.shared.users.is_gone(self.departures)
    }

    /// Takes the right to open the store again, which is released by
    /// [`end_opening`](Self::end_opening), and when the channel is gone.
    pub(crate) fn begin_opening(&mut self) -> bool {
        self.is_opening |= self.shared.users.begin_opening(self.departures);
        self.is_opening
    }

    pub(crate) fn end_opening(&mut self, is_current: bool) {
        if std::mem::take(&mut self.is_opening) {
            self.shared.users.end_opening(is_current);
        }
    }
}

impl Drop for User {
    fn drop(&mut self) {
        self.end_opening(false);
        self.shared.users.leave();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_store_that_has_failed_is_opened_again_by_one_channel_when_its_user_is_gone() {
        let users = Users::default();
        let of_first = users.enter(|| true);
        assert_eq!(users.turn(of_first), Turn::Current, "it was just opened");
        users.begin(of_first);
        users.user_gone();
        users.enter(|| true);
        assert_eq!(users.turn(of_first), Turn::Current, "it has a channel");
        users.leave();
        users.leave();
        let of_next = users.enter(|| true);
        users.enter(|| true);
        assert_eq!(users.turn(of_next), Turn::Open);
        assert!(users.begin_opening(of_next) && !users.begin_opening(of_next));
        assert_eq!(users.turn(of_next), Turn::Wait);
        users.end_opening(false);
        assert_eq!(users.turn(of_next), Turn::Open, "the other one tries");
        assert!(users.begin_opening(of_next));
        users.end_opening(true);
        assert_eq!(users.turn(of_next), Turn::Current);
    }

    #[test]
    fn a_user_that_lives_on_does_not_open_the_store_again() {
        let users = Users::default();
        let first = users.enter(|| false);
        users.begin(first);
        users.leave();
        let again = users.enter(|| true);
        assert_eq!(users.turn(again), Turn::Current, "it is not gone");
        users.leave();
        users.user_gone();
        assert!(users.have_lost(true) && !users.have_lost(false));
        let next = users.enter(|| false);
        users.begin(again);
        assert!(users.have_lost(true), "a request of the user that is gone");
        users.begin(next);
        assert!(!users.have_lost(true));
        users.leave();
        let again = users.enter(|| true);
        assert_eq!(users.turn(again), Turn::Current, "it has begun");
    }

    #[test]
    fn a_user_that_is_gone_opens_nothing() {
        let users = Users::default();
        users.user_gone();
        let next = users.enter(|| true);
        assert_eq!(users.turn(next), Turn::Open);
        users.user_gone();
        assert_eq!(users.turn(next), Turn::Gone);
        assert!(users.is_gone(next) && !users.begin_opening(next));
        users.leave();
        let next = users.enter(|| false);
        assert_eq!(users.turn(next), Turn::Open, "it was not opened yet");
    }

    #[test]
    fn a_loss_is_known_until_the_next_user_writes() {
        let users = Users::default();
        let first = users.enter(|| false);
        users.begin(first);
        users.leave();
        users.user_gone();
        let reader = users.enter(|| true);
        assert!(users.begin_opening(reader));
        users.keep_loss();
        users.end_opening(true);
        users.begin(reader);
        assert!(users.have_lost(false), "it may be a device that is only read");
        users.begin_writing(first);
        assert!(users.have_lost(false), "a request of the user that is gone");
        users.begin_writing(users.enter(|| false));
        assert!(!users.have_lost(false) && !users.have_lost(true));
    }
}
