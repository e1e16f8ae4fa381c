//! The surroundings of libvirt and the daemon: empty state directories, a user for QEMU, a disk and
//! its sockets.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::Signal;
use sidecore_kit::process::{Process, output_of};

use super::plain;
use crate::progress::Progress;
use crate::qemu::Accelerator;

/// The directories of libvirt's state.
const DIRECTORIES: [&str; 5] =
    ["/etc/libvirt", "/var/lib/libvirt", "/run/libvirt", "/var/log/libvirt", "/var/cache/libvirt"];
/// Debian's user for QEMU, which the package of libvirt's service makes.
const USER: &str = "libvirt-qemu";
const USER_ID: u32 = 64055;

/// The guest's disk, and a disk that no guest uses.
pub(super) const DISK: &str = "disk";
pub(super) const OTHER: &str = "other";
pub(super) const DISK_MIB: u64 = 64;

const PATIENCE: Duration = Duration::from_secs(120);

/// The surroundings of the guest. They end with the namespaces.
pub(super) struct Place {
    /// The directory of the sockets, the disk's file and the logs, below a state directory of
    /// libvirt, which is in memory.
    directory: PathBuf,
    daemon: PathBuf,
    user: u32,
    running: Option<Process>,
}

impl Place {
    pub(super) fn make(binaries: &Path) -> Result<Self> {
        for directory in DIRECTORIES {
            fs::create_dir_all(directory)?;
            output_of("mount", &["-t", "tmpfs", "-o", "mode=755", "none", directory])?;
        }
        let user = Self::make_user()?;
        let directory = PathBuf::from("/var/lib/libvirt/sidecore");
        fs::create_dir(&directory)?;
        fs::File::create(directory.join("disk.img"))?.set_len((2 * DISK_MIB) << 20)?;
        Ok(Self { directory, daemon: binaries.join("sidecored"), user, running: None })
    }

    /// The id of QEMU's user. If the machine has no such user, makes one in these namespaces.
    fn make_user() -> Result<u32> {
        if let Ok(number) = output_of("id", &["-u", USER]) {
            return number.parse().context("id -u gave no number");
        }
        let entries = [
            (
                "/etc/passwd",
                format!("{USER}:x:{USER_ID}:{USER_ID}::/var/lib/libvirt:/usr/sbin/nologin\n"),
            ),
            ("/etc/group", format!("{USER}:x:{USER_ID}:\n")),
        ];
        for (file, entry) in entries {
            let more = format!("/var/lib/libvirt/{}", file.trim_start_matches("/etc/"));
            fs::write(&more, fs::read_to_string(file)? + &entry)?;
            output_of("mount", &["--bind", &more, file])?;
        }
        Ok(USER_ID)
    }

    pub(super) fn user(&self) -> u32 {
        self.user
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    /// Starts libvirt's daemon, and waits until it answers.
    pub(super) fn start_libvirt(&self, accelerator: Accelerator) -> Result<()> {
        if accelerator == Accelerator::Tcg && Path::new("/dev/kvm").exists() {
            // The device may exist and open, and still not run a guest; libvirt would try to use
            // it.
            output_of("mount", &["--bind", "/dev/null", "/dev/kvm"])?;
        }
        // The run needs no cgroups, security modules or udev of the host.
        let qemu = format!(
            "user = \"{USER}\"\ngroup = \"{USER}\"\nsecurity_driver = \"none\"\n\
             remember_owner = 0\n\
             stdio_handler = \"file\"\nnamespaces = []\n"
        );
        fs::write("/etc/libvirt/qemu.conf", qemu)?;
        let log = self.path("libvirtd.log");
        // A fixed UUID, because some machines have none that libvirt accepts.
        let libvirtd =
            "auth_unix_rw = \"none\"\nhost_uuid = \"6c2ec6d2-6a0c-4b0e-9d6a-0a8a3a1fd9b1\"\n";
        fs::write("/etc/libvirt/libvirtd.conf", libvirtd)?;
        let file = fs::File::create(&log)?;
        let mut command = Command::new("libvirtd");
        command.args([
            "--config",
            "/etc/libvirt/libvirtd.conf",
            "--pid-file",
            "/run/libvirt/libvirtd.pid",
        ]);
        let mut libvirtd =
            command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file).spawn()?;
        let end = Instant::now() + PATIENCE;
        while output_of("virsh", &["--quiet", "version"]).is_err() {
            let said = || fs::read_to_string(&log).unwrap_or_default();
            ensure!(libvirtd.try_wait()?.is_none(), "libvirtd has ended:\n{}", said());
            ensure!(Instant::now() < end, "libvirtd does not answer:\n{}", said());
            thread::sleep(Duration::from_millis(100));
        }
        Ok(())
    }

