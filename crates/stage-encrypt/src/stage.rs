//! The keys of the stage.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use sidecore_block::{BlockDevice, OpenedStage, Stage, StageError};
use sidecore_keys::{Key, Kind, Values, keys};
use sidecore_luks::{FileFault, Header, open_header, read_key_file};

use crate::EncryptStore;

keys! {
    /// Encrypts what is written.
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct EncryptStage {
        plain {}
        keys {
            #[required = "\"/etc/sidecore/disk.luks\""]
            "header" => header: PathBuf = PathBuf::new(), Kind::Path, "required",
                "the file of the LUKS2 header, from `sidecore luks format` or `cryptsetup \
                 luksFormat --header`";
            #[required = "\"/etc/sidecore/disk.key\""]
            "key_file" => key_file: PathBuf = PathBuf::new(), Kind::Path, "required",
                "the file whose bytes are the passphrase, as for `cryptsetup --key-file`; it \
                 belongs to root or to the daemon's user, and is closed to others";
            "allow_discards" => allow_discards: bool = false, Kind::Flag(false), "`false`",
                "whether discards reach the store: they save space, and show which blocks are \
                 unused to those who can read the store";
        }
    }
}

impl Stage for EncryptStage {
    const WORD: &'static str = "encrypt";
    const MEANING: &'static str =
        "Encrypts the store under a LUKS2 header: [encrypt a disk](encryption.md).";
    const KEYS: &'static [Key] = Self::KEYS;
    const MAY_NOT_ANSWER: bool = true;
    const TRANSFORMS: bool = true;

    fn from_values(values: &Values) -> Self {
        Self::from_values(values)
    }

    fn is_read_only(&self) -> bool {
        false
    }

    fn open(&self, _: &str, below: Arc<dyn BlockDevice>) -> OpenedStage {
        let failed = |reason: String| StageError { stage: Self::WORD, reason };
        let of_header = |error| FileFault::Header { path: self.header.clone(), error };
        let file = open_header(&self.header).map_err(|error| failed(error.to_string()))?;
        let header = Header::read(&file).map_err(|error| failed(of_header(error).to_string()))?;
        if header.is_damaged() {
            warn_of_damage(&self.header);
        }
        let segment = header.segment();
        let passphrase =
            read_key_file(&self.key_file).map_err(|error| failed(error.to_string()))?;
        let key = header.unlock(&file, &passphrase).map_err(|error| {
            let key_file = self.key_file.display();
            failed(format!("{} (key file {key_file})", of_header(error)))
        })?;
        let store = EncryptStore::new(below, key.cipher(), segment, self.allow_discards);
        let path = self.header.display();
        let store = store.map_err(|misfit| failed(format!("{path}: {misfit}")))?;
        Ok(Arc::new(store))
    }
}

fn warn_of_damage(path: &Path) {
    tracing::warn!(
        header = %path.display(),
        "one copy of the header is damaged: make a backup, and `cryptsetup repair` it"
    );
}
