//! One daemon's lease, and the stores that it is a candidate for.

use std::collections::BTreeMap;

use sidecore_units::Nanos;

use crate::lease::{Lease, shortened};
use crate::rules::Neglected;
use crate::store::Store;
use crate::{Answer, Call, Member, Numbered, Origin, Outcome, Rule, Seen, Status, Task};

/// Times and limits.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// The time of the lease in seconds. etcd grants no shorter one than about 1.5 times its
    /// election timeout.
    pub ttl_s: u64,
    /// The difference between the rates of this host's clock and of etcd's, in percent at most.
    pub drift_percent: u64,
    /// The time before the end of the lease in which the owner takes no new request, so that those
    /// in flight are answered.
    pub margin: Nanos,
    /// The time between two renewals. Also the time between two looks at etcd while another daemon
    /// has a key.
    pub period: Nanos,
    /// The time between two looks while a key is about to be released.
    pub fast_period: Nanos,
    /// The time between the announcement of a hand-over and its begin: longer than `period`.
    pub announce: Nanos,
    /// The time before a task that failed is tried again.
    pub retry: Nanos,
    /// The time for which a daemon that released a key leaves it to others.
    pub yields: Nanos,
    /// The failures of a fence after which the key is left to others: their fence may succeed.
    pub fence_attempts: u32,
    /// Whether a fence can let this daemon's host in, also one that fails: the daemon stays a
    /// suspect then, though it has opened nothing.
    pub fence_admits: bool,
    /// The rule that is neglected.
    #[cfg(feature = "neglect")]
    pub neglect: Option<Rule>,
}

impl Options {
    /// The options of a lease of this time.
    #[must_use]
    pub const fn of_lease(ttl_s: u64) -> Self {
        let ttl = Nanos::from_millis(ttl_s.saturating_mul(1_000));
        Self {
            ttl_s,
            drift_percent: 10,
            margin: Nanos(ttl.0 / 20),
            period: Nanos(ttl.0 / 12),
            fast_period: Nanos(ttl.0 / 300),
            announce: Nanos(ttl.0 / 5),
            retry: Nanos(ttl.0 / 12),
            yields: Nanos(ttl.0 / 2),
            fence_attempts: 5,
            fence_admits: true,
            #[cfg(feature = "neglect")]
            neglect: None,
        }
    }

    fn neglected(&self) -> Neglected {
        #[cfg(feature = "neglect")]
        let neglected = self.neglect.map_or(Neglected::default(), Neglected::only);
        #[cfg(not(feature = "neglect"))]
        let neglected = Neglected::default();
        neglected
    }
}

/// The call in flight.
#[derive(Clone, Debug)]
struct InFlight {
    numbered: Numbered,
    sent_at: Nanos,
}

/// The ownership of one daemon.
#[derive(Clone, Debug)]
pub struct Daemon {
    me: Member,
    options: Options,
    neglected: Neglected,
    /// The cluster whose answers are taken: the first one that answered.
    cluster: Option<u64>,
    lease: Option<Lease>,
    stores: BTreeMap<String, Store>,
    /// The keys that the newest read found.
    seen: BTreeMap<String, Seen>,
    in_flight: Option<InFlight>,
    next_number: u64,
    look_at: Nanos,
    /// No call before this: the last one failed.
    call_at: Nanos,
    ends: bool,
    fault: Option<String>,
    /// For the numbers of new stores.
    random: u64,
}

impl Daemon {
    /// A daemon without a lease. `random` is a random number.
    #[must_use]
    pub fn new(me: Member, options: Options, random: u64) -> Self {
        Self {
            me,
            options,
            neglected: options.neglected(),
            cluster: None,
            lease: None,
            stores: BTreeMap::new(),
            seen: BTreeMap::new(),
            in_flight: None,
            next_number: 1,
            look_at: Nanos::ZERO,
            call_at: Nanos::ZERO,
            ends: false,
            fault: None,
            random,
        }
    }

    /// This daemon.
    #[must_use]
    pub const fn me(&self) -> &Member {
        &self.me
    }

    /// This daemon as it claims a store: another incarnation for each ownership, so that an order
    /// about a former one means no living owner.
    #[must_use]
    pub fn claimant(&self, store: &str) -> &Member {
        self.stores.get(store).map_or(&self.me, Store::claimant)
    }

    /// Makes the daemon a candidate for a store.
    pub fn add(&mut self, store: &str) {
        let new =
            || Store::new(store, self.me.clone(), (self.neglected, self.options.fence_admits));
        self.stores.entry(store.to_owned()).or_insert_with(new);
        self.look_at = Nanos::ZERO;
    }

    /// Gives a store to another candidate, as soon as it is served. False if this daemon does not
    /// have its key.
    pub fn hand_over(&mut self, store: &str) -> bool {
        self.look_at = Nanos::ZERO;
        self.stores.get_mut(store).is_some_and(Store::hand_over)
    }

    /// Tries a refused store again.
    pub fn retry(&mut self, store: &str) {
        if let Some(store) = self.stores.get_mut(store) {
            store.retry();
        }
    }

