//! The JSON gateway of etcd's API, version 3.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::Bytes;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::{Method, Request};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use sidecore_ownership::{Answer, Call, Member, Seen};
use tokio::net::TcpStream;

use crate::keys::{Keys, number, origin};

/// Larger than the keys of a large cluster.
const ANSWER_MAX_BYTES: usize = 4 << 20;

/// The address of a member of etcd.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint(String);

/// The reason why a text is no endpoint.
#[derive(Debug, thiserror::Error)]
#[error(
    "\"{0}\" is no endpoint of etcd; an endpoint is http://HOST:PORT, and TLS takes an etcd proxy \
     on this host"
)]
pub struct EndpointError(String);

impl FromStr for Endpoint {
    type Err = EndpointError;

    fn from_str(text: &str) -> Result<Self, EndpointError> {
        let address = text.strip_prefix("http://").unwrap_or(text);
        let address = address.strip_suffix('/').unwrap_or(address);
        let is_valid = address.rsplit_once(':').is_some_and(|(host, port)| {
            !host.is_empty() && !host.contains(['/', '@']) && port.parse::<u16>().is_ok()
        });
        if is_valid { Ok(Self(address.to_owned())) } else { Err(EndpointError(text.to_owned())) }
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "http://{}", self.0)
    }
}

/// A client of etcd, with one connection to one member at a time.
#[derive(Debug)]
pub struct Gateway {
    endpoints: Vec<Endpoint>,
    current: usize,
    keys: Keys,
    me: Member,
    patience: Duration,
    connection: Option<SendRequest<Full<Bytes>>>,
}

impl Gateway {
    /// A client of the members at these endpoints, for the keys of a cluster of daemons. A call
    /// fails after `patience`, and the next one goes to the next endpoint.
    #[must_use]
    pub fn new(endpoints: Vec<Endpoint>, cluster: &str, me: Member, patience: Duration) -> Self {
        let keys = Keys::new(cluster);
        Self { endpoints, current: 0, keys, me, patience, connection: None }
    }

    /// Carries out a call. Its time is that of one attempt.
    pub async fn carry_out(&mut self, call: &Call) -> Answer {
        let patience = self.patience;
        let result = match tokio::time::timeout(patience, self.attempt(call)).await {
            Ok(result) => result,
            Err(_) => Err(format!("no answer within {} ms", patience.as_millis())),
        };
        result.unwrap_or_else(|error| {
            let at = self.endpoints.get(self.current).map(ToString::to_string);
            self.connection = None;
            self.current = self.current.saturating_add(1);
            if self.current >= self.endpoints.len() {
                self.current = 0;
            }
            Answer::Failed { reason: format!("etcd at {}: {error}", at.unwrap_or_default()) }
        })
    }

    async fn attempt(&mut self, call: &Call) -> Result<Answer, String> {
        match call {
            Call::Grant { ttl_s } => {
                let answer = self.post("lease/grant", &json!({ "TTL": ttl_s.to_string() })).await?;
                let lease = i64::try_from(number(&answer, "ID")?).map_err(|e| e.to_string())?;
                let (origin, ttl_s) = (origin(&answer)?, number(&answer, "TTL")?);
                // A key that is bound to lease 0 is bound to none.
                if lease == 0 {
                    return Err("lease/grant gave no lease".to_owned());
                }
                Ok(Answer::Granted { origin, lease, ttl_s })
            }
            Call::Renew { lease } => {
                // A stream of answers, of which there is one.
                let kept =
                    self.post("lease/keepalive", &json!({ "ID": lease.to_string() })).await?;
                let kept = kept.get("result").ok_or_else(|| error_of(&kept))?;
                let renewal = (origin(kept)?, number(kept, "TTL")?);
                let range = self.keys.range();
                let read = self.post("kv/range", &range).await?;
                let seen: BTreeMap<String, Seen> = self.keys.seen(&read)?;
                Ok(Answer::Renewed { renewal, read: origin(&read)?, seen })
            }
            Call::Revoke { lease } => {
                let answer = self.post("lease/revoke", &json!({ "ID": lease.to_string() })).await?;
                Ok(Answer::Done { origin: origin(&answer)?, is_done: true })
            }
            Call::Claim { .. }
            | Call::Settle { .. }
            | Call::Announce { .. }
            | Call::Release { .. } => {
                let transaction = self.keys.transaction(call, &self.me).unwrap_or_default();
                let answer = self.post("kv/txn", &transaction).await?;
                let is_done = answer.get("succeeded").and_then(Value::as_bool).unwrap_or(false);
                Ok(Answer::Done { origin: origin(&answer)?, is_done })
            }
        }
    }

    async fn connect(&mut self) -> Result<&mut SendRequest<Full<Bytes>>, String> {
        let connection = match self.connection.take().filter(|sender| !sender.is_closed()) {
            Some(connection) => connection,
            None => {
                let endpoint = self.endpoints.get(self.current).ok_or("no endpoints")?;
                let stream = TcpStream::connect(&endpoint.0).await.map_err(|e| e.to_string())?;
                stream.set_nodelay(true).map_err(|error| error.to_string())?;
                let (sender, connection) =
                    handshake(TokioIo::new(stream)).await.map_err(|error| error.to_string())?;
                // It ends with the sender.
                tokio::spawn(connection);
                sender
            }
        };
        Ok(self.connection.insert(connection))
    }

    async fn post(&mut self, method: &str, body: &Value) -> Result<Value, String> {
        let host = self.endpoints.get(self.current).map(|endpoint| endpoint.0.clone());
        let sender = self.connect().await?;
        sender.ready().await.map_err(|error| error.to_string())?;
        let request = Request::builder()
            .method(Method::POST)
            .uri(format!("/v3/{method}"))
            .header(hyper::header::HOST, host.unwrap_or_default())
            .header(hyper::header::CONTENT_TYPE, "application/json")
            .body(Full::new(Bytes::from(body.to_string())))
            .map_err(|error| error.to_string())?;
        let response = sender.send_request(request).await.map_err(|error| error.to_string())?;
        let status = response.status();
        let body = Limited::new(response.into_body(), ANSWER_MAX_BYTES).collect().await;
        let body = body.map_err(|error| error.to_string())?.to_bytes();
        let answer: Value = serde_json::from_slice(&body)
            .map_err(|error| format!("{method} has no JSON for an answer ({status}): {error}"))?;
        if status.is_success() {
            return Ok(answer);
        }
        Err(format!("{method}: {} ({status})", error_of(&answer)))
    }
}

/// The text of an error.
fn error_of(answer: &Value) -> String {
    let error = answer.get("error").unwrap_or(answer);
    let text = error.get("message").unwrap_or(error);
    text.as_str().map_or_else(|| text.to_string(), str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_hosts_with_ports() {
        for (text, address) in [
            ("http://10.0.0.1:2379", "10.0.0.1:2379"),
            ("etcd1:2379", "etcd1:2379"),
            ("http://[fd00::1]:2379/", "[fd00::1]:2379"),
        ] {
            assert_eq!(text.parse::<Endpoint>().unwrap().0, address);
        }
        for text in ["", "https://a:1", "http://a", "http://:1", "a:70000", "http://a:1/v3"] {
            let error = text.parse::<Endpoint>().unwrap_err().to_string();
            assert!(error.contains("http://HOST:PORT"), "{error}");
        }
    }
}
