//! Checks whether this machine has everything that the file names, without changing anything. The
//! machine may change before the daemon starts; then the start fails with the same words.

use std::collections::{HashMap, HashSet};
use std::fs::Metadata;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::Access;
use sidecore_assembly::machine;
use sidecore_assembly::spec::{
    FileOptions, HostFileOptions, LinkKind, SocketAccess, StageSpec, StoreKind,
};

use super::draft::{Draft, Part, StoreDraft};
use super::functions;
use super::mirrors;
use super::problem::Collector;
use super::section::Head;
use super::{Depth, size};

/// The time limit for looking at files.
const PATIENCE: Duration = Duration::from_secs(3);

/// Reports everything that the machine lacks.
pub(super) fn check(draft: &Draft, depth: Depth, problems: &mut Collector<'_>) {
    cpus(draft, problems);
    memory(draft, problems);
    files(draft, depth, problems);
    sockets(draft, problems);
    accounts(("control_socket", &draft.head), "control_socket", &draft.control_access, problems);
    for link in &draft.links {
        let LinkKind::Memory(memory) = &link.spec.kind else { continue };
        for (user, place) in memory.users.iter().zip(link.head.places("users")) {
            let account = SocketAccess { owner: Some(user.clone()), ..SocketAccess::default() };
            if let Err(error) = account.resolve() {
                problems.add(place.clone(), &link.head.subject, error.to_string());
            }
        }
    }
    invitations(draft, problems);
    if depth == Depth::Machine {
        records(draft, problems);
    }
    for device in &draft.devices {
        accounts((&device.head.subject, &device.head), "socket", &device.spec.access, problems);
    }
}

/// Checks that the users and groups of sockets exist.
fn accounts(
    (subject, head): (&str, &Head),
    socket: &str,
    access: &SocketAccess,
    problems: &mut Collector<'_>,
) {
    let SocketAccess { owner, group, .. } = access.clone();
    let accounts = [
        ("owner", SocketAccess { owner, ..SocketAccess::default() }),
        ("group", SocketAccess { group, ..SocketAccess::default() }),
    ];
    for (part, account) in accounts {
        if let (Some(place), Err(error)) =
            (head.place(&format!("{socket}_{part}")), account.resolve())
        {
            problems.add(place, subject, error.to_string());
        }
    }
}

/// Checks that the invitations of IOhosts can be read.
fn invitations(draft: &Draft, problems: &mut Collector<'_>) {
    for iohost in &draft.iohosts {
        let (Some(path), Some(place)) = (&iohost.spec.invitation, iohost.head.place("invitation"))
        else {
            continue;
        };
        if let Err(error) = rustix::fs::access(path, Access::READ_OK) {
            let message = format!(
                "{} cannot be read: {}; copy it from the IOhost, where `sidecore remote invite` \
                 writes it",
                path.display(),
                std::io::Error::from(error)
            );
            problems.add(place, &iohost.head.subject, message);
        }
    }
}

/// A file that a stage writes: the words for it in messages, and the check.
type Written = (PathBuf, &'static str, fn(&Path) -> Result<(), String>);

/// Checks that usage records and recordings can be written. A daemon starts without, and warns.
fn records(draft: &Draft, problems: &mut Collector<'_>) {
    let of_store = |store: &'_ Part<StoreDraft>| {
        let (records, recording) = ("usage records can be written to", "recording can be made at");
        let written = |stage: &StageSpec| -> Option<Written> {
            let appended =
                stage.records().map(|path| (path.to_owned(), records, records_file as _));
            let made = || Some((stage.recording()?.to_owned(), recording, directory_of as _));
            appended.or_else(made)
        };
        store.spec.stages.iter().filter_map(written).collect::<Vec<Written>>()
    };
    let files = draft.stores.iter();
    let files = files.flat_map(|store| of_store(store).into_iter().map(move |path| (store, path)));
    let files: Vec<(&Part<StoreDraft>, Written)> = files.collect();
    let looks = files.iter().map(|(_, (path, _, check))| {
        let (path, check) = (path.clone(), *check);
        (path.clone(), move || check(&path))
    });
    let found = machine::in_time(PATIENCE, looks.collect());
    for ((store, (path, what, _)), found) in files.iter().zip(found) {
        let why = match found {
            Some(Ok(())) => continue,
            Some(Err(why)) => why,
            None => format!("no answer within {} s", PATIENCE.as_secs()),
        };
        let message = format!(
            "no {what} {}: {why}; choose a file in a directory that the \
             daemon may write to",
            path.display()
        );
        complain(store, "stage", message, problems);
    }
}

