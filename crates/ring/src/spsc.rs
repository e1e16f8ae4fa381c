//! A ring between two threads of this process: one sends values, the other one receives them.
//!
//! The ring has all of its memory from the start. No call locks, waits or makes a system call.
//! Values move in batches: a batch costs each side one store that the other side sees.

use std::cell::UnsafeCell;
use std::mem::MaybeUninit;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A position on a cache line of its own, which one side writes.
#[repr(align(128))]
struct Position(AtomicUsize);

/// The part that both sides see. Positions count from the beginning, and wrap around.
struct Shared<T> {
    /// Their number is a power of two.
    slots: Box<[UnsafeCell<MaybeUninit<T>>]>,
    /// Values pushed, by the producer.
    pushed: Position,
    /// Values popped, by the consumer.
    popped: Position,
}

// SAFETY: a slot between `popped` and `pushed` belongs to the consumer, any other to the producer;
// a slot changes hands by a store with release and a load with acquire of one of these. So no slot
// is accessed by two threads at a time, and values move between threads only.
unsafe impl<T: Send> Sync for Shared<T> {}

/// The end that sends.
pub struct Producer<T> {
    shared: Arc<Shared<T>>,
    pushed: usize,
    /// `Shared::popped` when the producer last looked.
    popped: usize,
}

/// The end that receives.
pub struct Consumer<T> {
    shared: Arc<Shared<T>>,
    popped: usize,
}

/// Makes a ring with room for `capacity` values at least.
#[must_use]
pub fn spsc<T: Send>(capacity: usize) -> (Producer<T>, Consumer<T>) {
    let places = capacity.max(1).checked_next_power_of_two().unwrap_or(1);
    let slots = std::iter::repeat_with(|| UnsafeCell::new(MaybeUninit::uninit()));
    let shared = Arc::new(Shared {
        slots: slots.take(places).collect(),
        pushed: Position(AtomicUsize::new(0)),
        popped: Position(AtomicUsize::new(0)),
    });
    let producer = Producer { shared: Arc::clone(&shared), pushed: 0, popped: 0 };
    (producer, Consumer { shared, popped: 0 })
}

impl<T> Shared<T> {
    /// The slot at a position; there is one for each.
    #[inline]
    fn slot(&self, position: usize) -> Option<*mut MaybeUninit<T>> {
        let mask = self.slots.len().wrapping_sub(1);
        self.slots.get(position & mask).map(UnsafeCell::get)
    }
}

impl<T> Producer<T> {
    /// Moves values from the front of `values` to the ring, as many as it has room for, and shows
    /// them to the consumer. Returns their number.
    #[inline]
    pub fn send(&mut self, values: &mut Vec<T>) -> usize {
        let wanted = values.len();
        if self.room() < wanted {
            // Acquire: the consumer has moved the values out of the slots before.
            self.popped = self.shared.popped.0.load(Ordering::Acquire);
        }
        let count = wanted.min(self.room());
        if count == 0 {
            return 0;
        }
        for value in values.drain(..count) {
            if let Some(slot) = self.shared.slot(self.pushed) {
                // SAFETY: the slot is not between `popped` and `pushed`, so it is the producer's
                // and has no value, and `slot` is valid while `shared` is.
                unsafe { slot.write(MaybeUninit::new(value)) };
            }
            self.pushed = self.pushed.wrapping_add(1);
        }
        // Release: the consumer sees the values in the slots.
        self.shared.pushed.0.store(self.pushed, Ordering::Release);
        count
    }

    /// The free slots, as of the last look.
    #[inline]
    fn room(&self) -> usize {
        self.shared.slots.len().saturating_sub(self.pushed.wrapping_sub(self.popped))
    }
}

impl<T> Consumer<T> {
    /// Appends all values that are there to `values`. Returns their number.
    #[inline]
    pub fn receive(&mut self, values: &mut Vec<T>) -> usize {
        // Acquire: the values in the slots are seen.
        let pushed = self.shared.pushed.0.load(Ordering::Acquire);
        let count = pushed.wrapping_sub(self.popped);
        if count == 0 {
            return 0;
        }
        // No call between a read of a slot and the store below may panic.
        values.reserve(count);
        while self.popped != pushed {
            if let Some(slot) = self.shared.slot(self.popped) {
                // SAFETY: the slot is between `popped` and `pushed`, so it is the consumer's and
                // has a value, which is moved out once: `popped` goes on.
                values.push(unsafe { slot.read().assume_init() });
            }
            self.popped = self.popped.wrapping_add(1);
        }
        // Release: the values have been moved out when the producer sees it.
        self.shared.popped.0.store(self.popped, Ordering::Release);
        count
    }

