//! The command line against a running daemon, and without one.

mod common;

use std::path::Path;
use std::time::Duration;

use sidecore_driver::{BlkClient, ClientOptions, Status};
use sidecore_kit::wait;
use sidecore_units::Sector;

use common::{Daemon, command, directory, failure, stdout};

const CONFIG: &str = r#"
control_socket = "control.sock"
[[sidecore]]
name = "sc0"
[[store]]
name = "mem"
type = "ram"
size = "1MiB"
[[device]]
name = "vd0"
store = "mem"
socket = "vd0.sock"
queues = 2
[[device]]
name = "vd1"
front_end = "nvme"
store = "mem"
socket = "vd1.sock"
read_only = true
idle = "poll"
"#;

fn daemon() -> Daemon {
    Daemon::start(directory(CONFIG))
}

#[test]
fn list_shows_every_device() {
    let daemon = daemon();
    let text = stdout(daemon.path(), &["list"]);
    let rows: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(rows[0][..3], ["NAME", "STATE", "FRONT-END"]);
    assert_eq!(
        rows[1][..8],
        ["vd0", "waiting", "virtio-blk", "mem", "ram", "1MiB", "0/2", "adaptive"]
    );
    assert_eq!(
        rows[2][..9],
        ["vd1", "waiting", "nvme", "mem", "ram", "1MiB", "ro", "0/64", "poll"]
    );
    let json: serde_json::Value =
        serde_json::from_str(&stdout(daemon.path(), &["list", "--json"])).unwrap();
    assert_eq!(json["devices"][1]["name"], "vd1");
    assert_eq!(json["devices"][1]["front_end"], "nvme");
    assert_eq!(json["sidecores"][0]["name"], "sc0");
}

/// A guest that uses the first of two queues of `vd0`.
fn used_queue(directory: &Path) -> BlkClient {
    let options = ClientOptions { queues: 1, huge_pages: false, ..ClientOptions::default() };
    let mut client = BlkClient::connect(directory.join("vd0.sock"), &options).unwrap();
    let queue = client.queue(0).unwrap();
    let slot = queue.take_slot().unwrap();
    queue.submit_read(slot, Sector(0), 4096).unwrap();
    queue.publish().unwrap();
    let mut completions = Vec::new();
    while queue.poll_completions(&mut completions).unwrap() == 0 {
        assert!(queue.wait(std::time::Duration::from_secs(60)).unwrap(), "no answer");
    }
    assert_eq!(completions[0].status, Status::Ok);
    client
}

#[test]
fn stats_are_json_or_a_table_of_one_or_all() {
    let daemon = daemon();
    let path = daemon.path();
    let json: serde_json::Value =
        serde_json::from_str(&stdout(path, &["stats", "--json"])).unwrap();
    assert_eq!(json["sidecores"][0]["name"], "sc0");
    assert!(json["interval_ns"].as_u64().unwrap() >= 1_000_000_000, "{json}");
    assert_eq!(
        json["devices"][1]["queues"].as_array().unwrap().len(),
        0,
        "no guest has used any of the 64"
    );
    let json = stdout(path, &["stats", "vd1", "--json", "--since-start"]);
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert!(json.get("interval_ns").is_none(), "{json}");
    assert_eq!(json["devices"].as_array().unwrap().len(), 1);
    assert!(stdout(path, &["stats"]).contains("latency p99 us"));
    let queue = used_queue(path);
    assert!(!stdout(path, &["stats", "vd0"]).contains("queue 0"));
    let text = stdout(path, &["stats", "vd0", "--queues", "--interval", "0.1"]);
    assert!(text.contains("queue 0") && !text.contains("queue 1"), "{text}");
    drop(queue);
    let (code, message) = failure(path, &["stats", "vd7"]);
    assert_eq!(code, Some(1));
    assert!(message.contains("no device \"vd7\"; there are vd0, vd1"), "{message}");
}

#[test]
fn stages_come_and_go_and_are_listed() {
    let daemon = daemon();
    let path = daemon.path();
    let _queue = used_queue(path);
    let added = stdout(path, &["stage", "add", "vd0", "delay", "delay_us=5"]);
    let start = "added: \"delay\" at position 1 of \"vd0\"; 1 queue paused for ";
    assert!(added.starts_with(start) && added.ends_with(" us\n"), "{added}");
    let fault = ["stage", "add", "vd0", "fault", "ranges=[[0, 7]]", "--position", "2", "--json"];
    let json: serde_json::Value = serde_json::from_str(&stdout(path, &fault)).unwrap();
    assert_eq!((&json["type"], &json["position"]), (&"fault".into(), &2.into()));
    assert!(json["pause_ns"].as_u64() > Some(0), "{json}");
    let list = "POSITION  STAGE  FROM   SETTINGS\n\
                       1  delay  added  delay_us=5\n\
                       2  fault  added  ranges=[[0,7]]\n";
    let lines = |text: &str| text.lines().map(|line| line.trim().to_owned()).collect::<Vec<_>>();
    assert_eq!(lines(&stdout(path, &["stage", "list", "vd0"])), lines(list));
    let removed = stdout(path, &["stage", "remove", "vd0", "1"]);
    assert!(removed.starts_with("removed: \"delay\" at position 1 of \"vd0\";"), "{removed}");
    let json = stdout(path, &["stage", "list", "vd0", "--json"]);
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["stages"][0]["is_live"], true);
    assert_eq!(json["stages"].as_array().unwrap().len(), 1);
    let idle = stdout(path, &["stage", "add", "vd1", "delay", "delay_us=5"]);
    assert!(idle.ends_with("; no queue was running\n"), "{idle}");
    let (code, message) = failure(path, &["stage", "add", "vd0", "tape"]);
    assert!(code == Some(1) && message.contains("\"tape\" is not one of"), "{message}");
    let (code, message) = failure(path, &["stage", "add", "vd0", "delay", "5"]);
    assert!(code == Some(1) && message.contains("`5` is not KEY=VALUE"), "{message}");
}

