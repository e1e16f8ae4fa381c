//! `sidecore plan` without a file, with one, and with bad ones.

mod common;

use std::process::Command;

use common::{failure, stdout};

fn rows(text: &str) -> Vec<Vec<&str>> {
    text.lines().map(|line| line.split_whitespace().collect()).collect()
}

#[test]
fn without_a_file_it_shows_the_papers_tables() {
    let directory = tempfile::tempdir().unwrap();
    let text = stdout(directory.path(), &["plan"]);
    let rows = rows(&text);
    for row in [
        &["price", "44,465", "46,994", "26,037", "44,291"][..],
        &["required", "Gbps", "26.72", "40.08", "160.31", "320.63"],
        &["3", "2+1", "133,395", "120,025", "-10.0%"],
        &["6", "4+1", "266,790", "232,267", "-12.9%"],
    ] {
        assert!(rows.iter().any(|cells| cells == row), "{row:?} is not in\n{text}");
    }
    assert!(text.contains("$266.9K is printed, the parts are $266.8K"), "{text}");
}

#[test]
fn the_example_is_a_file_and_its_json_has_all_sections() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let example = stdout(path, &["plan", "--example"]);
    std::fs::write(path.join("rack.toml"), &example).unwrap();
    let text = stdout(path, &["plan", "--json", "rack.toml"]);
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(json["racks"][0]["vmhosts"], 2);
    assert_eq!(json["racks"][1]["iohost"]["price"], 44_291.0);
    assert_eq!(json["drives"].as_array().unwrap().len(), 14);
    assert_eq!(json["paper"], serde_json::Value::Null);
    let sidecores = &json["sidecores"][0];
    assert!(sidecores["of_iohosts"]["p99_us"].as_f64().unwrap() <= 20.0, "{sidecores}");
    assert!(sidecores["of_server"]["count"].as_u64().unwrap() >= 1, "{sidecores}");
}

#[test]
fn bad_files_are_refused_with_their_name_and_a_reason() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let example = stdout(path, &["plan", "--example"]);
    let write = |name: &str, bytes: &[u8]| std::fs::write(path.join(name), bytes).unwrap();
    write("empty.toml", b"");
    write("binary.toml", &[0xff; 64]);
    write("negative.toml", example.replacen("price = 8006", "price = -8006", 1).as_bytes());
    write("nan.toml", example.replacen("mbps_per_core = 380", "mbps_per_core = nan", 1).as_bytes());
    let missing = example.replacen("[cpu]\nprice = 8006\ncores = 18\n", "", 1);
    write("missing.toml", missing.as_bytes());
    std::fs::File::create(path.join("huge.toml")).unwrap().set_len(1 << 40).unwrap();
    assert!(Command::new("mkfifo").arg(path.join("fifo")).status().unwrap().success());
    for (file, why) in [
        ("empty.toml", "missing field `server`"),
        ("binary.toml", "UTF-8"),
        ("negative.toml", "`cpu.price` must be a number from 0 to 1000000000, not -8006"),
        ("nan.toml", "`rack.mbps_per_core` must be a number from 0 to 1000000000, not NaN"),
        ("missing.toml", "missing field `cpu`"),
        ("huge.toml", "longer than 1048576 bytes"),
        ("fifo", "not a regular file"),
        (".", "not a regular file"),
        ("/dev/zero", "not a regular file"),
        ("nowhere.toml", "No such file"),
    ] {
        let (code, message) = failure(path, &["plan", file]);
        assert_eq!(code, Some(1), "{message}");
        assert!(message.contains(why) && message.contains(file), "{file}: {message}");
    }
}
