//! The file's sections as written: each value has the right type, is within its limits, and has its
//! place in the file. The [`check`](super::check) decides whether the values fit together.

use std::ops::Range;
use std::path::{Path, PathBuf};

use sidecore_assembly::spec::{
    ClientSpec, ControllerSpec, DEFAULT_SPIN_US, DEVICE_IN_PATH, DeviceSpec, FormatSpec,
    FrontEndSpec, IOHOST, IdleMode, IohostSpec, Key, LINK, LinkKind, LinkSpec, Nanos, ScheduleSpec,
    ServeSpec, SidecoreSpec, SocketAccess, StageSpec, StoreKind, SwitchSpec, Values,
};
use toml::de::DeTable;

use super::keys::{self, SCHEDULE, SIDECORE, STORE, STRUCTURE};
use super::problem::Collector;
use super::section::{Head, Section};

/// The default path of the control API's socket.
pub const DEFAULT_CONTROL_SOCKET: &str = "/run/sidecore/control.sock";

/// The default directory of the crash logs, next to the control socket.
const CRASH_LOG: &str = "log";
/// Behind the name of the control socket: the file of the devices of IOhosts.
const REMOTE_STATE: &str = ".remote";

/// The default directory of an IOhost's keys.
const DEFAULT_KEY_DIRECTORY: &str = "/var/lib/sidecore/keys";

/// The default directory of recordings.
const DEFAULT_RECORDING_DIRECTORY: &str = "/var/lib/sidecore/recordings";

/// The keys of devices that are disks of guests on this host.
const OF_GUESTS: &[&str] = &[
    "socket",
    "socket_owner",
    "socket_group",
    "socket_mode",
    "queues",
    "sidecore",
    "sidecores",
    "idle",
    "spin_us",
];

/// The keys of devices that are disks.
const OF_DISKS: &[&str] =
    &["store", "sidecore", "sidecores", "idle", "spin_us", "read_only", "serial"];

/// A section: what it means, as far as its values obey their rules, and where it is.
pub(super) struct Part<T> {
    pub(super) head: Head,
    pub(super) spec: T,
}

/// The whole file.
pub(super) struct Draft {
    pub(super) head: Head,
    pub(super) control_socket: PathBuf,
    pub(super) control_access: SocketAccess,
    pub(super) key_directory: PathBuf,
    pub(super) recording_directory: PathBuf,
    pub(super) remote_state: PathBuf,
    pub(super) sidecores: Vec<Part<SidecoreDraft>>,
    pub(super) stores: Vec<Part<StoreDraft>>,
    pub(super) controllers: Vec<Part<ControllerSpec>>,
    /// `None` for one that is invalid, which has been reported.
    pub(super) schedules: Vec<Part<Option<ScheduleSpec>>>,
    pub(super) links: Vec<Part<LinkSpec>>,
    pub(super) clients: Vec<Part<ClientSpec>>,
    pub(super) iohosts: Vec<Part<IohostSpec>>,
    pub(super) serves: Vec<Part<ServeSpec>>,
    pub(super) switches: Vec<Part<SwitchSpec>>,
    pub(super) devices: Vec<Part<DeviceSpec>>,
}

pub(super) struct SidecoreDraft {
    pub(super) spec: SidecoreSpec,
    pub(super) spin_us: u64,
}

pub(super) struct StoreDraft {
    /// `None` if the section is invalid, which has been reported.
    pub(super) kind: Option<StoreKind>,
    pub(super) stages: Vec<StageSpec>,
}

impl StoreDraft {
    /// The name of the store that this store is put in front of.
    pub(super) fn inner(&self) -> Option<&str> {
        self.kind.as_ref().and_then(StoreKind::inner)
    }

    /// Whether no write gets past its stages.
    pub(super) fn is_read_only(&self) -> bool {
        self.stages.iter().any(StageSpec::is_read_only)
    }
}

