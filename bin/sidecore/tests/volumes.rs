//! Controllers, volumes and devices from the command line, against a running daemon.

mod common;

use std::fs::File;
use std::io::Read as _;
use std::os::unix::fs::FileExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use serde_json::Value;
use sidecore_driver::{BlkClient, ClientOptions, Status};

use common::{Daemon, POOL, command, directory, failure, stdout};

const SECOND: &str = r#"
[[store]]
name = "below2"
type = "ram"
size = "16MiB"
[[controller]]
name = "pond"
store = "below2"
format = "blank"
"#;

fn json(directory: &Path, arguments: &[&str]) -> Value {
    serde_json::from_str(&stdout(directory, &[arguments, &["--json"]].concat())).unwrap()
}

fn daemon() -> Daemon {
    Daemon::start(directory(POOL))
}

/// The files in a directory, apart from the daemon's own.
fn files(directory: &Path) -> Vec<String> {
    let names = std::fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<_> =
        names.filter(|name| !["disks.toml", "control.sock"].contains(&name.as_str())).collect();
    names.sort();
    names
}

#[test]
fn volumes_are_made_listed_changed_and_deleted() {
    let daemon = daemon();
    let path = daemon.path();
    let printed = stdout(path, &["volume", "create", "root", "8MiB", "--quota", "4MiB"]);
    assert_eq!(printed, "made: volume \"root\" of 8MiB, quota 4MiB on controller \"pool\"\n");
    assert_eq!(json(path, &["volume", "snapshot", "root", "monday"])["read_only"], true);
    stdout(path, &["volume", "clone", "monday", "copy"]);
    let text = stdout(path, &["volume", "list"]);
    let rows: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(rows[0][..2], ["NAME", "SIZE"]);
    assert_eq!(rows[1][..8], ["root", "8MiB", "0B", "0.0%", "0B", "0B", "4MiB", "0"]);
    assert_eq!(rows[1][8], "volume");
    assert_eq!(
        rows[2][..10],
        ["monday", "8MiB", "0B", "0.0%", "0B", "0B", "-", "0", "snapshot", "root"]
    );
    assert_eq!(rows[3][9], "monday");
    let list = json(path, &["volume", "list"]);
    assert_eq!(list["volumes"][2]["origin_name"], "monday");

    stdout(path, &["volume", "resize", "root", "16MiB"]);
    let (code, message) = failure(path, &["volume", "resize", "root", "8MiB"]);
    assert_eq!(code, Some(1));
    assert!(message.contains("what is behind 8MiB would be lost: say --shrink"), "{message}");
    stdout(path, &["volume", "resize", "root", "8MiB", "--shrink"]);
    stdout(path, &["volume", "quota", "root", "none"]);
    stdout(path, &["volume", "rename", "root", "trunk"]);
    let text = stdout(path, &["volume", "show", "trunk", "--extents"]);
    for word in ["8MiB", "fragmentation", "none", "ON STORE"] {
        assert!(text.contains(word), "{word}: {text}");
    }
    assert!(stdout(path, &["volume", "check"]).ends_with("fine\n"));
    assert_eq!(json(path, &["volume", "check"])["clean"], true);
    stdout(path, &["volume", "delete", "copy", "monday", "trunk"]);
    assert_eq!(json(path, &["volume", "list"])["volumes"].as_array().unwrap().len(), 0);
}

