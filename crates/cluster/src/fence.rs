//! Ways to make sure that other daemons do not write to a store any more.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process_group};
use sidecore_linux::{FileError, FileOptions, FileStore};
use sidecore_ownership::Member;

use crate::Watch;

/// The time between two looks at a fence command.
const PAUSE: Duration = Duration::from_millis(10);
/// The time that one attempt of a lock fence waits for requests of dead processes.
const LOCK_PATIENCE: Duration = Duration::from_millis(200);

/// The daemons that have owned a store, or may have.
#[derive(Clone, Copy, Debug)]
pub struct Others<'a> {
    /// Those that may still write.
    pub suspects: &'a [Member],
    /// The last owner, which has closed the store in order.
    pub former: Option<&'a Member>,
    /// The suspect that may have opened the store.
    pub owner: Option<&'a Member>,
}

/// The ownership of a key for which others are fenced.
#[derive(Clone, Debug)]
pub struct Claim {
    /// The owner of the key.
    pub me: Member,
    has_ended: Arc<AtomicBool>,
    is_given_up: Arc<AtomicBool>,
    admits: Arc<AtomicBool>,
}

impl Claim {
    /// Of a key that this daemon has.
    #[must_use]
    pub fn new(me: Member) -> Self {
        let flag = Arc::default;
        Self { me, has_ended: flag(), is_given_up: flag(), admits: flag() }
    }

    /// Whether a fence has a copy of it.
    pub(crate) fn is_used(&self) -> bool {
        Arc::strong_count(&self.has_ended) > 1
    }

    /// The key is lost, or the lease is over. A fence that is under way begins nothing more.
    pub fn end(&self) {
        self.has_ended.store(true, Ordering::Relaxed);
    }

    /// The path of this host hangs, and that of another one may not: if the fence fails, the key is
    /// released at once.
    pub(crate) fn give_up(&self) {
        self.is_given_up.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_given_up(&self) -> bool {
        self.is_given_up.load(Ordering::Relaxed)
    }

    /// An order that can let this host in is sent next, unless the attempt was given up: that is
    /// looked at after this call, so that an attempt which is given up without this sends none.
    pub(crate) fn admit(&self) {
        self.admits.store(true, Ordering::SeqCst);
    }

    /// Whether this host may have been let in.
    pub(crate) fn admits(&self) -> bool {
        self.admits.load(Ordering::SeqCst)
    }

    /// Whether the key is lost, or the lease is over.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.has_ended.load(Ordering::Relaxed)
    }
}

