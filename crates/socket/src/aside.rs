//! Closing descriptors in the background.

use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

/// Drops `value`, which holds a peer's descriptors or a connection with unreceived messages, on a
/// thread of its own: the peer can make the close take for ever (see
/// [`Descriptor`](crate::Descriptor)).
///
/// If no thread can be started, `value` stays open until the process ends.
pub fn close_aside<T: Send + 'static>(value: T) {
    // If the thread does not start, `spawn` drops the closure, and with it only its reference.
    let shared = Arc::new(Mutex::new(Some(value)));
    let for_thread = Arc::clone(&shared);
    let close = move || drop(take(&for_thread));
    if let Err(error) = thread::Builder::new().name("close".to_owned()).spawn(close) {
        tracing::error!(%error, "no thread to close a connection on");
        std::mem::forget(take(&shared));
    }
}

fn take<T>(shared: &Mutex<Option<T>>) -> Option<T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner).take()
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, channel};
    use std::time::Duration;

    use super::*;

    /// Blocks in its drop until the test allows it to end.
    struct Slow(Receiver<()>);

    impl Drop for Slow {
        fn drop(&mut self) {
            let _ = self.0.recv_timeout(Duration::from_secs(10));
        }
    }

    #[test]
    fn the_caller_does_not_wait_for_the_close() {
        let (release, blocked) = channel();
        let (closed, wait) = channel();
        close_aside((Slow(blocked), closed));
        assert!(wait.try_recv().is_err_and(|error| error == std::sync::mpsc::TryRecvError::Empty));
        drop(release);
        let _: Result<(), _> = wait.recv();
    }
}
