//! Random operations, against a model that is too simple to be wrong.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use sidecore_units::Vlba;

use crate::testing::{MemoryDisk, clean, commit, range, reopen, store};
use crate::{Grant, NewVolume, VolumeError, VolumeId, Volumes};

/// Blocks of each volume: enough for several nodes.
const BLOCKS: u64 = 1200;

#[derive(Clone, Debug)]
enum Step {
    Create,
    Snapshot(usize),
    Clone(usize),
    Delete(usize),
    Write(usize, u64, u64),
    /// Every other block: many extents.
    Scatter(usize, u64, u64),
    Unmap(usize, u64, u64),
    Share(usize, u64, u64, usize, u64),
    Resize(usize, u64),
    Grant(usize, u64, u64),
    Release,
    Link,
    Commit,
    /// Begins a commit that is ended by the next of its kind.
    CommitLater,
    Reopen,
}

fn step() -> impl Strategy<Value = Step> {
    let volume = || 0..8_usize;
    let first = || 0..BLOCKS;
    let count = || prop_oneof![1..20_u64, 1..BLOCKS];
    prop_oneof![
        2 => Just(Step::Create),
        2 => volume().prop_map(Step::Snapshot),
        2 => volume().prop_map(Step::Clone),
        2 => volume().prop_map(Step::Delete),
        8 => (volume(), first(), count()).prop_map(|(v, f, c)| Step::Write(v, f, c)),
        6 => (volume(), first(), count()).prop_map(|(v, f, c)| Step::Scatter(v, f, c)),
        5 => (volume(), first(), count()).prop_map(|(v, f, c)| Step::Unmap(v, f, c)),
        3 => (volume(), first(), count(), volume(), first())
            .prop_map(|(v, f, c, w, t)| Step::Share(v, f, c, w, t)),
        1 => (volume(), 1..BLOCKS).prop_map(|(v, b)| Step::Resize(v, b)),
        2 => (volume(), first(), count()).prop_map(|(v, f, c)| Step::Grant(v, f, c)),
        1 => Just(Step::Release),
        2 => Just(Step::Link),
        3 => Just(Step::Commit),
        2 => Just(Step::CommitLater),
        2 => Just(Step::Reopen),
    ]
}

/// The expected volume: its blocks and their contents.
#[derive(Clone, Debug, Default, PartialEq)]
struct Wanted {
    blocks: u64,
    contents: BTreeMap<u64, u64>,
    read_only: bool,
}

struct World {
    disk: MemoryDisk,
    volumes: Volumes,
    wanted: BTreeMap<VolumeId, Wanted>,
    durable: BTreeMap<VolumeId, Wanted>,
    /// The contents of each physical block. Linked data is written before.
    store: BTreeMap<u64, u64>,
    grants: Vec<Grant>,
    later: Option<(crate::Commit, BTreeMap<VolumeId, Wanted>)>,
    tags: u64,
    names: u64,
}

impl World {
    fn new(block_bytes: u32) -> Self {
        let (disk, volumes) = store(24 << 20, block_bytes);
        Self {
            disk,
            volumes,
            wanted: BTreeMap::new(),
            durable: BTreeMap::new(),
            store: BTreeMap::new(),
            grants: Vec::new(),
            later: None,
            tags: 0,
            names: 0,
        }
    }

    fn pick(&self, index: usize) -> Option<VolumeId> {
        self.wanted.keys().nth(index % self.wanted.len().max(1)).copied()
    }

    fn name(&mut self) -> String {
        self.names += 1;
        format!("v{}", self.names)
    }

    /// A range inside of the volume.
    fn clip(&self, id: VolumeId, first: u64, count: u64) -> (u64, u64) {
        let blocks = self.wanted[&id].blocks;
        let first = first % blocks;
        (first, count.min(blocks - first))
    }

    fn link(&mut self, grant: Grant) {
        let (id, granted) = (grant.volume(), grant.range());
        let extents = grant.extents().to_vec();
        for extent in &extents {
            for block in 0..extent.count {
                self.tags += 1;
                self.store.insert(extent.physical.0 + block, self.tags);
            }
        }
        let fits = self
            .wanted
            .get(&id)
            .is_some_and(|wanted| granted.first.0 + granted.count <= wanted.blocks);
        match self.volumes.link(&mut self.disk, grant) {
            Ok(()) => {
                assert!(fits);
                let wanted = self.wanted.get_mut(&id).unwrap();
                for extent in extents {
                    for block in 0..extent.count {
                        let tag = self.store[&(extent.physical.0 + block)];
                        wanted.contents.insert(extent.first.0 + block, tag);
                    }
                }
            }
            Err(error) => assert!(!fits, "{error}"),
        }
    }