/// Reads the file's text. `None` if it is not TOML: further messages about a partly parsed file
/// would confuse.
pub(super) fn read(text: &str, problems: &mut Collector<'_>) -> Option<Draft> {
    let (document, errors) = DeTable::parse_recoverable(text);
    for error in &errors {
        let message = error.message().lines().collect::<Vec<_>>().join("; ");
        problems.add(error.span().unwrap_or(0..0), "", format!("this is not TOML: {message}"));
    }
    if !errors.is_empty() {
        return None;
    }
    let mut top = Section::new(document.get_ref(), 0..0, "", problems);
    let values = top.all(keys::CONTROL);
    let mut tables = |kind| (kind, top.tables(kind, kind));
    let sidecores = tables("sidecore");
    let stores = tables("store");
    let controllers = tables("controller");
    let schedules = tables("schedule");
    let links = tables("link");
    let clients = tables("client");
    let iohosts = tables("iohost");
    let serves = tables("serve");
    let switches = tables("switch");
    let devices = tables("device");
    let head = top.finish();
    let control_socket: PathBuf =
        values.get("control_socket").unwrap_or_else(|| DEFAULT_CONTROL_SOCKET.into());
    let crash_log = control_socket.with_file_name(CRASH_LOG);
    let remote_state = values.get("remote_state").unwrap_or_else(|| {
        let mut path = control_socket.clone().into_os_string();
        path.push(REMOTE_STATE);
        path.into()
    });
    Some(Draft {
        head,
        key_directory: values.get("key_directory").unwrap_or_else(|| DEFAULT_KEY_DIRECTORY.into()),
        recording_directory: values
            .get("recording_directory")
            .unwrap_or_else(|| DEFAULT_RECORDING_DIRECTORY.into()),
        remote_state,
        control_access: SocketAccess::from_values(&values, "control_socket"),
        sidecores: each(sidecores, problems, sidecore),
        stores: each(stores, problems, store),
        controllers: each(controllers, problems, |section| controller(section, &crash_log)),
        schedules: each(schedules, problems, schedule),
        links: each(links, problems, link),
        clients: each(clients, problems, client),
        iohosts: each(iohosts, problems, iohost),
        serves: each(serves, problems, serve),
        switches: each(switches, problems, switch),
        devices: each(devices, problems, |mut section| Part {
            spec: device(&mut section),
            head: section.finish(),
        }),
        control_socket,
    })
}

/// Reads the sections of a kind.
fn each<'t, T>(
    (kind, tables): (&str, Vec<(Range<usize>, &'t DeTable<'t>)>),
    problems: &mut Collector<'_>,
    read: impl Fn(Section<'t, '_, '_>) -> Part<T>,
) -> Vec<Part<T>> {
    tables.into_iter().map(|(at, table)| read(Section::open(kind, table, at, problems))).collect()
}

fn sidecore(mut section: Section<'_, '_, '_>) -> Part<SidecoreDraft> {
    let values = section.all(SIDECORE);
    let spin_us = values.get("spin_us").unwrap_or(DEFAULT_SPIN_US);
    Part {
        spec: SidecoreDraft { spec: SidecoreSpec::from_values(&values), spin_us },
        head: section.finish(),
    }
}

fn store(mut section: Section<'_, '_, '_>) -> Part<StoreDraft> {
    let values = section.all(STORE);
    let mut stages = StageSpec::list(&values);
    let Some(word) = values.get::<String>("type") else {
        return Part { spec: StoreDraft { kind: None, stages }, head: section.give_up() };
    };
    let kind = bottom(&mut section, &word);
    // The older spelling of a stage in front of another store.
    if let Some(stage) = StageSpec::VARIANTS.iter().find(|stage| stage.word == word) {
        stages.extend(StageSpec::from_values(stage.word, &section.all(stage.keys)));
    }
    Part { spec: StoreDraft { kind, stages }, head: section.finish() }
}

