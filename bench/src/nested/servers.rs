//! The systems of the comparison: programs, the devices that they serve, and the disks below.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use sidecore_units::{SECTOR_BYTES, Sector};

use super::alone::Alone;
use super::{Bench, FILE, Medium, NAME};
use crate::fill::{Order, fill};
use crate::host_disk::{Ext4, HostDisk, Kind, Tmpfs};
use crate::peer::{self, Disk, Program, StorageDaemon};
use crate::process::Process;
use crate::record::Params;
use crate::sidecored::{Controller, Device, Sidecored, Store};
use crate::{against, control, stop};

/// A virtual function whose volume was written from its start to its end.
pub(super) const VF: &str = "vf";
/// The physical function, where that volume lies.
pub(super) const PF: &str = "pf";
/// A virtual function whose volume was written in pieces of [`PIECE_BYTES`] in a random order.
pub(super) const SCATTERED: &str = "vf-scattered";

/// The unit of translation, unless the store's is larger: NeSC's.
const BLOCK_BYTES: u32 = 1024;

/// The size of the pieces of a scattered volume.
const PIECE_BYTES: u32 = 64 << 10;

const CONTROLLER: &str = "pool";

/// The virtual function's volume and the scattered one's.
const VOLUME: &str = "disk";
const SCATTERED_VOLUME: &str = "scattered";

/// The size of a controller's store for volumes of this size, with room for metadata and the
/// reserve.
fn store_bytes(volumes_bytes: u64) -> u64 {
    volumes_bytes + volumes_bytes / 8 + (32 << 20)
}

/// The size of the store in memory.
pub(super) fn ram_bytes(volume_bytes: u64) -> u64 {
    store_bytes(2 * volume_bytes)
}

/// One system in the comparison.
pub(super) struct System {
    pub name: &'static str,
    /// The index of the program that serves the system.
    pub program: usize,
    /// Whether that program is the daemon of `--against`.
    pub before: bool,
    pub socket: PathBuf,
    /// The start of the system's part of the disk; `span_bytes` is its length.
    pub first: Sector,
    pub span_bytes: u64,
    pub params: Params,
}

/// A program that serves some of the systems.
pub(super) enum Server {
    Ours(Sidecored),
    Theirs(StorageDaemon),
}

impl Server {
    pub(super) fn process(&mut self) -> &mut Process {
        match self {
            Self::Ours(daemon) => &mut daemon.process,
            Self::Theirs(daemon) => &mut daemon.process,
        }
    }
}

/// All systems on one store. The order of the fields matters: programs end before the files that
/// they use.
pub(super) struct Servers {
    pub programs: Vec<Server>,
    pub systems: Vec<System>,
    /// A disk of the same kind without other users, if the store is on disks.
    pub alone: Option<Alone>,
    _files: Option<Files>,
}

struct Files {
    _ext4: Ext4,
    _controllers: Vec<HostDisk>,
    _alone: HostDisk,
}

impl Servers {
    /// Ends the programs. This build's daemon must end in order.
    pub(super) fn end(self) -> Result<()> {
        for program in self.programs {
            match program {
                Server::Ours(daemon) => daemon.process.end()?,
                Server::Theirs(daemon) => drop(daemon),
            }
        }
        Ok(())
    }

    /// The counters of a virtual function, from the running daemon of this build: the number of
    /// requests that found their mapping in the last extent, and of those that did not.
    pub(super) fn translations(&self, volume: &str) -> Option<(u64, u64)> {
        let Some(Server::Ours(daemon)) = self.programs.first() else { return None };
        let answer = control::get(&daemon.control_socket(), "/v1/controllers").ok()?;
        let functions = answer.pointer("/controllers/0/functions")?.as_array()?.clone();
        let function = functions.into_iter().find(|function| function["volume"] == volume)?;
        Some((function["last_hits"].as_u64()?, function["translations"].as_u64()?))
    }
}

impl System {
    /// The volume behind the system, if it has one.
    pub(super) fn volume(&self) -> Option<&'static str> {
        match self.name {
            VF => Some(VOLUME),
            SCATTERED => Some(SCATTERED_VOLUME),
            _ => None,
        }
    }
}

fn volume(volume: &'static str, bytes: u64) -> Store {
    Store::Volume { controller: CONTROLLER, volume, bytes }
}

/// Serves a controller in memory alone, where the path itself is the only cost. `scattered`: with a
/// second virtual function.
pub(super) fn on_ram(bench: &Bench, start: usize, scattered: bool) -> Result<Servers> {
    finish(in_turn(bench, start, |build| ram_daemon(bench, scattered, build))?, None)
}

