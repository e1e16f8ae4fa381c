use super::*;

const KIND: &str = "sidecore-test";

fn text() -> String {
    let mut writer = Writer::new("A comment.", KIND);
    writer.line("name", "some value");
    writer.hex("key", &[0x0f, 0xa5]);
    writer.finish().to_string()
}

fn read(text: &str) -> Result<(String, [u8; 2]), TextError> {
    let mut reader = Reader::new(text, KIND)?;
    let name = reader.line("name")?.to_owned();
    let key = *reader.hex("key")?;
    reader.finish().map(|()| (name, key))
}

#[test]
fn the_format_is_as_documented() {
    let start = "# A comment.\nsidecore-test 1\nname some value\nkey 0fa5\nchecksum ";
    assert!(text().starts_with(start), "{}", text());
    assert_eq!(read(&text()), Ok(("some value".to_owned(), [0x0f, 0xa5])));
}

#[test]
fn comments_empty_lines_and_line_ends_of_others_do_not_matter() {
    let spaced = text().replace('\n', "\r\n\n# More.\n");
    assert_eq!(read(&spaced), read(&text()));
}

#[test]
fn a_text_cut_anywhere_is_refused() {
    let text = text();
    for len in 0..text.len() - 1 {
        assert!(read(&text[..len]).is_err(), "{len} bytes");
    }
    assert!(read(text.trim_end()).is_ok(), "the last newline may be missing");
}

#[test]
fn each_changed_character_is_found() {
    let text = text();
    let start = text.find(KIND).unwrap();
    for at in start..text.len() - 1 {
        let mut bytes = text.clone().into_bytes();
        bytes[at] ^= 1;
        if let Ok(changed) = String::from_utf8(bytes) {
            assert!(read(&changed).is_err(), "{changed}");
        }
    }
}

#[test]
fn errors_say_what_is_wrong() {
    let of = |text: &str| read(text).unwrap_err().to_string();
    assert!(of("").contains("`sidecore-test VERSION`"));
    assert!(of("sidecore-other 1\n").contains("`sidecore-test VERSION`"));
    assert!(of("sidecore-test 2\n").contains("version 2, and this program knows version 1"));
    assert!(of("sidecore-test 1\nkey 0fa5\n").contains("line 2 is not `name VALUE`"));
    assert!(of(&text().replace("0fa5", "0fa")).contains("`key` is wrong in line 4"));
    assert!(of(&text().replace("0fa5", "0fag")).contains("`key` is wrong in line 4"));
    assert!(of(&text().replace("0fa5", "0fa6")).contains("checksum is wrong"));
    assert!(of(&format!("{}more\n", text())).contains("line 6 is behind the checksum"));
    assert!(of(&text().replace("some", &"x".repeat(MAX_BYTES))).contains("more than 4096 bytes"));
}