/// The bottom of this type, by the keys of that type and the rules of several keys together.
pub(super) fn bottom(section: &mut Section<'_, '_, '_>, word: &str) -> Option<StoreKind> {
    let keys = StoreKind::keys(word);
    let values = section.all(keys);
    match word {
        "null" | "ram" => size_in_blocks(section, &values)?,
        "file" => direct_map(section, &values),
        _ => {}
    }
    bursts(section, keys.iter(), &values);
    StoreKind::from_values(word, &values)
}

/// Reports bursts without the rate that they belong to.
fn bursts(
    section: &mut Section<'_, '_, '_>,
    keys: impl Iterator<Item = &'static Key>,
    values: &Values,
) {
    for burst in keys.filter(|key| values.0.contains_key(key.name)) {
        if let Some(rate) = burst.name.strip_suffix("_burst")
            && !section.has(rate)
        {
            section.complain_about(
                burst.name,
                format!("`{}` has no meaning without `{rate}`", burst.name),
            );
        }
    }
}

/// `None` if the size of a store in memory was reported.
fn size_in_blocks(section: &mut Section<'_, '_, '_>, values: &Values) -> Option<()> {
    let bytes: u64 = values.get("size")?;
    let block_bytes: u64 = values.get("block_size").unwrap_or(512);
    let message = if bytes == 0 || bytes.checked_rem(block_bytes) != Some(0) {
        format!(
            "a size of {bytes} bytes is not a positive multiple of the block size of {block_bytes} \
             bytes"
        )
    } else if i64::try_from(bytes).is_err() {
        "no store is larger than 2^63 - 1 bytes".to_owned()
    } else {
        return Some(());
    };
    section.complain_about("size", message);
    None
}

fn direct_map(section: &mut Section<'_, '_, '_>, values: &Values) {
    let is_mapped = values.get::<String>("map").is_some_and(|map| map == "host-file");
    if is_mapped && (values.get("direct") == Some(false) || section.place("block_size").is_some()) {
        let message = "`map = \"host-file\"` is always direct, in the filesystem's blocks; leave \
                       out `direct` and `block_size`";
        section.complain_about("map", message);
    }
}

fn controller(mut section: Section<'_, '_, '_>, crash_log: &Path) -> Part<ControllerSpec> {
    let values = section.all(keys::controller());
    let spec = ControllerSpec::from_section(&values, crash_log);
    if spec.format.is_none() {
        for key in FormatSpec::KEYS.iter().filter(|key| values.0.contains_key(key.name)) {
            let message = format!(
                "`{}` is of use only where a store is formatted; add `format = \"blank\"`, or \
                 leave it out",
                key.name
            );
            section.complain_about(key.name, message);
        }
    }
    Part { spec, head: section.finish() }
}

pub(super) fn schedule(mut section: Section<'_, '_, '_>) -> Part<Option<ScheduleSpec>> {
    let values = section.all(SCHEDULE);
    Part { spec: ScheduleSpec::from_values(&values), head: section.finish() }
}

pub(super) fn link(mut section: Section<'_, '_, '_>) -> Part<LinkSpec> {
    let values = section.all(LINK);
    let Some(word) = values.get::<String>("type") else {
        return Part { spec: LinkSpec::default(), head: section.give_up() };
    };
    let mut spec = LinkSpec::from_values(&section.all(LinkSpec::KEYS));
    spec.kind = LinkKind::from_values(&word, &section.all(LinkKind::keys(&word)));
    spec.name = values.get("name").unwrap_or_default();
    spec.sidecores = values.get("sidecores").unwrap_or_default();
    spec.idle = idle(&mut section, &values);
    if section.place("sidecores").is_some() && spec.sidecores.is_empty() {
        section.complain_about("sidecores", "`sidecores` is empty; leave it out for the first one");
    }
    Part { spec, head: section.finish() }
}

fn switch(mut section: Section<'_, '_, '_>) -> Part<SwitchSpec> {
    let values = section.all(keys::switch());
    let mut spec = SwitchSpec::from_section(&values);
    spec.idle = idle(&mut section, &values);
    Part { spec, head: section.finish() }
}