    /// Starts the daemon, waits until it is ready, and checks that the disk's socket belongs to
    /// QEMU's user.
    pub(super) fn start_daemon(&mut self, progress: &Progress) -> Result<()> {
        let configuration = self.path("disks.toml");
        fs::write(
            &configuration,
            format!(
                "control_socket = \"control.sock\"\n[[sidecore]]\nname = \"sc0\"\n\
                 [[store]]\nname = \"file\"\ntype = \"file\"\npath = \"disk.img\"\ndirect = false\n\
                 [[controller]]\nname = \"pool\"\nstore = \"file\"\nformat = \"blank\"\n\
                 commit_interval_ms = 3600000\n\
                 [[store]]\nname = \"{DISK}\"\ntype = \"volume\"\ncontroller = \"pool\"\n\
                 volume = \"{DISK}\"\n\
                 size = \"{DISK_MIB}MiB\"\n\
                 [[device]]\nname = \"{DISK}\"\nstore = \"{DISK}\"\nsocket = \"{DISK}.sock\"\n\
                 socket_owner = \"{USER}\"\n\
                 [[store]]\nname = \"memory\"\ntype = \"ram\"\nsize = \"1MiB\"\n\
                 [[device]]\nname = \"{OTHER}\"\nstore = \"memory\"\nsocket = \"{OTHER}.sock\"\n"
            ),
        )?;
        let log = fs::File::options().create(true).append(true).open(self.path("sidecored.log"))?;
        let mut command = Command::new(&self.daemon);
        command
            .arg("--config")
            .arg(plain(&configuration)?)
            .env_remove("RUST_LOG")
            .env_remove("NOTIFY_SOCKET");
        let mut daemon =
            Process::start(command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log))?;
        let line = daemon.first_line()?;
        self.running = Some(daemon);
        ensure!(line.starts_with("ready:"), "sidecored did not start:\n{}", self.log());
        let (owner, mode) = self.socket_access(DISK)?;
        ensure!(
            (owner, mode) == (self.user, 0o600),
            "the disk's socket belongs to {owner}, with mode {mode:o}"
        );
        progress.say(format!("sidecored is ready, the disk's socket is {USER}'s"));
        Ok(())
    }

    /// Terminates or kills the daemon, and waits for its end.
    pub(super) fn stop_daemon(&mut self, kill: bool) -> Result<()> {
        let mut daemon = self.running.take().context("no daemon is running")?;
        daemon.signal(if kill { Signal::KILL } else { Signal::TERM })?;
        match daemon.wait_for_end(PATIENCE)? {
            Some(status) if kill || status.success() => Ok(()),
            Some(status) => bail!("sidecored ended with {status}:\n{}", self.log()),
            None => bail!("sidecored does not end:\n{}", self.log()),
        }
    }

    /// The owner of a device's socket, and its permissions.
    pub(super) fn socket_access(&self, device: &str) -> Result<(u32, u32)> {
        let metadata = fs::metadata(self.path(&format!("{device}.sock")))?;
        Ok((metadata.uid(), metadata.mode() & 0o7777))
    }

    /// The logs of both daemons.
    pub(super) fn log(&self) -> String {
        let read = |name: &str| fs::read_to_string(self.path(name)).unwrap_or_default();
        format!("{}{}", read("sidecored.log"), read("libvirtd.log"))
    }
}
