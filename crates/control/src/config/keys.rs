//! The tables of keys: for the parser, the command line, the manual and the API's document.

pub use sidecore_assembly::spec::{
    FormatSpec, FrontEndSpec, IOHOST, Key, Kind, LINK, LinkKind, LinkSpec, SCHEDULE, SERVE,
    SIDECORE, STAGE, STAGE_THREADS, STORE, STRUCTURE, SWITCH, StageSpec, StoreKind, VOLUME, Value,
    Values, Variant,
};

use sidecore_assembly::spec::{
    CLIENT, CONTROLLER, ControllerSpec, DeviceSpec, LimitsSpec, SwitchSpec, is_mode, is_socket_path,
};

/// The keys at the top of the file.
pub const CONTROL: &[Key] = &[
    Key::new(
        "control_socket",
        Kind::Path,
        "`\"/run/sidecore/control.sock\"`",
        "the socket of the control API; `sidecore --socket` needs the same path",
    )
    .checked(is_socket_path),
    Key::new(
        "control_socket_owner",
        Kind::Text,
        "the daemon's user",
        "the user that it belongs to, as for a [device](#device): who may connect may delete \
         volumes",
    ),
    Key::new(
        "control_socket_group",
        Kind::Text,
        "the daemon's group",
        "the group that it belongs to",
    ),
    Key::new(
        "control_socket_mode",
        Kind::Text,
        "`\"0600\"`, or `\"0660\"` with a `control_socket_group`",
        "its permissions",
    )
    .checked(is_mode),
    Key::new(
        "key_directory",
        Kind::Path,
        "`\"/var/lib/sidecore/keys\"`",
        "the directory of this host's key, and of those of the [clients](#client) that it has \
         invited; `sidecore remote \
         invite` makes it",
    ),
    Key::new(
        "recording_directory",
        Kind::Path,
        "`\"/var/lib/sidecore/recordings\"`",
        "the directory of [recordings](recordings.md) of stages that are added at run time. The \
         daemon makes it, and uses none that others may write to",
    ),
    Key::new(
        "remote_state",
        Kind::Path,
        "`control_socket` with `.remote` behind it",
        "the file that keeps the sizes of devices of [IOhosts](#iohost) for the next start of the \
         daemon, if the IOhosts are away then",
    ),
];

/// The keys of a controller.
pub fn controller() -> impl Iterator<Item = &'static Key> {
    CONTROLLER.iter().chain(FormatSpec::KEYS).chain(ControllerSpec::KEYS)
}

/// The keys of every client.
pub fn client() -> impl Iterator<Item = &'static Key> {
    CLIENT.iter().chain(LimitsSpec::keys())
}

/// The keys of every link.
pub fn link() -> impl Iterator<Item = &'static Key> {
    LINK.iter().chain(LinkSpec::KEYS)
}

/// The keys of every switch.
pub fn switch() -> impl Iterator<Item = &'static Key> {
    SWITCH.iter().chain(SwitchSpec::KEYS)
}

/// The keys of links of a certain type.
pub fn of_links() -> impl Iterator<Item = &'static Key> {
    LinkKind::WORDS.into_iter().flat_map(LinkKind::keys)
}

/// The keys of a pattern that are read together: its own, and most of those of a device.
pub fn serve_structure() -> impl Iterator<Item = &'static Key> {
    SERVE.iter().chain(STRUCTURE.iter().filter(|key| !["name", "store"].contains(&key.name)))
}

/// The keys of every pattern.
pub fn serve() -> impl Iterator<Item = &'static Key> {
    serve_structure().chain(DeviceSpec::KEYS)
}

/// The keys of every device.
pub fn device() -> impl Iterator<Item = &'static Key> {
    STRUCTURE.iter().chain(DeviceSpec::KEYS)
}

/// The keys of devices with a certain front end.
pub fn front_ends() -> impl Iterator<Item = &'static Key> {
    FrontEndSpec::KINDS.iter().flat_map(|(_, keys)| keys.iter())
}

/// The keys of devices whose front end serves a disk, and is no port of a switch.
pub fn front_ends_of_disks() -> impl Iterator<Item = &'static Key> {
    let kinds = FrontEndSpec::KINDS.iter();
    let of_disks = kinds.filter(|(word, _)| FrontEndSpec::from_word(word).switch().is_none());
    of_disks.flat_map(|(_, keys)| keys.iter())
}

/// The meaning of a key without Markdown, as a sentence.
#[must_use]
pub fn sentence(meaning: &str) -> String {
    let mut text = String::new();
    let mut rest = meaning;
    while let Some((before, link)) = rest.split_once('[')
        && let Some((label, after)) = link.split_once("](")
        && let Some((_, after)) = after.split_once(')')
    {
        text.push_str(before);
        text.push_str(label);
        rest = after;
    }
    text.push_str(rest);
    let mut characters = text.chars();
    let first = characters.next().into_iter().flat_map(char::to_uppercase);
    first.chain(characters).filter(|c| *c != '`').collect()
}
