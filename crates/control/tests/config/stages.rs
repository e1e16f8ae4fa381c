//! Stages, in the new spelling and in the older one.

use std::path::Path;

use sidecore_assembly::spec::{StageKind, StageSpec, StoreKind, StoreSpec, Values};
use sidecore_control::Depth;
use sidecore_stage_delay::DelayStage;
use sidecore_stage_fault::{Affected, Fault, FaultPlan, FaultRule, When};

use crate::{GOOD, parse};

#[test]
fn both_spellings_of_a_stage_are_equal() {
    let stores = |text: &str| {
        let config = parse(Path::new("/"), &format!("{GOOD}{text}"), Depth::Text);
        config.unwrap_or_else(|problems| panic!("{problems}")).spec.stores.split_off(2)
    };
    let delay = StageSpec::from(StageKind::Delay(DelayStage { delay_us: 5 }));
    let rule = |affected, fault| FaultRule { affected, when: When::EveryNth(9), fault };
    let rules = vec![rule(Affected::Reads, Fault::Short), rule(Affected::Writes, Fault::Short)];
    let fault = StageSpec::from(StageKind::Fault(FaultPlan { seed: 0, rules }));
    for (word, keys, stage) in
        [("delay", "delay_us = 5\n", &delay), ("fault", "short_every = 9\n", &fault)]
    {
        let old = stores(&format!(
            "[[store]]\nname = \"x\"\ntype = \"{word}\"\nstore = \"disk\"\n{keys}"
        ));
        let new = "[[store]]\nname = \"x\"\ntype = \"store\"\nstore = \"disk\"\n[[store.stage]]\n";
        assert_eq!(old, stores(&format!("{new}type = \"{word}\"\n{keys}")));
        assert_eq!(old, [StoreSpec::in_front_of("x", "disk", stage.clone())]);
        assert_eq!(old[0].word(), word);
    }
    let several = "[[store]]\nname = \"x\"\ntype = \"null\"\nsize = 512\n\
                   [[store.stage]]\ntype = \"fault\"\n\
                   short_every = 9\n[[store.stage]]\ntype = \"delay\"\ndelay_us = 5\n";
    let kind = StoreKind::Null { size_bytes: 512, block_bytes: 512 };
    let several_are =
        StoreSpec { stages: vec![fault.clone(), delay.clone()], ..StoreSpec::new("x", kind) };
    assert_eq!(stores(several), [several_are]);
    // Requests pass the stages in front of an older spelling before its own stage.
    let mixed = "[[store]]\nname = \"x\"\ntype = \"delay\"\nstore = \"mem\"\ndelay_us = 5\n\
                 [[store.stage]]\n\
                 type = \"fault\"\nshort_every = 9\n";
    assert_eq!(stores(mixed)[0].stages, [fault, delay]);
}

#[test]
fn each_stage_may_have_threads_of_its_own() {
    let stage = |threads: &str| {
        let store = "[[store]]\nname = \"x\"\ntype = \"null\"\nsize = 512\n";
        let text = format!("{GOOD}{store}[[store.stage]]\ntype = \"read-only\"\n{threads}\n");
        parse(Path::new("/"), &text, Depth::Text).map_err(|problems| problems.to_string())
    };
    let threads = |text: &str| stage(text).unwrap().spec.stores[2].stages[0].threads;
    assert_eq!([threads(""), threads("threads = 0"), threads("threads = 16")], [0, 0, 16]);
    let said = stage("threads = 17").unwrap_err();
    assert!(said.contains("`threads`") && said.contains("16"), "{said}");
}

