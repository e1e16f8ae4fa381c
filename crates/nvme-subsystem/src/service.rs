//! The seam to the program that has the volumes and runs the functions.

use sidecore_nvme::ManageError;

use crate::FunctionState;

/// A store with its volumes.
#[derive(Clone, Debug, Default)]
pub struct Store {
    /// The size of a logical block.
    pub block_bytes: u32,
    /// The size of the store.
    pub total_bytes: u64,
    /// The part of it that volumes can still be given.
    pub free_bytes: u64,
    /// In the order in which they were made.
    pub volumes: Vec<Volume>,
}

/// A volume or a snapshot.
#[derive(Clone, Debug)]
pub struct Volume {
    /// The store's number for it, used once.
    pub id: u64,
    /// No other volume of the store has it.
    pub name: String,
    /// The size that its guest sees.
    pub capacity_bytes: u64,
    /// The same for as long as the volume lives.
    pub nguid: [u8; 16],
    /// As a snapshot is.
    pub read_only: bool,
    /// Whether a device serves it, of any kind of front end.
    pub is_served: bool,
}

/// An NVMe function that was configured to serve a volume of the store.
#[derive(Clone, Debug)]
pub struct Function {
    /// The device's name.
    pub device: String,
    /// As of now.
    pub state: FunctionState,
}

/// The volumes of one store, and the functions in front of them.
///
/// Every method may wait: for the disk, or for a function's requests in flight. None is called by
/// a thread that a function waits for.
pub trait VolumeService: Send + Sync {
    /// The store as of now; `None` once it is closed.
    fn store(&self) -> Option<Store>;

    /// The functions as of now.
    fn functions(&self) -> Vec<Function>;

    /// Makes a volume and returns its number.
    ///
    /// # Errors
    /// The volume cannot be made; then there is none.
    fn create(&self, name: &str, capacity_bytes: u64) -> Result<u64, ManageError>;

    /// Deletes a volume that no device serves.
    ///
    /// # Errors
    /// The volume is served, or cannot be deleted.
    fn delete(&self, volume: u64) -> Result<(), ManageError>;

    /// Lets a function that serves nothing serve a volume.
    ///
    /// # Errors
    /// The function is unknown or serves a volume, or another device writes to the volume.
    fn attach(&self, device: &str, volume: u64) -> Result<(), ManageError>;

    /// Lets a function serve nothing. Returns when none of its requests is in flight.
    ///
    /// # Errors
    /// The function is unknown or serves nothing.
    fn detach(&self, device: &str) -> Result<(), ManageError>;

    /// Takes a function online or offline, and resets it. Returns when none of its requests is in
    /// flight.
    ///
    /// # Errors
    /// The function is unknown.
    fn set_online(&self, device: &str, is_online: bool) -> Result<(), ManageError>;
}
