//! An etcd with TLS, certificates of clients, and users.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use sidecore_cluster::{Access, Endpoint, Gateway, Identity, User};
use sidecore_kit::certificates::Certificates;
use sidecore_kit::etcd::Etcd;
use sidecore_kit::namespace::Namespace;
use sidecore_kit::wait;
use sidecore_ownership::{Answer, Call};

/// Longer than a busy machine needs for a call.
const PATIENCE: Duration = Duration::from_secs(60);

fn identity(certificates: &Certificates, name: &str) -> Option<Identity> {
    let (certificate, key) = certificates.pair(name);
    Some(Identity { certificate, key })
}

fn user(directory: &Path, name: &str, password: &str) -> Option<User> {
    let path = directory.join("password");
    std::fs::write(&path, password).unwrap();
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
    Some(User { name: name.into(), password: path })
}

/// A client of one member, and the thread that it runs on.
struct Client {
    gateway: Gateway,
    runtime: tokio::runtime::Runtime,
}

impl Client {
    fn new(endpoint: &str, access: &Access) -> Self {
        let endpoints: Vec<Endpoint> = vec![endpoint.parse().unwrap()];
        access.check(&endpoints).unwrap();
        let gateway = Gateway::new(endpoints, "test", PATIENCE);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        Self { gateway: gateway.with_access(access.clone()), runtime }
    }

    /// Takes a lease, and renews it.
    fn try_lease(&mut self) -> Result<i64, String> {
        let lease = match self.call(&Call::Grant { ttl_s: 60 }) {
            Answer::Granted { lease, .. } => lease,
            Answer::Failed { reason } => return Err(reason),
            other => return Err(format!("{other:?}")),
        };
        match self.call(&Call::Renew { lease }) {
            Answer::Renewed { renewal: (_, ttl_s), .. } if ttl_s > 0 => Ok(lease),
            Answer::Failed { reason } => Err(reason),
            other => Err(format!("{other:?}")),
        }
    }

    fn call(&mut self, call: &Call) -> Answer {
        self.runtime.block_on(self.gateway.carry_out(call))
    }
}

/// Asserts that a client gets no lease, for this reason.
fn assert_refused(endpoint: &str, access: &Access, reasons: &[&str]) {
    let Err(error) = Client::new(endpoint, access).try_lease() else {
        panic!("a lease, and not {reasons:?}")
    };
    assert!(reasons.iter().all(|reason| error.contains(reason)), "not {reasons:?}: {error}");
}

#[test]
fn an_etcd_with_certificates_and_users_is_reached_and_faults_are_named() {
    let (namespace, own, other) = match (Namespace::new(), Certificates::new(), Certificates::new())
    {
        (Ok(namespace), Ok(own), Ok(other)) => (namespace, own, other),
        (Err(error), ..) | (_, Err(error), _) | (.., Err(error)) => {
            return sidecore_skip::skip(error);
        }
    };
    own.issue("member", "/CN=member", "IP:127.0.0.1").unwrap();
    own.issue("io1", "/CN=io1", "DNS:io1").unwrap();
    own.issue("anonymous", "/O=sidecore", "DNS:io1").unwrap();
    other.issue("io1", "/CN=io1", "DNS:io1").unwrap();
    let _etcd = Etcd::start_secure(&namespace, "secure", &own, "member").unwrap();
    let directory = tempfile::tempdir().unwrap();
    let good = Access { ca: Some(own.ca()), identity: identity(&own, "io1"), user: None };
    let member = "https://127.0.0.1:2379";
    namespace
        .within(|| {
            let mut client = Client::new(member, &good);
            wait::succeed(PATIENCE, || client.try_lease());
            certificates(&own, &other, &good);
            Etcd::have_user(&namespace, "sidecore", "secret");
            users(&namespace, &own, (&good, directory.path()));
        })
        .unwrap();
}

fn certificates(own: &Certificates, other: &Certificates, good: &Access) {
    let member = "https://127.0.0.1:2379";
    let wrong_ca = Access { ca: Some(other.ca()), ..good.clone() };
    assert_refused(member, &wrong_ca, &["was not issued by the CA in", "ca.pem"]);
    let wrong_name = "https://127.0.0.2:2379";
    assert_refused(wrong_name, good, &[wrong_name, "certificate is not for 127.0.0.2"]);
    let none = Access { identity: None, ..good.clone() };
    assert_refused(member, &none, &[member, "it wants a certificate of its clients"]);
    let foreign = Access { identity: identity(other, "io1"), ..good.clone() };
    assert_refused(member, &foreign, &["it refuses the certificate in", "io1.pem"]);
    assert_refused("https://127.0.0.1:2579", good, &["no TLS", "http://HOST:PORT"]);
    // Not even begun with.
    let mut mixed = good.clone();
    let (certificate, key) = (own.pair("io1").0, own.pair("member").1);
    mixed.identity = Some(Identity { certificate, key });
    let error = mixed.check(&[member.parse().unwrap()]).unwrap_err();
    assert!(error.contains("member.key") && error.contains("one pair"), "{error}");
}

fn users(namespace: &Namespace, own: &Certificates, (good, directory): (&Access, &Path)) {
    let member = "https://127.0.0.1:2379";
    // etcd's gateway has no users by the names of certificates, and refuses such.
    assert_refused(member, good, &["a certificate without a common name"]);
    let good = Access { identity: identity(own, "anonymous"), ..good.clone() };
    assert_refused(member, &good, &["give a user "]);
    let with = |user| Access { user, ..good.clone() };
    let wrong = with(user(directory, "sidecore", "guess"));
    assert_refused(member, &wrong, &["refuses user \"sidecore\"", "password"]);
    let wrong = with(user(directory, "other", "secret"));
    assert_refused(member, &wrong, &["refuses user \"other\""]);
    let mut client = Client::new(member, &with(user(directory, "sidecore", "secret\n")));
    client.try_lease().unwrap();
    // A user's tokens end with a change of its password, and the client takes a new one.
    Etcd::set_password(namespace, "sidecore", "other");
    user(directory, "sidecore", "other");
    client.try_lease().unwrap();
}
