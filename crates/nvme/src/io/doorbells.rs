//! Where a queue sees its doorbells.

use std::sync::Arc;

use sidecore_ring::nvme::{Doorbells, ShadowDoorbells};

/// The place where the driver writes each new value.
pub(super) enum Source {
    /// The doorbells themselves.
    Registers,
    /// Shadow doorbells (NVMe base 2.0, 5.8); the doorbells have what it wrote when it was last
    /// asked for a message.
    Shadow(ShadowDoorbells),
    /// Shadow doorbells that are not in the guest's memory at present: nothing is known until they
    /// are.
    Missing,
}

/// The doorbell memory, and the shadow doorbells while the driver uses them.
pub(super) struct DoorbellView {
    doorbells: Arc<Doorbells>,
    pub(super) source: Source,
}

impl DoorbellView {
    pub(super) fn new(doorbells: Arc<Doorbells>) -> Self {
        Self { doorbells, source: Source::Registers }
    }

    /// A submission queue's tail, if it can be known; the entries before it are visible.
    #[inline]
    pub(super) fn tail(&self, queue: u16) -> Option<u32> {
        match &self.source {
            Source::Registers => Some(self.doorbells.submission_tail(queue)),
            Source::Shadow(shadow) => Some(shadow.submission_tail(queue)),
            Source::Missing => None,
        }
    }

    /// A completion queue's head, if it can be known.
    #[inline]
    pub(super) fn head(&self, queue: u16) -> Option<u32> {
        match &self.source {
            Source::Registers => Some(self.doorbells.completion_head(queue)),
            Source::Shadow(shadow) => Some(shadow.completion_head(queue)),
            Source::Missing => None,
        }
    }

    /// A new queue's doorbell is at zero, whatever was written there for an older one of its
    /// number.
    pub(super) fn reset_tail(&self, queue: u16) {
        self.doorbells.set_submission_tail(queue, 0);
    }

    /// The same for a completion queue's.
    pub(super) fn reset_head(&self, queue: u16) {
        self.doorbells.set_completion_head(queue, 0);
    }

    /// Whether the driver looks at EventIdx.
    #[inline]
    pub(super) fn has_events(&self) -> bool {
        matches!(self.source, Source::Shadow(_))
    }

    /// Whether nothing can be known of any doorbell.
    pub(super) fn is_missing(&self) -> bool {
        matches!(self.source, Source::Missing)
    }

    pub(super) fn set_submission_event(&self, queue: u16, index: u32) {
        if let Source::Shadow(shadow) = &self.source {
            shadow.set_submission_event(queue, index);
        }
    }

    pub(super) fn set_completion_event(&self, queue: u16, index: u32) {
        if let Source::Shadow(shadow) = &self.source {
            shadow.set_completion_event(queue, index);
        }
    }
}
