//! `sidecore volume export --path`: volumes of pools that no daemon has open, encrypted and damaged
//! ones too. cryptsetup decrypts the same.

mod common;

use std::os::unix::fs::{FileExt as _, MetadataExt as _, PermissionsExt};
use std::path::Path;

use serde_json::Value;
use sha2::{Digest as _, Sha256};

use common::{Daemon, command, directory, failure, stdout};

const CONFIG: &str = r#"
control_socket = "control.sock"
[[sidecore]]
name = "sc0"
[[store]]
name = "image"
type = "file"
path = "pool.img"
"#;

const CONTROLLER: &str = r#"
[[controller]]
name = "pool"
store = "image"
format = "blank"
"#;

const NODE_BYTES: usize = 4096;
const PAGE_BYTES: usize = 4096;
const IMAGE_BYTES: usize = 6 << 20;

/// The size of a disk that does not fill its volume.
const DISK_BYTES: usize = 4 << 20;

/// A hole after the first MiB.
const HOLE: std::ops::Range<usize> = 1 << 20..2 << 20;

/// Whether the page at this offset has data. Behind the hole, every other one has, so that the
/// volume's tree has several leaves.
fn has_data(at: usize) -> bool {
    at < HOLE.start || at >= HOLE.end && (at / PAGE_BYTES).is_multiple_of(2)
}

/// Bytes that no other place has, and zeros in holes.
fn contents() -> Vec<u8> {
    let byte = |at: usize| (at * 7 + at / 253 + at / 65_537) as u8 | 1;
    (0..IMAGE_BYTES).map(|at| if has_data(at) { byte(at) } else { 0 }).collect()
}

/// Makes a key file and a header.
fn unlock(directory: &Path, name: &str) {
    let (key, header) = (format!("{name}.key"), format!("{name}.luks"));
    std::fs::write(directory.join(&key), name).unwrap();
    std::fs::set_permissions(directory.join(&key), PermissionsExt::from_mode(0o600)).unwrap();
    stdout(directory, &["luks", "format", &header, "--key-file", &key, "--pbkdf", "pbkdf2"]);
}

/// A pool with the volume `vm1`, made of an image, whose daemon has ended.
fn pool() -> tempfile::TempDir {
    pool_of(&[CONFIG, CONTROLLER].concat())
}

fn pool_of(config: &str) -> tempfile::TempDir {
    let directory = directory(config);
    let path = directory.path();
    unlock(path, "disk");
    std::fs::File::create(path.join("pool.img")).unwrap().set_len(32 << 20).unwrap();
    let image = std::fs::File::create(path.join("in.img")).unwrap();
    image.set_len(IMAGE_BYTES as u64).unwrap();
    for (page, at) in contents().chunks(PAGE_BYTES).zip((0..).step_by(PAGE_BYTES)) {
        if has_data(at) {
            image.write_all_at(page, at as u64).unwrap();
        }
    }
    let daemon = Daemon::start(directory);
    stdout(daemon.path(), &["volume", "import", "in.img", "vm1"]);
    let path = daemon.path().to_owned();
    // As a killed daemon leaves it.
    std::fs::copy(path.join("pool.img"), path.join("killed.img")).unwrap();
    let (code, message) =
        failure(&path, &["volume", "export", "vm1", "out.img", "--path", "pool.img"]);
    assert_eq!(code, Some(1));
    assert!(message.contains("in use by another device or program"), "{message}");
    daemon.directory
}

fn is_exported(directory: &Path, arguments: &[&str]) -> Vec<u8> {
    let command = ["volume", "export", "vm1", "out.img", "--force", "--path"];
    let said = stdout(directory, &[command.as_slice(), arguments].concat());
    assert!(said.starts_with("exported: \"vm1\" as out.img (raw)"), "{said}");
    let image = directory.join("out.img");
    let allocated = std::fs::metadata(&image).unwrap().blocks() * 512;
    // Half of it has data.
    assert!(allocated < IMAGE_BYTES as u64 * 7 / 12, "{allocated} bytes: the holes are none");
    let left: Vec<_> = std::fs::read_dir(directory)
        .unwrap()
        .filter(|entry| entry.as_ref().unwrap().file_name().to_str().unwrap().starts_with('.'))
        .collect();
    assert!(left.is_empty(), "{left:?}");
    std::fs::read(image).unwrap()
}

/// Encrypts or decrypts a file where it is, with the foreign program.
fn cryptsetup(directory: &Path, mode: &[&str], name: &str, image: &str) {
    let start = ["reencrypt", "--batch-mode", "--force-offline-reencrypt"];
    let path = |name: &str| directory.join(name).to_str().unwrap().to_owned();
    let (key, header) = (path(&format!("{name}.key")), path(&format!("{name}.luks")));
    let image = path(image);
    let files = ["--key-file", &key, "--header", &header, &image];
    sidecore_skip::run("cryptsetup", &[start.as_slice(), mode, &files].concat()).unwrap();
}

