//! Questions of a stage to the sidecore of its queue, which has the channels to the store. A stage
//! asks while its own channel is opened, or attaches memory: the sidecore waits for it then.

use std::cell::{Cell, RefCell};
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};

use sidecore_block::BlockRequest;
use sidecore_memory::GuestMemory;
use sidecore_reactor::Bell;
use sidecore_ring::{Consumer, Producer};
use sidecore_sidecore::Handle;

use crate::unit::StageUnit;

/// A request in a ring.
pub(crate) type Boxed = Box<BlockRequest>;

/// A message from a stage's thread to the sidecore that waits for it.
pub(crate) enum Message {
    /// The stage opens a channel to the store, for up to `depth` requests.
    Open { depth: usize, reply: Sender<io::Result<Opened>> },
    /// The stage attaches memory to the channel of this number, in the order of opening.
    Attach { store: usize, memory: GuestMemory, reply: Sender<io::Result<()>> },
    /// The stage's own channel is open.
    Started(io::Result<Handle<StageUnit>>),
    /// The stage's own channel has attached memory.
    Attached(io::Result<()>),
}

/// The stage's end of a channel to the store.
pub(crate) struct Opened {
    pub(crate) store: usize,
    pub(crate) requests: Producer<Boxed>,
    pub(crate) returns: Consumer<Boxed>,
    pub(crate) takes_write_through: bool,
}

/// The state that a stage's channel and its channels to the store share on the stage's thread.
pub(crate) struct Line {
    /// `None` while no sidecore waits.
    desk: RefCell<Option<Sender<Message>>>,
    /// Wakes the queue.
    pub(crate) queue: Arc<Bell>,
    /// Wakes the stage's thread.
    pub(crate) stage: Arc<Bell>,
    /// Requests that have moved between the stage and the store.
    pub(crate) moved: Cell<usize>,
}

impl Line {
    pub(crate) fn new(queue: Arc<Bell>, stage: Arc<Bell>) -> Self {
        Self { desk: RefCell::new(None), queue, stage, moved: Cell::new(0) }
    }

    /// Runs `call`, during which the sidecore at the other end of `desk` answers questions.
    pub(crate) fn served<T>(&self, desk: &Sender<Message>, call: impl FnOnce() -> T) -> T {
        *self.desk.borrow_mut() = Some(desk.clone());
        let result = call();
        *self.desk.borrow_mut() = None;
        result
    }

    /// Asks the sidecore, and waits for its answer.
    pub(crate) fn ask<T>(
        &self,
        question: impl FnOnce(Sender<io::Result<T>>) -> Message,
    ) -> io::Result<T> {
        let desk = self.desk.borrow();
        let Some(desk) = &*desk else {
            return Err(io::Error::other(
                "a stage opens the channels to its store, and attaches memory to them, when its \
                 own channel does",
            ));
        };
        let gone = || io::Error::new(io::ErrorKind::TimedOut, "its queue does not wait any more");
        let (reply, answer) = channel();
        desk.send(question(reply)).map_err(|_| gone())?;
        answer.recv().map_err(|_| gone())?
    }
}

/// The line of the stage's channel that is being opened on this thread.
#[derive(Default)]
pub(crate) struct Opening(pub(crate) RefCell<Option<Rc<Line>>>);
