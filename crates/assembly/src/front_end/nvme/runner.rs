//! A sidecore that runs NVMe queues.

use std::sync::Arc;

use sidecore_nvme::StartError;
use sidecore_nvme::io::{MakeQueue, QueueRunner, SendTask};
use sidecore_sidecore::{NotStarted, Sidecore};

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
    fn start(&self, id: u16, make: MakeQueue) -> Result<SendTask, StartError> {
        let queue = self.sidecore.start(make).map_err(|error| match error {
            NotStarted::Unit(error) => error,
            NotStarted::Watch(error) => StartError::Io { id, error },
            NotStarted::Gone => StartError::SidecoreGone,
        })?;
        self.last_start.set();
        Ok(Arc::new(move |task| queue.tell(task)))
    }
}
