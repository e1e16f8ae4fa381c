//! The seam between a PCI function and the transport that carries it.

use std::io;
use std::os::fd::OwnedFd;

use serde::{Deserialize, Serialize};
use sidecore_keys::{FromValue, Value};
use sidecore_memory::GuestMemory;

use crate::{Done, HandOver, HandedOver, TakeOverError};

/// Where in a function an access goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Region {
    /// A base address register's memory, 0 to 5.
    Bar(u8),
    /// The configuration space.
    Config,
}

/// How a function interrupts its driver.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Interrupts {
    /// MSI-X: a vector for each queue, wherever the guest is.
    #[default]
    MsiX,
    /// MSI: fewer vectors, and on a guest without interrupt remapping only one. It needs no memory
    /// of the function's, which is why QEMU can unplug it
    /// (docs/decisions/0014-own-vfio-user-server.md).
    Msi,
}

impl Interrupts {
    /// All there are.
    pub const ALL: [Self; 2] = [Self::MsiX, Self::Msi];

    /// The word for it in the configuration.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::MsiX => "msi-x",
            Self::Msi => "msi",
        }
    }

    /// How many vectors a function has. With 512 of MSI-X a driver of Windows' does not work; 64
    /// are enough for as many queue pairs, if one of them shares vector 0 with the admin queue. Of
    /// MSI there are never more than 32.
    #[must_use]
    pub const fn vectors(self) -> u16 {
        match self {
            Self::MsiX => 64,
            Self::Msi => 32,
        }
    }
}

impl FromValue for Interrupts {
    fn from_value(value: &Value) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.word() == value.text())
    }
}

/// A part of a base address register that the client may map: what it stores there is seen without
/// a message.
#[derive(Clone, Copy, Debug)]
pub struct MappableArea {
    /// Where in the register's memory it begins; a whole number of pages.
    pub offset_bytes: u64,
    /// Its size, a whole number of pages.
    pub len_bytes: u64,
    /// Where in the file it begins.
    pub file_offset_bytes: u64,
}

/// A base address register.
#[derive(Clone, Copy, Debug)]
pub struct BarInfo {
    /// The size of its memory, a power of two.
    pub len_bytes: u64,
    /// The area that may be mapped.
    pub mappable: Option<MappableArea>,
}

/// Why an access or a request was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AccessError {
    /// There is no such register, or the access ends past it.
    #[error("access of {len_bytes} bytes at {offset_bytes:#x} of {region:?} is out of range")]
    OutOfRange {
        /// Where.
        region: Region,
        /// First byte.
        offset_bytes: u64,
        /// Size.
        len_bytes: u64,
    },
    /// There is no such interrupt vector.
    #[error("there is no interrupt vector {vector}")]
    NoSuchVector {
        /// Which.
        vector: u32,
    },
    /// The descriptor is not an eventfd.
    #[error("what came for interrupt vector {vector} is not an eventfd")]
    NotAnEvent {
        /// Which.
        vector: u32,
    },
}

/// A PCI function as its transport sees it.
///
/// One thread of the transport calls it at a time, and never waits: what takes longer is answered
/// by its [`Done`], which may be called before the method returns, or later from another thread.
pub trait PciFunction: Send + Sync {
    /// The name it has in the configuration, for messages.
    fn name(&self) -> &str;

    /// The size of the configuration space in bytes: 256 or 4096.
    fn config_bytes(&self) -> u64;

    /// A base address register; `None` if it is not implemented.
    fn bar(&self, index: u8) -> Option<BarInfo>;

    /// A descriptor, for the client, of the file that the mappable area of a base address register
    /// is in.
    ///
    /// # Errors
    /// The process has too many open, or nothing of the register may be mapped.
    fn area_file(&self, index: u8) -> io::Result<OwnedFd>;

    /// A client connects, after a reset: it must not be given any memory that the client before it
    /// has mapped, because that one keeps its mapping.
    ///
    /// # Errors
    /// The kernel has no memory or no descriptor left; the client is refused.
    fn connect(&self) -> io::Result<()>;

    /// The kind of its interrupts. There are none of another.
    fn interrupts(&self) -> Interrupts;

    /// How many interrupt vectors there are.
    fn vectors(&self) -> u16;

    /// Reads all of `data`.
    ///
    /// # Errors
    /// [`AccessError::OutOfRange`].
    fn read(&self, region: Region, offset_bytes: u64, data: &mut [u8]) -> Result<(), AccessError>;

    /// Writes all of `data`, as one access of the guest's.
    ///
    /// # Errors
    /// [`AccessError::OutOfRange`].
    fn write(&self, region: Region, offset_bytes: u64, data: &[u8]) -> Result<(), AccessError>;

    /// Sets the event that a vector signals; `None` for none.
    ///
    /// # Errors
    /// There is no such vector, or it is no eventfd; nothing has changed then.
    fn set_vector(&self, vector: u16, event: Option<OwnedFd>) -> Result<(), AccessError>;

    /// Signals what a vector signals, if it has anything: the client asks for it, to see whether it
    /// gets there.
    ///
    /// # Errors
    /// There is no such vector.
    fn signal(&self, vector: u16) -> Result<(), AccessError>;

    /// The client's memory from now on: after a DMA map or unmap, whose message is answered when it
    /// is done, that is when nothing uses the table from before.
    fn set_memory(&self, memory: GuestMemory, done: Done);

    /// A reset by the client, and after its disconnect: all registers as after power on, nothing in
    /// flight.
    fn reset(&self, done: Done);

    /// Leaves the function to another process: takes nothing more, and replies when nothing is in
    /// flight, and nothing of the client's memory is in use. By default it cannot be left.
    fn hand_over(&self, reply: HandOver) {
        reply(None);
    }

    /// Goes on with a function that another process has left, in this memory of its client's. To be
    /// called before anything else is asked of it, or after a reset.
    ///
    /// # Errors
    /// See [`TakeOverError`]. The function has to be reset then.
    fn take_over(&self, from: HandedOver, memory: GuestMemory) -> Result<(), TakeOverError> {
        let _ = (from, memory);
        Err(TakeOverError::NotOffered)
    }
}
