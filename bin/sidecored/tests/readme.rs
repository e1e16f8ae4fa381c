//! The section "Serve your own disk" of README.md, carried out: its programs are installed, its
//! configuration is checked and served, and a client uses the disk.

mod common;

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use common::Daemon;
use sidecore_driver::Status;
use sidecore_kit::guest;

const REPOSITORY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
const HEADING: &str = "## Serve your own disk";
const INSTALL: &str = "make build && sudo make install";

/// The code blocks of the section: the configuration, and the commands without their comments.
struct Example {
    configuration: String,
    commands: Vec<String>,
}

impl Example {
    fn read() -> Self {
        let page = std::fs::read_to_string(Path::new(REPOSITORY).join("README.md")).unwrap();
        let section = page.split_once(HEADING).expect("the section").1;
        let section = section.split("\n## ").next().unwrap();
        let block = |language: &str| {
            let (_, block) = section.split_once(&format!("```{language}\n")).expect("the block");
            block.split_once("```").unwrap().0.to_owned()
        };
        let commands = block("sh").replace("\\\n", " ");
        let command = |line: &str| line.split(" # ").next().unwrap().trim().to_owned();
        Self { configuration: block("toml"), commands: commands.lines().map(command).collect() }
    }

    fn command(&self, program: &str) -> &str {
        let mut found = self.commands.iter().filter(|command| command.starts_with(program));
        let command = found.next().unwrap_or_else(|| panic!("no {program} in {:?}", self.commands));
        assert!(found.next().is_none(), "{program} is there twice");
        command
    }
}

/// Installs the programs below a directory by the Makefile.
fn install(below: &Path) -> PathBuf {
    let build = Path::new(env!("CARGO_BIN_EXE_sidecored")).parent().unwrap();
    // Cargo has built this package, and programs of packages with tests like this one, if it was
    // asked for those. What is there is not named again: another choice of packages has other
    // features of third parties, and so another build of every crate.
    let mut missing = vec!["sidecore", "sidecore-guest-tune"];
    missing.retain(|program| !build.join(program).exists());
    if !missing.is_empty() {
        let mut cargo = Command::new(env!("CARGO"));
        cargo.arg("build").args(missing.iter().flat_map(|name| ["--package", name]));
        cargo.current_dir(REPOSITORY);
        if build.ends_with("release") {
            cargo.arg("--release");
        }
        assert!(cargo.status().unwrap().success());
    }
    let variables = [("PREFIX", below), ("BUILD", build)]
        .map(|(name, value)| format!("{name}={}", value.display()));
    let make = Command::new("make")
        .arg("install")
        .args(variables)
        .current_dir(REPOSITORY)
        .output()
        .unwrap();
    assert!(make.status.success(), "{}", String::from_utf8_lossy(&make.stderr));
    below.join("bin")
}

/// A command of README.md, in the directory of its configuration, with the installed programs.
fn shell(command: &str, directory: &Path, programs: &Path) -> Command {
    let path = std::env::var("PATH").unwrap();
    let mut shell = Command::new("sh");
    shell.args(["-c", &format!("exec {command}")]).current_dir(directory);
    shell
        .env("PATH", format!("{}:{path}", programs.display()))
        .env_remove("NOTIFY_SOCKET")
        .env_remove("LISTEN_FDS");
    shell
}

fn printed(Output { status, stdout, stderr }: Output) -> String {
    assert!(status.success(), "{}", String::from_utf8_lossy(&stderr));
    String::from_utf8(stdout).unwrap()
}

#[test]
fn the_example_serves_a_disk_on_any_machine() {
    let example = Example::read();
    let directory = tempfile::tempdir().unwrap();
    let here = directory.path().to_owned();
    let programs = install(&here.join("installed"));
    assert_eq!(example.commands.first().unwrap(), INSTALL);
    std::fs::write(here.join("disks.toml"), &example.configuration).unwrap();
    for command in ["truncate", "sidecore check"] {
        printed(shell(example.command(command), &here, &programs).output().unwrap());
    }

    let command = example.command("sidecored").strip_suffix(" &").expect("it is in the background");
    let mut daemon = shell(command, &here, &programs);
    let child = daemon.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut daemon = Daemon::started(child, directory, &example.configuration);

    // The client takes the place of QEMU, at the path that QEMU is given.
    let qemu = example.command("qemu-system-x86_64");
    let socket = qemu.split_once("path=").expect("a socket").1.split_whitespace().next().unwrap();
    let mut client = guest::connect(&here.join(socket));
    assert_eq!(guest::write(&mut client, 8, 0x5a), Status::Ok);
    assert_eq!(guest::read(&mut client, 8), 0x5a);
    let list =
        printed(shell(example.command("sidecore --socket"), &here, &programs).output().unwrap());
    let row = list.lines().find(|row| row.contains(socket)).expect("a row for the disk");
    let state = row.split_whitespace().nth(1);
    assert_eq!(state, Some("running"), "{list}");
    let queues =
        qemu.split_once("num-queues=").expect("queues").1.split_whitespace().next().unwrap();
    assert!(row.contains(&format!("/{queues}")), "{list}");

    drop(client);
    daemon.signal(rustix::process::Signal::TERM);
    let (status, words) = daemon.wait();
    assert!(status.success(), "{words}");
}
