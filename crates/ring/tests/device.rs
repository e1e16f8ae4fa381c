//! The device's side of both ring formats: against an honest driver over many laps, and against a
//! lying one.

use sidecore_memory::{GuestAddress, GuestMemory, RegionSpec, UserAddress};
use sidecore_ring::driver::{Buffer, DriverRing, IndirectTables, RawDescriptor, RawRing};
use sidecore_ring::{Chain, DeviceRing, RingError, RingFormat, RingLayout, RingState, was_used};
use sidecore_spec_virtio::{descriptor, packed};

const MEMORY_BYTES: u64 = 1 << 20;
/// Where buffers and indirect tables of the tests lie.
const DATA: u64 = 0x8_0000;
const FORMATS: [RingFormat; 2] = [RingFormat::Split, RingFormat::Packed];

/// Guest and user addresses are the same here.
fn memory() -> GuestMemory {
    let file = std::fs::File::from(
        rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).unwrap(),
    );
    file.set_len(MEMORY_BYTES).unwrap();
    GuestMemory::map(vec![RegionSpec {
        guest_address: GuestAddress(0),
        user_address: UserAddress(0),
        len_bytes: MEMORY_BYTES,
        file: file.into(),
        file_offset_bytes: 0,
    }])
    .unwrap()
}

fn layout(format: RingFormat, size: u16, event_idx: bool, indirect: bool) -> RingLayout {
    RingLayout { event_idx, indirect, ..RingLayout::compact(UserAddress(0), format, size) }
}

struct Rig {
    memory: GuestMemory,
    layout: RingLayout,
    device: DeviceRing,
    chain: Chain,
}

impl Rig {
    fn new(layout: RingLayout) -> Self {
        let memory = memory();
        let device = DeviceRing::new(&memory, &layout, RingState::fresh(layout.format)).unwrap();
        Self { memory, layout, device, chain: Chain::with_limit(16) }
    }

    fn driver(&self, slots: u16, per_slot: u16) -> DriverRing {
        let tables = self.layout.indirect.then(|| IndirectTables {
            window: self
                .memory
                .window(UserAddress(DATA), IndirectTables::bytes(slots, per_slot), 16)
                .unwrap(),
            guest_address: GuestAddress(DATA),
        });
        DriverRing::new(&self.memory, &self.layout, slots, per_slot, tables).unwrap()
    }

    fn raw(&self) -> RawRing {
        RawRing::new(&self.memory, &self.layout).unwrap()
    }

    fn pop(&mut self) -> Result<Option<sidecore_ring::Token>, RingError> {
        self.device.pop(&self.memory, &mut self.chain)
    }
}

#[test]
fn requests_go_round_for_many_laps() {
    for format in FORMATS {
        for (event_idx, indirect) in [(false, false), (true, false), (true, true)] {
            // A size that the index does not divide evenly shows wrapping mistakes.
            let size = if format == RingFormat::Packed { 7 } else { 8 };
            let slots = if indirect { 7 } else { 2 };
            let mut rig = Rig::new(layout(format, size, event_idx, indirect));
            let mut driver = rig.driver(slots, 3);
            for slot in 0..slots {
                let at = 0x9_0000 + u64::from(slot) * 0x100;
                let chain = [
                    Buffer::to_device(at, 16),
                    Buffer::from_device(at + 16, 64),
                    Buffer::from_device(at + 80, 1),
                ];
                driver.describe(slot, &chain).unwrap();
            }
            for lap in 0..70_000_u32 {
                let batch = lap % u32::from(slots) + 1;
                for slot in 0..batch {
                    driver.push(slot as u16).unwrap();
                }
                driver.publish();
                let mut tokens = Vec::new();
                while let Some(token) = rig.pop().unwrap() {
                    assert_eq!(rig.chain.readable().len(), 1);
                    assert_eq!(rig.chain.writable().len(), 2);
                    assert_eq!(rig.chain.writable()[1].len_bytes, 1);
                    tokens.push(token);
                }
                assert_eq!(tokens.len(), batch as usize, "{format:?} lap {lap}");
                tokens.reverse(); // out of order, as stores complete
                for token in tokens {
                    rig.device.complete(token, lap);
                }
                rig.device.publish();
                for _ in 0..batch {
                    let used = driver.pop().unwrap().unwrap();
                    assert_eq!(used.written_bytes, lap);
                }
                assert!(driver.pop().unwrap().is_none());
                assert_eq!(rig.device.in_flight(), 0);
            }
        }
    }
}

