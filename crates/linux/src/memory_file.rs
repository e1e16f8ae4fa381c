//! A mapped file in memory: the contents outlive the process, but not the machine.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

use rustix::fs::FallocateFlags;
use rustix::mm::{MapFlags, ProtFlags};

/// The filesystems that keep their files in memory (statfs(2)). ramfs does so too, but neither
/// reserves nor limits the space of a file.
const TMPFS_MAGIC: u64 = 0x0102_1994;

/// 64-bit words in a file on tmpfs, shared with the processes that map the file after this one.
///
/// The whole file is allocated when it is opened, so that no store to it can fail on a full
/// filesystem. A truncation meanwhile raises SIGBUS: only the owner can read and write the file.
#[derive(Debug)]
pub struct MemoryFile {
    path: PathBuf,
    base: NonNull<AtomicU64>,
    words: usize,
}

// SAFETY: the mapping is valid until the value is dropped, and all access to it is by atomics.
unsafe impl Send for MemoryFile {}
// SAFETY: as above.
unsafe impl Sync for MemoryFile {}

impl MemoryFile {
    /// Opens the file of this name in `directory`, which is made if it is missing. A new file has
    /// `len_bytes` zeroes; an existing file keeps its size.
    ///
    /// # Errors
    /// The directory is not on tmpfs, the filesystem is full, the file is another user's or not a
    /// plain file, or a system call failed.
    pub fn open(directory: &Path, name: &str, len_bytes: usize) -> io::Result<Self> {
        use std::os::unix::fs::DirBuilderExt as _;
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
        let path = directory.join(name);
        let flags = libc::O_NOFOLLOW | libc::O_CLOEXEC | libc::O_NONBLOCK;
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .mode(0o600)
            .custom_flags(flags)
            .open(&path)?;
        let opened = Self::map(&file, path.clone(), len_bytes);
        if opened.is_err() && file.metadata().is_ok_and(|metadata| metadata.len() == 0) {
            // A failed attempt leaves no file behind.
            let _ = std::fs::remove_file(path);
        }
        opened
    }

    fn map(file: &File, path: PathBuf, len_bytes: usize) -> io::Result<Self> {
        // The type of `f_type` has another width and sign on each architecture.
        #[allow(clippy::unnecessary_cast, clippy::cast_sign_loss)]
        let filesystem = rustix::fs::fstatfs(file)?.f_type as u64;
        if filesystem != TMPFS_MAGIC {
            let why = "the directory is not on tmpfs, so the file would not be in memory";
            return Err(io::Error::new(io::ErrorKind::Unsupported, why));
        }
        let metadata = file.metadata()?;
        if !metadata.is_file() || metadata.uid() != rustix::process::geteuid().as_raw() {
            return Err(io::Error::new(
                io::ErrorKind::PermissionDenied,
                "the file is not a plain file of this user",
            ));
        }
        let len_bytes = match metadata.len() {
            0 => len_bytes as u64,
            len_bytes => len_bytes,
        };
        let len = usize::try_from(len_bytes).map_err(|_| io::ErrorKind::FileTooLarge)?;
        rustix::fs::fchmod(file, rustix::fs::Mode::from_raw_mode(0o600))?;
        rustix::fs::fallocate(file, FallocateFlags::empty(), 0, len_bytes)?;
        // SAFETY: a new mapping at an address of the kernel's choice, of a file that is as long as
        // the mapping.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::POPULATE,
                file,
                0,
            )?
        };
        let base = NonNull::new(base.cast())
            .ok_or_else(|| io::Error::other("mmap returned the null page"))?;
        Ok(Self { path, base, words: len / size_of::<AtomicU64>() })
    }

    /// The contents of the file.
    #[must_use]
    pub fn words(&self) -> &[AtomicU64] {
        // SAFETY: the mapping has this many words, is page-aligned, lives as long as `self`, and is
        // only accessed as atomics.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.words) }
    }

    /// The path of the file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Removes the file, and keeps the mapping.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn remove(&self) -> io::Result<()> {
        std::fs::remove_file(&self.path)
    }
}

impl Drop for MemoryFile {
    fn drop(&mut self) {
        // SAFETY: no borrow of the mapping is left, and the mapping was made with this size (the
        // kernel rounds up to pages both times).
        let _ = unsafe {
            rustix::mm::munmap(self.base.as_ptr().cast(), self.words * size_of::<AtomicU64>())
        };
    }
}

/// Returns the kernel's identifier of this boot of the machine.
///
/// # Errors
/// `/proc` is not mounted, or its content is unexpected.
pub fn boot_id() -> io::Result<[u8; 16]> {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    let id = u128::from_str_radix(&digits, 16).map_err(io::Error::other)?;
    Ok(id.to_be_bytes())
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;

    /// A directory on tmpfs.
    fn tmpfs() -> tempfile::TempDir {
        tempfile::tempdir_in("/dev/shm").unwrap()
    }

    #[test]
    fn stored_words_are_there_for_the_next_process() {
        let directory = tmpfs();
        let inside = directory.path().join("log");
        let first = MemoryFile::open(&inside, "a", 8192).unwrap();
        assert_eq!(first.words().len(), 1024);
        assert!(first.words().iter().all(|word| word.load(Ordering::Relaxed) == 0));
        first.words()[1023].store(7, Ordering::Release);
        drop(first);
        // The existing file keeps its size.
        let second = MemoryFile::open(&inside, "a", 4096).unwrap();
        assert_eq!((second.words().len(), second.words()[1023].load(Ordering::Acquire)), (1024, 7));
        let metadata = std::fs::metadata(second.path()).unwrap();
        assert_eq!((metadata.mode() & 0o7777, metadata.blocks() * 512), (0o600, 8192));
        second.remove().unwrap();
        assert_eq!(std::fs::read_dir(&inside).unwrap().count(), 0);
    }

    #[test]
    fn other_filesystems_and_other_users_files_are_refused() {
        let elsewhere = tempfile::tempdir().unwrap();
        if rustix::fs::statfs(elsewhere.path()).unwrap().f_type as u64 != TMPFS_MAGIC {
            let error = MemoryFile::open(elsewhere.path(), "a", 8192).unwrap_err();
            assert!(error.to_string().contains("tmpfs"), "{error}");
            assert_eq!(std::fs::read_dir(elsewhere.path()).unwrap().count(), 0);
        }
        let directory = tmpfs();
        std::os::unix::fs::symlink("/etc/passwd", directory.path().join("link")).unwrap();
        MemoryFile::open(directory.path(), "link", 8192).unwrap_err();
        rustix::fs::mknodat(
            rustix::fs::CWD,
            directory.path().join("pipe"),
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::from_raw_mode(0o600),
            0,
        )
        .unwrap();
        MemoryFile::open(directory.path(), "pipe", 8192).unwrap_err();
    }

    #[test]
    fn a_size_larger_than_the_filesystem_is_refused_at_once() {
        let directory = tmpfs();
        let error = MemoryFile::open(directory.path(), "a", 1 << 50).unwrap_err();
        assert!(error.raw_os_error().is_some(), "{error}");
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_boot_has_one_identifier() {
        assert_eq!(boot_id().unwrap(), boot_id().unwrap());
        assert_ne!(boot_id().unwrap(), [0; 16]);
    }
}
