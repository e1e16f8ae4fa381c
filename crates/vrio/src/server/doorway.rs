//! The way to a session: challenges to those who ask for one, and how many are let in at a time.

use std::collections::VecDeque;

use sidecore_units::Nanos;

use super::budget::Budget;
use super::host::HostOptions;
use crate::Reason;
use crate::cookie::{keyed_hash, words};
use crate::port::Peer;
use crate::wire::Greeting;

/// A cookie is good for this time.
const COOKIE_LIFE: Nanos = Nanos::from_millis(10_000);
/// CHALLENGEs that wait for the next poll. Further ones are dropped: the client asks again.
const CHALLENGES: usize = 64;

/// Cookies, and a budget for handshakes.
pub(super) struct Doorway {
    secret: [u64; 2],
    /// Random numbers that were drawn.
    drawn: u64,
    /// Challenges that are to be sent: to where, and what they repeat of the HELLO.
    challenges: VecDeque<(Peer, Greeting)>,
    budget: Budget,
    station: fn(Peer) -> u64,
}

impl Doorway {
    pub(super) fn new(options: &HostOptions) -> Self {
        Self {
            secret: options.secret,
            drawn: 0,
            challenges: VecDeque::with_capacity(CHALLENGES),
            budget: Budget::new(options.handshake_burst, options.handshake_every),
            station: options.station,
        }
    }

    /// The next random number.
    pub(super) fn random(&mut self) -> u64 {
        self.drawn = self.drawn.wrapping_add(1);
        keyed_hash(self.secret, [self.drawn])
    }

    /// The cookie for the HELLO with this life and number from `to`; not 0.
    fn cookie(&self, to: Peer, (life, number): (u64, u64), challenged_ns: u64) -> u64 {
        keyed_hash(self.secret, [to.0, life, number, challenged_ns]) | 1
    }

    /// Whether a HELLO from `from` answers a CHALLENGE.
    pub(super) fn knows(&self, now: Nanos, from: Peer, greeting: &Greeting) -> bool {
        let Greeting { life, number, challenged_ns, cookie, .. } = *greeting;
        let age = now.0.checked_sub(challenged_ns);
        age.is_some_and(|age| age <= COOKIE_LIFE.0)
            && cookie == self.cookie(from, (life, number), challenged_ns)
    }

    /// Has a HELLO challenged.
    pub(super) fn challenge(&mut self, to: Peer, greeting: &Greeting) {
        if self.challenges.len() < CHALLENGES {
            let Greeting { life, number, queue, .. } = *greeting;
            self.challenges
                .push_back((to, Greeting { life, number, queue, ..Greeting::default() }));
        }
    }

    /// Takes the CHALLENGE that is to be sent next, and to where.
    pub(super) fn next_challenge(&mut self, now: Nanos) -> Option<(Peer, Greeting)> {
        let (to, challenge) = self.challenges.pop_front()?;
        let challenged_ns = now.0;
        let cookie = self.cookie(to, (challenge.life, challenge.number), challenged_ns);
        Some((to, Greeting { challenged_ns, cookie, ..challenge }))
    }

    pub(super) fn has_challenges(&self) -> bool {
        !self.challenges.is_empty()
    }

    /// A hash by which a HELLO's message is known again.
    pub(super) fn digest(&self, handshake: u8, message: &[u8]) -> u64 {
        let first = [handshake.into(), message.len() as u64];
        keyed_hash(self.secret, first.into_iter().chain(words(message)))
    }

    /// Whether there is time for a handshake with `from`.
    ///
    /// # Errors
    /// There is not.
    pub(super) fn admit(&mut self, now: Nanos, from: Peer) -> Result<(), Reason> {
        let is_admitted = self.budget.take(now, (self.station)(from));
        is_admitted.then_some(()).ok_or(Reason::Handshakes)
    }

    /// A client at `from` has proved itself.
    pub(super) fn proved(&mut self, from: Peer) {
        self.budget.proved((self.station)(from));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn doorway() -> Doorway {
        Doorway::new(&HostOptions { secret: [1, 2], handshake_burst: 3, ..HostOptions::default() })
    }

    #[test]
    fn a_cookie_is_good_for_one_hello_from_one_address_and_for_some_time() {
        let mut doorway = doorway();
        let hello = Greeting { life: 5, number: 6, ..Greeting::default() };
        assert!(!doorway.knows(Nanos(100), Peer(1), &hello));
        doorway.challenge(Peer(1), &hello);
        let (to, challenge) = doorway.next_challenge(Nanos(100)).unwrap();
        assert_eq!((to, challenge.life, challenge.number), (Peer(1), 5, 6));
        assert!(doorway.knows(Nanos(100), Peer(1), &challenge));
        assert!(doorway.knows(Nanos(100).after(COOKIE_LIFE), Peer(1), &challenge));
        let late = Nanos(101).after(COOKIE_LIFE);
        assert!(!doorway.knows(late, Peer(1), &challenge));
        assert!(!doorway.knows(Nanos(99), Peer(1), &challenge));
        assert!(!doorway.knows(Nanos(100), Peer(2), &challenge));
        for change in [
            Greeting { life: 6, ..challenge },
            Greeting { number: 7, ..challenge },
            Greeting { challenged_ns: 99, ..challenge },
            Greeting { cookie: challenge.cookie ^ 2, ..challenge },
        ] {
            assert!(!doorway.knows(Nanos(100), Peer(1), &change), "{change:?}");
        }
        assert!(!doorway.has_challenges());
    }

    #[test]
    fn challenges_that_do_not_get_out_take_no_memory() {
        let mut doorway = doorway();
        for life in 0..10_000 {
            doorway.challenge(Peer(life), &Greeting { life, ..Greeting::default() });
        }
        assert_eq!(doorway.challenges.len(), CHALLENGES);
    }
}
