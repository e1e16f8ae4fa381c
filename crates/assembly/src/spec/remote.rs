//! Clients of this IOhost, IOhosts of this client, and their keys.

use std::path::PathBuf;
use std::time::Duration;

use sidecore_keys::{Key, Kind, Value, Values, size};

use super::rules::{NAME, fits, has_name};
use super::stage::{SERVE_STAGE, StageOfMany};
use super::{DeviceSpec, LimitsSpec, LinkKind, LinkSpec};

/// The longest name of a client, in bytes: as on the wire (docs/vrio.md).
pub const CLIENT_NAME_MAX: usize = 16;

/// The longest name of a remote device, in bytes: as on the wire.
pub const REMOTE_DEVICE_NAME_MAX: usize = 64;

/// The key for the seal of frames.
const ENCRYPTION: Key = Key::new(
    "encryption",
    Kind::Word(&["on", "off"]),
    "`\"on\"`; `\"off\"` on `memory` links",
    "whether frames are sealed. `\"off\"` is for a dedicated cable: each station on it can read \
     and write the \
     client's devices",
);

/// The keys of a client.
pub const CLIENT: &[Key] = &[
    Key::required(
        "name",
        Kind::Text,
        "\"vmhost1\"",
        "its name, at most 16 bytes; the client's `[[iohost]]` names it as `client`",
    )
    .checked(is_client_name),
    Key::required("links", Kind::Texts, "[\"wire\"]", "the links on which it may come"),
    ENCRYPTION,
    Key::new(
        "sessions",
        Kind::Number(1, SESSIONS_MAX),
        "1",
        "how many sessions it may have on a link, 1 to 16: one for each sidecore of the client's \
         link. Each takes 8 MiB \
         of memory while it is used",
    ),
    Key::new(
        "weight",
        Kind::Number(1, 100),
        "1",
        "its share of a sidecore's time when several clients want more than there is: 1 to 100",
    ),
];

/// More sidecores than one client gives to a link.
const SESSIONS_MAX: u64 = 16;

/// A part of the remote channel that comes and goes while the daemon runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RemotePart {
    /// A wire to clients, or to an IOhost.
    Link(LinkSpec),
    /// A host that uses devices of this one.
    Client(ClientSpec),
    /// A host whose devices this one uses.
    Iohost(IohostSpec),
    /// The way to serve devices of an IOhost by their names.
    Serve(ServeSpec),
}

/// The kind of such a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RemoteKind {
    /// See [`RemotePart::Link`].
    Link,
    /// See [`RemotePart::Client`].
    Client,
    /// See [`RemotePart::Iohost`].
    Iohost,
    /// See [`RemotePart::Serve`].
    Serve,
}

impl RemoteKind {
    /// The word for it in the configuration and in messages.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Link => "link",
            Self::Client => "client",
            Self::Iohost => "iohost",
            Self::Serve => "serve",
        }
    }
}

impl RemotePart {
    /// The kind of the part.
    #[must_use]
    pub const fn kind(&self) -> RemoteKind {
        match self {
            Self::Link(_) => RemoteKind::Link,
            Self::Client(_) => RemoteKind::Client,
            Self::Iohost(_) => RemoteKind::Iohost,
            Self::Serve(_) => RemoteKind::Serve,
        }
    }

    /// The name of the part, unique among its kind.
    #[must_use]
    pub fn name(&self) -> &str {
        match self {
            Self::Link(LinkSpec { name, .. })
            | Self::Client(ClientSpec { name, .. })
            | Self::Iohost(IohostSpec { name, .. })
            | Self::Serve(ServeSpec { name, .. }) => name,
        }
    }
}

/// A client of this IOhost: a host that may use the devices exported to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientSpec {
    /// Unique among the clients.
    pub name: String,
    /// The links on which the client may come.
    pub links: Vec<String>,
    /// Whether its frames are sealed; `None` seals them except on memory links.
    pub encryption: Option<bool>,
    /// The sessions that it may have on a link.
    pub sessions: u8,
    /// Its share of a sidecore's time, if that is short.
    pub weight: u32,
    /// The most that it may do, on all links together.
    pub limits: LimitsSpec,
}

impl Default for ClientSpec {
    fn default() -> Self {
        Self {
            name: String::new(),
            links: Vec::new(),
            encryption: None,
            sessions: 1,
            weight: 1,
            limits: LimitsSpec::default(),
        }
    }
}

impl ClientSpec {
    /// The client with these values of its keys.
    #[must_use]
    pub fn from_values(values: &Values) -> Self {
        Self {
            name: values.get("name").unwrap_or_default(),
            links: values.get("links").unwrap_or_default(),
            encryption: encryption(values),
            sessions: values.get("sessions").unwrap_or(1),
            weight: values.get("weight").unwrap_or(1),
            limits: LimitsSpec::from_values(values),
        }
    }

