//! The errors of operations on a controller's volumes.

use std::fmt;

use sidecore_controller::ControllerError;
use sidecore_volume::{FormatError, OpenError, VolumeError};

/// The kind of a refusal, from which an API derives its status.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A part that was named does not exist.
    NotFound,
    /// The present state does not permit the operation: a name is taken, a volume is in use.
    Conflict,
    /// The operation is never possible: its size or name is invalid.
    Invalid,
    /// The store or the volume's quota is full.
    NoSpace,
    /// The disk has failed, or its metadata is damaged.
    Failed,
    /// The daemon is being drained.
    Ending,
}

/// Why an operation was refused, with the remedy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OperationError {
    /// The kind of the refusal.
    pub kind: ErrorKind,
    /// The reason and the remedy, in one sentence.
    pub message: String,
}

impl OperationError {
    /// Creates a refusal of this kind.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into() }
    }
}

impl fmt::Display for OperationError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for OperationError {}

impl From<ControllerError> for OperationError {
    fn from(error: ControllerError) -> Self {
        let kind = match &error {
            ControllerError::Volume(error) => volume_kind(error),
            ControllerError::Open(OpenError::NotFormatted(_)) => ErrorKind::Invalid,
            ControllerError::Format(error) => format_kind(error),
            ControllerError::NoSuchVolume(_) => ErrorKind::NotFound,
            ControllerError::NotMade(_)
            | ControllerError::InUse { .. }
            | ControllerError::NoFunction
            | ControllerError::DedupRuns
            | ControllerError::NotEqual => ErrorKind::Conflict,
            ControllerError::Store(_)
            | ControllerError::BadWeight(_)
            | ControllerError::BadLimit
            | ControllerError::PartialBlock { .. }
            | ControllerError::TreeMemory { .. } => ErrorKind::Invalid,
            ControllerError::NoRoomToRemap => ErrorKind::NoSpace,
            ControllerError::Down => ErrorKind::Ending,
            _ => ErrorKind::Failed,
        };
        Self::new(kind, error.to_string())
    }
}

fn volume_kind(error: &VolumeError) -> ErrorKind {
    match error {
        VolumeError::NoSuchVolume(_) => ErrorKind::NotFound,
        VolumeError::NameTaken(_)
        | VolumeError::TooManyVolumes(_)
        | VolumeError::VolumeReadOnly(_)
        | VolumeError::StoreReadOnly(_) => ErrorKind::Conflict,
        VolumeError::BadName(_)
        | VolumeError::BadSize { .. }
        | VolumeError::OutOfRange { .. }
        | VolumeError::Overlap => ErrorKind::Invalid,
        VolumeError::NoSpace { .. }
        | VolumeError::QuotaExceeded { .. }
        | VolumeError::DiskFull(_) => ErrorKind::NoSpace,
        VolumeError::Damaged { .. } | VolumeError::StoreDamaged(_) | VolumeError::Io(_) => {
            ErrorKind::Failed
        }
    }
}

fn format_kind(error: &FormatError) -> ErrorKind {
    match error {
        FormatError::NotBlank(_) => ErrorKind::Conflict,
        FormatError::Io(_) => ErrorKind::Failed,
        _ => ErrorKind::Invalid,
    }
}
