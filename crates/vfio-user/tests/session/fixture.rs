//! A session with a function that records its calls, and commands for it.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use sidecore_vfio_user::{
    Body, Command, DmaMap, DmaUnmap, IrqSet, Message, ProtocolError, Session, vfio,
};

use crate::common::*;

pub(crate) const EINVAL: u32 = 22;
pub(crate) const ENOENT: u32 = 2;
pub(crate) const EEXIST: u32 = 17;
pub(crate) const ENOSPC: u32 = 28;
pub(crate) const ENOTSUP: u32 = 95;
pub(crate) const EVENTFD: u32 = vfio::IRQ_SET_DATA_EVENTFD | vfio::IRQ_SET_ACTION_TRIGGER;
pub(crate) const DISABLE: u32 = vfio::IRQ_SET_DATA_NONE | vfio::IRQ_SET_ACTION_TRIGGER;
pub(crate) const MSIX: u32 = vfio::PCI_MSIX_IRQ_INDEX;

pub(crate) struct Fixture {
    pub(crate) function: Arc<Function>,
    pub(crate) session: Session,
}

impl Fixture {
    /// A session before VERSION.
    pub(crate) fn fresh() -> Self {
        Self::with(Function::new())
    }

    pub(crate) fn with(function: Arc<Function>) -> Self {
        Self { session: Session::new(function.clone()), function }
    }

    pub(crate) fn new() -> Self {
        let mut fixture = Self::fresh();
        fixture.negotiate();
        fixture
    }

    pub(crate) fn negotiate(&mut self) {
        let reply = self.ask((Command::Version, version()), Vec::new());
        assert!(matches!(reply.body, Body::Version(_)));
    }

    pub(crate) fn handle(
        &mut self,
        ask: (Command, Body),
        fds: Vec<OwnedFd>,
    ) -> Result<Option<Message>, ProtocolError> {
        self.session.handle(Message::command(42, ask.0, ask.1, fds))
    }

    #[track_caller]
    pub(crate) fn ask(&mut self, ask: (Command, Body), fds: Vec<OwnedFd>) -> Message {
        let command = ask.0;
        match self.handle(ask, fds) {
            Ok(Some(reply)) => {
                assert!(reply.flags.reply && !reply.flags.no_reply);
                assert_eq!((reply.id, reply.command), (42, command));
                assert_eq!(reply.flags.error, reply.errno != 0);
                assert!(!reply.flags.error || (reply.body == Body::Empty && reply.fds.is_empty()));
                reply
            }
            other => panic!("{other:?}"),
        }
    }

    #[track_caller]
    pub(crate) fn succeeds(&mut self, ask: (Command, Body), fds: Vec<OwnedFd>) -> Body {
        let reply = self.ask(ask, fds);
        assert_eq!(reply.errno, 0);
        reply.body
    }

    #[track_caller]
    pub(crate) fn fails(&mut self, ask: (Command, Body), fds: Vec<OwnedFd>) -> u32 {
        let reply = self.ask(ask, fds);
        assert_ne!(reply.errno, 0, "{reply:?}");
        reply.errno
    }

    pub(crate) fn map(&mut self, address: u64, len_bytes: u64) {
        assert_eq!(
            self.succeeds(dma_map(map(address, len_bytes)), vec![memfd(len_bytes)]),
            Body::Empty
        );
    }
}

pub(crate) fn dma_map(map: DmaMap) -> (Command, Body) {
    (Command::DmaMap, Body::DmaMap(map))
}

pub(crate) fn dma_unmap(unmap: DmaUnmap) -> (Command, Body) {
    (Command::DmaUnmap, Body::DmaUnmap(unmap))
}

pub(crate) fn set_irqs(set: IrqSet) -> (Command, Body) {
    (Command::DeviceSetIrqs, Body::IrqSet(set))
}

pub(crate) fn reset() -> (Command, Body) {
    (Command::DeviceReset, Body::Empty)
}
