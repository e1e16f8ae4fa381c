//! Changes of the legs, by an operator or by other parts of the daemon.

use std::sync::Arc;

use sidecore_block::BlockDevice;

use super::copy::Broken;
use super::open::assemble_found;
use super::{Found, Keeper, Leg, read_leg};
use crate::disk::Wait;
use crate::epoch::{Config, Holder, StoreId, check};
use crate::error::{LegError, MirrorError, Waits};
use crate::header::Header;
use crate::legs::{LegSet, MAX_LEGS};
use crate::mail::Command;
use crate::mirror::probe;
use crate::rules::Rule;

fn refused(error: LegError) -> MirrorError {
    MirrorError::Leg { store: 0, error }
}

impl Keeper {
    pub(super) fn carry_out(
        &mut self,
        command: Command,
        wait: &mut dyn Wait,
    ) -> Result<(), MirrorError> {
        match command {
            Command::Attach(device) => self.attach(&device, wait),
            Command::Add(leg, device) => self.add(leg, device, wait),
            Command::Remove(leg) => self.remove(leg, wait),
            Command::Prefer(leg) => {
                self.options.read = Some(leg);
                if self.has_run && self.waits.is_none() {
                    self.publish();
                }
                Ok(())
            }
            Command::Permit(without) => self.permit(without, wait),
            Command::Repair { from, to, offset_bytes, len_bytes } => {
                self.repair((from, to), (offset_bytes, len_bytes), wait)
            }
            Command::Close => {
                self.close(wait);
                Ok(())
            }
        }
    }

    /// [`Mirror::attach`](crate::Mirror::attach), on the keeper's own thread.
    ///
    /// # Errors
    /// The same.
    pub fn attach(
        &mut self,
        device: &Arc<dyn BlockDevice>,
        wait: &mut dyn Wait,
    ) -> Result<(), MirrorError> {
        let limit = Some((self.options.patience, &mut self.late));
        let found = read_leg(device, limit, wait).map_err(refused)?;
        let number = found.header.leg;
        if found.header.identity != self.identity {
            return Err(refused(LegError::OtherMirror));
        }
        self.must_count_on(&found.header)?;
        let known = self.legs.get(number).filter(|leg| leg.disk.is_some());
        if known.is_some_and(|known| self.is_copy(known.store, found.header.store)) {
            return Err(refused(LegError::Twice { leg: number }));
        }
        self.must_be_quiet(device, Some(number), wait)?;
        // A leg that failed may have requests of its old store in flight.
        self.pause(wait);
        if self.has_run {
            self.attach_running(found, wait)
        } else {
            self.attach_waiting(found, wait)
        }
    }

    /// An epoch of this process is the newest, unless the leg went on by itself.
    fn attach_running(&mut self, found: Found, wait: &mut dyn Wait) -> Result<(), MirrorError> {
        let holder = self.holder(found.header.holder());
        let Holder { leg, config, .. } = holder;
        // An epoch that this keeper has written to it need not have been in force.
        let is_it = |known: &Leg| known.held == Some(config) && known.store == found.header.store;
        let is_known = self.config.members.has(leg) && self.legs.get(leg).is_some_and(is_it);
        let checked = match is_known {
            true => Ok(()),
            false => check(&holder, &self.config, &self.holders(), self.shared.neglected),
        };
        if let Err(error) = checked {
            if self.waits.is_none() {
                self.publish();
            }
            return Err(refused(error));
        }
        self.take_in(found);
        if self.in_sync.is_empty() && self.config.in_sync.has(leg) {
            // No write was answered without it. It may lack marks that were set meanwhile.
            self.in_sync = LegSet::of(leg);
            self.write_whole_map(self.in_sync, wait);
        }
        if self.waits.is_some() {
            self.settle(wait);
        } else {
            let config = self.config;
            let failed = self.write_headers(&config, LegSet::of(leg), false, wait);
            self.failed = self.failed.with(failed);
            self.publish();
        }
        Ok(())
    }

    /// The legs that are present, each with its newest epoch, and the stores that were legs.
    fn holders(&self) -> Vec<Holder> {
        let present = self.legs.iter().enumerate().filter(|(_, leg)| leg.disk.is_some());
        let holder = |(leg, of): (usize, &Leg)| {
            let (store, config, is_clean) = (Some(of.store), of.held?, of.is_clean);
            Some(self.holder(Holder { leg, store, config, is_clean }))
        };
        let former = self.former.iter().map(|header| self.holder(header.holder()));
        present.filter_map(holder).chain(former).collect()
    }

