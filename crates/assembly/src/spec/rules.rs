//! The rules of single values that several sections share.

use sidecore_keys::{Key, Kind, Value, size};

use super::VOLUME_MAX_BYTES;

/// Longest name, in characters.
const NAME_MAX: usize = 64;

/// A socket's address holds this many bytes of path, and a zero byte (unix(7)).
const SOCKET_PATH_MAX: usize = 107;

/// The name of a section.
pub(super) const NAME: Key =
    Key::required("name", Kind::Text, "\"some name\"", "its name").checked(has_name);

/// Names are labels in metrics, arguments of commands and names of threads.
#[must_use]
pub fn is_name(name: &str) -> bool {
    (1..=NAME_MAX).contains(&name.len()) && name.chars().all(is_name_character)
}

fn is_name_character(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.')
}

pub(super) fn has_name(_key: &str, value: &Value) -> Result<(), String> {
    if is_name(value.text()) {
        return Ok(());
    }
    Err(format!(
        "a name has 1 to {NAME_MAX} letters, digits, `-`, `_` and `.`, without umlauts or spaces"
    ))
}

pub(super) fn is_volume_name(_key: &str, value: &Value) -> Result<(), String> {
    let name = value.text();
    let problem = if !(1..=NAME_MAX).contains(&name.len()) {
        "it has 1 to 64 characters"
    } else if !name.chars().all(is_name_character) {
        "it has letters, digits, `-`, `_` and `.`"
    } else if name.starts_with(['.', '-']) {
        "it does not start with `.` or `-`"
    } else {
        return Ok(());
    };
    Err(format!("\"{name}\" is no name for a volume: {problem}"))
}

/// Whether a pattern, in which `*` stands for any characters and `?` for one, fits a name.
pub(super) fn fits(pattern: &str, name: &str) -> bool {
    let (pattern, name) = (pattern.as_bytes(), name.as_bytes());
    let (mut at, mut from) = (0, 0);
    // The newest star, and the first byte of the name behind its part.
    let mut star = None;
    while let Some(byte) = name.get(from) {
        match pattern.get(at) {
            Some(b'*') => {
                star = Some((at, from));
                at += 1;
            }
            Some(wanted) if wanted == byte || *wanted == b'?' => (at, from) = (at + 1, from + 1),
            _ => {
                let Some((place, begin)) = star else { return false };
                star = Some((place, begin + 1));
                (at, from) = (place + 1, begin + 1);
            }
        }
    }
    pattern.iter().skip(at).all(|byte| *byte == b'*')
}

/// The permissions of a socket: octal digits, as for chmod(1).
///
/// # Errors
/// The rule.
pub fn is_mode(key: &str, value: &Value) -> Result<(), String> {
    let text = value.text();
    let digits = (3..=4).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_digit());
    match u32::from_str_radix(text, 8) {
        Ok(0..=0o777) if digits => Ok(()),
        _ => Err(format!(
            "`{key}` is three octal digits, as in \"0660\", not \"{}\"",
            text.escape_debug()
        )),
    }
}

/// A path that is short enough for a socket.
///
/// # Errors
/// The rule.
pub fn is_socket_path(_key: &str, value: &Value) -> Result<(), String> {
    let bytes = match value {
        Value::Path(path) => path.as_os_str().len(),
        _ => 0,
    };
    if bytes <= SOCKET_PATH_MAX {
        return Ok(());
    }
    Err(format!(
        "a socket's path holds {SOCKET_PATH_MAX} bytes and this one has {bytes}; use a shorter \
         directory"
    ))
}

pub(super) fn is_block_size(key: &str, value: &Value) -> Result<(), String> {
    match value.number() {
        512 | 4096 => Ok(()),
        other => Err(format!("{key} = {other} is neither 512 nor 4096")),
    }
}

pub(super) fn is_positive(key: &str, value: &Value) -> Result<(), String> {
    match value.number() {
        0 => Err(format!("`{key}` is nothing; write for instance \"10GiB\", or leave it out")),
        _ => Ok(()),
    }
}

/// The size of a volume.
pub(super) fn is_volume_size(key: &str, value: &Value) -> Result<(), String> {
    match value.number() {
        bytes if bytes > VOLUME_MAX_BYTES => {
            Err(format!("no volume is larger than {}", size::show(VOLUME_MAX_BYTES)))
        }
        _ => is_positive(key, value),
    }
}
