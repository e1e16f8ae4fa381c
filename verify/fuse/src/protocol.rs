//! The part of the FUSE protocol (linux/fuse.h, version 7.31) that one file needs.

/// Bypasses the page cache (linux/fuse.h). With the page cache, a held read locks its pages, and
/// `fuse_open`, which drops cached pages, waits for that lock.
const FOPEN_DIRECT_IO: u64 = 1 << 0;
/// Lets direct writes to one file run in parallel.
const FOPEN_PARALLEL_DIRECT_WRITES: u64 = 1 << 6;

/// The size of the longest request: a write and its header.
pub(crate) const BUFFER_BYTES: usize = (1 << 20) + 4096;

const ROOT: u64 = 1;
const FILE: u64 = 2;

const ENOENT: i32 = 2;
const EOPNOTSUPP: i32 = 95;
const ENOSYS: i32 = 38;

/// `FUSE_ASYNC_READ | FUSE_BIG_WRITES | FUSE_ASYNC_DIO | FUSE_MAX_PAGES`: direct requests are
/// answered in any order, and no thread of their sender waits for the answer.
const INIT_FLAGS: u32 = 1 | 1 << 5 | 1 << 15 | 1 << 22;

/// The operation of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// The filesystem is being mounted.
    Init,
    /// Look a name up.
    Lookup,
    /// Attributes, for instance the size.
    GetAttributes,
    /// Open the file or directory.
    Open,
    /// Read.
    Read,
    /// Write.
    Write,
    /// Make writes durable.
    Sync,
    /// Allocate space, or give it back.
    Allocate,
    /// Any other opcode.
    Other(u32),
}

/// A request of the kernel.
#[derive(Debug)]
pub struct Request {
    opcode: u32,
    unique: u64,
    node: u64,
    body: Vec<u8>,
}

impl Request {
    pub(crate) fn parse(bytes: &[u8]) -> Option<Self> {
        let body = bytes.get(40..)?.to_vec();
        Some(Self {
            opcode: u32_at(bytes, 4),
            unique: u64_at(bytes, 8),
            node: u64_at(bytes, 16),
            body,
        })
    }

    /// The operation that the opcode stands for.
    #[must_use]
    pub fn operation(&self) -> Operation {
        match self.opcode {
            1 => Operation::Lookup,
            3 => Operation::GetAttributes,
            14 | 27 => Operation::Open,
            15 => Operation::Read,
            16 => Operation::Write,
            20 => Operation::Sync,
            26 => Operation::Init,
            43 => Operation::Allocate,
            other => Operation::Other(other),
        }
    }

    /// The offset of a read or write in the file; 0 for other requests.
    #[must_use]
    pub fn offset_bytes(&self) -> u64 {
        match self.operation() {
            Operation::Read | Operation::Write => u64_at(&self.body, 8),
            _ => 0,
        }
    }

    /// The data of a write; empty for other requests.
    #[must_use]
    pub fn data(&self) -> &[u8] {
        if self.operation() == Operation::Write {
            self.body.get(40..).unwrap_or_default()
        } else {
            &[]
        }
    }

    /// Whether the kernel expects an answer: not to FORGET, BATCH_FORGET and INTERRUPT.
    pub(crate) fn wants_answer(&self) -> bool {
        !matches!(self.opcode, 2 | 36 | 42)
    }

    /// Carries the request out on the file's content and returns the answer with its header.
    pub(crate) fn answer(&self, content: &mut [u8], name: &str) -> Vec<u8> {
        match self.body_of_answer(content, name) {
            Ok(body) => self.framed(0, &body),
            Err(errno) => self.refusal(errno),
        }
    }

    /// The answer that refuses the request.
    pub(crate) fn refusal(&self, errno: i32) -> Vec<u8> {
        self.framed(-errno, &[])
    }