#[test]
fn a_volume_of_an_encrypted_pool_is_exported() {
    let directory = pool();
    let path = directory.path();
    // Another program encrypts the pool.
    std::fs::write(path.join("pool.key"), "pool").unwrap();
    std::fs::set_permissions(path.join("pool.key"), PermissionsExt::from_mode(0o600)).unwrap();
    std::fs::copy(path.join("pool.img"), path.join("copy.img")).unwrap();
    let cost = ["--encrypt", "--type", "luks2", "--pbkdf", "pbkdf2"];
    let few = ["--pbkdf-force-iterations", "1000"];
    cryptsetup(path, &[cost.as_slice(), &few].concat(), "pool", "pool.img");
    let keys = ["pool.img", "--header", "pool.luks", "--key-file", "pool.key"];
    assert!(is_exported(path, &keys) == contents());
    let export = ["volume", "export", "vm1", "x.img", "--path", "pool.img"];
    for (arguments, code, wanted) in [
        (&[][..], 1, "say --header and --key-file if it is encrypted"),
        (&["--header", "pool.luks", "--key-file", "disk.key"], 1, "no key slot opens"),
        (&["--header", "pool.luks"], 2, "--key-file"),
    ] {
        let (found, message) = failure(path, &[&export, arguments].concat());
        assert!(found == Some(code) && message.contains(wanted), "{found:?}: {message}");
    }
    let wrong = ["volume", "export", "vm2", "x.img", "--path"];
    let (_, message) = failure(path, &[wrong.as_slice(), &keys].concat());
    assert!(message.contains("there is no volume \"vm2\"; there are \"vm1\""), "{message}");
    // Without the key, the copy from before is read.
    assert!(is_exported(path, &["copy.img"]) == contents());
}

#[test]
fn an_encrypted_disk_on_a_volume_is_decrypted() {
    let directory = pool();
    let path = directory.path();
    // To the key, the contents are ciphertext as any other.
    let disk = ["pool.img", "--disk-header", "disk.luks", "--disk-key-file", "disk.key"];
    let plain = is_exported(path, &disk);
    let mode = std::fs::metadata(path.join("out.img")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600, "others must not read what was encrypted");
    // The header may say that the disk is smaller than its volume.
    std::fs::copy(path.join("disk.luks"), path.join("small.luks")).unwrap();
    fix_size(&path.join("small.luks"), DISK_BYTES);
    let small = ["pool.img", "--disk-header", "small.luks", "--disk-key-file", "disk.key"];
    assert!(is_exported(path, &small) == plain[..DISK_BYTES]);
    assert!(is_exported(path, &["pool.img"]) == contents());
    cryptsetup(path, &["--decrypt"], "disk", "out.img");
    let theirs = std::fs::read(path.join("out.img")).unwrap();
    // Never written blocks are holes here, and noise there.
    for (at, (ours, theirs)) in plain.iter().zip(theirs).enumerate() {
        assert_eq!(*ours, if has_data(at) { theirs } else { 0 }, "{at}");
    }
    assert!(plain != contents());
}

