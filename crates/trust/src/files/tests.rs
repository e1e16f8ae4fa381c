//! Keys on disk: made once, changed whole, and refused when they are wrong or exposed.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};

use super::file::create_directory;
use crate::{ClientName, Invitation, KeyDirectory, KeyError};

fn keys() -> (tempfile::TempDir, KeyDirectory) {
    let place = tempfile::tempdir().unwrap();
    let keys = KeyDirectory::new(place.path().join("keys"));
    (place, keys)
}

fn name(name: &str) -> ClientName {
    name.parse().unwrap()
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().mode() & 0o777
}

fn files(directory: &Path) -> Vec<PathBuf> {
    let mut paths: Vec<PathBuf> =
        fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths
}

#[test]
fn the_own_key_is_made_once() {
    let (place, keys) = keys();
    let key = keys.own_key().unwrap();
    assert_eq!(keys.own_key().unwrap().public(), key.public());
    let path = place.path().join("keys/iohost.key");
    assert_eq!((mode(&path), mode(path.parent().unwrap())), (0o600, 0o700));
    let other = KeyDirectory::new(place.path().join("other"));
    assert_ne!(other.own_key().unwrap().public(), key.public());
}

#[test]
fn threads_that_ask_at_once_get_one_key() {
    let (_place, keys) = keys();
    let ask = || keys.own_key().unwrap().public();
    let found: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(ask)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(found.iter().all(|key| *key == keys.own_key().unwrap().public()));
    assert_eq!(files(keys.path()).len(), 2, "a key, the clients, and no temporary file");
}

#[test]
fn an_own_key_that_is_wrong_is_never_replaced() {
    let (place, keys) = keys();
    keys.own_key().unwrap();
    let path = place.path().join("keys/iohost.key");
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, &text[..text.len() / 2]).unwrap();
    let error = keys.own_key().unwrap_err().to_string();
    assert!(error.contains("iohost.key: ") && error.contains("cut or was changed"), "{error}");
    assert!(keys.invite(name("a"), 0).is_err());
    fs::write(&path, &text).unwrap();
    keys.own_key().unwrap();
}

#[test]
fn an_invitation_has_all_that_the_client_needs() {
    let (place, keys) = keys();
    let made = keys.invite(name("vmhost1"), 1_700_000_000).unwrap();
    assert_eq!(made.iohost, keys.own_key().unwrap().public());
    let path = place.path().join("invitation");
    made.write(&path).unwrap();
    assert_eq!(mode(&path), 0o600);
    let read = Invitation::read(&path).unwrap();
    assert_eq!(
        (read.client, read.iohost, read.key.public()),
        (made.client, made.iohost, made.key.public())
    );
    let clients = keys.clients().unwrap();
    assert!(clients.broken.is_empty());
    let [client] = clients.invited[..] else { panic!("{clients:?}") };
    assert_eq!(
        (client.name, client.key, client.invited_at_s),
        (made.client, made.key.public(), 1_700_000_000)
    );
}

#[test]
fn the_iohost_keeps_no_private_key_of_a_client() {
    let (_place, keys) = keys();
    let invitation = keys.invite(name("vmhost1"), 0).unwrap();
    let text = invitation.to_text();
    let private = text.lines().find_map(|line| line.strip_prefix("key ")).unwrap();
    for path in files(&keys.path().join("clients")) {
        assert!(!fs::read_to_string(path).unwrap().contains(private));
    }
    assert!(!format!("{invitation:?}").contains(private), "nor does it print one");
}

#[test]
fn an_invitation_replaces_no_file() {
    let (place, keys) = keys();
    let invitation = keys.invite(name("a"), 0).unwrap();
    let path = place.path().join("invitation");
    fs::write(&path, "precious").unwrap();
    let error = invitation.write(&path).unwrap_err().to_string();
    assert!(error.contains("cannot replace it"), "{error}");
    assert_eq!(fs::read_to_string(&path).unwrap(), "precious");
    let error = invitation.write(&place.path().join("none/invitation")).unwrap_err().to_string();
    assert!(error.contains("cannot write an invitation"), "{error}");
    assert_eq!(files(place.path()).len(), 2);
}

