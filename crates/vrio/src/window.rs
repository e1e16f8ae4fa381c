//! The frames of a peer that have arrived.

/// Words of the window.
const WORDS: u64 = 16;
const WORD_BITS: u64 = 64;
/// A frame that is so far behind the newest one is dropped.
pub(crate) const WINDOW_FRAMES: u64 = 1024;

/// A window over the peer's counters, as in RFC 6479: each frame is taken once, in any order,
/// unless it is [`WINDOW_FRAMES`] late.
#[derive(Clone, Debug, Default)]
pub(crate) struct Window {
    /// The largest counter that was taken.
    newest: u64,
    /// A bit for each counter up to `newest`; word `n` has those from 64 n on, modulo the window.
    seen: [u64; WORDS as usize],
}

impl Window {
    /// Whether `counter` is new.
    #[inline]
    pub(crate) fn is_new(&self, counter: u64) -> bool {
        if counter > self.newest {
            return true;
        }
        // A word's worth less, because the newest word is cleared as a whole.
        let late = self.newest.wrapping_sub(counter);
        counter != 0
            && late < WINDOW_FRAMES.wrapping_sub(WORD_BITS)
            && self.word(counter) & bit(counter) == 0
    }

    /// Takes a frame that was new and whose seal was right.
    #[inline]
    pub(crate) fn take(&mut self, counter: u64) {
        if counter > self.newest {
            let (from, to) = (self.newest / WORD_BITS, counter / WORD_BITS);
            for word in 0..to.wrapping_sub(from).min(WORDS) {
                if let Some(word) = self.seen.get_mut(index(to.wrapping_sub(word))) {
                    *word = 0;
                }
            }
            self.newest = counter;
        }
        if let Some(word) = self.seen.get_mut(index(counter / WORD_BITS)) {
            *word |= bit(counter);
        }
    }

    /// The largest counter that was taken.
    pub(crate) const fn newest(&self) -> u64 {
        self.newest
    }

    fn word(&self, counter: u64) -> u64 {
        self.seen.get(index(counter / WORD_BITS)).copied().unwrap_or(u64::MAX)
    }
}

const fn index(word: u64) -> usize {
    (word % WORDS) as usize
}

const fn bit(counter: u64) -> u64 {
    1_u64.wrapping_shl((counter % WORD_BITS) as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take(window: &mut Window, counter: u64) -> bool {
        let is_new = window.is_new(counter);
        if is_new {
            window.take(counter);
        }
        is_new
    }

    #[test]
    fn each_counter_is_taken_once_in_any_order() {
        let mut window = Window::default();
        for counter in [5, 1, 4, 2, 3, 200, 70, 199, 64, 63, 65, 128] {
            assert!(take(&mut window, counter), "{counter}");
            assert!(!take(&mut window, counter), "{counter} again");
        }
        assert_eq!(window.newest(), 200);
        assert!(!take(&mut window, 0), "no frame has this counter");
    }

    #[test]
    fn a_frame_that_is_too_late_is_not_new() {
        let mut window = Window::default();
        assert!(take(&mut window, 10_000));
        assert!(take(&mut window, 10_000 - (WINDOW_FRAMES - WORD_BITS) + 1));
        assert!(!take(&mut window, 10_000 - (WINDOW_FRAMES - WORD_BITS)));
        assert!(!take(&mut window, 1));
    }

    #[test]
    fn a_jump_over_the_whole_window_forgets_it() {
        let mut window = Window::default();
        for counter in 1..=WINDOW_FRAMES {
            assert!(take(&mut window, counter));
        }
        let far = 1 << 40;
        assert!(take(&mut window, far));
        for counter in far - 900..far {
            assert!(take(&mut window, counter), "{counter}");
        }
        assert!(take(&mut window, u64::MAX));
        assert!(!take(&mut window, u64::MAX));
    }

    proptest::proptest! {
        #[test]
        fn it_agrees_with_a_set(
            steps in proptest::collection::vec((0_u64..300, 0_u64..400), 1..300),
        ) {
            let (mut window, mut seen) = (Window::default(), std::collections::HashSet::new());
            let mut base = 1_u64;
            for (advance, back) in steps {
                base += advance;
                let counter = base.saturating_sub(back).max(1);
                let is_new = take(&mut window, counter);
                proptest::prop_assert_eq!(is_new, seen.insert(counter), "{}", counter);
            }
        }
    }
}