fn records_file(path: &Path) -> Result<(), String> {
    let (place, access) = match std::fs::metadata(path) {
        Ok(metadata) if metadata.is_file() => (path, Access::READ_OK | Access::WRITE_OK),
        Ok(_) => return Err("it is no regular file".to_owned()),
        Err(_) => return directory_of(path),
    };
    may(place, access)
}

/// Whether a file can be made at this path, or beside it.
fn directory_of(path: &Path) -> Result<(), String> {
    may(path.parent().unwrap_or(path), Access::WRITE_OK | Access::EXEC_OK)
}

fn may(place: &Path, access: Access) -> Result<(), String> {
    rustix::fs::access(place, access)
        .map_err(|error| format!("{}: {}", place.display(), std::io::Error::from(error)))
}

fn cpus(draft: &Draft, problems: &mut Collector<'_>) {
    // If the kernel does not tell, pinning will.
    let Ok(allowed) = machine::allowed_cpus() else { return };
    for sidecore in &draft.sidecores {
        let (Some(cpu), Some(place)) = (sidecore.spec.spec.cpu, sidecore.head.place("cpu")) else {
            continue;
        };
        if !allowed.contains(&cpu) {
            let list = allowed.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
            let message = format!("there is no CPU {} for this process; there are {list}", cpu.0);
            problems.add(place, &sidecore.head.subject, message);
        }
    }
}

/// Checks that the memory of ram stores is available: a ram store allocates all of it at the start,
/// and without it the kernel would kill the daemon or another process.
fn memory(draft: &Draft, problems: &mut Collector<'_>) {
    let Some(mut left) = machine::available_memory_bytes() else { return };
    for store in &draft.stores {
        let Some(StoreKind::Ram { size_bytes, .. }) = &store.spec.kind else { continue };
        match left.checked_sub(*size_bytes) {
            Some(rest) => left = rest,
            None => {
                let message = format!(
                    "{} of memory are asked for and about {} are left; choose a smaller size",
                    size::show(*size_bytes),
                    size::show(left & !0xfffff)
                );
                complain(store, "size", message, problems);
            }
        }
    }
}

/// Reports something about the value of a key of a store.
fn complain(store: &Part<StoreDraft>, key: &str, message: String, problems: &mut Collector<'_>) {
    let place = store.head.place(key).unwrap_or_else(|| store.head.heading.clone());
    problems.add(place, &store.head.subject, message);
}

/// The file of a store, if it has one, as its filesystem shows it.
fn file_of(store: &Part<StoreDraft>) -> Option<FileOptions> {
    match store.spec.kind.as_ref()? {
        StoreKind::File(options) => Some(options.clone()),
        StoreKind::HostFile(HostFileOptions { path, read_only, predecessor_timeout }) => {
            let (read_only, predecessor_timeout) = (*read_only, *predecessor_timeout);
            Some(FileOptions { read_only, predecessor_timeout, ..FileOptions::new(path) })
        }
        _ => None,
    }
}

