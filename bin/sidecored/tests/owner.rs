//! Daemons that `sidecore own` has started, of which one has not ended in time.

mod common;

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use rustix::io::Errno;
use rustix::process::Signal;
use sidecore_control::CreateVolume;
use sidecore_fuse::SlowDisk;
use tempfile::TempDir;

use common::{Daemon, config};

const POOL: &str = "[[store]]\nname = \"pool-file\"\ntype = \"file\"\npath = \"pool.img\"\n\
    [[controller]]\nname = \"pool\"\nstore = \"pool-file\"\nformat = \"blank\"\n";
/// The superblocks of a store.
const SUPERBLOCKS_BYTES: usize = 4 * 4096;

fn start(directory: TempDir, (epoch, series): (&str, &str)) -> Daemon {
    let variables = [("SIDECORE_EPOCH", epoch), ("SIDECORE_EPOCH_SERIES", series)];
    Daemon::start_with(directory, &(config(1) + POOL), &variables)
}

fn pool(directory: &Path) -> std::path::PathBuf {
    directory.join("pool.img")
}

/// Ends a daemon in order. Returns its directory.
fn end(mut daemon: Daemon) -> TempDir {
    daemon.signal(Signal::TERM);
    let (status, log) = daemon.wait();
    assert_eq!(status.code(), Some(0), "{log}");
    std::mem::replace(&mut daemon.directory, tempfile::tempdir().unwrap())
}

fn volume(name: &str) -> CreateVolume {
    CreateVolume { name: name.to_owned(), size_bytes: 1 << 20, quota_bytes: None }
}

#[test]
fn a_daemon_ends_when_its_successor_has_written_and_an_older_epoch_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::File::create(pool(directory.path())).unwrap().set_len(64 << 20).unwrap();
    let mut daemon = start(directory, ("1", "aa"));
    daemon.client().create_volume("pool", &volume("root")).unwrap();

    // Another daemon's locks keep a successor away on this host, so it has a copy.
    let copy = tempfile::tempdir().unwrap();
    std::fs::copy(pool(daemon.directory.path()), pool(copy.path())).unwrap();
    let copy = end(start(copy, ("2", "aa")));
    let mut superblocks = [0; SUPERBLOCKS_BYTES];
    let from = OpenOptions::new().read(true).open(pool(copy.path())).unwrap();
    from.read_exact_at(&mut superblocks, 0).unwrap();
    let to = OpenOptions::new().write(true).open(pool(daemon.directory.path())).unwrap();
    to.write_all_at(&superblocks, 0).unwrap();

    daemon.client().create_volume("pool", &volume("late")).unwrap_err();
    let (status, log) = daemon.wait();
    assert_eq!(status.code(), Some(5), "{log}");
    assert!(log.contains("epoch 2 of series 00000000000000aa has written"), "{log}");

    let directory = std::mem::replace(&mut daemon.directory, copy);
    let former = start(directory, ("1", "aa"));
    let refused = former.client().volumes("pool").unwrap_err().to_string();
    assert!(refused.contains("was served in epoch 2"), "{refused}");
    assert!(refused.contains("use one etcd and one record"), "{refused}");
    let successor = start(end(former), ("3", "aa"));
    let names: Vec<String> =
        successor.client().volumes("pool").unwrap().into_iter().map(|it| it.name).collect();
    assert_eq!(names, ["root"]);
    assert!(successor.client().check_controller("pool").unwrap().clean);
    // Epochs that have begun anew, as with another etcd.
    let begun_anew = start(end(successor), ("1", "bb"));
    begun_anew.client().create_volume("pool", &volume("next")).unwrap();
    drop(end(begun_anew));
}

#[test]
fn a_reservation_conflict_ends_an_owner_that_is_fenced_by_reservations_and_no_other() {
    for (fence, ends) in [("reservation", true), ("", false)] {
        let Some(disk) = SlowDisk::mount(64 << 20) else { return };
        let pool = POOL.replace("pool.img", disk.path().to_str().unwrap());
        let owner = [("SIDECORE_EPOCH", "1"), ("SIDECORE_EPOCH_SERIES", "aa")];
        let variables = [owner[0], owner[1], ("SIDECORE_FENCE", fence)];
        let directory = tempfile::tempdir().unwrap();
        let mut daemon = Daemon::start_with(directory, &(config(1) + &pool), &variables);
        disk.refuse_writes(Errno::BADE.raw_os_error());
        daemon.client().create_volume("pool", &volume("root")).unwrap_err();
        if ends {
            let (status, log) = daemon.wait();
            assert_eq!(status.code(), Some(5), "{log}");
            assert!(log.contains("another host has reserved it"), "{log}");
        } else {
            // Another cluster, or a program, has reserved one of its disks: an error of that disk.
            daemon.client().volumes("pool").expect("it serves its other disks");
        }
    }
}

#[test]
fn half_an_epoch_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let child = common::spawn(directory.path(), &config(1), &[("SIDECORE_EPOCH", "1")]);
    let output = child.wait_with_output().unwrap();
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{message}");
    assert!(message.contains("SIDECORE_EPOCH_SERIES"), "{message}");
}