#[test]
fn a_client_is_invited_once_and_again_after_it_was_revoked() {
    let (_place, keys) = keys();
    let first = keys.invite(name("a"), 0).unwrap();
    let error = keys.invite(name("a"), 1).unwrap_err();
    assert!(matches!(&error, KeyError::Exists { name } if name == "a"), "{error}");
    assert_eq!(keys.clients().unwrap().invited[0].key, first.key.public(), "unchanged");
    keys.revoke(name("a")).unwrap();
    assert!(keys.clients().unwrap().invited.is_empty());
    let error = keys.revoke(name("a")).unwrap_err();
    assert!(matches!(&error, KeyError::Unknown { name } if name == "a"), "{error}");
    assert_ne!(keys.invite(name("a"), 2).unwrap().key.public(), first.key.public());
}

#[test]
fn names_that_look_like_paths_stay_in_the_directory() {
    let (_place, keys) = keys();
    for odd in [".", "..", "-", ".a.client"] {
        keys.invite(name(odd), 0).unwrap();
    }
    assert_eq!(keys.clients().unwrap().invited.len(), 4);
    assert_eq!(files(&keys.path().join("clients")).len(), 4);
    keys.revoke(name("..")).unwrap();
    assert_eq!(keys.clients().unwrap().invited.len(), 3);
}

#[test]
fn a_broken_file_takes_access_from_its_client_alone() {
    let (_place, keys) = keys();
    for client in ["good", "cut", "moved", "open"] {
        keys.invite(name(client), 0).unwrap();
    }
    let path = |client: &str| keys.path().join(format!("clients/{client}.client"));
    let text = fs::read_to_string(path("cut")).unwrap();
    fs::write(path("cut"), &text[..40]).unwrap();
    fs::rename(path("moved"), path("other")).unwrap();
    fs::set_permissions(path("open"), fs::Permissions::from_mode(0o666)).unwrap();
    fs::write(keys.path().join("clients/.0123.new"), "a writer died here").unwrap();
    fs::create_dir(path("directory")).unwrap();
    let clients = keys.clients().unwrap();
    let invited: Vec<&str> = clients.invited.iter().map(|client| client.name.as_str()).collect();
    assert_eq!(invited, ["good"]);
    let broken: Vec<String> = clients.broken.iter().map(ToString::to_string).collect();
    let found = |path: PathBuf, words: &str| {
        let path = path.display().to_string();
        broken.iter().any(|error| error.starts_with(&path) && error.contains(words))
    };
    assert!(found(path("cut"), "line"), "{broken:?}");
    assert!(found(path("other"), "the file of client moved"), "{broken:?}");
    assert!(found(path("open"), "mode 0666"), "{broken:?}");
    assert!(found(path("directory"), "no regular file"), "{broken:?}");
    assert_eq!(broken.len(), 4);
}

#[test]
fn an_exposed_invitation_is_refused_with_the_remedy() {
    let (place, keys) = keys();
    let path = place.path().join("invitation");
    keys.invite(name("a"), 0).unwrap().write(&path).unwrap();
    let set = |mode| fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
    for exposed in [0o604, 0o602, 0o620, 0o644, 0o666] {
        set(exposed);
        let error = Invitation::read(&path).unwrap_err().to_string();
        assert!(error.contains(&format!("mode {exposed:04o}")) && error.contains("chmod 600"));
    }
    for private in [0o600, 0o400, 0o440] {
        set(private);
        Invitation::read(&path).unwrap();
    }
    let link = place.path().join("link");
    symlink(&path, &link).unwrap();
    Invitation::read(&link).unwrap();
}

