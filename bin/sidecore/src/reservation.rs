//! `sidecore reservation`: shows and ends the persistent reservations of a disk, and takes an
//! operator's word that the last owner has ended.

use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};
use rustix::io::Errno;
use sidecore_cluster::RecordFile;
use sidecore_linux::{
    DiskReservation, FileError, FileOptions, FileStore, ReservationError, ReservedDisk,
};
use sidecore_ownership::{Member, Record};

use crate::own::random;

#[derive(clap::Args)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    action: Action,
}

#[derive(clap::Subcommand)]
enum Action {
    /// Show the keys that are registered at a disk, and the holder of its reservation. Needs Linux
    /// 6.19.
    Show {
        /// A whole SCSI or NVMe disk.
        disk: PathBuf,
    },
    /// Show the reservation and all registrations of a disk, and with --yes end them, and abort the
    /// commands of their hosts. Each host can write to it then: only when no daemon serves the
    /// store, no host with one is paused, and no other program has reserved the disk.
    Clear(Clear),
    /// Show the last owner of a store, and with --yes say that nothing of it can reach the disks
    /// any more: its host is switched off or cut from them, and they have ended its connection. No
    /// fence asks for its end then.
    Fenced {
        /// The store's record.
        #[arg(long, value_name = "FILE")]
        record: PathBuf,
        /// Say so.
        #[arg(long)]
        yes: bool,
    },
}

#[derive(clap::Args)]
#[command(group(clap::ArgGroup::new("known").required(true)))]
struct Clear {
    /// A whole SCSI or NVMe disk.
    disk: PathBuf,
    /// The record of the store on the disk. An owner that has not closed the store in order is
    /// left alone.
    #[arg(long, value_name = "FILE", group = "known")]
    record: Option<PathBuf>,
    /// No store of `sidecore own` is on the disk.
    #[arg(long, group = "known")]
    no_record: bool,
    /// End the reservation of an owner that the record names, too.
    #[arg(long, requires = "record")]
    force: bool,
    /// End them on a kernel that does not show the keys, before Linux 6.19: no command is aborted,
    /// and each one that the disk has taken may still be carried out.
    #[arg(long)]
    unlisted: bool,
    /// End them.
    #[arg(long)]
    yes: bool,
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    match &arguments.action {
        Action::Show { disk } => {
            let found = ReservedDisk::open(disk)?.read()?;
            let found = found.with_context(|| {
                format!(
                    "this kernel does not show reservations: ask {} with `sg_persist --in -k` or \
                     `nvme resv-report`, or use Linux 6.19 or later",
                    disk.display()
                )
            })?;
            io::stdout().write_all(lines(&found).as_bytes())?;
        }
        Action::Clear(arguments) => clear(arguments)?,
        Action::Fenced { record, yes } => fenced(record, *yes)?,
    }
    Ok(())
}

fn clear(arguments: &Clear) -> Result<()> {
    let Clear { disk, record, force, unlisted, yes, .. } = arguments;
    let reserved = ReservedDisk::open(disk)?;
    let text = match reserved.read()? {
        Some(found) => lines(&found),
        None => "this kernel does not show the keys (Linux 6.19 or later does)\n".to_owned(),
    };
    io::stdout().write_all(text.as_bytes())?;
    let owner = record.as_deref().map(open_owner).transpose()?.flatten();
    if let Some(owner) = &owner {
        ensure!(
            *force,
            "the owner {owner} has not closed the store in order: end its `sidecore own`, or \
             switch its host off and add --force"
        );
    }
    ensure!(
        *yes,
        "nothing was ended: if no daemon serves the store, no host with one is paused, and no \
         other program uses {}, add --yes",
        disk.display()
    );
    // Kept until the end: no daemon of this host starts meanwhile.
    let _unused = unused(disk, &reserved.twins()?, open)?;
    // Marked, so that the next owner ends it if this does not come to its end.
    let me = Member { incarnation: random()?, ..Member::default() };
    end_all(&reserved, me.reservation_key(), *unlisted)?;
    if let (Some(owner), Some(record)) = (owner, record) {
        println!(
            "no candidate serves the store before `sidecore reservation fenced --record {}` has \
             said that {owner} has ended",
            record.display()
        );
    }
    Ok(())
}

/// The owner in a record that has not closed the store.
fn open_owner(path: &Path) -> Result<Option<Member>> {
    Ok(record(path)?.filter(|record| !record.is_closed).map(|record| record.owner))
}

fn record(path: &Path) -> Result<Option<Record>> {
    RecordFile::new(path).read().map_err(anyhow::Error::msg)
}

/// A disk's orders that end its registrations.
trait Registrations {
    fn read(&self) -> Result<Option<DiskReservation>, ReservationError>;
    fn register(&self, key: u64) -> Result<(), ReservationError>;
    fn preempt_and_abort(&self, other: u64, mine: u64) -> Result<(), ReservationError>;
    fn clear(&self, key: u64) -> Result<(), ReservationError>;
}

impl Registrations for ReservedDisk {
    fn read(&self) -> Result<Option<DiskReservation>, ReservationError> {
        self.read()
    }