    /// Whether no value is there.
    #[must_use]
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.popped == self.shared.pushed.0.load(Ordering::Acquire)
    }
}

impl<T> Drop for Shared<T> {
    /// Both ends are gone: drops the values that were not popped.
    fn drop(&mut self) {
        let (mut at, end) = (*self.popped.0.get_mut(), *self.pushed.0.get_mut());
        while at != end {
            if let Some(slot) = self.slot(at) {
                // SAFETY: both ends are gone, so the slot is not accessed elsewhere; it is between
                // `popped` and `pushed`, so it has a value, which is dropped once.
                unsafe { (*slot).assume_init_drop() };
            }
            at = at.wrapping_add(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn values_come_out_in_order() {
        let (mut producer, mut consumer) = spsc(4);
        let mut received = Vec::new();
        assert!(consumer.is_empty() && consumer.receive(&mut received) == 0);
        for round in 0..9_u64 {
            let sent = [0, 1, 2].map(|value| round * 10 + value).to_vec();
            assert_eq!(producer.send(&mut sent.clone()), 3);
            assert!(!consumer.is_empty());
            assert_eq!(consumer.receive(&mut received), 3);
            assert_eq!(received.split_off(0), sent);
        }
    }

    #[test]
    fn a_full_ring_takes_what_it_has_room_for() {
        for capacity in [0, 1, 3, 4] {
            let (mut producer, mut consumer) = spsc(capacity);
            let places = capacity.max(1).next_power_of_two();
            let mut values: Vec<usize> = (0..places + 2).collect();
            assert_eq!(producer.send(&mut values), places);
            assert_eq!(values, [places, places + 1]);
            assert_eq!(producer.send(&mut values), 0);
            let mut received = vec![7];
            assert_eq!(consumer.receive(&mut received), places, "{capacity}");
            assert_eq!(received[..2], [7, 0]);
            assert_eq!(producer.send(&mut values), 2.min(places));
        }
    }

    #[test]
    fn each_value_is_dropped_once() {
        thread_local!(static DROPPED: Cell<u32> = const { Cell::new(0) });
        struct Counted;
        impl Drop for Counted {
            fn drop(&mut self) {
                DROPPED.set(DROPPED.get() + 1);
            }
        }
        let (mut producer, mut consumer) = spsc(8);
        let counted = |count: usize| std::iter::repeat_with(|| Counted).take(count).collect();
        let (mut values, mut received): (Vec<Counted>, _) = (counted(6), Vec::new());
        producer.send(&mut values);
        consumer.receive(&mut received);
        assert_eq!((received.len(), DROPPED.get()), (6, 0));
        drop(received);
        assert_eq!(DROPPED.get(), 6);
        producer.send(&mut counted(5));
        drop(consumer);
        assert_eq!(DROPPED.get(), 6);
        drop(producer);
        assert_eq!(DROPPED.get(), 11);
    }

    #[test]
    fn another_thread_receives_what_this_one_sends() {
        const COUNT: u64 = 200_000;
        let (mut producer, mut consumer) = spsc(16);
        let reader = std::thread::spawn(move || {
            let (mut next, mut received) = (0, Vec::<Box<u64>>::new());
            while next < COUNT {
                if consumer.receive(&mut received) == 0 {
                    std::thread::yield_now();
                }
                for value in received.drain(..) {
                    assert_eq!(*value, next);
                    next += 1;
                }
            }
        });
        let mut values = Vec::new();
        for number in 0..COUNT {
            values.push(Box::new(number));
            while values.len() > number as usize % 7 && producer.send(&mut values) == 0 {
                std::thread::yield_now();
            }
        }
        while !values.is_empty() {
            producer.send(&mut values);
        }
        reader.join().unwrap();
    }
}
