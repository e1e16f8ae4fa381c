//! A sidecore as NVMe queues see it.

use sidecore_nvme::StartError;
use sidecore_nvme::io::{MakeQueue, QueueRunner, Task};
use sidecore_reactor::PollableId;
use sidecore_units::CoreId;

use crate::queue::Queue;
use crate::sidecore::Sidecore;

pub(super) struct Runner(Sidecore);

impl Runner {
    pub(super) fn boxed(sidecore: &Sidecore) -> Box<dyn QueueRunner> {
        Box::new(Self(sidecore.clone()))
    }
}

impl QueueRunner for Runner {
    fn core(&self) -> Option<CoreId> {
        self.0.cpu()
    }

    fn start(&self, make: MakeQueue) -> Result<PollableId, StartError> {
        let counted = self.0.count_queue();
        let started = self.0.ask(move |reactor| {
            let queue = make()?;
            let id = queue.id();
            reactor
                .add(Queue::Nvme { queue: Box::new(queue), _counted: counted })
                .map_err(|error| StartError::Io { id, error })
        });
        started.map_err(|_| StartError::SidecoreGone)?
    }

    fn tell(&self, queue: PollableId, task: Task) {
        self.0.tell(move |reactor| {
            if let Some(queue) = reactor.get_mut(queue).and_then(Queue::nvme) {
                task(queue);
            }
        });
    }
}
