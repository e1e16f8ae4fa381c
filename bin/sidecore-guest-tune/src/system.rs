//! The guest, and the three commands.

use crate::boot::{self, Next};
use crate::disk;
use crate::memory::{Former, Memory};
use crate::napi::Napis;
use crate::nic::{self, Nics};
use crate::report::Finding;
use crate::tree::Tree;
use anyhow::Result;

/// The guest's files, and its kernel's NAPI instances.
pub(crate) struct System {
    pub(crate) tree: Tree,
    pub(crate) napis: Box<dyn Napis>,
}

impl System {
    /// The release of the kernel, for instance `6.1.0-18-amd64`.
    pub(crate) fn release_text(&self) -> String {
        let release = self.tree.read("/proc/sys/kernel/osrelease");
        release.unwrap_or_else(|| "of an unknown release".to_owned())
    }

    /// The first two numbers of the release; zeros if it has others.
    pub(crate) fn release(&self) -> (u32, u32) {
        let text = self.release_text();
        let mut numbers = text.split(|letter: char| !letter.is_ascii_digit()).map(str::parse);
        match (numbers.next(), numbers.next()) {
            (Some(Ok(major)), Some(Ok(minor))) => (major, minor),
            _ => (0, 0),
        }
    }

    /// The state of all settings.
    pub(crate) fn status(&mut self) -> Result<Vec<Finding>> {
        let mut findings = nic::status(self)?;
        findings.extend(disk::status(self));
        findings.extend(boot::status(&self.tree));
        Ok(findings)
    }

    /// Changes all settings that differ, those of the next boot if there are any, and returns
    /// sentences about the changes.
    pub(crate) fn apply(&mut self, nics: Nics, next: Option<&Next>) -> Result<Vec<String>> {
        let changes = nic::changes(self, nics)?;
        let mut memory = Memory::load(&self.tree)?;
        changes.iter().for_each(|(former, _)| memory.remember(former.clone()));
        // The file comes first: a change that it does not know could not be undone.
        memory.save(&self.tree)?;
        let mut said = Vec::new();
        for (former, value) in &changes {
            said.push(self.set(former, value)?);
        }
        if let Some(next) = next {
            said.extend(boot::write(self, next)?);
        }
        Ok(said)
    }

    /// Restores all settings of the running kernel, and returns sentences about them. All are
    /// tried: the first error is returned, and those that failed are remembered.
    pub(crate) fn undo(&mut self) -> Result<Vec<String>> {
        let mut memory = Memory::load(&self.tree)?;
        let (mut said, mut failed) = (Vec::new(), None);
        for former in std::mem::take(&mut memory.formers).into_iter().rev() {
            if self.is_gone(&former)? {
                continue;
            }
            let value = match &former {
                Former::File { value, .. } => value.clone(),
                Former::Threaded { mode, .. } => mode.to_string(),
            };
            match self.set(&former, &value) {
                Ok(sentence) => said.push(sentence),
                Err(error) => {
                    memory.formers.insert(0, former);
                    failed = failed.or(Some(error));
                }
            }
        }
        memory.save(&self.tree)?;
        failed.map_or(Ok(said), Err)
    }

    /// Whether the setting has vanished with its NIC.
    fn is_gone(&mut self, former: &Former) -> Result<bool> {
        match former {
            Former::File { path, .. } => Ok(!self.tree.exists(path)),
            Former::Threaded { nic, napi, .. } => {
                let number = self.tree.number(&format!("/sys/class/net/{nic}/ifindex"));
                let Some(number) = number.and_then(|number| u32::try_from(number).ok()) else {
                    return Ok(true);
                };
                let napis = self.napis.list(number)?.unwrap_or_default();
                Ok(!napis.iter().any(|found| found.id == *napi))
            }
        }
    }

    fn set(&mut self, setting: &Former, value: &str) -> Result<String> {
        match setting {
            Former::File { path, .. } => {
                self.tree.set(path, value)?;
                Ok(format!("{path}: {value}"))
            }
            Former::Threaded { nic, napi, .. } => {
                self.napis.set_threaded(*napi, value.parse()?)?;
                Ok(format!("{nic}: mode {value} of NAPI instance {napi}"))
            }
        }
    }
}