/// Two devices may share a file, or a volume, if a stage lets no write of one of them pass.
#[test]
fn a_stage_that_refuses_writes_makes_a_reader() {
    let two = "[[device]]\nname = \"x\"\nstore = \"disk\"\nsocket = \"x.sock\"\n\
               [[device]]\nname = \"y\"\n\
               store = \"shown\"\nsocket = \"y.sock\"\n\
               [[store]]\nname = \"shown\"\ntype = \"store\"\nstore = \"disk\"\n";
    let stage = |word: &str| format!("{GOOD}{two}[[store.stage]]\ntype = \"{word}\"\n");
    let shown =
        parse(Path::new("/"), &stage("read-only"), Depth::Text).unwrap().spec.stores.remove(2);
    assert_eq!(
        shown,
        StoreSpec::in_front_of(
            "shown",
            "disk",
            StageSpec::from_values("read-only", &Values::default()).unwrap()
        )
    );
    assert_eq!(shown.word(), "read-only");
    let problems = parse(Path::new("/"), &stage("fault"), Depth::Text).unwrap_err().to_string();
    assert!(
        problems.contains("[[device]] \"x\" writes to the file of store \"disk\" too"),
        "{problems}"
    );
}

/// A recording needs a directory that the daemon may write to. A daemon starts without it.
#[test]
fn a_recording_needs_a_directory_and_a_name_of_its_own() {
    let directory = tempfile::tempdir().unwrap();
    let check = |keys: &str, depth| {
        let text = format!(
            "control_socket = \"c.sock\"\n[[sidecore]]\nname = \"sc0\"\n\
             [[store]]\nname = \"disk\"\ntype = \"null\"\nsize = 512\n\
             [[store.stage]]\ntype = \"record\"\n{keys}\n"
        );
        parse(directory.path(), &text, depth).map_err(|problems| problems.to_string())
    };
    let config = check("file = \"a.recording\"\ndata = \"full\"", Depth::Machine);
    let config = config.unwrap_or_else(|said| panic!("{said}"));
    let file = config.spec.stores[0].stages[0].recording().map(Path::to_owned);
    assert_eq!(file, Some(directory.path().join("a.recording")));
    let missing = "file = \"no/a.recording\"";
    let said = check(missing, Depth::Machine).unwrap_err();
    assert!(said.contains("no recording can be made at") && said.contains("No such"), "{said}");
    assert!(check(missing, Depth::Start).is_ok());
    for (keys, why) in [
        ("data = \"full\"", "`file`"),
        ("file = \"a.txt\"", "ends with `.recording`"),
        ("file = \"a.recording\"\nmax_bytes = \"1KiB\"", "at least 1 MiB"),
        ("file = \"a.recording\"\ndata = \"some\"", "is not one of"),
    ] {
        let said = check(keys, Depth::Text).unwrap_err();
        assert!(said.contains(why), "{keys}: {said}");
    }
}

/// The file of usage records may be written, or may be made. A daemon starts without it.
#[test]
fn usage_records_need_a_regular_file_or_a_directory() {
    let directory = tempfile::tempdir().unwrap();
    let check = |records: &str, depth| {
        let text = format!(
            "control_socket = \"c.sock\"\n[[sidecore]]\nname = \"sc0\"\n\
             [[store]]\nname = \"disk\"\ntype = \"null\"\nsize = 512\n\
             [[store.stage]]\ntype = \"meter\"\nname = \"tenant 7\"\nrecords = \"{records}\"\n\
             interval_s = 60\n"
        );
        parse(directory.path(), &text, depth).map_err(|problems| problems.to_string())
    };
    let config = check("usage.jsonl", Depth::Machine).unwrap_or_else(|said| panic!("{said}"));
    let records = config.spec.stores[0].stages[0].records().map(Path::to_owned);
    assert_eq!(records, Some(directory.path().join("usage.jsonl")));
    for (records, why) in [("no/usage.jsonl", "No such file"), (".", "it is no regular file")] {
        let said = check(records, Depth::Machine).unwrap_err();
        assert!(said.contains(why) && said.contains("[[store]] \"disk\": no usage"), "{said}");
        assert!(check(records, Depth::Start).is_ok());
    }
}
