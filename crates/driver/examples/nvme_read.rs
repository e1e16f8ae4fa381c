//! Reads an NVMe volume by offset into the application's own buffer: `nvme_read SOCKET
//! [OFFSET_BYTES [LEN_BYTES]]`.
//!
//! No kernel is on the way once the queue is there: the command is a store into memory that the
//! controller polls, the data arrives in the buffer, and so does the completion (thesis, 5.4:
//! direct access from user space). The bytes that were asked for go to standard output.
#![forbid(unsafe_code)]

use std::io::Write as _;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use sidecore_driver::{NvmeClient, NvmeOptions, NvmeQueue};
use sidecore_units::{SECTOR_BYTES, Sector};

/// Bytes of one request.
const REQUEST_BYTES: u64 = 128 << 10;

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let socket = arguments.next().context("usage: nvme_read SOCKET [OFFSET_BYTES [LEN_BYTES]]")?;
    let mut number = |name, default: u64| match arguments.next() {
        None => Ok(default),
        Some(text) => text.parse().with_context(|| format!("{name} is a number of bytes")),
    };
    let (offset, len) = (number("OFFSET_BYTES", 0)?, number("LEN_BYTES", 4096)?);

    let options = NvmeOptions { slot_bytes: REQUEST_BYTES as u32, ..NvmeOptions::default() };
    let mut client = NvmeClient::connect(socket, &options)?;
    let namespace = client.namespace();
    let end = offset.checked_add(len).filter(|end| *end <= namespace.len_bytes());
    let end = end.with_context(|| format!("the volume has {} bytes", namespace.len_bytes()))?;

    // Whole blocks around what was asked for.
    let block = u64::from(namespace.block_bytes);
    let (first, last) = (offset / block * block, end.next_multiple_of(block));
    let buffer = client.new_buffer(usize::try_from(last - first)?.max(1))?;
    let queue = client.queue(0).context("the controller has no queue")?;
    read(queue, first, last, buffer.address())?;

    let mut bytes = vec![0; usize::try_from(len)?];
    buffer.read(usize::try_from(offset - first)?, &mut bytes);
    std::io::stdout().write_all(&bytes)?;
    client.release_buffer(buffer)?;
    Ok(())
}

/// Reads bytes `first` to `last`, whole blocks, to `address`, with as many requests at once as
/// there are slots.
fn read(queue: &mut NvmeQueue, first: u64, last: u64, address: u64) -> Result<()> {
    let mut pieces = (first..last).step_by(usize::try_from(REQUEST_BYTES)?).peekable();
    let mut completions = Vec::with_capacity(usize::from(queue.slots()));
    while pieces.peek().is_some() || queue.in_flight() > 0 {
        while let Some(at) = pieces.peek().copied()
            && let Some(slot) = queue.take_slot()
        {
            let len_bytes = u32::try_from(REQUEST_BYTES.min(last - at))?;
            queue.submit_read_at(
                slot,
                Sector(at / SECTOR_BYTES),
                address + (at - first),
                len_bytes,
            )?;
            pieces.next();
        }
        queue.publish()?;
        ensure!(queue.wait(Duration::from_secs(5))?, "the controller does not answer");
        queue.poll_completions(&mut completions)?;
        for completion in completions.drain(..) {
            ensure!(completion.status.is_ok(), "the controller says: {}", completion.status);
            queue.release_slot(completion.slot);
        }
    }
    Ok(())
}
