//! The keys of a cluster in etcd, and their values.

use std::collections::BTreeMap;

use base64ct::{Base64, Encoding as _};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sidecore_ownership::{Call, Held, Ledger, Member, Origin, Seen, Settled};

/// A daemon, in values and records.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct MemberText {
    daemon: String,
    host: String,
    /// Hexadecimal: JSON numbers lose bits in other programs.
    incarnation: String,
}

impl MemberText {
    pub(crate) fn new(member: &Member) -> Self {
        let Member { name, host, incarnation } = member;
        let (daemon, host) = (name.clone(), host.clone());
        Self { daemon, host, incarnation: format!("{incarnation:016x}") }
    }

    pub(crate) fn parse(self) -> Result<Member, String> {
        let incarnation = hexadecimal(&self.incarnation)?;
        Ok(Member { name: self.daemon, host: self.host, incarnation })
    }
}

pub(crate) fn hexadecimal(text: &str) -> Result<u64, String> {
    u64::from_str_radix(text, 16).map_err(|_| format!("\"{text}\" is no hexadecimal number"))
}

#[derive(Serialize, Deserialize)]
struct OwnerText {
    #[serde(flatten)]
    by: MemberText,
    leaving: bool,
}

#[derive(Serialize, Deserialize)]
struct LedgerText {
    store: String,
    recorded: bool,
    suspects: Vec<MemberText>,
    /// Older versions have written none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    settled: Option<SettledText>,
}

#[derive(Serialize, Deserialize)]
struct SettledText {
    #[serde(flatten)]
    by: MemberText,
    epoch: u64,
}

/// The names of a cluster's keys.
#[derive(Clone, Debug)]
pub(crate) struct Keys {
    /// All keys begin so, and no other cluster's.
    prefix: String,
}

impl Keys {
    pub(crate) fn new(cluster: &str) -> Self {
        Self { prefix: format!("/sidecore/{cluster}/") }
    }

    fn owner(&self, store: &str) -> String {
        encode(&format!("{}owner/{store}", self.prefix))
    }

    fn ledger(&self, store: &str) -> String {
        encode(&format!("{}ledger/{store}", self.prefix))
    }

    /// The request for all keys. It is linearizable unless it says otherwise.
    pub(crate) fn range(&self) -> Value {
        // The prefix ends in '/', and '0' is the next character.
        let end = self.prefix.strip_suffix('/').unwrap_or_default();
        json!({ "key": encode(&self.prefix), "range_end": encode(&format!("{end}0")) })
    }

    /// The transaction of a call; `None` if the call is no transaction.
    pub(crate) fn transaction(&self, call: &Call) -> Option<Value> {
        let owner_is = |store: &str, epoch: u64| {
            json!({ "key": self.owner(store), "target": "CREATE", "result": "EQUAL",
                    "create_revision": epoch.to_string() })
        };
        let put_ledger = |store: &str, ledger: &Ledger| {
            let (key, value) = (self.ledger(store), ledger_text(ledger));
            json!({ "requestPut": { "key": key, "value": value } })
        };
        let put_owner = |store: &str, by: &Member, lease: i64, leaving: bool| {
            let value = json_text(&OwnerText { by: MemberText::new(by), leaving });
            json!({ "requestPut": { "key": self.owner(store), "value": value,
                                    "lease": lease.to_string() } })
        };
        let (compare, success) = match call {
            Call::Claim { store, by, lease, ledger_revision, ledger } => {
                let unchanged = json!({ "key": self.ledger(store), "target": "MOD",
                    "result": "EQUAL", "mod_revision": ledger_revision.to_string() });
                (
                    vec![owner_is(store, 0), unchanged],
                    vec![put_owner(store, by, *lease, false), put_ledger(store, ledger)],
                )
            }
            Call::Settle { store, epoch, ledger } => {
                (vec![owner_is(store, *epoch)], vec![put_ledger(store, ledger)])
            }
            Call::Announce { store, epoch, by, lease } => {
                (vec![owner_is(store, *epoch)], vec![put_owner(store, by, *lease, true)])
            }
            Call::Release { store, epoch, ledger } => {
                let delete = json!({ "requestDeleteRange": { "key": self.owner(store) } });
                (vec![owner_is(store, *epoch)], vec![delete, put_ledger(store, ledger)])
            }
            Call::Grant { .. } | Call::Renew { .. } | Call::Revoke { .. } => return None,
        };
        Some(json!({ "compare": compare, "success": success }))
    }

    /// The stores in the answer to [`range`](Self::range).
    pub(crate) fn seen(&self, answer: &Value) -> Result<BTreeMap<String, Seen>, String> {
        let mut stores: BTreeMap<String, Seen> = BTreeMap::new();
        let none = Vec::new();
        for pair in answer.get("kvs").and_then(Value::as_array).unwrap_or(&none) {
            let key = decode(pair.get("key"))?;
            let Some((kind, store)) =
                key.strip_prefix(&self.prefix).and_then(|rest| rest.split_once('/'))
            else {
                continue;
            };
            let seen = stores.entry(store.to_owned()).or_default();
            let value = decode(pair.get("value"));
            let read = match kind {
                "owner" => value.and_then(|value| read_owner(&value)).and_then(|owner| {
                    let epoch = number(pair, "create_revision")?;
                    seen.owner = Some(Held { epoch, ..owner });
                    Ok(())
                }),
                "ledger" => value.and_then(|value| read_ledger(&value)).and_then(|ledger| {
                    seen.ledger = Some((number(pair, "mod_revision")?, ledger));
                    Ok(())
                }),
                _ => Ok(()),
            };
            if let Err(error) = read {
                seen.fault = Some(format!("the key {key} of etcd has no valid value: {error}"));
            }
        }
        Ok(stores)
    }
}

