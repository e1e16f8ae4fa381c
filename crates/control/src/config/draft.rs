//! The file's sections as they were written: each value by itself is of the right type and within its limits, and
//! knows where it stands. Whether they fit together is decided in [`check`](super::check).

use std::ops::Range;
use std::path::PathBuf;
use std::time::Duration;

use sidecore_assembly::spec::{DeviceSpec, FileOptions, FrontEndSpec, MINUTE_US, STAGE, STRUCTURE, StageSpec};
use toml::Spanned;
use toml::de::DeTable;

use super::access::{self, AccessDraft};
use super::controller::{self, ControllerDraft, VolumeDraft};
use super::problem::Collector;
use super::rules::{about_names, is_name};
use super::section::Section;

/// Where sidecored listens for its control API unless told otherwise.
pub const DEFAULT_CONTROL_SOCKET: &str = "/run/sidecore/control.sock";

/// What every section has.
pub(super) struct Head {
    /// `None` if it has none or none that can be used.
    pub(super) name: Option<Spanned<String>>,
    /// What messages call the section.
    pub(super) subject: String,
    /// Where its heading is.
    pub(super) heading: Range<usize>,
}

impl Head {
    pub(super) fn name(&self) -> Option<&str> {
        self.name.as_ref().map(|name| name.get_ref().as_str())
    }
}

/// All of the file.
pub(super) struct Draft {
    pub(super) control_socket: Option<Spanned<PathBuf>>,
    pub(super) control_access: AccessDraft,
    pub(super) sidecores: Vec<SidecoreDraft>,
    pub(super) stores: Vec<StoreDraft>,
    pub(super) controllers: Vec<ControllerDraft>,
    pub(super) devices: Vec<DeviceDraft>,
}

pub(super) struct SidecoreDraft {
    pub(super) head: Head,
    pub(super) cpu: Option<Spanned<u32>>,
    pub(super) spin_us: Option<u64>,
}

pub(super) struct StoreDraft {
    pub(super) head: Head,
    /// `None` if the section cannot be made sense of, which was reported.
    pub(super) kind: Option<KindDraft>,
    pub(super) stages: Vec<StageSpec>,
}

/// As [`StoreKind`](sidecore_assembly::spec::StoreKind), with places.
pub(super) enum KindDraft {
    Null { size_bytes: u64, block_bytes: u32 },
    Ram { size_bytes: Spanned<u64>, block_bytes: u32 },
    File(Spanned<FileOptions>, FileMap),
    Store { store: Spanned<String> },
    Volume(VolumeDraft),
    PhysicalFunction { controller: Spanned<String> },
}

/// How the blocks of a file are reached.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum FileMap {
    /// By the file's own offsets, as any program does.
    File,
    /// On the block device below, by the host filesystem's mapping.
    HostFile,
}

impl KindDraft {
    /// The store that this one is put in front of.
    pub(super) fn inner(&self) -> Option<&Spanned<String>> {
        match self {
            Self::Store { store } => Some(store),
            _ => None,
        }
    }

    /// The controller that it is a function of.
    pub(super) fn controller(&self) -> Option<&Spanned<String>> {
        match self {
            Self::Volume(volume) => Some(&volume.controller),
            Self::PhysicalFunction { controller } => Some(controller),
            _ => None,
        }
    }
}

pub(super) struct DeviceDraft {
    pub(super) head: Head,
    pub(super) store: Option<Spanned<String>>,
    pub(super) socket: Option<Spanned<PathBuf>>,
    pub(super) access: AccessDraft,
    /// As written: by `sidecore`, by `sidecores`, or not at all.
    pub(super) sidecores: Vec<Spanned<String>>,
    pub(super) idle: &'static str,
    pub(super) spin_us: Option<u64>,
    /// The rest of it.
    pub(super) spec: DeviceSpec,
}

/// Reads the file's text. `None` if it is not TOML: more about a file that was half understood would
/// confuse.
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
    let control_socket = top.path("control_socket");
    let control_access = access::access(&mut top, &access::CONTROL);
    let sidecores = top.tables("sidecore", "sidecore");
    let stores = top.tables("store", "store");
    let controllers = top.tables("controller", "controller");
    let devices = top.tables("device", "device");
    top.finish();
    Some(Draft {
        control_socket,
        control_access,
        sidecores: sidecores.into_iter().map(|(at, table)| sidecore(table, at, problems)).collect(),
        stores: stores.into_iter().map(|(at, table)| store(table, at, problems)).collect(),
        controllers: controllers.into_iter().map(|(at, table)| controller::controller(table, at, problems)).collect(),
        devices: devices.into_iter().map(|(at, table)| device(table, at, problems)).collect(),
    })
}

