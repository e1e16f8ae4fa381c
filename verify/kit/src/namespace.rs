//! Network namespaces, with Ethernet wires between them. They end with their values, and with this
//! process however it ends: a child that ends with its standard input keeps each.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::AsFd as _;
use std::process::{Command, Stdio};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::process::{Process, output_of, tied_to_this_process};

/// A network namespace.
#[derive(Debug)]
pub struct Namespace {
    keeper: Process,
}

impl Namespace {
    /// A namespace without interfaces but `lo`.
    ///
    /// # Errors
    /// The process lacks CAP_SYS_ADMIN, the kernel has no namespaces, or util-linux is not
    /// installed.
    pub fn new() -> io::Result<Self> {
        let mut command = Command::new("unshare");
        command.args(["--net", "sh", "-c", "echo ready; exec cat"]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut keeper = Process::start(&mut command)?;
        if keeper.first_line()?.is_empty() {
            return Err(io::Error::other(keeper.complaint()?));
        }
        Ok(Self { keeper })
    }

    /// The process that keeps the namespace, by which ip(8) and nsenter(1) name it.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.keeper.id()
    }

    /// Runs ip(8) inside, with these words.
    ///
    /// # Errors
    /// ip's.
    pub fn ip(&self, words: &str) -> io::Result<String> {
        let pid = self.pid().to_string();
        let mut arguments = vec!["--net", "--target", &pid, "ip"];
        arguments.extend(words.split_whitespace());
        output_of("nsenter", &arguments)
    }

    /// Connects an interface of this namespace with a new one of another namespace, by a wire for
    /// frames of so many bytes. Both get the given addresses and are up.
    ///
    /// # Errors
    /// ip's: a name is in use, or the kernel has no veth.
    pub fn connect(
        &self,
        end: &End<'_>,
        other: &Self,
        its: &End<'_>,
        mtu: usize,
    ) -> io::Result<()> {
        self.ip(&format!(
            "link add {} mtu {mtu} address {} type veth peer name {} mtu {mtu} address {} netns {}",
            end.interface,
            end.address,
            its.interface,
            its.address,
            other.pid()
        ))?;
        self.ip(&format!("link set {} up", end.interface))?;
        other.ip(&format!("link set {} up", its.interface))?;
        Ok(())
    }

    /// A command for a program that runs inside, and ends with this process.
    #[must_use]
    pub fn command(&self, program: &OsStr) -> Command {
        let mut command = tied_to_this_process("nsenter".as_ref());
        command.args(["--net", "--target", &self.pid().to_string(), "--"]).arg(program);
        command
    }

    /// Calls `act` inside, on a thread of its own.
    ///
    /// # Errors
    /// The kernel's.
    ///
    /// # Panics
    /// `act` does.
    pub fn within<T: Send>(&self, act: impl FnOnce() -> T + Send) -> io::Result<T> {
        let namespace = File::open(format!("/proc/{}/ns/net", self.pid()))?;
        std::thread::scope(|scope| {
            let run = || {
                // Of this thread alone, which ends here.
                move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?;
                Ok(act())
            };
            scope.spawn(run).join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }
}

/// An end of a wire between namespaces.
#[derive(Clone, Copy, Debug)]
pub struct End<'a> {
    /// The interface's name.
    pub interface: &'a str,
    /// Its Ethernet address.
    pub address: &'a str,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn namespaces_are_connected_and_end_with_their_values() {
        let (one, other) = match (Namespace::new(), Namespace::new()) {
            (Ok(one), Ok(other)) => (one, other),
            (Err(error), _) | (_, Err(error)) => {
                return sidecore_skip::skip(format_args!("no network namespace: {error}"));
            }
        };
        let end = |address| End { interface: "eth0", address };
        let (left, right) = (end("02:00:00:00:00:01"), end("02:00:00:00:00:02"));
        one.connect(&left, &other, &right, 9000).unwrap();
        assert!(other.ip("link show eth0").unwrap().contains("02:00:00:00:00:02"));
        assert!(one.connect(&left, &other, &right, 9000).is_err(), "the name is in use");
        let output = other.command("ip".as_ref()).args(["link", "show", "eth0"]).output().unwrap();
        assert!(String::from_utf8_lossy(&output.stdout).contains("mtu 9000"));
        let names = || rustix::net::netdevice::name_to_index(socket(), "eth0").is_ok();
        assert!(one.within(names).unwrap(), "the interface is inside");
        let pid = one.pid();
        drop(one);
        assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists());
    }

    fn socket() -> std::os::fd::OwnedFd {
        use rustix::net::{AddressFamily, SocketType, socket};
        socket(AddressFamily::INET, SocketType::DGRAM, None).unwrap()
    }
}
