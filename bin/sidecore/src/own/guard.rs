//! Sees that another host has fenced this one while the command runs: its writes fail then.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};

use sidecore_cluster::Watch;

/// A thread that looks at the fence until this is dropped. The end does not wait for it: a look can
/// hang as long as a disk does.
pub(super) struct Guard {
    _ends: Sender<()>,
    faults: Receiver<String>,
    fault: Option<String>,
}

impl Guard {
    pub(super) fn start(mut watch: Watch) -> Self {
        let ((ends, end), (tell, faults)) = (channel::<()>(), channel());
        let failed = tell.clone();
        let run = move || {
            loop {
                if let Err(why) = watch.look() {
                    let _ = tell.send(why);
                    return;
                }
                if end.recv_timeout(Watch::PERIOD) != Err(RecvTimeoutError::Timeout) {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name("fence-watch".to_owned());
        if let Err(error) = thread.spawn(run) {
            let _ = failed.send(format!("no thread sees whether this host is fenced: {error}"));
        }
        Self { _ends: ends, faults, fault: None }
    }

    /// The reason why the command has to end.
    pub(super) fn fault(&mut self) -> Option<String> {
        if self.fault.is_none() {
            self.fault = self.faults.try_recv().ok();
        }
        self.fault.clone()
    }
}
