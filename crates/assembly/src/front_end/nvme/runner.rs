//! A sidecore as NVMe queues see it.

use std::sync::Arc;

use sidecore_nvme::StartError;
use sidecore_nvme::io::{IoQueue, MakeQueue, QueueRunner, Task};
use sidecore_reactor::PollableId;
use sidecore_sidecore::Sidecore;

use super::super::LastStart;

pub(super) struct Runner {
    sidecore: Sidecore,
    last_start: Arc<LastStart>,
}

impl Runner {
    pub(super) fn boxed(sidecore: &Sidecore, last_start: &Arc<LastStart>) -> Box<dyn QueueRunner> {
        Box::new(Self { sidecore: sidecore.clone(), last_start: Arc::clone(last_start) })
    }
}

impl QueueRunner for Runner {
    fn start(&self, make: MakeQueue) -> Result<PollableId<IoQueue>, StartError> {
        let started = self.sidecore.ask(move |reactor| {
            let queue = make(reactor.context())?;
            let id = queue.id();
            reactor.add(queue).map_err(|error| StartError::Io { id, error })
        });
        let started = started.map_err(|_| StartError::SidecoreGone)?;
        if started.is_ok() {
            self.last_start.set();
        }
        started
    }

    fn tell(&self, queue: PollableId<IoQueue>, task: Task) {
        self.sidecore.tell(move |reactor| {
            if let Some(queue) = reactor.get_mut(queue) {
                task(queue);
            }
        });
    }
}