fn read_owner(text: &str) -> Result<Held, String> {
    let OwnerText { by, leaving } = serde_json::from_str(text).map_err(|e| e.to_string())?;
    Ok(Held { by: by.parse()?, epoch: 0, is_leaving: leaving })
}

fn read_ledger(text: &str) -> Result<Ledger, String> {
    let LedgerText { store, recorded, suspects, settled } =
        serde_json::from_str(text).map_err(|error| error.to_string())?;
    let suspects = suspects.into_iter().map(MemberText::parse).collect::<Result<_, _>>()?;
    let settled = match settled {
        Some(SettledText { by, epoch }) => Some(Settled { by: by.parse()?, epoch }),
        None => None,
    };
    Ok(Ledger { store: hexadecimal(&store)?, is_recorded: recorded, suspects, settled })
}

fn ledger_text(ledger: &Ledger) -> String {
    json_text(&LedgerText {
        store: format!("{:016x}", ledger.store),
        recorded: ledger.is_recorded,
        suspects: ledger.suspects.iter().map(MemberText::new).collect(),
        settled: ledger
            .settled
            .as_ref()
            .map(|settled| SettledText { by: MemberText::new(&settled.by), epoch: settled.epoch }),
    })
}

/// A value as JSON in base64.
fn json_text(value: &impl Serialize) -> String {
    encode(&serde_json::to_string(value).unwrap_or_default())
}

fn encode(text: &str) -> String {
    Base64::encode_string(text.as_bytes())
}

fn decode(text: Option<&Value>) -> Result<String, String> {
    let text = text.and_then(Value::as_str).unwrap_or_default();
    let bytes = Base64::decode_vec(text).map_err(|error| error.to_string())?;
    String::from_utf8(bytes).map_err(|error| error.to_string())
}

/// A number of an answer, which is a string in JSON. A number that is 0 is left out.
pub(crate) fn number(value: &Value, name: &str) -> Result<u64, String> {
    match value.get(name) {
        None | Some(Value::Null) => Ok(0),
        Some(Value::String(text)) => {
            text.parse().map_err(|_| format!("`{name}` is no number: \"{text}\""))
        }
        Some(other) => other.as_u64().ok_or_else(|| format!("`{name}` is no number: {other}")),
    }
}

/// The header of an answer.
pub(crate) fn origin(answer: &Value) -> Result<Origin, String> {
    let header = answer.get("header").ok_or("the answer has no header")?;
    Ok(Origin {
        cluster: number(header, "cluster_id")?,
        member: number(header, "member_id")?,
        term: number(header, "raft_term")?,
        revision: number(header, "revision")?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(name: &str) -> Member {
        Member { name: name.into(), host: "h".into(), incarnation: u64::MAX }
    }

    #[test]
    fn keys_are_read_as_they_were_written() {
        let keys = Keys::new("rack1");
        let (me, suspects) = (member("a"), vec![member("b"), member("c")]);
        let settled = Some(Settled { by: member("c"), epoch: u64::MAX });
        let ledger = Ledger { store: 7, is_recorded: true, suspects, settled };
        let call = Call::Claim {
            store: "disk".into(),
            by: me.clone(),
            lease: 9,
            ledger_revision: 4,
            ledger: ledger.clone(),
        };
        let transaction = keys.transaction(&call).unwrap();
        let puts: Vec<&Value> =
            transaction["success"].as_array().unwrap().iter().map(|o| &o["requestPut"]).collect();
        assert_eq!(puts[0]["lease"], "9");
        let answer = json!({ "kvs": [
            { "key": puts[0]["key"], "value": puts[0]["value"], "create_revision": "5" },
            { "key": puts[1]["key"], "value": puts[1]["value"], "mod_revision": "6" },
            { "key": encode("/sidecore/rack1/other"), "value": "" },
        ] });
        let seen = keys.seen(&answer).unwrap();
        let held = Held { by: me, epoch: 5, is_leaving: false };
        let expected = Seen { owner: Some(held), ledger: Some((6, ledger)), fault: None };
        assert_eq!(seen, BTreeMap::from([("disk".to_owned(), expected)]));
    }

    #[test]
    fn a_value_that_is_not_ours_is_a_fault_of_its_store_alone() {
        let keys = Keys::new("rack1");
        let pair = |key: &str, value: &str| json!({ "key": encode(key), "value": encode(value) });
        let answer = json!({ "kvs": [
            pair("/sidecore/rack1/owner/disk", "{}"),
            pair("/sidecore/rack1/ledger/other",
                 "{\"store\":\"1\",\"recorded\":false,\"suspects\":[]}"),
        ] });
        let seen = keys.seen(&answer).unwrap();
        let fault = seen["disk"].fault.clone().unwrap();
        assert!(fault.contains("/sidecore/rack1/owner/disk"), "{fault}");
        assert_eq!(seen["other"].fault, None);
        assert!(keys.seen(&json!({ "kvs": [{ "key": "%" }] })).is_err());
    }
}