/// A device that needs several buffers for one frame takes none of them if there are too few.
#[test]
fn requests_that_are_put_back_are_taken_again_in_their_order() {
    for format in FORMATS {
        // 21 laps of 5 entries: each place of a request relative to the ring's end.
        let mut rig =
            Rig::new(layout(format, if format == RingFormat::Packed { 7 } else { 8 }, true, false));
        let mut driver = rig.driver(3, 2);
        for slot in 0..3 {
            let at = DATA + u64::from(slot) * 64;
            let chain = [Buffer::from_device(at, 16), Buffer::from_device(at + 16, 8)];
            driver.describe(slot, if slot == 1 { &chain[..1] } else { &chain }).unwrap();
        }
        for lap in 0..21 {
            let base = rig.device.state();
            for slot in 0..3 {
                driver.push(slot).unwrap();
            }
            driver.publish();
            let first = [rig.pop().unwrap().unwrap(), rig.pop().unwrap().unwrap()];
            assert_eq!((rig.chain.writable().len(), rig.device.in_flight()), (1, 2));
            for token in first.into_iter().rev() {
                rig.device.put_back(token);
            }
            assert_eq!((rig.device.state(), rig.device.in_flight()), (base, 0), "{format:?} {lap}");
            let mut taken = Vec::new();
            for slot in 0..3 {
                taken.push((rig.pop().unwrap().unwrap(), 16 + slot));
                assert_eq!(rig.chain.writable()[0].address.0, DATA + u64::from(slot) * 64);
            }
            rig.device.complete_together(&mut taken);
            rig.device.publish();
            for slot in 0..3 {
                let used = driver.pop().unwrap().unwrap();
                assert_eq!((u32::from(used.slot), used.written_bytes), (slot, 16 + slot));
            }
            assert!(rig.pop().unwrap().is_none());
        }
    }
}

#[test]
fn a_stopped_ring_goes_on_where_it_stood() {
    for format in FORMATS {
        let mut rig = Rig::new(layout(format, 4, true, false));
        let mut driver = rig.driver(2, 2);
        driver
            .describe(0, &[Buffer::to_device(DATA, 16), Buffer::from_device(DATA + 16, 1)])
            .unwrap();
        for lap in 0..50 {
            driver.push(0).unwrap();
            driver.publish();
            let token = rig.pop().unwrap().unwrap();
            rig.device.complete(token, 1);
            rig.device.publish();
            assert!(driver.pop().unwrap().is_some(), "{format:?} lap {lap}");
            let base = rig.device.state().to_vring_base(format);
            let state = RingState::from_vring_base(base, format);
            rig.device = DeviceRing::new(&rig.memory, &rig.layout, state).unwrap();
        }
    }
}

/// A ring that is back at the position where it began is told from one that begins.
#[test]
fn a_ring_that_was_used_shows_it_when_its_position_is_the_first_again() {
    for (format, indirect) in
        FORMATS.into_iter().flat_map(|format| [(format, false), (format, true)])
    {
        let mut rig = Rig::new(layout(format, 8, true, indirect));
        let mut driver = rig.driver(8 / if indirect { 1 } else { 2 }, 2);
        let slots = driver_slots(&mut driver, if indirect { 8 } else { 4 });
        let was_used = |rig: &Rig| was_used(&rig.memory, &rig.layout).unwrap();
        assert!(!was_used(&rig), "{format:?}");
        slots.iter().for_each(|slot| driver.push(*slot).unwrap());
        driver.publish();
        assert!(!was_used(&rig), "{format:?}: made available before the device begins");
        let mut rounds = 0;
        loop {
            while let Some(token) = rig.pop().unwrap() {
                rig.device.complete(token, 1);
            }
            rig.device.publish();
            rounds += 1;
            assert!(was_used(&rig), "{format:?} {indirect}, round {rounds}");
            if rig.device.state() == RingState::fresh(format) {
                break;
            }
            while driver.pop().unwrap().is_some() {}
            slots.iter().for_each(|slot| driver.push(*slot).unwrap());
            driver.publish();
        }
        assert!(
            rounds * slots.len() >= if format == RingFormat::Split { 65_536 } else { 8 },
            "{format:?}"
        );
        // Also when the driver has made all of it available again.
        while driver.pop().unwrap().is_some() {}
        slots.iter().for_each(|slot| driver.push(*slot).unwrap());
        driver.publish();
        if format == RingFormat::Packed {
            rig.device.suppress_kicks();
        }
        assert!(was_used(&rig), "{format:?} {indirect}");
    }
}

