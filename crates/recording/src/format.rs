//! Headers and records, and their bytes.

use crate::check::checksum;
use crate::read::Fault;

/// The version of the format that this crate writes and reads.
pub const VERSION: u32 = 1;

/// The size of a file's header.
pub const HEADER_BYTES: usize = 128;

/// The size of the frame in front of each record: length and check.
pub const FRAME_BYTES: usize = 12;

/// The size of a request's record without its frame and its data.
pub const REQUEST_BYTES: usize = 56;

/// The most data of a record: 64 MiB.
pub const DATA_MAX: usize = 64 << 20;

/// The most bytes of the name in a header.
pub const NAME_MAX: usize = 64;

const MAGIC: [u8; 8] = *b"sidecRec";
const NAME_AT: usize = 40;
const CHECK_AT: usize = 120;
const SMALL_BYTES: usize = 24;

const REQUEST: u8 = 1;
const GAP: u8 = 2;
const END: u8 = 3;

const HAS_CHECKSUM: u8 = 2;
const HAS_DATA: u8 = 4;
const WRITE_THROUGH: u8 = 1;

/// The data that a recording has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DataMode {
    /// None.
    #[default]
    None,
    /// Checksums of the data that was read and written.
    Checksum,
    /// The data that was written, and checksums of the data that was read.
    Full,
}

impl DataMode {
    const ALL: [Self; 3] = [Self::None, Self::Checksum, Self::Full];

    /// The word in configurations.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Checksum => "checksum",
            Self::Full => "full",
        }
    }
}

/// The beginning of a recording.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Header {
    /// The data that the recording has.
    pub data: DataMode,
    /// The size of the disk in bytes.
    pub capacity_bytes: u64,
    /// The disk's unit of reads and writes in bytes.
    pub block_bytes: u32,
    /// The time of day at time 0 of the recording, in nanoseconds since 1970.
    pub started_unix_ns: u64,
    /// The name of the disk or of its store, at most [`NAME_MAX`] bytes.
    pub name: String,
}

impl Header {
    /// The header's bytes. A name that is too long is cut off.
    #[must_use]
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut end = self.name.len().min(NAME_MAX);
        while !self.name.is_char_boundary(end) {
            end = end.saturating_sub(1);
        }
        let mut bytes = Vec::with_capacity(HEADER_BYTES);
        bytes.extend(MAGIC);
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend((self.data as u32).to_le_bytes());
        bytes.extend(self.capacity_bytes.to_le_bytes());
        bytes.extend(u64::from(self.block_bytes).to_le_bytes());
        bytes.extend(self.started_unix_ns.to_le_bytes());
        bytes.extend(self.name.as_bytes().get(..end).unwrap_or_default());
        bytes.resize(CHECK_AT, 0);
        let check = checksum(&bytes);
        bytes.extend(check.to_le_bytes());
        let mut header = [0; HEADER_BYTES];
        header.iter_mut().zip(bytes).for_each(|(to, from)| *to = from);
        header
    }

    pub(crate) fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self, Fault> {
        let mut fields = Fields(bytes);
        if fields.array::<8>()? != MAGIC {
            return Err(Fault::NoRecording);
        }
        let version = fields.u32()?;
        if version != VERSION {
            return Err(Fault::Version(version));
        }
        let (checked, check) = bytes.split_at_checked(CHECK_AT).ok_or(Fault::CutOff)?;
        if Fields(check).u64()? != checksum(checked) {
            return Err(Fault::Check);
        }
        let mode = fields.u32()?;
        let data = DataMode::ALL.into_iter().find(|any| *any as u32 == mode);
        let data = data.ok_or(Fault::Value("data"))?;
        let capacity_bytes = fields.u64()?;
        let block_bytes = u32::try_from(fields.u64()?).map_err(|_| Fault::Value("block size"))?;
        let started_unix_ns = fields.u64()?;
        let name = bytes.get(NAME_AT..NAME_AT.saturating_add(NAME_MAX)).unwrap_or_default();
        let end = name.iter().position(|byte| *byte == 0).unwrap_or(NAME_MAX);
        let (name, zeros) = name.split_at_checked(end).unwrap_or_default();
        let rest = bytes.get(NAME_AT.saturating_add(NAME_MAX)..CHECK_AT).unwrap_or_default();
        if zeros.iter().chain(rest).any(|byte| *byte != 0) {
            return Err(Fault::Value("reserved field"));
        }
        let name = std::str::from_utf8(name).map_err(|_| Fault::Value("name"))?.to_owned();
        Ok(Self { data, capacity_bytes, block_bytes, started_unix_ns, name })
    }
}

/// The kind of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RequestKind {
    /// Disk to memory.
    Read = 0,
    /// Memory to disk.
    Write = 1,
    /// Make all completed writes durable.
    Flush = 2,
    /// The contents of the range no longer matter.
    Discard = 3,
    /// The range reads as zeros.
    WriteZeroes = 4,
    /// The same, and the blocks may be deallocated.
    WriteZeroesUnmap = 5,
}