    fn holder(&self, holder: Holder) -> Holder {
        let counts = self.shared.neglected.keeps(Rule::Identity);
        Holder { store: holder.store.filter(|_| counts), ..holder }
    }

    /// Whether one of two stores with the same leg's number is a copy of the other.
    fn is_copy(&self, one: StoreId, other: StoreId) -> bool {
        one == other || !self.shared.neglected.keeps(Rule::Identity)
    }

    /// No epoch has begun: the leg may hold a newer one than the others.
    fn attach_waiting(&mut self, found: Found, wait: &mut dyn Wait) -> Result<(), MirrorError> {
        let (mut left_out, mut former) = (Vec::<(Header, LegError)>::new(), self.former.clone());
        let assembled = loop {
            let mut headers = self.headers();
            headers.retain(|header| left_out.iter().all(|(other, _)| other != header));
            headers.push(found.header.clone());
            let refs: Vec<&Header> = headers.iter().collect();
            let (place, error) = match assemble_found(&refs, &former, self.shared.neglected) {
                Ok(assembled) => break assembled,
                Err(refused) => refused,
            };
            // A store that was here first may be a former leg: the one that comes shows it.
            let is_former = |header: &&Header| **header != found.header && error.leaves_others();
            match headers.get(place).filter(is_former) {
                Some(header) => {
                    former.extend(error.is_of_former_leg().then(|| header.clone()));
                    left_out.push((header.clone(), error));
                }
                None => {
                    self.learn_from(&found.header, &error, wait);
                    return Err(refused(error));
                }
            }
        };
        // Only now: a store that is refused changes nothing about those that were here.
        for (Header { leg, .. }, error) in left_out {
            tracing::warn!(leg, "a store is not used as a leg any more: {error}");
            self.forget(leg);
        }
        self.former = former;
        self.take_in(found);
        self.start_with(assembled, wait);
        self.settle(wait);
        Ok(())
    }

    /// Notes the header of a store that was refused and tells which epochs were in force: the legs
    /// that are here may be older than they know.
    fn learn_from(&mut self, header: &Header, error: &LegError, wait: &mut dyn Wait) {
        if !error.is_of_former_leg() || self.former.contains(header) {
            return;
        }
        let mut former = self.former.clone();
        former.push(header.clone());
        let headers = self.headers();
        let refs: Vec<&Header> = headers.iter().collect();
        let Ok(assembled) = assemble_found(&refs, &former, self.shared.neglected) else { return };
        self.former = former;
        if assembled.config != self.config {
            self.start_with(assembled, wait);
            self.settle(wait);
        }
    }

    /// Refuses numbers that would use up those that are left: see [`Header::counts_on`].
    fn must_count_on(&self, header: &Header) -> Result<(), MirrorError> {
        match header.counts_on(self.highest) {
            true => Ok(()),
            false => Err(refused(LegError::Numbers { highest: self.highest })),
        }
    }

    /// Pauses when all legs that have failed by then have left: further decisions rest on those
    /// that are in sync.
    fn pause_decided(&mut self, wait: &mut dyn Wait) -> Result<(), MirrorError> {
        loop {
            self.must_run()?;
            self.pause(wait);
            if self.failed.is_empty() {
                return Ok(());
            }
            self.settle(wait);
        }
    }

    /// The headers of the legs that are present, each with its newest epoch.
    fn headers(&self) -> Vec<Header> {
        let identity = self.identity;
        let header = |(leg, known): (usize, &Leg)| {
            known.disk.as_ref()?;
            let (store, generation, is_clean) = (known.store, known.tried, known.is_clean);
            Some(Header { identity, leg, store, generation, config: known.held?, is_clean })
        };
        self.legs.iter().enumerate().filter_map(header).collect()
    }

    /// Forgets the store of a leg.
    fn forget(&mut self, leg: usize) {
        self.give_up(leg);
        if let Some(place) = self.legs.get_mut(leg) {
            *place = Leg::default();
        }
        self.set_device(leg, None);
    }