    fn write(&mut self, id: VolumeId, first: u64, count: u64) {
        let (mut at, end) = (first, first + count);
        while at < end {
            let grant = match self.volumes.allocate(&mut self.disk, id, range(at, end - at)) {
                Ok(grant) => grant,
                Err(VolumeError::NoSpace { after_commit: true }) => {
                    self.commit();
                    match self.volumes.allocate(&mut self.disk, id, range(at, end - at)) {
                        Ok(grant) => grant,
                        Err(VolumeError::NoSpace { .. }) => return,
                        Err(error) => panic!("{error}"),
                    }
                }
                Err(VolumeError::NoSpace { .. }) => return,
                Err(error) => panic!("{error}"),
            };
            at += grant.range().count;
            self.link(grant);
        }
    }

    fn commit(&mut self) {
        self.end_later();
        commit(&mut self.volumes, &mut self.disk);
        self.durable = self.wanted.clone();
    }

    fn end_later(&mut self) {
        if let Some((commit, wanted)) = self.later.take() {
            let written = commit.write(&mut self.disk);
            let freed = self.volumes.end_commit(commit, written);
            self.volumes.reuse(freed);
            self.durable = wanted;
        }
    }

    fn copy(&mut self, index: usize, read_only: bool) {
        let Some(id) = self.pick(index) else { return };
        let name = self.name();
        let copy = if read_only {
            self.volumes.snapshot(&mut self.disk, id, &name, 1).unwrap()
        } else {
            self.volumes.clone_volume(&mut self.disk, id, &name, 1).unwrap()
        };
        self.wanted.insert(copy, Wanted { read_only, ..self.wanted[&id].clone() });
    }

    fn create(&mut self) {
        let name = self.name();
        let id = self
            .volumes
            .create(&NewVolume { name, blocks: BLOCKS, quota_blocks: None }, 1)
            .unwrap();
        self.wanted.insert(id, Wanted { blocks: BLOCKS, ..Wanted::default() });
    }

    fn reopen(&mut self) {
        self.later = None;
        self.grants.clear();
        self.wanted = self.durable.clone();
        let volumes = std::mem::replace(&mut self.volumes, store(1 << 20, 4096).1);
        self.volumes = reopen(volumes, &mut self.disk);
    }

    fn resize(&mut self, index: usize, blocks: u64) {
        if let Some(id) = self.writable(index) {
            self.volumes.resize(&mut self.disk, id, blocks).unwrap();
            let wanted = self.wanted.get_mut(&id).unwrap();
            wanted.blocks = blocks;
            wanted.contents.retain(|at, _| *at < blocks);
        }
    }

    fn delete(&mut self, index: usize) {
        if let Some(id) = self.pick(index) {
            self.volumes.delete(&mut self.disk, id).unwrap();
            self.wanted.remove(&id);
        }
    }

