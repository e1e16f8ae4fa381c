//! The way into an etcd that asks who its clients are: TLS, and users with passwords.

use std::fs::File;
use std::io::Read as _;
use std::net::IpAddr;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{Mode, OFlags};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{
    AlertDescription, CertificateError, ClientConfig, Error as TlsError, InconsistentKeys,
    RootCertStore,
};

use crate::Endpoint;

/// Larger than any file of certificates, and than any password.
const MAX_BYTES: u64 = 1 << 20;
/// Permissions that no file with a secret has: reading or writing by others, writing by the group.
const EXPOSED: u32 = 0o027;

/// The files that etcd is reached with. They are read again for each connection, so that
/// certificates and passwords change without a restart.
#[derive(Clone, Debug, Default)]
pub struct Access {
    /// The certificates of the CA that has issued those of etcd's members: TLS is used with it.
    pub ca: Option<PathBuf>,
    /// This client's certificate, if etcd asks for one.
    pub identity: Option<Identity>,
    /// The user of etcd, if it has users.
    pub user: Option<User>,
}

/// A certificate and its key, in PEM.
#[derive(Clone, Debug)]
pub struct Identity {
    /// The file of the certificate, and of those between it and the CA's.
    pub certificate: PathBuf,
    /// The file of the key.
    pub key: PathBuf,
}

/// A user of etcd.
#[derive(Clone, Debug)]
pub struct User {
    /// The user's name.
    pub name: String,
    /// The file whose first line is the password.
    pub password: PathBuf,
}

impl Access {
    /// Checks that all files can be used, and that they fit the endpoints.
    ///
    /// # Errors
    /// The file or the endpoint that cannot be used, and the remedy.
    pub fn check(&self, endpoints: &[Endpoint]) -> Result<(), String> {
        for endpoint in endpoints {
            match (endpoint.is_tls(), &self.ca) {
                (true, None) => {
                    return Err(format!(
                        "{endpoint} has TLS, and no CA is known that its certificate is checked \
                         by: give the file of the CA"
                    ));
                }
                (false, Some(ca)) => {
                    return Err(format!(
                        "{endpoint} has no TLS, and {} is given for it: give all endpoints as \
                         https://HOST:PORT",
                        ca.display()
                    ));
                }
                (false, None) if self.user.is_some() && !is_loopback(endpoint.host()) => {
                    return Err(format!(
                        "a password to {endpoint} would be readable on the network: use https, or \
                         an endpoint on this host"
                    ));
                }
                _ => {}
            }
        }
        if self.ca.is_none()
            && let Some(Identity { certificate, .. }) = &self.identity
        {
            return Err(format!(
                "{} is for TLS, which needs the CA of etcd's members: give its file, too",
                certificate.display()
            ));
        }
        if let Some(ca) = &self.ca {
            self.tls(ca)?;
        }
        self.user.as_ref().map_or(Ok(()), |user| user.password().map(drop))
    }

    /// The configuration of a connection, by the files as they are now.
    pub(crate) fn tls(&self, ca: &Path) -> Result<Arc<ClientConfig>, String> {
        let mut roots = RootCertStore::empty();
        for certificate in certificates(ca)? {
            roots.add(certificate).map_err(|error| {
                format!("{} has a certificate that is none of a CA: {error}", ca.display())
            })?;
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| error.to_string())?
            .with_root_certificates(roots);
        let config = match &self.identity {
            None => builder.with_no_client_auth(),
            Some(Identity { certificate, key }) => {
                let secret = PrivateKeyDer::from_pem_slice(&read(key, true)?)
                    .map_err(|error| format!("{} has no key in PEM: {error}", key.display()))?;
                let chain = certificates(certificate)?;
                builder.with_client_auth_cert(chain, secret).map_err(|error| match error {
                    TlsError::InconsistentKeys(InconsistentKeys::KeyMismatch) => format!(
                        "the key in {} is not that of the certificate in {}: give the files of \
                         one pair",
                        key.display(),
                        certificate.display()
                    ),
                    other => format!(
                        "{} and {} cannot be used: {other}",
                        certificate.display(),
                        key.display()
                    ),
                })?
            }
        };
        Ok(Arc::new(config))
    }

    /// The fault in an error of TLS with a host, and the remedy.
    pub(crate) fn explain(&self, error: &TlsError, host: &str) -> String {
        let ca = self.ca.as_deref().unwrap_or(Path::new("")).display();
        match error {
            TlsError::InvalidCertificate(fault) => match fault {
                CertificateError::UnknownIssuer | CertificateError::BadSignature => format!(
                    "its certificate was not issued by the CA in {ca}: give the file of its CA"
                ),
                CertificateError::NotValidForName
                | CertificateError::NotValidForNameContext { .. } => format!(
                    "its certificate is not for {host}: give the endpoint by a name or an address \
                     that the certificate has, or issue one for {host}"
                ),
                CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
                    "its certificate has expired: renew it, or correct this host's clock".to_owned()
                }
                other => format!("its certificate is not valid: {other}"),
            },
            TlsError::AlertReceived(
                AlertDescription::CertificateRequired
                | AlertDescription::BadCertificate
                | AlertDescription::UnknownCA
                | AlertDescription::CertificateUnknown
                | AlertDescription::CertificateExpired
                | AlertDescription::CertificateRevoked,
            ) => match &self.identity {
                None => "it wants a certificate of its clients: give this host one, with its key"
                    .to_owned(),
                Some(Identity { certificate, .. }) => format!(
                    "it refuses the certificate in {}: have one issued by the CA that etcd trusts \
                     for clients",
                    certificate.display()
                ),
            },
            TlsError::InvalidMessage(_) => {
                format!("its answer is no TLS ({error}): give it as http://HOST:PORT")
            }
            other => format!("TLS: {other}"),
        }
    }
}

