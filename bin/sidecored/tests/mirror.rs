//! Mirrors of a daemon: it is killed under load, its legs fail and come back, stores that are no
//! legs are refused, and an end in order costs no copy.

mod common;

use std::path::Path;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::json;
use sidecore_control::offline::{MirrorOptions, NewMirror, create_mirror};
use sidecore_control::report::{LegWord, MirrorReport, MirrorState};
use sidecore_control::{ClientError, Config, Depth, RemoteKind, RepairOfLeg};
use sidecore_driver::{BlkClient, BlkQueue, Slot, Status};
use sidecore_kit::guest::{complete, connect};
use sidecore_kit::process::Process;
use sidecore_kit::wait;
use tempfile::TempDir;

use common::Daemon;
use common::remote::{BLOCK, data, flush, read, submit, write};

/// The exit status of a daemon that has ended without an IOhost.
const GAVE_UP: i32 = 4;
const SOON: Duration = Duration::from_secs(60);
const LEG_BYTES: u64 = 8 << 20;
const BLOCKS: u64 = 64;

/// The configuration of a daemon with a mirror `m` of these files, and its disk `vd0`.
fn config(files: &Path, legs: &[&str], keys: &str) -> String {
    let mut text = "control_socket = \"control.sock\"\n[[sidecore]]\nname = \"sc0\"\n".to_owned();
    for leg in legs {
        let path = files.join(leg);
        text += &format!(
            "[[store]]\nname = \"{leg}\"\ntype = \"file\"\ndirect = false\npath = \"{}\"\n",
            path.display()
        );
        if *leg == "faulty" {
            text += "[[store.stage]]\ntype = \"fault\"\neio_every = 100\n";
        }
        if *leg == "slow" {
            text += "[[store.stage]]\ntype = \"delay\"\ndelay_us = 500000\n";
        }
        if *leg == "bad" {
            // All behind the metadata.
            text += "[[store.stage]]\ntype = \"fault\"\nranges = [[2048, 16383]]\n";
        }
    }
    text + &mirror(legs, keys)
}

fn mirror(legs: &[&str], keys: &str) -> String {
    format!(
        "[[store]]\nname = \"m\"\ntype = \"mirror\"\nlegs = {legs:?}\n{keys}\
         [[device]]\nname = \"vd0\"\nstore = \"m\"\nsocket = \"vd0.sock\"\n"
    )
}

/// Blank files.
fn files(names: &[&str]) -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    for name in names {
        let file = std::fs::File::create(directory.path().join(name)).unwrap();
        file.set_len(LEG_BYTES).unwrap();
    }
    directory
}

fn make(config: &str, uuid: u8, legs: &[&str]) -> NewMirror {
    let config = Config::parse(Path::new("/disks.toml"), config, Depth::Text).unwrap();
    let options = MirrorOptions {
        uuid: [uuid; 16],
        legs: legs.iter().map(|leg| (*leg).to_owned()).collect(),
        are_equal: true,
        ..MirrorOptions::default()
    };
    create_mirror(&config.spec, "m", &options).unwrap()
}

fn start(config: &str) -> Daemon {
    Daemon::start(tempfile::tempdir().unwrap(), config)
}

fn report(daemon: &Daemon) -> MirrorReport {
    daemon.client().mirrors().unwrap().remove(0)
}

fn states(report: &MirrorReport) -> Vec<LegWord> {
    report.legs.iter().map(|leg| leg.state).collect()
}

/// Waits until the mirror is so.
fn until(daemon: &Daemon, is_so: impl Fn(&MirrorReport) -> bool) -> MirrorReport {
    let client = daemon.client();
    let mut found = None;
    wait::succeed(SOON, || {
        let mirrors = client.mirrors().map_err(|error| error.to_string())?;
        let right = mirrors.iter().find(|mirror| is_so(mirror)).cloned();
        found = right.clone();
        right.map(drop).ok_or_else(|| format!("{mirrors:?}"))
    });
    found.unwrap()
}