    fn register(&self, key: u64) -> Result<(), ReservationError> {
        self.register_in_place_of_any(key)
    }

    fn preempt_and_abort(&self, other: u64, mine: u64) -> Result<(), ReservationError> {
        self.preempt_and_abort(other, mine)
    }

    fn clear(&self, key: u64) -> Result<(), ReservationError> {
        self.clear(key)
    }
}

/// Ends all registrations by this host, as `key`. A disk that is cleared aborts nothing, so each
/// registration is preempted before.
fn end_all(disk: &impl Registrations, key: u64, unlisted: bool) -> Result<()> {
    // Nothing is changed before it is known whether commands can be aborted.
    let is_listed = disk.read()?.is_some();
    ensure!(
        is_listed || unlisted,
        "this kernel does not show the keys, so that no command can be aborted: use Linux 6.19 or \
         later; or, if each host that is registered is switched off or has nothing in flight, add \
         --unlisted"
    );
    // Only a host that is registered can end others.
    disk.register(key)?;
    let ended = (|| {
        let found = if is_listed { disk.read()? } else { None };
        let mut others = found.unwrap_or_default().keys;
        others.retain(|other| *other != key);
        others.sort_unstable();
        // A key is there once for each path.
        others.dedup();
        others.into_iter().try_for_each(|other| disk.preempt_and_abort(other, key))?;
        disk.clear(key)
    })();
    ended.with_context(|| {
        format!(
            "this host stays registered with key {key:#018x}: try again, or let the next owner end \
             that"
        )
    })
}

/// Notes an operator's word in the record.
fn fenced(path: &Path, is_sure: bool) -> Result<()> {
    let found = record(path)?.with_context(|| format!("there is no record {}", path.display()))?;
    let Record { owner, epoch, is_closed, .. } = &found;
    if *is_closed {
        println!("{owner} has closed the store in order, in epoch {epoch}: nothing is left to say");
        return Ok(());
    }
    println!("the last owner is {owner}, in epoch {epoch}");
    ensure!(
        is_sure,
        "nothing was noted: end all `sidecore own` of the store, switch the owner's host off, or \
         cut it from the disks, wait until they have ended its connection, and add --yes"
    );
    let noted = Record { is_closed: true, ..found };
    RecordFile::new(path).write(&noted).map_err(anyhow::Error::msg)
}

/// Fails while a process of this host has one of a disk's devices open to write, or a request in
/// flight to it. Locks are those of a device.
fn unused(
    disk: &Path,
    twins: &[PathBuf],
    open: impl Fn(&Path) -> Result<FileStore, FileError>,
) -> Result<Vec<FileStore>> {
    let mut locked = vec![lock(disk, open(disk))?];
    for twin in twins {
        let opened = open(twin);
        // A path that has failed: the kernel keeps its device, and opens it no more.
        if !is_gone(&opened) {
            let of = || format!("{} is the same disk as {}", twin.display(), disk.display());
            locked.push(lock(twin, opened).with_context(of)?);
        }
    }
    Ok(locked)
}

fn open(device: &Path) -> Result<FileStore, FileError> {
    FileStore::open(&FileOptions::new(device))
}

fn lock(device: &Path, opened: Result<FileStore, FileError>) -> Result<FileStore> {
    match opened {
        Err(FileError::Busy { .. } | FileError::Overlaps { .. }) => bail!(
            "a live process of this host has {} open, whose disk the reservation protects: end \
             `sidecore own` of the store on all hosts first",
            device.display()
        ),
        opened => Ok(opened?),
    }
}

/// Whether nothing can be sent to a device.
fn is_gone(opened: &Result<FileStore, FileError>) -> bool {
    let Err(FileError::Kernel { source, .. }) = opened else { return false };
    matches!(Errno::from_io_error(source), Some(Errno::NXIO | Errno::NODEV))
}

