//! The limits of what an operator may say, whether in the file or over the API.

use std::path::Path;

use sidecore_assembly::spec::{FrontEndKind, SERIAL_MAX_BYTES};

/// The largest ring that a device may accept (virtio 1.2, 2.7).
pub(crate) const QUEUE_SIZE_LIMIT: u16 = 32768;

/// The largest ring unless told otherwise.
pub(crate) const QUEUE_SIZE_DEFAULT: u16 = 1024;

/// The most segments in a request: each entry of a running ring has room for as many.
pub(crate) const SEG_MAX_LIMIT: u32 = 1022;

/// Drivers refuse disks whose segments hold less than a page.
pub(crate) const SIZE_MAX_LEAST: u32 = 4096;

/// The sizes that an NVMe namespace's blocks may have, in bytes.
pub(crate) const NVME_BLOCK_BYTES: [u32; 2] = [512, 4096];

/// The keys of a device that mean nothing to this kind of it.
pub(crate) const fn without_meaning(kind: FrontEndKind) -> &'static [&'static str] {
    match kind {
        FrontEndKind::VirtioBlk => &["block_size", "interrupts"],
        FrontEndKind::Nvme => &["queue_size_max", "packed", "seg_max", "size_max", "write_cache"],
    }
}

/// Longest name, in characters.
const NAME_MAX: usize = 64;

/// A minute: longer spinning or delaying than this is a slip of the unit.
pub(crate) const MINUTE_US: u64 = 60_000_000;

/// A socket's address holds this many bytes of path, and a zero byte (unix(7)).
const SOCKET_PATH_MAX: usize = 107;

/// Names are labels in metrics, arguments of commands and names of threads.
pub(crate) fn is_name(name: &str) -> bool {
    (1..=NAME_MAX).contains(&name.len()) && name.chars().all(is_name_character)
}

fn is_name_character(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.')
}

/// What a name may be, for those whose name is not.
pub(crate) fn about_names() -> String {
    format!("a name has 1 to {NAME_MAX} letters, digits, `-`, `_` and `.`, without umlauts or spaces")
}

/// Whether a device may have this name.
pub(crate) fn device_name(name: &str) -> Result<(), String> {
    if is_name(name) { Ok(()) } else { Err(about_names()) }
}

/// What is wrong with a volume's name, if anything is.
pub(crate) fn volume_name_problem(name: &str) -> Option<&'static str> {
    if !(1..=NAME_MAX).contains(&name.len()) {
        Some("it has 1 to 64 characters")
    } else if !name.chars().all(is_name_character) {
        Some("it has letters, digits, `-`, `_` and `.`")
    } else if name.starts_with(['.', '-']) {
        Some("it does not start with `.` or `-`")
    } else {
        None
    }
}

/// Whether a serial number fits into the answer to a guest that asks for it.
pub(crate) fn is_serial(text: &str) -> bool {
    text.len() <= SERIAL_MAX_BYTES && text.chars().all(|c| c.is_ascii_graphic() || c == ' ')
}

/// The permissions of a socket: octal digits, as for chmod(1).
pub(crate) fn mode(text: &str) -> Result<u32, String> {
    let digits = (3..=4).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_digit());
    let mode = u32::from_str_radix(text, 8).ok().filter(|mode| digits && *mode <= 0o777);
    mode.ok_or_else(|| format!("is three octal digits, as in \"0660\", not \"{}\"", text.escape_debug()))
}

/// Whether a socket's path is short enough for one.
pub(crate) fn short_enough(path: &Path) -> Result<(), String> {
    let bytes = path.as_os_str().len();
    if bytes > SOCKET_PATH_MAX {
        return Err(format!(
            "a socket's path holds {SOCKET_PATH_MAX} bytes and this one has {bytes}; use a shorter directory"
        ));
    }
    Ok(())
}

/// Whether a socket may be made there, as far as its path tells. Whoever asks has another working directory than the
/// daemon.
pub(crate) fn socket(path: &Path) -> Result<(), String> {
    let text = path.as_os_str().as_encoded_bytes();
    if !path.is_absolute() || text.contains(&0) {
        return Err("`socket` is an absolute path".to_owned());
    }
    short_enough(path)
}