impl User {
    /// The first line of the file.
    pub(crate) fn password(&self) -> Result<String, String> {
        let path = self.password.display();
        let bytes = read(&self.password, true)?;
        let text = String::from_utf8(bytes).map_err(|_| format!("{path} is no text"))?;
        match text.lines().next() {
            Some(line) if !line.is_empty() => Ok(line.to_owned()),
            _ => Err(format!("{path} has no password in its first line")),
        }
    }
}

/// Whether an endpoint's host is this one.
fn is_loopback(host: &str) -> bool {
    host == "localhost" || host.parse().is_ok_and(|address: IpAddr| address.is_loopback())
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let bytes = read(path, false)?;
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&bytes).collect();
    match found {
        Ok(found) if !found.is_empty() => Ok(found),
        Ok(_) => Err(format!("{} has no certificate in PEM", path.display())),
        Err(error) => Err(format!("{} is no PEM: {error}", path.display())),
    }
}

/// Reads a file, which others cannot read if it is secret.
fn read(path: &Path, is_secret: bool) -> Result<Vec<u8>, String> {
    let shown = path.display();
    let failed = |error: std::io::Error| format!("cannot read {shown}: {error}");
    // Opening a pipe would wait for a writer.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let opened = rustix::fs::open(path, flags, Mode::empty());
    let file = File::from(opened.map_err(|error| failed(error.into()))?);
    let metadata = file.metadata().map_err(failed)?;
    if !metadata.is_file() {
        return Err(format!("{shown} is no file"));
    }
    if is_secret {
        let (owner, user) = (metadata.uid(), rustix::process::geteuid().as_raw());
        if owner != user && owner != 0 {
            return Err(format!("{shown} belongs to user {owner}: chown {user} {shown}"));
        }
        let mode = metadata.mode() & 0o777;
        if mode & EXPOSED != 0 {
            return Err(format!("others can use {shown} (mode {mode:04o}): chmod 0600 {shown}"));
        }
    }
    let mut bytes = Vec::new();
    file.take(MAX_BYTES).read_to_end(&mut bytes).map_err(failed)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use tempfile::TempDir;

    use super::*;

    fn file(directory: &TempDir, name: &str, contents: &str, mode: u32) -> PathBuf {
        let path = directory.path().join(name);
        std::fs::write(&path, contents).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        path
    }

    fn assert_refused(access: &Access, endpoint: &str, expected: &[&str]) {
        let error = access.check(&[endpoint.parse().unwrap()]).unwrap_err();
        assert!(expected.iter().all(|part| error.contains(part)), "{expected:?}: {error}");
    }

    #[test]
    fn endpoints_and_files_fit() {
        let directory = tempfile::tempdir().unwrap();
        let (http, https) = ("http://10.0.0.1:2379", "https://10.0.0.1:2379");
        let none = Access::default();
        none.check(&[http.parse().unwrap()]).unwrap();
        assert_refused(&none, https, &[https, "give the file of the CA"]);
        let ca = Some(file(&directory, "ca.pem", "no PEM\n", 0o644));
        let with_ca = Access { ca, ..Access::default() };
        assert_refused(&with_ca, http, &[http, "ca.pem", "https://HOST:PORT"]);
        assert_refused(&with_ca, https, &["ca.pem has no certificate"]);
        let missing = Access { ca: Some(directory.path().join("no.pem")), ..Access::default() };
        assert_refused(&missing, https, &["cannot read", "no.pem"]);
        let [certificate, key] = ["c.pem", "k.pem"].map(|name| directory.path().join(name));
        let identity = Some(Identity { certificate, key });
        assert_refused(&Access { identity, ..none }, http, &["c.pem", "needs the CA"]);
    }

    #[test]
    fn a_password_is_a_line_of_a_file_that_others_cannot_read() {
        let directory = tempfile::tempdir().unwrap();
        let user = |contents, mode| Access {
            user: Some(User {
                name: "sidecore".into(),
                password: file(&directory, "password", contents, mode),
            }),
            ..Access::default()
        };
        let here = "http://127.0.0.1:2379";
        user("secret\n", 0o600).check(&[here.parse().unwrap()]).unwrap();
        assert_eq!(user("secret\n", 0o600).user.unwrap().password().unwrap(), "secret");
        assert_refused(&user("secret\n", 0o644), here, &["password", "0644", "chmod 0600"]);
        assert_refused(&user("\nsecret\n", 0o600), here, &["no password in its first line"]);
        assert_refused(&user("secret\n", 0o600), "10.0.0.1:2379", &["readable on the network"]);
    }
}
