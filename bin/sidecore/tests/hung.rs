//! Imports and exports that are interrupted or killed while a filesystem does not answer.

mod common;

use std::fs;
use std::io::Read as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use sidecore_fuse::{Operation, SlowDisk};
use sidecore_kit::wait;
use tempfile::TempDir;

use common::{Daemon, POOL, command, directory, failure, stdout};

/// The longest time that a test waits for an event.
const PATIENCE: Duration = Duration::from_secs(60);

fn daemon() -> Daemon {
    Daemon::start(directory(POOL))
}

/// The numbers of devices and volumes that the daemon has.
fn counts(path: &Path) -> (usize, usize) {
    let count = |arguments: &[&str], key: &str| {
        let answer: Value =
            serde_json::from_str(&stdout(path, &[arguments, &["--json"]].concat())).unwrap();
        answer[key].as_array().unwrap().len()
    };
    (count(&["list"], "devices"), count(&["volume", "list"], "volumes"))
}

fn start(path: &Path, arguments: &[&str]) -> Child {
    command(path, arguments).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
}

fn send(pid: u32, signal: Signal) {
    kill_process(Pid::from_raw(pid.cast_signed()).unwrap(), signal).unwrap();
}

/// The standard error of a command, once all processes that share it have ended.
fn errors(child: &mut Child) -> String {
    let mut message = String::new();
    child.stderr.take().unwrap().read_to_string(&mut message).unwrap();
    message
}

/// The state of a process, one letter, and the number of its parent; `None` if the process is gone.
fn state(pid: u32) -> Option<(char, u32)> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name before these fields may contain anything.
    let mut words = stat.rsplit_once(") ")?.1.split(' ');
    Some((words.next()?.chars().next()?, words.next()?.parse().ok()?))
}

fn is_gone(pid: u32) -> bool {
    state(pid).is_none_or(|(state, _)| matches!(state, 'Z' | 'X'))
}

/// The process that `parent` has started, if there is exactly one.
fn child_of(parent: u32) -> Option<u32> {
    let processes = fs::read_dir("/proc")
        .unwrap()
        .filter_map(|entry| entry.unwrap().file_name().to_str()?.parse().ok());
    let children: Vec<u32> =
        processes.filter(|pid| state(*pid).is_some_and(|(_, its)| its == parent)).collect();
    if let [child] = children[..] { Some(child) } else { None }
}

#[track_caller]
fn wait_until(what: &str, is_so: impl FnMut() -> bool) {
    wait::until(what, PATIENCE, is_so);
}

fn is_empty(directory: &Path) -> bool {
    fs::read_dir(directory).unwrap().next().is_none()
}

/// The signal ends the command, though a read of the image never ends.
#[test]
fn an_import_from_a_filesystem_that_does_not_answer_is_interrupted() {
    let Some(disk) = SlowDisk::mount(1 << 20) else { return };
    let daemon = daemon();
    let path = daemon.path();
    let image = disk.path();
    let import = ["volume", "import", image.to_str().unwrap(), "hung"];
    // In the middle of the copy, and before the volume was made.
    for hold_from in [512 << 10, 0] {
        disk.hold(move |request| {
            request.operation() == Operation::Read && request.offset_bytes() >= hold_from
        });
        let mut child = start(path, &import);
        disk.wait_for_held(|held| !held.is_empty());
        assert_eq!(counts(path).1, usize::from(hold_from > 0));
        send(child.id(), Signal::INT);
        let status = child.wait().unwrap();
        // The read has not ended meanwhile.
        assert!(!disk.held().is_empty());
        assert_eq!(counts(path), (0, 0));
        disk.release();
        let message = errors(&mut child);
        assert_eq!(status.code(), Some(1), "{message}");
        assert!(
            message.contains("interrupted") && message.contains("does not answer"),
            "{message}"
        );
    }
    stdout(path, &import);
}

/// A filesystem on a loop device over a slow disk, which is unmounted on drop.
struct Mounted {
    place: TempDir,
    device: Option<PathBuf>,
    is_mounted: bool,
}

