//! State shared by the functions that one sidecore serves (thesis 6.3): the translation unit with
//! its BTLB, the arbitration between the functions, and the boxes for parts of requests that lie in
//! several extents.

use std::cell::RefCell;
use std::rc::{Rc, Weak};
use std::sync::Arc;

use sidecore_block::{Batch, BlockRequest};
use sidecore_extent::TranslationUnit;
use sidecore_reactor::CoreContext;

use crate::function::Ports;
use crate::shares::{StoreShares, Turns};

/// The most pieces of guest memory in a part: a part with more is divided.
const PART_SEGMENTS: usize = 64;

/// One controller's multiplexer on one sidecore. Only that thread uses it.
pub(crate) struct Multiplexer {
    pub(crate) unit: TranslationUnit,
    pub(crate) shares: StoreShares,
    /// The arbitration of the sidecore's time between the functions of all its controllers.
    pub(crate) turns: Rc<Turns>,
    /// Free boxes for parts.
    pub(crate) parts: Batch,
}

/// A sidecore's multiplexers, by controller. They live as long as the channels that use them.
#[derive(Default)]
struct Multiplexers(RefCell<Vec<(u64, Weak<RefCell<Multiplexer>>)>>);

impl Multiplexer {
    /// The most parts in flight on one sidecore.
    pub(crate) const PARTS: usize = 64;

    /// The controller's multiplexer on this sidecore. The first channel makes it.
    pub(crate) fn of_core(core: &CoreContext, ports: &Ports) -> Rc<RefCell<Self>> {
        let multiplexers = core.shared::<Multiplexers>();
        let mut multiplexers = multiplexers.0.borrow_mut();
        multiplexers.retain(|(_, multiplexer)| multiplexer.strong_count() > 0);
        let found = multiplexers.iter().find(|(controller, _)| *controller == ports.controller);
        if let Some(multiplexer) = found.and_then(|(_, multiplexer)| multiplexer.upgrade()) {
            return multiplexer;
        }
        let unit = TranslationUnit::new(Arc::clone(&ports.memory), ports.btlb_entries);
        ports.units.add(unit.stats());
        let multiplexer = Rc::new(RefCell::new(Self {
            unit,
            shares: StoreShares::new(&ports.boards),
            turns: core.shared(),
            parts: (0..Self::PARTS).map(|_| BlockRequest::blank(PART_SEGMENTS)).collect(),
        }));
        multiplexers.push((ports.controller, Rc::downgrade(&multiplexer)));
        multiplexer
    }

    /// Frees a part's box, and its reference to guest memory.
    pub(crate) fn recycle(&mut self, mut part: Box<BlockRequest>) {
        part.segments.release();
        if self.parts.len() < Self::PARTS {
            self.parts.push(part);
        }
    }
}
