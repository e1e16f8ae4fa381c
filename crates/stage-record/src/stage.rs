//! The keys of the stage.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use sidecore_block::{
    BlockDevice, Geometry, OpenedStage, Recording, RecordingState, Stage, observe,
};
use sidecore_keys::{Key, Kind, Value, Values};
use sidecore_recording::{DataMode, Header};

use crate::file::{Output, SUFFIX, Stop, create};
use crate::observer::{RecordObserver, Recorded};
use crate::writer::{Shared, Writer};

/// The largest size of a file unless told otherwise.
const MAX_BYTES: u64 = 1 << 30;

/// The smallest limit of a file's size.
const LEAST_BYTES: u64 = 1 << 20;

/// The MiB of a queue's ring unless told otherwise.
const BUFFER_MIB: u64 = 4;

/// Records the requests of a disk.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RecordStage {
    /// The file.
    pub file: PathBuf,
    /// The data to record.
    pub data: DataMode,
    /// The largest size of the file; `None` for 1 GiB.
    pub max_bytes: Option<u64>,
    /// The size of each queue's buffer in MiB; `None` for 4.
    pub buffer_mib: Option<u64>,
}

impl Stage for RecordStage {
    const WORD: &'static str = "record";
    const MEANING: &'static str =
        "Records requests in a file, to replay them: [recordings](recordings.md).";
    const KEYS: &'static [Key] = &[
        Key::required(
            "file",
            Kind::Path,
            "/var/tmp/vd0.recording",
            "the file, whose name ends with `.recording`. A file that exists is left as it is, and \
             `NAME.1.recording` or the next free number is made. Of a stage that is added at run \
             time, its name alone: the file is in `recording_directory`",
        )
        .checked(is_recording),
        Key::new(
            "data",
            Kind::Word(&["none", "checksum", "full"]),
            "`none`",
            "the data to record: `none`; the `checksum` of what is read and written; or in `full` \
             what is written, with the checksum of what is read",
        ),
        Key::new(
            "max_bytes",
            Kind::Size,
            "`\"1GiB\"`",
            "the largest size of the file, at least 1 MiB: with it the recording is complete",
        )
        .checked(is_enough),
        Key::new(
            "buffer_mib",
            Kind::Number(1, 64),
            "4",
            "the MiB that each queue may be ahead of the file, 1 to 64; requests beyond are \
             missing in it",
        ),
    ];
    // The filesystem of the file may not answer.
    const MAY_NOT_ANSWER: bool = true;
    const OBSERVES: bool = true;

    fn from_values(values: &Values) -> Self {
        let word: Option<String> = values.get("data");
        let modes = [DataMode::None, DataMode::Checksum, DataMode::Full];
        let data = modes.into_iter().find(|mode| word.as_deref() == Some(mode.word()));
        Self {
            file: values.get("file").unwrap_or_default(),
            data: data.unwrap_or_default(),
            max_bytes: values.get("max_bytes"),
            buffer_mib: values.get("buffer_mib"),
        }
    }

    fn is_read_only(&self) -> bool {
        false
    }

    fn open(&self, store: &str, below: Arc<dyn BlockDevice>) -> OpenedStage {
        let geometry = below.geometry();
        observe(Self::WORD, store, below, || Ok(Arc::new(self.observer(store, geometry))))
    }
}

impl RecordStage {
    fn observer(&self, store: &str, geometry: Geometry) -> RecordObserver {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let header = Header {
            data: self.data,
            capacity_bytes: geometry.capacity_bytes,
            block_bytes: geometry.block_bytes,
            started_unix_ns: u64::try_from(now.as_nanos()).unwrap_or(u64::MAX),
            name: store.to_owned(),
        };
        // The disk is worth more than its recording, and is served without one.
        let (recording, output) = match self.begin(&header) {
            Ok((recording, output)) => (recording, Some(output)),
            Err(reason) => {
                let recording = Recording::new(self.file.clone());
                let file = self.file.display();
                tracing::error!(store, %file, "requests are not recorded: {reason}");
                recording.set_state(RecordingState::Failed(reason));
                (Arc::new(recording), None)
            }
        };
        RecordObserver { recording, output }
    }

