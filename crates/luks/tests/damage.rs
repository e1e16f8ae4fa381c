//! Damaged and hostile headers, and files of keys that others can reach.

use std::os::unix::fs::PermissionsExt;

use sha2::{Digest as _, Sha256};
use sidecore_luks::{
    FileFault, Header, Kdf, LuksError, NewHeader, SectorSize, open_header, read_key_file,
    write_header,
};

const COPY_BYTES: usize = 0x4000;
const KEY: &[u8] = b"a passphrase";
const CHEAP: Kdf = Kdf::Argon2id { passes: 1, memory_kib: 64, lanes: 1 };

fn header() -> Vec<u8> {
    NewHeader { sector: SectorSize::SMALLEST, kdf: CHEAP }.make(KEY).unwrap()
}

fn read(bytes: &[u8]) -> Result<Header, LuksError> {
    Header::read(&bytes)
}

fn opens(bytes: &[u8]) -> bool {
    read(bytes).unwrap().unlock(&bytes, KEY).is_ok()
}

/// Writes another text and sequence number into a copy, with the right checksum.
fn rewrite(bytes: &mut [u8], copy: usize, sequence: u64, change: impl Fn(String) -> String) {
    let copy = &mut bytes[copy * COPY_BYTES..][..COPY_BYTES];
    let json = &mut copy[4096..];
    let end = json.iter().position(|byte| *byte == 0).unwrap();
    let text = change(String::from_utf8(json[..end].to_vec()).unwrap());
    json.fill(0);
    json[..text.len()].copy_from_slice(text.as_bytes());
    copy[16..24].copy_from_slice(&sequence.to_be_bytes());
    copy[448..512].fill(0);
    let sum = Sha256::digest(&*copy);
    copy[448..480].copy_from_slice(&sum);
}

/// The header with this change in both copies.
fn changed(from: &str, to: &str) -> Vec<u8> {
    let mut bytes = header();
    for copy in 0..2 {
        rewrite(&mut bytes, copy, 2, |text| {
            assert!(text.contains(from), "{text}");
            text.replace(from, to)
        });
    }
    bytes
}

#[test]
fn one_undamaged_copy_is_enough() {
    let whole = header();
    assert!(!read(&whole).unwrap().is_damaged() && opens(&whole));
    for copy in 0..2 {
        for at in [0, 7, 8, 17, 80, 260, 450, 4100, COPY_BYTES - 1] {
            let mut bytes = whole.clone();
            bytes[copy * COPY_BYTES + at] ^= 1;
            assert!(read(&bytes).unwrap().is_damaged(), "copy {copy} at {at}");
            assert!(opens(&bytes));
            bytes[(1 - copy) * COPY_BYTES + 5000] ^= 1;
            let refused = read(&bytes).map(drop);
            let is_named =
                matches!(refused, Err(LuksError::Damaged(_) | LuksError::Version { version: 3 }));
            assert!(is_named, "copy {copy} at {at}: {refused:?}");
        }
    }
}

#[test]
fn the_newer_copy_counts() {
    for newer in 0..2 {
        let mut bytes = header();
        let of = |size: u32| format!("\"sector_size\":{size}");
        rewrite(&mut bytes, newer, 7, |text| text.replace(&of(512), &of(4096)));
        assert_eq!(read(&bytes).unwrap().segment().sector.bytes(), 4096, "copy {newer}");
        bytes[newer * COPY_BYTES + 5000] ^= 1;
        assert_eq!(read(&bytes).unwrap().segment().sector.bytes(), 512);
    }
}

#[test]
fn a_wrong_key_and_a_damaged_slot_give_no_key() {
    let mut bytes = header();
    let wrong = read(&bytes).unwrap().unlock(&&*bytes, b"a passphrasf");
    assert!(matches!(wrong, Err(LuksError::WrongKey)));
    bytes[2 * COPY_BYTES + 100_000] ^= 1;
    let damaged = read(&bytes).unwrap().unlock(&&*bytes, KEY);
    assert!(matches!(damaged, Err(LuksError::WrongKey)));
    bytes.truncate(2 * COPY_BYTES + 100_000);
    assert!(matches!(read(&bytes).unwrap().unlock(&&*bytes, KEY), Err(LuksError::Io(_))));
}

#[test]
fn what_is_no_header_says_so() {
    assert!(matches!(read(&[]), Err(LuksError::NoHeader)));
    assert!(matches!(read(&[0; 1 << 20]), Err(LuksError::NoHeader)));
    let mut first = header();
    first[7] = 1;
    first[COPY_BYTES] = 0;
    assert!(matches!(read(&first), Err(LuksError::Version { version: 1 })));
}