impl RequestKind {
    /// All kinds.
    pub const ALL: [Self; 6] = [
        Self::Read,
        Self::Write,
        Self::Flush,
        Self::Discard,
        Self::WriteZeroes,
        Self::WriteZeroesUnmap,
    ];

    /// Whether it changes the contents of the disk.
    #[must_use]
    pub const fn is_write(self) -> bool {
        !matches!(self, Self::Read | Self::Flush)
    }

    /// The kind in words.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Flush => "flush",
            Self::Discard => "discard",
            Self::WriteZeroes => "write-zeroes",
            Self::WriteZeroesUnmap => "write-zeroes-unmap",
        }
    }
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Outcome {
    /// It succeeded.
    Ok = 0,
    /// The medium failed, with an error number of Linux beside.
    Io = 1,
    /// No space was left.
    NoSpace = 2,
    /// Fewer bytes were moved than asked for.
    Short = 3,
    /// The store does not do that.
    Unsupported = 4,
    /// The store is read-only.
    ReadOnly = 5,
    /// The request was outside of the store.
    OutOfBounds = 6,
    /// Another failure.
    Other = 7,
}

impl Outcome {
    /// All of them.
    pub const ALL: [Self; 8] = [
        Self::Ok,
        Self::Io,
        Self::NoSpace,
        Self::Short,
        Self::Unsupported,
        Self::ReadOnly,
        Self::OutOfBounds,
        Self::Other,
    ];
}

/// A request that has ended. Its data, if the recording has it, is beside the record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// The kind.
    pub kind: RequestKind,
    /// The queue that it came by: a number that no other queue of the recording has.
    pub queue: u16,
    /// Whether a write was to be durable when it completed.
    pub write_through: bool,
    /// How it ended.
    pub outcome: Outcome,
    /// With [`Outcome::Io`], the error number of Linux; 0 otherwise.
    pub errno: i32,
    /// XXH3 of the data that was read or written, if the recording has it.
    pub checksum: Option<u64>,
    /// When the device took it, in nanoseconds since the start.
    pub arrival_ns: u64,
    /// The nanoseconds from then until it had ended.
    pub latency_ns: u64,
    /// The first byte on the disk.
    pub offset_bytes: u64,
    /// The number of bytes; 0 for a flush that the guest has asked for. A flush that another
    /// request needs, to be durable for instance, has that request's range and arrival.
    pub len_bytes: u64,
}

/// Why a recording ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndReason {
    /// The stage was removed, or its daemon has ended.
    Closed = 0,
    /// The file has reached its largest size.
    Limit = 1,
    /// The file could not be written any more.
    Failed = 2,
}

impl EndReason {
    const ALL: [Self; 3] = [Self::Closed, Self::Limit, Self::Failed];
}

/// A record of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Record {
    /// A request.
    Request(Request),
    /// Requests of a queue that are missing here, because the writer was too slow.
    Gap {
        /// The queue.
        queue: u16,
        /// The arrival of the next request of that queue, in nanoseconds since the start.
        at_ns: u64,
        /// The number of requests that are missing.
        requests: u64,
    },
    /// The end of the recording: the last record.
    End {
        /// Why it ended.
        reason: EndReason,
        /// The requests in the file.
        requests: u64,
        /// The requests that are missing in the file, of all queues.
        dropped: u64,
    },
}

impl Record {
    /// Appends the record with its frame. `data` is that of a write, and empty otherwise.
    pub fn append_to(&self, out: &mut Vec<u8>, data: &[u8]) {
        let mut body = [0; REQUEST_BYTES];
        let body = self.encode(&mut body, data.len());
        let len_bytes = body.len().saturating_add(data.len());
        out.extend(u32::try_from(len_bytes).unwrap_or(u32::MAX).to_le_bytes());
        let frame = out.len();
        out.extend([0; 8]);
        let start = out.len();
        out.extend_from_slice(body);
        out.extend_from_slice(data);
        let check = checksum(out.get(start..).unwrap_or_default());
        let place = out.get_mut(frame..start).unwrap_or_default();
        place.iter_mut().zip(check.to_le_bytes()).for_each(|(to, from)| *to = from);
    }