    /// Makes the file, and the thread that writes it.
    fn begin(&self, header: &Header) -> Result<(Arc<Recording>, Recorded), String> {
        let started = Instant::now();
        let (file, path) = create(&self.file).map_err(|error| error.to_string())?;
        let recording = Arc::new(Recording::new(path));
        let begun = self.start(file, header, &recording, started);
        let recorded = begun.inspect_err(|_| {
            // A file without records would only take the name. The first error is reported.
            let _ = std::fs::remove_file(recording.file());
        })?;
        Ok((recording, recorded))
    }

    /// Begins the file, and starts the thread.
    fn start(
        &self,
        file: File,
        header: &Header,
        recording: &Arc<Recording>,
        started: Instant,
    ) -> Result<Recorded, String> {
        let output = Output::new(file, header, self.max_bytes.unwrap_or(MAX_BYTES));
        let output = output.map_err(|stop| match stop {
            Stop::Limit => "`max_bytes` is too small".to_owned(),
            Stop::Failed(error) => error.to_string(),
        })?;
        recording.set_file_bytes(output.written_bytes());
        // Words of 8 bytes.
        let words = self.buffer_mib.unwrap_or(BUFFER_MIB).saturating_mul((1 << 20) / 8);
        let shared = Arc::new(Shared::new(usize::try_from(words).unwrap_or(usize::MAX)));
        let writer = Writer::start(output, Arc::clone(&shared), Arc::clone(recording));
        let writer = writer.map_err(|error| format!("there is no thread for it: {error}"))?;
        let (data, base) = (self.data, OnceLock::new());
        Ok(Recorded { shared, data, started, base, _writer: writer })
    }
}

/// A name that few programs take for one of their files: users of the control API choose it. Some
/// programs take files of any name, so the users do not choose the directory.
fn is_recording(key: &str, value: &Value) -> Result<(), String> {
    let path = match value {
        Value::Path(path) => path.as_path(),
        _ => Path::new(""),
    };
    let has_name = path.file_stem().is_some_and(|stem| !stem.is_empty());
    if has_name && path.extension().is_some_and(|extension| extension == SUFFIX) {
        return Ok(());
    }
    Err(format!("`{key}` is a path that ends with `.{SUFFIX}`, as in `/var/tmp/vd0.{SUFFIX}`"))
}

fn is_enough(key: &str, value: &Value) -> Result<(), String> {
    if value.number() >= LEAST_BYTES {
        return Ok(());
    }
    Err(format!("`{key}` is {} bytes, and a recording has at least 1 MiB", value.number()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_a_file_ends_as_recordings_do() {
        let check = |path: &str| is_recording("file", &Value::Path(path.into()));
        assert!(check("/tmp/vd0.recording").is_ok() && check("/tmp/vd.0.recording").is_ok());
        for bad in ["", "/etc/profile", "/tmp/.recording", "/tmp/vd0.recording/..", "/x.recordings"]
        {
            assert!(check(bad).unwrap_err().contains("`file`"), "{bad:?}");
        }
        assert!(is_enough("max_bytes", &Value::Number(1 << 20)).is_ok());
        assert!(is_enough("max_bytes", &Value::Number((1 << 20) - 1)).is_err());
    }

    #[test]
    fn the_words_of_data_are_its_modes() {
        for mode in [DataMode::None, DataMode::Checksum, DataMode::Full] {
            let values = Values([("data", Value::Word(mode.word()))].into());
            assert_eq!(RecordStage::from_values(&values).data, mode);
        }
        assert_eq!(RecordStage::from_values(&Values::default()), RecordStage::default());
    }
}