    /// [`Mirror::add`](crate::Mirror::add), on the keeper's own thread.
    ///
    /// # Errors
    /// The same.
    pub fn add(
        &mut self,
        (leg, store): (usize, StoreId),
        device: Arc<dyn BlockDevice>,
        wait: &mut dyn Wait,
    ) -> Result<(), MirrorError> {
        self.must_run()?;
        let members = self.config.members.with(LegSet::of(leg));
        if leg >= MAX_LEGS || self.config.members.has(leg) {
            return Err(MirrorError::State { leg, reason: "it is in use, or no number of a leg" });
        }
        if store == 0 || self.config.stores.contains(&store) {
            let reason = "the store's own number is that of another one; draw it again";
            return Err(MirrorError::State { leg, reason });
        }
        self.must_be_quiet(&device, None, wait)?;
        let limit = Some((self.options.patience, &mut self.late));
        let (disk, header) = probe(&device, limit, wait).map_err(refused)?;
        self.identity.takes(&device.geometry()).map_err(refused)?;
        // A former leg of this mirror may come back. Its old headers must not outlive the new ones.
        let tried = match header {
            Err(LegError::NoHeader) => 0,
            Ok(header) if header.identity == self.identity => {
                let is_copy = self.is_copy(self.config.store(header.leg), header.store);
                if is_copy && self.config.members.has(header.leg) {
                    return Err(refused(LegError::Twice { leg: header.leg }));
                }
                self.must_be_quiet(&device, Some(header.leg), wait)?;
                self.must_count_on(&header)?;
                self.highest = self.highest.max(header.config.epoch);
                header.generation
            }
            _ => return Err(refused(LegError::HasHeader)),
        };
        self.pause_decided(wait)?;
        if let Some(place) = self.legs.get_mut(leg) {
            let is_only_read = tried > 0;
            let disk = Some(disk);
            *place = Leg { disk, store, durable: tried, tried, is_only_read, ..Leg::default() };
        }
        // A store that cannot be written does not become a leg. Its header says that it is none.
        let config = self.config;
        if !self.write_headers(&config, LegSet::of(leg), false, wait).is_empty() {
            self.forget(leg);
            self.publish();
            return Err(refused(LegError::Io("its header cannot be written".to_owned())));
        }
        self.set_device(leg, Some(device));
        self.map.set_all(true);
        self.write_whole_map(self.in_sync, wait);
        // The number may be that of a leg which the operator had in mind.
        self.excused = self.excused.without(LegSet::of(leg));
        let joined = self.config.joined_by(leg, store);
        self.change_members((members, self.in_sync), &joined, wait)
    }

    /// Puts an epoch with other members in force, and then one in which these alone decide. A store
    /// that is none then is forgotten before requests start again.
    fn change_members(
        &mut self,
        (members, in_sync): (LegSet, LegSet),
        after: &Config,
        wait: &mut dyn Wait,
    ) -> Result<(), MirrorError> {
        let before = self.config.members;
        let mut installed = self.install_after(after, (members, in_sync), wait);
        if installed.is_ok() {
            installed = self.install(members, self.in_sync, wait);
        }
        let (has_changed, excused) = (self.config.members == members, self.excused);
        // Before requests start: a queue closes its channel with the plan that it takes over.
        let left = if has_changed { before.without(members) } else { members.without(before) };
        left.numbers().for_each(|leg| self.forget(leg));
        let refusal = installed.as_ref().err().cloned();
        self.conclude(installed, wait);
        let Some(waits) = refusal else { return Ok(()) };
        if !excused.is_empty() {
            // The mirror may go on with its members as they are. The permission is used for that
            // now, or ends: it must not outlive a wait.
            self.excused = excused;
            self.settle(wait);
        }
        if has_changed { Ok(()) } else { Err(MirrorError::Waits(waits)) }
    }

    /// [`Mirror::remove`](crate::Mirror::remove), on the keeper's own thread.
    ///
    /// # Errors
    /// The same.
    pub fn remove(&mut self, leg: usize, wait: &mut dyn Wait) -> Result<(), MirrorError> {
        self.must_run()?;
        self.can_do_without(leg)?;
        self.pause_decided(wait)?;
        // The leg that was to stay may have left since.
        if let Err(error) = self.can_do_without(leg) {
            self.publish();
            return Err(error);
        }
        let members = self.config.members.without(LegSet::of(leg));
        let in_sync = self.in_sync.without(LegSet::of(leg));
        if self.copying.as_ref().is_some_and(|copying| copying.leg == leg) {
            self.copying = None;
        }
        let config = self.config;
        self.change_members((members, in_sync), &config, wait)
    }

    /// Whether the mirror would have all bytes without this leg.
    fn can_do_without(&self, leg: usize) -> Result<(), MirrorError> {
        if !self.config.members.has(leg) {
            return Err(MirrorError::State { leg, reason: "it is no leg of the mirror" });
        }
        if self.in_sync.without(LegSet::of(leg)).is_empty() {
            let reason = "it is the only one in sync; wait until another one was copied to";
            return Err(MirrorError::State { leg, reason });
        }
        Ok(())
    }