/// Gives the disk of a header a fixed size.
fn fix_size(header: &Path, size_bytes: usize) {
    const JSON: usize = 4096;
    const CHECKSUM: std::ops::Range<usize> = 448..512;
    let mut bytes = std::fs::read(header).unwrap();
    let copy_bytes = u64::from_be_bytes(bytes[8..16].try_into().unwrap()) as usize;
    for copy in bytes.chunks_exact_mut(copy_bytes).take(2) {
        let json = std::str::from_utf8(&copy[JSON..]).unwrap().trim_end_matches('\0');
        let (dynamic, fixed) = (r#""size":"dynamic""#, format!(r#""size":"{size_bytes}""#));
        assert!(json.contains(dynamic), "{json}");
        let json = json.replace(dynamic, &fixed);
        copy[JSON..].fill(0);
        copy[JSON..JSON + json.len()].copy_from_slice(json.as_bytes());
        copy[CHECKSUM].fill(0);
        let checksum = Sha256::digest(&*copy);
        copy[CHECKSUM.start..CHECKSUM.start + checksum.len()].copy_from_slice(&checksum);
    }
    std::fs::write(header, bytes).unwrap();
}

#[test]
fn a_pool_whose_log_was_not_replayed_is_exported_on_demand_only() {
    let log = tempfile::tempdir_in("/dev/shm").unwrap();
    let key = format!("crash_log = \"{}\"\n", log.path().display());
    let directory = pool_of(&[CONFIG, CONTROLLER, &key].concat());
    let path = directory.path();
    let export = ["volume", "export", "vm1", "out.img", "--path", "killed.img"];
    let (code, message) = failure(path, &export);
    assert_eq!(code, Some(1));
    assert!(message.contains("these changes with --accept-loss"), "{message}");
    let said = stdout(path, &[export.as_slice(), &["--accept-loss"]].concat());
    let wanted = "\nits last answered changes may be missing: no daemon has replayed its log\n";
    assert!(said.starts_with("exported: ") && said.ends_with(wanted), "{said}");
    let arguments = ["--accept-loss", "--force", "--json"];
    let said = stdout(path, &[export.as_slice(), &arguments].concat());
    let report: Value = serde_json::from_str(&said).unwrap();
    assert_eq!(report["may_lack_last_changes"], true);
    assert!(std::fs::read(path.join("out.img")).unwrap() == contents());
}

#[test]
fn an_image_does_not_replace_its_sources() {
    let directory = pool();
    let path = directory.path();
    std::fs::hard_link(path.join("pool.img"), path.join("link.img")).unwrap();
    let disk = ["--disk-header", "disk.luks", "--disk-key-file", "disk.key"];
    for image in ["pool.img", "./pool.img", "link.img", "disk.luks", "disk.key"] {
        let before = std::fs::read(path.join(image)).unwrap();
        let export = ["volume", "export", "vm1", image, "--force", "--path", "pool.img"];
        let (code, message) = failure(path, &[export.as_slice(), &disk].concat());
        assert_eq!(code, Some(1));
        let wanted = format!("{image} is the file ");
        assert!(message.contains(&wanted) && message.contains("the export reads"), "{message}");
        assert!(std::fs::read(path.join(image)).unwrap() == before);
    }
}

/// Damages a leaf of the volume's tree.
fn damage(pool: &Path) {
    let bytes = std::fs::read(pool).unwrap();
    let word = |node: &[u8], at: usize| u64::from_le_bytes(node[at..at + 8].try_into().unwrap());
    let nodes = bytes.chunks_exact(NODE_BYTES).enumerate().filter(|(_, node)| {
        node.starts_with(b"SCVOLNOD") && node[8] == 2 && node[9] == 0 && word(node, 16) == 1
    });
    let (index, _) = nodes.max_by_key(|(_, node)| word(node, 24)).unwrap();
    let file = std::fs::File::options().write(true).open(pool).unwrap();
    file.write_all_at(b"damage", (index * NODE_BYTES + 70) as u64).unwrap();
}

#[test]
fn a_damaged_volume_is_exported_in_part_on_demand_only() {
    let directory = pool();
    let path = directory.path();
    damage(&path.join("pool.img"));
    let before = std::fs::read(path.join("pool.img")).unwrap();
    let export = ["volume", "export", "vm1", "out.img", "--path", "pool.img"];
    let (code, message) = failure(path, &export);
    assert_eq!(code, Some(1));
    let wanted = ["volume \"vm1\" is damaged", "is lost", "say --partial"];
    assert!(wanted.iter().all(|words| message.contains(words)), "{message}");
    assert!(!path.join("out.img").exists());
    let arguments = [export.as_slice(), &["--partial", "--json"]].concat();
    let output = command(path, &arguments).output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{}", String::from_utf8_lossy(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let lost = report["lost_bytes"].as_u64().unwrap();
    assert!((1..IMAGE_BYTES as u64 / 2).contains(&lost), "{report}");
    // Each byte is right, or in a loss and zero.
    let exported = std::fs::read(path.join("out.img")).unwrap();
    let contents = contents();
    assert_eq!(exported.len(), contents.len());
    let losses = report["losses"].as_array().unwrap().iter().map(|loss| {
        let [first, len] = ["offset_bytes", "size_bytes"].map(|key| loss[key].as_u64().unwrap());
        first as usize..(first + len) as usize
    });
    let losses: Vec<_> = losses.collect();
    for (at, (found, wanted)) in exported.iter().zip(&contents).enumerate() {
        let is_lost = losses.iter().any(|loss| loss.contains(&at));
        assert!(if is_lost { *found == 0 } else { found == wanted }, "{at}");
    }
    assert_eq!(report["may_lack_last_changes"], false);
    let arguments = [export.as_slice(), &["--partial", "--force"]].concat();
    let output = command(path, &arguments).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(said.starts_with("exported in part: \"vm1\" as out.img (raw)"), "{said}");
    assert!(said.contains("\nlost: what was written in "), "{said}");
    // The pool is as it was: a repair finds the same.
    assert!(std::fs::read(path.join("pool.img")).unwrap() == before);
}