pub(super) fn client(mut section: Section<'_, '_, '_>) -> Part<ClientSpec> {
    let values = section.all(keys::client());
    let spec = ClientSpec::from_values(&values);
    bursts(&mut section, keys::client(), &values);
    if section.place("links").is_some() && spec.links.is_empty() {
        section.complain_about("links", "`links` is empty, so the client can never come");
    }
    Part { spec, head: section.finish() }
}

pub(super) fn iohost(mut section: Section<'_, '_, '_>) -> Part<IohostSpec> {
    let spec = IohostSpec::from_values(&section.all(IOHOST));
    if spec.encryption == Some(false) && section.place("invitation").is_some() {
        let message = "`invitation` has no use with `encryption = \"off\"`; leave one of them out";
        section.complain_about("invitation", message);
    }
    if spec.second.is_none() && section.place("second_address").is_some() {
        let message = "`second_address` has no meaning without a `second_link`";
        section.complain_about("second_address", message);
    }
    if spec.fail_after.is_none() && section.place("fail_after_s").is_some() {
        let message = "`fail_after_s` has no meaning without `on_disconnect = \"fail\"`";
        section.complain_about("fail_after_s", message);
    }
    Part { spec, head: section.finish() }
}

pub(super) fn serve(mut section: Section<'_, '_, '_>) -> Part<ServeSpec> {
    let values = section.all(keys::serve_structure());
    let device = device_of(&mut section, &values);
    if device.front_end.client().is_some() && device.front_end.switch().is_none() {
        let message = "front_end = \"vrio\" has no meaning here: the IOhost exports its devices";
        section.complain_about("front_end", message);
    } else if device.front_end.switch().is_some() {
        let message = "a port of a switch has no meaning here: the devices of an IOhost are disks";
        section.complain_about("front_end", message);
    } else if device.front_end.number().is_some() {
        let message = "front_end = \"ublk\" has no meaning here: each block device of the kernel \
                       has a number of its own; write a [[store]] and a [[device]] for each";
        section.complain_about("front_end", message);
    } else if section.place("socket").is_some()
        && !device.socket.display().to_string().contains(DEVICE_IN_PATH)
    {
        let message = "`socket` has no `{device}` in it, which the name of each device replaces; \
                       write for instance \"/run/sidecore/{device}.sock\"";
        section.complain_about("socket", message);
    }
    if section.place("serial").is_some() {
        let message = "`serial` has no meaning here: each device has its own; leave it out";
        section.complain_about("serial", message);
    }
    Part { spec: ServeSpec::from_values(&values, device), head: section.finish() }
}

/// Reads a device from an opened section.
pub(super) fn device(section: &mut Section<'_, '_, '_>) -> DeviceSpec {
    let values = section.all(STRUCTURE);
    let device = device_of(section, &values);
    if device.front_end.switch().is_none() && !section.has("store") {
        section.complain_of_missing("store", "\"the name of a [[store]]\"");
    }
    device
}

/// Reads a device of which the section's structure was read.
fn device_of(section: &mut Section<'_, '_, '_>, values: &Values) -> DeviceSpec {
    let mut front_end = front_end(section, values);
    if front_end.client().is_some() && front_end.switch().is_none() {
        for key in STRUCTURE.iter().filter(|key| OF_GUESTS.contains(&key.name)) {
            let message = format!(
                "`{}` has no meaning with front_end = \"vrio\": the sidecores of the client's \
                 links serve the device",
                key.name
            );
            if section.has(key.name) {
                section.complain_about(key.name, message);
            }
        }
    } else if front_end.number().is_some() {
        for key in ["socket", "socket_owner", "socket_group", "socket_mode", "serial"] {
            if section.has(key) {
                let message = format!(
                    "`{key}` has no meaning with front_end = \"ublk\": the device is a block \
                     device of this host"
                );
                section.complain_about(key, message);
            }
        }
    } else if !front_end.has_socket() {
        let what = match front_end.interface() {
            Some(_) => "the device is an interface of this host",
            None => "the remote channel leads to its other end",
        };
        for key in ["socket", "socket_owner", "socket_group", "socket_mode", "queues"] {
            if section.has(key) {
                let message = format!(
                    "`{key}` has no meaning with front_end = \"{}\": {what}",
                    front_end.word()
                );
                section.complain_about(key, message);
            }
        }
    } else if !section.has("socket") {
        section.complain_of_missing("socket", "\"/run/sidecore/disk.sock\"");
    }
    nic(section, &front_end);
    let queues = values.get("queues").unwrap_or(front_end.queues());
    let mut spec = DeviceSpec {
        name: values.get("name").unwrap_or_default(),
        store: values.get("store").unwrap_or_default(),
        socket: values.get("socket").unwrap_or_default(),
        access: SocketAccess::from_values(values, "socket"),
        queues,
        sidecores: sidecores(section, values, queues),
        idle: idle(section, values),
        ..DeviceSpec::default()
    };
    spec.set(&section.all(DeviceSpec::KEYS));
    front_end.set(&section.all(front_end.keys()));
    DeviceSpec { front_end, ..spec }
}

