//! A client that has gone keeps the doorbell memory that it has mapped: nothing that it stores
//! there reaches the clients after it.

use sidecore_driver::{NvmeCapabilities, vfio};
use sidecore_memory::{GuestAddress, GuestMemory, RegionSpec, UserAddress};
use sidecore_ring::driver::nvme::DoorbellWords;

use super::*;

/// The doorbells of a function that a client keeps mapped for as long as it likes.
pub(super) struct Kept {
    words: DoorbellWords,
    capabilities: NvmeCapabilities,
    area_at: u64,
    pub(super) inode: u64,
}

impl Kept {
    /// The doorbells as the next client is shown them, which goes at once.
    pub(super) fn by_a_client_of(socket: &Path) -> Self {
        Self::of(&Transport::connect(socket, PATIENCE).unwrap())
    }

    fn of(transport: &Transport) -> Self {
        let info = transport.region_info(vfio::PCI_BAR0_REGION_INDEX).unwrap();
        let mut raw = [0; 8];
        transport.region_read(vfio::PCI_BAR0_REGION_INDEX, register::CAP, &mut raw).unwrap();
        let file = info.file.unwrap();
        let inode = rustix::fs::fstat(&file).unwrap().st_ino;
        let area = info.areas[0];
        let memory = GuestMemory::map(vec![RegionSpec {
            guest_address: GuestAddress(0),
            user_address: UserAddress(0),
            len_bytes: area.len_bytes,
            file,
            file_offset_bytes: info.offset_bytes + area.offset_bytes,
        }]);
        let window =
            memory.unwrap().guest_window(GuestAddress(0), area.len_bytes as usize, 4096).unwrap();
        let words = DoorbellWords::new(window).unwrap();
        Self {
            words,
            capabilities: NvmeCapabilities(u64::from_le_bytes(raw)),
            area_at: area.offset_bytes,
            inode,
        }
    }

    /// Stores both doorbells of a queue.
    fn ring(&self, queue: u16, tail: u32) {
        let place = |offset: u64| usize::try_from(offset - self.area_at).unwrap();
        self.words.store(place(self.capabilities.tail_offset(queue)), tail);
        self.words.store(place(self.capabilities.head_offset(queue)), tail);
    }
}

/// Leaves a command in queue 1's next entry and does not announce it; the others announce whatever
/// they can. Queue 3 is on the same sidecore: when it has been served a few times, queue 1 was
/// looked at.
pub(super) fn is_disturbed(client: &mut NvmeClient, by: &[Kept]) -> bool {
    let queue = client.queue(0).unwrap();
    let slot = queue.take_slot().unwrap();
    write_and_read(queue, slot, Sector(0), 4096, 1);
    let (tail, _) = queue.positions();
    let flush = NvmeCommand::new(io_opcode::FLUSH, 1).id(0x77);
    queue.write_entry(tail, &flush.bytes());
    for kept in by {
        (1..=4).for_each(|id| kept.ring(id, tail + 1));
    }
    let other = client.queue(2).unwrap();
    let slot = other.take_slot().unwrap();
    (0..20).for_each(|round| write_and_read(other, slot, Sector(64), 512, round));
    !matches!(client.queue(0).unwrap().pop_raw(), Ok(None))
}

#[test]
fn a_client_that_has_gone_rings_no_doorbells() {
    let function = Function::new(IdleMode::Poll, 512);
    let options = NvmeOptions { queues: 4, ..NvmeOptions::default() };
    let mut gone = vec![Kept::by_a_client_of(&function.socket())];
    for _ in 0..3 {
        let mut client = function.connect(&options);
        assert!(
            !is_disturbed(&mut client, &gone),
            "a command was taken that its driver has not announced"
        );
        drop(client);
        gone.push(Kept::by_a_client_of(&function.socket()));
    }
    let inodes: std::collections::BTreeSet<_> = gone.iter().map(|kept| kept.inode).collect();
    assert_eq!(inodes.len(), gone.len(), "each client has a file of its own");
}