fn until_in_sync(daemon: &Daemon, legs: usize) -> MirrorReport {
    until(daemon, |mirror| states(mirror) == vec![LegWord::InSync; legs])
}

fn guest(daemon: &Daemon) -> BlkClient {
    let socket = daemon.directory.path().join("vd0.sock");
    wait::until("the disk has a socket", SOON, || socket.exists());
    connect(&socket)
}

fn end(mut daemon: Daemon) {
    daemon.signal(Signal::TERM);
    let (status, complaint) = daemon.wait();
    assert!(status.success(), "{complaint}");
    assert!(!complaint.contains("does not close"), "{complaint}");
}

/// The mirror's bytes on a leg.
fn bytes(file: &Path, made: &NewMirror) -> Vec<u8> {
    let bytes = std::fs::read(file).unwrap();
    bytes[(LEG_BYTES - made.capacity_bytes) as usize..].to_vec()
}

fn assert_equal(files: &Path, legs: &[&str], made: &NewMirror) {
    let first = bytes(&files.join(legs[0]), made);
    assert!(first.iter().any(|byte| *byte != 0));
    for leg in &legs[1..] {
        assert!(bytes(&files.join(leg), made) == first, "leg {leg} differs");
    }
}

fn write_all(queue: &mut BlkQueue, slot: Slot, round: u64) {
    for index in 0..BLOCKS {
        write(queue, slot, index, data(index, round, BLOCK));
    }
    flush(queue, slot);
}

fn assert_round(queue: &mut BlkQueue, slot: Slot, round: u64) {
    for index in 0..BLOCKS {
        assert!(read(queue, slot, index, BLOCK) == data(index, round, BLOCK), "{index}");
    }
}

#[test]
fn answered_writes_are_there_after_kills_and_the_legs_become_equal() {
    let files = files(&["a", "b"]);
    let config = config(files.path(), &["a", "b"], "copy_bps = \"1GiB\"\n");
    let made = make(&config, 1, &[]);
    let mut daemon = start(&config);
    // The round whose writes were flushed, and the last one that was begun, of each block.
    let mut rounds = vec![(0_u64, 0_u64); BLOCKS as usize];
    for round in 1..=3_u64 {
        let mut client = guest(&daemon);
        let queue = client.queue(0).unwrap();
        let slots: Vec<Slot> = (0..32).map(|_| queue.take_slot().unwrap()).collect();
        let (answered, in_flight) = (0..24_u64, 24..56_u64);
        for index in answered {
            write(queue, slots[0], index, data(index, round, BLOCK));
            rounds[index as usize] = (round, round);
        }
        flush(queue, slots[0]);
        for (index, slot) in in_flight.zip(&slots) {
            submit(queue, *slot, index, data(index, round, BLOCK));
            rounds[index as usize].1 = round;
        }
        queue.publish().unwrap();
        daemon.child.signal(Signal::KILL).unwrap();
        daemon.child.wait_for_end(SOON).unwrap();
        let directory = std::mem::replace(&mut daemon.directory, tempfile::tempdir().unwrap());
        drop((client, daemon));
        daemon = Daemon::start(directory, &config);
        let mut client = guest(&daemon);
        let queue = client.queue(0).unwrap();
        let slot = queue.take_slot().unwrap();
        for (index, (flushed, begun)) in rounds.iter_mut().enumerate() {
            let found = read(queue, slot, index as u64, BLOCK);
            let of = |round: &u64| match round {
                0 => vec![0; BLOCK as usize],
                round => data(index as u64, *round, BLOCK),
            };
            let seen = (*flushed..=*begun).find(|round| found == of(round));
            *flushed = seen.unwrap_or_else(|| panic!("block {index} in round {round}"));
            *begun = *flushed;
        }
        until_in_sync(&daemon, 2);
    }
    end(daemon);
    assert_equal(files.path(), &["a", "b"], &made);
}