/// Slots with a request of two buffers each.
fn driver_slots(driver: &mut DriverRing, count: u16) -> Vec<u16> {
    let buffers = [Buffer::to_device(DATA + 0x1_0000, 16), Buffer::from_device(DATA + 0x1_0010, 1)];
    (0..count).for_each(|slot| driver.describe(slot, &buffers).unwrap());
    (0..count).collect()
}

/// Suppressed kicks stay suppressed over laps of the 16-bit index; armed ones come, once.
#[test]
fn kicks_come_when_asked_for_and_only_then() {
    for format in FORMATS {
        for event_idx in [false, true] {
            let mut rig = Rig::new(layout(format, 8, event_idx, false));
            let mut driver = rig.driver(2, 2);
            driver
                .describe(0, &[Buffer::to_device(DATA, 16), Buffer::from_device(DATA + 16, 1)])
                .unwrap();
            rig.device.suppress_kicks();
            let round = |rig: &mut Rig, driver: &mut DriverRing| {
                driver.push(0).unwrap();
                driver.publish();
                let kick = driver.kick_wanted();
                let token = rig.pop().unwrap().unwrap();
                rig.device.complete(token, 1);
                rig.device.publish();
                rig.device.keep_suppressed();
                driver.pop().unwrap().unwrap();
                kick
            };
            for lap in 0..200_000 {
                assert!(
                    !round(&mut rig, &mut driver),
                    "{format:?} event_idx {event_idx} lap {lap}"
                );
            }
            assert!(!rig.device.arm_kicks(&rig.memory).unwrap(), "nothing is there yet");
            assert!(round(&mut rig, &mut driver), "{format:?} event_idx {event_idx}");
            rig.device.suppress_kicks();
            assert!(!round(&mut rig, &mut driver));
            driver.push(0).unwrap();
            driver.publish();
            assert!(
                rig.device.arm_kicks(&rig.memory).unwrap(),
                "what came before arming is seen by it"
            );
        }
    }
}

/// The driver looks whether a kick is wanted after it has published requests: by then the device
/// may have done them.
#[test]
fn no_kick_is_wanted_for_what_a_polling_device_has_done_already() {
    for format in FORMATS {
        for requests in [1, 2] {
            let mut rig = Rig::new(layout(format, 8, true, false));
            let mut driver = rig.driver(2, 2);
            for slot in 0..2 {
                driver
                    .describe(
                        slot,
                        &[Buffer::to_device(DATA, 16), Buffer::from_device(DATA + 16, 1)],
                    )
                    .unwrap();
            }
            rig.device.suppress_kicks();
            for lap in 0..200_000 {
                (0..requests).for_each(|slot| driver.push(slot).unwrap());
                driver.publish();
                for _ in 0..requests {
                    let token = rig.pop().unwrap().unwrap();
                    rig.device.complete(token, 1);
                }
                rig.device.publish();
                rig.device.keep_suppressed();
                assert!(!driver.kick_wanted(), "{format:?}, {requests} at once, lap {lap}");
                assert!((0..requests).all(|_| driver.pop().unwrap().is_some()));
            }
        }
    }
}

