use std::collections::HashMap;

use proptest::prelude::*;
use sidecore_memory::{GuestAddress, GuestMemory, RegionHint, RegionSpec, Segments, UserAddress};

use super::*;

const PAGES: u64 = 1024;
const LIST: u64 = 0x10_0000;

/// 4 MiB of guest memory in two regions with a gap between them, each page filled with its number.
fn memory() -> GuestMemory {
    let region = |first: u64, pages: u64| {
        let file = std::fs::File::from(
            rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).unwrap(),
        );
        file.set_len(pages * PAGE_BYTES).unwrap();
        RegionSpec {
            guest_address: GuestAddress(first * PAGE_BYTES),
            user_address: UserAddress(first * PAGE_BYTES),
            len_bytes: pages * PAGE_BYTES,
            file: file.into(),
            file_offset_bytes: 0,
        }
    };
    GuestMemory::map(vec![region(0, PAGES / 2), region(PAGES, PAGES / 2)]).unwrap()
}

fn write(memory: &GuestMemory, address: u64, bytes: &[u8]) {
    memory.write_slice(GuestAddress(address), bytes, &mut RegionHint::default()).unwrap();
}

fn write_list(memory: &GuestMemory, address: u64, entries: &[u64]) {
    let bytes: Vec<u8> = entries.iter().flat_map(|entry| entry.to_le_bytes()).collect();
    write(memory, address, &bytes);
}

/// The memory that a pointer leads to: the bytes there, in order, and the number of pieces.
fn gathered(
    memory: &GuestMemory,
    command: &Command,
    len_bytes: u64,
) -> Result<(Vec<u8>, usize), Status> {
    let mut segments = Segments::with_capacity(MAX_PIECES);
    let mut hint = RegionHint::default();
    gather(command, len_bytes, Direction::FromGuest, memory, &mut hint, &mut segments)?;
    assert_eq!(segments.len_bytes(), len_bytes);
    let mut bytes = vec![0; len_bytes as usize];
    assert_eq!(segments.copy_to_slice(0, &mut bytes), bytes.len());
    Ok((bytes, segments.pieces().len()))
}

fn prps(prp1: u64, prp2: u64) -> Command {
    Command::build(2, 0, 1).with_prps(prp1, prp2)
}

/// Bytes that say where they are.
fn number(memory: &GuestMemory, address: u64, len_bytes: u64) -> Vec<u8> {
    let bytes: Vec<u8> =
        (0..len_bytes).map(|at| ((address + at) / 64 + (address + at)) as u8).collect();
    write(memory, address, &bytes);
    bytes
}

#[test]
fn one_page_and_two() {
    let memory = memory();
    let first = number(&memory, 0x3804, 0x7FC);
    assert_eq!(
        gathered(&memory, &prps(0x3804, 0xDEAD_BEEF), 0x7FC),
        Ok((first.clone(), 1)),
        "entry 2 is reserved then"
    );
    let second = number(&memory, 0x9000, 0x1000);
    assert_eq!(gathered(&memory, &prps(0x3804, 0x9000), 0x17FC), Ok(([first, second].concat(), 2)));
    let third = number(&memory, 0x3000, 0x1800);
    assert_eq!(
        gathered(&memory, &prps(0x3000, 0x4000), 0x1800),
        Ok((third, 1)),
        "pages in a row are one piece"
    );
}

#[test]
fn offsets_that_are_not_allowed() {
    let memory = memory();
    for command in [prps(0x3002, 0), prps(0x3000, 0x9200), prps(0x3000, 0x9001)] {
        assert_eq!(gathered(&memory, &command, 0x1800), Err(Status::INVALID_PRP_OFFSET));
    }
    // A list may begin at any multiple of eight, and its entries are whole pages.
    assert_eq!(gathered(&memory, &prps(0x3000, LIST + 4), 0x4000), Err(Status::INVALID_PRP_OFFSET));
    write_list(&memory, LIST, &[0x9000, 0xA008, 0xB000]);
    assert_eq!(gathered(&memory, &prps(0x3000, LIST), 0x4000), Err(Status::INVALID_PRP_OFFSET));
}