    fn share(&mut self, from: VolumeId, (first, count): (u64, u64), to: VolumeId, to_first: u64) {
        let (first, count) = self.clip(from, first, count);
        let (to_first, count) = self.clip(to, to_first, count);
        match self.volumes.share(&mut self.disk, (from, range(first, count)), (to, Vlba(to_first)))
        {
            Ok(()) => {
                let source = self.wanted[&from].contents.clone();
                let target = &mut self.wanted.get_mut(&to).unwrap().contents;
                target.retain(|at, _| !(to_first..to_first + count).contains(at));
                let part = source.range(first..first + count);
                target.extend(part.map(|(at, tag)| (at - first + to_first, *tag)));
            }
            Err(VolumeError::Overlap) => assert_eq!(from, to),
            Err(error) => panic!("{error}"),
        }
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Create => self.create(),
            Step::Snapshot(index) => self.copy(index, true),
            Step::Clone(index) => self.copy(index, false),
            Step::Delete(index) => self.delete(index),
            Step::Write(index, first, count) => {
                if let Some(id) = self.writable(index) {
                    let (first, count) = self.clip(id, first, count);
                    self.write(id, first, count);
                }
            }
            Step::Scatter(index, first, count) => {
                if let Some(id) = self.writable(index) {
                    let (first, count) = self.clip(id, first, count);
                    for block in (first..first + count).step_by(2) {
                        self.write(id, block, 1);
                    }
                }
            }
            Step::Unmap(index, first, count) => {
                if let Some(id) = self.writable(index) {
                    let (first, count) = self.clip(id, first, count);
                    self.volumes.unmap(&mut self.disk, id, range(first, count)).unwrap();
                    self.wanted
                        .get_mut(&id)
                        .unwrap()
                        .contents
                        .retain(|at, _| !(first..first + count).contains(at));
                }
            }
            Step::Share(from, first, count, to, to_first) => {
                if let (Some(from), Some(to)) = (self.pick(from), self.writable(to)) {
                    self.share(from, (first, count), to, to_first);
                }
            }
            Step::Resize(index, blocks) => self.resize(index, blocks),
            Step::Grant(index, first, count) => {
                if let Some(id) = self.writable(index) {
                    let (first, count) = self.clip(id, first, count);
                    if let Ok(grant) =
                        self.volumes.allocate(&mut self.disk, id, range(first, count))
                    {
                        self.grants.push(grant);
                    }
                }
            }
            Step::Release => {
                if let Some(grant) = self.grants.pop() {
                    self.volumes.release(grant);
                }
            }
            Step::Link => {
                if let Some(grant) = self.grants.pop() {
                    self.link(grant);
                }
            }
            Step::Commit => self.commit(),
            Step::CommitLater => {
                self.end_later();
                self.later =
                    self.volumes.begin_commit().map(|commit| (commit, self.wanted.clone()));
            }
            Step::Reopen => self.reopen(),
        }
    }

    fn writable(&self, index: usize) -> Option<VolumeId> {
        self.pick(index).filter(|id| !self.wanted[id].read_only)
    }

    /// Mappings must match the writes, and be shared where the model's are.
    fn compare(&mut self) {
        let mut references: BTreeMap<u64, u64> = BTreeMap::new();
        let mut mapped_shared: BTreeMap<u64, bool> = BTreeMap::new();
        let mut mappings: Vec<(VolumeId, u64)> = Vec::new();
        assert_eq!(
            self.volumes.list().map(|info| info.id).collect::<Vec<_>>(),
            self.wanted.keys().copied().collect::<Vec<_>>()
        );
        for (id, wanted) in &self.wanted {
            let mapped = self
                .volumes
                .map(&mut self.disk, *id, range(0, wanted.blocks), usize::MAX - 1)
                .unwrap();
            let mut found = BTreeMap::new();
            for extent in mapped.extents {
                for block in 0..extent.count {
                    let physical = extent.physical.0 + block;
                    found.insert(extent.first.0 + block, self.store[&physical]);
                    *references.entry(physical).or_default() += 1;
                    *mapped_shared.entry(physical).or_default() |= extent.shared;
                    mappings.push((*id, physical));
                }
            }
            assert_eq!(found, wanted.contents, "volume {id}");
            let info = self.volumes.get(*id).unwrap();
            assert_eq!(
                (info.blocks, info.allocated_blocks),
                (wanted.blocks, wanted.contents.len() as u64)
            );
        }
        // A block that lost a reference counts as shared until that is durable.
        let is_exact = !self.volumes.needs_commit() && !self.volumes.is_committing();
        for (physical, count) in references {
            let shared = mapped_shared[&physical];
            assert!(shared || count == 1, "block {physical} has {count} references");
            assert!(count > 1 || !shared || !is_exact, "block {physical} has one reference");
        }
        if is_exact {
            self.compare_usage(&mappings);
        }
    }

    /// Blocks reported as shared are mapped by another volume too.
    fn compare_usage(&mut self, mappings: &[(VolumeId, u64)]) {
        let mut users: BTreeMap<u64, BTreeSet<VolumeId>> = BTreeMap::new();
        for (id, physical) in mappings {
            users.entry(*physical).or_default().insert(*id);
        }
        let usage = self.volumes.durable().usage(&mut self.disk).unwrap();
        let mut shared: BTreeMap<VolumeId, u64> = self.wanted.keys().map(|id| (*id, 0)).collect();
        for (id, _) in mappings.iter().filter(|(_, physical)| users[physical].len() > 1) {
            *shared.get_mut(id).unwrap() += 1;
        }
        assert_eq!(usage.shared, shared);
        assert_eq!(
            usage.shared_data,
            users.values().filter(|users| users.len() > 1).count() as u64
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn any_operations_do_what_the_model_does(
        steps in proptest::collection::vec(step(), 1..60),
        block_bytes in prop_oneof![Just(512_u32), Just(1024), Just(4096)],
    ) {
        let mut world = World::new(block_bytes);
        for step in steps {
            let looks =
                matches!(step, Step::Commit | Step::Reopen | Step::CommitLater | Step::Delete(_));
            world.step(step);
            if looks {
                clean(&world.volumes, &mut world.disk);
                world.compare();
            }
        }
        world.compare();
        world.commit();
        clean(&world.volumes, &mut world.disk);
        world.step(Step::Reopen);
        clean(&world.volumes, &mut world.disk);
        world.compare();
        for id in world.wanted.keys().copied().collect::<Vec<_>>() {
            world.volumes.delete(&mut world.disk, id).unwrap();
        }
        world.wanted.clear();
        world.commit();
        prop_assert_eq!(clean(&world.volumes, &mut world.disk).nodes, 0);
        prop_assert_eq!(world.volumes.space().data, 0);
    }
}