    fn framed(&self, error: i32, body: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(16 + body.len());
        bytes.extend_from_slice(&(16 + body.len() as u32).to_le_bytes());
        bytes.extend_from_slice(&error.to_le_bytes());
        bytes.extend_from_slice(&self.unique.to_le_bytes());
        bytes.extend_from_slice(body);
        bytes
    }

    fn body_of_answer(&self, content: &mut [u8], name: &str) -> Result<Vec<u8>, i32> {
        let size_bytes = content.len() as u64;
        match self.operation() {
            Operation::Init => Ok(init(u32_at(&self.body, 8))),
            Operation::Lookup
                if self.node == ROOT && self.body.strip_suffix(b"\0") == Some(name.as_bytes()) =>
            {
                // Node, generation, and the times for which the kernel may cache the entry and the
                // attributes: zero.
                let mut entry = words(&[FILE, 0, 0, 0, 0]);
                entry.extend(attributes(FILE, size_bytes));
                Ok(entry)
            }
            Operation::Lookup => Err(ENOENT),
            Operation::GetAttributes => {
                let mut answer = words(&[0, 0]);
                answer.extend(attributes(self.node, size_bytes));
                Ok(answer)
            }
            // Without both flags, direct writes come one at a time, and a held write would block
            // all others.
            Operation::Open => Ok(words(&[0, FOPEN_DIRECT_IO | FOPEN_PARALLEL_DIRECT_WRITES])),
            Operation::Read => {
                let (start, end) = self.range(size_bytes);
                Ok(content.get(start..end).unwrap_or_default().to_vec())
            }
            Operation::Write => {
                let (start, end) = self.range(size_bytes);
                let data = self.data();
                let into = content.get_mut(start..end).unwrap_or_default();
                into.copy_from_slice(data.get(..end - start).ok_or(ENOSYS)?);
                Ok(words(&[(end - start) as u64]))
            }
            Operation::Sync => Ok(Vec::new()),
            Operation::Allocate => Err(EOPNOTSUPP),
            // STATFS: a filesystem of one full file.
            Operation::Other(17) => {
                Ok(words(&[size_bytes / 4096, 0, 0, 1, 0, 4096 | 255 << 32, 4096, 0, 0, 0]))
            }
            // RELEASE, FLUSH, RELEASEDIR, DESTROY.
            Operation::Other(18 | 25 | 29 | 38) => Ok(Vec::new()),
            Operation::Other(_) => Err(ENOSYS),
        }
    }

    /// The range of a read or write, cut at the end of the content.
    fn range(&self, size_bytes: u64) -> (usize, usize) {
        let start = u64_at(&self.body, 8).min(size_bytes);
        let end = start.saturating_add(u32_at(&self.body, 16).into()).min(size_bytes);
        (start as usize, end as usize)
    }
}

fn init(max_readahead: u32) -> Vec<u8> {
    let max_background_and_threshold = 64 | 64 << 16;
    let fields = [7, 31, max_readahead, INIT_FLAGS, max_background_and_threshold, 1 << 20, 1, 256];
    let mut bytes: Vec<u8> = fields.iter().flat_map(|field: &u32| field.to_le_bytes()).collect();
    bytes.resize(64, 0);
    bytes
}

/// `struct fuse_attr`.
fn attributes(node: u64, size_bytes: u64) -> Vec<u8> {
    let (mode, size_bytes) = if node == ROOT { (0o040_755, 0) } else { (0o100_600, size_bytes) };
    let mut bytes = words(&[node, size_bytes, size_bytes / 512, 0, 0, 0]);
    for field in [0, 0, 0, mode, 1, 0, 0, 0, 4096, 0u32] {
        bytes.extend_from_slice(&field.to_le_bytes());
    }
    bytes
}

fn words(values: &[u64]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes
        .get(at..)
        .and_then(|rest| rest.first_chunk())
        .map_or(0, |bytes| u32::from_le_bytes(*bytes))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes
        .get(at..)
        .and_then(|rest| rest.first_chunk())
        .map_or(0, |bytes| u64::from_le_bytes(*bytes))
}