    /// Whether frames are sealed on a link of this type.
    #[must_use]
    pub fn encrypts(&self, link: &LinkKind) -> bool {
        self.encryption.unwrap_or(!link.is_memory())
    }
}

/// The keys of an IOhost.
pub const IOHOST: &[Key] = &[
    NAME,
    Key::required("link", Kind::Text, "\"wire\"", "the link to it"),
    Key::new(
        "address",
        Kind::Text,
        "required, except on a `memory` link",
        "its address on that link: the MAC address of its interface, or for `udp` the IP address \
         and port",
    ),
    Key::new(
        "second_link",
        Kind::Text,
        "none",
        "another link, on which it may be found, too: while there is no session, it is looked for \
         on both. A `memory` link leads to an IOhost on this machine. Both links have the same \
         sidecores",
    ),
    Key::new(
        "second_address",
        Kind::Text,
        "required with `second_link`, except on a `memory` link",
        "its address on that link",
    ),
    Key::required(
        "client",
        Kind::Text,
        "\"vmhost1\"",
        "the name under which the IOhost knows this host, at most 16 bytes",
    )
    .checked(is_client_name),
    Key::new(
        "invitation",
        Kind::Path,
        "required, unless `encryption` is off",
        "the file that `sidecore remote invite` has written at the IOhost",
    ),
    ENCRYPTION,
    Key::new(
        "replay_size",
        Kind::Size,
        "`\"16MiB\"`",
        "memory, for each of its devices, for copies of writes that the IOhost has answered and \
         not yet made durable, from 1MiB to 1GiB: they \
         are sent again after a restart of the IOhost. When it is full, a flush makes room",
    )
    .checked(is_replay_size),
    Key::new(
        "on_disconnect",
        Kind::Word(&["stall", "fail"]),
        "`\"stall\"`",
        "the fate of requests while the IOhost is away or does not have their device: with \
         `stall` they wait for it, with `fail` they fail after `fail_after_s`",
    ),
    Key::new(
        "fail_after_s",
        Kind::Number(1, 3_600),
        "30",
        "how long the IOhost may be away, or a device of it missing, before requests fail, 1 to \
         3600 seconds",
    ),
];

/// An IOhost whose devices this host uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IohostSpec {
    /// Unique among the IOhosts.
    pub name: String,
    /// The link to it.
    pub link: String,
    /// Its address on that link; `None` on a memory link.
    pub address: Option<String>,
    /// Another link to it, and its address there.
    pub second: Option<(String, Option<String>)>,
    /// The name under which it knows this host.
    pub client: String,
    /// The file with the keys that it has issued.
    pub invitation: Option<PathBuf>,
    /// Whether frames are sealed; `None` seals them except on memory links.
    pub encryption: Option<bool>,
    /// Memory for the answered writes of a device that are not durable yet.
    pub replay_bytes: usize,
    /// How long the IOhost may be away before requests fail; `None` lets them wait.
    pub fail_after: Option<Duration>,
}

impl Default for IohostSpec {
    fn default() -> Self {
        Self {
            name: String::new(),
            link: String::new(),
            address: None,
            second: None,
            client: String::new(),
            invitation: None,
            encryption: None,
            replay_bytes: Self::REPLAY_BYTES,
            fail_after: None,
        }
    }
}

impl IohostSpec {
    /// The size of a replay log unless told otherwise.
    pub const REPLAY_BYTES: usize = 16 << 20;
    /// How long requests wait unless told otherwise, where they may fail.
    pub const FAIL_AFTER: Duration = Duration::from_secs(30);

    /// The IOhost with these values of its keys.
    #[must_use]
    pub fn from_values(values: &Values) -> Self {
        let fails = values.get::<String>("on_disconnect").is_some_and(|word| word == "fail");
        let after = values.get("fail_after_s").map_or(Self::FAIL_AFTER, Duration::from_secs);
        Self {
            name: values.get("name").unwrap_or_default(),
            link: values.get("link").unwrap_or_default(),
            address: values.get("address"),
            second: values
                .get("second_link")
                .map(|link: String| (link, values.get("second_address"))),
            client: values.get("client").unwrap_or_default(),
            invitation: values.get("invitation"),
            encryption: encryption(values),
            replay_bytes: values.get("replay_size").unwrap_or(Self::REPLAY_BYTES),
            fail_after: fails.then_some(after),
        }
    }

    /// The names of the links to it.
    pub fn links(&self) -> impl Iterator<Item = &String> {
        std::iter::once(&self.link).chain(self.second.as_ref().map(|(link, _)| link))
    }

    /// Whether frames are sealed on a link of this type.
    #[must_use]
    pub fn encrypts(&self, link: &LinkKind) -> bool {
        self.encryption.unwrap_or(!link.is_memory())
    }
}