/// One start of one of the builds that are measured.
#[derive(Clone, Copy)]
struct Build {
    /// Whether it is the one of `--against`.
    before: bool,
    start: usize,
}

/// Starts this build, and the one of `--against` if there is one.
fn in_turn(
    bench: &Bench,
    start: usize,
    serve: impl Fn(Build) -> Result<Served>,
) -> Result<Vec<Served>> {
    let before = || bench.builds().then(|| serve(Build { before: true, start })).transpose();
    let (ours, before) =
        against::start_in_turn(start, || serve(Build { before: false, start }), before)?;
    Ok([ours].into_iter().chain(before).collect())
}

/// A program with the systems that it serves.
type Served = (Server, Vec<System>);

fn ram_daemon(bench: &Bench, scattered: bool, build: Build) -> Result<Served> {
    let bytes = bench.plan.volume_bytes;
    let controller = Controller {
        name: CONTROLLER,
        store: Store::Ram { bytes: ram_bytes(bytes) },
        block_bytes: BLOCK_BYTES,
    };
    let mut devices = vec![
        Device::new(VF, volume(VOLUME, bytes)),
        Device::new(PF, Store::Physical { controller: CONTROLLER }),
    ];
    devices.extend(scattered.then(|| Device::new(SCATTERED, volume(SCATTERED_VOLUME, bytes))));
    let mut daemon = bench.start_daemon(Medium::Ram, build, &controller, &devices)?;
    let mut systems = functions(bench, &daemon)?;
    if scattered {
        fill(&daemon.socket(SCATTERED), bytes, PIECE_BYTES, Order::Random)?;
        let extents = extents(&daemon, SCATTERED_VOLUME, bytes)?;
        let mut scattered = bench.system(SCATTERED, daemon.socket(SCATTERED));
        scattered.params.insert("extents".to_owned(), extents.len().into());
        systems.push(scattered);
    }
    systems.iter_mut().for_each(|system| system.before = build.before);
    daemon.process.freeze()?;
    Ok((Server::Ours(daemon), systems))
}

/// Serves a controller on one disk, and a filesystem on another with a file for this daemon and one
/// for the peer. With two builds of the daemon there are a disk and a file for each, and no peer.
pub(super) fn on_disks(
    bench: &Bench,
    start: usize,
    (medium, kind): (Medium, Kind),
    peer: Option<&Program>,
) -> Result<Servers> {
    let bytes = bench.plan.volume_bytes;
    let directory = bench.experiment.directory().join(format!("{}-disks-{start}", medium.name()));
    let mut memory = Tmpfs::new(&directory.join("memory"))?;
    let builds = if bench.builds() { 2 } else { 1 };
    let below = (0..builds).map(|_| HostDisk::new(kind, memory.path(), store_bytes(bytes)));
    let below: Vec<HostDisk> = below.collect::<Result<_>>()?;
    let other = HostDisk::new(kind, memory.path(), store_bytes(2 * bytes))?;
    let third = HostDisk::new(kind, memory.path(), bytes)?;
    // A comparison of builds has no floor.
    let alone = (!bench.builds()).then(|| Alone::new(&third.path, bytes)).transpose()?;
    let mut ext4 = Ext4::new(other, &directory.join("mounted"))?;
    let files = [ext4.written_file("ours", bytes)?, ext4.written_file("theirs", bytes)?];
    let mut served = in_turn(bench, start, |build| {
        let of_build = usize::from(build.before);
        let disk = below.get(of_build).context("no such disk")?;
        disk_daemon(bench, medium, build, (disk, &files[of_build]))
    })?;
    if let Some(program) = peer {
        let [_, path] = files;
        let name = format!("{NAME}-{}", medium.name());
        let disk = Disk::File { path, cached: false };
        let theirs = bench.experiment.start_peer(program, &name, &disk, 1, bench.plan.trial)?;
        let mut system = bench.system(peer::NAME, theirs.socket.clone());
        system.params.extend(theirs.params(program));
        served.push((Server::Theirs(theirs), vec![system]));
    }
    // All files are open: a program that is killed from here on leaves no mount.
    ext4.detach()?;
    memory.detach()?;
    finish(served, Some((alone, Files { _ext4: ext4, _controllers: below, _alone: third })))
}

