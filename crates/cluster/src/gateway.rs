//! The JSON gateway of etcd's API, version 3.

use std::collections::BTreeMap;
use std::time::Duration;

use hyper::StatusCode;
use serde_json::{Value, json};
use sidecore_ownership::{Answer, Call, Seen};

use crate::connection::{Connection, error_of};
use crate::keys::{Keys, number, origin};
use crate::{Access, Endpoint};

/// A client of etcd, with one connection to one member at a time.
#[derive(Debug)]
pub struct Gateway {
    endpoints: Vec<Endpoint>,
    current: usize,
    access: Access,
    keys: Keys,
    patience: Duration,
    connection: Option<Connection>,
}

impl Gateway {
    /// A client of the members at these endpoints, for the keys of a cluster of daemons. A call
    /// fails after `patience`, and the next one goes to the next endpoint.
    #[must_use]
    pub fn new(endpoints: Vec<Endpoint>, cluster: &str, patience: Duration) -> Self {
        let (keys, access) = (Keys::new(cluster), Access::default());
        Self { endpoints, current: 0, access, keys, patience, connection: None }
    }

    /// The same client, for an etcd that asks who its clients are.
    #[must_use]
    pub fn with_access(self, access: Access) -> Self {
        Self { access, ..self }
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
                let transaction = self.keys.transaction(call).unwrap_or_default();
                let answer = self.post("kv/txn", &transaction).await?;
                let is_done = answer.get("succeeded").and_then(Value::as_bool).unwrap_or(false);
                Ok(Answer::Done { origin: origin(&answer)?, is_done })
            }
        }
    }

    /// Sends a request, as the user. A request without a valid token was not carried out, and is
    /// sent again with a new one: tokens end with time, and with each change of users.
    async fn post(&mut self, method: &str, body: &Value) -> Result<Value, String> {
        let endpoint = self.endpoints.get(self.current).ok_or("no endpoints")?.clone();
        let mut connection = match self.connection.take().filter(Connection::is_open) {
            Some(connection) => connection,
            None => Connection::open(&endpoint, &self.access).await?,
        };
        if let Some(user) = self.access.user.as_ref().filter(|_| !connection.is_logged_in()) {
            connection.log_in(user).await?;
        }
        let mut sent = connection.send(method, body).await?;
        if let (StatusCode::UNAUTHORIZED, Some(user)) = (sent.status, &self.access.user) {
            connection.log_in(user).await?;
            sent = connection.send(method, body).await?;
        }
        self.connection = Some(connection);
        sent.success(method)
    }
}
