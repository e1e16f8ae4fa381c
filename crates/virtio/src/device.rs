//! The seam between a virtio device and the transport that carries it.

use std::os::fd::OwnedFd;

use sidecore_memory::{DirtyLog, GuestMemory, MemoryError};
use sidecore_ring::{DeviceRing, RingError, RingLayout, RingState};

/// All that a device needs to serve one queue.
#[derive(Debug)]
pub struct QueueResources {
    /// The guest's memory as of now.
    pub memory: GuestMemory,
    /// Where the ring is.
    pub layout: RingLayout,
    /// The feature bits that the driver accepted.
    pub features: u64,
    /// The guest signals this eventfd after offering buffers; without one the
    /// queue can only be polled.
    pub kick: Option<OwnedFd>,
    /// Signalled to interrupt the guest; without one the guest polls.
    pub call: Option<OwnedFd>,
    /// Signalled when the device breaks on something in this ring.
    pub err: Option<OwnedFd>,
    /// Where writes to guest memory are logged, while the guest migrates.
    pub log: Option<QueueLog>,
    /// Whether the front end has enabled the queue. A disabled one is started only on a
    /// [network device](VirtioDevice::is_network).
    pub is_enabled: bool,
}

/// The log of a queue's writes to guest memory. Its VMM copies the logged pages to the migration's
/// destination.
#[derive(Debug)]
pub struct QueueLog {
    /// The pages that were written.
    pub pages: DirtyLog,
    /// Signalled after pages were marked, if the VMM wants that.
    pub event: Option<OwnedFd>,
}

/// Why a queue cannot be started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// There is no queue of that number.
    #[error("there is no queue {index}, the device has {queue_count}")]
    NoSuchQueue {
        /// Queue asked for.
        index: u16,
        /// Queues there are.
        queue_count: u16,
    },
    /// The ring's layout makes no sense.
    #[error("queue {index}: {error}")]
    Ring {
        /// Which queue.
        index: u16,
        /// The rule of the ring that is broken.
        error: RingError,
    },
    /// The ring is not where it is said to be.
    #[error("queue {index}: {error}")]
    Memory {
        /// Which queue.
        index: u16,
        /// The failed translation.
        error: MemoryError,
    },
    /// The store cannot be opened for the queue, or an eventfd is unusable.
    #[error("queue {index}: {error}")]
    Io {
        /// Which queue.
        index: u16,
        /// The error of the system call.
        error: std::io::Error,
    },
    /// The driver has used the queue with an earlier process, and writes that this one answered
    /// may be missing.
    #[error("queue {index} was in use before, and writes that were answered may be missing: {why}")]
    Loss {
        /// Which queue.
        index: u16,
        /// Why they may be missing.
        why: String,
    },
    /// The sidecore that serves the device is gone.
    #[error("the sidecore that serves this device has stopped")]
    SidecoreGone,
}

/// Why the configuration space cannot be accessed there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// The range is not in the configuration space.
    #[error("configuration space access of {len_bytes} bytes at {offset_bytes} is out of range")]
    OutOfRange {
        /// First byte.
        offset_bytes: u32,
        /// Size.
        len_bytes: u32,
    },
    /// The driver may not write there.
    #[error("configuration byte {offset_bytes} is read-only")]
    ReadOnly {
        /// First byte.
        offset_bytes: u32,
    },
}

/// Takes up a ring where `state` says, for a queue that is polled from now on.
pub(crate) fn open_ring(
    index: u16,
    memory: &GuestMemory,
    layout: &RingLayout,
    state: RingState,
) -> Result<DeviceRing, StartError> {
    let mut ring = DeviceRing::new(memory, layout, state).map_err(|error| match error {
        // The ring's description may be right and its memory not there yet.
        RingError::Memory(error) => StartError::Memory { index, error },
        error => StartError::Ring { index, error },
    })?;
    ring.suppress_kicks();
    Ok(ring)
}

