//! State that the units of one sidecore share.

use std::any::Any;
use std::cell::RefCell;
use std::rc::Rc;

use sidecore_units::CoreId;

/// A sidecore's core, and one instance of each type that its units share: a translation cache, a
/// link, the ports through which units of one core reach each other.
///
/// It belongs to the sidecore's thread and lives as long as its reactor, so sharing through it takes
/// no lock and no thread local. A test that opens channels of several sidecores on one thread makes
/// one context for each.
#[derive(Default)]
pub struct CoreContext {
    core: Option<CoreId>,
    shared: RefCell<Vec<Rc<dyn Any>>>,
}

impl CoreContext {
    /// A context with nothing shared yet, for a sidecore on `core`; `None` if it is not pinned.
    #[must_use]
    pub fn new(core: Option<CoreId>) -> Self {
        Self { core, shared: RefCell::default() }
    }

    /// The core that the sidecore is pinned to.
    #[must_use]
    pub fn core(&self) -> Option<CoreId> {
        self.core
    }

    /// This sidecore's `T`: the first call makes it. Looks through all shared types, so a unit calls
    /// it when it starts and keeps the result.
    #[must_use]
    pub fn shared<T: Default + 'static>(&self) -> Rc<T> {
        let mut shared = self.shared.borrow_mut();
        let found = shared.iter().find_map(|one| Rc::clone(one).downcast().ok());
        found.unwrap_or_else(|| {
            let made = Rc::new(T::default());
            shared.push(Rc::clone(&made) as Rc<dyn Any>);
            made
        })
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