#[test]
fn a_leg_that_fails_is_no_error_for_the_guest_and_is_copied_to_when_it_is_attached() {
    let (files, legs) = (files(&["a", "b", "faulty"]), ["a", "b", "faulty"]);
    let config = config(files.path(), &legs, "read = \"b\"\ncopy_bps = \"1GiB\"\n");
    let made = make(&config, 2, &[]);
    let daemon = start(&config);
    let mut client = guest(&daemon);
    let queue = client.queue(0).unwrap();
    let slot = queue.take_slot().unwrap();
    assert_eq!(until_in_sync(&daemon, 3).read, Some(1));
    write_all(queue, slot, 1);
    write_all(queue, slot, 2);
    let failed = until(&daemon, |mirror| states(mirror)[2] == LegWord::Failed);
    assert_eq!((failed.state, failed.leg_failures), (MirrorState::Running, 1));
    let reason = failed.legs[2].reason.clone().unwrap();
    assert!(reason.contains("a write or flush of a user"), "{reason}");
    let warnings = daemon.client().devices().unwrap()[0].warnings.join("\n");
    assert!(warnings.contains("leg 2 of the mirror is not in sync"), "{warnings}");
    assert_round(queue, slot, 2);
    daemon.client().attach_leg("m", "faulty").unwrap();
    let synced = until_in_sync(&daemon, 3);
    assert!(synced.copied_bytes > 0, "{synced:?}");
    let metrics = daemon.client().metrics(false).unwrap();
    for line in [
        "sidecore_mirror_legs{mirror=\"m\",state=\"in-sync\"} 3",
        "sidecore_mirror_leg_failures_total{mirror=\"m\"} 1",
    ] {
        assert!(metrics.contains(line), "{metrics}");
    }
    drop(client);
    end(daemon);
    assert_equal(files.path(), &legs, &made);
}

/// An IOhost with a device on the file `far`, for the client `vmhost`.
fn iohost(files: &Path) -> String {
    format!(
        "control_socket = \"control.sock\"\nkey_directory = \"{0}/keys\"\n[[sidecore]]\nname = \
         \"io0\"\n[[link]]\nname = \"wire\"\ntype = \"memory\"\nsocket = \"{0}/wire.sock\"\n\
         [[client]]\nname = \"vmhost\"\nlinks = [\"wire\"]\n\
         [[store]]\nname = \"disk\"\ntype = \"file\"\npath = \"{0}/far\"\ndirect = false\n\
         [[device]]\nname = \"far\"\nfront_end = \"vrio\"\nclient = \"vmhost\"\nstore = \"disk\"\n",
        files.display()
    )
}

/// A daemon whose mirror has a leg in the file `near`, and one at the IOhost.
fn vmhost(files: &Path, fate: &str) -> String {
    let keys = "witness = \"operator\"\ncopy_bps = \"1GiB\"\n";
    vmhost_with(files, fate, &["near", "far"], keys)
}

fn vmhost_with(files: &Path, fate: &str, legs: &[&str], keys: &str) -> String {
    format!(
        "control_socket = \"control.sock\"\n[[sidecore]]\nname = \"vm0\"\n\
         [[link]]\nname = \"wire\"\ntype = \"memory\"\nsocket = \"{0}/wire.sock\"\n\
         [[iohost]]\nname = \"io1\"\nlink = \"wire\"\nclient = \"vmhost\"\n{fate}\
         [[store]]\nname = \"near\"\ntype = \"file\"\npath = \"{0}/near\"\ndirect = false\n\
         [[store]]\nname = \"far\"\ntype = \"remote\"\niohost = \"io1\"\n{1}",
        files.display(),
        mirror(legs, keys),
    )
}