#[test]
fn memory_that_is_not_there() {
    let memory = memory();
    let nowhere = PAGES / 2 * PAGE_BYTES;
    assert_eq!(gathered(&memory, &prps(nowhere, 0), 512), Err(Status::DATA_TRANSFER_ERROR));
    assert_eq!(gathered(&memory, &prps(0x3000, nowhere), 0x1800), Err(Status::DATA_TRANSFER_ERROR));
    assert_eq!(gathered(&memory, &prps(0x3000, nowhere), 0x4000), Err(Status::DATA_TRANSFER_ERROR));
    assert_eq!(gathered(&memory, &prps(!0xFFF, 0), 4096), Err(Status::DATA_TRANSFER_ERROR));
    assert_eq!(gathered(&memory, &prps(0x3000, !0xFFF), 0x4000), Err(Status::DATA_TRANSFER_ERROR));
    write_list(&memory, LIST, &[0x9000, nowhere, 0xB000]);
    assert_eq!(gathered(&memory, &prps(0x3000, LIST), 0x4000), Err(Status::DATA_TRANSFER_ERROR));
}

#[test]
fn a_list_that_ends_with_its_page_does_not_go_on() {
    let memory = memory();
    let list = LIST + PAGE_BYTES - 16;
    write_list(&memory, list, &[0x9000, 0x7000]);
    let expected = [
        number(&memory, 0x5000, 0x1000),
        number(&memory, 0x9000, 0x1000),
        number(&memory, 0x7000, 0x200),
    ];
    assert_eq!(gathered(&memory, &prps(0x5000, list), 0x2200), Ok((expected.concat(), 3)));
    // With one page more, its last entry leads on, to the beginning of a page.
    let expected = [
        number(&memory, 0x9000, 0x1000),
        number(&memory, 0xB000, 0x1000),
        number(&memory, 0xD000, 0x200),
    ];
    write_list(&memory, list, &[0x9000, 0x20_0000 - 0x1000]);
    write_list(&memory, 0x20_0000 - 0x1000, &[0xB000, 0xD000]);
    let expected = [number(&memory, 0x5000, 0x1000), expected.concat()].concat();
    assert_eq!(gathered(&memory, &prps(0x5000, list), 0x3200), Ok((expected, 4)));
    write_list(&memory, list, &[0x9000, 0x20_0000 - 0x1000 + 8]);
    assert_eq!(gathered(&memory, &prps(0x5000, list), 0x3200), Err(Status::INVALID_PRP_OFFSET));
}

#[test]
fn a_list_that_leads_to_itself_ends() {
    let memory = memory();
    let list = LIST + PAGE_BYTES - 8;
    // The page that it leads to is one of entries that all lead there again.
    write_list(&memory, LIST, &[LIST; 512]);
    assert!(gathered(&memory, &prps(0, list), MAX_TRANSFER_BYTES).is_ok());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// A transfer with pages in any order, and a list at any place and cut at any place.
    #[test]
    fn whatever_the_list_says(
        first_offset in 0_u64..1024,
        len_bytes in 1_u64..=MAX_TRANSFER_BYTES / 512,
        start in 0_u64..512,
        seed in any::<u64>(),
    ) {
        let memory = memory();
        let (offset, len_bytes) = (first_offset * 4, len_bytes * 512);
        // Data is in the upper region, lists are in the lower one.
        let page = |index: u64| (PAGES + index.wrapping_mul(seed | 1) % (PAGES / 2)) * PAGE_BYTES;
        let pages = (offset + len_bytes).div_ceil(PAGE_BYTES);
        let mut contents = HashMap::new();
        let mut expected = Vec::new();
        for index in 0..pages {
            let place = page(index);
            let bytes = contents.entry(place).or_insert_with(|| number(&memory, place, PAGE_BYTES));
            expected.extend_from_slice(bytes);
        }
        let expected = &expected[offset as usize..(offset + len_bytes) as usize];
        let prp2 = match pages {
            0 | 1 => seed,
            2 => page(1),
            _ => {
                let mut at = LIST + start * 8;
                let mut next_list = LIST + PAGE_BYTES;
                for index in 1..pages {
                    if at % PAGE_BYTES == PAGE_BYTES - 8 && index + 1 < pages {
                        write_list(&memory, at, &[next_list]);
                        at = next_list;
                        next_list += PAGE_BYTES;
                    }
                    write_list(&memory, at, &[page(index)]);
                    at += 8;
                }
                LIST + start * 8
            }
        };
        let (bytes, pieces) = gathered(&memory, &prps(page(0) + offset, prp2), len_bytes).unwrap();
        prop_assert!(bytes == expected);
        prop_assert!(pieces as u64 <= pages);
    }
}

