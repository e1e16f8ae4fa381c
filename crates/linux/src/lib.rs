//! The services of Linux: a disk, a place to sleep, notifications, a core and a clock.
//!
//! * [`FileStore`]: blocks in a file or a block device, through one io_uring per queue.
//! * [`HostFile`]: the places of a file's blocks on the device below its filesystem, for as long as
//!   no other process opens the file.
//! * [`MemoryFile`]: memory that outlives the process.
//! * [`EpollSleeper`]: the call in which a sidecore sleeps.
//! * [`replace_file`]: a file's new bytes, whole or not at all.
//! * [`peer_event`]: wakes a peer without ever waiting for it.
//! * [`cpu`]: the machine's cores, and pinning a thread to one of them.
//! * [`EndRequests`]: whether a second signal to end means the same as the first.
//! * [`HeldSignals`]: a time in which signals do not end this process.
//! * [`user_id`] and [`group_id`]: look up users and groups by name.
//! * [`Clock`]: the time, for the price of reading a register.
//! * [`PacketSocket`]: frames of an Ethernet interface, through rings in memory.
//! * [`DatagramSocket`]: datagrams in batches.
//! * [`Tap`]: an interface of this kernel whose wire is this process.
//! * [`ReservedDisk`]: persistent reservations of a disk that several hosts reach.
//! * [`UblkControl`] and [`UblkQueue`]: block devices of this kernel that this process serves.
//! * [`XdpSocket`] and [`XdpProgram`]: frames of an interface, through AF_XDP.
//! * [`ServiceManager`] and [`take_kept`]: the program that started this process, and keeps
//!   descriptors for the next one.
//!
//! Everything above this crate takes these as arguments, so that tests run without Linux. The crate
//! may hold unsafe code, because it makes system calls, and the kernel writes to memory without the
//! compiler's knowledge; each use says why it is sound.

mod accounts;
mod clock;
pub mod core_time;
pub mod cpu;
mod datagram_socket;
mod end_requests;
mod epoll;
mod file;
mod file_size_limit;
mod gather;
mod held_signals;
mod host_file;
mod memory_file;
mod offload_socket;
mod packet_slots;
mod packet_socket;
mod peer_event;
mod pin;
mod reservation;
mod service_manager;
mod tap;
mod ublk;
mod whole_file;
mod xdp_socket;

pub use accounts::{group_id, user_id};
pub use clock::Clock;
pub use datagram_socket::{Arrived, DatagramSocket, Departure};
pub use end_requests::{EndRequest, EndRequests};
pub use epoll::EpollSleeper;

pub use file::{FileError, FileOptions, FileStore, stacked_on};
pub use file_size_limit::ignore_file_size_signal;
pub use gather::Place;
pub use held_signals::HeldSignals;
pub use host_file::{
    ExtentFlaw, HostExtent, HostFile, HostFileError, HostFileOptions, LeaseState, lease_break_time,
};
pub use memory_file::{MemoryFile, boot_id};
pub use offload_socket::{OFFLOAD_PLACES_MAX, OffloadSocket};
pub use packet_slots::{PacketHeader, PacketSlots, packet_slot};
pub use packet_socket::{
    FrameFilter, FrameShare, Interface, OffloadFilter, PacketRing, PacketSetup, PacketSocket,
    VIRTIO_HEADER_BYTES,
};
pub use peer_event::peer_event;
pub use pin::pin_memory;
pub use reservation::{DiskReservation, ReservationError, ReservedDisk, on_reservation_conflict};
pub use service_manager::{EnvironmentError, KeptDescriptor, ServiceManager, take_kept};
pub use tap::{Tap, TapMonitor, TapOffloads, TapState};
pub use ublk::{
    IoDescriptor, IoResult, UblkControl, UblkError, UblkInfo, UblkParameters, UblkPartitions,
    UblkQueue, UblkState, open_ublk_device, prepare_ublk_memory, ublk_flag, ublk_memory_prepared,
    ublk_numbers,
};
pub use whole_file::replace_file;
pub use xdp_socket::{
    CHUNK_BYTES, KERNEL_HEADROOM_BYTES, NEEDS_WAKE_UP, XdpMapped, XdpMode, XdpProgram, XdpRing,
    XdpRings, XdpSocket, XdpStatistics,
};
