//! Compares the project's constants and layouts with the kernel's headers, by the C compiler.

use std::fmt::Write as _;
use std::io::Write as _;
use std::process::{Command, Stdio};

/// Fails, naming each difference, unless the C expressions have these values under these headers.
/// The headers come with the C library's (`linux-libc-dev` on Debian), which every linker needs, so
/// their absence fails too.
///
/// # Panics
/// On a difference, or without a C compiler.
#[track_caller]
pub fn assert_matches(headers: &[&str], expected: &[(&str, u64)]) {
    let mut source = String::from("#include <stddef.h>\n");
    for header in headers {
        let _ = writeln!(source, "#include <{header}>");
    }
    for (expression, value) in expected {
        let _ = writeln!(
            source,
            "_Static_assert(({expression}) == {value}ull, \"{expression} is not {value}\");"
        );
    }
    let mut compiler = Command::new("cc")
        .args(["-std=gnu11", "-fsyntax-only", "-x", "c", "-"])
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("`cc`, which rustc links with, starts");
    let mut stdin = compiler.stdin.take().expect("piped");
    stdin.write_all(source.as_bytes()).expect("the compiler reads its input");
    drop(stdin);
    let output = compiler.wait_with_output().expect("the compiler ends");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Pairs for [`assert_matches`]: for each field of a structure made by `sidecore_units::layout!`,
/// the C expression for the offset of the field in a C structure, and the offset of the field in
/// the encoded bytes.
#[macro_export]
macro_rules! field_offsets {
    ($layout:ident, $c_type:literal, { $($field:ident: $c_field:literal,)* }) => {
        [$((concat!("offsetof(", $c_type, ", ", $c_field, ")"), {
            let layout = $layout::default();
            let mut value = layout;
            value.$field = !layout.$field;
            value.encode().iter().position(|byte| *byte != 0).expect("the field is encoded") as u64
        }),)*]
    };
}

#[cfg(test)]
mod tests {
    use super::assert_matches;

    #[test]
    fn equal_numbers_pass() {
        assert_matches(
            &["stdint.h"],
            &[("INT8_MAX", 127), ("sizeof(uint64_t)", 8), ("UINT64_MAX", u64::MAX)],
        );
    }

    #[test]
    #[should_panic(expected = "INT8_MAX")]
    fn a_different_number_is_named() {
        assert_matches(&["stdint.h"], &[("INT8_MAX", 128)]);
    }

    #[test]
    #[should_panic(expected = "no-such-header.h")]
    fn a_missing_header_fails() {
        assert_matches(&["no-such-header.h"], &[]);
    }
}