fn sidecore(table: &DeTable<'_>, at: Range<usize>, problems: &mut Collector<'_>) -> SidecoreDraft {
    let (mut section, head) = open("sidecore", table, at, problems);
    let draft = SidecoreDraft {
        head,
        cpu: section.number("cpu", 0..=u32::MAX),
        spin_us: section.number("spin_us", 0..=MINUTE_US).map(Spanned::into_inner),
    };
    section.finish();
    draft
}

fn store(table: &DeTable<'_>, at: Range<usize>, problems: &mut Collector<'_>) -> StoreDraft {
    let (mut section, head) = open("store", table, at, problems);
    let mut stages = StageSpec::list(&section.all(STAGE));
    let word = section.word("type", &["null", "ram", "file", "delay", "fault", "volume", "pf", "store"]);
    let word = section.required("type", word, "\"file\"").map(Spanned::into_inner);
    let kind = match word {
        Some("null") => memory(&mut section)
            .map(|(size, block_bytes)| KindDraft::Null { size_bytes: size.into_inner(), block_bytes }),
        Some("ram") => memory(&mut section).map(|(size_bytes, block_bytes)| KindDraft::Ram { size_bytes, block_bytes }),
        Some("file") => file(&mut section),
        Some("volume") => controller::volume(&mut section),
        Some("pf") => controller::physical_function(&mut section),
        Some("store") => other_store(&mut section),
        // The older spelling of a stage in front of another store.
        Some(word) => {
            let kind = other_store(&mut section);
            let keys = StageSpec::VARIANTS.iter().find(|stage| stage.word == word).map_or(&[][..], |stage| stage.keys);
            stages.extend(StageSpec::from_values(word, &section.all(keys)));
            kind
        }
        None => None,
    };
    // Without the type it is not known which keys belong here.
    if word.is_some() {
        section.finish();
    }
    StoreDraft { head, kind, stages }
}

/// What the stores without a file have: a size.
fn memory(section: &mut Section<'_, '_, '_>) -> Option<(Spanned<u64>, u32)> {
    let size = section.size("size");
    let block_bytes = block_bytes(section).unwrap_or(512);
    let size = section.required("size", size, "\"512MiB\"")?;
    let bytes = *size.get_ref();
    if bytes == 0 || bytes.checked_rem(u64::from(block_bytes)) != Some(0) {
        let message =
            format!("a size of {bytes} bytes is not a positive multiple of the block size of {block_bytes} bytes");
        section.complain(size.span(), message);
        return None;
    }
    if i64::try_from(bytes).is_err() {
        section.complain(size.span(), "no store is larger than 2^63 - 1 bytes");
        return None;
    }
    Some((size, block_bytes))
}

fn block_bytes(section: &mut Section<'_, '_, '_>) -> Option<u32> {
    let bytes = section.number("block_size", 0..=u32::MAX)?;
    if !matches!(bytes.get_ref(), 512 | 4096) {
        section.complain(bytes.span(), format!("block_size = {} is neither 512 nor 4096", bytes.get_ref()));
        return None;
    }
    Some(bytes.into_inner())
}

fn file(section: &mut Section<'_, '_, '_>) -> Option<KindDraft> {
    let path = section.path("path");
    let read_only = flag(section, "read_only", false);
    let direct = flag(section, "direct", true);
    let block_bytes = block_bytes(section);
    let predecessor_timeout = section
        .number("predecessor_timeout_s", 0..=3600)
        .map_or(FileOptions::PREDECESSOR_TIMEOUT, |seconds| Duration::from_secs(seconds.into_inner()));
    let map = section.word("map", &["file", "host-file"]);
    let map = match map {
        Some(map) if *map.get_ref() == "host-file" => {
            if !direct || block_bytes.is_some() {
                let message = "`map = \"host-file\"` is always direct, in the filesystem's blocks; leave out `direct` and `block_size`";
                section.complain(map.span(), message);
            }
            FileMap::HostFile
        }
        _ => FileMap::File,
    };
    let path = section.required("path", path, "\"/var/lib/sidecore/disk.img\"")?;
    let span = path.span();
    let options =
        FileOptions { read_only, direct, block_bytes, predecessor_timeout, ..FileOptions::new(path.into_inner()) };
    Some(KindDraft::File(Spanned::new(span, options), map))
}

