//! The former values of all settings that the program has changed, in a file, so that `undo` can
//! restore them.

use crate::tree::Tree;
use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

/// The file.
pub(crate) const PATH: &str = "/var/lib/sidecore-guest-tune/state.json";
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// A setting of the running kernel before its first change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Former {
    /// The value in a file.
    File { path: String, value: String },
    /// The mode of a NAPI instance.
    Threaded { nic: String, napi: u32, mode: u64 },
}

impl Former {
    /// Whether both are about the same setting.
    fn is_of(&self, other: &Former) -> bool {
        match (self, other) {
            (Former::File { path: a, .. }, Former::File { path: b, .. }) => a == b,
            (Former::Threaded { napi: a, .. }, Former::Threaded { napi: b, .. }) => a == b,
            _ => false,
        }
    }
}

/// The content of the file.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Memory {
    /// The boot whose settings `formers` are. Another boot starts with the kernel's own settings.
    pub(crate) boot: String,
    pub(crate) formers: Vec<Former>,
}

impl Memory {
    /// Reads the file; without one, nothing has been changed.
    pub(crate) fn load(tree: &Tree) -> Result<Memory> {
        let boot = tree.read(BOOT_ID).unwrap_or_default();
        if !tree.exists(PATH) {
            return Ok(Memory { boot, ..Memory::default() });
        }
        let text = tree.content(PATH).with_context(|| format!("cannot read {PATH}"))?;
        let mut memory: Memory = serde_json::from_str(&text).with_context(|| {
            format!("{PATH} is damaged: remove it, and restart the guest to be rid of the settings")
        })?;
        if memory.boot != boot {
            memory.formers.clear();
            memory.boot = boot;
        }
        Ok(memory)
    }

    /// Writes the file, or removes it if nothing is changed any more.
    pub(crate) fn save(&self, tree: &Tree) -> Result<()> {
        if self.formers.is_empty() {
            return if tree.exists(PATH) { tree.remove(PATH) } else { Ok(()) };
        }
        tree.replace(PATH, &(serde_json::to_string_pretty(self)? + "\n"))
    }

    /// Remembers a setting, unless its value before the first change is known already.
    pub(crate) fn remember(&mut self, former: Former) {
        if !self.formers.iter().any(|known| known.is_of(&former)) {
            self.formers.push(former);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::Guest;

    fn file(value: &str) -> Former {
        Former::File { path: "/proc/x".to_owned(), value: value.to_owned() }
    }

    #[test]
    fn the_first_value_is_kept_and_survives_a_save() {
        let guest = Guest::new("6.1.0-18-amd64");
        let mut memory = Memory::load(&guest.system.tree).unwrap();
        memory.remember(file("1"));
        memory.remember(file("2"));
        memory.save(&guest.system.tree).unwrap();
        let memory = Memory::load(&guest.system.tree).unwrap();
        assert_eq!(memory.formers, [file("1")]);
    }

    #[test]
    fn another_boot_has_other_values_and_nothing_to_restore() {
        let guest = Guest::new("6.1.0-18-amd64");
        let mut memory = Memory::load(&guest.system.tree).unwrap();
        memory.remember(file("1"));
        memory.save(&guest.system.tree).unwrap();
        guest.write(BOOT_ID, "another\n");
        assert_eq!(Memory::load(&guest.system.tree).unwrap().formers, []);
    }

    #[test]
    fn a_damaged_file_is_an_error_with_a_remedy() {
        let guest = Guest::new("6.1.0-18-amd64");
        guest.write(PATH, "{");
        let error = format!("{:#}", Memory::load(&guest.system.tree).unwrap_err());
        assert!(error.contains("remove it"), "{error}");
    }
}
