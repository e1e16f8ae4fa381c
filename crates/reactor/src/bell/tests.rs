//! The bell itself, and all interleavings of its steps.

use std::collections::HashSet;

use super::*;

#[test]
fn only_a_sleeping_receiver_is_signalled_and_only_once() {
    let listener = Listener::new().unwrap();
    let bell = listener.bell();
    assert!(!bell.ring(), "the receiver polls");
    listener.sleep();
    assert!(bell.ring() && !bell.ring());
    listener.wake();
    assert_eq!((listener.owed.get(), bell.event.drain()), (0, 0), "the signal was taken");
    listener.sleep();
    listener.wake();
    assert!(!bell.ring());
    assert_eq!(listener.owed.get(), 0);
}

#[test]
fn a_signal_that_is_late_is_taken_by_a_later_poll() {
    let listener = Listener::new().unwrap();
    let bell = listener.bell();
    listener.sleep();
    // The sender has seen the flag, and has not signalled yet.
    assert!(bell.sleeps.swap(false, Ordering::AcqRel));
    listener.wake();
    assert_eq!(listener.owed.get(), 1);
    bell.event.signal();
    listener.wake();
    assert_eq!((listener.owed.get(), bell.event.drain()), (0, 0));
}

/// The next step of the sender, which sends [`MESSAGES`].
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Sender {
    Publish,
    LoadFlag,
    SwapFlag,
    Signal,
}

/// The next step of the receiver.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Receiver {
    /// Takes the messages that are there.
    Poll,
    RaiseFlag,
    LookAgain,
    /// Blocks while the event has no signal.
    Sleep,
    SwapFlag,
    Drain,
}

const MESSAGES: u8 = 3;

/// A protocol with a fault, for which the model must find a lost message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Fault {
    None,
    /// The sender looks at the flag before it publishes.
    FlagFirst,
    /// The receiver does not look again.
    NoSecondLook,
}

/// The shared words, and the next steps of both sides.
///
/// Each side has a sequentially consistent fence between its store and its load, so all that can
/// happen are interleavings of these steps.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Model {
    fault: Fault,
    published: u8,
    taken: u8,
    flag: bool,
    /// The sender has seen the flag.
    seen: bool,
    signals: u8,
    owed: u8,
    sender: Sender,
    receiver: Receiver,
}

impl Model {
    fn new(fault: Fault) -> Self {
        let first = if fault == Fault::FlagFirst { Sender::LoadFlag } else { Sender::Publish };
        Self {
            fault,
            published: 0,
            taken: 0,
            flag: false,
            seen: false,
            signals: 0,
            owed: 0,
            sender: first,
            receiver: Receiver::Poll,
        }
    }

    /// The sender's step after it has both published and looked at the flag.
    fn decided(&self) -> Sender {
        let first = Self::new(self.fault).sender;
        if self.seen { Sender::SwapFlag } else { first }
    }

    /// The state after a step of the sender; `None` if it has sent all messages.
    fn sender(&self) -> Option<Self> {
        let mut next = self.clone();
        let (flag_first, first) = (self.fault == Fault::FlagFirst, Self::new(self.fault).sender);
        if self.sender == first && self.published == MESSAGES {
            return None;
        }
        next.sender = match self.sender {
            Sender::Publish => {
                next.published += 1;
                if flag_first { next.decided() } else { Sender::LoadFlag }
            }
            Sender::LoadFlag => {
                next.seen = self.flag;
                if flag_first { Sender::Publish } else { next.decided() }
            }
            Sender::SwapFlag => {
                next.flag = false;
                if self.flag { Sender::Signal } else { first }
            }
            Sender::Signal => {
                next.signals += 1;
                first
            }
        };
        Some(next)
    }

    /// The state after a step of the receiver; `None` if it sleeps.
    fn receiver(&self) -> Option<Self> {
        let mut next = self.clone();
        next.receiver = match self.receiver {
            Receiver::Poll => {
                next.taken = self.published;
                Receiver::RaiseFlag
            }
            Receiver::RaiseFlag => {
                next.flag = true;
                match self.fault {
                    Fault::NoSecondLook => Receiver::Sleep,
                    _ => Receiver::LookAgain,
                }
            }
            Receiver::LookAgain if self.published != self.taken => Receiver::SwapFlag,
            Receiver::LookAgain => Receiver::Sleep,
            Receiver::Sleep if self.signals == 0 => return None,
            Receiver::Sleep => Receiver::SwapFlag,
            Receiver::SwapFlag => {
                next.owed += u8::from(!self.flag);
                next.flag = false;
                Receiver::Drain
            }
            Receiver::Drain => {
                if self.owed > 0 {
                    next.owed = self.owed.saturating_sub(self.signals);
                    next.signals = 0;
                }
                Receiver::Poll
            }
        };
        Some(next)
    }
}

/// All states in which neither side has a step left.
fn ends(fault: Fault) -> Vec<Model> {
    let (mut seen, mut open, mut ends) = (HashSet::new(), vec![Model::new(fault)], Vec::new());
    while let Some(state) = open.pop() {
        if !seen.insert(state.clone()) {
            continue;
        }
        let next: Vec<Model> = [state.sender(), state.receiver()].into_iter().flatten().collect();
        if next.is_empty() {
            ends.push(state);
        }
        open.extend(next);
    }
    ends
}

#[test]
fn no_interleaving_leaves_a_message_with_a_receiver_that_sleeps() {
    let all = ends(Fault::None);
    assert!(!all.is_empty());
    for end in all {
        assert_eq!((end.taken, end.signals, end.owed), (MESSAGES, 0, 0));
    }
}

#[test]
fn the_model_finds_a_message_that_is_lost() {
    for fault in [Fault::FlagFirst, Fault::NoSecondLook] {
        assert!(ends(fault).iter().any(|end| end.taken < MESSAGES), "{fault:?}");
    }
}