#[test]
fn calls_are_raised_when_asked_for_and_only_then() {
    for format in FORMATS {
        for event_idx in [false, true] {
            let mut rig = Rig::new(layout(format, 8, event_idx, false));
            let mut driver = rig.driver(2, 2);
            driver
                .describe(0, &[Buffer::to_device(DATA, 16), Buffer::from_device(DATA + 16, 1)])
                .unwrap();
            let round = |rig: &mut Rig, driver: &mut DriverRing| {
                driver.push(0).unwrap();
                driver.publish();
                let token = rig.pop().unwrap().unwrap();
                rig.device.complete(token, 1);
                rig.device.publish();
                let call = rig.device.take_call();
                driver.pop().unwrap().unwrap();
                call
            };
            driver.suppress_calls();
            for _ in 0..1_000 {
                assert!(!round(&mut rig, &mut driver), "{format:?} event_idx {event_idx}");
            }
            for _ in 0..1_000 {
                assert!(!driver.arm_calls());
                assert!(round(&mut rig, &mut driver), "{format:?} event_idx {event_idx}");
            }
            assert!(!rig.device.take_call(), "nothing new was completed");
        }
    }
}

/// A device that considers calls seldom may have gone round a packed ring more than once meanwhile.
#[test]
fn a_call_is_not_lost_over_laps() {
    for format in FORMATS {
        let mut rig = Rig::new(layout(format, 4, true, false));
        let mut driver = rig.driver(2, 2);
        driver
            .describe(0, &[Buffer::to_device(DATA, 16), Buffer::from_device(DATA + 16, 1)])
            .unwrap();
        for rounds in 1..20 {
            assert!(!driver.arm_calls());
            for _ in 0..rounds {
                driver.push(0).unwrap();
                driver.publish();
                let token = rig.pop().unwrap().unwrap();
                rig.device.complete(token, 1);
                rig.device.publish();
                driver.pop().unwrap().unwrap();
            }
            assert!(rig.device.take_call(), "{format:?}, {rounds} rounds");
        }
    }
}