    /// Gives all stores to other candidates, and then ends the lease.
    pub fn end(&mut self) {
        self.ends = true;
        self.look_at = Nanos::ZERO;
        self.stores.values_mut().for_each(Store::end);
    }

    /// Whether nothing is left after [`end`](Self::end): no store is open, and the lease has ended,
    /// or etcd does not answer.
    #[must_use]
    pub fn has_ended(&self, now: Nanos) -> bool {
        self.ends
            && self.stores.values().all(Store::is_idle)
            && self.lease.is_none_or(|lease| now >= lease.ends_at)
    }

    /// The time until which a store's requests may be answered, and its epoch; `None` if it is not
    /// served. New requests are taken until [`Options::margin`] before that.
    #[must_use]
    pub fn serves_until(&self, store: &str) -> Option<(Nanos, u64)> {
        let epoch = self.stores.get(store)?.serves()?;
        let ends_at = self.lease?.ends_at;
        let until = if self.neglected.keeps(Rule::LeaseEnd) { ends_at } else { Nanos::MAX };
        Some((until, epoch))
    }

    /// The time until which a store may be open; `None` if it is not, or its key is gone. As
    /// [`serves_until`](Self::serves_until), and also while the store is being opened or closed.
    #[must_use]
    pub fn holds_until(&self, store: &str) -> Option<Nanos> {
        self.stores.get(store).filter(|store| store.holds())?;
        self.lease_ends_at()
    }

    /// The states of all stores.
    #[must_use]
    pub fn status(&self, now: Nanos) -> Vec<(&str, Status)> {
        let is_over = self.lease.is_none_or(|lease| now >= lease.ends_at);
        let status = |store: &Store| {
            let mut status = store.status(is_over);
            if status.detail.is_none() || is_over {
                status.detail = self.fault.clone().or(status.detail);
            }
            status
        };
        self.stores.iter().map(|(name, store)| (name.as_str(), status(store))).collect()
    }

    /// The end of the lease on this host's clock, if there is one.
    #[must_use]
    pub fn lease_ends_at(&self) -> Option<Nanos> {
        self.lease.map(|lease| lease.ends_at)
    }

    /// The reason why the last call to etcd failed, if it did.
    #[must_use]
    pub fn fault(&self) -> Option<&str> {
        self.fault.as_deref()
    }

    /// The cluster of etcd that answers are taken of.
    #[must_use]
    pub const fn cluster(&self) -> Option<u64> {
        self.cluster
    }

    /// The next request to etcd. It is given to etcd after this, or never.
    pub fn call(&mut self, now: Nanos) -> Option<Numbered> {
        if self.in_flight.is_some() || now < self.call_at {
            return None;
        }
        let call = self.next_call(now)?;
        let numbered = Numbered { number: self.next_number, call };
        self.next_number = self.next_number.wrapping_add(1);
        self.in_flight = Some(InFlight { numbered: numbered.clone(), sent_at: now });
        Some(numbered)
    }

    fn next_call(&mut self, now: Nanos) -> Option<Call> {
        let Some(lease) = self.lease else {
            if self.look_at > now || self.ends {
                return None;
            }
            return Some(Call::Grant { ttl_s: self.options.ttl_s });
        };
        if self.look_at <= now {
            return Some(Call::Renew { lease: lease.id });
        }
        for (name, store) in &mut self.stores {
            let empty = Seen::default();
            let seen = self.seen.get(name).unwrap_or(&empty);
            self.random = self.random.rotate_left(17) ^ 0x9e37_79b9_7f4a_7c15;
            if let Some(call) = store.call(now, (seen, lease.id), self.random) {
                return Some(call);
            }
        }
        let is_over = self.ends && self.stores.values().all(Store::is_idle);
        is_over.then_some(Call::Revoke { lease: lease.id })
    }

    /// Takes the answer to a call. Answers to other calls than the one in flight are not taken.
    pub fn answered(&mut self, now: Nanos, number: u64, answer: Answer) {
        let is_awaited = |call: &mut InFlight| call.numbered.number == number;
        let Some(InFlight { numbered, sent_at }) = self.in_flight.take_if(is_awaited) else {
            return;
        };
        if let Err(fault) = self.admit(&answer) {
            self.unanswered(now, &numbered.call, fault);
            return;
        }
        let sent_at = if self.neglected.keeps(Rule::SentAt) { sent_at } else { now };
        match (numbered.call, answer) {
            (call, Answer::Failed { reason }) => self.unanswered(now, &call, reason),
            (Call::Grant { .. }, Answer::Granted { lease, ttl_s, .. }) => {
                let ends_at = sent_at.after(self.lease_time(ttl_s));
                self.lease = Some(Lease { id: lease, ends_at });
                (self.look_at, self.fault) = (Nanos::ZERO, None);
            }
            (Call::Renew { .. }, Answer::Renewed { renewal, read, seen }) => {
                self.fault = None;
                self.renewed(sent_at, renewal, read);
                self.look(now, seen);
            }
            (Call::Revoke { .. }, Answer::Done { .. }) => self.lose_lease("the lease was ended"),
            (call, Answer::Done { origin, is_done }) => {
                let revision = is_done.then_some(origin.revision);
                if let Some(store) = store_of(&call).and_then(|name| self.stores.get_mut(name)) {
                    store.answered(now, revision, &self.options);
                }
                if !is_done {
                    self.look_at = now;
                }
            }
            (call, _) => {
                self.unanswered(now, &call, "etcd gave the answer to another request".to_owned());
            }
        }
    }

