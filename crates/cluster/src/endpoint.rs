//! Addresses of members of etcd.

use std::fmt;
use std::str::FromStr;

/// The address of a member of etcd.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    address: String,
    is_tls: bool,
}

/// The reason why a text is no endpoint.
#[derive(Debug, thiserror::Error)]
#[error(
    "\"{0}\" is no endpoint of etcd: an endpoint is http://HOST:PORT, or https://HOST:PORT with TLS"
)]
pub struct EndpointError(String);

impl Endpoint {
    /// Whether it has TLS.
    #[must_use]
    pub const fn is_tls(&self) -> bool {
        self.is_tls
    }

    /// The host and the port, as a socket takes them.
    pub(crate) fn address(&self) -> &str {
        &self.address
    }

    /// The name or the address of the host.
    #[must_use]
    pub fn host(&self) -> &str {
        let host = self.address.rsplit_once(':').map_or("", |(host, _)| host);
        host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host)
    }
}

impl FromStr for Endpoint {
    type Err = EndpointError;

    fn from_str(text: &str) -> Result<Self, EndpointError> {
        let (rest, is_tls) = match text.strip_prefix("https://") {
            Some(rest) => (rest, true),
            None => (text.strip_prefix("http://").unwrap_or(text), false),
        };
        let address = rest.strip_suffix('/').unwrap_or(rest);
        let is_valid = address.rsplit_once(':').is_some_and(|(host, port)| {
            !host.is_empty() && !host.contains(['/', '@']) && port.parse::<u16>().is_ok()
        });
        if !is_valid {
            return Err(EndpointError(text.to_owned()));
        }
        Ok(Self { address: address.to_owned(), is_tls })
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "http{}://{}", if self.is_tls { "s" } else { "" }, self.address)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_hosts_with_ports() {
        for (text, shown, host) in [
            ("http://10.0.0.1:2379", "http://10.0.0.1:2379", "10.0.0.1"),
            ("etcd1:2379", "http://etcd1:2379", "etcd1"),
            ("http://[fd00::1]:2379/", "http://[fd00::1]:2379", "fd00::1"),
            ("https://etcd1:2379", "https://etcd1:2379", "etcd1"),
        ] {
            let endpoint: Endpoint = text.parse().unwrap();
            assert_eq!((endpoint.to_string().as_str(), endpoint.host()), (shown, host));
            assert_eq!(endpoint.is_tls(), text.starts_with("https"));
        }
        for text in
            ["", "ftp://a:1", "http://a", "https://a", "http://:1", "a:70000", "http://a:1/v3"]
        {
            let error = text.parse::<Endpoint>().unwrap_err().to_string();
            assert!(error.contains("http://HOST:PORT"), "{error}");
        }
    }
}