#[test]
fn unknown_features_are_refused() {
    let unsupported = [
        ("\"keyslots_size\"", "\"requirements\":{\"mandatory\":[\"new\"]},\"keyslots_size\""),
        ("\"type\":\"crypt\"", "\"type\":\"linear\""),
        ("\"type\":\"crypt\"", "\"type\":\"crypt\",\"integrity\":{\"type\":\"aead\"}"),
        ("\"iv_tweak\":\"0\",\"encryption\":\"aes-xts-plain64\"", "\"encryption\":\"null\""),
        (
            "\"segments\":{\"0\":{",
            "\"segments\":{\"1\":{\"type\":\"crypt\",\"offset\":\"0\",\
          \"size\":\"dynamic\"},\"0\":{",
        ),
        ("\"hash\":\"sha256\",\"iterations\"", "\"hash\":\"whirlpool\",\"iterations\""),
    ];
    for (from, to) in unsupported {
        let refused = read(&changed(from, to)).map(drop);
        assert!(matches!(refused, Err(LuksError::Unsupported { .. })), "{to}: {refused:?}");
    }
    let malformed = [
        ("\"sector_size\":512", "\"sector_size\":520"),
        ("\"offset\":\"0\"", "\"offset\":\"100\""),
        ("\"offset\":\"0\"", "\"offset\":\"x\""),
        ("\"size\":\"dynamic\"", "\"size\":\"0\""),
        ("\"size\":\"dynamic\"", "\"size\":\"-1\""),
        ("\"iv_tweak\":\"0\"", "\"iv_tweak\":\"\""),
        ("\"segments\":[\"0\"]", "\"segments\":[]"),
        ("{\"keyslots\"", "{\"keyslots"),
    ];
    for (from, to) in malformed {
        let refused = read(&changed(from, to)).map(drop);
        assert!(matches!(refused, Err(LuksError::Malformed(_))), "{to}: {refused:?}");
    }
}

/// PBKDF2 repeats its iterations for each block of its hash (RFC 8018, 5.2), for each slot that is
/// tried: a long digest would multiply the work that the iterations are allowed.
#[test]
fn a_digest_that_is_longer_than_its_hash_is_refused_before_any_work() {
    let with_digest = |bytes: usize| {
        let padding = "=".repeat((3 - bytes % 3) % 3);
        let zeros = format!("{}{padding}", "A".repeat((bytes * 4).div_ceil(3)));
        let mut header = header();
        for copy in 0..2 {
            rewrite(&mut header, copy, 2, |text| {
                let key = "\"digest\":\"";
                let begin = text.find(key).unwrap() + key.len();
                let end = begin + text[begin..].find('"').unwrap();
                format!("{}{zeros}{}", &text[..begin], &text[end..])
            });
        }
        header
    };
    // As long as the hash: nothing but the key is wrong.
    let header = with_digest(32);
    assert!(matches!(read(&header).unwrap().unlock(&&*header, KEY), Err(LuksError::WrongKey)));
    for (bytes, reason) in [
        (33, "longer than a block of its hash"),
        (1024, "longer than a block of its hash"),
        (1025, "no base64 of 1 to 1024 bytes"),
    ] {
        let refused = read(&with_digest(bytes)).map(drop).unwrap_err();
        assert!(matches!(refused, LuksError::Malformed(_)), "{bytes}: {refused:?}");
        assert!(refused.to_string().contains(reason), "{bytes}: {refused}");
    }
}

/// A terminal and a log show these texts, so no control sequence of a header may get there.
#[test]
fn texts_from_a_header_are_short_and_have_no_control_characters() {
    let hostile = format!("\\u001b[2Jx\\n\u{7f}{}", "long ".repeat(500));
    let places = [
        ("\"keyslots_size\"", "\"requirements\":{\"mandatory\":[\"X\"]},\"keyslots_size\""),
        ("\"type\":\"crypt\"", "\"type\":\"X\""),
        (
            "\"encryption\":\"aes-xts-plain64\",\"sector_size\"",
            "\"encryption\":\"X\",\"sector_size\"",
        ),
        ("\"type\":\"pbkdf2\",\"keyslots\"", "\"type\":\"X\",\"keyslots\""),
        ("\"hash\":\"sha256\",\"iterations\"", "\"hash\":\"X\",\"iterations\""),
        ("\"size\":\"dynamic\"", "\"size\":\"X\""),
        ("\"offset\":\"0\"", "\"offset\":\"X\""),
        (
            "\"keyslots\":{\"0\":{\"type\":\"luks2\"",
            "\"keyslots\":{\"0\":{\"type\":\"luks2\",\"kdf\":{\"type\":\"X\"}",
        ),
        (
            "\"keyslots\":{\"0\":{\"type\":\"luks2\",\"key_size\":64,\"af\":{\"type\":\"luks1\"",
            "\"keyslots\":{\"X\":{\"type\":\"luks2\",\"key_size\":64,\"af\":{\"type\":\"luks2\"",
        ),
    ];
    for (from, to) in places {
        let bytes = changed(from, &to.replace('X', &hostile));
        let unlocked = read(&bytes).and_then(|header| header.unlock(&&*bytes, KEY));
        let text = unlocked.map(drop).unwrap_err().to_string();
        assert!(text.len() < 500 && !text.contains(char::is_control), "{to}: {text:?}");
    }
    let mut bytes = header();
    for copy in 0..2 {
        let uuid = COPY_BYTES * copy + 168;
        bytes[uuid..uuid + 4].copy_from_slice(b"\x1b[2J");
        rewrite(&mut bytes, copy, 2, |text| text);
    }
    let header = read(&bytes).unwrap();
    assert!(!header.uuid().contains(char::is_control), "{:?}", header.uuid());
}