#[test]
fn top_without_a_terminal_prints_once() {
    let daemon = daemon();
    let text = stdout(daemon.path(), &["top", "--interval", "0.1"]);
    assert!(text.starts_with("SIDECORE"), "{text}");
    assert!(text.contains("vd1     waiting      0"), "{text}");
    assert!(!text.contains('\u{1b}'), "{text}");
    assert_eq!(failure(daemon.path(), &["top", "--interval", "0"]).0, Some(2));
}

#[test]
fn check_agrees_with_the_daemon() {
    let directory = directory(CONFIG);
    assert!(stdout(directory.path(), &["check", "disks.toml"]).contains("fine, 2 devices"));
    let plan = stdout(directory.path(), &["check", "--plan", "disks.toml"]);
    assert!(
        plan.contains("  start sidecore \"sc0\"\n") && plan.ends_with("  start device \"vd1\"\n"),
        "{plan}"
    );
    std::fs::write(directory.path().join("bad.toml"), CONFIG.replace("queues = 2", "queues = 0"))
        .unwrap();
    let (code, message) = failure(directory.path(), &["check", "bad.toml"]);
    assert_eq!(code, Some(2));
    assert!(message.starts_with("bad.toml:13:10: [[device]] \"vd0\": "), "{message}");
    // A file that a running daemon uses is in use, which only a check of the machine finds.
    let daemon = daemon();
    let (code, message) = failure(daemon.path(), &["check", "disks.toml"]);
    assert_eq!(code, Some(2));
    assert!(message.contains("vd0.sock already"), "{message}");
    stdout(daemon.path(), &["check", "--text-only", "disks.toml"]);
}

#[test]
fn without_a_daemon_every_command_says_what_to_do() {
    let directory = directory(CONFIG);
    for arguments in [&["list"][..], &["stats"], &["stats", "--json"], &["top"]] {
        let (code, message) = failure(directory.path(), arguments);
        assert_eq!(code, Some(1));
        assert!(message.contains("start one with `sidecored --config FILE`"), "{message}");
    }
}

#[test]
fn help_has_examples_and_exit_codes() {
    let text = stdout(Path::new("/"), &["--help"]);
    for word in ["Examples:", "Exit codes:", "control_socket", "q quits"] {
        assert!(text.contains(word), "{word}: {text}");
    }
}

/// A capture without a frame is a whole file, which replaces another one only once it has begun; a
/// trace without a drop is empty.
#[test]
fn a_capture_writes_a_file_or_standard_output() {
    let config = "control_socket = \"control.sock\"\n[[sidecore]]\nname = \"sc0\"\n[[switch]]\n\
                  name = \"lan\"\n[[device]]\nname = \"nic\"\nfront_end = \"virtio-net\"\n\
                  switch = \"lan\"\nmac = \"52:54:00:00:00:01\"\nsocket = \"nic.sock\"\n";
    let daemon = Daemon::start(directory(config));
    let file = daemon.path().join("frames");
    std::fs::write(&file, "before").unwrap();
    let wrong = failure(daemon.path(), &["net", "capture", "x", "-w", "frames"]).1;
    assert!(wrong.contains("there is no port \"x\""), "{wrong}");
    let wrong = failure(daemon.path(), &["net", "capture", "nic", "-w", "no/frames"]).1;
    assert!(wrong.contains("cannot write no/frames"), "{wrong}");
    assert_eq!(std::fs::read(&file).unwrap(), b"before");
    let trace = |arguments: &[&str]| {
        let arguments = [&["net", "trace"], arguments].concat();
        command(daemon.path(), &arguments).output().unwrap()
    };
    assert_eq!(trace(&[]).status.code(), Some(2), "of what?");
    assert_eq!(trace(&["nic", "--switch", "lan"]).status.code(), Some(2));
    let wrong = String::from_utf8(trace(&["x"]).stderr).unwrap();
    assert!(wrong.contains("there is no port \"x\""), "{wrong}");
    for arguments in
        [&["nic", "--seconds", "0"][..], &["--switch", "lan", "--json", "--count", "0"]]
    {
        let output = trace(arguments);
        assert!(output.status.success() && output.stdout.is_empty(), "{output:?}");
    }
    // The one before ends when the daemon notices that its client has gone.
    wait::until("a capture is made", Duration::from_secs(20), || {
        let arguments = ["net", "capture", "nic", "-w", "frames", "--seconds", "0"];
        command(daemon.path(), &arguments).status().unwrap().success()
    });
    // A capture that was written has ended.
    let arguments = ["net", "capture", "nic", "-w", "-", "--seconds", "0"];
    let output = command(daemon.path(), &arguments).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    for bytes in [std::fs::read(&file).unwrap(), output.stdout] {
        assert_eq!(bytes[..4], [0x0a, 0x0d, 0x0d, 0x0a], "the section");
        let end = u32::from_le_bytes(*bytes.last_chunk().unwrap()) as usize;
        assert_eq!(bytes[bytes.len() - end..][..4], [5, 0, 0, 0], "the statistics at its end");
    }
}
