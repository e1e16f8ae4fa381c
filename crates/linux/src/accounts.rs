//! Looks up users and groups by name, in the system's name service.

use std::ffi::{CString, c_char, c_int};
use std::io;
use std::mem::MaybeUninit;

/// The size of the buffer for an entry, at the first attempt.
const ROOM_BYTES: usize = 1 << 10;
/// The largest size, for a group with a great many members.
const ROOM_MAX_BYTES: usize = 1 << 24;

/// Looks up a user's number; `None` if there is no user of this name.
///
/// The name service may ask a server on the network: the call can take a while.
///
/// # Errors
/// The name service has failed.
pub fn user_id(name: &str) -> io::Result<Option<u32>> {
    look_up(name, libc::getpwnam_r, |entry| entry.pw_uid)
}

/// Looks up a group's number; `None` if there is no group of this name.
///
/// # Errors
/// See [`user_id`].
pub fn group_id(name: &str) -> io::Result<Option<u32>> {
    look_up(name, libc::getgrnam_r, |entry| entry.gr_gid)
}

/// The type of getpwnam_r and getgrnam_r: name, entry, buffer for its strings, the buffer's size,
/// and the found entry.
type Lookup<E> =
    unsafe extern "C" fn(*const c_char, *mut E, *mut c_char, usize, *mut *mut E) -> c_int;

fn look_up<E>(name: &str, call: Lookup<E>, id: impl Fn(&E) -> u32) -> io::Result<Option<u32>> {
    let name = CString::new(name)?;
    let mut room = vec![0_u8; ROOM_BYTES];
    loop {
        let mut entry = MaybeUninit::<E>::uninit();
        let mut found = std::ptr::null_mut();
        // SAFETY: the name ends in a zero byte, the buffer has the given size, and all of it lives
        // until the entry has been read.
        let error = unsafe {
            call(
                name.as_ptr(),
                entry.as_mut_ptr(),
                room.as_mut_ptr().cast(),
                room.len(),
                &raw mut found,
            )
        };
        match error {
            // SAFETY: the pointer is null, or points to the entry, which then has been written.
            0 => return Ok(unsafe { found.as_ref() }.map(&id)),
            libc::ERANGE if room.len() < ROOM_MAX_BYTES => {
                room.resize(room.len().saturating_mul(4), 0)
            }
            libc::EINTR => {}
            // The errors that getpwnam(3) lists for an unknown name, besides success.
            libc::ENOENT | libc::ESRCH | libc::EBADF | libc::EPERM => return Ok(None),
            error => return Err(io::Error::from_raw_os_error(error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_every_system_has_are_found_and_others_are_not() {
        assert_eq!((user_id("root").unwrap(), group_id("root").unwrap()), (Some(0), Some(0)));
        let daemon = user_id("daemon").unwrap().unwrap();
        assert_ne!(daemon, 0);
        for name in ["no such user", "", "a:b"] {
            assert_eq!((user_id(name).unwrap(), group_id(name).unwrap()), (None, None), "{name}");
        }
        assert!(user_id("ro\0ot").is_err());
    }
}
