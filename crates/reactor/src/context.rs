//! State that the units of one sidecore share.

use std::any::Any;
use std::cell::RefCell;
use std::rc::Rc;

use sidecore_units::{CoreId, Nanos};

use crate::port::Ports;
use crate::{Port, PortId, PortSender};

/// A clock, for units that measure a part of a turn.
pub type CoreClock = Rc<dyn Fn() -> Nanos>;

/// A sidecore's core, one instance of each type that its units share, such as a translation cache,
/// and the ports between the units.
///
/// The context belongs to the sidecore's thread and lives as long as its reactor, so sharing
/// through it takes no lock and no thread local. A test that opens channels of several sidecores on
/// one thread makes one context for each.
#[derive(Default)]
pub struct CoreContext {
    core: Option<CoreId>,
    clock: Option<CoreClock>,
    shared: RefCell<Vec<Rc<dyn Any>>>,
    pub(crate) ports: Ports,
}

impl CoreContext {
    /// Makes a context without shared instances, for a sidecore on `core`; `None` if it is not
    /// pinned.
    #[must_use]
    pub fn new(core: Option<CoreId>) -> Self {
        Self { core, ..Self::default() }
    }

    /// The same context with a clock: the one that turns have their time from.
    #[must_use]
    pub fn with_clock(self, clock: impl Fn() -> Nanos + 'static) -> Self {
        Self { clock: Some(Rc::new(clock)), ..self }
    }

    /// The clock of the sidecore's turns; `None` where time is simulated, and nothing takes any.
    #[must_use]
    pub fn clock(&self) -> Option<CoreClock> {
        self.clock.clone()
    }

    /// The core that the sidecore is pinned to.
    #[must_use]
    pub fn core(&self) -> Option<CoreId> {
        self.core
    }

    /// Returns this sidecore's `T`, which the first call makes. The call searches all shared types,
    /// so a unit calls it when it starts and keeps the result.
    #[must_use]
    pub fn shared<T: Default + 'static>(&self) -> Rc<T> {
        let mut shared = self.shared.borrow_mut();
        let found = shared.iter().find_map(|instance| Rc::clone(instance).downcast().ok());
        found.unwrap_or_else(|| {
            let made = Rc::new(T::default());
            shared.push(Rc::clone(&made) as Rc<dyn Any>);
            made
        })
    }

    /// Opens a port for up to `capacity` messages, and returns its receiving end.
    #[must_use]
    pub fn open_port<M: 'static>(&self, capacity: usize) -> Port<M> {
        self.ports.open(capacity)
    }

    /// Returns a sending end of a port of this core; `None` if the port is closed. The call
    /// searches all ports, so a unit calls it when it learns the name and keeps the result.
    #[must_use]
    pub fn connect<M: 'static>(&self, id: PortId<M>) -> Option<PortSender<M>> {
        self.ports.connect(id)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn each_type_has_one_instance_on_each_core() {
        let (one, other) = (CoreContext::new(Some(CoreId(3))), CoreContext::default());
        one.shared::<Cell<u32>>().set(7);
        assert_eq!(one.shared::<Cell<u32>>().get(), 7);
        assert_eq!(one.shared::<Cell<u64>>().get(), 0, "another type");
        assert_eq!(other.shared::<Cell<u32>>().get(), 0, "another core");
        assert_eq!((one.core(), other.core()), (Some(CoreId(3)), None));
    }
}