/// A fence. It succeeds when none of the suspects has a request in flight to the store, and none
/// can send one any more.
pub trait Fence: Send + Sync {
    /// Fences the suspects, once, for a daemon.
    ///
    /// # Errors
    /// The reason why a suspect may still write. It is tried again.
    fn fence(&self, claim: &Claim, others: Others<'_>) -> Result<(), String>;

    /// Looks at the fences of others, for a fence that has something to see.
    fn watch(&self, _me: &Member) -> Option<Watch> {
        None
    }
}

/// The lock that an owner's command inherits, and has until its last process has ended.
///
/// The owner takes the lock, and then looks whether its lease has ended. So a process that was
/// paused before that look starts nothing after a successor's fence, and one that was paused after
/// it is seen by the fence, before the command has opened anything.
///
/// The file has the number of the boot whose process has taken the lock last: its name changes with
/// the host's machine ID, and the processes of one boot fence each other whatever the name.
#[derive(Clone, Debug)]
pub struct HostLock {
    record: PathBuf,
    path: PathBuf,
    /// The lock of a version that knows no machine IDs, and of a host without one.
    plain: PathBuf,
    /// The contents of a lock that a process of this boot has taken; empty if the boot has no
    /// number.
    signature: Vec<u8>,
}

/// A fence for candidates on one host: the locks of the owner's processes.
///
/// A live daemon locks the store's files while it has them open, and the kernel lifts the locks of
/// a dead one after its last request (docs/decisions/0019-a-fence-against-dead-processes.md).
#[derive(Clone, Debug)]
pub struct LockFence {
    /// The files and block devices of the store.
    pub paths: Vec<PathBuf>,
    /// The lock of a command that has not opened them yet.
    pub host_lock: HostLock,
}

/// A fence by a program, for instance a STONITH agent.
///
/// The program gets the suspect's name as its last argument. It succeeds when it ends with exit
/// code 0, and the suspect's host can neither write to the store nor answer clients any more.
/// Former starts of this daemon on this host are fenced by the store's locks.
#[derive(Clone, Debug)]
pub struct CommandFence {
    /// The program.
    pub program: PathBuf,
    /// Its first arguments.
    pub arguments: Vec<String>,
    /// The program is killed after this time, and has failed.
    pub time_limit: Duration,
    /// For former starts of this daemon.
    pub local: LockFence,
}

/// The kind of a host's lock.
const LOCK: &str = "lock";

/// The file of a host beside the record. Each host has files of its own there: a lock on shared
/// storage can outlive the host that has it.
pub(crate) fn beside(record: &Path, me: &Member, kind: &str) -> PathBuf {
    let mut name = record.file_name().unwrap_or_default().to_owned();
    let (host, machine) = (me.host_name(), me.machine());
    let dot = if machine.is_empty() { "" } else { "." };
    name.push(format!(".{host}{dot}{machine}.{kind}"));
    record.with_file_name(name)
}

/// The files of all hosts beside the record.
pub(crate) fn files_beside(record: &Path, kind: &str) -> Result<Vec<PathBuf>, String> {
    let directory = record.parent().filter(|parent| !parent.as_os_str().is_empty());
    let directory = directory.unwrap_or(Path::new("."));
    let wrong = |error: io::Error| format!("cannot read {}: {error}", directory.display());
    let of_record = record.file_name().unwrap_or_default().as_encoded_bytes();
    let is_hosts = |name: &OsStr| {
        let name = name.as_encoded_bytes().strip_prefix(of_record);
        let host = name.and_then(|rest| rest.strip_prefix(b"."));
        host.is_some_and(|host| host.ends_with(format!(".{kind}").as_bytes()))
    };
    let mut files = Vec::new();
    for entry in std::fs::read_dir(directory).map_err(wrong)? {
        let name = entry.map_err(wrong)?.file_name();
        if is_hosts(&name) {
            files.push(record.with_file_name(name));
        }
    }
    Ok(files)
}

impl HostLock {
    /// The lock of a daemon's host, in a file beside the record.
    #[must_use]
    pub fn beside(record: &Path, me: &Member) -> Self {
        let plain = Member { host: me.host_name().to_owned(), ..Member::default() };
        let mut signature = me.boot().as_bytes().to_vec();
        if !signature.is_empty() {
            // The name of another record may begin with the name of this one.
            let name = record.file_name().unwrap_or_default();
            signature.extend([b" ", name.as_encoded_bytes(), b"\n"].concat());
        }
        Self {
            record: record.to_owned(),
            path: beside(record, me, LOCK),
            plain: beside(record, &plain, LOCK),
            signature,
        }
    }

    /// Takes the lock, which ends with the last copy of the descriptor.
    ///
    /// # Errors
    /// Another process has it, or the file cannot be locked.
    pub fn take(&self) -> Result<File, String> {
        let lock = lock(&self.path)?;
        let sign = || -> io::Result<()> {
            let mut found = Vec::new();
            (&lock).read_to_end(&mut found)?;
            if found != self.signature {
                lock.set_len(0)?;
                (&lock).write_all(&self.signature)?;
            }
            Ok(())
        };
        sign().map_err(|error| format!("cannot read or write {}: {error}", self.path.display()))?;
        Ok(lock)
    }

    /// Takes this lock, and each one that a process of this boot can have by another machine ID.
    fn take_all(&self) -> Result<Vec<File>, String> {
        let mut locks = vec![self.take()?];
        for path in files_beside(&self.record, LOCK)? {
            if path != self.path && self.is_namesake(&path) && self.is_of_this_boot(&path)? {
                locks.push(lock(&path)?);
            }
        }
        Ok(locks)
    }

    /// Whether a lock is that of a host of this name.
    fn is_namesake(&self, path: &Path) -> bool {
        let stem = self.plain.with_extension("");
        let [name, stem] = [path, &stem].map(|path| path.as_os_str().as_encoded_bytes());
        let id = name.strip_prefix(stem).and_then(|rest| rest.strip_prefix(b"."));
        let id = id.and_then(|rest| rest.strip_suffix(b".lock"));
        let is_id = |id: &[u8]| id.len() == 32 && id.iter().all(u8::is_ascii_hexdigit);
        path == self.plain || id.is_some_and(is_id)
    }