const DATA: u8 = 0x00;
const BUCKET: u8 = 0x10;
const SEGMENT: u8 = 0x20;
const LAST: u8 = 0x30;

fn descriptor(kind: u8, address: u64, len_bytes: u32) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&address.to_le_bytes());
    bytes[8..12].copy_from_slice(&len_bytes.to_le_bytes());
    bytes[15] = kind;
    bytes
}

fn sgl(descriptor: [u8; 16]) -> Command {
    let command = Command::build(2, 0, 1).with_dword(0, 2 | 1 << 14);
    let word = |at: usize| u64::from_le_bytes(descriptor[at..at + 8].try_into().unwrap());
    command.with_prps(word(0), word(8))
}

fn write_segment(memory: &GuestMemory, address: u64, descriptors: &[[u8; 16]]) {
    write(memory, address, &descriptors.concat());
}

#[test]
fn a_data_block_and_segments_of_them() {
    let memory = memory();
    let one = number(&memory, 0x3003, 700);
    assert_eq!(gathered(&memory, &sgl(descriptor(DATA, 0x3003, 700)), 700), Ok((one.clone(), 1)));
    let two = number(&memory, 0x7FFF, 2);
    let three = number(&memory, 0x1_0001, 322);
    let last = 0x2_0000;
    write_segment(&memory, last, &[descriptor(DATA, 0, 0), descriptor(DATA, 0x1_0001, 322)]);
    let all = [one, two, three].concat();
    let blocks = [descriptor(DATA, 0x3003, 700), descriptor(DATA, 0x7FFF, 2)];
    write_segment(&memory, LIST, &[blocks[0], blocks[1], descriptor(LAST, last, 32)]);
    assert_eq!(gathered(&memory, &sgl(descriptor(SEGMENT, LIST, 48)), 1024), Ok((all, 3)));
    // In a source, a bit bucket stands for nothing.
    write_segment(&memory, LIST, &[blocks[0], descriptor(BUCKET, 0, 77), blocks[1]]);
    assert!(gathered(&memory, &sgl(descriptor(LAST, LIST, 48)), 702).is_ok());
}

#[test]
fn what_is_wrong_with_an_sgl_has_a_name() {
    let memory = memory();
    let block = descriptor(DATA, 0x3000, 512);
    let status = |first: [u8; 16]| gathered(&memory, &sgl(first), 1024).unwrap_err();
    for kind in [0x01, 0x40, 0x4F, 0x50, 0xF0, 0x31] {
        assert_eq!(status(descriptor(kind, 0x3000, 1024)), Status::INVALID_SGL_TYPE, "{kind:#x}");
    }
    assert_eq!(status(descriptor(DATA, 0x3000, 1023)), Status::INVALID_DATA_SGL_LENGTH);
    assert_eq!(status(descriptor(DATA, PAGES / 2 * PAGE_BYTES, 1024)), Status::DATA_TRANSFER_ERROR);
    assert_eq!(status(descriptor(LAST, PAGES / 2 * PAGE_BYTES, 32)), Status::DATA_TRANSFER_ERROR);
    for len_bytes in [0, 8, 17] {
        assert_eq!(status(descriptor(LAST, LIST, len_bytes)), Status::INVALID_SGL_SEGMENT);
    }
    // A segment that leads nowhere, and a last one that leads on.
    write_segment(&memory, LIST, &[block, block]);
    assert_eq!(status(descriptor(SEGMENT, LIST, 32)), Status::INVALID_SGL_SEGMENT);
    write_segment(&memory, LIST, &[block, descriptor(LAST, LIST, 16)]);
    assert_eq!(status(descriptor(LAST, LIST, 32)), Status::INVALID_SGL_SEGMENT);
    // One that leads on before its end.
    write_segment(&memory, LIST, &[descriptor(LAST, LIST, 16), block]);
    assert_eq!(status(descriptor(SEGMENT, LIST, 32)), Status::INVALID_SGL_COUNT);
    // More descriptors than there may be, and a circle of segments.
    assert_eq!(status(descriptor(LAST, LIST, 16 * 1025)), Status::INVALID_SGL_COUNT);
    assert_eq!(status(descriptor(LAST, LIST, !15)), Status::INVALID_SGL_COUNT);
    write_segment(&memory, LIST, &[descriptor(DATA, 0, 0), descriptor(SEGMENT, LIST, 32)]);
    assert_eq!(status(descriptor(SEGMENT, LIST, 32)), Status::INVALID_SGL_COUNT);
    // More pieces than there is room for.
    write_segment(&memory, LIST, &[descriptor(DATA, 0x3000, 1); MAX_PIECES + 1]);
    assert_eq!(
        status(descriptor(LAST, LIST, 16 * (MAX_PIECES as u32 + 1))),
        Status::INVALID_SGL_COUNT
    );
    let reserved = Command::build(2, 0, 1).with_dword(0, 2 | 3 << 14);
    assert_eq!(gathered(&memory, &reserved, 512), Err(Status::INVALID_FIELD));
}

