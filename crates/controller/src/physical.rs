//! The store as the hypervisor side uses it: one synchronous request at a time.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::MemfdFlags;
use rustix::io::Errno;
use sidecore_block::{
    Batch, BlockChannel, BlockDevice, BlockError, BlockRequest, Next, Operation, Tag,
};
use sidecore_memory::{GuestAddress, GuestMemory, RegionHint, RegionSpec, UserAddress};
use sidecore_reactor::CoreContext;
use sidecore_units::Nanos;
use sidecore_volume::Disk;

/// The largest request in bytes.
const BUFFER_BYTES: u64 = 1 << 20;

/// A block device as a [`Disk`]. Only the thread that opened it can use it.
///
/// Offsets and sizes are multiples of the device's block size.
pub struct PhysicalDisk {
    store: Arc<dyn BlockDevice>,
    channel: Box<dyn BlockChannel>,
    size_bytes: u64,
    discards: bool,
    buffer: GuestMemory,
    hint: RegionHint,
    request: Option<Box<BlockRequest>>,
    batch: Batch,
    opened_at: Instant,
}

impl PhysicalDisk {
    /// Opens a channel to `store` on this thread.
    ///
    /// # Errors
    /// There is no memory for the buffer, or the store cannot open a channel.
    pub fn open(store: &Arc<dyn BlockDevice>) -> io::Result<Self> {
        let file = rustix::fs::memfd_create("sidecore-hypervisor", MemfdFlags::CLOEXEC)?;
        rustix::fs::ftruncate(&file, BUFFER_BYTES)?;
        let region = RegionSpec {
            guest_address: GuestAddress(0),
            user_address: UserAddress(0),
            len_bytes: BUFFER_BYTES,
            file,
            file_offset_bytes: 0,
        };
        let buffer = GuestMemory::map(vec![region]).map_err(io::Error::other)?;
        let mut channel = store.open_channel(&CoreContext::default(), 1)?;
        channel.attach_memory(&buffer)?;
        let geometry = store.geometry();
        Ok(Self {
            store: Arc::clone(store),
            channel,
            size_bytes: geometry.capacity_bytes,
            discards: geometry.discard,
            buffer,
            hint: RegionHint::default(),
            request: Some(BlockRequest::blank(1)),
            batch: Batch::with_capacity(1),
            opened_at: Instant::now(),
        })
    }

    fn run(&mut self, operation: Operation, offset_bytes: u64, len_bytes: u64) -> io::Result<()> {
        let end = offset_bytes.checked_add(len_bytes).filter(|end| *end <= self.size_bytes);
        end.ok_or_else(|| io::Error::new(io::ErrorKind::UnexpectedEof, "outside of the store"))?;
        let mut request = self.request.take().unwrap_or_else(|| BlockRequest::blank(1));
        request.operation = operation;
        request.offset_bytes = offset_bytes;
        request.len_bytes = len_bytes;
        request.result = Ok(());
        request.taken_at = self.now();
        request.segments.bind(&self.buffer);
        if matches!(operation, Operation::Read | Operation::Write) {
            request
                .segments
                .push(GuestAddress(0), len_bytes, &mut self.hint)
                .map_err(io::Error::other)?;
        }
        request.tag = Some(Tag::from_bits(0));
        self.batch.push(request);
        let mut completed = Batch::new();
        loop {
            let now = self.now();
            self.channel.exchange(now, &mut self.batch, &mut completed);
            if let Some(mut request) = completed.pop() {
                request.tag.take().map(Tag::into_bits);
                let result = request.result;
                self.request = Some(request);
                return result.map_err(into_io_error);
            }
            self.wait()?;
        }
    }

    /// Sleeps until the channel may have a completion. There is no timeout: until then the channel
    /// owns the request.
    fn wait(&self) -> io::Result<()> {
        let timeout = match self.channel.readiness().next {
            Next::Now => return Ok(()),
            Next::At(at) => Duration::from(at.since(self.now())),
            Next::OnWake => Duration::from_secs(1),
        };
        let Some(wake) = self.channel.wake_fd() else {
            std::thread::sleep(timeout);
            return Ok(());
        };
        let timeout = Timespec {
            tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(1),
            tv_nsec: i64::from(timeout.subsec_nanos()),
        };
        match rustix::event::poll(&mut [PollFd::new(&wake.as_fd(), PollFlags::IN)], Some(&timeout))
        {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn now(&self) -> Nanos {
        Nanos::from(self.opened_at.elapsed())
    }
}

impl Disk for PhysicalDisk {
    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn read(&mut self, offset_bytes: u64, buffer: &mut [u8]) -> io::Result<()> {
        let mut at = offset_bytes;
        for piece in buffer.chunks_mut(BUFFER_BYTES as usize) {
            self.run(Operation::Read, at, piece.len() as u64)?;
            self.buffer
                .read_slice(GuestAddress(0), piece, &mut self.hint)
                .map_err(io::Error::other)?;
            at = at.saturating_add(piece.len() as u64);
        }
        Ok(())
    }

    fn write(&mut self, offset_bytes: u64, data: &[u8]) -> io::Result<()> {
        let mut at = offset_bytes;
        for piece in data.chunks(BUFFER_BYTES as usize) {
            self.buffer
                .write_slice(GuestAddress(0), piece, &mut self.hint)
                .map_err(io::Error::other)?;
            self.run(Operation::Write, at, piece.len() as u64)?;
            at = at.saturating_add(piece.len() as u64);
        }
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.run(Operation::Flush, 0, 0)
    }

    fn allocate(&mut self, offset_bytes: u64, len_bytes: u64) -> io::Result<()> {
        self.store.allocate(offset_bytes, len_bytes)
    }

    fn discard(&mut self, offset_bytes: u64, len_bytes: u64) -> io::Result<()> {
        if !self.discards {
            return Ok(());
        }
        self.run(Operation::Discard, offset_bytes, len_bytes)
    }
}

fn into_io_error(error: BlockError) -> io::Error {
    match error {
        BlockError::Io { errno } => io::Error::from_raw_os_error(errno),
        BlockError::NoSpace => io::Error::from(io::ErrorKind::StorageFull),
        BlockError::ReadOnly => io::Error::from(io::ErrorKind::ReadOnlyFilesystem),
        other => io::Error::other(other),
    }
}