    /// The body without the data.
    fn encode<'a>(&self, body: &'a mut [u8; REQUEST_BYTES], data_bytes: usize) -> &'a [u8] {
        let mut put = |words: &[u64]| {
            let bytes = words.iter().flat_map(|word| word.to_le_bytes());
            body.iter_mut().zip(bytes).for_each(|(to, from)| *to = from);
        };
        let first = |kind: u8, reason: u8, queue: u16| {
            u64::from(kind) | u64::from(reason) << 8 | u64::from(queue) << 32
        };
        let len_bytes = match *self {
            Self::Request(request) => {
                put(&request.words(data_bytes));
                REQUEST_BYTES
            }
            Self::Gap { queue, at_ns, requests } => {
                put(&[first(GAP, 0, queue), at_ns, requests]);
                SMALL_BYTES
            }
            Self::End { reason, requests, dropped } => {
                put(&[first(END, reason as u8, 0), requests, dropped]);
                SMALL_BYTES
            }
        };
        body.get(..len_bytes).unwrap_or_default()
    }

    /// The record of a body, and the bytes of its data, which are the last ones.
    pub(crate) fn decode(body: &[u8]) -> Result<(Self, usize), Fault> {
        let mut fields = Fields(body);
        let [kind, code, flags, outcome] = fields.array()?;
        if !matches!(kind, REQUEST | GAP | END) {
            return Err(Fault::Value("type"));
        }
        let queue = fields.u32()?;
        let queue = u16::try_from(queue).map_err(|_| Fault::Value("queue"))?;
        if kind == REQUEST {
            return Request::decode([code, flags, outcome], queue, fields);
        }
        if (flags, outcome) != (0, 0) {
            return Err(Fault::Value("reserved field"));
        }
        let (first, second) = (fields.u64()?, fields.u64()?);
        if !fields.0.is_empty() {
            return Err(Fault::Length);
        }
        match kind {
            GAP if code == 0 => Ok((Self::Gap { queue, at_ns: first, requests: second }, 0)),
            END if queue == 0 => {
                let reason = EndReason::ALL.into_iter().find(|any| *any as u8 == code);
                let reason = reason.ok_or(Fault::Value("reason of the end"))?;
                Ok((Self::End { reason, requests: first, dropped: second }, 0))
            }
            _ => Err(Fault::Value("reserved field")),
        }
    }
}

impl Request {
    fn words(&self, data_bytes: usize) -> [u64; 7] {
        let mut flags = 0;
        let set = [
            (self.write_through, WRITE_THROUGH),
            (self.checksum.is_some(), HAS_CHECKSUM),
            (data_bytes > 0, HAS_DATA),
        ];
        set.iter().filter(|(is_set, _)| *is_set).for_each(|(_, flag)| flags |= flag);
        let first = u64::from(REQUEST)
            | (self.kind as u64) << 8
            | u64::from(flags) << 16
            | (self.outcome as u64) << 24
            | u64::from(self.queue) << 32;
        [
            first,
            u64::from(self.errno.cast_unsigned()) | (data_bytes as u64) << 32,
            self.checksum.unwrap_or(0),
            self.arrival_ns,
            self.latency_ns,
            self.offset_bytes,
            self.len_bytes,
        ]
    }

    fn decode(
        [kind, flags, outcome]: [u8; 3],
        queue: u16,
        mut fields: Fields<'_>,
    ) -> Result<(Record, usize), Fault> {
        let kind = RequestKind::ALL.into_iter().find(|any| *any as u8 == kind);
        let outcome = Outcome::ALL.into_iter().find(|any| *any as u8 == outcome);
        if flags & !(WRITE_THROUGH | HAS_CHECKSUM | HAS_DATA) != 0 {
            return Err(Fault::Value("flags"));
        }
        let (errno, data_bytes) = (fields.u32()?.cast_signed(), fields.u32()?);
        let checksum = fields.u64()?;
        let request = Self {
            kind: kind.ok_or(Fault::Value("kind"))?,
            queue,
            write_through: flags & WRITE_THROUGH != 0,
            outcome: outcome.ok_or(Fault::Value("outcome"))?,
            errno,
            checksum: (flags & HAS_CHECKSUM != 0).then_some(checksum),
            arrival_ns: fields.u64()?,
            latency_ns: fields.u64()?,
            offset_bytes: fields.u64()?,
            len_bytes: fields.u64()?,
        };
        if fields.0.len() as u64 != u64::from(data_bytes) {
            return Err(Fault::Length);
        }
        request.check(flags, checksum, u64::from(data_bytes))?;
        Ok((Record::Request(request), fields.0.len()))
    }

    /// The rules about several fields.
    fn check(&self, flags: u8, checksum: u64, data_bytes: u64) -> Result<(), Fault> {
        let has_data = flags & HAS_DATA != 0;
        let is_data = self.kind == RequestKind::Write && data_bytes == self.len_bytes;
        if has_data != (data_bytes > 0) || (has_data && !is_data) {
            return Err(Fault::Value("data"));
        }
        if self.outcome != Outcome::Io && self.errno != 0 {
            return Err(Fault::Value("error number"));
        }
        if self.checksum.is_none() && checksum != 0 {
            return Err(Fault::Value("checksum"));
        }
        if self.offset_bytes.checked_add(self.len_bytes).is_none() {
            return Err(Fault::Value("range"));
        }
        Ok(())
    }
}

/// Fields that are taken from the front of these bytes.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn array<const N: usize>(&mut self) -> Result<[u8; N], Fault> {
        let (array, rest) = self.0.split_first_chunk().ok_or(Fault::Length)?;
        self.0 = rest;
        Ok(*array)
    }

    fn u32(&mut self) -> Result<u32, Fault> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, Fault> {
        self.array().map(u64::from_le_bytes)
    }
}