/// Looks at all files at the same time, because a filesystem may not answer.
fn files(draft: &Draft, depth: Depth, problems: &mut Collector<'_>) {
    let legs = mirrors::below_mirrors(draft);
    let files = draft.stores.iter().filter_map(|store| Some((store, file_of(store)?)));
    let files: Vec<(&Part<StoreDraft>, FileOptions)> = files.collect();
    let looks = files.iter().map(|(_, options)| {
        let path = options.path.clone();
        (path.clone(), move || {
            std::fs::metadata(&path).map_err(|error| unreachable_file(&path, &error))
        })
    });
    let looks = machine::in_time(PATIENCE, looks.collect());
    let is_spared = |store: &Part<StoreDraft>| is_spared_leg(store, &legs, depth);
    // By device and inode, because a file can have many paths.
    let mut seen: HashMap<(u64, u64), (&Part<StoreDraft>, bool)> = HashMap::new();
    let mut tries = Vec::new();
    for ((store, options), found) in files.into_iter().zip(looks) {
        let metadata = match found {
            Some(Ok(metadata)) => metadata,
            Some(Err(_)) if is_spared(store) => continue,
            Some(Err(message)) => {
                complain(store, "path", message, problems);
                continue;
            }
            None => {
                no_answer(store, &options, depth, problems);
                continue;
            }
        };
        match seen.get(&identity(&metadata)) {
            Some((_, true)) if options.read_only => {}
            Some((other, _)) => {
                let message = format!(
                    "this file is that of {} already; let several devices use one store, or set \
                     `read_only = true` on both",
                    other.head.subject
                );
                complain(store, "path", message, problems);
                continue;
            }
            None => drop(seen.insert(identity(&metadata), (store, options.read_only))),
        }
        // The claim on a host file may be a dead daemon's; the store waits for it, and only this
        // store is refused.
        let is_host_file = matches!(store.spec.kind, Some(StoreKind::HostFile(_)));
        if is_host_file && depth == Depth::Start {
            continue;
        }
        tries.push((
            store,
            options,
            functions::owner(draft, store).map(|owner| owner.spec.format.is_some()),
        ));
    }
    let tried = try_files(&tries, depth);
    for ((store, options, _), tried) in tries.into_iter().zip(tried) {
        match tried {
            Some(Ok(())) => {}
            Some(Err(_)) if is_spared(store) => {}
            Some(Err(message)) => complain(store, "path", message, problems),
            None => no_answer(store, &options, depth, problems),
        }
    }
}

/// Whether a daemon starts without this store: with a mirror that lacks a leg.
fn is_spared_leg(store: &Part<StoreDraft>, legs: &HashSet<&str>, depth: Depth) -> bool {
    let is_leg = store.head.name().is_some_and(|name| legs.contains(name));
    is_leg && depth == Depth::Start
}

/// A store on a file, its options, and whether a controller that owns it may format it.
type Try<'a> = (&'a Part<StoreDraft>, FileOptions, Option<bool>);