impl Mounted {
    fn over(disk: &SlowDisk) -> Option<Self> {
        let run = |program: &str, arguments: &[&Path]| {
            let arguments: Vec<&str> =
                arguments.iter().filter_map(|argument| argument.to_str()).collect();
            sidecore_skip::run(program, &arguments)
        };
        let mut mounted =
            Self { place: tempfile::tempdir().unwrap(), device: None, is_mounted: false };
        let device = run("losetup", &["--find".as_ref(), "--show".as_ref(), &disk.path()])?;
        let device = mounted.device.insert(device.into());
        // Without a journal and late initialization, only fsync writes to the disk.
        let options = ["-q", "-O", "^has_journal", "-E", "lazy_itable_init=0"].map(Path::new);
        run("mkfs.ext4", &[&options[..], &[device]].concat())?;
        run("mount", &[device, mounted.place.path()])?;
        mounted.is_mounted = true;
        run("sync", &["-f".as_ref(), mounted.place.path()])?;
        Some(mounted)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let run = |program: &str, arguments: &[&Path]| {
            Command::new(program)
                .args(arguments)
                .stderr(Stdio::null())
                .status()
                .is_ok_and(|status| status.success())
        };
        let deadline = Instant::now() + PATIENCE;
        // A process that was stuck in the filesystem may take a moment to end.
        while self.is_mounted && !run("umount", &[self.place.path()]) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(10));
        }
        if let Some(device) = &self.device {
            run("losetup", &["--detach".as_ref(), device]);
        }
    }
}

/// The signal ends the command, though the image's filesystem no longer answers.
#[test]
fn an_export_into_a_filesystem_that_does_not_answer_is_interrupted() {
    let Some(disk) = SlowDisk::mount(16 << 20) else { return };
    let Some(mounted) = Mounted::over(&disk) else { return };
    let _releaser = disk.releaser();
    let daemon = daemon();
    let path = daemon.path();
    fs::write(path.join("in.img"), vec![7; 1 << 20]).unwrap();
    stdout(path, &["volume", "import", "in.img", "v"]);
    // Before any object was made, and with a snapshot and a device made.
    let places = [(disk.directory(), Operation::Lookup), (mounted.place.path(), Operation::Write)];
    for (place, held) in places {
        let image = place.join("out.img");
        let export = ["volume", "export", "v", image.to_str().unwrap()];
        disk.hold(move |request| request.operation() == held);
        let mut child = start(path, &export);
        disk.wait_for_held(|held| !held.is_empty());
        send(child.id(), Signal::INT);
        let status = child.wait().unwrap();
        assert!(!disk.held().is_empty());
        assert_eq!(counts(path), (0, 1));
        disk.release();
        let message = errors(&mut child);
        assert_eq!(status.code(), Some(1), "{message}");
        assert!(
            message.contains("interrupted") && message.contains("does not answer"),
            "{message}"
        );
        assert_eq!(message.contains("/.sidecore-"), held == Operation::Write, "{message}");
    }
    let image = mounted.place.path().join("out.img");
    stdout(path, &["volume", "export", "v", image.to_str().unwrap()]);
    assert!(fs::read(&image).unwrap() == vec![7; 1 << 20]);
}

/// A directory with a program in place of qemu-img, and a PATH that finds the program.
fn qemu_img(script: &str) -> (TempDir, String) {
    let directory = tempfile::tempdir().unwrap();
    let program = directory.path().join("qemu-img");
    fs::write(&program, format!("#!/bin/sh\n{script}\n")).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let paths = format!("{}:{}", directory.path().display(), std::env::var("PATH").unwrap());
    (directory, paths)
}