#[test]
fn a_leg_whose_iohost_is_killed_comes_back_on_its_own() {
    let files = files(&["near", "far"]);
    let near = vmhost(files.path(), "on_disconnect = \"fail\"\nfail_after_s = 3\n");
    let made = make(&near, 3, &["near"]);
    let mut far = start(&iohost(files.path()));
    let daemon = start(&near);
    let control = daemon.client();
    // The remote store is none yet, and becomes one by command only.
    let found = until(&daemon, |mirror| states(mirror) == [LegWord::InSync, LegWord::Out]);
    let reason = found.legs[1].reason.clone().unwrap();
    assert!(reason.contains("it has no header of a mirror"), "{reason}");
    control.add_leg("m", "far").unwrap();
    until_in_sync(&daemon, 2);
    let mut client = guest(&daemon);
    let queue = client.queue(0).unwrap();
    let slot = queue.take_slot().unwrap();
    write_all(queue, slot, 1);
    let error = control.permit_mirror("m", &[1]).unwrap_err().to_string();
    assert!(error.contains("waits for no permission"), "{error}");

    far.child.signal(Signal::KILL).unwrap();
    far.child.wait_for_end(SOON).unwrap();
    submit(queue, slot, 0, data(0, 2, BLOCK));
    queue.publish().unwrap();
    let waiting = until(&daemon, |mirror| mirror.state == MirrorState::Waiting);
    let reason = waiting.reason.unwrap();
    assert!(reason.contains("no permission to go on alone"), "{reason}");
    assert_eq!(waiting.asks_without, [1]);
    for others in [&[0][..], &[0, 1], &[]] {
        let error = control.permit_mirror("m", others).unwrap_err().to_string();
        assert!(error.contains("asks to go on without leg 1, not without"), "{error}");
    }
    control.permit_mirror("m", &[1]).unwrap();
    assert_eq!(complete(queue).status, Status::Ok);
    write_all(queue, slot, 2);
    assert_eq!(report(&daemon).state, MirrorState::Running);

    let directory = std::mem::replace(&mut far.directory, tempfile::tempdir().unwrap());
    drop(far);
    let far = Daemon::start(directory, &iohost(files.path()));
    let synced = until_in_sync(&daemon, 2);
    assert!(synced.copied_bytes > 0, "{synced:?}");
    assert_round(queue, slot, 2);
    write_all(queue, slot, 3);
    drop(client);
    end(daemon);
    end(far);
    assert_equal(files.path(), &["near", "far"], &made);
}

#[test]
fn a_leg_whose_iohost_is_away_does_not_keep_the_daemon_from_ending() {
    let files = files(&["near", "far"]);
    // Longer than the end of a daemon may take.
    let near = vmhost(files.path(), "on_disconnect = \"fail\"\nfail_after_s = 300\n");
    make(&near, 10, &["near"]);
    let mut far = start(&iohost(files.path()));
    let mut daemon = start(&near);
    until(&daemon, |mirror| states(mirror) == [LegWord::InSync, LegWord::Out]);
    daemon.client().add_leg("m", "far").unwrap();
    until_in_sync(&daemon, 2);
    let mut client = guest(&daemon);
    let queue = client.queue(0).unwrap();
    let slot = queue.take_slot().unwrap();
    write_all(queue, slot, 1);
    far.child.signal(Signal::KILL).unwrap();
    far.child.wait_for_end(SOON).unwrap();
    submit(queue, slot, 0, data(0, 2, BLOCK));
    queue.publish().unwrap();
    daemon.signal(Signal::TERM);
    let (status, complaint) = daemon.wait();
    assert_eq!(status.code(), Some(GAVE_UP), "{complaint}");
    assert!(complaint.contains("the IOhost of leg \"far\" is away"), "{complaint}");
}

