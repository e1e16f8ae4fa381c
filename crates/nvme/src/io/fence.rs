//! Exclusive access of one queue to the store, which makes Compare and Write atomic (NVMe base 2.0,
//! 3.4.2).
//!
//! Between the compare and the write of a fused pair no other command of the controller may be at
//! the store, whichever sidecore serves it. The queue that has the pair *closes* the fence with a
//! ticket of its own. Every other queue looks at the fence in each poll before it takes commands:
//! one relaxed load of a line that is written only for fused pairs. If it is closed, the queue
//! takes nothing, waits until the store has answered what it took before, and then *answers* with
//! the ticket. When all have answered, the pair is carried out and the fence is opened.
//!
//! **Why it is enough to look before taking.** All that a queue does at the store it does from one
//! thread, in polls, and it answers with nothing at the store. After its answer it takes nothing as
//! long as it reads that ticket or another one there. So from the last answer to the opening
//! nothing is at the store but the pair. The answer is a release store and is read with acquire:
//! what the others did before is visible to the pair. The opening is a release store, and a queue
//! that has seen the fence closed puts an acquire fence behind the load that finds it open.
//!
//! **Queues that sleep** cannot answer. Such a queue *rests*: it says so when it is armed with
//! nothing at the store, and takes it back when it is disarmed, before it takes anything. The queue
//! that has closed the fence does not wait for resting queues. Nothing is lost between the two:
//!
//! ```text
//! the one that closes                  the one that rises
//!     holder = ticket                      resting = false
//!     fence(SeqCst)                        fence(SeqCst)
//!     read resting of all                  read holder (in its next poll)
//! ```
//!
//! One of the two fences is first. If it is the closing one, the riser reads the ticket, and takes
//! nothing. If it is the rising one, the closer reads `resting = false`, and waits for the answer.
//! A queue that is armed while the store still works for it does not rest: the store wakes it, it
//! polls, and answers. One that finds the fence closed when it is about to sleep does not sleep.
//!
//! **There is no circle of waiting queues.** A queue that waits for the fence itself, because
//! another one has closed it, has nothing at the store for its own pair, and answers. Commands that
//! wait for a buffer have not been started, and do not count as being at the store. And a queue
//! that ends, in whatever state, opens the fence if it has closed it, and rests.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};

/// The value of an open fence.
const OPEN: u64 = 0;

/// Two lines: CPUs fetch them in pairs.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Line<T>(T);

/// The state that the queues of a controller share.
#[derive(Debug)]
pub(super) struct Fence {
    /// The ticket of the queue that is alone, or [`OPEN`].
    holder: Line<AtomicU64>,
    tickets: AtomicU64,
    places: Box<[Line<Place>]>,
}

/// The state of one queue. Written by its sidecore alone.
#[derive(Debug)]
struct Place {
    resting: AtomicBool,
    /// The last ticket that was answered.
    answered: AtomicU64,
}

impl Default for Place {
    fn default() -> Self {
        // Where no queue is, nothing is taken.
        Self { resting: AtomicBool::new(true), answered: AtomicU64::new(OPEN) }
    }
}

impl Fence {
    /// A fence with a place for each of so many queues.
    pub(super) fn new(queues: usize) -> Arc<Self> {
        Arc::new(Self {
            holder: Line::default(),
            tickets: AtomicU64::new(OPEN),
            places: (0..queues).map(|_| Line::default()).collect(),
        })
    }
}

/// A queue's place at the fence.
#[derive(Debug)]
pub(super) struct Seat {
    fence: Arc<Fence>,
    index: usize,
    /// Its ticket while it has closed the fence.
    ticket: Option<u64>,
    resting: bool,
    /// The fence was closed when [`look`](Self::look) saw it last.
    was_closed: bool,
}

impl Seat {
    /// Takes place `index`, awake.
    pub(super) fn new(fence: &Arc<Fence>, index: usize) -> Self {
        let mut seat = Self {
            fence: Arc::clone(fence),
            index,
            ticket: None,
            resting: true,
            was_closed: false,
        };
        seat.rise();
        seat
    }

    fn place(&self) -> Option<&Place> {
        self.fence.places.get(self.index).map(|line| &line.0)
    }

    /// Whether another queue is, or wants to be, alone.
    #[inline(always)]
    pub(super) fn is_closed(&self) -> bool {
        let holder = self.fence.holder.0.load(Ordering::Relaxed);
        holder != OPEN && self.ticket != Some(holder)
    }

    /// Says that nothing of this queue is at the store, nor will be as long as the fence is closed.
    pub(super) fn answer(&self) {
        let holder = self.fence.holder.0.load(Ordering::Relaxed);
        if let Some(place) = self.place()
            && holder != OPEN
            && self.ticket != Some(holder)
        {
            // Release: a reader of the answer sees what this queue has done at the store.
            place.answered.store(holder, Ordering::Release);
        }
    }

