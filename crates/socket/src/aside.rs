//! Closing what nobody should wait for.

use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

/// Drops something that holds a peer's descriptors, or a connection with messages that nobody has received, on a thread of
/// its own: the peer can make that take for ever (see [`Descriptor`](crate::Descriptor)).
///
/// Without a thread it stays open until the process ends.
pub fn close_aside<T: Send + 'static>(what: T) {
    // A thread that does not start drops what it was given.
    let held = Arc::new(Mutex::new(Some(what)));
    let theirs = Arc::clone(&held);
    let close = move || drop(take(&theirs));
    if let Err(error) = thread::Builder::new().name("close".to_owned()).spawn(close) {
        tracing::error!(%error, "no thread to close a connection on");
        std::mem::forget(take(&held));
    }
}

fn take<T>(held: &Mutex<Option<T>>) -> Option<T> {
    held.lock().unwrap_or_else(PoisonError::into_inner).take()
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, channel};
    use std::time::Duration;

    use super::*;

    /// Its drop waits until the test lets it go.
    struct Slow(Receiver<()>);

    impl Drop for Slow {
        fn drop(&mut self) {
            let _ = self.0.recv_timeout(Duration::from_secs(10));
        }
    }

    #[test]
    fn nobody_waits_for_it() {
        let (let_go, held) = channel();
        let (over, wait) = channel();
        close_aside((Slow(held), over));
        assert!(wait.try_recv().is_err_and(|error| error == std::sync::mpsc::TryRecvError::Empty));
        drop(let_go);
        let _: Result<(), _> = wait.recv();
    }
}