#[test]
fn a_leg_that_waits_for_its_iohost_also_below_a_controller_is_refused() {
    let files = files(&["near"]);
    let below = "[[controller]]\nname = \"pool\"\nstore = \"far\"\n[[store]]\nname = \"part\"\n\
                 type = \"volume\"\ncontroller = \"pool\"\nvolume = \"v\"\n";
    for (leg, below, wanted) in [
        ("far", "", "leg \"far\" is a device of iohost \"io1\""),
        (
            "part",
            below,
            "leg \"part\" lies on store \"far\" of controller \"pool\", which is a device",
        ),
    ] {
        let fate = "on_disconnect = \"stall\"\n";
        let config = vmhost_with(files.path(), fate, &["near", leg], "") + below;
        let directory = tempfile::tempdir().unwrap();
        // A daemon that starts after all has to end.
        let mut daemon = Process::from(common::spawn(directory.path(), &config, &[]));
        let status = daemon.wait_for_end(SOON).unwrap().expect("the daemon does not end");
        let complaint = daemon.complaint().unwrap();
        assert!(!status.success() && complaint.contains(wanted), "{complaint}");
        assert!(complaint.contains("set `on_disconnect = \"fail\"` there"), "{complaint}");
        assert!(!directory.path().join("control.sock").exists());
    }
    // Nor does the IOhost of a leg become one that is waited for.
    let near = vmhost(files.path(), "on_disconnect = \"fail\"\n");
    make(&near, 13, &["near"]);
    let daemon = start(&near);
    let refused = |result: Result<(), ClientError>, why: &str| {
        let error = result.unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    };
    let iohost = json!({
        "name": "io1", "link": "wire", "client": "vmhost", "on_disconnect": "stall",
    });
    refused(daemon.client().remove_part(RemoteKind::Iohost, "io1"), "store \"far\"");
    refused(daemon.client().add_part(RemoteKind::Iohost, &iohost), "io1");
    end(daemon);
}

#[test]
fn a_leg_that_was_away_is_behind_and_an_end_in_order_costs_no_copy() {
    let (files, legs) = (files(&["a", "b", "c"]), ["a", "b", "c"]);
    let config = config(files.path(), &legs, "copy_bps = \"1GiB\"\n");
    let made = make(&config, 4, &[]);
    let (there, away) = (files.path().join("c"), files.path().join("away"));
    std::fs::rename(&there, &away).unwrap();
    let daemon = start(&config);
    let found = until(&daemon, |mirror| mirror.state == MirrorState::Running);
    assert_eq!(states(&found)[..3], [LegWord::InSync, LegWord::InSync, LegWord::Missing]);
    let mut client = guest(&daemon);
    let queue = client.queue(0).unwrap();
    let slot = queue.take_slot().unwrap();
    write_all(queue, slot, 1);
    drop(client);
    end(daemon);

    std::fs::rename(&away, &there).unwrap();
    let daemon = start(&config);
    let synced = until_in_sync(&daemon, 3);
    assert!(synced.copied_bytes > 0, "{synced:?}");
    let mut client = guest(&daemon);
    let queue = client.queue(0).unwrap();
    let slot = queue.take_slot().unwrap();
    assert_round(queue, slot, 1);
    write_all(queue, slot, 2);
    drop(client);
    end(daemon);
    assert_equal(files.path(), &legs, &made);

    let daemon = start(&config);
    let found = until_in_sync(&daemon, 3);
    assert_eq!((found.copied_bytes, found.dirty_regions), (0, 0), "it was closed in order");
    end(daemon);
}

