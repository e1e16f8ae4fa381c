//! The driver's side against a device written down word by word, so that neither side's mistakes
//! hide the other's.

use std::fs::File;

use sidecore_memory::RegionSpec;
use sidecore_spec_virtio::{packed, split};

use super::*;

const USER_BASE: u64 = 0x7000_0000;
const GUEST_BASE: u64 = 0x4000_0000;
const MEMORY_BYTES: u64 = 1 << 20;
const TABLES_AT: u64 = 0x8_0000;

fn memory() -> GuestMemory {
    let file =
        File::from(rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
    file.set_len(MEMORY_BYTES).unwrap();
    GuestMemory::map(vec![RegionSpec {
        guest_address: GuestAddress(GUEST_BASE),
        user_address: UserAddress(USER_BASE),
        len_bytes: MEMORY_BYTES,
        file: file.into(),
        file_offset_bytes: 0,
    }])
    .unwrap()
}

fn layout(format: RingFormat, size: u16, event_idx: bool, indirect: bool) -> RingLayout {
    RingLayout { event_idx, indirect, ..RingLayout::compact(UserAddress(USER_BASE), format, size) }
}

/// A ring and, over the same memory, the words that a device would touch.
struct Pair {
    driver: DriverRing,
    raw: RawRing,
    memory: GuestMemory,
    layout: RingLayout,
    next_available: u16,
    next_used: u16,
    /// Packed: the device's wrap counters.
    available_wrap: bool,
    used_wrap: bool,
}

/// A chain that the device has taken: the id to give back, and the buffers.
type Found = (u16, Vec<Buffer>);

impl Pair {
    fn new(
        format: RingFormat,
        size: u16,
        slots: u16,
        per_slot: u16,
        event_idx: bool,
        indirect: bool,
    ) -> Self {
        let memory = memory();
        let layout = layout(format, size, event_idx, indirect);
        let tables = indirect.then(|| IndirectTables {
            window: memory
                .window(
                    UserAddress(USER_BASE + TABLES_AT),
                    IndirectTables::bytes(slots, per_slot),
                    16,
                )
                .unwrap(),
            guest_address: GuestAddress(GUEST_BASE + TABLES_AT),
        });
        let driver = DriverRing::new(&memory, &layout, slots, per_slot, tables).unwrap();
        let raw = RawRing::new(&memory, &layout).unwrap();
        Self {
            driver,
            raw,
            memory,
            layout,
            next_available: 0,
            next_used: 0,
            available_wrap: true,
            used_wrap: true,
        }
    }

    fn take(&mut self) -> Option<Found> {
        match self.layout.format {
            RingFormat::Split => self.take_split(),
            RingFormat::Packed => self.take_packed(),
        }
    }

    fn take_split(&mut self) -> Option<Found> {
        if self.raw.available_index() == self.next_available {
            return None;
        }
        let head = self.raw.available_entry(self.next_available % self.layout.size);
        self.next_available = self.next_available.wrapping_add(1);
        let mut chain = Vec::new();
        let mut descriptor = self.raw.descriptor(head);
        if descriptor.flags & descriptor::INDIRECT != 0 {
            return Some((head, self.table(descriptor)));
        }
        loop {
            chain.push(buffer(descriptor));
            if descriptor.flags & descriptor::NEXT == 0 {
                return Some((head, chain));
            }
            descriptor = self.raw.descriptor(descriptor.next_or_id);
        }
    }

    fn take_packed(&mut self) -> Option<Found> {
        let mut chain = Vec::new();
        loop {
            let descriptor = self.raw.descriptor(self.next_available);
            let (available, used) =
                (descriptor.flags & packed::AVAIL != 0, descriptor.flags & packed::USED != 0);
            if available != self.available_wrap || used == self.available_wrap {
                assert!(chain.is_empty(), "the rest of a chain must be there before its head");
                return None;
            }
            self.next_available += 1;
            if self.next_available == self.layout.size {
                (self.next_available, self.available_wrap) = (0, !self.available_wrap);
            }
            if descriptor.flags & descriptor::INDIRECT != 0 {
                return Some((descriptor.next_or_id, self.table(descriptor)));
            }
            chain.push(buffer(descriptor));
            if descriptor.flags & descriptor::NEXT == 0 {
                return Some((descriptor.next_or_id, chain));
            }
        }
    }

    fn table(&self, descriptor: RawDescriptor) -> Vec<Buffer> {
        let at = UserAddress(descriptor.address - GUEST_BASE + USER_BASE);
        let table =
            SharedMemory::new(self.memory.window(at, descriptor.len_bytes as usize, 16).unwrap());
        let entries = descriptor.len_bytes as usize / descriptor::BYTES;
        let entry = |index: usize| {
            let at = index * descriptor::BYTES;
            // A packed table has the id before the flags.
            let flags_at = if self.layout.format == RingFormat::Split { 12 } else { 14 };
            RawDescriptor {
                address: table.load_u64(at),
                len_bytes: table.load_u32(at + 8),
                flags: table.load_u16(at + flags_at),
                next_or_id: 0,
            }
        };
        (0..entries).map(|index| buffer(entry(index))).collect()
    }

    fn complete(&mut self, id: u16, entries: u16, written_bytes: u32) {
        match self.layout.format {
            RingFormat::Split => {
                self.raw.set_used_entry(
                    self.next_used % self.layout.size,
                    id.into(),
                    written_bytes,
                );
                self.next_used = self.next_used.wrapping_add(1);
                self.raw.set_used_index(self.next_used);
            }
            RingFormat::Packed => {
                let bits = if self.used_wrap { packed::AVAIL | packed::USED } else { 0 };
                let descriptor = RawDescriptor {
                    address: 0,
                    len_bytes: written_bytes,
                    flags: bits,
                    next_or_id: id,
                };
                self.raw.set_descriptor(self.next_used, descriptor);
                self.next_used += if self.layout.indirect { 1 } else { entries };
                if self.next_used >= self.layout.size {
                    (self.next_used, self.used_wrap) =
                        (self.next_used - self.layout.size, !self.used_wrap);
                }
            }
        }
    }
}

fn buffer(descriptor: RawDescriptor) -> Buffer {
    Buffer {
        address: descriptor.address,
        len_bytes: descriptor.len_bytes,
        device_writes: descriptor.flags & descriptor::WRITE != 0,
    }
}

fn chain(slot: u16, buffers: u16) -> Vec<Buffer> {
    (0..buffers)
        .map(|index| Buffer {
            address: GUEST_BASE + u64::from(slot) * 0x100 + u64::from(index) * 0x10,
            len_bytes: u32::from(index) + 1,
            device_writes: index + 1 == buffers,
        })
        .collect()
}

const FORMATS: [RingFormat; 2] = [RingFormat::Split, RingFormat::Packed];

/// Every combination, often enough round the ring to wrap every index, with completions out of
/// order.
#[test]
fn chains_arrive_as_described_and_completions_name_their_slots() {
    for format in FORMATS {
        for (event_idx, indirect) in [(false, false), (true, false), (false, true), (true, true)] {
            let mut pair = Pair::new(format, 16, 5, 3, event_idx, indirect);
            for round in 0..20_000_u32 {
                let batch = (round % 5 + 1) as u16;
                for slot in 0..batch {
                    let buffers = (round as u16 + slot) % 3 + 1;
                    pair.driver.describe(slot, &chain(slot, buffers)).unwrap();
                    pair.driver.push(slot).unwrap();
                }
                assert!(pair.take().is_none(), "not published yet");
                pair.driver.publish();
                let mut found: Vec<Found> = (0..batch).map(|_| pair.take().unwrap()).collect();
                assert!(pair.take().is_none());
                for (slot, (id, buffers)) in found.iter().enumerate() {
                    assert_eq!(usize::from(*id), slot);
                    assert_eq!(buffers, &chain(*id, (round as u16 + *id) % 3 + 1));
                }
                assert_eq!(pair.driver.in_flight(), batch);
                assert!(pair.driver.pop().unwrap().is_none());
                found.rotate_left(usize::from(batch) / 2);
                for (id, buffers) in &found {
                    pair.complete(*id, buffers.len() as u16, round);
                }
                for (id, _) in &found {
                    assert!(pair.driver.has_used());
                    let used = pair.driver.pop().unwrap().unwrap();
                    assert_eq!(used, Used { slot: *id, written_bytes: round });
                }
                assert!(!pair.driver.has_used());
            }
        }
    }
}

#[test]
fn a_described_slot_is_sent_again_without_describing_it() {
    for format in FORMATS {
        let mut pair = Pair::new(format, 8, 2, 3, false, false);
        pair.driver.describe(1, &chain(1, 3)).unwrap();
        for _ in 0..50 {
            pair.driver.push(1).unwrap();
            pair.driver.publish();
            let (id, buffers) = pair.take().unwrap();
            assert_eq!(buffers, chain(1, 3));
            pair.complete(id, 3, 1);
            assert_eq!(pair.driver.pop().unwrap().unwrap().slot, 1);
        }
    }
}

#[test]
fn a_kick_is_wanted_where_the_device_says() {
    let mut pair = Pair::new(RingFormat::Split, 8, 2, 1, false, false);
    let send = |pair: &mut Pair, slot: u16| {
        pair.driver.describe(slot, &chain(slot, 1)).unwrap();
        pair.driver.push(slot).unwrap();
        pair.driver.publish();
    };
    send(&mut pair, 0);
    assert!(pair.driver.kick_wanted());
    assert!(!pair.driver.kick_wanted(), "one kick is enough");
    pair.raw.set_used_flags(split::NO_NOTIFY);
    send(&mut pair, 1);
    assert!(!pair.driver.kick_wanted_soon());
    pair.raw.set_used_flags(0);
    assert!(pair.driver.kick_wanted(), "an uncertain answer is asked for again");

    let mut pair = Pair::new(RingFormat::Split, 8, 2, 1, true, false);
    pair.raw.set_available_event(1);
    send(&mut pair, 0);
    assert!(!pair.driver.kick_wanted());
    send(&mut pair, 1);
    assert!(pair.driver.kick_wanted());
}

#[test]
fn a_packed_ring_kicks_at_the_named_descriptor_on_both_sides_of_the_wrap() {
    let mut pair = Pair::new(RingFormat::Packed, 4, 4, 1, true, false);
    for round in 0..40_u16 {
        // Where this request goes, and the one after it.
        let here = (round % 4) | (u16::from(round / 4 % 2 == 0) << 15);
        let next = ((round + 1) % 4) | (u16::from((round + 1) / 4 % 2 == 0) << 15);
        let wanted = round % 3 == 0;
        pair.raw.set_device_event(if wanted { here } else { next }, packed::EVENT_DESCRIPTOR);
        pair.driver.describe(0, &chain(0, 1)).unwrap();
        pair.driver.push(0).unwrap();
        pair.driver.publish();
        assert_eq!(pair.driver.kick_wanted(), wanted, "round {round}");
        let (id, _) = pair.take().unwrap();
        pair.complete(id, 1, 0);
        assert!(pair.driver.pop().unwrap().is_some());
    }
    pair.raw.set_device_event(0, packed::EVENT_DISABLE);
    pair.driver.push(0).unwrap();
    pair.driver.publish();
    assert!(!pair.driver.kick_wanted());
    pair.raw.set_device_event(0, packed::EVENT_ENABLE);
    pair.driver.describe(1, &chain(1, 1)).unwrap();
    pair.driver.push(1).unwrap();
    pair.driver.publish();
    assert!(pair.driver.kick_wanted());
}

#[test]
fn arming_tells_the_device_and_notices_what_came_before() {
    for format in FORMATS {
        for event_idx in [false, true] {
            let mut pair = Pair::new(format, 8, 2, 1, event_idx, false);
            let silent = |pair: &Pair| match (format, event_idx) {
                (RingFormat::Split, false) => pair.raw.available_flags() == split::NO_INTERRUPT,
                (RingFormat::Split, true) => pair.raw.used_event() != pair.next_used,
                (RingFormat::Packed, _) => pair.raw.driver_event().1 == packed::EVENT_DISABLE,
            };
            assert!(silent(&pair));
            pair.driver.describe(0, &chain(0, 1)).unwrap();
            pair.driver.push(0).unwrap();
            pair.driver.publish();
            assert!(!pair.driver.arm_calls());
            assert!(!silent(&pair));
            let (id, _) = pair.take().unwrap();
            pair.complete(id, 1, 0);
            assert!(pair.driver.arm_calls(), "a completion is there already");
            pair.driver.pop().unwrap().unwrap();
            pair.driver.suppress_calls();
            assert!(silent(&pair));
        }
    }
}

#[test]
fn a_lying_device_is_an_error_and_not_a_panic() {
    let mut pair = Pair::new(RingFormat::Split, 8, 2, 1, false, false);
    pair.raw.set_used_index(1);
    assert!(matches!(pair.driver.pop(), Err(DriverError::TooManyUsed)));
    for format in FORMATS {
        for id in [1, 2, 500, u16::MAX] {
            let mut pair = Pair::new(format, 8, 2, 1, false, false);
            pair.driver.describe(0, &chain(0, 1)).unwrap();
            pair.driver.push(0).unwrap();
            pair.driver.publish();
            pair.complete(id, 1, 0);
            assert!(
                matches!(pair.driver.pop(), Err(DriverError::NotInFlight { .. })),
                "{format:?} {id}"
            );
        }
    }
}

#[test]
fn misuse_is_refused() {
    let mut pair = Pair::new(RingFormat::Split, 8, 2, 2, false, false);
    assert!(matches!(pair.driver.push(0), Err(DriverError::Chain { .. })));
    assert!(matches!(
        pair.driver.describe(2, &chain(2, 1)),
        Err(DriverError::NoSuchSlot { slot: 2 })
    ));
    assert!(matches!(pair.driver.describe(0, &[]), Err(DriverError::Chain { .. })));
    assert!(matches!(pair.driver.describe(0, &chain(0, 3)), Err(DriverError::Chain { .. })));
    pair.driver.describe(0, &chain(0, 1)).unwrap();
    pair.driver.push(0).unwrap();
    assert!(matches!(pair.driver.push(0), Err(DriverError::InFlight { slot: 0 })));
    assert!(matches!(
        pair.driver.describe(0, &chain(0, 1)),
        Err(DriverError::InFlight { slot: 0 })
    ));
    let memory = memory();
    let too_big = layout(RingFormat::Split, 8, false, false);
    assert!(matches!(
        DriverRing::new(&memory, &too_big, 3, 3, None),
        Err(DriverError::Size { .. })
    ));
    let odd = layout(RingFormat::Split, 12, false, false);
    assert!(matches!(DriverRing::new(&memory, &odd, 1, 1, None), Err(DriverError::Size { .. })));
    let outside = RingLayout { device_area: UserAddress(1), ..too_big };
    assert!(matches!(DriverRing::new(&memory, &outside, 1, 1, None), Err(DriverError::Memory(_))));
}

#[test]
fn shared_memory_keeps_inside_its_window() {
    let memory = memory();
    let shared = SharedMemory::new(memory.window(UserAddress(USER_BASE), 64, 8).unwrap());
    shared.store_u64(56, 7);
    shared.store_u64(64, 1);
    shared.store_u32(62, 1);
    shared.store_u16(1, 1);
    assert_eq!((shared.load_u64(56), shared.load_u64(64), shared.load_u16(1)), (7, 0, 0));
    assert_eq!(shared.load_u64(usize::MAX - 3), 0);
    assert_eq!(shared.write_bytes(60, &[9; 8]), 4);
    let mut back = [0; 8];
    assert_eq!(shared.read_bytes(60, &mut back), 4);
    assert_eq!(back, [9, 9, 9, 9, 0, 0, 0, 0]);
    let beyond = SharedMemory::new(memory.window(UserAddress(USER_BASE + 64), 8, 8).unwrap());
    assert_eq!(beyond.load_u64(0), 0);
    assert!(!shared.copy_from(0, &beyond, 0, 8, CopyHow::RepMovsb), "the same memory");
    let other = self::memory();
    let other = SharedMemory::new(other.window(UserAddress(USER_BASE), 64, 8).unwrap());
    for how in [CopyHow::RepMovsb, CopyHow::CLibrary] {
        other.fill_zero();
        assert!(other.copy_from(3, &shared, 60, 4, how));
        assert!(!other.copy_from(61, &shared, 60, 4, how));
        assert_eq!(other.load_u64(0), 0x0009_0909_0900_0000);
    }
}
