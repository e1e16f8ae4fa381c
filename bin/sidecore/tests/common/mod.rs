//! What the tests of the command line share: a daemon without its process, and the program.

use std::path::Path;
use std::process::{Command, Output};
use std::sync::Arc;

use sidecore_assembly::Assembly;
use sidecore_control::{Api, Config, Depth, Socket};
use tempfile::TempDir;

/// All of a daemon but its process.
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

    pub fn path(&self) -> &Path {
        self.directory.path()
    }
}

/// A directory with this configuration.
pub fn directory(config: &str) -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("disks.toml"), config).unwrap();
    directory
}

/// The program, about to run in a directory with a control socket.
pub fn command(directory: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sidecore"));
    command.current_dir(directory).arg("--socket").arg(directory.join("control.sock")).args(arguments);
    command.env_remove("TMPDIR");
    command
}

fn run(directory: &Path, arguments: &[&str]) -> Output {
    command(directory, arguments).output().unwrap()
}

/// What it printed, if it was content.
pub fn stdout(directory: &Path, arguments: &[&str]) -> String {
    let output = run(directory, arguments);
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// What it complained about, and its exit code.
pub fn failure(directory: &Path, arguments: &[&str]) -> (Option<i32>, String) {
    let output = run(directory, arguments);
    assert!(!output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stdout));
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}