/// Reports keys that a port of a switch has not.
fn nic(section: &mut Section<'_, '_, '_>, front_end: &FrontEndSpec) {
    if front_end.switch().is_none() {
        return;
    }
    for key in OF_DISKS.iter().filter(|key| section.has(key)).collect::<Vec<_>>() {
        let message = format!(
            "`{key}` has no meaning with front_end = \"{}\": its switch has the sidecore and the \
             idle mode, and a port has no store; leave it out",
            front_end.word()
        );
        section.complain_about(key, message);
    }
}

/// The way to spend idle time. A device or link without `spin_us` gets its sidecores' later.
fn idle(section: &mut Section<'_, '_, '_>, values: &Values) -> IdleMode {
    let word = values.get::<String>("idle").unwrap_or_else(|| "adaptive".to_owned());
    let mode = match word.as_str() {
        "poll" => IdleMode::Poll,
        "interrupt" => IdleMode::Interrupt,
        _ => IdleMode::Adaptive {
            spin: Nanos::from_micros(values.get("spin_us").unwrap_or(DEFAULT_SPIN_US)),
        },
    };
    if word != "adaptive" && section.place("spin_us").is_some() {
        let message =
            format!("`spin_us` has no meaning with idle = \"{word}\"; leave one of the two out");
        section.complain_about("spin_us", message);
    }
    mode
}

/// Reads the guest's view, and reports keys of other front ends.
fn front_end(section: &mut Section<'_, '_, '_>, values: &Values) -> FrontEndSpec {
    let word = values.get::<String>("front_end").unwrap_or_default();
    let front_end = FrontEndSpec::from_word(&word);
    let (own, word) = (front_end.keys(), front_end.word());
    // A pattern has keys of its own that are also those of a front end.
    let is_other = |key: &&Key| {
        !own.iter().any(|own| own.name == key.name) && !values.0.contains_key(key.name)
    };
    for key in keys::front_ends().filter(is_other) {
        let message =
            format!("`{}` has no meaning with front_end = \"{word}\"; leave it out", key.name);
        section.refuse(key.name, message);
    }
    front_end
}

/// Reads the device's sidecores, from either key.
fn sidecores(section: &mut Section<'_, '_, '_>, values: &Values, queues: u16) -> Vec<String> {
    let Some(several) = values.get::<Vec<String>>("sidecores") else {
        return values.get::<String>("sidecore").into_iter().collect();
    };
    if section.has("sidecore") {
        let message = "`sidecore` and `sidecores` exclude each other; leave one of them out";
        section.complain_about("sidecores", message);
    }
    if several.is_empty() {
        section.complain_about(
            "sidecores",
            "`sidecores` is empty; leave it out and a sidecore is chosen",
        );
    } else if several.len() > usize::from(queues) {
        let message = format!(
            "{} sidecores for {queues} queues: a queue is served by one sidecore; raise `queues`",
            several.len()
        );
        section.complain_about("sidecores", message);
    }
    several
}