/// A conversion that waits for a filesystem that does not answer ends as well, with its process,
/// its temporary image and its snapshot.
#[test]
fn a_conversion_that_gets_no_answer_is_interrupted() {
    let Some(from) = SlowDisk::mount(1 << 20) else { return };
    let Some(disk) = SlowDisk::mount(16 << 20) else { return };
    let Some(mounted) = Mounted::over(&disk) else { return };
    let _releaser = disk.releaser();
    let daemon = daemon();
    let path = daemon.path();
    let temporary = tempfile::tempdir().unwrap();
    // The script copies the last argument but one to the last.
    let (_program, paths) =
        qemu_img("shift $(($# - 2)); exec dd if=\"$1\" of=\"$2\" conv=fsync bs=64k status=none");
    fs::write(path.join("in.img"), vec![7; 1 << 20]).unwrap();
    stdout(path, &["volume", "import", "in.img", "v"]);
    let (image, to) = (from.path(), mounted.place.path().join("out.qcow2"));
    for (what, source, target, disk, held) in [
        ("import", image.to_str().unwrap(), "hung", &from, Operation::Read),
        ("export", "v", to.to_str().unwrap(), &disk, Operation::Write),
    ] {
        disk.hold(move |request| request.operation() == held);
        let more = ["--format", "qcow2", "--temporary", temporary.path().to_str().unwrap()];
        let mut convert = command(path, &[&["volume", what, source, target][..], &more].concat());
        let mut child = convert.env("PATH", &paths).stderr(Stdio::piped()).spawn().unwrap();
        disk.wait_for_held(|held| !held.is_empty());
        let mut qemu = None;
        wait_until("qemu-img runs", || {
            qemu = child_of(child.id()).and_then(child_of);
            qemu.is_some()
        });
        send(child.id(), Signal::INT);
        let status = child.wait().unwrap();
        assert!(!disk.held().is_empty());
        assert_eq!(counts(path), (0, 1), "{what}");
        assert!(is_empty(temporary.path()), "{what}");
        disk.release();
        let message = errors(&mut child);
        assert_eq!(status.code(), Some(1), "{message}");
        assert!(message.contains("interrupted"), "{message}");
        wait_until("qemu-img has ended", || is_gone(qemu.unwrap()));
    }
}

/// However the processes of an import end, qemu-img ends with them.
#[test]
fn qemu_img_does_not_outlive_the_command() {
    let daemon = daemon();
    let path = daemon.path();
    let pid_file = path.join("pid");
    // The conversion never ends.
    let script =
        format!("echo $$ > {0}.new; mv {0}.new {0}; exec sleep 100000", pid_file.display());
    let (_program, paths) = qemu_img(&script);
    fs::write(path.join("in.img"), vec![7; 1 << 20]).unwrap();
    for killed in ["worker", "command"] {
        let mut import = command(path, &["volume", "import", "in.img", "x", "--format", "qcow2"]);
        let mut child = import.env("PATH", &paths).stderr(Stdio::piped()).spawn().unwrap();
        wait_until("qemu-img runs", || pid_file.exists());
        let qemu: u32 = fs::read_to_string(&pid_file).unwrap().trim().parse().unwrap();
        let worker = child_of(child.id()).unwrap();
        send(if killed == "worker" { worker } else { child.id() }, Signal::KILL);
        let status = child.wait().unwrap();
        let deadline = Instant::now() + PATIENCE;
        while !is_gone(qemu) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(10));
        }
        let outlived = !is_gone(qemu);
        if outlived {
            send(qemu, Signal::KILL);
        }
        assert!(!outlived, "qemu-img goes on without its {killed}");
        let message = errors(&mut child);
        if killed == "worker" {
            assert_eq!(status.code(), Some(1), "{message}");
            assert!(message.contains("was ended by signal 9"), "{message}");
        }
        assert_eq!(counts(path), (0, 0));
        fs::remove_file(&pid_file).unwrap();
        wait_until("the worker has ended", || is_gone(worker));
        let names = fs::read_dir(path)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let left: Vec<String> = names.filter(|name| name.starts_with(".sidecore")).collect();
        assert!(left.is_empty(), "{left:?} without the {killed}: {message}");
    }
}

/// If the process that copies is killed, the command removes the unfinished work of that process.
#[test]
fn an_unfinished_volume_is_removed_if_its_worker_is_killed() {
    let Some(disk) = SlowDisk::mount(1 << 20) else { return };
    let daemon = daemon();
    let path = daemon.path();
    let image = disk.path();
    let import = ["volume", "import", image.to_str().unwrap(), "half"];
    disk.hold(|request| {
        request.operation() == Operation::Read && request.offset_bytes() >= 512 << 10
    });
    let mut child = start(path, &import);
    disk.wait_for_held(|held| !held.is_empty());
    assert_eq!(counts(path), (1, 1));
    send(child_of(child.id()).unwrap(), Signal::KILL);
    disk.release();
    let status = child.wait().unwrap();
    let message = errors(&mut child);
    assert_eq!(status.code(), Some(1), "{message}");
    assert_eq!(counts(path), (0, 0), "{message}");
    assert!(message.contains("was ended by signal 9"), "{message}");
    // An import to a name that is taken does not cost the volume of that name, either.
    stdout(path, &import);
    assert!(failure(path, &import).1.contains("half"));
    assert_eq!(counts(path), (0, 1));
}
