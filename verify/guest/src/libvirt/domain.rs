//! The domain: its XML, and the dialogue with its guest over a serial line that is a socket.

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use sidecore_kit::process::output_of;

use super::place::{DISK, Place};
use super::{Inside, copy_for_all, plain};
use crate::console::{self, Message};
use crate::guest::{Answer, FIRST_SLOT};
use crate::qemu::Accelerator;

const NAME: &str = "guest";
/// The longest time for an order of the guest.
const PATIENCE: Duration = Duration::from_secs(180);

/// A started domain.
pub(super) struct Domain {
    serial: BufReader<UnixStream>,
}

impl Domain {
    /// Defines and starts the domain.
    pub(super) fn start(place: &Place, inside: &Inside, accelerator: Accelerator) -> Result<Self> {
        let (kernel, initramfs) = (place.path("kernel"), place.path("initramfs"));
        copy_for_all(&inside.kernel, &kernel)?;
        copy_for_all(&inside.initramfs, &initramfs)?;
        let serial = place.path("serial");
        let xml = xml(&Parts {
            accelerator,
            kernel: plain(&kernel)?,
            initramfs: plain(&initramfs)?,
            socket: plain(&place.path(&format!("{DISK}.sock")))?,
            serial: plain(&serial)?,
        });
        let file = place.path("domain.xml");
        fs::write(&file, xml)?;
        let started = output_of("virsh", &["--quiet", "define", plain(&file)?])
            .and_then(|_| output_of("virsh", &["--quiet", "start", NAME]));
        started.with_context(|| place.log())?;
        let stream = UnixStream::connect(&serial).context("the guest has no serial line")?;
        stream.set_read_timeout(Some(PATIENCE))?;
        Ok(Self { serial: BufReader::new(stream) })
    }

    /// The user that the domain's QEMU runs as.
    pub(super) fn user(&self) -> Result<u32> {
        let pid = fs::read_to_string(format!("/run/libvirt/qemu/{NAME}.pid"))
            .context("QEMU has no PID file")?;
        let status = fs::read_to_string(format!("/proc/{}/status", pid.trim()))?;
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix("Uid:"))
            .context("QEMU has no user")?;
        line.split_whitespace()
            .nth(1)
            .and_then(|word| word.parse().ok())
            .context("QEMU's user has no number")
    }

    /// Sends the guest an order, and waits for the end of its answer.
    pub(super) fn order(&mut self, order: &str) -> Result<Answer> {
        self.serial.get_mut().write_all(format!("{order}\n").as_bytes())?;
        self.answer(order)
    }

    /// Waits for the end of the guest's answer to an order.
    pub(super) fn answer(&mut self, order: &str) -> Result<Answer> {
        let mut answer = Answer::to(order);
        loop {
            let mut line = String::new();
            let read = self
                .serial
                .read_line(&mut line)
                .with_context(|| format!("the guest does not finish: {order}"))?;
            if read == 0 {
                bail!("the guest's QEMU has ended (during: {order})");
            }
            match console::parse(&line)? {
                Some(Message::Value { key, text }) => answer.add(key, text),
                Some(Message::Finished { order: finished })
                    if order.split(' ').next() == Some(finished) =>
                {
                    return Ok(answer);
                }
                Some(Message::Failed { why }) => bail!("in the guest: {why} (during: {order})"),
                _ => {}
            }
        }
    }

    /// Lets the guest power off, and waits for the domain's end.
    pub(super) fn off(mut self, place: &Place) -> Result<()> {
        self.serial.get_mut().write_all(b"off\n")?;
        let mut line = String::new();
        while self.serial.read_line(&mut line).is_ok_and(|read| read > 0) {
            line.clear();
        }
        let is_off = || -> Result<bool> {
            Ok(output_of("virsh", &["--quiet", "domstate", NAME])? == "shut off")
        };
        if !is_off()? {
            // A kernel without ACPI cannot switch its machine off.
            let destroyed = output_of("virsh", &["--quiet", "destroy", NAME]);
            // It may have ended meanwhile by itself.
            if !is_off()? {
                destroyed.with_context(|| place.log())?;
            }
        }
        output_of("virsh", &["--quiet", "undefine", NAME])?;
        Ok(())
    }
}

/// The parts of the XML that differ from run to run.
struct Parts<'a> {
    accelerator: Accelerator,
    kernel: &'a str,
    initramfs: &'a str,
    socket: &'a str,
    serial: &'a str,
}

/// The domain's XML. Disk and memory are as in docs/libvirt.md.
fn xml(parts: &Parts<'_>) -> String {
    let Parts { accelerator, kernel, initramfs, socket, serial } = parts;
    let (kind, cpu) = match accelerator {
        Accelerator::Kvm => ("kvm", "host-passthrough"),
        Accelerator::Tcg => ("qemu", "maximum"),
    };
    format!(
        "<domain type='{kind}'>
  <name>{NAME}</name>
  <memory unit='MiB'>768</memory>
  <vcpu>2</vcpu>
  <memoryBacking>
    <source type='memfd'/>
    <access mode='shared'/>
  </memoryBacking>
  <os>
    <type arch='x86_64' machine='q35'>hvm</type>
    <kernel>{kernel}</kernel>
    <initrd>{initramfs}</initrd>
    <cmdline>console=ttyS1 quiet maxcpus=1 panic=-1 mitigations=off no_timer_check tsc=reliable \
         SIDECORE_POLLED=0 SIDECORE_PART=orders SIDECORE_SLOT={FIRST_SLOT:02x}</cmdline>
  </os>
  <features><acpi/></features>
  <cpu mode='{cpu}'/>
  <devices>
    <emulator>/usr/bin/qemu-system-x86_64</emulator>
    <disk type='vhostuser' device='disk'>
      <driver name='qemu' type='raw' queues='1'/>
      <source type='unix' path='{socket}'>
        <reconnect enabled='yes' timeout='1'/>
      </source>
      <target dev='vda' bus='virtio'/>
      <address type='pci' domain='0' bus='0' slot='{FIRST_SLOT}' function='0'/>
    </disk>
    <serial type='unix'>
      <source mode='bind' path='{serial}'/>
      <target port='0'/>
    </serial>
    <serial type='null'>
      <target port='1'/>
    </serial>
    <memballoon model='none'/>
    <video><model type='none'/></video>
  </devices>
</domain>
"
    )
}