    /// Fails if the answer is another cluster's.
    fn admit(&mut self, answer: &Answer) -> Result<(), String> {
        for Origin { cluster, .. } in answer.origins() {
            let expected = *self.cluster.get_or_insert(cluster);
            if expected != cluster && self.neglected.keeps(Rule::Cluster) {
                return Err(format!(
                    "cluster {cluster:016x} of etcd answered, and this daemon's lease is with \
                     {expected:016x}: give the endpoints of one cluster, or restart the daemon"
                ));
            }
        }
        Ok(())
    }

    fn unanswered(&mut self, now: Nanos, call: &Call, reason: String) {
        if let Some(store) = store_of(call).and_then(|name| self.stores.get_mut(name)) {
            store.unanswered(&reason);
        }
        self.fault = Some(reason);
        self.call_at = now.after(self.options.retry);
        self.look_at = self.call_at;
    }

    fn lease_time(&self, ttl_s: u64) -> Nanos {
        let drift = if self.neglected.keeps(Rule::Drift) { self.options.drift_percent } else { 0 };
        shortened(ttl_s, drift)
    }

    fn renewed(&mut self, sent_at: Nanos, (origin, ttl_s): (Origin, u64), read: Origin) {
        if ttl_s == 0 {
            self.lose_lease("the lease is gone");
            return;
        }
        // The read is linearizable: a leader of this term answered it after the renewal. Another
        // term's leader may have ended the lease already.
        if (origin.member, origin.term) != (read.member, read.term)
            && self.neglected.keeps(Rule::Term)
        {
            return;
        }
        let ends_at = sent_at.after(self.lease_time(ttl_s));
        if let Some(lease) = &mut self.lease {
            lease.ends_at = lease.ends_at.max(ends_at);
        }
    }

    fn lose_lease(&mut self, why: &str) {
        self.lease = None;
        self.look_at = Nanos::ZERO;
        self.stores.values_mut().for_each(|store| store.lose(why));
    }

    fn look(&mut self, now: Nanos, seen: BTreeMap<String, Seen>) {
        self.seen = seen;
        if self.lease.is_none() {
            return;
        }
        let empty = Seen::default();
        for (name, store) in &mut self.stores {
            store.look(self.seen.get(name).unwrap_or(&empty));
        }
        let is_imminent = self.stores.values().any(Store::is_imminent);
        let Options { period, fast_period, .. } = self.options;
        self.look_at = now.after(if is_imminent { fast_period } else { period });
    }

    /// The next task on this host, with the store's name. Each is handed out once.
    pub fn task(&mut self, now: Nanos) -> Option<(String, Task)> {
        let cluster = self.cluster?;
        let is_over = self.lease.is_none_or(|lease| now >= lease.ends_at);
        if self.ends && is_over && self.lease.is_some() {
            // There is nothing to release any more.
            self.lose_lease("the lease has ended");
        }
        self.stores
            .iter_mut()
            .find_map(|(name, store)| Some((name.clone(), store.task(now, cluster, is_over)?)))
    }

    /// Takes the outcome of a store's task.
    pub fn ended(&mut self, now: Nanos, store: &str, outcome: Outcome) {
        let cluster = self.cluster.unwrap_or_default();
        if let Some(store) = self.stores.get_mut(store) {
            store.ended(now, outcome, cluster, &self.options);
        }
    }

    /// When [`call`](Self::call) or [`task`](Self::task) may have something without another event.
    #[must_use]
    pub fn wake_at(&self) -> Nanos {
        let task_at = self.stores.values().map(Store::task_at).min().unwrap_or(Nanos::MAX);
        if self.in_flight.is_some() {
            return task_at;
        }
        let is_over = self.ends && self.stores.values().all(Store::is_idle);
        let lease_at = self.lease.filter(|_| self.ends).map_or(Nanos::MAX, |lease| lease.ends_at);
        let task_at = task_at.min(lease_at);
        let call_at = match self.lease {
            None if self.ends => Nanos::MAX,
            None => self.look_at,
            Some(_) if is_over => Nanos::ZERO,
            Some(_) => {
                let calls = self.stores.values().map(Store::call_at).min();
                calls.unwrap_or(Nanos::MAX).min(self.look_at)
            }
        };
        task_at.min(call_at.max(self.call_at))
    }
}

/// The store that a transaction is about.
fn store_of(call: &Call) -> Option<&str> {
    match call {
        Call::Claim { store, .. }
        | Call::Settle { store, .. }
        | Call::Announce { store, .. }
        | Call::Release { store, .. } => Some(store),
        Call::Grant { .. } | Call::Renew { .. } | Call::Revoke { .. } => None,
    }
}
