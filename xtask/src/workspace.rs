//! The workspace as `cargo metadata` describes it.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::Deserialize;

use crate::shell;

#[derive(Deserialize)]
pub struct Workspace {
    #[serde(rename = "workspace_root")]
    pub root: PathBuf,
    #[serde(rename = "target_directory")]
    pub target: PathBuf,
    pub packages: Vec<Package>,
}

#[derive(Deserialize)]
pub struct Package {
    pub name: String,
    #[serde(rename = "manifest_path")]
    pub manifest: PathBuf,
    pub targets: Vec<Target>,
    pub dependencies: Vec<Dependency>,
}

/// A target of cargo's: a library, a binary, a test.
#[derive(Deserialize)]
pub struct Target {
    pub name: String,
    pub kind: Vec<String>,
    #[serde(rename = "src_path")]
    pub source: PathBuf,
}

/// A line of a manifest's dependencies.
#[derive(Deserialize)]
pub struct Dependency {
    /// `None` for a normal dependency, else "dev" or "build".
    pub kind: Option<String>,
    /// The other package's directory, if it is on this disk and not in a registry.
    pub path: Option<PathBuf>,
    pub features: Vec<String>,
}

impl Workspace {
    /// Loads the workspace of the current directory.
    pub fn load() -> Result<Self> {
        Self::from_metadata(&[])
    }

    /// Loads the workspace of this manifest.
    pub fn load_manifest(manifest: &Path) -> Result<Self> {
        let manifest = manifest.to_str().context("the path of the workspace is not UTF-8")?;
        Self::from_metadata(&["--manifest-path", manifest])
    }

    fn from_metadata(arguments: &[&str]) -> Result<Self> {
        let json = shell::read(
            shell::cargo().args(["metadata", "--no-deps", "--format-version", "1"]).args(arguments),
        )?;
        serde_json::from_str(&json).context("cannot read what `cargo metadata` printed")
    }

    /// The short name of the room in this directory: `ring` for `crates/ring`, else the path from
    /// the root.
    pub fn room(&self, directory: &Path) -> String {
        let relative = directory.strip_prefix(&self.root).unwrap_or(directory);
        relative.strip_prefix("crates").unwrap_or(relative).display().to_string()
    }
}

impl Package {
    pub fn directory(&self) -> &Path {
        self.manifest.parent().unwrap_or(Path::new(""))
    }

    /// Whether the package's tests turn on features of this package or of another one here.
    pub fn has_features_for_tests(&self) -> bool {
        self.dependencies.iter().any(|dependency| {
            dependency.kind.as_deref() == Some("dev")
                && dependency.path.is_some()
                && !dependency.features.is_empty()
        })
    }
}

impl Target {
    /// Whether the target is code that ships, as opposed to a test, an example or a bench.
    pub fn ships(&self) -> bool {
        self.kind.iter().any(|kind| matches!(kind.as_str(), "lib" | "bin" | "rlib" | "proc-macro"))
    }

    /// Whether the target is an integration test.
    pub fn is_test(&self) -> bool {
        self.kind.iter().any(|kind| kind == "test")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_room_is_named_by_its_directory() {
        let workspace =
            Workspace { root: "/src".into(), target: "/src/target".into(), packages: Vec::new() };
        assert_eq!(workspace.room(Path::new("/src/crates/ring")), "ring");
        assert_eq!(workspace.room(Path::new("/src/bin/sidecored")), "bin/sidecored");
        assert_eq!(workspace.room(Path::new("/src/bench")), "bench");
    }
}