    /// Whether a process of this boot can have been the last one to take a lock.
    fn is_of_this_boot(&self, path: &Path) -> Result<bool, String> {
        let found = std::fs::read(path);
        let found = found.map_err(|error| format!("cannot read {}: {error}", path.display()))?;
        // An older version signs nothing.
        Ok(if found.is_empty() { path == self.plain } else { found == self.signature })
    }
}

fn lock(path: &Path) -> Result<File, String> {
    let name = path.display();
    let file = File::options().create(true).read(true).append(true).open(path);
    let file = file.map_err(|error| format!("cannot open {name}: {error}"))?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file),
        Err(Errno::WOULDBLOCK) => Err(format!(
            "a live process of an owner has {name} locked; stop it, or wait until it sees that its \
             lease has ended"
        )),
        Err(error) => Err(format!("cannot lock {name}: {error}")),
    }
}

impl LockFence {
    /// Fails while a process of this host has one of the files open, or a request in flight to it.
    /// No owner starts its command while the locks are kept.
    ///
    /// # Errors
    /// The reason.
    pub fn quiet(&self) -> Result<Vec<File>, String> {
        let locks = self.host_lock.take_all()?;
        for path in &self.paths {
            let options = FileOptions {
                predecessor_timeout: LOCK_PATIENCE,
                ..FileOptions::new(path.as_path())
            };
            // Opening takes the locks, and waits for requests of processes that have ended.
            match FileStore::open(&options) {
                Ok(_) => {}
                Err(FileError::Busy { .. }) => {
                    return Err(format!(
                        "a live process has {} open, or a partition of it; stop it, or wait until \
                         it sees that its lease has ended; a command with --path of a whole disk \
                         serves the whole disk",
                        path.display()
                    ));
                }
                Err(FileError::Overlaps { path, other }) => {
                    return Err(format!(
                        "a live process has {} open, which has the same bytes as {}: stop it, or \
                         wait until it sees that its lease has ended; if it is the command, let it \
                         serve the whole disk that --path names",
                        other.display(),
                        path.display()
                    ));
                }
                Err(error) => return Err(error.to_string()),
            }
        }
        Ok(locks)
    }
}

impl Fence for LockFence {
    fn fence(&self, claim: &Claim, Others { suspects, .. }: Others<'_>) -> Result<(), String> {
        let me = &claim.me;
        // All candidates run on this host, whose machine ID may have become another one.
        let is_far = |suspect: &&Member| suspect.host_name() != me.host_name();
        if let Some(far) = suspects.iter().find(is_far) {
            return Err(format!(
                "{far} is not on this host, and locks fence the processes of one host: choose a \
                 fence command"
            ));
        }
        // Processes of a former boot of this host have ended with it.
        if suspects.iter().all(|suspect| suspect.boot() != me.boot()) {
            return Ok(());
        }
        self.quiet().map(drop)
    }
}

impl Fence for CommandFence {
    fn fence(&self, claim: &Claim, Others { suspects, .. }: Others<'_>) -> Result<(), String> {
        let me = &claim.me;
        let (mine, others): (Vec<Member>, Vec<Member>) =
            suspects.iter().cloned().partition(|suspect| suspect.name == me.name);
        let is_far = |suspect: &&Member| !suspect.is_same_machine(me);
        if let Some(namesake) = mine.iter().find(is_far) {
            return Err(format!(
                "{namesake} has this daemon's name, and the fence command would end this daemon: \
                 give each daemon a name of its own; if it is a former boot of this host, whose \
                 /etc/machine-id has changed, let another candidate take over"
            ));
        }
        if !mine.is_empty() {
            self.local.fence(claim, Others { suspects: &mine, former: None, owner: None })?;
        }
        let mut names: Vec<&str> = others.iter().map(|suspect| suspect.name.as_str()).collect();
        names.dedup();
        names.into_iter().try_for_each(|name| self.run(name))
    }
}