#[test]
fn stores_that_are_no_legs_are_refused_and_not_changed() {
    let (files, legs) = (files(&["a", "b", "other", "blank"]), ["a", "b"]);
    make(&config(files.path(), &legs, ""), 5, &[]);
    make(&config(files.path(), &["other"], ""), 6, &[]);
    let bytes = |name: &str| std::fs::read(files.path().join(name)).unwrap();
    let before = legs.map(bytes);

    // All of the mirror: either store may be the right one.
    let daemon = start(&config(files.path(), &["a", "other"], ""));
    let refused = until(&daemon, |mirror| mirror.state == MirrorState::Refused);
    let reason = refused.reason.unwrap();
    assert!(reason.contains("leg \"other\": it is a leg of another mirror"), "{reason}");
    let metrics = daemon.client().metrics(false).unwrap();
    assert!(metrics.contains("sidecore_mirror_refused{mirror=\"m\"} 1"), "{metrics}");
    let device = daemon.client().devices().unwrap().remove(0);
    assert_eq!(device.state.word(), "refused");
    end(daemon);
    assert!(legs.map(bytes) == before);

    // One without a header is left out, and written by command only.
    let daemon = start(&config(files.path(), &["a", "b", "blank"], ""));
    let found = until(&daemon, |mirror| mirror.state == MirrorState::Running);
    assert_eq!(states(&found), [LegWord::InSync, LegWord::InSync, LegWord::Out]);
    let error = daemon.client().attach_leg("m", "blank").unwrap_err().to_string();
    assert!(error.contains("store \"blank\": it has no header of a mirror"), "{error}");
    let error = daemon.client().attach_leg("m", "other").unwrap_err().to_string();
    assert!(error.contains("none of the `legs` of mirror \"m\""), "{error}");
    assert!(bytes("blank").iter().all(|byte| *byte == 0));
    daemon.client().remove_leg("m", "b").unwrap();
    let error = daemon.client().remove_leg("m", "0").unwrap_err().to_string();
    assert!(error.contains("it is the only one in sync"), "{error}");
    daemon.client().add_leg("m", "blank").unwrap();
    until(&daemon, |mirror| states(mirror) == [LegWord::InSync, LegWord::Out, LegWord::InSync]);
    end(daemon);

    // A leg that was removed stays out.
    let daemon = start(&config(files.path(), &["a", "b", "blank"], ""));
    let found = until(&daemon, |mirror| mirror.state == MirrorState::Running);
    assert_eq!(states(&found), [LegWord::InSync, LegWord::Out, LegWord::InSync]);
    let reason = found.legs[1].reason.clone().unwrap();
    assert!(reason.contains("was removed from the mirror"), "{reason}");
    end(daemon);
}

#[test]
fn a_dead_leg_of_two_is_replaced_with_one_permission() {
    let (files, legs) = (files(&["a", "bad", "c"]), ["a", "bad", "c"]);
    let keys = "witness = \"operator\"\ncopy_bps = \"1GiB\"\n";
    let before = config(files.path(), &legs, keys);
    let made = make(&before, 8, &["a", "bad"]);
    let daemon = start(&before);
    let control = daemon.client();
    let mut client = guest(&daemon);
    let queue = client.queue(0).unwrap();
    let slot = queue.take_slot().unwrap();
    submit(queue, slot, 0, data(0, 1, BLOCK));
    queue.publish().unwrap();
    until(&daemon, |mirror| mirror.state == MirrorState::Waiting);
    let error = control.remove_leg("m", "bad").unwrap_err().to_string();
    assert!(error.contains("the mirror waits"), "{error}");
    control.permit_mirror("m", &[1]).unwrap();
    assert_eq!(complete(queue).status, Status::Ok);
    control.remove_leg("m", "bad").unwrap();
    control.add_leg("m", "c").unwrap();
    until(&daemon, |mirror| states(mirror) == [LegWord::InSync, LegWord::Out, LegWord::InSync]);
    write_all(queue, slot, 2);
    drop(client);
    end(daemon);

    let daemon = start(&config(files.path(), &["a", "c"], keys));
    assert_eq!(until_in_sync(&daemon, 2).copied_bytes, 0);
    let mut client = guest(&daemon);
    let queue = client.queue(0).unwrap();
    let slot = queue.take_slot().unwrap();
    assert_round(queue, slot, 2);
    drop(client);
    end(daemon);
    assert_equal(files.path(), &["a", "c"], &made);
}

