//! The NAPI instances of a NIC, by the kernel's netlink family `netdev` (Linux documentation,
//! `netlink/specs/netdev.yaml`).

use crate::netlink::{ACK, Attributes, DUMP, REQUEST, Reply, Request, replies};
use anyhow::{Context, Result, bail};
use rustix::io::Errno;
use rustix::net::netlink::{GENERIC, SocketAddrNetlink};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, sendto, socket_with,
    sockopt,
};
use std::os::fd::OwnedFd;
use std::time::Duration;

/// The mode of a NAPI instance that a thread polls all the time. 0 is a softirq, 1 a thread that
/// waits for interrupts.
pub(crate) const BUSY_POLL: u64 = 2;

/// The family that knows the other families, and its command and attributes.
const CONTROL: u16 = 0x10;
const GET_FAMILY: u8 = 3;
const FAMILY_ID: u16 = 1;
const FAMILY_NAME: u16 = 2;

/// Commands and attributes of the family `netdev`.
const NAPI_GET: u8 = 11;
const NAPI_SET: u8 = 14;
const IFINDEX: u16 = 1;
const ID: u16 = 2;
const THREADED: u16 = 8;

/// The kernel answers at once; a limit keeps a boot from waiting for an answer that is lost.
const PATIENCE: Duration = Duration::from_secs(10);

/// A NAPI instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Napi {
    pub(crate) id: u32,
    /// The mode; `None` before Linux 6.17.
    pub(crate) threaded: Option<u64>,
}

/// The kernel's side of NAPI instances.
pub(crate) trait Napis {
    /// The instances of the NIC with this number. `None` if the kernel cannot list them.
    fn list(&mut self, ifindex: u32) -> Result<Option<Vec<Napi>>>;

    /// Changes the mode of an instance.
    fn set_threaded(&mut self, id: u32, mode: u64) -> Result<()>;
}

/// The running kernel.
pub(crate) struct Kernel {
    socket: OwnedFd,
    sequence: u32,
    /// The number of the family `netdev`, once it is known; `None` inside if it does not exist.
    family: Option<Option<u16>>,
}

impl Kernel {
    pub(crate) fn open() -> Result<Kernel> {
        let flags = SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, Some(GENERIC))
            .context("cannot open a netlink socket")?;
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, Some(PATIENCE))
            .context("cannot limit the wait for netlink")?;
        Ok(Kernel { socket, sequence: 0, family: None })
    }

    fn family(&mut self) -> Result<Option<u16>> {
        if let Some(family) = self.family {
            return Ok(family);
        }
        let name = vec![(FAMILY_NAME, b"netdev\0".to_vec())];
        let family = match self.request(CONTROL, ACK, GET_FAMILY, name)? {
            Ok(objects) => {
                let id = objects.iter().find_map(|object| object.number(FAMILY_ID));
                Some(id.and_then(|id| u16::try_from(id).ok()).context("a family has no number")?)
            }
            Err(Errno::NOENT) => None,
            Err(error) => return Err(error).context("cannot ask for the netlink family netdev"),
        };
        self.family = Some(family);
        Ok(family)
    }

    /// Sends a request, and returns the objects of the answer, or the kernel's error.
    fn request(
        &mut self,
        family: u16,
        flags: u16,
        command: u8,
        attributes: Vec<(u16, Vec<u8>)>,
    ) -> Result<Result<Vec<Attributes>, Errno>> {
        self.sequence = self.sequence.wrapping_add(1);
        let (sequence, flags) = (self.sequence, REQUEST | flags);
        let bytes = Request { family, flags, sequence, command, attributes }.encode();
        sendto(&self.socket, &bytes, SendFlags::empty(), &SocketAddrNetlink::new(0, 0))
            .context("cannot send a netlink request")?;
        let mut objects = Vec::new();
        let mut buffer = vec![0; 65536];
        loop {
            let (length, _) = recv(&self.socket, buffer.as_mut_slice(), RecvFlags::empty())
                .context("the kernel did not answer a netlink request")?;
            let answer = buffer.get(..length).unwrap_or_default();
            let answer = replies(answer, sequence).context("a malformed netlink message")?;
            for reply in answer {
                match reply {
                    Reply::Object(attributes) => objects.push(attributes),
                    Reply::Done | Reply::Confirmed => return Ok(Ok(objects)),
                    Reply::Refused(number) => return Ok(Err(Errno::from_raw_os_error(number))),
                }
            }
        }
    }
}

impl Napis for Kernel {
    fn list(&mut self, ifindex: u32) -> Result<Option<Vec<Napi>>> {
        let Some(family) = self.family()? else { return Ok(None) };
        let of = vec![(IFINDEX, ifindex.to_ne_bytes().to_vec())];
        match self.request(family, DUMP, NAPI_GET, of)? {
            Ok(objects) => Ok(Some(objects.iter().filter_map(napi).collect())),
            Err(Errno::OPNOTSUPP) => Ok(None),
            Err(error) => Err(error).context("cannot list NAPI instances"),
        }
    }

    fn set_threaded(&mut self, id: u32, mode: u64) -> Result<()> {
        let Some(family) = self.family()? else {
            bail!("the kernel has no netlink family netdev, which came with Linux 6.3");
        };
        let mode = u32::try_from(mode).context("a mode of a NAPI instance")?;
        let of = |kind, value: u32| (kind, value.to_ne_bytes().to_vec());
        let answer = self.request(family, ACK, NAPI_SET, vec![of(ID, id), of(THREADED, mode)])?;
        answer
            .map(drop)
            .with_context(|| format!("the kernel refuses mode {mode} for the NAPI instance {id}"))
    }
}

fn napi(object: &Attributes) -> Option<Napi> {
    let id = u32::try_from(object.number(ID)?).ok()?;
    Some(Napi { id, threaded: object.number(THREADED) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_running_kernel_answers() {
        let mut kernel = Kernel::open().unwrap();
        // A kernel may be too old to list them. The loopback interface has number 1, and none.
        let napis = kernel.list(1).unwrap();
        assert!(napis.is_none_or(|napis| napis.is_empty()));
        let error = format!("{:#}", kernel.set_threaded(u32::MAX, 0).unwrap_err());
        assert!(error.contains("netdev") || error.contains("refuses"), "{error}");
    }
}