impl CommandFence {
    fn run(&self, name: &str) -> Result<(), String> {
        let program = self.program.display();
        let start = Instant::now();
        let mut child = Command::new(&self.program)
            .args(&self.arguments)
            .arg(name)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            // It can have children, which end with it.
            .process_group(0)
            .spawn()
            .map_err(|error| format!("cannot run {program}: {error}"))?;
        loop {
            match child.try_wait().map_err(|error| format!("{program}: {error}"))? {
                Some(status) if status.success() => return Ok(()),
                Some(status) => return Err(format!("{program} {name} failed: {}", show(status))),
                None if start.elapsed() >= self.time_limit => break,
                None => std::thread::sleep(PAUSE),
            }
        }
        let group = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        if let Some(group) = group {
            let _ = kill_process_group(group, Signal::KILL);
        }
        let _ = child.wait();
        Err(format!(
            "{program} {name} did not end within {} s and was killed",
            self.time_limit.as_secs_f32()
        ))
    }
}

fn show(status: ExitStatus) -> String {
    status.to_string()
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::*;

    fn member(name: &str, host: &str, incarnation: u64) -> Member {
        Member { name: name.into(), host: host.into(), incarnation }
    }

    fn of(suspects: &[Member]) -> Others<'_> {
        Others { suspects, former: None, owner: None }
    }

    fn locks(paths: Vec<PathBuf>, directory: &TempDir) -> LockFence {
        let record = directory.path().join("disk.owner");
        LockFence { paths, host_lock: HostLock::beside(&record, &member("a", "h1/1", 1)) }
    }

    fn command(script: &str, time_limit: Duration, directory: &TempDir) -> CommandFence {
        CommandFence {
            program: "/bin/sh".into(),
            arguments: vec!["-c".into(), script.into(), "fence".into()],
            time_limit,
            local: locks(Vec::new(), directory),
        }
    }

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn a_command_succeeds_fails_or_is_killed_with_its_children() {
        let (claim, other) = (Claim::new(member("a", "h1/1", 1)), member("b", "h2/1", 2));
        let directory = tempfile::tempdir().unwrap();
        let told = directory.path().join("told");
        let script = format!("echo $1 >> {}", told.display());
        let suspects = [other.clone(), member("b", "h2/1", 3)];
        command(&script, LONG, &directory).fence(&claim, of(&suspects)).unwrap();
        assert_eq!(std::fs::read_to_string(&told).unwrap(), "b\n", "once for a daemon");
        let error = command("exit 3", LONG, &directory).fence(&claim, of(&suspects)).unwrap_err();
        assert!(error.contains("exit status: 3"), "{error}");
        // The shell waits for a child, which would keep the test waiting if it were not killed.
        let hangs = command("sleep 1000; exit 0", Duration::from_millis(50), &directory);
        let error = hangs.fence(&claim, of(&suspects)).unwrap_err();
        assert!(error.contains("was killed"), "{error}");
        let none = CommandFence { program: "/no/such".into(), ..command("", LONG, &directory) };
        assert!(none.fence(&claim, of(&suspects)).unwrap_err().contains("/no/such"));
    }

    #[test]
    fn a_command_is_never_run_against_this_daemons_own_name() {
        let claim = Claim::new(member("a", "h1/1", 1));
        let directory = tempfile::tempdir().unwrap();
        let fence = command("exit 9", LONG, &directory);
        let error = fence.fence(&claim, of(&[member("a", "h2/1", 2)])).unwrap_err();
        assert!(error.contains("a name of its own"), "{error}");
        fence.fence(&claim, of(&[member("a", "h1/1", 2)])).expect("a former start of this daemon");
    }

    /// Takes locks that were released: the child of another test can have a copy until it begins.
    fn soon<T>(take: impl Fn() -> Result<T, String>) -> T {
        let start = Instant::now();
        loop {
            match take() {
                Ok(taken) => return taken,
                Err(why) => assert!(start.elapsed() < LONG, "{why}"),
            }
            std::thread::sleep(PAUSE);
        }
    }

    #[test]
    fn a_lock_fence_waits_for_a_live_process_and_refuses_other_hosts() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk");
        std::fs::write(&path, [0; 4096]).unwrap();
        let fence = locks(vec![path.clone()], &directory);
        let (claim, former) = (Claim::new(member("a", "h1/1", 1)), member("b", "h1/1", 2));
        let open = FileStore::open(&FileOptions::new(&path)).unwrap();
        let error = fence.fence(&claim, of(std::slice::from_ref(&former))).unwrap_err();
        assert!(error.contains("live process"), "{error}");
        drop(open);
        let lock = soon(|| fence.host_lock.take());
        let error = fence.fence(&claim, of(std::slice::from_ref(&former))).unwrap_err();
        assert!(error.contains("disk.owner.h1.lock"), "{error}");
        drop(lock);
        soon(|| fence.fence(&claim, of(std::slice::from_ref(&former))));
        let error = fence.fence(&claim, of(&[member("b", "h2/1", 2)])).unwrap_err();
        assert!(error.contains("not on this host"), "{error}");
        let open = FileStore::open(&FileOptions::new(&path)).unwrap();
        fence.fence(&claim, of(&[member("b", "h1/0", 2)])).expect("it ended with the former boot");
        let error = fence.fence(&claim, of(&[member("b", "h1/1/77", 2)])).unwrap_err();
        assert!(error.contains("live process"), "with the machine's number: {error}");
        // A host whose machine ID is another one at each boot, or was made anew.
        let me = Claim::new(member("a", "h1/1/77", 1));
        let error = fence.fence(&me, of(&[member("b", "h1/1/88", 2)])).unwrap_err();
        assert!(error.contains("live process"), "with another machine's number: {error}");
        fence.fence(&me, of(&[member("b", "h1/0/88", 2)])).expect("it ended with the former boot");
        drop(open);
    }

    #[test]
    fn a_lock_of_this_boot_counts_whatever_the_machine_id() {
        let directory = tempfile::tempdir().unwrap();
        let record = directory.path().join("disk.owner");
        let [first, second] = ["77", "88"].map(|digits| digits.repeat(16));
        let beside = |host: &str| HostLock::beside(&record, &member("a", host, 1));
        let fence = |host: &str| LockFence { paths: Vec::new(), host_lock: beside(host) };
        let of_boot = |boot: &str, machine: &str| format!("h/{boot}/{machine}");
        let [former, later] = [&first, &second].map(|machine| of_boot("1", machine));
        let refused = |host: &str| {
            let me = Claim::new(member("b", host, 2));
            let suspects = [member("a", &former, 1)];
            let error = fence(host).fence(&me, of(&suspects)).unwrap_err();
            assert!(error.contains("live process"), "{host}: {error}");
            // Also if its daemon was fenced since, and is no suspect any more.
            fence(host).quiet().expect_err(host);
        };
        // Its command has not opened the disk yet.
        let locked = beside(&former).take().unwrap();
        refused(&later);
        refused("h/1");
        drop(soon(|| fence("other/1").quiet()));
        // The lock is that of another host of this name.
        drop(soon(|| fence(&of_boot("2", &second)).quiet()));
        drop(locked);
        drop(soon(|| fence(&later).quiet()));
        // A host that had no machine ID, and an older version that writes nothing into the file.
        for has_boot in [true, false] {
            let locked = soon(|| beside("h/1").take());
            if !has_boot {
                locked.set_len(0).unwrap();
            }
            refused(&later);
        }
        // A namesake without a machine ID, whose lock outlives it.
        let locked = soon(|| beside("h/2").take());
        drop(soon(|| fence(&later).quiet()));
        drop(locked);
        // Another store's.
        let other = directory.path().join("disk.owner.h");
        let locked = HostLock::beside(&other, &member("a", "h/1", 1)).take().unwrap();
        drop(soon(|| fence(&later).quiet()));
        drop(locked);
        // After a loss of power a file can have any bytes.
        let path = beside(&later).path;
        std::fs::write(&path, [0xff; 40]).unwrap();
        let locked = soon(|| beside(&later).take());
        assert_eq!(std::fs::read(&path).unwrap(), b"1 disk.owner\n");
        drop(locked);
    }

    #[test]
    fn a_command_fences_a_former_start_by_locks_if_it_is_on_this_machine() {
        let directory = tempfile::tempdir().unwrap();
        let fence = command("exit 9", LONG, &directory);
        let claim = Claim::new(member("a", "localhost/1/77", 1));
        for former in ["localhost/1/88", "localhost/0/77", "localhost/0"] {
            fence.fence(&claim, of(&[member("a", former, 2)])).expect(former);
        }
        let error = fence.fence(&claim, of(&[member("a", "localhost/2/88", 2)])).unwrap_err();
        assert!(error.contains("a name of its own"), "{error}");
        assert!(error.contains("/etc/machine-id"), "{error}");
    }
}