#[test]
fn a_repair_does_not_keep_the_daemon_from_ending_in_order() {
    let (files, legs) = (files(&["a", "slow"]), ["a", "slow"]);
    let config = config(files.path(), &legs, "copy_bps = \"1GiB\"\n");
    make(&config, 11, &[]);
    let mut daemon = start(&config);
    until_in_sync(&daemon, 2);
    let (control, (sender, repaired)) = (daemon.client(), mpsc::channel());
    let (from, to) = ("a".to_owned(), "slow".to_owned());
    std::thread::spawn(move || {
        // All of the leg, which takes much longer than an end may take.
        let all = RepairOfLeg { from, to, ..RepairOfLeg::default() };
        let _ = sender.send(control.repair_leg("m", &all).is_ok());
    });
    assert!(repaired.recv_timeout(Duration::from_secs(2)).is_err(), "it is being repaired");
    let begin = Instant::now();
    daemon.signal(Signal::TERM);
    let (status, complaint) = daemon.wait();
    assert!(status.success() && !complaint.contains("does not close"), "{complaint}");
    assert!(begin.elapsed() < Duration::from_secs(10), "{:?}: {complaint}", begin.elapsed());
    assert_eq!(repaired.recv_timeout(SOON), Ok(false));

    let daemon = start(&config);
    let found = until_in_sync(&daemon, 2);
    assert_eq!((found.copied_bytes, found.dirty_regions), (0, 0), "it was closed in order");
    end(daemon);
}

#[test]
fn a_leg_that_comes_late_joins() {
    let files = files(&["near", "far"]);
    let fate = "on_disconnect = \"fail\"\nfail_after_s = 1\n";
    let near = vmhost(files.path(), fate);
    make(&config(files.path(), &["near", "far"], ""), 12, &[]);
    let daemon = start(&near);
    // Longer than a mirror waits for those that are late.
    until(&daemon, |mirror| mirror.state == MirrorState::Waiting);
    daemon.client().permit_mirror("m", &[1]).unwrap();
    let mut client = guest(&daemon);
    let queue = client.queue(0).unwrap();
    let slot = queue.take_slot().unwrap();
    write_all(queue, slot, 1);
    let far = start(&iohost(files.path()));
    assert!(until_in_sync(&daemon, 2).copied_bytes > 0);
    assert_round(queue, slot, 1);
    write_all(queue, slot, 2);
    drop(client);
    // The end of the guest is none of the legs' user, which flushes them and clears marks.
    let clean = until(&daemon, |mirror| mirror.dirty_regions == 0);
    assert_eq!((states(&clean), clean.leg_failures), (vec![LegWord::InSync; 2], 0));
    end(daemon);
    end(far);
}

#[test]
fn a_mirror_whose_legs_are_all_late_opens_when_one_comes() {
    let files = files(&["near", "far"]);
    make(&config(files.path(), &["far"], ""), 9, &[]);
    let fate = "on_disconnect = \"fail\"\nfail_after_s = 1\n";
    let daemon = start(&vmhost_with(files.path(), fate, &["far"], ""));
    // Longer than a mirror waits for those that are late.
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_secs(5) {
        assert_eq!(report(&daemon).state, MirrorState::Opening);
    }
    let far = start(&iohost(files.path()));
    until_in_sync(&daemon, 1);
    end(daemon);
    end(far);
}

#[test]
fn a_guest_whose_mirror_waits_does_not_keep_the_daemon_from_ending() {
    let (files, legs) = (files(&["a", "bad"]), ["a", "bad"]);
    let config = config(files.path(), &legs, "");
    make(&config, 7, &[]);
    let mut daemon = start(&config);
    let mut client = guest(&daemon);
    let queue = client.queue(0).unwrap();
    let slot = queue.take_slot().unwrap();
    submit(queue, slot, 0, data(0, 1, BLOCK));
    queue.publish().unwrap();
    let waiting = until(&daemon, |mirror| mirror.state == MirrorState::Waiting);
    assert!(waiting.reason.unwrap().contains("the mirror has no `witness`"));
    daemon.signal(Signal::TERM);
    let (status, complaint) = daemon.wait();
    assert!(status.success(), "{complaint}");
    assert!(complaint.contains("given up with requests that have no answer"), "{complaint}");
}
