//! Closing what holds descriptors that a peer has sent, on a thread of its own: the peer can make that take for ever.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use sidecore_nvme::Done;
use sidecore_socket::close_aside;

use crate::ticket::{Ticket, Wake};

/// Something that is dropped on a thread of its own, which nobody waits for.
#[derive(Debug)]
pub(crate) struct Aside<T: Send + 'static>(Option<T>);

impl<T: Send + 'static> Aside<T> {
    pub(crate) const fn new(what: T) -> Self {
        Self(Some(what))
    }
}

impl<T: Send + 'static> Drop for Aside<T> {
    fn drop(&mut self) {
        if let Some(what) = self.0.take() {
            close_aside(what);
        }
    }
}

/// The closing of something that has to be over before its owner goes on. Dropped before that, it goes on by itself.
#[derive(Debug)]
pub(crate) enum Closing<T: Send + 'static> {
    /// There is no thread for it yet.
    NotBegun(Aside<T>),
    Begun(Ticket),
}

impl<T: Send + 'static> Closing<T> {
    /// Begins to close something; `wake` is called when that is done, if it was not over when it was asked for.
    pub(crate) fn begin(what: T, wake: &Wake) -> Self {
        let (ticket, done) = Ticket::issue(wake);
        match close(what, done) {
            Ok(()) => Self::Begun(ticket),
            Err((what, error)) => {
                tracing::warn!(%error, "no thread to close a connection on");
                Self::NotBegun(Aside::new(what))
            }
        }
    }

    /// Tries once more to begin it, if need be.
    pub(crate) fn try_again(&mut self, wake: &Wake) {
        if let Self::NotBegun(what) = self
            && let Some(what) = what.0.take()
        {
            *self = Self::begin(what, wake);
        }
    }

    /// Whether it has to be tried again.
    pub(crate) const fn has_begun(&self) -> bool {
        matches!(self, Self::Begun(_))
    }

    /// Whether it is closed.
    pub(crate) fn is_over(&self) -> bool {
        matches!(self, Self::Begun(ticket) if ticket.is_done())
    }
}

/// Starts a thread that drops something and then calls `done`. Without a thread, it comes back, and `done` is called.
fn close<T: Send + 'static>(what: T, done: Done) -> Result<(), (T, io::Error)> {
    // A thread that does not start drops what it was given.
    let parcel = Arc::new(Mutex::new(Some(what)));
    let theirs = Arc::clone(&parcel);
    let close = move || {
        drop(take(&theirs));
        done.call();
    };
    match thread::Builder::new().name("vfu-close".to_owned()).spawn(close) {
        Ok(_) => Ok(()),
        Err(error) => match take(&parcel) {
            Some(what) => Err((what, error)),
            None => Ok(()),
        },
    }
}

fn take<T>(parcel: &Mutex<Option<T>>) -> Option<T> {
    parcel.lock().unwrap_or_else(PoisonError::into_inner).take()
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, channel};
    use std::time::Duration;

    use super::*;

    const SOON: Duration = Duration::from_secs(10);

    /// Its drop waits until the test lets it go.
    struct Slow(Receiver<()>);

    impl Drop for Slow {
        fn drop(&mut self) {
            let _ = self.0.recv_timeout(SOON);
        }
    }

    #[test]
    fn whoever_closes_does_not_wait_and_hears_of_the_end() {
        let (let_go, held) = channel();
        let (woken, wait) = channel();
        let wake: Wake = Arc::new(move || woken.send(()).unwrap());
        let closing = Closing::begin(Slow(held), &wake);
        assert!(closing.has_begun() && !closing.is_over());
        drop(let_go);
        wait.recv_timeout(SOON).unwrap();
        assert!(closing.is_over());
    }

    #[test]
    fn nobody_waits_for_what_is_dropped_aside() {
        let (let_go, held) = channel::<()>();
        drop(Aside::new(Slow(held)));
        drop(Closing::NotBegun(Aside::new(Slow(channel().1))));
        drop(let_go);
    }
}
