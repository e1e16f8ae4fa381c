//! vfio-user: how a VMM has this process be a PCI function of its guest, over a Unix socket (QEMU's
//! docs/interop/vfio-user.rst, "the specification" below).
//!
//! * [`Message`] is the wire format, for both ends of the socket. Sizes are checked before there is room for anything.
//! * [`Connection`] carries messages and their file descriptors over a stream, and never waits, until it is dropped.
//! * [`Session`] is the server's state machine for one connection. It knows no socket, so tests and the fuzzer drive it
//!   directly.
//! * [`PciEndpoint`] is a [`PciFunction`](sidecore_nvme::PciFunction) that the [`Service`] of all protocols serves to one
//!   VMM after the other.
//!
//! Why not rust-vmm's `vfio_user`: docs/decisions/0014-own-vfio-user-server.md.
//!
//! # What QEMU's client does
//!
//! As of QEMU 10.1 (hw/vfio-user, hw/vfio), and what is done here because of it:
//!
//! * **It connects once.** When the server goes away, the device is dead: reads are all ones, writes are lost, until
//!   the device is unplugged or the VM restarted. Nothing reconnects, so a server that is to be restarted hands the
//!   connection itself over to the next one: [`Socket::export`], [`Service::serve`].
//! * **It aborts when a device with MSI-X is unplugged** (seen with 11.1.3): `vfio_user_msix_teardown` takes the pending bits'
//!   region out of its container as the device is finalized, when both are finalized already, and that asserts that it is
//!   still in there. No layout of table and pending bits avoids it; a device without the capability does, so that
//!   functions can have MSI instead ([`Interrupts`](sidecore_nvme::Interrupts)).
//! * **It waits five seconds for an answer** (`x-msg-timeout`), and the guest with it: it holds its global lock meanwhile. An
//!   answer after that is taken for nobody's and, if it has a payload, puts the stream out of step, for good; a header alone, as an
//!   error is, does no harm. So what a function answers with a [`Done`](sidecore_nvme::Done) has to take much less. Nothing
//!   else notices a server that is silent while its socket stays open.
//! * **It expects a header in one piece**, and a reply no larger than the command, except to REGION_READ, and to
//!   DEVICE_GET_REGION_INFO within its argsz. VERSION is no exception: our version data is shorter than QEMU's.
//! * **An error reply with errno 0 is a success** to it.
//! * **At start** it sends VERSION; DMA_MAP for all RAM and ROM, without waiting in between; DEVICE_GET_INFO;
//!   DEVICE_GET_REGION_INFO of the six registers and the configuration space (first with room for no capability);
//!   DEVICE_GET_IRQ_INFO; one REGION_READ of the whole configuration space; and an eventfd for ERR.
//! * **A change of memory** is a row of DMA_UNMAP and DMA_MAP, the last of which it waits for; they are served in their
//!   order. An error to a map while the guest runs may end QEMU ("unable to continue"). Maps without a file are usual:
//!   ROMs, and our own doorbells once it has them mapped.
//! * **At a reset** it takes the vectors away, writes 0 to the command register, sends DEVICE_RESET, and writes 0 to all six
//!   base address registers. Memory stays mapped, and is not sent again.
//! * **The MSI-X table is QEMU's.** What a guest writes to it never arrives here; of the pending bits reads do. A
//!   vector that is masked has no eventfd, or one that QEMU itself reads. Message Control arrives as a write to the
//!   configuration space.
//! * **With mapped doorbells** no write is posted any longer, so the order of a mapped store and a message that follows it
//!   is the guest's own business only.
//!
//! # What SPDK's driver does
//!
//! As of SPDK 26.09 (lib/vfio_user/host, lib/nvme/nvme_vfio_user.c):
//!
//! * **It pads.** DEVICE_GET_REGION_INFO has a payload of 4,064 bytes, as `argsz` says: so a command's structure may have
//!   anything behind it, up to the largest message ([`MAX_PAYLOAD_BYTES`]). VERSION comes without version data.
//! * **It sends the file with DMA_UNMAP, too.** It is closed like any descriptor that has no use.
//! * **It maps the first area** of BAR0 and stores all doorbells to the page at 0x1000 of it, the admin queue's among
//!   them. Without a mappable area it does not attach.
//! * **The socket's file is called `cntrl`**, in a directory that is the controller's address (`traddr`).
//! * **All messages have number 0**, and it waits for each reply.
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
    ACCESS_BYTES, Body, DeviceInfo, DmaMap, DmaUnmap, Flags, HEADER_BYTES, Header, IrqInfo, IrqSet, MAX_AREAS, MAX_FDS,
    MAX_PAYLOAD_BYTES, MAX_TRANSFER_BYTES, Message, MessageError, RegionAccess, RegionInfo, SparseArea, Version,
};
pub use session::{ProtocolError, Session};
pub use sidecore_peer::{Access, ServerError, Service, Snapshot, Socket, SocketState, StreamError};
pub use sidecore_spec_nvme::vfio;
pub use sidecore_spec_nvme::vfio_user::Command;
