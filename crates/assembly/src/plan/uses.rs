//! Stores and controllers, and the parts above them.

use super::{Part, Phase, State};
use crate::spec::StoreSpec;

/// A part of a state that uses another one, or is used. Stores come first, by their names, as they
/// are closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Name<'a> {
    Store(&'a str),
    Controller(&'a str),
    Device(&'a str),
}

/// A use of a store or a controller by the part above.
pub(super) struct Use<'a> {
    pub(super) below: Name<'a>,
    pub(super) above: Name<'a>,
    /// The part above is open or being opened, so that the part below has to be open.
    pub(super) is_open: bool,
}

/// The uses in a state. A device that is refused or detached uses no store.
pub(super) fn uses(state: &State) -> impl Iterator<Item = Use<'_>> {
    let stores = state.stores.iter().flat_map(|(name, Part { spec, phase })| {
        let is_open = *phase != Phase::Refused;
        below(spec).map(move |below| Use { below, above: Name::Store(name), is_open })
    });
    let controllers = state.controllers.iter().map(|(name, Part { spec, phase })| {
        let (below, above) = (Name::Store(&spec.store), Name::Controller(name));
        Use { below, above, is_open: *phase != Phase::Refused }
    });
    let is_attached = |name: &String| !state.detached.contains(name);
    let devices = state.devices.iter().filter_map(move |(name, Part { spec, phase })| {
        let (below, above) = (Name::Store(&spec.store), Name::Device(name));
        let uses = *phase == Phase::Open && is_attached(name) && spec.front_end.switch().is_none();
        uses.then_some(Use { below, above, is_open: true })
    });
    stores.chain(controllers).chain(devices)
}

/// The stores, or the controller, directly below a store.
pub(super) fn below(store: &StoreSpec) -> impl Iterator<Item = Name<'_>> {
    let controller = store.kind.controller().map(Name::Controller);
    store.kind.stores_below().map(Name::Store).chain(controller)
}
