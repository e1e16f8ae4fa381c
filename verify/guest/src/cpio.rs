//! Writes a cpio archive in the "newc" format, from which the kernel unpacks its first filesystem.
//!
//! Owner, time and inode numbers are fixed, so that equal content makes equal archives.

use std::collections::BTreeSet;
use std::io::{self, Write};

pub(crate) struct Archive<W> {
    output: W,
    inode: u32,
    directories: BTreeSet<String>,
}

const DIRECTORY: u32 = 0o040_755;
const FILE: u32 = 0o100_000;

impl<W: Write> Archive<W> {
    pub(crate) fn new(output: W) -> Archive<W> {
        Archive { output, inode: 0, directories: BTreeSet::new() }
    }

    /// Adds a file under an absolute path, and the directories above it.
    pub(crate) fn file(&mut self, path: &str, permissions: u32, content: &[u8]) -> io::Result<()> {
        let path = path.trim_start_matches('/');
        for (end, _) in path.match_indices('/') {
            self.directory(&path[..end])?;
        }
        self.entry(path, FILE | permissions, content)
    }

    /// Writes the end mark and returns the writer.
    pub(crate) fn finish(mut self) -> io::Result<W> {
        self.entry("TRAILER!!!", 0, &[])?;
        Ok(self.output)
    }

    fn directory(&mut self, path: &str) -> io::Result<()> {
        if self.directories.insert(path.to_owned()) {
            self.entry(path, DIRECTORY, &[])?;
        }
        Ok(())
    }

    fn entry(&mut self, path: &str, mode: u32, content: &[u8]) -> io::Result<()> {
        let too_large = |_| {
            io::Error::new(
                io::ErrorKind::FileTooLarge,
                format!("{path} does not fit a cpio archive"),
            )
        };
        let size = u32::try_from(content.len()).map_err(too_large)?;
        let name_size = u32::try_from(path.len() + 1).map_err(too_large)?;
        let inode = self.inode;
        self.inode += 1;
        let links = if mode == DIRECTORY { 2 } else { 1 };
        // Inode, mode, user, group, links, time, size, device (2), device node (2), length of the
        // name, checksum.
        let fields = [inode, mode, 0, 0, links, 0, size, 0, 0, 0, 0, name_size, 0];
        let mut header = String::from("070701");
        for field in fields {
            header.push_str(&format!("{field:08x}"));
        }
        self.output.write_all(header.as_bytes())?;
        self.output.write_all(path.as_bytes())?;
        self.output.write_all(&[0])?;
        self.pad(header.len() + path.len() + 1)?;
        self.output.write_all(content)?;
        self.pad(content.len())
    }

    /// Pads to a multiple of four bytes, which header and content each need.
    fn pad(&mut self, length: usize) -> io::Result<()> {
        self.output.write_all(&[0; 3][..length.next_multiple_of(4) - length])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_and_padding_follow_the_format() {
        let mut archive = Archive::new(Vec::new());
        archive.file("/a/b", 0o755, b"hello").unwrap();
        let bytes = archive.finish().unwrap();
        assert_eq!(bytes.len() % 4, 0);
        let text = String::from_utf8_lossy(&bytes);
        // The directory: 110 bytes of header, "a" and its zero make 112, and no content.
        assert!(text.starts_with("070701"));
        assert_eq!(&text[110..112], "a\0");
        // The file: its mode is the second field, its size the seventh.
        let file = &text[112..];
        assert!(file.starts_with("070701"));
        assert_eq!(&file[14..22], "000081ed");
        assert_eq!(&file[54..62], "00000005");
        assert_eq!(&file[110..114], "a/b\0");
        assert_eq!(&file[116..121], "hello");
        assert!(text.contains("TRAILER!!!"));
    }

    #[test]
    fn equal_content_makes_equal_archives_with_each_directory_once() {
        let make = || {
            let mut archive = Archive::new(Vec::new());
            archive.file("/x/y/one", 0o644, b"1").unwrap();
            archive.file("/x/y/two", 0o644, b"2").unwrap();
            archive.finish().unwrap()
        };
        let bytes = make();
        assert_eq!(bytes, make());
        assert_eq!(String::from_utf8_lossy(&bytes).matches("070701").count(), 5);
    }
}
