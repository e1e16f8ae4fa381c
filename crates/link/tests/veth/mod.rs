//! Two network namespaces with a wire between them. They end with the value, and with the process
//! however it ends: each is kept by a child that ends with its standard input.

use std::io::Read as _;
use std::process::{Child, Command, Stdio};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use sidecore_skip::skip;

/// The ends of the wire, which are also the names of the interfaces.
pub const LEFT: &str = "left";
pub const RIGHT: &str = "right";

pub struct Veth {
    left: Namespace,
    right: Namespace,
}

struct Namespace(Child);

impl Namespace {
    fn new() -> Option<Self> {
        let mut child = Command::new("unshare")
            .args(["--net", "sh", "-c", "echo ready; exec cat"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("unshare: install util-linux");
        let mut ready = [0; 6];
        let is_ready = child.stdout.as_mut().is_some_and(|out| out.read_exact(&mut ready).is_ok());
        let namespace = Self(child);
        is_ready.then_some(namespace)
    }

    /// Runs `ip` inside. Its error, if it fails.
    fn ip(&self, arguments: &str) -> Result<(), String> {
        let output = Command::new("nsenter")
            .args(["--net", "--target", &self.0.id().to_string(), "ip"])
            .args(arguments.split_whitespace())
            .output()
            .expect("nsenter: install util-linux");
        let error = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        assert!(!error.contains("No such file or directory"), "ip: install iproute2");
        if output.status.success() { Ok(()) } else { Err(format!("ip {arguments}: {error}")) }
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Veth {
    /// A wire for frames of so many bytes. `None`, and a word about it, if this machine has none.
    pub fn new(mtu: usize) -> Option<Self> {
        Self::with_queues(mtu, 1)
    }

    /// A wire whose ends have so many queues.
    #[allow(dead_code)]
    pub fn with_queues(mtu: usize, queues: usize) -> Option<Self> {
        let (Some(left), Some(right)) = (Namespace::new(), Namespace::new()) else {
            skip("no network namespace can be made (CAP_SYS_ADMIN)");
            return None;
        };
        let shape = format!("mtu {mtu} numrxqueues {queues} numtxqueues {queues}");
        let add = format!(
            "link add {LEFT} {shape} type veth peer name {RIGHT} {shape} netns {}",
            right.0.id()
        );
        if let Err(error) = left.ip(&add) {
            skip(error);
            return None;
        }
        let veth = Self { left, right };
        veth.ip(LEFT, &format!("link set {LEFT} up"));
        veth.ip(RIGHT, &format!("link set {RIGHT} up"));
        Some(veth)
    }

    fn side(&self, end: &str) -> &Namespace {
        if end == LEFT { &self.left } else { &self.right }
    }

    /// Runs `ip` on one side.
    pub fn ip(&self, end: &str, arguments: &str) {
        self.side(end).ip(arguments).unwrap();
    }

    /// Runs `what` in the namespace of one side.
    pub fn within<T: Send>(&self, end: &str, what: impl FnOnce() -> T + Send) -> T {
        let path = format!("/proc/{}/ns/net", self.side(end).0.id());
        let namespace = std::fs::File::open(path).unwrap();
        std::thread::scope(|scope| {
            let run = || {
                // Of this thread alone, which ends here.
                use std::os::fd::AsFd as _;
                move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))
                    .unwrap();
                what()
            };
            scope.spawn(run).join().unwrap()
        })
    }
}
