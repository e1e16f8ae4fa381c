//! Panics that are caught, because they concern a part of the daemon only.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// The longest message that is kept.
const MESSAGE_CHARS: usize = 200;

/// Calls `call`, whose panic leaves nothing behind that is used later.
///
/// # Errors
/// The message of its panic.
#[inline]
pub fn caught<T>(call: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(call)).map_err(panic_message)
}

/// The message of a panic, in printable characters.
#[cold]
#[must_use]
pub fn panic_message(panic: Box<dyn Any + Send>) -> String {
    let text = match panic.downcast::<String>() {
        Ok(text) => *text,
        Err(panic) => match panic.downcast::<&'static str>() {
            Ok(text) => (*text).to_owned(),
            Err(other) => {
                // Its drop may panic as well.
                let _ = catch_unwind(AssertUnwindSafe(|| drop(other)));
                "no message".to_owned()
            }
        },
    };
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(MESSAGE_CHARS).collect()
}

#[cfg(test)]
mod tests {
    use std::panic::panic_any;

    use super::*;

    #[test]
    fn a_message_is_short_and_printable() {
        assert_eq!(caught(|| 7), Ok(7));
        assert_eq!(caught(|| panic!("two\nlines")), Err::<(), _>("two lines".to_owned()));
        let number = 3;
        assert_eq!(caught(|| panic!("rule {number}")), Err::<(), _>("rule 3".to_owned()));
        let long = caught(|| panic!("{}", "x".repeat(1000))).unwrap_err();
        assert_eq!(long.len(), MESSAGE_CHARS);
        assert_eq!(caught(|| panic_any(7)), Err::<(), _>("no message".to_owned()));
        struct Bomb;
        impl Drop for Bomb {
            fn drop(&mut self) {
                panic!("dropped");
            }
        }
        assert_eq!(caught(|| panic_any(Bomb)), Err::<(), _>("no message".to_owned()));
    }
}
