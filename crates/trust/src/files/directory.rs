//! The keys of an IOhost.
//!
//! ```text
//! DIRECTORY/iohost.key             its own private key
//! DIRECTORY/clients/NAME.client    the public key of an invited client
//! ```

use std::fs::{read_dir, remove_file};
use std::io;
use std::path::{Path, PathBuf};

use super::file::{
    check_directory, create_directory, io_error, read, sync_directory, text_error, write_new,
};
use super::invitation::Invitation;
use super::text::{Reader, Writer};
use crate::error::{KeyError, TextError};
use crate::keys::{PrivateKey, PublicKey};
use crate::name::ClientName;

const OWN_KEY: &str = "iohost.key";
const CLIENTS: &str = "clients";
const SUFFIX: &str = ".client";
const KIND_OWN: &str = "sidecore-iohost-key";
const KIND_CLIENT: &str = "sidecore-client";

/// A client that was invited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Invited {
    /// Its name.
    pub name: ClientName,
    /// Its public key.
    pub key: PublicKey,
    /// The time of the invitation, in seconds since 1970.
    pub invited_at_s: u64,
}

/// The clients of a directory.
#[derive(Debug, Default)]
pub struct Clients {
    /// In the order of their names.
    pub invited: Vec<Invited>,
    /// The files that hold no client: these clients have no access, and others do.
    pub broken: Vec<KeyError>,
}

/// The keys of an IOhost on disk. Each change is durable when its call returns; calls of several
/// processes do not disturb each other.
#[derive(Clone, Debug)]
pub struct KeyDirectory {
    path: PathBuf,
}

impl KeyDirectory {
    /// The keys in this directory, which is created with the first of them.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into() }
    }

    /// The directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The IOhost's own key. It is made when it is asked for first.
    ///
    /// # Errors
    /// The file cannot be read or written, is exposed to others, or holds no key; others can
    /// replace it. A file that is wrong is never replaced: the clients know its public key.
    pub fn own_key(&self) -> Result<PrivateKey, KeyError> {
        let path = self.path.join(OWN_KEY);
        self.check()?;
        match self.read_own_key(&path) {
            Err(KeyError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {}
            found => return found,
        }
        let key = PrivateKey::generate()?;
        self.create()?;
        let mut writer = Writer::new("The private key of this IOhost. Keep it secret.", KIND_OWN);
        writer.hex("key", key.as_bytes());
        match write_new(&path, &writer.finish()) {
            Ok(()) => Ok(key),
            // Another process was faster.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => self.read_own_key(&path),
            Err(error) => Err(io_error(&path, "write a new key")(error)),
        }
    }

    fn read_own_key(&self, path: &Path) -> Result<PrivateKey, KeyError> {
        let text = read(path)?;
        let parse = || {
            let mut reader = Reader::new(&text, KIND_OWN)?;
            let key = PrivateKey::from_bytes(&*reader.hex("key")?);
            reader.finish().map(|()| key)
        };
        parse().map_err(text_error(path))
    }

    /// Invites a client at `now_s`, in seconds since 1970: makes its key, and stores the public
    /// half. The private half is in the invitation alone, which has to reach the client as a
    /// secret.
    ///
    /// # Errors
    /// The client was invited before, or files cannot be read or written.
    pub fn invite(&self, name: ClientName, now_s: u64) -> Result<Invitation, KeyError> {
        let iohost = self.own_key()?.public();
        let key = PrivateKey::generate()?;
        self.create()?;
        let path = self.client_path(name);
        let mut writer = Writer::new("A client that this IOhost has invited.", KIND_CLIENT);
        writer.line("name", name.as_str());
        writer.hex("key", &key.public().0);
        writer.line("invited", &now_s.to_string());
        write_new(&path, &writer.finish()).map_err(|error| match error.kind() {
            io::ErrorKind::AlreadyExists => KeyError::Exists { name: name.to_string() },
            _ => io_error(&path, "write the client's key")(error),
        })?;
        Ok(Invitation { client: name, iohost, key })
    }

    /// Forgets a client's key. Its sessions are the caller's to end.
    ///
    /// # Errors
    /// The client is not invited, or its file cannot be removed.
    pub fn revoke(&self, name: ClientName) -> Result<(), KeyError> {
        let path = self.client_path(name);
        remove_file(&path).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => KeyError::Unknown { name: name.to_string() },
            _ => io_error(&path, "remove it")(error),
        })?;
        let directory = self.path.join(CLIENTS);
        sync_directory(&directory).map_err(io_error(&directory, "make a removal durable"))
    }

    /// All clients that are invited.
    ///
    /// # Errors
    /// The directory cannot be read, or others can put files into it.
    pub fn clients(&self) -> Result<Clients, KeyError> {
        self.check()?;
        let directory = self.path.join(CLIENTS);
        let mut clients = Clients::default();
        let entries = match read_dir(&directory) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(clients),
            Err(error) => return Err(io_error(&directory, "list it")(error)),
        };
        for entry in entries {
            let path = entry.map_err(io_error(&directory, "list it"))?.path();
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            // Others are temporary files of writers.
            let Some(name) = name.strip_suffix(SUFFIX) else { continue };
            match read_client(&path, name) {
                Ok(client) => clients.invited.push(client),
                // Revoked meanwhile.
                Err(KeyError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {}
                Err(error) => clients.broken.push(error),
            }
        }
        clients.invited.sort_by_key(|client| client.name);
        clients.broken.sort_by_cached_key(ToString::to_string);
        Ok(clients)
    }

    fn client_path(&self, name: ClientName) -> PathBuf {
        self.path.join(CLIENTS).join(format!("{name}{SUFFIX}"))
    }

    /// Whether the owner alone can change the directories, as far as they exist.
    fn check(&self) -> Result<(), KeyError> {
        for directory in [self.path.clone(), self.path.join(CLIENTS)] {
            match check_directory(&directory) {
                Err(KeyError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {}
                checked => checked?,
            }
        }
        Ok(())
    }

    fn create(&self) -> Result<(), KeyError> {
        let path = self.path.join(CLIENTS);
        create_directory(&path, sync_directory).map_err(io_error(&path, "create it"))
    }
}

fn read_client(path: &Path, name: &str) -> Result<Invited, KeyError> {
    let client = client_from_text(&read(path)?).map_err(text_error(path))?;
    if client.name.as_str() != name {
        let found = client.name.to_string();
        return Err(text_error(path)(TextError::OtherName { found }));
    }
    Ok(client)
}

/// The client in the text of its file.
pub(super) fn client_from_text(text: &str) -> Result<Invited, TextError> {
    let mut reader = Reader::new(text, KIND_CLIENT)?;
    let name = reader.line("name")?;
    let name = name.parse().map_err(|_| reader.wrong("name"))?;
    let key = PublicKey(*reader.hex("key")?);
    let invited_at = reader.line("invited")?;
    let invited_at_s = invited_at.parse().map_err(|_| reader.wrong("invited"))?;
    reader.finish()?;
    Ok(Invited { name, key, invited_at_s })
}