#[test]
fn slots_beyond_the_limits_are_not_tried_and_name_the_limit() {
    let refused = |from: &str, to: &str| {
        let bytes = changed(from, to);
        read(&bytes).unwrap().unlock(&&*bytes, KEY).map(drop).unwrap_err()
    };
    let cost = |to| matches!(refused("\"memory\":64", to), LuksError::Cost { .. });
    assert!(cost("\"memory\":4294967295") && cost("\"memory\":1048577"));
    assert!(matches!(refused("\"time\":1", "\"time\":4294967295"), LuksError::Cost { .. }));
    for (from, to) in [
        ("\"stripes\":4000", "\"stripes\":4294967295"),
        ("\"stripes\":4000", "\"stripes\":0"),
        ("\"offset\":\"32768\"", "\"offset\":\"4096\""),
        ("\"size\":\"258048\"", "\"size\":\"4096\""),
        ("\"type\":\"raw\"", "\"type\":\"cooked\""),
    ] {
        assert!(matches!(refused(from, to), LuksError::Malformed(_)), "{to}");
    }
    let slot = refused("\"key_size\":64,\"af\"", "\"key_size\":32,\"af\"");
    assert!(matches!(slot, LuksError::Unsupported { .. }), "{slot}");
    let far = refused("\"offset\":\"32768\"", "\"offset\":\"18446744073709551615\"");
    assert!(matches!(far, LuksError::Io(_)), "{far}");
}

#[test]
fn a_header_is_not_overwritten_by_accident() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("header");
    write_header(&path, b"first", false).unwrap();
    let refused = write_header(&path, b"second", false);
    assert!(matches!(refused, Err(FileFault::Exists { .. })));
    assert_eq!(&std::fs::read(&path).unwrap()[..5], b"first");
    write_header(&path, b"second", true).unwrap();
    assert_eq!(&std::fs::read(&path).unwrap()[..6], b"second");
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1, "no file is left");
    assert!(matches!(open_header(directory.path()), Err(FileFault::Kind { .. })));
}

#[test]
fn key_files_are_closed_to_others() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("key");
    std::fs::write(&path, b"key\n").unwrap();
    for (mode, is_fine) in [(0o600, true), (0o440, true), (0o644, false), (0o660, false)] {
        std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
        match read_key_file(&path) {
            Ok(key) => assert!(is_fine && **key == *b"key\n", "{mode:o}"),
            Err(error) => assert!(!is_fine && error.to_string().contains("chmod"), "{error}"),
        }
    }
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
    std::fs::write(&path, b"").unwrap();
    assert!(matches!(read_key_file(&path), Err(FileFault::Size { len_bytes: 0, .. })));
    std::fs::File::options().write(true).open(&path).unwrap().set_len((8 << 20) + 1).unwrap();
    assert!(matches!(read_key_file(&path), Err(FileFault::Size { .. })));
    assert!(matches!(read_key_file(directory.path()), Err(FileFault::Kind { .. })));
    if rustix::process::geteuid().is_root() {
        std::fs::write(&path, b"key").unwrap();
        std::os::unix::fs::chown(&path, Some(65534), None).unwrap();
        assert!(matches!(read_key_file(&path), Err(FileFault::Owner { owner: 65534, .. })));
    }
}

/// Changes some bytes of the text, and repairs the checksum, so that the change gets past it.
#[test]
fn damaged_metadata_is_read_or_refused_without_a_panic() {
    let whole = header();
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = |end: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 20) as usize % end
    };
    let (mut read_count, mut refused_count) = (0, 0);
    for _ in 0..4000 {
        let mut bytes = whole.clone();
        bytes[COPY_BYTES] = 0;
        let words = [*b"\"", *b"9", *b"-", *b"{", *b"}", *b",", *b"0", *b"\\"];
        let changes: Vec<(usize, u8)> =
            (0..=next(3)).map(|_| (next(1 << 20), words[next(words.len())][0])).collect();
        rewrite(&mut bytes, 0, 1, |text| {
            let mut text = text.into_bytes();
            for (at, byte) in &changes {
                let at = at % text.len();
                text[at] = *byte;
            }
            String::from_utf8(text).unwrap()
        });
        match read(&bytes) {
            Ok(_) => read_count += 1,
            Err(error) => {
                assert!(error.to_string().len() < 500, "{error}");
                refused_count += 1;
            }
        }
    }
    assert!(read_count > 100 && refused_count > 1000, "{read_count} {refused_count}");
}
