//! vfio-user: the protocol by which this process is a PCI function of a VMM's guest, over a Unix
//! socket (QEMU's docs/interop/vfio-user.rst, "the specification" below).
//!
//! * [`Message`] is the wire format, for both ends of the socket. Sizes are checked before memory
//!   is allocated for them.
//! * [`Connection`] carries messages and their file descriptors over a stream, and never waits,
//!   except in its drop.
//! * [`Session`] is the server's state machine for one connection. The session has no socket, so
//!   tests and the fuzzer drive it directly.
//! * [`PciEndpoint`] is a [`PciFunction`](sidecore_nvme::PciFunction) that the [`Service`] of all
//!   protocols serves to one VMM after the other.
//!
//! The reasons against rust-vmm's `vfio_user` are in docs/decisions/0014-own-vfio-user-server.md.
//!
//! # Behaviour of QEMU's client
//!
//! As of QEMU 10.1 (hw/vfio-user, hw/vfio), with the consequences for this server:
//!
//! * **QEMU connects once.** After the server's end the device is dead: reads are all ones, writes
//!   are lost, until the device is unplugged or the VM restarted. QEMU never reconnects, so a
//!   server that restarts hands the connection itself over to the next process: [`Socket::export`],
//!   [`Service::serve`].
//! * **QEMU aborts when a device with MSI-X is unplugged** (seen with 11.1.3):
//!   `vfio_user_msix_teardown` takes the pending bits' region out of its container as the device is
//!   finalized, when both are finalized already, and an assertion that the region is still in the
//!   container fails. No layout of table and pending bits avoids the assertion; a device without
//!   the capability does, so functions can have MSI instead
//!   ([`Interrupts`](sidecore_nvme::Interrupts)).
//! * **QEMU waits five seconds for a reply** (`x-msg-timeout`), and holds its global lock
//!   meanwhile, so the guest waits too. A later reply belongs to no request and, if it has a
//!   payload, puts the stream out of step for good; a header alone, as of an error, does no harm.
//!   So a function must complete a [`Done`](sidecore_nvme::Done) in much less time. QEMU has no
//!   other check for a server that is silent while its socket stays open.
//! * **QEMU expects a header in one piece**, and a reply no larger than the command, except to
//!   REGION_READ, and to DEVICE_GET_REGION_INFO within its argsz. VERSION is no exception: this
//!   server's version data is shorter than QEMU's.
//! * **An error reply with errno 0 is a success** to QEMU.
//! * **At start** QEMU sends VERSION; DMA_MAP for all RAM and ROM, without waiting in between;
//!   DEVICE_GET_INFO; DEVICE_GET_REGION_INFO of the six registers and the configuration space
//!   (first with no space for a capability); DEVICE_GET_IRQ_INFO; one REGION_READ of the whole
//!   configuration space; and an eventfd for ERR.
//! * **A change of memory** is a sequence of DMA_UNMAP and DMA_MAP. QEMU waits for the last of
//!   them; the server serves them in their order. An error reply to a map while the guest runs may
//!   end QEMU ("unable to continue"). Maps without a file are usual: ROMs, and this server's
//!   doorbells once QEMU has mapped them.
//! * **At a reset** QEMU takes the eventfds from the vectors, writes 0 to the command register,
//!   sends DEVICE_RESET, and writes 0 to all six base address registers. Memory stays mapped, and
//!   is not sent again.
//! * **The MSI-X table is QEMU's.** A guest's writes to the table never arrive at the server; its
//!   reads of the pending bits do. A masked vector has no eventfd, or an eventfd that QEMU reads.
//!   Message Control arrives as a write to the configuration space.
//! * **With mapped doorbells** QEMU posts no writes, so the order of a mapped store and a later
//!   message is the guest's own responsibility.
//!
//! # Behaviour of SPDK's driver
//!
//! As of SPDK 26.09 (lib/vfio_user/host, lib/nvme/nvme_vfio_user.c):
//!
//! * **SPDK pads.** DEVICE_GET_REGION_INFO has a payload of 4,064 bytes, as `argsz` says: so any
//!   bytes may follow a command's structure, up to the largest message ([`MAX_PAYLOAD_BYTES`]).
//!   VERSION comes without version data.
//! * **SPDK sends the file with DMA_UNMAP, too.** The server closes it like every unused
//!   descriptor.
//! * **SPDK maps the first area** of BAR0 and stores all doorbells to the page at 0x1000 of it, the
//!   admin queue's included. SPDK does not attach to a function without a mappable area.
//! * **The socket's file is called `cntrl`**, in a directory that is the controller's address
//!   (`traddr`).
//! * **All messages have number 0**, and SPDK waits for each reply.
#![forbid(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::indexing_slicing,
        clippy::arithmetic_side_effects,
        clippy::todo,
        clippy::unimplemented
    )
)]

mod body;
mod codec;
mod data;
mod descriptors;
mod dma;
mod endpoint;
mod interrupts;
mod message;
mod refusal;
mod regions;
mod session;

pub use codec::{Codec, Connection, ConnectionError, Received};
pub use data::Data;
pub use endpoint::{PciEndpoint, with_doorbells_last};
pub use message::{
    ACCESS_BYTES, Body, DeviceInfo, DmaMap, DmaUnmap, Flags, HEADER_BYTES, Header, IrqInfo, IrqSet,
    MAX_AREAS, MAX_FDS, MAX_PAYLOAD_BYTES, MAX_TRANSFER_BYTES, Message, MessageError, RegionAccess,
    RegionInfo, SparseArea, Version,
};
pub use session::{ProtocolError, Session};
pub use sidecore_peer::{Access, ServerError, Service, Snapshot, Socket, SocketState, StreamError};
pub use sidecore_spec_nvme::vfio;
pub use sidecore_spec_nvme::vfio_user::Command;
