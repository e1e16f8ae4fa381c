//! Programs of a newer Debian release than this machine's. Their packages, with those of all their
//! libraries, are fetched once and unpacked into a directory. Nothing is installed, and no
//! privilege is needed: the programs run with their own libraries and loader, but without `chroot`,
//! so that they see this system's files.

use crate::install::PATIENT_APT;
use anyhow::{Context, Result, ensure};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The directory of all roots, in cargo's target directory, which keeps them between builds.
pub const ROOTS: &str = "roots";

/// The release whose backports have the newest QEMU.
const RELEASE: &str = "trixie";
/// The packages of a root.
struct Content {
    /// The root's directory among the roots.
    directory: &'static str,
    suite: &'static str,
    packages: &'static [&'static str],
}

/// QEMU with `vfio-user-pci`, and its storage daemon.
const PROGRAMS: Content = Content {
    directory: RELEASE,
    suite: "trixie-backports",
    packages: &["qemu-system-x86", "qemu-system-common", "qemu-utils"],
};
/// Open vSwitch with DPDK and `dpdk-testpmd`, with the drivers that they load at run time.
const SWITCHES: Content = Content {
    directory: "trixie-switches",
    suite: RELEASE,
    packages: &[
        "openvswitch-switch-dpdk",
        "dpdk-dev",
        "librte-net-vhost25",
        "librte-mempool-ring25",
        "librte-bus-vdev25",
    ],
};
/// A kernel of the release or of its backports, both of which have ublk as a module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KernelOf {
    /// Linux 6.12.
    Release,
    /// A newer one.
    Backports,
}

impl KernelOf {
    const fn content(self) -> Content {
        let packages = &["linux-image-cloud-amd64"];
        match self {
            Self::Release => Content { directory: "trixie-kernel", suite: RELEASE, packages },
            Self::Backports => {
                Content { directory: "backports-kernel", suite: "trixie-backports", packages }
            }
        }
    }
}

/// The file at the top of a complete root that lists its packages.
const CONTENT: &str = "packages";
/// Debian's signing keys, for machines on which apt trusts them for some sources only.
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// A directory with the release's programs.
#[derive(Clone, Debug)]
pub struct Root {
    path: PathBuf,
}

impl Root {
    /// Opens the root that was made in `roots`.
    ///
    /// # Errors
    /// The root does not exist, or has other programs.
    pub fn find(roots: &Path) -> Result<Root> {
        Root::find_content(roots, &PROGRAMS)
    }

    fn find_content(roots: &Path, wanted: &Content) -> Result<Root> {
        let path = roots.join(wanted.directory);
        let content = fs::read_to_string(path.join(CONTENT)).unwrap_or_default();
        ensure!(
            content == wanted.listing(),
            "no root with packages of Debian {RELEASE} in {}",
            roots.display()
        );
        // An absolute path, because the programs' working directories differ.
        Ok(Root { path: path.canonicalize()? })
    }

    /// Opens the root in `roots`, and fetches it first if it does not exist. `say` gets a line
    /// before that.
    ///
    /// # Errors
    /// The machine has no apt, or the packages cannot be fetched; `fetch.log` in `roots` has apt's
    /// messages.
    pub fn find_or_fetch(roots: &Path, say: impl Fn(&str)) -> Result<Root> {
        Root::find_or_fetch_content(roots, &PROGRAMS, say)
    }

    /// Opens the root in `roots` with a kernel and its modules, and fetches it first if it does not
    /// exist, as [`Root::find_or_fetch`] does.
    ///
    /// # Errors
    /// As [`Root::find_or_fetch`].
    pub fn kernel(roots: &Path, of: KernelOf, say: impl Fn(&str)) -> Result<Root> {
        Root::find_or_fetch_content(roots, &of.content(), say)
    }

    /// Opens the root in `roots` with software switches; fetches it first if it does not exist and
    /// `may_fetch`, as [`Root::find_or_fetch`] does.
    ///
    /// # Errors
    /// As [`Root::find_or_fetch`].
    pub fn switches(roots: &Path, may_fetch: bool, say: impl Fn(&str)) -> Result<Root> {
        if may_fetch {
            Root::find_or_fetch_content(roots, &SWITCHES, say)
        } else {
            Root::find_content(roots, &SWITCHES)
        }
    }

