//! The legs of a mirror as they are found, and the keeper that begins with them.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::Receiver;

use sidecore_block::BlockDevice;
use sidecore_units::Nanos;

use super::{Keeper, Late, Leg};
use crate::disk::{LegDisk, Wait};
use crate::epoch::{Assembled, Holder, assemble};
use crate::error::{LegError, MirrorError};
use crate::header::{Header, Identity};
use crate::layout::BLOCK_BYTES;
use crate::legs::LegSet;
use crate::mail::Message;
use crate::map::DirtyMap;
use crate::mirror::{OpenOptions, probe};
use crate::rules::{Neglected, Rule};
use crate::shared::Shared;

/// A store with the header of a leg.
pub(crate) struct Found {
    pub(crate) device: Arc<dyn BlockDevice>,
    pub(crate) disk: LegDisk,
    pub(crate) header: Header,
}

/// Reads the header of a store.
///
/// # Errors
/// The store cannot be a leg. Nothing on it was changed.
pub(crate) fn read_leg(
    device: &Arc<dyn BlockDevice>,
    limit: Option<(Nanos, &mut Late)>,
    wait: &mut dyn Wait,
) -> Result<Found, LegError> {
    let (disk, header) = probe(device, limit, wait)?;
    let header = header?;
    header.identity.takes(&device.geometry())?;
    Ok(Found { device: Arc::clone(device), disk, header })
}

/// The state of the legs that were found, with each one's own header. Those of stores that are none
/// any more are in `former`.
///
/// # Errors
/// They are not legs of one mirror. The first number is that of a store of the list.
pub(crate) fn assemble_found(
    found: &[&Header],
    former: &[Header],
    neglected: Neglected,
) -> Result<Assembled, (usize, LegError)> {
    let counts = neglected.keeps(Rule::Identity);
    let lowest = found.iter().map(|header| header.config.epoch).min().unwrap_or(0);
    for (store, header) in found.iter().enumerate() {
        let earlier = found.get(..store).unwrap_or_default();
        if earlier.iter().any(|other| other.identity != header.identity) {
            return Err((store, LegError::OtherMirror));
        }
        if !header.counts_on(lowest) {
            return Err((store, LegError::Numbers { highest: lowest }));
        }
        let is_copy = |other: &&&Header| match counts {
            true => other.is_copied_by(header),
            false => other.leg == header.leg,
        };
        if earlier.iter().any(|other| is_copy(&other)) {
            return Err((store, LegError::Twice { leg: header.leg }));
        }
    }
    let holder = |header: &&Header| {
        let holder = header.holder();
        Holder { store: holder.store.filter(|_| counts), ..holder }
    };
    let holders: Vec<Holder> = found.iter().map(holder).collect();
    let is_known = |header: &&Header| header.counts_on(lowest);
    let former: Vec<Holder> = former.iter().filter(is_known).map(|it| holder(&it)).collect();
    assemble(&holders, &former, neglected)
}

impl Keeper {
    /// A keeper of the legs that were found, which has not begun an epoch.
    ///
    /// # Errors
    /// They are not legs of one mirror, or their maps cannot be read.
    pub(crate) fn open(
        (found, former): (Vec<Found>, Vec<Header>),
        identity: Identity,
        shared: Arc<Shared>,
        inbox: Receiver<Message>,
        options: OpenOptions,
        wait: &mut dyn Wait,
    ) -> Result<Self, MirrorError> {
        let headers: Vec<&Header> = found.iter().map(|found| &found.header).collect();
        let at = |(store, error): (usize, LegError)| {
            if let Some(header) = headers.get(store).filter(|_| error.is_of_former_leg()) {
                options.former.note(header);
            }
            MirrorError::Leg { store, error }
        };
        let assembled = assemble_found(&headers, &former, shared.neglected).map_err(at)?;
        let map = DirtyMap::new(identity.layout.regions(), &identity.uuid);
        let mut keeper = Self {
            shared,
            options,
            identity,
            legs: Default::default(),
            former,
            config: assembled.config,
            highest: 0,
            in_sync: LegSet::EMPTY,
            has_run: false,
            excused: LegSet::EMPTY,
            waits: None,
            unmarked: None,
            map,
            copying: None,
            late: Late::new(),
            inbox,
            asked: Vec::new(),
            failed: LegSet::EMPTY,
            commands: VecDeque::new(),
            next_clearing: Nanos::ZERO,
            next_mark: Nanos::ZERO,
            next_try: Nanos::ZERO,
            copied_regions: 0,
            copied_bytes: 0,
            failures: 0,
            is_closed: false,
        };
        for found in found {
            keeper.take_in(found);
        }
        keeper.start_with(assembled, wait);
        keeper.settle(wait);
        keeper.report();
        Ok(keeper)
    }

    /// Takes a store as the leg that its header says.
    pub(super) fn take_in(&mut self, found: Found) {
        let Found { device, disk, header } = found;
        self.highest = self.highest.max(header.config.epoch);
        if let Some(leg) = self.legs.get_mut(header.leg) {
            *leg = Leg {
                disk: Some(disk),
                durable: header.generation,
                tried: header.generation,
                is_only_read: true,
                held: Some(header.config),
                store: header.store,
                is_clean: header.is_clean,
                ..Leg::default()
            };
        }
        self.set_device(header.leg, Some(device));
    }

    /// Takes the newest epoch over, and the map of its legs.
    pub(super) fn start_with(&mut self, assembled: Assembled, wait: &mut dyn Wait) {
        let Assembled { config, in_sync, is_clean } = assembled;
        self.config = config;
        let in_sync = match self.shared.neglected.keeps(Rule::Epoch) {
            true => in_sync,
            false => self.present(),
        };
        let mut map = DirtyMap::new(self.identity.layout.regions(), &self.identity.uuid);
        let mut usable = LegSet::EMPTY;
        for leg in in_sync.numbers() {
            match self.read_map(leg, wait) {
                Ok(read) => {
                    map.add(&read);
                    usable = usable.with(LegSet::of(leg));
                }
                Err(error) => {
                    self.blame(leg, format!("the map of dirty regions: {error}"));
                    self.drop_leg(leg);
                }
            }
        }
        self.map = map;
        // After an unclean end legs may differ in what no flush has covered. A reader must see one
        // version of it, also when a leg fails: only one is in sync, and the others are copied to.
        let preferred = self.options.read.filter(|leg| usable.has(*leg)).or(usable.lowest());
        self.in_sync = match preferred {
            Some(one) if !is_clean && self.shared.neglected.keeps(Rule::OneLeg) => LegSet::of(one),
            _ => usable,
        };
    }

    fn read_map(&mut self, leg: usize, wait: &mut dyn Wait) -> Result<DirtyMap, LegError> {
        let mut map = DirtyMap::new(self.identity.layout.regions(), &self.identity.uuid);
        let mut bytes = [0; BLOCK_BYTES];
        for block in 0..map.blocks() {
            let disk = self.disk(leg).ok_or(LegError::NoHeader)?;
            let at = super::marks::map_bytes(block);
            disk.read(wait, at, &mut bytes).map_err(|error| LegError::Io(error.to_string()))?;
            let damaged = map.decode(block, &bytes);
            if damaged > 0 {
                tracing::warn!(leg, damaged, "sectors of the map are damaged, and count as dirty");
            }
        }
        Ok(map)
    }
}
