//! `sidecore volume dedup` against a running daemon, whose pool is a file.

mod common;

use std::path::Path;

use serde_json::Value;

use common::{Daemon, directory, failure, stdout};

const POOL: &str = r#"
control_socket = "control.sock"
[[sidecore]]
name = "sc0"
[[store]]
name = "below"
type = "file"
path = "pool.img"
direct = false
[[controller]]
name = "pool"
store = "below"
format = "blank"
"#;

const MIB: u64 = 1 << 20;

fn json(directory: &Path, arguments: &[&str]) -> Value {
    serde_json::from_str(&stdout(directory, &[arguments, &["--json"]].concat())).unwrap()
}

fn data_bytes(directory: &Path) -> u64 {
    json(directory, &["controller", "show"])["space"]["data_bytes"].as_u64().unwrap()
}

/// Contents in which no page is like another one.
fn contents(salt: u32) -> Vec<u8> {
    (0..4 * MIB as u32 / 4).flat_map(|word| (word ^ salt).to_le_bytes()).collect()
}

fn exported(directory: &Path, volume: &str) -> Vec<u8> {
    stdout(directory, &["volume", "export", volume, "out.img", "--force"]);
    std::fs::read(directory.join("out.img")).unwrap()
}

#[test]
fn two_imports_of_the_same_data_take_the_space_of_one() {
    let directory = directory(POOL);
    let pool = std::fs::File::create(directory.path().join("pool.img")).unwrap();
    pool.set_len(64 * MIB).unwrap();
    let daemon = Daemon::start(directory);
    let path = daemon.path();
    let data = contents(0);
    std::fs::write(path.join("in.img"), &data).unwrap();
    for volume in ["a", "b"] {
        stdout(path, &["volume", "import", "in.img", volume]);
    }
    stdout(path, &["volume", "snapshot", "b", "monday"]);
    assert_eq!(data_bytes(path), 8 * MIB);

    // Imports are no copies of each other.
    let report = json(path, &["volume", "dedup"]);
    assert_eq!((&report["state"], &report["saved_bytes"]), (&"done".into(), &0.into()));
    let text = stdout(path, &["volume", "dedup", "--across", "--dry-run"]);
    assert!(text.starts_with("done: controller \"pool\", 12MiB of 12MiB in "), "{text}");
    assert!(text.ends_with("would save 4MiB\n"), "{text}");
    assert_eq!(data_bytes(path), 8 * MIB);
    let report = json(path, &["volume", "dedup", "--across", "--rate", "1000"]);
    assert_eq!(report["saved_bytes"], 4 * MIB, "{report}");
    assert_eq!(json(path, &["volume", "dedup", "--status"]), report);
    assert_eq!(data_bytes(path), 4 * MIB);
    assert!(stdout(path, &["volume", "check"]).ends_with("fine\n"));
    let events = stdout(path, &["controller", "show"]);
    assert!(events.contains("a deduplication has freed 4194304 bytes"), "{events}");
    for volume in ["a", "b", "monday"] {
        assert!(exported(path, volume) == data, "{volume}");
    }
    assert_eq!(json(path, &["volume", "show", "a"])["shared_bytes"], 4 * MIB);

    // Over a restart: and another import into one of them does not change the others.
    let daemon = Daemon::start(daemon.stop());
    let path = daemon.path();
    let other = contents(1 << 30);
    std::fs::write(path.join("other.img"), &other).unwrap();
    for volume in ["a", "b", "monday"] {
        assert!(exported(path, volume) == data, "{volume}");
    }
    stdout(path, &["volume", "delete", "a"]);
    stdout(path, &["volume", "import", "other.img", "a"]);
    for (volume, wanted) in [("a", &other), ("b", &data), ("monday", &data)] {
        assert!(&exported(path, volume) == wanted, "{volume}");
    }
    assert_eq!(data_bytes(path), 8 * MIB);
    assert!(stdout(path, &["volume", "check"]).ends_with("fine\n"));
}

#[test]
fn a_run_in_the_background_is_shown_and_stopped() {
    let directory = directory(POOL);
    let pool = std::fs::File::create(directory.path().join("pool.img")).unwrap();
    pool.set_len(64 * MIB).unwrap();
    let daemon = Daemon::start(directory);
    let path = daemon.path();
    let (code, message) = failure(path, &["volume", "dedup", "--status"]);
    assert_eq!(code, Some(1));
    assert!(message.contains("was not deduplicated since the daemon has started"), "{message}");
    std::fs::write(path.join("in.img"), contents(0)).unwrap();
    stdout(path, &["volume", "import", "in.img", "a"]);
    for (arguments, wanted) in [
        (&["volume", "dedup", "x"][..], "there is no volume called \"x\""),
        (&["volume", "dedup", "--rate", "0"], "0 is not in 1..="),
        (&["volume", "dedup", "a", "--stop"], "cannot be used with"),
    ] {
        let (_, message) = failure(path, arguments);
        assert!(message.contains(wanted), "{arguments:?}: {message}");
    }
    // A MiB a second: it takes four seconds if it is not stopped.
    let text = stdout(path, &["volume", "dedup", "--rate", "1", "--background"]);
    assert!(text.starts_with("in progress"), "{text}");
    let (_, message) = failure(path, &["volume", "dedup"]);
    assert!(message.contains("a deduplication is in progress"), "{message}");
    let (code, _) = failure(path, &["volume", "dedup", "--stop"]);
    assert_eq!(code, Some(1), "it has not looked at everything");
    let (_, _) = failure(path, &["volume", "dedup", "--status"]);
    assert!(stdout(path, &["volume", "dedup"]).starts_with("done"));
}