    /// Returns whether the fence is closed. If it was closed and is open again, what was done at
    /// the store meanwhile is visible from here on.
    pub(super) fn look(&mut self) -> bool {
        let closed = self.is_closed();
        if std::mem::replace(&mut self.was_closed, closed) && !closed {
            fence(Ordering::Acquire);
        }
        closed
    }

    /// It sleeps, with nothing at the store.
    pub(super) fn rest(&mut self) {
        self.resting = true;
        if let Some(place) = self.place() {
            place.resting.store(true, Ordering::Release);
        }
    }

    /// It is awake; to be called before it looks at the fence.
    pub(super) fn rise(&mut self) {
        if !std::mem::take(&mut self.resting) {
            return;
        }
        if let Some(place) = self.place() {
            place.resting.store(false, Ordering::Relaxed);
        }
        fence(Ordering::SeqCst);
    }

    /// Closes the fence unless another queue has; returns whether it is closed for this queue.
    pub(super) fn close(&mut self) -> bool {
        if self.ticket.is_some() {
            return true;
        }
        let holder = &self.fence.holder.0;
        if holder.load(Ordering::Relaxed) != OPEN {
            return false;
        }
        let ticket = self.fence.tickets.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
        // Acquire: what the one before has done is visible.
        if holder.compare_exchange(OPEN, ticket, Ordering::AcqRel, Ordering::Relaxed).is_err() {
            return false;
        }
        self.ticket = Some(ticket);
        fence(Ordering::SeqCst);
        true
    }

    /// Whether all others rest or have answered.
    pub(super) fn is_alone(&self) -> bool {
        let Some(ticket) = self.ticket else { return false };
        self.fence.places.iter().enumerate().all(|(index, Line(place))| {
            index == self.index
                || place.resting.load(Ordering::Acquire)
                || place.answered.load(Ordering::Acquire) == ticket
        })
    }

    /// Opens the fence if this queue has closed it.
    pub(super) fn open(&mut self) {
        if self.ticket.take().is_some() {
            self.fence.holder.0.store(OPEN, Ordering::Release);
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.open();
        self.rest();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_closed_for_the_others_until_it_is_opened() {
        let fence = Fence::new(3);
        let (mut one, mut two) = (Seat::new(&fence, 0), Seat::new(&fence, 1));
        assert!(!one.is_closed());
        assert!(one.close() && one.close());
        assert!(!one.is_closed() && two.is_closed());
        assert!(!two.close());
        assert!(!one.is_alone());
        two.answer();
        // The third place has no queue.
        assert!(one.is_alone());
        one.open();
        assert!(!two.is_closed());
        assert!(two.close());
        // An answer is to one ticket.
        assert!(!two.is_alone());
        one.answer();
        assert!(two.is_alone());
    }

    #[test]
    fn a_queue_does_not_wait_for_resting_or_ended_queues() {
        let fence = Fence::new(3);
        let mut one = Seat::new(&fence, 0);
        let (mut two, three) = (Seat::new(&fence, 1), Seat::new(&fence, 2));
        assert!(one.close());
        two.rest();
        drop(three);
        assert!(one.is_alone());
        // A queue that comes or rises now, finds the fence closed.
        two.rise();
        let three = Seat::new(&fence, 2);
        assert!(two.is_closed() && three.is_closed());
        drop(one);
        assert!(!two.is_closed() && !three.is_closed());
    }

    /// Two threads that each close the fence, or work and sleep in turn: never are two of them
    /// inside.
    #[test]
    fn one_at_a_time() {
        const ROUNDS: u32 = 20_000;
        let fence = Fence::new(2);
        let inside = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for index in 0..2 {
                let (fence, inside) = (&fence, &inside);
                scope.spawn(move || {
                    let mut seat = Seat::new(fence, index);
                    let mut done = 0;
                    while done < ROUNDS {
                        seat.rise();
                        if seat.look() {
                            seat.answer();
                            std::thread::yield_now();
                            continue;
                        }
                        if done % 3 == 0 {
                            if !seat.close() || !seat.is_alone() {
                                std::thread::yield_now();
                                continue;
                            }
                            assert_eq!(inside.fetch_add(1, Ordering::Relaxed), 0);
                            inside.fetch_sub(1, Ordering::Relaxed);
                            seat.open();
                        } else {
                            // Ordinary commands: any number of queues, but none beside a pair.
                            let others = inside.load(Ordering::Relaxed);
                            assert_eq!(others, 0);
                        }
                        if done % 5 == 0 {
                            seat.rest();
                        }
                        done += 1;
                    }
                });
            }
        });
    }
}
