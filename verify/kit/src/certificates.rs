//! Certificates of a CA, by openssl(1).

use std::io;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use crate::process::output_of;

/// A CA, and the certificates that it has issued.
#[derive(Debug)]
pub struct Certificates(TempDir);

impl Certificates {
    /// A new CA.
    ///
    /// # Errors
    /// openssl is not installed.
    pub fn new() -> io::Result<Self> {
        let new = Self(tempfile::tempdir()?);
        new.make("ca", "/CN=ca", "basicConstraints = critical,CA:TRUE", &[])?;
        Ok(new)
    }

    /// Issues a certificate for a subject, as `/CN=name`, and for names, as `IP:127.0.0.1`.
    ///
    /// # Errors
    /// openssl's.
    pub fn issue(&self, name: &str, subject: &str, alternatives: &str) -> io::Result<()> {
        let extensions =
            format!("basicConstraints = critical,CA:FALSE\nsubjectAltName = {alternatives}");
        let [ca, key] = [self.ca(), self.pair("ca").1];
        let by = ["-CA", text(&ca), "-CAkey", text(&key)];
        self.make(name, subject, &extensions, &by)
    }

    /// The CA's own certificate.
    #[must_use]
    pub fn ca(&self) -> PathBuf {
        self.pair("ca").0
    }

    /// The files of a certificate and of its key.
    #[must_use]
    pub fn pair(&self, name: &str) -> (PathBuf, PathBuf) {
        let path = |end: &str| self.0.path().join(format!("{name}.{end}"));
        (path("pem"), path("key"))
    }

    fn make(&self, name: &str, subject: &str, extensions: &str, by: &[&str]) -> io::Result<()> {
        let config = self.0.path().join(format!("{name}.conf"));
        let sections = "[req]\ndistinguished_name = subject\n[subject]\n[extensions]\n";
        std::fs::write(&config, format!("{sections}{extensions}\n"))?;
        let (certificate, key) = self.pair(name);
        let mut words = vec!["req", "-x509", "-newkey", "ec", "-pkeyopt"];
        words.extend(["ec_paramgen_curve:P-256", "-nodes", "-days", "2", "-subj", subject]);
        words.extend(["-config", text(&config), "-extensions", "extensions"]);
        words.extend(["-keyout", text(&key), "-out", text(&certificate)]);
        words.extend(by);
        output_of("openssl", &words).map(drop)
    }
}

/// A path of a temporary directory.
fn text(path: &Path) -> &str {
    path.to_str().unwrap_or_default()
}
