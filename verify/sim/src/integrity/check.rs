//! The store that a power cut leaves.

use std::sync::Arc;

use sidecore_block::{Batch, BlockChannel, BlockDevice, BlockRequest, Operation, Tag};
use sidecore_memory::{GuestAddress, RegionHint, SharedPages};
use sidecore_reactor::CoreContext;
use sidecore_stage_integrity::{IntegrityStore, OpenOptions, Rule};
use sidecore_units::Nanos;

use crate::Random;
use crate::mirror::legs::{LegStore, Order};
use crate::mirror::model::{Model, stamp_of};
use crate::volumes::disk::{SECTOR_BYTES, SimDisk};

/// Polls within which a read has to end.
const MOST_POLLS: usize = 2_000;

/// Opens the stage.
pub(super) fn open(store: &LegStore, neglect: Option<Rule>) -> Result<IntegrityStore, String> {
    let options = OpenOptions { neglect, ..OpenOptions::default() };
    IntegrityStore::open(Arc::new(store.clone()), "simulated", &options)
        .map_err(|error| format!("open: {error}"))
}

/// The blocks of a store that a power cut has left: `None` for one that is bad.
pub(super) struct Found {
    pub(super) blocks: Vec<Option<Vec<u8>>>,
    /// The store after it was opened.
    pub(super) image: Vec<u8>,
}

/// Opens what a power cut has left, and reads all blocks, one by one.
pub(super) fn look(
    image: &[u8],
    neglect: Option<Rule>,
    random: &mut Random,
) -> Result<Found, String> {
    let luck = Random::new(random.below(u64::MAX));
    let store = LegStore::new(0, SimDisk::new(image.to_vec()), &Order::default(), luck);
    let opened = open(&store, neglect)?;
    Ok(Found { blocks: read_all(&opened)?, image: store.disk.bytes() })
}

/// Reads all blocks, one by one: `None` for one that is bad.
pub(super) fn read_all(opened: &IntegrityStore) -> Result<Vec<Option<Vec<u8>>>, String> {
    let geometry = opened.geometry();
    let channel = opened.open_channel(&CoreContext::default(), 1);
    let mut channel = channel.map_err(|error| error.to_string())?;
    let len_bytes = u64::from(geometry.block_bytes);
    let pages = SharedPages::new("reader", len_bytes as usize).map_err(|at| at.to_string())?;
    (0..geometry.capacity_bytes / len_bytes)
        .map(|block| read(&mut *channel, &pages, (block * len_bytes, len_bytes)))
        .collect()
}

fn read(
    channel: &mut dyn BlockChannel,
    pages: &SharedPages,
    (offset_bytes, len_bytes): (u64, u64),
) -> Result<Option<Vec<u8>>, String> {
    let mut request = BlockRequest::blank(1);
    request.operation = Operation::Read;
    (request.offset_bytes, request.len_bytes) = (offset_bytes, len_bytes);
    request.segments.bind(pages.memory());
    let hint = &mut RegionHint::default();
    request.segments.push(GuestAddress(0), len_bytes, hint).map_err(|error| error.to_string())?;
    let is_read = run(channel, request)?;
    let mut bytes = vec![0; len_bytes as usize];
    let copied = pages.memory().read_slice(GuestAddress(0), &mut bytes, hint);
    copied.map_err(|error| error.to_string())?;
    Ok(is_read.then_some(bytes))
}

/// Flushes the store by a channel of its own, as the daemon does. Returns whether it has succeeded.
pub(super) fn flush(opened: &IntegrityStore) -> Result<bool, String> {
    let channel = opened.open_channel(&CoreContext::default(), 1);
    let mut request = BlockRequest::blank(0);
    request.operation = Operation::Flush;
    run(&mut *channel.map_err(|error| error.to_string())?, request)
}

/// Carries out a request. Returns whether it has succeeded.
fn run(channel: &mut dyn BlockChannel, mut request: Box<BlockRequest>) -> Result<bool, String> {
    request.tag = Some(Tag::from_bits(0));
    let (mut batch, mut completed) = (vec![request], Batch::new());
    for now in 0..MOST_POLLS {
        channel.exchange(Nanos(now as u64), &mut batch, &mut completed);
        let Some(mut request) = completed.pop() else { continue };
        request.tag.take().map(Tag::into_bits);
        return Ok(request.result.is_ok());
    }
    Err("a request does not end".to_owned())
}

/// The stamps of a block's sectors.
pub(super) fn stamps(block: &[u8]) -> Vec<Option<u64>> {
    block.chunks_exact(SECTOR_BYTES).map(stamp_of).collect()
}

/// Checks what was read from a store with these data, after a power cut at this time. Returns the
/// number of torn blocks.
pub(super) fn check(
    model: &Model,
    data: &[u8],
    blocks: &[Option<Vec<u8>>],
    at: u64,
) -> Result<u64, String> {
    let block_bytes = data.len() / blocks.len();
    let mut torn = 0;
    for (block, (found, there)) in blocks.iter().zip(data.chunks_exact(block_bytes)).enumerate() {
        let stamps = stamps(there);
        let first = block * stamps.len();
        let is_whole = model.are_of_one(first, &stamps);
        torn += u64::from(!is_whole);
        match found {
            Some(found) if found != there => {
                return Err(format!("block {block} is read as other bytes than the store has"));
            }
            Some(_) if !is_whole => {
                return Err(format!("block {block} is torn, and read: {stamps:x?}"));
            }
            Some(_) => {
                for (index, stamp) in stamps.iter().enumerate() {
                    model.check_cut(first + index, *stamp, at)?;
                }
            }
            None if is_whole => {
                return Err(format!("block {block} is whole, and called bad: {stamps:x?}"));
            }
            None => {}
        }
    }
    Ok(torn)
}