    /// [`Mirror::permit`](crate::Mirror::permit), on the keeper's own thread.
    ///
    /// # Errors
    /// The same.
    pub fn permit(&mut self, without: LegSet, wait: &mut dyn Wait) -> Result<(), MirrorError> {
        if !self.options.witness.asks_operator() {
            return Err(MirrorError::NoOperator);
        }
        let missing = match &self.waits {
            Some(Waits::Permission { missing, .. }) if *missing == without => missing,
            Some(Waits::Permission { missing, .. }) => {
                return Err(MirrorError::Without { missing: *missing, named: without });
            }
            // It says which legs are missing, and that no permission helps.
            Some(waits) => return Err(MirrorError::Waits(waits.clone())),
            None => return Err(MirrorError::NotWaiting),
        };
        tracing::warn!("the operator permits that legs go on alone: {missing} missing");
        // It is used now, or not at all.
        self.excused = *missing;
        self.settle(wait);
        self.must_run()
    }

    /// [`Mirror::repair`](crate::Mirror::repair), on the keeper's own thread.
    ///
    /// # Errors
    /// The same.
    pub fn repair(
        &mut self,
        (from, to): (usize, usize),
        (offset_bytes, len_bytes): (u64, u64),
        wait: &mut dyn Wait,
    ) -> Result<(), MirrorError> {
        self.must_run()?;
        let layout = self.identity.layout;
        let mask = u64::from(layout.block_bytes).wrapping_sub(1);
        let end = offset_bytes.checked_add(len_bytes);
        let is_inside = end.is_some_and(|end| end <= layout.capacity_bytes);
        if !is_inside || len_bytes == 0 || (offset_bytes | len_bytes) & mask != 0 {
            let reason = "the range to repair is outside of the mirror, or not of whole blocks";
            return Err(MirrorError::State { leg: to, reason });
        }
        let (first, end) = layout.regions_of(offset_bytes, len_bytes);
        let regions: Vec<usize> = (first..end).collect();
        let were_open = loop {
            for leg in [from, to] {
                if !self.in_sync.has(leg) {
                    return Err(MirrorError::State { leg, reason: "it is not in sync" });
                }
            }
            let were_open = self.shut(&regions, wait);
            if self.failed.is_empty() {
                break were_open;
            }
            // One of the two may have missed a write to the range. Each time one leg leaves.
            self.reopen(&were_open);
            self.settle(wait);
            self.must_run()?;
        };
        let repaired = self.copy_range((from, to), (offset_bytes, len_bytes), wait);
        self.reopen(&were_open);
        match repaired {
            Ok(()) => Ok(()),
            Err(Broken::Ending) => Err(MirrorError::Closed),
            Err(Broken::From(error)) => {
                Err(refused(LegError::Io(format!("leg {from} cannot be read: {error}"))))
            }
            Err(Broken::To(error)) => {
                self.blame(to, format!("a repair of it: {error}"));
                self.failed = self.failed.with(LegSet::of(to));
                Err(refused(LegError::Io(format!("leg {to} cannot be written: {error}"))))
            }
        }
    }

    /// Closes the mirror in good order, if it can be. No channel may be open.
    pub fn close(&mut self, wait: &mut dyn Wait) {
        self.is_closed = true;
        self.pause(wait);
        self.look_for_late(wait.now());
        // Their channels own a request.
        self.late.drain(..).for_each(std::mem::forget);
        if self.waits.is_some() || !self.failed.is_empty() || !self.has_run {
            return;
        }
        let legs = self.in_sync;
        let mut failed = self.on_each(legs, wait, |disk, now| disk.begin_flush(now));
        if failed.is_empty() && legs == self.config.members {
            self.map.set_all(false);
            self.write_whole_map(legs, wait);
            failed = legs.without(self.present());
        }
        // Otherwise the next start finds an unclean end.
        if failed.is_empty() {
            let config = self.config;
            self.write_headers(&config, legs, true, wait);
        }
        self.report();
    }

    /// A late write must not come after those that a store gets now. The same store may have been
    /// opened anew since, so the number in its header counts, too.
    fn must_be_quiet(
        &mut self,
        device: &Arc<dyn BlockDevice>,
        number: Option<usize>,
        wait: &mut dyn Wait,
    ) -> Result<(), MirrorError> {
        self.look_for_late(wait.now());
        let late = self.late.iter().find_map(|(leg, disk)| {
            let may_be_it = disk.is_of(device) || number == *leg;
            leg.filter(|_| may_be_it)
        });
        late.map_or(Ok(()), |leg| Err(refused(LegError::Late { leg })))
    }

    fn must_run(&self) -> Result<(), MirrorError> {
        match &self.waits {
            Some(waits) => Err(MirrorError::Waits(waits.clone())),
            None => Ok(()),
        }
    }
}