#[test]
fn a_delete_reports_the_result_for_every_name() {
    let daemon = daemon();
    let path = daemon.path();
    for name in ["a", "b", "c"] {
        stdout(path, &["volume", "create", name, "1MiB"]);
    }
    let output =
        command(path, &["volume", "delete", "a", "missing", "b", "a", "c"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let (printed, errors) =
        (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
    for name in ["a", "b", "c"] {
        assert_eq!(printed.matches(&format!("deleted: \"{name}\"")).count(), 1, "{printed}");
    }
    assert!(
        errors.contains("not deleted: \"missing\": ") && errors.contains("no volume called"),
        "{errors}"
    );
    assert!(!errors.contains("still there"), "{errors}");
    assert_eq!(json(path, &["volume", "list"])["volumes"].as_array().unwrap().len(), 0);
    stdout(path, &["volume", "create", "d", "1MiB"]);
    let output = command(path, &["volume", "delete", "missing", "d", "--json"]).output().unwrap();
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(
        (&report["deleted"][0], &report["not_deleted"][0]["volume"]),
        (&"d".into(), &"missing".into())
    );
}

#[test]
fn a_refusal_gives_the_reason() {
    let daemon = daemon();
    let path = daemon.path();
    stdout(path, &["volume", "create", "root", "1MiB"]);
    for (arguments, code, wanted) in [
        (&["volume", "create", "a/b", "1MiB"][..], 1, "is no name for a volume"),
        (&["volume", "create", "root", "1MiB"], 1, "already"),
        (&["volume", "create", "x", "1000"], 1, "not a multiple of the controller's block size"),
        (&["volume", "create", "x", "1GB"], 2, "power of ten"),
        (&["volume", "show", "x"], 1, "there is no volume called \"x\""),
        (
            &["volume", "delete", "../controllers"],
            1,
            "there is no volume called \"../controllers\"",
        ),
        (
            &["volume", "list", "--controller", "lake"],
            1,
            "there is no controller \"lake\"; there are \"pool\"",
        ),
        (&["device", "add", "vd0", "vd0.sock"], 2, "--volume"),
        (
            &["device", "add", "vd0", "vd0.sock", "--volume", "x"],
            1,
            "there is no volume called \"x\"",
        ),
        (&["device", "remove", "vd0"], 1, "there is no device \"vd0\""),
        (&["controller", "remap", "root:0", "root:4", "2"], 1, "the blocks differ"),
        (&["volume", "export", "root", "disks.toml"], 1, "say --force"),
        (&["volume", "import", "nothing.img", "x"], 1, "nothing.img cannot be opened"),
        (&["volume", "import", ".", "x"], 1, "is a directory"),
    ] {
        let (found, message) = failure(path, arguments);
        assert_eq!(found, Some(code), "{arguments:?}: {message}");
        assert!(message.contains(wanted), "{arguments:?}: {message}");
    }
}

#[test]
fn with_several_controllers_one_has_to_be_named() {
    let daemon = Daemon::start(directory(&format!("{POOL}{SECOND}")));
    let path = daemon.path();
    let (_, message) = failure(path, &["volume", "list"]);
    assert!(message.contains("name one with --controller: pool, pond"), "{message}");
    stdout(path, &["volume", "create", "v", "1MiB", "-c", "pond"]);
    assert_eq!(
        json(path, &["volume", "list", "-c", "pool"])["volumes"].as_array().unwrap().len(),
        0
    );
    let text = stdout(path, &["controller", "list"]);
    let rows: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(rows[1][..4], ["pool", "fine", "below", "64MiB"]);
    assert_eq!(rows[2][0], "pond");
    // Without a controller, the error says how to get one.
    let none = Daemon::start(directory("control_socket = \"control.sock\"\n"));
    let (_, message) = failure(none.path(), &["volume", "list"]);
    assert!(message.contains("has no controller"), "{message}");
}

#[test]
fn a_device_is_added_used_and_removed() {
    let daemon = daemon();
    let path = daemon.path();
    stdout(path, &["volume", "create", "root", "1MiB"]);
    let limits = [
        "--weight",
        "200",
        "--read-iops",
        "5000",
        "--write-bps",
        "10MiB",
        "--queues",
        "2",
        "--idle",
        "interrupt",
    ];
    let printed = stdout(
        path,
        &[&["device", "add", "vd0", "vd0.sock", "--volume", "root"][..], &limits].concat(),
    );
    assert!(printed.starts_with("added: \"vd0\" of 1MiB on /"), "{printed}");
    let options = ClientOptions { huge_pages: false, ..ClientOptions::default() };
    let mut client = BlkClient::connect(path.join("vd0.sock"), &options).unwrap();
    let queue = client.queue(0).unwrap();
    let slot = queue.take_slot().unwrap();
    queue.submit_write(slot, sidecore_units::Sector(0), 4096).unwrap();
    queue.publish().unwrap();
    let mut completions = Vec::new();
    while queue.poll_completions(&mut completions).unwrap() == 0 {
        assert!(queue.wait(Duration::from_secs(10)).unwrap());
    }
    assert_eq!(completions[0].status, Status::Ok);
    drop(client);

    let devices = json(path, &["list"]);
    assert_eq!(devices["devices"][0]["volume"], "root");
    assert_eq!(devices["devices"][0]["queues"], 2);
    let rows = stdout(path, &["volume", "list"]);
    assert!(rows.lines().nth(1).unwrap().ends_with("  vd0"), "{rows}");
    let text = stdout(path, &["controller", "show"]);
    for word in [
        "for tests",
        "fragmentation",
        "in the BTLB",
        "] 64MiB in all",
        "read 5.00k/s, write 10MiB/s",
        "WEIGHT",
    ] {
        assert!(text.contains(word), "{word}: {text}");
    }
    let report = json(path, &["controller", "show"]);
    assert_eq!(report["functions"][0]["weight"], 200);
    assert_eq!(report["functions"][0]["misses"], 1);
    let (_, message) = failure(path, &["volume", "delete", "root"]);
    assert!(
        message.contains("not deleted: \"root\"") && message.contains("remove its device first"),
        "{message}"
    );
    assert_eq!(stdout(path, &["controller", "prune", "--volume", "root"]), "pruned\n");
    assert_eq!(stdout(path, &["controller", "flush"]), "flushed\n");
    assert_eq!(stdout(path, &["device", "remove", "vd0"]), "removed: \"vd0\"\n");
    assert!(!path.join("vd0.sock").exists());
    stdout(path, &["volume", "delete", "root"]);
}

/// For each volume, the list shows how much space its deletion frees, and how much is shared with
/// other volumes.
#[test]
fn a_list_shows_the_space_that_volumes_share() {
    let daemon = daemon();
    let path = daemon.path();
    std::fs::write(path.join("in.img"), vec![7; 2 << 20]).unwrap();
    std::fs::write(path.join("other.img"), vec![8; 1 << 20]).unwrap();
    stdout(path, &["volume", "import", "in.img", "root"]);
    stdout(path, &["volume", "import", "other.img", "alone"]);
    let shared = |names: &[&str]| {
        let text = stdout(path, &["volume", "list"]);
        let rows: Vec<Vec<&str>> =
            text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(
            rows[0][..7],
            ["NAME", "SIZE", "ALLOCATED", "OF", "SIZE", "EXCLUSIVE", "SHARED"]
        );
        let list = json(path, &["volume", "list"]);
        for (row, name) in rows[1..].iter().zip(names) {
            assert_eq!(row[0], *name);
            let shown = json(path, &["volume", "show", name]);
            assert!(list["volumes"].as_array().unwrap().contains(&shown));
            let text = stdout(path, &["volume", "show", name]);
            assert!(text.contains(&format!("shared         {}", row[5])), "{text}");
        }
        rows[1..].iter().map(|row| row[5].to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(shared(&["root", "alone"]), ["0B", "0B"]);
    stdout(path, &["volume", "snapshot", "root", "monday"]);
    assert_eq!(shared(&["root", "alone", "monday"]), ["2MiB", "0B", "2MiB"]);
    stdout(path, &["volume", "clone", "monday", "copy"]);
    stdout(path, &["volume", "delete", "root"]);
    assert_eq!(shared(&["alone", "monday", "copy"]), ["0B", "2MiB", "2MiB"]);
    let list = json(path, &["volume", "list"]);
    assert_eq!(
        (&list["volumes"][1]["shared_bytes"], &list["volumes"][0]["shared_bytes"]),
        (&(2 << 20).into(), &0.into())
    );
    // The last volume with the blocks shares them with no other volume.
    stdout(path, &["volume", "delete", "monday"]);
    assert_eq!(shared(&["alone", "copy"]), ["0B", "0B"]);
}

/// Makes a sparse file of 8 MiB with some data. Returns its contents.
fn image(path: &Path) -> Vec<u8> {
    let mut contents = vec![0_u8; 8 << 20];
    for (at, len) in [(0, 5000), (1 << 20, 700_000), ((8 << 20) - 512, 512)] {
        for (index, byte) in contents[at..at + len].iter_mut().enumerate() {
            *byte = (index * 7 + at / 512 + 1) as u8;
        }
    }
    let file = File::create(path).unwrap();
    file.set_len(8 << 20).unwrap();
    for (index, page) in contents.chunks(4096).enumerate() {
        if page.iter().any(|byte| *byte != 0) {
            file.write_all_at(page, index as u64 * 4096).unwrap();
        }
    }
    contents
}

#[test]
fn an_image_comes_back_as_it_went_in() {
    let daemon = daemon();
    let path = daemon.path();
    let contents = image(&path.join("in.img"));
    let answer = json(path, &["volume", "import", "in.img", "v"]);
    assert_eq!((&answer["format"], &answer["image_bytes"]), (&"raw".into(), &(8 << 20).into()));
    let copied = answer["copied_bytes"].as_u64().unwrap();
    assert!(copied < 2 << 20, "the holes were left out: {answer}");
    assert_eq!(answer["volume"]["allocated_bytes"], copied);
    let answer = json(path, &["volume", "export", "v", "out.img"]);
    assert_eq!(answer["copied_bytes"], copied);
    assert!(std::fs::read(path.join("out.img")).unwrap() == contents);
    assert!(
        std::fs::metadata(path.join("out.img")).unwrap().blocks() * 512 < 4 << 20,
        "it has holes"
    );
    // No temporary file, device or snapshot is left.
    assert_eq!(files(path), ["in.img", "out.img"]);
    assert_eq!(json(path, &["list"])["devices"].as_array().unwrap().len(), 0);
    assert_eq!(json(path, &["volume", "list"])["volumes"].as_array().unwrap().len(), 1);

    let (_, message) = failure(path, &["volume", "export", "v", "out.img"]);
    assert!(message.contains("out.img is there already; say --force to replace it"), "{message}");
    std::fs::write(path.join("out.img"), "old").unwrap();
    stdout(path, &["volume", "export", "v", "out.img", "--force", "--skip-zeroes"]);
    assert!(std::fs::read(path.join("out.img")).unwrap() == contents);
    // A larger volume than the image, with zeros written out.
    std::fs::write(path.join("full.img"), &contents).unwrap();
    let answer =
        json(path, &["volume", "import", "full.img", "w", "--size", "9MiB", "--skip-zeroes"]);
    assert_eq!(answer["volume"]["size_bytes"], 9 << 20);
    assert!(answer["volume"]["allocated_bytes"].as_u64().unwrap() < 2 << 20, "{answer}");
    let (_, message) = failure(path, &["volume", "import", "full.img", "x", "--size", "1MiB"]);
    assert!(message.contains("1MiB is less than the image has: 8MiB"), "{message}");
}

#[test]
fn an_odd_image_is_filled_up_to_a_block() {
    let daemon = daemon();
    let path = daemon.path();
    std::fs::write(path.join("odd.img"), vec![7; 5001]).unwrap();
    stdout(path, &["volume", "import", "odd.img", "odd"]);
    stdout(path, &["volume", "export", "odd", "out.img"]);
    let out = std::fs::read(path.join("out.img")).unwrap();
    assert_eq!(out.len(), 5120);
    assert!(out[..5001].iter().all(|byte| *byte == 7) && out[5001..].iter().all(|byte| *byte == 0));
    std::fs::write(path.join("empty.img"), "").unwrap();
    assert!(failure(path, &["volume", "import", "empty.img", "x"]).1.contains("is empty"));
}

#[test]
fn other_formats_go_through_qemu_img() {
    let daemon = daemon();
    let path = daemon.path();
    let contents = image(&path.join("in.img"));
    // Without qemu-img, the error says how to get it, and no work is begun.
    let mut bare = command(path, &["volume", "import", "in.img", "v", "--format", "qcow2"]);
    let output = bare.env("PATH", path).output().unwrap();
    let message = String::from_utf8(output.stderr).unwrap();
    assert!(
        message.contains("qemu-img is not installed") && message.contains("qemu-utils"),
        "{message}"
    );
    assert_eq!(files(path), ["in.img"]);
    stdout(path, &["volume", "import", "in.img", "v"]);
    stdout(path, &["volume", "export", "v", "out.qcow2", "--format", "qcow2"]);
    let answer = json(path, &["volume", "import", "out.qcow2", "w"]);
    assert_eq!(answer["format"], "qcow2");
    stdout(path, &["volume", "export", "w", "out.img"]);
    assert!(std::fs::read(path.join("out.img")).unwrap() == contents);
    let (_, message) = failure(path, &["volume", "export", "v", "x", "--format", "nonsense"]);
    assert!(message.contains("qemu-img failed") && message.contains("nonsense"), "{message}");
    std::fs::write(path.join("bad.img"), b"QFI\xfb and no more").unwrap();
    let (_, message) = failure(path, &["volume", "import", "bad.img", "x"]);
    assert!(message.contains("qemu-img failed"), "{message}");
    assert_eq!(files(path), ["bad.img", "in.img", "out.img", "out.qcow2"]);
    assert_eq!(json(path, &["volume", "list"])["volumes"].as_array().unwrap().len(), 2);
}

#[test]
fn a_failed_or_interrupted_import_leaves_nothing_behind() {
    let daemon = daemon();
    let path = daemon.path();
    // More data than the store has room for, and more than the quota allows.
    std::fs::write(path.join("big.img"), vec![1; 80 << 20]).unwrap();
    let (_, message) = failure(path, &["volume", "import", "big.img", "big"]);
    assert!(message.contains("big.img has 80MiB of data, and"), "{message}");
    std::fs::write(path.join("big.img"), vec![1; 32 << 20]).unwrap();
    let (_, message) = failure(path, &["volume", "import", "big.img", "big", "--quota", "30MiB"]);
    assert!(message.contains("the volume refuses bytes"), "{message}");
    let nothing_is_left = || {
        assert_eq!(json(path, &["list"])["devices"].as_array().unwrap().len(), 0);
        assert_eq!(json(path, &["volume", "list"])["volumes"].as_array().unwrap().len(), 0);
        assert_eq!(files(path), ["big.img"]);
    };
    nothing_is_left();

    // A signal in the middle. Whether the signal or the quota ends the import first, the unfinished
    // work is removed.
    let mut child = command(path, &["volume", "import", "big.img", "big", "--quota", "31MiB"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let deadline = Instant::now() + Duration::from_secs(20);
    while json(path, &["volume", "list"])["volumes"].as_array().unwrap().is_empty() {
        if child.try_wait().unwrap().is_some() {
            break;
        }
        assert!(Instant::now() < deadline, "no volume is made");
    }
    let pid = rustix::process::Pid::from_child(&child);
    // Twice, as from senders that signal the process and its group.
    for _ in 0..2 {
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
    }
    let status = child.wait().unwrap();
    let mut message = String::new();
    child.stderr.take().unwrap().read_to_string(&mut message).unwrap();
    assert_eq!(status.code(), Some(1), "{message}");
    nothing_is_left();
}

/// A write past the limit of a file's size is an error of the program: the signal for such a write
/// would end the program with its unfinished work still there.
#[test]
fn a_file_size_limit_is_an_error_and_leaves_nothing_behind() {
    let daemon = daemon();
    let path = daemon.path();
    stdout(path, &["volume", "create", "root", "8MiB"]);
    File::create(path.join("pool.img")).unwrap().set_len(64 << 20).unwrap();
    let limited = |arguments: &[&str]| {
        let program = command(path, arguments);
        let mut shell = std::process::Command::new("sh");
        // The unit is 512 bytes: 1 MiB.
        shell
            .arg("-c")
            .arg("ulimit -f 2048; exec \"$0\" \"$@\"")
            .arg(program.get_program())
            .args(program.get_args());
        shell.current_dir(path).output().unwrap()
    };
    for arguments in
        [&["volume", "export", "root", "out.img"][..], &["controller", "format", "pool.img"]]
    {
        let output = limited(arguments);
        let message = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{arguments:?}: {:?} {message}", output.status);
        assert!(message.contains("File too large"), "{message}");
    }
    assert_eq!(files(path), ["pool.img"]);
    assert_eq!(json(path, &["list"])["devices"].as_array().unwrap().len(), 0);
    assert_eq!(json(path, &["volume", "list"])["volumes"].as_array().unwrap().len(), 1);
}

#[test]
fn stores_are_formatted_and_checked_without_a_daemon() {
    let directory = directory(POOL);
    let path = directory.path();
    File::create(path.join("pool.img")).unwrap().set_len(64 << 20).unwrap();
    let (_, message) = failure(path, &["volume", "check", "--path", "pool.img"]);
    assert!(message.contains("not formatted"), "{message}");
    let printed =
        stdout(path, &["controller", "format", "pool.img", "--block-size", "4KiB", "--label", "x"]);
    assert_eq!(printed, "formatted: pool.img, in blocks of 4KiB\n");
    assert!(stdout(path, &["volume", "check", "--path", "pool.img"]).ends_with("fine\n"));
    let (_, message) = failure(path, &["controller", "format", "pool.img"]);
    assert!(message.contains("--force"), "{message}");
    stdout(path, &["controller", "format", "pool.img", "--force"]);
    assert_eq!(
        failure(path, &["controller", "format", "pool.img", "--block-size", "2KiB"]).0,
        Some(2)
    );

    // A flipped bit in one copy of the superblock is found, and the exit code shows it.
    let file = File::options().read(true).write(true).open(path.join("pool.img")).unwrap();
    let mut block = [0; 4096];
    let written = |slot: &u64| {
        file.read_exact_at(&mut block, slot * 4096).unwrap();
        block.iter().any(|byte| *byte != 0)
    };
    let slot = (0..4).find(written).expect("no superblock");
    file.write_all_at(&[block[64] ^ 1], slot * 4096 + 64).unwrap();
    drop(file);
    let output = command(path, &["volume", "check", "--path", "pool.img"]).output().unwrap();
    let printed = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(2), "{printed}");
    assert!(printed.contains("superblock") && printed.ends_with("1 fault\n"), "{printed}");
    assert!(failure(path, &["volume", "check", "--path", "no.img"]).1.contains("no.img"));

    // While a daemon has the store open, no other program gets it.
    stdout(path, &["controller", "format", "pool.img", "--force"]);
    let config =
        POOL.replace("type = \"ram\"\nsize = \"64MiB\"", "type = \"file\"\npath = \"pool.img\"");
    std::fs::write(path.join("disks.toml"), config).unwrap();
    let daemon = Daemon::start(directory);
    for arguments in [
        &["volume", "check", "--path", "pool.img"][..],
        &["controller", "format", "pool.img", "--force"],
    ] {
        assert!(failure(daemon.path(), arguments).1.contains("in use"), "{arguments:?}");
    }
    assert!(stdout(daemon.path(), &["volume", "check"]).ends_with("fine\n"));
}
