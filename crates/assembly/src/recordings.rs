//! The directory of recordings that users of the control API ask for.
//!
//! The daemon makes these files with its own rights, and programs of the host take files of any
//! name in some directories for theirs, `cron.d` for instance. So the users choose the name of a
//! file, and not its directory.

use std::fs::{DirBuilder, symlink_metadata};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::Path;

use crate::AddedStage;
use crate::operation::{ErrorKind, OperationError};
use crate::spec::StageKind;

/// Permissions that the directory never has: writing by the group or by others.
const OPEN: u32 = 0o022;

/// The stage with the path of its recording, if it is one that records: directly in `directory`,
/// which is made if it is missing.
///
/// # Errors
/// The recording is elsewhere, or the directory cannot be made, or others can change it.
pub(crate) fn settle(stage: &AddedStage, directory: &Path) -> Result<AddedStage, OperationError> {
    let mut stage = stage.clone();
    let StageKind::Record(record) = &mut stage.spec.kind else { return Ok(stage) };
    if record.file.parent() == Some(Path::new("")) {
        record.file = directory.join(&record.file);
    }
    // Literally: `..` might lead out of it.
    if record.file.parent() != Some(directory) {
        let why = format!(
            "`file` is {:?}; a recording of a stage that is added at run time is in {directory:?}, \
             the `recording_directory`: give the name of the file alone",
            record.file
        );
        return Err(OperationError::new(ErrorKind::Invalid, why));
    }
    make(directory).map_err(|why| {
        let why = format!("{directory:?}, the `recording_directory`, takes no recording: {why}");
        OperationError::new(ErrorKind::Failed, why)
    })?;
    Ok(stage)
}

/// Makes the directory if it is missing, and looks at the rights of others.
fn make(directory: &Path) -> Result<(), String> {
    let made = DirBuilder::new().recursive(true).mode(0o700).create(directory);
    made.map_err(|error| error.to_string())?;
    let found = symlink_metadata(directory).map_err(|error| error.to_string())?;
    if !found.is_dir() {
        return Err("it is a link; name the directory itself".to_owned());
    }
    let (owner, user) = (found.uid(), rustix::process::geteuid().as_raw());
    if owner != user && owner != 0 {
        return Err(format!("it belongs to user {owner}; make it that of user {user}"));
    }
    let mode = found.mode() & 0o7777;
    if mode & OPEN != 0 {
        return Err(format!("others may write to it (mode {mode:04o}); `chmod 700` it"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs::{Permissions, set_permissions};
    use std::os::unix::fs::{PermissionsExt as _, symlink};
    use std::path::PathBuf;

    use super::*;

    fn record(file: impl Into<PathBuf>) -> AddedStage {
        let record = sidecore_stage_record::RecordStage { file: file.into(), ..Default::default() };
        AddedStage { spec: StageKind::Record(record).into(), settings: Vec::new() }
    }

    #[test]
    fn a_recording_is_directly_in_a_directory_that_others_cannot_change() {
        let place = tempfile::tempdir().unwrap();
        let directory = place.path().join("lib/recordings");
        let settled = |file: &Path| settle(&record(file), &directory);
        let within = directory.join("a.recording");
        let outside = [
            place.path().join("a.recording"),
            "./a.recording".into(),
            directory.join("../recordings/a.recording"),
            directory.join("b/a.recording"),
            "/etc/cron.d/a.recording".into(),
            PathBuf::new(),
        ];
        for file in outside {
            let error = settled(&file).unwrap_err();
            assert_eq!(error.kind, ErrorKind::Invalid);
            assert!(error.message.contains("`recording_directory`"), "{}", error.message);
        }
        assert!(!directory.exists());
        for file in [Path::new("a.recording"), &within] {
            assert_eq!(settled(file).unwrap(), record(&within));
        }
        assert_eq!(directory.metadata().unwrap().mode() & 0o7777, 0o700);
        let refused = |directory: &Path, why: &str| {
            let error = settle(&record("a.recording"), directory).unwrap_err();
            assert_eq!(error.kind, ErrorKind::Failed);
            assert!(error.message.contains(why), "{}", error.message);
        };
        set_permissions(&directory, Permissions::from_mode(0o770)).unwrap();
        refused(&directory, "mode 0770");
        set_permissions(&directory, Permissions::from_mode(0o750)).unwrap();
        assert!(settled(&within).is_ok());
        let link = place.path().join("link");
        symlink(&directory, &link).unwrap();
        refused(&link, "a link");
        refused(Path::new("/proc/no/such"), "No such");
        refused(Path::new(""), "");
    }

    #[test]
    fn other_stages_need_no_directory() {
        let place = tempfile::tempdir().unwrap();
        let directory = place.path().join("recordings");
        let spec =
            crate::spec::StageSpec::from_values("read-only", &crate::spec::Values::default())
                .unwrap();
        let stage = AddedStage { spec, settings: Vec::new() };
        assert_eq!(settle(&stage, &directory).unwrap(), stage);
        assert!(!directory.exists());
    }
}
