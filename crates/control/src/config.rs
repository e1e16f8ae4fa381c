//! The configuration file: reads it, checks all of it, and turns it into an assembly's
//! specification.

mod check;
mod draft;
mod functions;
pub(crate) mod json;
pub mod keys;
mod machine;
mod mirrors;
mod nearest;
mod problem;
mod remote;
mod section;
mod settle;

use std::io::Read as _;
use std::path::{Path, PathBuf};

use sidecore_assembly::AssemblyError;
use sidecore_assembly::spec::{SocketAccess, Spec};

pub use draft::DEFAULT_CONTROL_SOCKET;
pub use problem::{Problem, Problems};
pub use sidecore_assembly::spec::size;

use nearest::nearest;
use problem::Collector;

/// A larger file was not written by hand, nor for this daemon.
const FILE_MAX_BYTES: u64 = 1 << 20;

/// A configuration without faults.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// The path of the control API's socket.
    pub control_socket: PathBuf,
    /// The users who may connect to the control socket.
    pub control_access: SocketAccess,
    /// The sidecores, stores, controllers and devices to run.
    pub spec: Spec,
}

/// The extent of a configuration's checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Depth {
    /// The file alone, for contradictions.
    Text,
    /// The file, and whether this machine, now, has the CPUs, files, memory and sockets in it.
    Machine,
    /// The checks of `Machine`, for a daemon that is about to start: a file that does not answer is
    /// no fault, and is opened when it answers.
    Start,
}

impl Config {
    /// Reads and checks a configuration file, without starting, creating, changing or removing
    /// anything.
    ///
    /// # Errors
    /// All problems of the file, with places and remedies.
    pub fn load(file: &Path, depth: Depth) -> Result<Self, Problems> {
        let text = read(file).map_err(|message| Collector::whole_file(file, message))?;
        Self::parse(file, &text, depth)
    }

    /// Like [`load`](Self::load), for a text in memory; `file` is its name in messages, and the
    /// directory of `file` is the start of relative paths.
    ///
    /// # Errors
    /// All problems of the text, with places and remedies.
    pub fn parse(file: &Path, text: &str, depth: Depth) -> Result<Self, Problems> {
        let mut problems = Collector::of_file(file, text);
        let draft = draft::read(text, &mut problems);
        if let Some(draft) = &draft {
            check::check(draft, &mut problems);
            if depth != Depth::Text {
                machine::check(draft, depth, &mut problems);
            }
        }
        problems.finish()?;
        draft
            .map(settle::settle)
            .ok_or_else(|| Collector::whole_file(file, "is not TOML".to_owned()))
    }

    /// The actions of a daemon that starts with it, in words: see [`sidecore_assembly::dry_run`].
    ///
    /// # Errors
    /// As [`sidecore_assembly::dry_run`].
    pub fn plan(&self) -> Result<Vec<String>, AssemblyError> {
        sidecore_assembly::dry_run(&self.spec)
    }
}

fn read(file: &Path) -> Result<String, String> {
    let open = std::fs::File::open(file).map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => {
            "there is no such file; docs/config.md has one to start from".to_owned()
        }
        _ => format!("cannot be opened: {error}"),
    })?;
    let mut text = String::new();
    let limit = FILE_MAX_BYTES.saturating_add(1);
    open.take(limit)
        .read_to_string(&mut text)
        .map_err(|error| format!("cannot be read: {error}"))?;
    if text.len() as u64 >= limit {
        return Err("is larger than 1MiB, which is no configuration".to_owned());
    }
    Ok(text)
}