/// Starts a daemon with a controller on `disk`, and `file` without a controller.
fn disk_daemon(
    bench: &Bench,
    medium: Medium,
    build: Build,
    (disk, file): (&HostDisk, &Path),
) -> Result<Served> {
    let bytes = bench.plan.volume_bytes;
    let store = Store::File { path: disk.path.clone() };
    let controller =
        Controller { name: CONTROLLER, store, block_bytes: BLOCK_BYTES.max(medium.block_bytes()) };
    let devices = [
        Device::new(VF, volume(VOLUME, bytes)),
        Device::new(PF, Store::Physical { controller: CONTROLLER }),
        Device::new(FILE, Store::File { path: file.to_owned() }),
    ];
    let mut daemon = bench.start_daemon(medium, build, &controller, &devices)?;
    let mut systems = functions(bench, &daemon)?;
    systems.push(bench.system(FILE, daemon.socket(FILE)));
    systems.iter_mut().for_each(|system| system.before = build.before);
    daemon.process.freeze()?;
    Ok((Server::Ours(daemon), systems))
}

/// Orders the systems so that those of the two builds are beside each other.
fn finish(served: Vec<Served>, disks: Option<(Option<Alone>, Files)>) -> Result<Servers> {
    let (mut programs, mut systems) = (Vec::new(), Vec::new());
    for (program, (server, its)) in served.into_iter().enumerate() {
        programs.push(server);
        let its = its.into_iter().map(|system| System { program, ..system });
        systems.extend(its.enumerate());
    }
    let is_pairs = systems.iter().any(|(_, system): &(usize, System)| system.before);
    if is_pairs {
        systems.sort_by_key(|(index, system)| (*index, system.before));
    }
    let systems = systems.into_iter().map(|(_, system)| system).collect();
    let (alone, files) = disks.unzip();
    Ok(Servers { programs, systems, alone: alone.flatten(), _files: files })
}

/// Writes the virtual function's volume; returns this function and the physical one, which is
/// limited to blocks of that volume.
fn functions(bench: &Bench, daemon: &Sidecored) -> Result<Vec<System>> {
    let bytes = bench.plan.volume_bytes;
    fill(&daemon.socket(VF), bytes, 1 << 20, Order::Sequential)?;
    let extents = extents(daemon, VOLUME, bytes)?;
    let mut vf = bench.system(VF, daemon.socket(VF));
    vf.params.insert("extents".to_owned(), extents.len().into());
    let mut pf = bench.system(PF, daemon.socket(PF));
    // A writer to the physical function may write only where that volume's data is.
    let largest =
        extents.into_iter().max_by_key(|extent| extent.len_bytes).context("nothing is mapped")?;
    pf.first = Sector(largest.physical_bytes / SECTOR_BYTES);
    pf.span_bytes = largest.len_bytes;
    pf.params.insert("span_bytes".to_owned(), largest.len_bytes.into());
    Ok(vec![vf, pf])
}

impl Bench {
    fn system(&self, name: &'static str, socket: PathBuf) -> System {
        let (span_bytes, params) = (self.plan.volume_bytes, self.common_params());
        System { name, program: 0, before: false, socket, first: Sector(0), span_bytes, params }
    }

    /// Starts this build's daemon, or the one of `--against`.
    fn start_daemon(
        &self,
        medium: Medium,
        build: Build,
        controller: &Controller,
        devices: &[Device],
    ) -> Result<Sidecored> {
        let name = format!("{}-{}", medium.name(), build.start);
        let controllers = std::slice::from_ref(controller);
        if build.before {
            self.experiment
                .start_before(&name, controllers, devices)?
                .context("there is no other build")
        } else {
            self.experiment.start_ours(&name, controllers, devices)
        }
    }
}

/// Bytes of a volume that follow each other on the store.
struct Extent {
    physical_bytes: u64,
    len_bytes: u64,
}

/// Lists all extents of a volume, which must be mapped from its start to its end.
fn extents(daemon: &Sidecored, volume: &str, bytes: u64) -> Result<Vec<Extent>> {
    let mut all = Vec::new();
    let mut from = Some(0);
    while let Some(block) = from {
        let path =
            format!("/v1/controllers/{CONTROLLER}/volumes/{volume}/extents?from={block}&max=65536");
        let answer = control::get(&daemon.control_socket(), &path)?;
        let block_bytes = answer["block_bytes"].as_u64().context("no block size")?;
        for extent in answer["extents"].as_array().context("no extents")? {
            let number = |name: &str| {
                extent[name].as_u64().map(|blocks| blocks * block_bytes).context("not a number")
            };
            all.push(Extent { physical_bytes: number("physical")?, len_bytes: number("count")? });
        }
        from = answer["next"].as_u64().filter(|next| *next > block);
        stop::check()?;
    }
    let mapped: u64 = all.iter().map(|extent| extent.len_bytes).sum();
    ensure!(
        mapped == bytes,
        "{volume}: {mapped} of {bytes} bytes are mapped after all were written"
    );
    Ok(all)
}
