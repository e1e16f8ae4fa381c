//! Image files: their formats, and the places of their data.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;

/// Magic bytes of image files: `qemu-img`'s name for the format, the offset, and the bytes.
const MAGICS: &[(&str, u64, &[u8])] = &[
    ("qcow2", 0, b"QFI\xfb"),
    ("vmdk", 0, b"KDMV"),
    ("vmdk", 0, b"# Disk DescriptorFile"),
    ("vhdx", 0, b"vhdxfile"),
    ("vpc", 0, b"conectix"),
    ("qed", 0, b"QED\0"),
    ("vdi", 0x40, &[0x7f, 0x10, 0xda, 0xbe]),
];

/// Detects the format of the file.
pub(crate) fn format(file: &File) -> Result<&'static str> {
    for (name, at, magic) in MAGICS {
        let mut begins = vec![0; magic.len()];
        match file.read_exact_at(&mut begins, *at) {
            Ok(()) if begins == *magic => return Ok(name),
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok("raw")
}

/// The size of the file in bytes, also of a block device.
pub(crate) fn size(file: &File) -> Result<u64> {
    Ok(seek(file, SeekFrom::End(0))?)
}

/// A part of a file: offset and length in bytes.
pub(crate) type Segment = (u64, u64);

/// The parts of the file that are not holes. On a filesystem without holes, the whole file is one
/// part.
pub(crate) fn data(file: &File, size_bytes: u64) -> Result<Vec<Segment>> {
    let mut segments = Vec::new();
    let mut at = 0;
    while at < size_bytes {
        let first = match seek(file, SeekFrom::Data(at)) {
            Ok(first) => first.min(size_bytes),
            // The rest of the file is a hole.
            Err(Errno::NXIO) => break,
            Err(Errno::INVAL) => return Ok(vec![(0, size_bytes)]),
            Err(error) => return Err(error.into()),
        };
        let end = seek(file, SeekFrom::Hole(first)).unwrap_or(size_bytes).clamp(first, size_bytes);
        if end == first {
            break;
        }
        segments.push((first, end - first));
        at = end;
    }
    Ok(segments)
}

/// Widens segments to whole blocks of `unit_bytes`, and joins segments that meet.
pub(crate) fn widened(segments: &[Segment], unit_bytes: u64, size_bytes: u64) -> Vec<Segment> {
    let mut wide: Vec<Segment> = Vec::new();
    for (first, len) in segments {
        let start = first - first % unit_bytes;
        let end = (first + len).next_multiple_of(unit_bytes).min(size_bytes);
        match wide.last_mut() {
            Some((last, length)) if *last + *length >= start => {
                *length = (*length).max(end.saturating_sub(*last))
            }
            _ => wide.push((start, end.saturating_sub(start))),
        }
    }
    wide
}

/// The length of all segments together, in bytes.
pub(crate) fn total(segments: &[Segment]) -> u64 {
    segments.iter().map(|(_, len)| len).sum()
}

/// Reads from the file; bytes beyond its end are zeros.
pub(crate) fn read(file: &File, offset_bytes: u64, buffer: &mut [u8]) -> io::Result<()> {
    let mut done = 0;
    while done < buffer.len() {
        match file.read_at(&mut buffer[done..], offset_bytes + done as u64) {
            Ok(0) => {
                buffer[done..].fill(0);
                return Ok(());
            }
            Ok(count) => done += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Whether all bytes are zeros.
pub(crate) fn is_zero(data: &[u8]) -> bool {
    // The comparison of the data with itself, shifted by one byte, is as fast as memory is.
    data.first().is_none_or(|first| *first == 0)
        && data.get(1..).is_none_or(|rest| rest == &data[..rest.len()])
}

/// A directory for this command alone. Dropping it removes the directory with its contents.
pub(crate) struct Workplace(PathBuf);

impl Workplace {
    /// Makes a directory in `directory`.
    pub(crate) fn new(directory: &Path) -> Result<Self> {
        use std::os::unix::fs::DirBuilderExt as _;
        for attempt in 0..100 {
            let path = directory.join(format!(".sidecore-{}-{attempt}", std::process::id()));
            match std::fs::DirBuilder::new().mode(0o700).create(&path) {
                Ok(()) => return Ok(Self(path)),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => {
                    return Err(error).with_context(|| {
                        format!("no temporary files may be made in {}", directory.display())
                    });
                }
            }
        }
        bail!(
            "{} is full of temporary directories; remove those named .sidecore-*",
            directory.display()
        )
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    /// The path of a file in the directory.
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Workplace {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.0) {
            eprintln!("sidecore: {} is still there: {error}", self.0.display());
        }
    }
}

/// The directory of temporary files that are as large as an image: `chosen`, or `$TMPDIR`, or the
/// image's directory.
pub(crate) fn temporary_directory(chosen: Option<&Path>, image: &Path) -> PathBuf {
    let usual =
        || std::env::var_os("TMPDIR").filter(|directory| !directory.is_empty()).map(PathBuf::from);
    let beside = || match image.parent() {
        Some(parent) if parent != Path::new("") => parent.to_owned(),
        _ => PathBuf::from("."),
    };
    chosen.map(Path::to_owned).or_else(usual).unwrap_or_else(beside)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_are_detected_by_their_magic_bytes() {
        let directory = tempfile::tempdir().unwrap();
        for (name, at, magic) in MAGICS {
            let path = directory.path().join("image");
            let mut bytes = vec![0; *at as usize];
            bytes.extend_from_slice(magic);
            std::fs::write(&path, &bytes).unwrap();
            assert_eq!(format(&File::open(&path).unwrap()).unwrap(), *name);
            std::fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
            assert_eq!(format(&File::open(&path).unwrap()).unwrap(), "raw");
        }
    }

    #[test]
    fn holes_are_found() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(10 << 20).unwrap();
        file.write_all_at(&[1; 4096], 4 << 20).unwrap();
        file.write_all_at(&[1; 1], (8 << 20) + 5).unwrap();
        let segments = data(&file, 10 << 20).unwrap();
        // A filesystem may report holes less exactly, but must not report data as a hole.
        for at in [4 << 20, (8 << 20) + 5] {
            assert!(
                segments.iter().any(|(first, len)| (*first..first + len).contains(&at)),
                "{segments:?}"
            );
        }
        assert!(total(&segments) <= 10 << 20);
        file.set_len(0).unwrap();
        assert_eq!(data(&file, 0).unwrap(), []);
    }

    #[test]
    fn segments_become_whole_blocks() {
        assert_eq!(
            widened(&[(5, 10), (4096, 1), (20_000, 1)], 4096, 1 << 20),
            [(0, 8192), (16_384, 4096)]
        );
        assert_eq!(widened(&[(8000, 1000)], 4096, 9000), [(4096, 4904)]);
        assert_eq!(widened(&[], 4096, 0), []);
    }

    #[test]
    fn zeros_are_distinguished_from_data() {
        assert!(is_zero(&[]) && is_zero(&[0]) && is_zero(&[0; 4097]));
        for at in [0, 1, 2000, 4095] {
            let mut data = [0; 4096];
            data[at] = 1;
            assert!(!is_zero(&data), "{at}");
        }
    }

    #[test]
    fn a_workplace_is_private_and_is_removed_with_its_contents() {
        use std::os::unix::fs::PermissionsExt as _;
        let directory = tempfile::tempdir().unwrap();
        let (one, two) =
            (Workplace::new(directory.path()).unwrap(), Workplace::new(directory.path()).unwrap());
        std::fs::write(one.file("x"), "x").unwrap();
        assert_eq!(std::fs::metadata(&two.0).unwrap().permissions().mode() & 0o777, 0o700);
        drop((one, two));
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
    }
}