/// Copies a part of the configuration space `config` to `data`.
pub(crate) fn read_config(
    config: &[u8],
    offset_bytes: u32,
    data: &mut [u8],
) -> Result<(), ConfigError> {
    let len_bytes = u32::try_from(data.len()).unwrap_or(u32::MAX);
    let out_of_range = ConfigError::OutOfRange { offset_bytes, len_bytes };
    let start = usize::try_from(offset_bytes).unwrap_or(usize::MAX);
    let source = config.get(start..).and_then(|rest| rest.get(..data.len())).ok_or(out_of_range)?;
    data.copy_from_slice(source);
    Ok(())
}

/// A virtio device as its transport sees it.
///
/// The transport's thread calls it; the queues run on sidecores. Starting and stopping therefore
/// cross over by mail and come back acknowledged: when [`stop_queue`](Self::stop_queue) returns,
/// nothing of the queue touches guest memory any more.
pub trait VirtioDevice: Send + Sync {
    /// The name it has in the configuration, for messages.
    fn name(&self) -> &str;

    /// How many queues it has; they are numbered from zero.
    fn queue_count(&self) -> u16;

    /// Whether it is a network device. Such a device differs on vhost-user: a queue that is started
    /// and disabled is served, but carries no frames; the front end counts pairs of queues, and has
    /// a configuration space of its own.
    fn is_network(&self) -> bool {
        false
    }

    /// Enables or disables a running queue of a network device.
    fn set_enabled(&self, _index: u16, _is_enabled: bool) {}

    /// Sets the MTU of a network device. False if it cannot have that one.
    fn set_mtu(&self, _mtu: u64) -> bool {
        false
    }

    /// Announces the guest of a network device on its network, after a migration.
    fn announce(&self) {}

    /// The virtio feature bits it offers (without vhost-user's own bit 30).
    fn features(&self) -> u64;

    /// Reads the device configuration space (virtio 1.2, 5.2.4 for block).
    ///
    /// # Errors
    /// The range is not all in it.
    fn read_config(&self, offset_bytes: u32, data: &mut [u8]) -> Result<(), ConfigError>;

    /// Counts the changes of the configuration space that the device has made
    /// by itself, such as a new capacity. A driver has to be told of each.
    fn config_generation(&self) -> u32;

    /// Writes the device configuration space on the driver's behalf.
    ///
    /// # Errors
    /// Out of range or not writable.
    fn write_config(&self, offset_bytes: u32, data: &[u8]) -> Result<(), ConfigError>;

    /// Starts to serve a stopped queue from `state`.
    ///
    /// # Errors
    /// See [`StartError`]; the queue stays stopped.
    fn start_queue(
        &self,
        index: u16,
        resources: QueueResources,
        state: RingState,
    ) -> Result<(), StartError>;

    /// Takes no more requests from a queue, waits for those in flight, and hands back where it
    /// stands; `None` if it was not started. A queue that broke hands its state back too.
    fn stop_queue(&self, index: u16) -> Option<RingState>;

    /// Replaces the call descriptor of a running queue without stopping it (an interrupt is masked
    /// and unmasked this way all the time); does nothing if the queue is not started. Completions
    /// not yet announced are announced on the new one.
    fn set_call(&self, index: u16, call: Option<OwnedFd>);

    /// Replaces the log of a running queue without stopping it; does nothing if the queue is not
    /// started. When this returns, the queue marks each page that it writes in the new log, also
    /// for requests that were in flight before.
    fn set_log(&self, index: u16, log: Option<QueueLog>);

    /// Forgets everything about the driver: all queues are stopped already.
    /// Brings a broken device back.
    fn reset(&self);

    /// Why the device is broken and needs a reset, if it is.
    fn broken(&self) -> Option<String>;

    /// Why a driver that has used the device with an earlier process must not go on with it, if
    /// so: writes that it relies on may be missing. A driver that begins anew is served.
    fn loss(&self) -> Option<String> {
        None
    }
}
