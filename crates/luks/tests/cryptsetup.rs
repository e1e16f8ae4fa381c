//! Headers and data are exchanged with cryptsetup, which carries out re-encryption of files in user
//! space, by a cipher of its own.

use std::fs::File;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use sidecore_luks::{
    Header, Kdf, LuksError, NewHeader, SectorSize, Segment, Tweaks, open_header, read_key_file,
    write_header,
};
use sidecore_skip::run;
use tempfile::TempDir;

const DATA_BYTES: usize = 1 << 20;
const CHEAP: Kdf = Kdf::Argon2id { passes: 4, memory_kib: 1024, lanes: 2 };

struct Files {
    directory: TempDir,
}

impl Files {
    /// A directory with a key file, and a device of plain text.
    fn new() -> Self {
        let this = Self { directory: tempfile::tempdir().unwrap() };
        std::fs::write(this.key(), b"a passphrase\nwith two lines\n").unwrap();
        std::fs::set_permissions(this.key(), PermissionsExt::from_mode(0o600)).unwrap();
        std::fs::write(this.data(), plain()).unwrap();
        this
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn key(&self) -> PathBuf {
        self.path("key")
    }

    fn header(&self) -> PathBuf {
        self.path("header")
    }

    fn data(&self) -> PathBuf {
        self.path("data")
    }

    /// Runs cryptsetup with the key file, and the header of this file if there is one.
    fn cryptsetup(&self, header: Option<&Path>, arguments: &[&str]) -> String {
        let (key, header) = (self.key(), header.map(|header| header.to_str().unwrap()));
        let mut all = arguments.to_vec();
        all.extend(["--key-file", key.to_str().unwrap(), "--batch-mode"]);
        all.extend(header.iter().flat_map(|header| ["--header", header]));
        run("cryptsetup", &all).unwrap()
    }

    /// The data of a segment, decrypted here.
    fn decrypted(&self, header: &Path) -> Vec<u8> {
        let (segment, cipher) = open(header, &self.key());
        let mut data = std::fs::read(self.data()).unwrap();
        let mut data = data.split_off(segment.offset_bytes as usize);
        cipher
            .decrypt(segment.first_unit, segment.sector, &mut data, &mut Tweaks::default())
            .unwrap();
        data
    }
}

fn plain() -> Vec<u8> {
    (0..DATA_BYTES).map(|at| (at * 31 + at / 509) as u8).collect()
}

fn open(header: &Path, key: &Path) -> (Segment, sidecore_luks::Xts) {
    let file = open_header(header).unwrap();
    let header = Header::read(&file).unwrap();
    let segment = header.segment();
    let key = header.unlock(&file, &read_key_file(key).unwrap()).unwrap();
    (segment, key.cipher())
}

fn make(files: &Files, sector_bytes: u32, kdf: Kdf) {
    let sector = SectorSize::new(sector_bytes).unwrap();
    let start = NewHeader { sector, kdf }.make(&read_key_file(&files.key()).unwrap()).unwrap();
    write_header(&files.header(), &start, false).unwrap();
}

#[test]
fn cryptsetup_opens_and_decrypts_what_was_encrypted_here() {
    let cases = [(512, CHEAP), (4096, CHEAP), (1024, Kdf::Pbkdf2 { iterations: 1000 })];
    for (sector_bytes, kdf) in cases {
        let files = Files::new();
        make(&files, sector_bytes, kdf);
        let (header, data) = (files.header(), files.data());
        let data = data.to_str().unwrap();
        let dump = run("cryptsetup", &["luksDump", header.to_str().unwrap()]).unwrap();
        assert!(dump.contains("cipher: aes-xts-plain64"), "{dump}");
        assert!(dump.contains(&format!("sector: {sector_bytes} [bytes]")), "{dump}");
        files.cryptsetup(Some(&header), &["open", "--test-passphrase", data]);

        let (segment, cipher) = open(&header, &files.key());
        let (mut encrypted, mut tweaks) = (plain(), Tweaks::default());
        cipher.encrypt(segment.first_unit, segment.sector, &mut encrypted, &mut tweaks).unwrap();
        std::fs::write(data, &encrypted).unwrap();
        let decrypt = ["reencrypt", "--decrypt", "--force-offline-reencrypt", data];
        files.cryptsetup(Some(&header), &decrypt);
        assert!(std::fs::read(data).unwrap() == plain(), "sectors of {sector_bytes} bytes");
    }
}

#[test]
fn what_cryptsetup_encrypted_is_decrypted_here() {
    for (sector_bytes, kdf) in [("512", "argon2id"), ("4096", "argon2i"), ("2048", "pbkdf2")] {
        let files = Files::new();
        let cost = if kdf == "pbkdf2" {
            ["--pbkdf-force-iterations", "1000", "--hash", "sha512"]
        } else {
            ["--pbkdf-force-iterations", "4", "--pbkdf-memory", "1024"]
        };
        let (header, data) = (files.header(), files.data());
        let mut arguments = vec!["reencrypt", "--encrypt", "--force-offline-reencrypt"];
        arguments.extend(["--type", "luks2", "--sector-size", sector_bytes, "--pbkdf", kdf]);
        arguments.extend(cost);
        arguments.push(data.to_str().unwrap());
        files.cryptsetup(Some(&header), &arguments);
        assert!(std::fs::read(&data).unwrap() != plain());
        assert!(files.decrypted(&header) == plain(), "{kdf}, sectors of {sector_bytes} bytes");
    }
}

#[test]
fn a_header_on_the_device_itself_has_the_data_behind_it() {
    let files = Files::new();
    let data = files.data();
    File::options().write(true).open(&data).unwrap().set_len(17 << 20).unwrap();
    let format = ["luksFormat", "--type", "luks2", "--pbkdf", "pbkdf2"];
    let cost = ["--pbkdf-force-iterations", "1000", data.to_str().unwrap()];
    files.cryptsetup(None, &[format.as_slice(), &cost].concat());
    let (segment, _) = open(&data, &files.key());
    assert_eq!((segment.offset_bytes, segment.len_bytes), (16 << 20, None));
    assert_eq!(files.decrypted(&data).len(), 1 << 20);
}

#[test]
fn each_of_two_passphrases_opens_and_others_do_not() {
    let files = Files::new();
    make(&files, 512, CHEAP);
    let (header, other) = (files.header(), files.path("other"));
    std::fs::write(&other, b"another").unwrap();
    std::fs::set_permissions(&other, PermissionsExt::from_mode(0o640)).unwrap();
    let (_, before) = (open(&header, &files.key()), std::fs::metadata(&header).unwrap().len());
    assert_eq!(before, NewHeader::FILE_BYTES);
    let file = open_header(&header).unwrap();
    let unlock = |key: &Path| {
        Header::read(&file).unwrap().unlock(&file, &read_key_file(key).unwrap()).map(drop)
    };
    assert!(matches!(unlock(&other), Err(LuksError::WrongKey)));
    let add = ["luksAddKey", header.to_str().unwrap(), other.to_str().unwrap()];
    files.cryptsetup(None, &[&add[..], &["--pbkdf-memory", "1024", "--iter-time", "1"]].concat());
    unlock(&other).unwrap();
    unlock(&files.key()).unwrap();
    let kill = ["luksKillSlot", header.to_str().unwrap(), "0"];
    let killed = Command::new("cryptsetup").args(kill).arg("--batch-mode").output().unwrap();
    assert!(killed.status.success());
    assert!(matches!(unlock(&files.key()), Err(LuksError::WrongKey)));
    unlock(&other).unwrap();
}

#[test]
fn cryptsetup_repairs_a_copy_that_is_found_damaged_here() {
    let files = Files::new();
    make(&files, 512, CHEAP);
    let header = files.header();
    let mut bytes = std::fs::read(&header).unwrap();
    bytes[5000] ^= 1;
    std::fs::write(&header, &bytes).unwrap();
    assert!(Header::read(&open_header(&header).unwrap()).unwrap().is_damaged());
    open(&header, &files.key());
    files.cryptsetup(None, &["repair", header.to_str().unwrap()]);
    assert!(!Header::read(&open_header(&header).unwrap()).unwrap().is_damaged());
    open(&header, &files.key());
}