/// The keys of a pattern that are not those of its devices.
pub const SERVE: &[Key] = &[
    NAME,
    Key::required(
        "iohost",
        Kind::Text,
        "\"the name of an [[iohost]]\"",
        "the IOhost whose devices are served",
    ),
    Key::new(
        "pattern",
        Kind::Text,
        "`\"*\"`",
        "the names of the devices: `*` stands for any characters, `?` for one. The first \
         `[[serve]]` that fits a device serves it",
    ),
    Key::new(
        "devices_max",
        Kind::Number(1, 256),
        "64",
        "how many devices it serves at most, 1 to 256",
    ),
    SERVE_STAGE,
];

/// The part of a socket's path, or of a stage's text, that the name of the device replaces.
pub const DEVICE_IN_PATH: &str = "{device}";

/// The way to serve the devices of an IOhost with certain names, as soon as it has them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServeSpec {
    /// Unique among the patterns.
    pub name: String,
    /// The name of the IOhost.
    pub iohost: String,
    /// See [`fits`](Self::fits).
    pub pattern: String,
    /// Devices at a time.
    pub devices_max: usize,
    /// A device without name and store. Its socket has [`DEVICE_IN_PATH`] in it.
    pub device: DeviceSpec,
    /// The stages in front of each device, in the order in which a request passes them.
    pub stages: Vec<StageOfMany>,
}

impl ServeSpec {
    /// The pattern with these values of its keys.
    #[must_use]
    pub fn from_values(values: &Values, device: DeviceSpec) -> Self {
        Self {
            name: values.get("name").unwrap_or_default(),
            iohost: values.get("iohost").unwrap_or_default(),
            pattern: values.get("pattern").unwrap_or_else(|| "*".to_owned()),
            devices_max: values.get("devices_max").unwrap_or(64),
            device,
            stages: values.get("stage").unwrap_or_default(),
        }
    }

    /// Whether the pattern fits the name of a device.
    #[must_use]
    pub fn fits(&self, device: &str) -> bool {
        fits(&self.pattern, device)
    }
}

/// The keys of a store of type `remote`.
pub(super) const REMOTE: &[Key] = &[
    Key::required(
        "iohost",
        Kind::Text,
        "\"the name of an [[iohost]]\"",
        "the IOhost that has the device",
    ),
    Key::new(
        "device",
        Kind::Text,
        "the store's name",
        "the name of the device at the IOhost, at most 64 bytes",
    )
    .checked(is_device_name),
];

/// A device of an IOhost as a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteSpec {
    /// The name of the IOhost.
    pub iohost: String,
    /// The name of the device there; `None` is the store's name.
    pub device: Option<String>,
}

impl RemoteSpec {
    /// A device of this IOhost, called as its store.
    #[must_use]
    pub fn new(iohost: impl Into<String>) -> Self {
        Self { iohost: iohost.into(), device: None }
    }

    pub(super) fn from_values(values: &Values) -> Option<Self> {
        Some(Self { iohost: values.get("iohost")?, device: values.get("device") })
    }
}

fn encryption(values: &Values) -> Option<bool> {
    values.get::<String>("encryption").map(|word| word == "on")
}

/// The rule for a client's name.
///
/// # Errors
/// The rule.
pub(super) fn is_client_name(key: &str, value: &Value) -> Result<(), String> {
    has_name(key, value)?;
    let bytes = value.text().len();
    if bytes <= CLIENT_NAME_MAX {
        return Ok(());
    }
    Err(format!(
        "`{key}` has {bytes} bytes, and the name of a client at most {CLIENT_NAME_MAX}; choose a \
         shorter one"
    ))
}

fn is_device_name(key: &str, value: &Value) -> Result<(), String> {
    has_name(key, value)
}

fn is_replay_size(key: &str, value: &Value) -> Result<(), String> {
    let (least, most) = (1 << 20, 1 << 30);
    let bytes = value.number();
    if (least..=most).contains(&bytes) {
        return Ok(());
    }
    let [bytes, least, most] = [bytes, least, most].map(size::show);
    Err(format!("{key} = {bytes} is not between {least} and {most}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_fits_names() {
        let fits = |pattern: &str, device: &str| {
            let values =
                Values(std::iter::once(("pattern", Value::Text(pattern.to_owned()))).collect());
            ServeSpec::from_values(&values, DeviceSpec::default()).fits(device)
        };
        for (pattern, device) in [
            ("*", ""),
            ("*", "db-1"),
            ("db-*", "db-"),
            ("db-*", "db-1"),
            ("*-?", "a-b-1"),
            ("a*b*c", "aXbXbXc"),
            ("db-1", "db-1"),
            ("**", "x"),
        ] {
            assert!(fits(pattern, device), "{pattern} {device}");
        }
        for (pattern, device) in [
            ("", "x"),
            ("db-*", "xdb-1"),
            ("?", ""),
            ("?", "ab"),
            ("a*b", "abc"),
            ("db-1", "db-10"),
        ] {
            assert!(!fits(pattern, device), "{pattern} {device}");
        }
        // The work is bounded by the product of the lengths.
        assert!(!fits(&"*a".repeat(32), &"a".repeat(31)));
    }
}