fn lines(found: &DiskReservation) -> String {
    let mut text = String::new();
    for key in &found.keys {
        let _ = writeln!(text, "registered: {key:#018x}");
    }
    let _ = match (found.holder, found.is_write_exclusive) {
        (None, _) => writeln!(text, "not reserved"),
        (Some(key), true) => {
            writeln!(text, "reserved by {key:#018x}: write exclusive, registrants only")
        }
        (Some(key), false) => writeln!(text, "reserved by {key:#018x} with another type"),
    };
    text
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    /// A disk that notes its orders. One of them fails.
    struct Noted {
        keys: Option<Vec<u64>>,
        orders: RefCell<Vec<String>>,
        failure: &'static str,
    }

    impl Noted {
        fn new(keys: Option<&[u64]>, failure: &'static str) -> Self {
            Self { keys: keys.map(<[u64]>::to_vec), orders: RefCell::default(), failure }
        }

        fn note(&self, order: String) -> Result<(), ReservationError> {
            let fails = order == self.failure;
            self.orders.borrow_mut().push(order);
            if fails { Err(ReservationError::Conflict("disk".into())) } else { Ok(()) }
        }
    }

    impl Registrations for Noted {
        fn read(&self) -> Result<Option<DiskReservation>, ReservationError> {
            let keys = self.keys.clone();
            Ok(keys.map(|keys| DiskReservation { keys, ..DiskReservation::default() }))
        }

        fn register(&self, key: u64) -> Result<(), ReservationError> {
            self.note(format!("register {key}"))
        }

        fn preempt_and_abort(&self, other: u64, mine: u64) -> Result<(), ReservationError> {
            self.note(format!("abort {other} by {mine}"))
        }

        fn clear(&self, key: u64) -> Result<(), ReservationError> {
            self.note(format!("clear {key}"))
        }
    }

    #[test]
    fn commands_of_all_registered_hosts_are_aborted_before_a_disk_is_cleared() {
        let disk = Noted::new(Some(&[7, 9, 7, 5]), "");
        end_all(&disk, 5, false).unwrap();
        let orders = ["register 5", "abort 7 by 5", "abort 9 by 5", "clear 5"];
        assert_eq!(*disk.orders.borrow(), orders);
        // Unless a kernel shows none.
        let disk = Noted::new(None, "");
        let error = end_all(&disk, 5, false).unwrap_err().to_string();
        assert!(error.contains("--unlisted") && disk.orders.borrow().is_empty(), "{error}");
        end_all(&disk, 5, true).unwrap();
        assert_eq!(*disk.orders.borrow(), ["register 5", "clear 5"]);
    }

    #[test]
    fn a_disk_is_not_cleared_before_all_commands_are_aborted() {
        for (failure, sent) in [("register 5", 1), ("abort 7 by 5", 2), ("clear 5", 3)] {
            let disk = Noted::new(Some(&[7]), failure);
            let error = format!("{:#}", end_all(&disk, 5, false).unwrap_err());
            assert_eq!(disk.orders.borrow().len(), sent, "{failure}");
            let is_left = sent > 1;
            assert_eq!(error.contains("stays registered with key"), is_left, "{error}");
        }
    }

    #[test]
    fn an_operator_says_that_the_last_owner_has_ended() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk.owner");
        assert!(fenced(&path, true).unwrap_err().to_string().contains("no record"));
        let owner = Member { name: "io1".into(), host: "h/1".into(), incarnation: 3 };
        let open = Record { cluster: 1, store: 2, epoch: 9, owner, is_closed: false };
        let file = RecordFile::new(&path);
        file.write(&open).unwrap();
        assert_eq!(open_owner(&path).unwrap(), Some(open.owner.clone()));
        assert!(fenced(&path, false).unwrap_err().to_string().contains("--yes"));
        assert_eq!(file.read().unwrap(), Some(open.clone()));
        for _ in 0..2 {
            fenced(&path, true).unwrap();
            assert_eq!(file.read().unwrap(), Some(Record { is_closed: true, ..open.clone() }));
            assert_eq!(open_owner(&path).unwrap(), None);
        }
    }

    #[test]
    fn keys_and_the_holder_are_shown() {
        let mut found =
            DiskReservation { keys: vec![5, 7], holder: None, is_write_exclusive: false };
        assert!(lines(&found).ends_with("registered: 0x0000000000000007\nnot reserved\n"));
        (found.holder, found.is_write_exclusive) = (Some(5), true);
        assert!(lines(&found).contains("reserved by 0x0000000000000005: write exclusive"));
        found.is_write_exclusive = false;
        assert!(lines(&found).contains("another type"));
    }

    #[test]
    fn a_device_whose_path_has_failed_keeps_no_disk_from_being_cleared() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        let gone = PathBuf::from("/dev/gone");
        let fails = |errno: Errno| {
            move |device: &Path| {
                if device == Path::new("/dev/gone") {
                    let path = device.to_owned();
                    return Err(FileError::Kernel { action: "open", path, source: errno.into() });
                }
                open(device)
            }
        };
        let twins = std::slice::from_ref(&gone);
        for errno in [Errno::NXIO, Errno::NODEV] {
            assert_eq!(unused(file.path(), twins, fails(errno)).unwrap().len(), 1);
            unused(&gone, &[], fails(errno)).expect_err("the disk itself has failed");
        }
        let error = unused(file.path(), twins, fails(Errno::IO)).unwrap_err();
        let error = format!("{error:#}");
        assert!(error.contains("/dev/gone is the same disk as"), "{error}");
    }

    #[test]
    fn a_disk_that_a_process_has_open_by_one_of_its_devices_is_not_cleared() {
        let files = [(), ()].map(|()| tempfile::NamedTempFile::new().unwrap());
        for file in &files {
            file.as_file().set_len(1 << 20).unwrap();
        }
        let devices = files.each_ref().map(|file| file.path().to_owned());
        let [disk, twin] = &devices;
        let twins = std::slice::from_ref(twin);
        for device in &devices {
            let locked = open(device).unwrap();
            let error = format!("{:#}", unused(disk, twins, open).unwrap_err());
            assert!(error.contains("end `sidecore own`"), "{error}");
            assert_eq!(error.contains("is the same disk as"), device == twin, "{error}");
            drop(locked);
            assert_eq!(unused(disk, twins, open).unwrap().len(), 2);
        }
    }
}
