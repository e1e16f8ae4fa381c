//! The parts that the tests of the command line share: a daemon in the test's process, and the
//! program.
#![allow(dead_code, reason = "each test takes what it needs")]

use std::path::Path;
use std::process::{Command, Output};
use std::sync::Arc;

use sidecore_assembly::Assembly;
use sidecore_control::{Api, Config, Depth, Socket};
use tempfile::TempDir;

/// A daemon without a process of its own.
pub struct Daemon {
    _api: Api,
    pub directory: TempDir,
}

impl Daemon {
    /// Runs the configuration `disks.toml` of a directory, whose control socket is `control.sock`.
    pub fn start(directory: TempDir) -> Self {
        let config = Config::load(&directory.path().join("disks.toml"), Depth::Machine).unwrap();
        let socket = Socket::bind(&config.control_socket, &config.control_access).unwrap();
        let assembly = Arc::new(Assembly::start(&config.spec).unwrap());
        Self { _api: Api::start(socket, assembly, || {}).unwrap(), directory }
    }

    /// Ends the daemon in order; its directory stays.
    pub fn stop(self) -> TempDir {
        let Self { _api: api, directory } = self;
        drop(api);
        directory
    }

    pub fn path(&self) -> &Path {
        self.directory.path()
    }
}

/// The configuration of a daemon with one controller and no device.
pub const POOL: &str = r#"
control_socket = "control.sock"
[[sidecore]]
name = "sc0"
[[store]]
name = "below"
type = "ram"
size = "64MiB"
[[controller]]
name = "pool"
store = "below"
format = "blank"
label = "for tests"
"#;

/// Makes a directory with this configuration.
pub fn directory(config: &str) -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("disks.toml"), config).unwrap();
    directory
}

/// The program as a command in a directory with a control socket.
pub fn command(directory: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sidecore"));
    command
        .current_dir(directory)
        .arg("--socket")
        .arg(directory.join("control.sock"))
        .args(arguments);
    command.env_remove("TMPDIR");
    command
}

fn run(directory: &Path, arguments: &[&str]) -> Output {
    command(directory, arguments).output().unwrap()
}

/// Runs the program, which must succeed. Returns its standard output.
pub fn stdout(directory: &Path, arguments: &[&str]) -> String {
    let output = run(directory, arguments);
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Runs the program, which must fail. Returns its exit code and standard error.
pub fn failure(directory: &Path, arguments: &[&str]) -> (Option<i32>, String) {
    let output = run(directory, arguments);
    assert!(!output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stdout));
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}