/// Opens the files as a daemon does. The result of one that does not answer is `None`.
fn try_files(tries: &[Try<'_>], depth: Depth) -> Vec<Option<Result<(), String>>> {
    let jobs = tries.iter().map(|(_, options, may_format)| {
        let (options, may_format) = (options.clone(), *may_format);
        (options.path.clone(), move || match may_format {
            // A store that a controller may own: its contents can only make this controller fail.
            Some(may_format) => match machine::try_controller(&options, may_format) {
                Err(unfit) if unfit.is_damaged && depth == Depth::Start => Ok(()),
                tried => tried.map_err(|unfit| unfit.message),
            },
            None => machine::try_file(&options).map_err(|error| error.to_string()),
        })
    });
    machine::in_time(PATIENCE, jobs.collect())
}

fn identity(metadata: &Metadata) -> (u64, u64) {
    if metadata.file_type().is_block_device() {
        (u64::MAX, metadata.rdev())
    } else {
        (metadata.dev(), metadata.ino())
    }
}

/// Reports a file that does not answer, unless a daemon starts: the daemon serves the others, and
/// opens this file when it answers.
fn no_answer(
    store: &Part<StoreDraft>,
    options: &FileOptions,
    depth: Depth,
    problems: &mut Collector<'_>,
) {
    if depth == Depth::Start {
        return;
    }
    let path = options.path.display();
    let message = format!(
        "{path} does not answer within {} s; look at the disk or server behind it",
        PATIENCE.as_secs()
    );
    complain(store, "path", message, problems);
}

fn unreachable_file(path: &Path, error: &std::io::Error) -> String {
    let path = path.display();
    match error.kind() {
        std::io::ErrorKind::NotFound => {
            format!("there is no file {path}; make one, for instance with `truncate -s 1G {path}`")
        }
        _ => format!("{path} cannot be reached: {error}"),
    }
}

fn sockets(draft: &Draft, problems: &mut Collector<'_>) {
    let listening = listening_sockets();
    if let Err(message) = socket(&draft.control_socket, &listening) {
        let default =
            || format!("{message} (this is the default; set `control_socket` to another path)");
        let place = draft.head.place("control_socket");
        let message = if place.is_some() { message.clone() } else { default() };
        problems.add(place.unwrap_or(0..0), "control_socket", message);
    }
    for link in &draft.links {
        let (Some(place), LinkKind::Memory(memory)) = (link.head.place("socket"), &link.spec.kind)
        else {
            continue;
        };
        // A client connects to the socket of its IOhost, which may come later.
        let is_ours =
            draft.clients.iter().any(|client| client.spec.links.contains(&link.spec.name));
        if let Err(message) = if is_ours { socket(&memory.socket, &listening) } else { Ok(()) } {
            problems.add(place, &link.head.subject, message);
        }
    }
    for device in &draft.devices {
        let Some(place) = device.head.place("socket") else { continue };
        if let Err(message) = socket(&device.spec.socket, &listening) {
            problems.add(place, &device.head.subject, message);
        }
    }
}

/// Checks that a socket can be made at `path`. A socket without a listener is replaced.
fn socket(path: &Path, listening: &[PathBuf]) -> Result<(), String> {
    let mut directory = path.parent().unwrap_or(Path::new("/"));
    if !directory.is_dir() {
        // The daemon makes only the last directory of the path to its sockets.
        directory = match directory.parent() {
            Some(above) if above.is_dir() && std::fs::symlink_metadata(directory).is_err() => above,
            _ => {
                return Err(format!(
                    "there is no directory {0}; make it with `mkdir -p {0}`",
                    directory.display()
                ));
            }
        };
    }
    if rustix::fs::access(directory, Access::WRITE_OK | Access::EXEC_OK).is_err() {
        return Err(format!(
            "no socket may be made in {}; change its owner or mode",
            directory.display()
        ));
    }
    match std::fs::symlink_metadata(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(format!("{} cannot be looked at: {error}", path.display())),
        Ok(metadata) if !metadata.file_type().is_socket() => Err(format!(
            "{} exists and is no socket; remove it or choose another path",
            path.display()
        )),
        Ok(_) if listening.iter().any(|listening| listening == path) => Err(format!(
            "a program is serving {} already; stop it or choose another path",
            path.display()
        )),
        Ok(_) => Ok(()),
    }
}

/// Returns the paths of all listening sockets. Reading the kernel's table does not disturb the
/// listeners, but a connection would.
fn listening_sockets() -> Vec<PathBuf> {
    /// The flag of a socket that accepts connections.
    const ACCEPTS: &str = "00010000";
    let table = std::fs::read("/proc/net/unix").unwrap_or_default();
    let table = String::from_utf8_lossy(&table);
    let path = |line: &str| {
        let mut columns = line.split_ascii_whitespace();
        let accepts = columns.nth(3) == Some(ACCEPTS);
        // The path is the eighth column, and the only one that may hold spaces.
        let path = line.find('/').and_then(|at| line.get(at..));
        path.filter(|_| accepts).map(PathBuf::from)
    };
    table.lines().skip(1).filter_map(path).collect()
}