    fn find_or_fetch_content(roots: &Path, wanted: &Content, say: impl Fn(&str)) -> Result<Root> {
        if let Ok(root) = Root::find_content(roots, wanted) {
            return Ok(root);
        }
        let packages = wanted.packages.join(", ");
        say(&format!("fetching {packages} of Debian {RELEASE} into {} (once)", roots.display()));
        fetch(roots, wanted)
            .with_context(|| format!("see {}", roots.join("fetch.log").display()))?;
        Root::find_content(roots, wanted)
    }

    /// The path of a file in the root.
    #[must_use]
    pub fn path(&self, inside: &str) -> PathBuf {
        self.path.join(inside)
    }

    /// The directory of the root's libraries.
    #[must_use]
    pub fn libraries(&self) -> PathBuf {
        self.path.join("usr/lib").join(format!("{}-linux-gnu", std::env::consts::ARCH))
    }

    /// The words of a command that starts a program of the root, without its arguments.
    ///
    /// # Errors
    /// The root lacks the program, or the loader.
    pub fn command(&self, program: &str) -> Result<Vec<String>> {
        self.command_with(&format!("usr/bin/{program}"), &[])
    }

    /// As [`Root::command`], of the program at the path `inside` the root, with more of its
    /// libraries loaded at its start.
    ///
    /// # Errors
    /// As [`Root::command`].
    pub fn command_with(&self, inside: &str, preloaded: &[&str]) -> Result<Vec<String>> {
        let libraries = self.libraries();
        // Other directories only have links to the loader, which would lead out of the root.
        let entries = fs::read_dir(&libraries)
            .with_context(|| format!("cannot list {}", libraries.display()))?;
        let loader = entries
            .flatten()
            .find(|entry| entry.file_name().to_string_lossy().starts_with("ld-linux"))
            .map(|entry| entry.path())
            .with_context(|| format!("no loader in {}", libraries.display()))?;
        let program = self.path.join(inside);
        ensure!(program.is_file(), "{} is not there", program.display());
        let text = |path: &Path| Ok::<_, anyhow::Error>(crate::text(path)?.to_owned());
        let mut words = vec![text(&loader)?, "--library-path".to_owned(), text(&libraries)?];
        if !preloaded.is_empty() {
            let preloaded = preloaded.iter().map(|library| text(&libraries.join(library)));
            words.push("--preload".to_owned());
            words.push(preloaded.collect::<Result<Vec<_>>>()?.join(":"));
        }
        words.push(text(&program)?);
        Ok(words)
    }
}

impl Content {
    fn listing(&self) -> String {
        self.packages.iter().map(|package| format!("{package}\n")).collect()
    }
}

/// Makes the root, which gets its name only when it is complete.
fn fetch(roots: &Path, wanted: &Content) -> Result<()> {
    fs::create_dir_all(roots)?;
    let roots = roots.canonicalize()?;
    let work = tempfile::Builder::new().prefix("fetching-").tempdir_in(&roots)?;
    let log = fs::File::create(roots.join("fetch.log"))?;
    let apt = Apt::new(work.path())?;
    let mut install =
        vec!["install", "--download-only", "--yes", "--no-install-recommends", "-t", wanted.suite];
    install.extend(wanted.packages);
    for arguments in [&["update"], install.as_slice()] {
        let mut command = apt.command();
        command
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log.try_clone()?);
        let status = command.status().context("cannot run apt-get")?;
        ensure!(status.success(), "apt-get {} failed ({status})", arguments[0]);
    }
    let tree = work.path().join("tree");
    for entry in fs::read_dir(work.path().join("cache/archives"))? {
        let package = entry?.path();
        if package.extension().is_some_and(|extension| extension == "deb") {
            let status = Command::new("dpkg-deb").arg("-x").arg(&package).arg(&tree).status();
            ensure!(
                status.context("cannot run dpkg-deb")?.success(),
                "cannot unpack {}",
                package.display()
            );
        }
    }
    fs::write(tree.join(CONTENT), wanted.listing())?;
    let root = roots.join(wanted.directory);
    if root.exists() {
        fs::remove_dir_all(&root)?;
    }
    fs::rename(&tree, &root).with_context(|| format!("cannot create {}", root.display()))
}

/// apt with lists, a cache and sources of its own, and without installed packages, so that it
/// fetches all dependencies. The network settings are the machine's.
struct Apt<'a> {
    directory: &'a Path,
}