/// Linux passes an application's buffer through as it is, whatever the command transfers of it.
#[test]
fn what_is_beyond_the_transfer_is_left_alone() {
    let memory = memory();
    let data = number(&memory, 0x3000, 1024);
    assert_eq!(
        gathered(&memory, &sgl(descriptor(DATA, 0x3000, 1025)), 1024),
        Ok((data.clone(), 1))
    );
    // Also where there is no memory.
    let nowhere = descriptor(DATA, PAGES / 2 * PAGE_BYTES, 512);
    write_segment(
        &memory,
        LIST,
        &[descriptor(DATA, 0x3000, 2048), nowhere, descriptor(BUCKET, 0, 77)],
    );
    assert_eq!(gathered(&memory, &sgl(descriptor(LAST, LIST, 48)), 1024), Ok((data, 1)));
    // The rest of the list is looked at nevertheless, and is one.
    write_segment(&memory, LIST, &[descriptor(DATA, 0x3000, 2048), descriptor(SEGMENT, LIST, 32)]);
    assert_eq!(
        gathered(&memory, &sgl(descriptor(LAST, LIST, 32)), 1024),
        Err(Status::INVALID_SGL_SEGMENT)
    );
    // A bit bucket may be longer, too.
    let mut segments = Segments::with_capacity(MAX_PIECES);
    let mut holes = Vec::with_capacity(MAX_HOLES);
    write_segment(&memory, LIST, &[descriptor(DATA, 0x3000, 500), descriptor(BUCKET, 0, 100)]);
    let command = sgl(descriptor(LAST, LIST, 32));
    let hint = &mut RegionHint::default();
    gather_with_holes(&command, 512, &memory, hint, &mut segments, &mut holes).unwrap();
    assert_eq!(
        (segments.len_bytes(), holes),
        (500, vec![Hole { start_bytes: 500, len_bytes: 12 }])
    );
}

#[test]
fn bit_buckets_are_holes_in_what_is_read() {
    let memory = memory();
    let mut segments = Segments::with_capacity(MAX_PIECES);
    let mut hint = RegionHint::default();
    let mut holes = Vec::with_capacity(MAX_HOLES);
    let blocks =
        [descriptor(BUCKET, 0, 100), descriptor(DATA, 0x3000, 300), descriptor(BUCKET, 0, 112)];
    write_segment(&memory, LIST, &blocks);
    let command = sgl(descriptor(LAST, LIST, 48));
    let found = gather(&command, 512, Direction::ToGuest, &memory, &mut hint, &mut segments);
    assert_eq!(found, Ok(Gathered::HasHoles));
    gather_with_holes(&command, 512, &memory, &mut hint, &mut segments, &mut holes).unwrap();
    assert_eq!(segments.len_bytes(), 300);
    let expected =
        [Hole { start_bytes: 0, len_bytes: 100 }, Hole { start_bytes: 400, len_bytes: 112 }];
    assert_eq!(holes, expected);
    let many = [descriptor(BUCKET, 0, 1); MAX_HOLES + 1];
    write_segment(&memory, LIST, &many);
    let command = sgl(descriptor(LAST, LIST, 16 * many.len() as u32));
    let found = gather_with_holes(
        &command,
        many.len() as u64,
        &memory,
        &mut hint,
        &mut segments,
        &mut holes,
    );
    assert_eq!(found, Err(Status::INVALID_SGL_COUNT));
}
