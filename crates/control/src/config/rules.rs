//! The limits of what an operator may say, whether in the file or over the API.

use std::path::Path;

/// Longest name, in characters.
const NAME_MAX: usize = 64;

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