/// A lie, what it is told with, and the reason that the device gives for stopping.
type Lie = (&'static str, fn(&RawRing, &GuestMemory), fn(&RingError) -> bool);

fn buffer(address: u64, len_bytes: u32, more: u16, next: u16) -> RawDescriptor {
    RawDescriptor { address, len_bytes, flags: more, next_or_id: next }
}

/// Writes a descriptor table of the split format into guest memory.
fn table(memory: &GuestMemory, entries: &[(u64, u32, u16, u16)]) {
    let mut bytes = Vec::new();
    for (address, len, flags, next) in entries {
        bytes.extend(address.to_le_bytes());
        bytes.extend(len.to_le_bytes());
        bytes.extend(flags.to_le_bytes());
        bytes.extend(next.to_le_bytes());
    }
    memory.write_slice(GuestAddress(DATA), &bytes, &mut Default::default()).unwrap();
}

const SPLIT_LIES: &[Lie] = &[
    (
        "the available index jumps",
        |ring, _| ring.set_available_index(9),
        |error| matches!(error, RingError::IndexJump { to: 9, size: 8, .. }),
    ),
    (
        "the available index runs backwards",
        |ring, _| ring.set_available_index(u16::MAX),
        |error| matches!(error, RingError::IndexJump { .. }),
    ),
    (
        "a head outside of the table",
        |ring, _| ring.set_available_entry(0, 8),
        |error| matches!(error, RingError::DescriptorOutOfRange { index: 8, size: 8 }),
    ),
    (
        "a next outside of the table",
        |ring, _| ring.set_descriptor(0, buffer(DATA, 16, descriptor::NEXT, 8)),
        |error| matches!(error, RingError::DescriptorOutOfRange { index: 8, size: 8 }),
    ),
    (
        "a chain that loops",
        |ring, _| ring.set_descriptor(0, buffer(DATA, 16, descriptor::NEXT, 0)),
        |error| matches!(error, RingError::ChainTooLong { limit: 16 }),
    ),
    (
        "a buffer of no bytes",
        |ring, _| ring.set_descriptor(0, buffer(DATA, 0, 0, 0)),
        |error| matches!(error, RingError::ZeroLength),
    ),
    (
        "a readable buffer behind a writable one",
        |ring, _| {
            ring.set_descriptor(0, buffer(DATA, 16, descriptor::WRITE | descriptor::NEXT, 1));
            ring.set_descriptor(1, buffer(DATA, 16, 0, 0));
        },
        |error| matches!(error, RingError::ReadableAfterWritable),
    ),
    (
        "an indirect table inside an indirect table",
        |ring, memory| {
            ring.set_descriptor(0, buffer(DATA, 16, descriptor::INDIRECT, 0));
            table(memory, &[(DATA, 16, descriptor::INDIRECT, 0)]);
        },
        |error| matches!(error, RingError::NestedIndirect),
    ),
    (
        "an indirect descriptor with a next",
        |ring, _| {
            ring.set_descriptor(0, buffer(DATA, 16, descriptor::INDIRECT | descriptor::NEXT, 1))
        },
        |error| matches!(error, RingError::IndirectWithNext),
    ),
    (
        "an indirect table of half a descriptor",
        |ring, _| ring.set_descriptor(0, buffer(DATA, 24, descriptor::INDIRECT, 0)),
        |error| matches!(error, RingError::IndirectSize { len_bytes: 24 }),
    ),
    (
        "an indirect table of nothing",
        |ring, _| ring.set_descriptor(0, buffer(DATA, 0, descriptor::INDIRECT, 0)),
        |error| matches!(error, RingError::IndirectSize { len_bytes: 0 }),
    ),
    (
        "an indirect table that loops",
        |ring, memory| {
            ring.set_descriptor(0, buffer(DATA, 32, descriptor::INDIRECT, 0));
            table(memory, &[(DATA, 16, descriptor::NEXT, 1), (DATA, 16, descriptor::NEXT, 0)]);
        },
        |error| matches!(error, RingError::ChainTooLong { .. }),
    ),
    (
        "a next outside of an indirect table",
        |ring, memory| {
            ring.set_descriptor(0, buffer(DATA, 32, descriptor::INDIRECT, 0));
            table(memory, &[(DATA, 16, descriptor::NEXT, 2), (DATA, 16, 0, 0)]);
        },
        |error| matches!(error, RingError::DescriptorOutOfRange { index: 2, size: 2 }),
    ),
    (
        "an indirect table outside of memory",
        |ring, _| ring.set_descriptor(0, buffer(MEMORY_BYTES, 16, descriptor::INDIRECT, 0)),
        |error| matches!(error, RingError::Memory(_)),
    ),
    (
        "an indirect table that runs out of the address space",
        |ring, _| ring.set_descriptor(0, buffer(u64::MAX - 7, 32, descriptor::INDIRECT, 0)),
        |error| matches!(error, RingError::Memory(_)),
    ),
];

#[test]
fn a_lying_driver_of_a_split_ring_is_named() {
    for (name, lie, expected) in SPLIT_LIES {
        let mut rig = Rig::new(layout(RingFormat::Split, 8, true, true));
        let raw = rig.raw();
        raw.set_descriptor(0, buffer(DATA, 16, 0, 0));
        raw.set_available_entry(0, 0);
        raw.set_available_index(1);
        lie(&raw, &rig.memory);
        let error = rig.pop().expect_err(name);
        assert!(expected(&error), "{name}: {error:?}");
    }
}

#[test]
fn indirect_descriptors_have_to_be_negotiated() {
    for format in FORMATS {
        let mut rig = Rig::new(layout(format, 8, true, false));
        let raw = rig.raw();
        let flags = if format == RingFormat::Packed {
            descriptor::INDIRECT | packed::AVAIL
        } else {
            descriptor::INDIRECT
        };
        raw.set_descriptor(0, buffer(DATA, 16, flags, 0));
        if format == RingFormat::Split {
            raw.set_available_index(1);
        }
        assert!(matches!(rig.pop(), Err(RingError::IndirectNotNegotiated)), "{format:?}");
    }
}

#[test]
fn more_requests_in_flight_than_the_ring_has_are_refused() {
    let mut rig = Rig::new(layout(RingFormat::Split, 8, false, false));
    let raw = rig.raw();
    raw.set_descriptor(0, buffer(DATA, 16, 0, 0));
    raw.set_available_index(8);
    for _ in 0..8 {
        let _ = rig.pop().unwrap().unwrap().into_bits();
    }
    raw.set_available_index(9);
    assert!(matches!(rig.pop(), Err(RingError::IndexJump { in_flight: 8, .. })));
}

#[test]
fn a_lying_driver_of_a_packed_ring_is_named() {
    let lies: &[Lie] = &[
        (
            "a chain longer than the ring",
            |ring, _| {
                for index in 0..8 {
                    ring.set_descriptor(
                        index,
                        buffer(DATA, 16, descriptor::NEXT | packed::AVAIL, 0),
                    );
                }
            },
            |error| matches!(error, RingError::Overcommitted { size: 8 }),
        ),
        (
            "a buffer of no bytes",
            |ring, _| ring.set_descriptor(0, buffer(DATA, 0, packed::AVAIL, 0)),
            |error| matches!(error, RingError::ZeroLength),
        ),
        (
            "an indirect descriptor inside a chain",
            |ring, _| {
                ring.set_descriptor(1, buffer(DATA, 16, packed::AVAIL | descriptor::INDIRECT, 0));
                ring.set_descriptor(0, buffer(DATA, 16, packed::AVAIL | descriptor::NEXT, 0));
            },
            |error| matches!(error, RingError::IndirectWithNext),
        ),
        (
            "an indirect table inside an indirect table",
            |ring, memory| {
                // Packed descriptors have id and flags where split ones have flags and next.
                table(memory, &[(DATA, 16, 0, descriptor::INDIRECT)]);
                ring.set_descriptor(0, buffer(DATA, 16, packed::AVAIL | descriptor::INDIRECT, 0));
            },
            |error| matches!(error, RingError::NestedIndirect),
        ),
        (
            "an indirect table larger than a request may be",
            |ring, memory| {
                table(memory, &[(DATA, 16, 0, 0); 17]);
                ring.set_descriptor(
                    0,
                    buffer(DATA, 17 * 16, packed::AVAIL | descriptor::INDIRECT, 0),
                );
            },
            |error| matches!(error, RingError::ChainTooLong { limit: 16 }),
        ),
    ];
    for (name, lie, expected) in lies {
        let mut rig = Rig::new(layout(RingFormat::Packed, 8, true, true));
        lie(&rig.raw(), &rig.memory);
        let error = rig.pop().expect_err(name);
        assert!(expected(&error), "{name}: {error:?}");
    }
}

#[test]
fn impossible_layouts_are_refused() {
    let memory = memory();
    let fresh =
        |layout: &RingLayout| DeviceRing::new(&memory, layout, RingState::fresh(layout.format));
    for size in [0, 3, 32769] {
        let mut split = layout(RingFormat::Split, 8, false, false);
        split.size = size;
        assert!(matches!(fresh(&split), Err(RingError::BadSize { .. })), "{size}");
    }
    for size in [0, 32769] {
        let mut packed = layout(RingFormat::Packed, 8, false, false);
        packed.size = size;
        assert!(matches!(fresh(&packed), Err(RingError::BadSize { .. })), "{size}");
    }
    let mut outside = layout(RingFormat::Split, 8, false, false);
    outside.device_area = UserAddress(MEMORY_BYTES - 8);
    assert!(matches!(fresh(&outside), Err(RingError::Memory(_))));
    let mut crooked = layout(RingFormat::Split, 8, false, false);
    crooked.descriptor_area = UserAddress(8);
    assert!(matches!(fresh(&crooked), Err(RingError::Memory(_))));
    let packed = layout(RingFormat::Packed, 8, false, false);
    let state = RingState { next_avail: 8, next_used: 0 };
    assert!(matches!(DeviceRing::new(&memory, &packed, state), Err(RingError::BadPosition { .. })));
}

proptest::proptest! {
    /// For any bytes in the ring's memory, the device ends its walk and stays in bounds.
    #[test]
    fn garbage_is_survived(
        format in 0_usize..2,
        bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..600),
        steps in 1_usize..40,
    ) {
        let mut rig = Rig::new(layout(FORMATS[format], 8, true, true));
        rig.memory.write_slice(GuestAddress(0), &bytes, &mut Default::default()).unwrap();
        for step in 0..steps {
            match rig.pop() {
                Ok(Some(token)) => rig.device.complete(token, 1),
                Ok(None) => {}
                Err(_) => break,
            }
            if step % 3 == 0 {
                rig.device.publish();
                rig.device.take_call();
            }
        }
    }
}
