//! Candidates of an etcd with TLS, certificates of clients, and users.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use rustix::process::Signal;
use sidecore_kit::certificates::Certificates;
use sidecore_kit::etcd::Etcd;
use sidecore_kit::namespace::Namespace;

use super::{Cluster, Fence, Site};

const USER: &str = "sidecore";
const PASSWORD: &str = "secret";

/// The options of a candidate.
struct Options {
    endpoints: String,
    ca: PathBuf,
    identity: Option<(PathBuf, PathBuf)>,
    password: Option<PathBuf>,
}

impl Options {
    fn words(&self) -> Vec<&str> {
        let mut words = vec![self.endpoints.as_str(), "--etcd-ca", text(&self.ca)];
        if let Some((certificate, key)) = &self.identity {
            words.extend(["--etcd-certificate", text(certificate), "--etcd-key", text(key)]);
        }
        if let Some(password) = &self.password {
            words.extend(["--etcd-user", USER, "--etcd-password", text(password)]);
        }
        words
    }
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn secret(path: PathBuf, contents: &str, mode: u32) -> Option<PathBuf> {
    std::fs::write(&path, contents).unwrap();
    std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
    Some(path)
}

#[test]
fn candidates_of_a_secure_etcd_hand_over_and_the_list_shows_the_faults_of_others() {
    let (namespace, own, other) = match (Namespace::new(), Certificates::new(), Certificates::new())
    {
        (Ok(namespace), Ok(own), Ok(other)) => (namespace, own, other),
        (Err(error), ..) | (_, Err(error), _) | (.., Err(error)) => {
            return sidecore_skip::skip(error);
        }
    };
    own.issue("member", "/CN=member", "IP:127.0.0.1").unwrap();
    own.issue("io", "/O=sidecore", "DNS:io").unwrap();
    other.issue("io", "/O=sidecore", "DNS:io").unwrap();
    let etcd = Etcd::start_secure(&namespace, "secure", &own, "member").unwrap();
    Etcd::have_user(&namespace, USER, PASSWORD);
    let site = Site { etcd: Some(etcd), namespace };
    let cluster = Cluster::new(1);
    let good = || Options {
        endpoints: Etcd::secure_endpoints_at("127.0.0.1"),
        ca: own.ca(),
        identity: Some(own.pair("io")),
        password: secret(cluster.path("password"), PASSWORD, 0o600),
    };

    let first = cluster.candidate_at(&site, "a", Fence::Lock, &good().words());
    let epoch = cluster.progress_after(0);
    let mut second = cluster.candidate_at(&site, "b", Fence::Lock, &good().words());
    second.until_it_says("waiting for key");
    first.signal(Signal::USR1);
    let next = cluster.progress_after(epoch);

    let wrong = secret(cluster.path("wrong"), "guess", 0o600);
    let faults = [
        (Options { ca: other.ca(), ..good() }, "was not issued by the CA in"),
        (
            Options { endpoints: Etcd::secure_endpoints_at("127.0.0.2"), ..good() },
            "its certificate is not for 127.0.0.2",
        ),
        (Options { identity: None, ..good() }, "it wants a certificate of its clients"),
        (Options { identity: Some(other.pair("io")), ..good() }, "it refuses the certificate in"),
        (Options { password: None, ..good() }, "give a user "),
        (Options { password: wrong, ..good() }, "refuses user \"sidecore\""),
    ];
    for (options, fault) in faults {
        let candidate = cluster.candidate_at(&site, "c", Fence::Lock, &options.words());
        let listed = candidate.until_list_says(fault);
        assert!(listed.contains("candidate c: candidate"), "{listed}");
        assert!(listed.contains("etcd does not answer since"), "{listed}");
    }
    let exposed = secret(cluster.path("exposed"), PASSWORD, 0o644);
    let options = Options { password: exposed, ..good() };
    let mut refused = cluster.candidate_at(&site, "c", Fence::Lock, &options.words());
    refused.until_it_says("chmod 0600");
    assert_eq!(cluster.epoch(), next, "a candidate that etcd refuses has disturbed the owner");
    cluster.progress();
    cluster.check();
}