impl<'a> Apt<'a> {
    fn new(directory: &'a Path) -> Result<Apt<'a>> {
        for inside in ["state/lists/partial", "cache/archives/partial", "tree"] {
            fs::create_dir_all(directory.join(inside))?;
        }
        fs::write(directory.join("status"), "")?;
        fs::write(
            directory.join("sources.list"),
            sources(&mirror()?, Path::new(KEYRING).is_file()),
        )?;
        Ok(Apt { directory })
    }

    fn command(&self) -> Command {
        let inside = |name: &str| self.directory.join(name).display().to_string();
        let mut options = vec![
            format!("Dir::State={}", inside("state")),
            format!("Dir::State::status={}", inside("status")),
            format!("Dir::Cache={}", inside("cache")),
            format!("Dir::Etc::sourcelist={}", inside("sources.list")),
            "Dir::Etc::sourceparts=/dev/null".to_owned(),
            "Dir::Etc::preferences=/dev/null".to_owned(),
            "Dir::Etc::preferencesparts=/dev/null".to_owned(),
            "Debug::NoLocking=true".to_owned(),
        ];
        if rustix::process::geteuid().is_root() {
            // apt's own user may not write here.
            options.push("APT::Sandbox::User=root".to_owned());
        }
        let mut command = Command::new("apt-get");
        command.env("DEBIAN_FRONTEND", "noninteractive").arg("--quiet").args(PATIENT_APT);
        // Without this, `update` succeeds without the lists that it could not fetch.
        command.args(["-o", "APT::Update::Error-Mode=any"]);
        command.args(options.iter().flat_map(|option| ["-o", option]));
        command
    }
}

fn sources(mirror: &str, has_keyring: bool) -> String {
    let signed = if has_keyring { format!("[signed-by={KEYRING}] ") } else { String::new() };
    ["", "-backports"].map(|suite| format!("deb {signed}{mirror} {RELEASE}{suite} main\n")).concat()
}

/// The Debian mirror of this machine, which has the other release, too.
fn mirror() -> Result<String> {
    let format = "$(ORIGIN)|$(LABEL)|$(REPO_URI)";
    let output = Command::new("apt-get")
        .args(["indextargets", "--format", format, "Created-By: Packages"])
        .output();
    let listing =
        String::from_utf8_lossy(&output.context("cannot run apt-get")?.stdout).into_owned();
    let mirror = debian_mirror(&listing)
        .context("no Debian among this machine's sources of packages (apt)")?;
    Ok(mirror.to_owned())
}

/// The source whose labels are Debian's; or, if no lists were ever fetched and sources have no
/// labels, the first one.
fn debian_mirror(listing: &str) -> Option<&str> {
    let source = |who: &str| listing.lines().find_map(|line| line.strip_prefix(who));
    let uri = source("Debian|Debian|").or_else(|| source("||"))?;
    Some(uri.trim_end_matches('/')).filter(|uri| !uri.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mirror_is_the_one_that_has_debian_itself() {
        let listing = "Debian|Debian-Security|http://a/security/\nOther|Debian|http://b/\n\
                       Debian|Debian|http://c/debian/\n";
        assert_eq!(debian_mirror(listing), Some("http://c/debian"));
        assert_eq!(debian_mirror("||http://b/\n||http://c/\n"), Some("http://b"));
        assert_eq!(debian_mirror("Other|Debian|http://b/\n"), None);
        assert_eq!(sources("http://m", false).lines().count(), 2);
        assert!(sources("http://m", true).contains("] http://m trixie-backports main\n"));
    }

    #[test]
    fn a_root_counts_only_with_all_that_is_wanted() {
        let roots = tempfile::tempdir().unwrap();
        let root = roots.path().join(RELEASE);
        assert!(Root::find(roots.path()).is_err());
        fs::create_dir(&root).unwrap();
        fs::write(root.join(CONTENT), "qemu-utils\n").unwrap();
        assert!(Root::find(roots.path()).is_err());
        fs::write(root.join(CONTENT), PROGRAMS.listing()).unwrap();
        let found = Root::find(roots.path()).unwrap();
        assert!(found.command("qemu-img").is_err());
        fs::create_dir_all(found.libraries()).unwrap();
        fs::create_dir_all(found.path("usr/bin")).unwrap();
        fs::write(found.libraries().join("ld-linux-x.so.2"), "").unwrap();
        fs::write(found.path("usr/bin/qemu-img"), "").unwrap();
        let words = found.command("qemu-img").unwrap();
        assert!(
            words[0].ends_with("ld-linux-x.so.2") && words[3].ends_with("usr/bin/qemu-img"),
            "{words:?}"
        );
    }
}