/// The store that a store is put in front of.
fn other_store(section: &mut Section<'_, '_, '_>) -> Option<KindDraft> {
    let store = section.string("store");
    let store = section.required("store", store, "\"the name of another [[store]]\"")?;
    Some(KindDraft::Store { store })
}

fn device(table: &DeTable<'_>, at: Range<usize>, problems: &mut Collector<'_>) -> DeviceDraft {
    let (mut section, head) = open("device", table, at, problems);
    let draft = device_of(&mut section, head);
    section.finish();
    draft
}

/// A device whose section was opened.
pub(super) fn device_of(section: &mut Section<'_, '_, '_>, head: Head) -> DeviceDraft {
    let mut front_end = front_end(section);
    let store = section.one(STRUCTURE, "store");
    let socket = section.one(STRUCTURE, "socket");
    let access = access::access(section, &access::DEVICE);
    let queues = section.one(STRUCTURE, "queues").map_or(front_end.queues(), Spanned::into_inner);
    let sidecores = sidecores(section, queues);
    let idle = section.word("idle", &["poll", "adaptive", "interrupt"]).map_or("adaptive", Spanned::into_inner);
    let spin_us = section.one::<u64>(STRUCTURE, "spin_us");
    if let Some(spin_us) = &spin_us
        && idle != "adaptive"
    {
        let message = format!("`spin_us` has no meaning with idle = \"{idle}\"; leave one of the two out");
        section.complain(spin_us.span(), message);
    }
    let mut spec = DeviceSpec { queues, ..DeviceSpec::default() };
    spec.set(&section.all(DeviceSpec::KEYS));
    front_end.set(&section.all(front_end.keys()));
    spec.front_end = front_end;
    let spin_us = spin_us.map(Spanned::into_inner);
    DeviceDraft { head, store, socket, access, sidecores, idle, spin_us, spec }
}

/// The guest's view; keys that have no meaning then are reported.
fn front_end(section: &mut Section<'_, '_, '_>) -> FrontEndSpec {
    let word = section.one::<String>(STRUCTURE, "front_end");
    let front_end = FrontEndSpec::from_word(word.as_ref().map_or("", |word| word.get_ref()));
    let (own, word) = (front_end.keys(), front_end.word());
    let others = FrontEndSpec::KINDS.iter().flat_map(|(_, keys)| keys.iter());
    for key in others.filter(|key| !own.iter().any(|own| own.name == key.name)) {
        if section.has_other(key.name) {
            let span = section.heading();
            section.complain(span, format!("`{}` has no meaning with front_end = \"{word}\"; leave it out", key.name));
        }
    }
    front_end
}

/// The sidecores that a device asks for, by either key.
fn sidecores(section: &mut Section<'_, '_, '_>, queues: u16) -> Vec<Spanned<String>> {
    let one = section.one(STRUCTURE, "sidecore");
    let Some(several) = section.strings("sidecores") else { return one.into_iter().collect() };
    if section.has("sidecore") {
        section.complain(several.span(), "`sidecore` and `sidecores` exclude each other; leave one of them out");
    }
    let span = several.span();
    let several = several.into_inner();
    if several.is_empty() {
        section.complain(span, "`sidecores` is empty; leave it out and a sidecore is chosen");
    } else if several.len() > usize::from(queues) {
        let message = format!(
            "{} sidecores for {queues} queues: a queue is served by one sidecore; raise `queues`",
            several.len()
        );
        section.complain(span, message);
    }
    several
}

pub(super) fn flag(section: &mut Section<'_, '_, '_>, key: &'static str, default: bool) -> bool {
    section.flag(key).map_or(default, Spanned::into_inner)
}

/// Starts to read a section of this kind: every one has a name.
pub(super) fn open<'t, 'c, 'p>(
    kind: &str,
    table: &'t DeTable<'t>,
    at: Range<usize>,
    problems: &'c mut Collector<'p>,
) -> (Section<'t, 'c, 'p>, Head) {
    let called = table.get("name").and_then(|name| name.get_ref().as_str()).filter(|name| is_name(name));
    let subject = called.map_or_else(|| format!("[[{kind}]]"), |name| format!("[[{kind}]] \"{name}\""));
    let mut section = Section::new(table, at.clone(), subject.clone(), problems);
    let name = section.string("name");
    let name = section.required("name", name, "\"some name\"").filter(|name| {
        let fine = is_name(name.get_ref());
        if !fine {
            section.complain(name.span(), about_names());
        }
        fine
    });
    (section, Head { name, subject, heading: at })
}
