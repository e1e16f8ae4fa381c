//! Invitations.

use std::io;
use std::path::Path;

use zeroize::Zeroizing;

use super::file::{io_error, read, text_error, write_new};
use super::text::{Reader, Writer};
use crate::error::{KeyError, TextError};
use crate::keys::{PrivateKey, PublicKey};
use crate::name::ClientName;

const KIND: &str = "sidecore-invitation";

/// All that a client needs to use an IOhost. It is a secret: its holder is the client.
#[derive(Clone, Debug)]
pub struct Invitation {
    /// The name under which the IOhost knows the client.
    pub client: ClientName,
    /// The IOhost's public key.
    pub iohost: PublicKey,
    /// The client's private key. The IOhost does not keep it.
    pub key: PrivateKey,
}

impl Invitation {
    /// Reads a file that [`write`](Self::write) has written, or that has the text of
    /// [`to_text`](Self::to_text).
    ///
    /// # Errors
    /// The file cannot be read, is exposed to others, or holds no invitation.
    pub fn read(path: &Path) -> Result<Self, KeyError> {
        Self::from_text(&read(path)?).map_err(text_error(path))
    }

    /// Writes a new file with mode 0600.
    ///
    /// # Errors
    /// The file exists, or cannot be written.
    pub fn write(&self, path: &Path) -> Result<(), KeyError> {
        write_new(path, &self.to_text()).map_err(|error| {
            let exists = error.kind() == io::ErrorKind::AlreadyExists;
            let action = if exists { "replace it by an invitation" } else { "write an invitation" };
            io_error(path, action)(error)
        })
    }

    /// The text of the file, which is wiped when it is dropped.
    #[must_use]
    pub fn to_text(&self) -> Zeroizing<String> {
        let comment =
            "An invitation to an IOhost of Sidecore. Keep it secret: it has a private key.";
        let mut writer = Writer::new(comment, KIND);
        writer.line("client", self.client.as_str());
        writer.hex("iohost", &self.iohost.0);
        writer.hex("key", self.key.as_bytes());
        writer.finish()
    }

    /// The invitation in this text.
    ///
    /// # Errors
    /// The text is that of no invitation, or of another version, or was cut or changed.
    pub fn from_text(text: &str) -> Result<Self, TextError> {
        let mut reader = Reader::new(text, KIND)?;
        let client = reader.line("client")?;
        let client = client.parse().map_err(|_| reader.wrong("client"))?;
        let iohost = PublicKey(*reader.hex("iohost")?);
        let key = PrivateKey::from_bytes(&*reader.hex("key")?);
        reader.finish()?;
        Ok(Self { client, iohost, key })
    }
}
