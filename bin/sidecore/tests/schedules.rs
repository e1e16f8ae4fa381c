//! `sidecore schedule` against a running daemon, whose schedules run by hand alone.

mod common;

use serde_json::Value;

use common::{Daemon, POOL, directory, failure, stdout};

#[test]
fn schedules_are_listed_run_and_replaced() {
    let daemon = Daemon::start(directory(POOL));
    let path = daemon.path();
    assert!(stdout(path, &["schedule", "list"]).starts_with("there are no schedules"));
    let write = |schedules: &str| {
        std::fs::write(path.join("next.toml"), [POOL, schedules].concat()).unwrap();
    };
    let load = ["schedule", "load", "next.toml"];
    for (schedule, wanted) in [
        ("[[schedule]]\nname = \"s\"\nvolumes = [\"*\"]\nkeep = \"0 daily\"\n", "keeps 1 to 1000"),
        ("[[schedule]]\nname = \"s\"\nvolumes = [\"*\"]\nkeep = \"2 dayly\"\n", "is no period"),
        ("[[schedule]]\nname = \"s\"\nvolumes = [\"a b\"]\nkeep = \"2 daily\"\n", "fits no volume"),
        ("[[schedule]]\nname = \"s\"\nkeep = \"2 daily\"\n", "`volumes` is missing"),
        (
            "[[schedule]]\nname = \"s\"\ncontroller = \"pol\"\nvolumes = [\"*\"]\n\
             keep = \"2 daily\"\n",
            "did you mean \"pool\"?",
        ),
    ] {
        write(schedule);
        let (code, message) = failure(path, &load);
        assert_eq!(code, Some(1));
        assert!(message.contains(wanted) && message.contains("next.toml:"), "{wanted}: {message}");
        assert!(message.contains("the schedules of the daemon are as before"), "{message}");
    }
    write(
        "[[schedule]]\nname = \"guests\"\nvolumes = [\"vm*\"]\nkeep = \"7 daily, 24 hourly\"\n\
         [[schedule]]\nname = \"other\"\nvolumes = [\"db\"]\nkeep = \"1 yearly\"\n",
    );
    stdout(path, &load);
    stdout(path, &["volume", "create", "vm1", "1MiB"]);
    let list: Value = serde_json::from_str(&stdout(path, &["schedule", "run", "--json"])).unwrap();
    let [guests, other] = [0, 1].map(|index| &list["schedules"][index]);
    assert_eq!((&guests["keep"], &guests["made"]), (&"24 hourly, 7 daily".into(), &1.into()));
    assert_eq!(guests["volumes"][0]["snapshots"], 1);
    assert!(other["warning"].as_str().unwrap().contains("no volume has a name like db"));
    let text = stdout(path, &["schedule", "list"]);
    assert!(text.contains("schedule \"other\": no volume has a name like db"), "{text}");
    let volumes = stdout(path, &["volume", "list"]);
    let name = volumes.split_whitespace().find(|word| word.starts_with("vm1.auto-2")).unwrap();
    let (code, message) = failure(path, &["volume", "snapshot", "vm1", name]);
    assert_eq!(code, Some(1));
    assert!(message.contains("a schedule makes and deletes"), "{message}");

    // A volume that cannot have snapshots is a failure of `run`.
    let long = format!("vm{}", "x".repeat(43));
    stdout(path, &["volume", "create", &long, "1MiB"]);
    let (code, message) = failure(path, &["schedule", "run"]);
    assert_eq!((code, message.as_str()), (Some(1), "sidecore: 1 volume failed: see above\n"));
    let text = stdout(path, &["schedule", "list"]);
    assert!(text.contains("and those of its snapshots have room for 44: rename it"), "{text}");
    let events = stdout(path, &["controller", "show"]);
    assert!(events.contains("schedule \"guests\" failed at volume"), "{events}");
    // A file without schedules ends them all.
    write("");
    assert!(stdout(path, &load).starts_with("there are no schedules"));
}