#[test]
fn a_directory_that_others_can_write_to_is_refused_with_the_remedy() {
    let (_place, keys) = keys();
    keys.invite(name("a"), 0).unwrap();
    let clients = keys.path().join("clients");
    for (directory, mode) in [(keys.path(), 0o770), (&clients, 0o777), (&clients, 0o1777)] {
        fs::set_permissions(directory, fs::Permissions::from_mode(mode)).unwrap();
        let errors = [
            keys.clients().unwrap_err().to_string(),
            keys.own_key().unwrap_err().to_string(),
            keys.invite(name("b"), 0).unwrap_err().to_string(),
        ];
        for error in errors {
            let path = directory.display().to_string();
            assert!(error.starts_with(&path), "{error}");
            assert!(error.contains(&format!("mode {mode:04o}")) && error.contains("chmod go-w"));
        }
        fs::set_permissions(directory, fs::Permissions::from_mode(0o755)).unwrap();
        assert_eq!(keys.clients().unwrap().invited.len(), 1);
    }
}

#[test]
fn keys_of_another_user_are_refused_with_the_remedy() {
    if !rustix::process::geteuid().is_root() {
        return sidecore_skip::skip("only root can give files away");
    }
    let (place, keys) = keys();
    let invitation = place.path().join("invitation");
    keys.invite(name("a"), 0).unwrap().write(&invitation).unwrap();
    let own = keys.path().join("iohost.key");
    let give = |path: &Path, user| std::os::unix::fs::chown(path, Some(user), None).unwrap();
    let refused = |error: KeyError| {
        let error = error.to_string();
        assert!(error.contains("belongs to user 4242") && error.contains("chown"), "{error}");
    };
    give(&invitation, 4242);
    refused(Invitation::read(&invitation).unwrap_err());
    give(&invitation, 0);
    Invitation::read(&invitation).unwrap();
    for path in [&own, keys.path()] {
        give(path, 4242);
        refused(keys.own_key().unwrap_err());
        give(path, 0);
        keys.own_key().unwrap();
    }
    give(&keys.path().join("clients/a.client"), 4242);
    let clients = keys.clients().unwrap();
    assert!(clients.invited.is_empty());
    refused(clients.broken.into_iter().next().unwrap());
}

#[test]
fn files_that_are_none_are_refused_without_waiting() {
    let (place, _keys) = keys();
    let of = |path: &Path| Invitation::read(path).unwrap_err().to_string();
    assert!(of(&place.path().join("none")).contains("cannot open it: No such file"));
    assert!(of(place.path()).contains("no regular file"));
    let fifo = place.path().join("fifo");
    let mode = rustix::fs::Mode::RUSR;
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, mode, 0).unwrap();
    assert!(of(&fifo).contains("no regular file"));
    let path = place.path().join("file");
    let write = |bytes: &[u8]| {
        fs::write(&path, bytes).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    };
    write(&[0xff; 100]);
    assert!(of(&path).contains("it is no text"));
    write(&[b'#'; 5000]);
    assert!(of(&path).contains("more than 4096 bytes"));
    write(b"");
    assert!(of(&path).contains("`sidecore-invitation VERSION`"));
}

#[test]
fn the_files_of_one_kind_are_not_those_of_another() {
    let (place, keys) = keys();
    keys.invite(name("a"), 0).unwrap();
    for path in [place.path().join("keys/iohost.key"), keys.path().join("clients/a.client")] {
        let error = Invitation::read(&path).unwrap_err().to_string();
        assert!(error.contains("`sidecore-invitation VERSION`"), "{error}");
    }
}

/// A key is not durable before the names of all directories above it are.
#[test]
fn each_directory_with_a_new_name_is_synced_from_the_top() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("a/b/clients");
    let create = || {
        let mut synced = Vec::new();
        let sync = |directory: &Path| {
            assert!(directory.is_dir());
            synced.push(directory.to_owned());
            Ok(())
        };
        create_directory(&path, sync).unwrap();
        synced
    };
    let above = |name: &str| place.path().join(name);
    assert_eq!(create(), [place.path().to_owned(), above("a"), above("a/b")]);
    assert_eq!(mode(&above("a")), 0o700);
    assert_eq!(create(), Vec::<PathBuf>::new());
    fs::remove_dir_all(above("a/b/clients")).unwrap();
    assert_eq!(create(), [above("a/b")]);
    let failing = |_: &Path| Err(std::io::Error::other("the disk is gone"));
    fs::remove_dir_all(above("a")).unwrap();
    assert!(create_directory(&path, failing).is_err());
}
