//! The guest's virtual machine.

use crate::config::QUEUES;
use crate::emulator::{Emulator, VFIO_USER};
use crate::process::{Inbox, Running, Source};
use crate::text;
use anyhow::{Context, Result};
use serde_json::{Value, json};
use std::ffi::OsString;
use std::path::Path;

/// The way in which QEMU executes the guest's instructions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Accelerator {
    Kvm,
    Tcg,
}

impl Accelerator {
    pub(crate) fn choose() -> Accelerator {
        let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        // The device alone proves nothing: it may exist and open, and still not run a guest.
        let opens = || std::fs::File::options().read(true).write(true).open("/dev/kvm").is_ok();
        if has_virtualization(&cpuinfo) && opens() { Accelerator::Kvm } else { Accelerator::Tcg }
    }

    pub(crate) fn explanation(self) -> &'static str {
        match self {
            Accelerator::Kvm => "guests run on the processor itself (KVM)",
            Accelerator::Tcg => {
                "no KVM to be used here: guests are emulated (TCG), slowly; counts stay meaningful"
            }
        }
    }
}

fn has_virtualization(cpuinfo: &str) -> bool {
    cpuinfo
        .lines()
        .filter(|line| line.starts_with("flags"))
        .flat_map(str::split_whitespace)
        .any(|flag| flag == "vmx" || flag == "svm")
}

/// A virtio disk of the guest.
pub(crate) struct Disk<'a> {
    pub(crate) name: &'a str,
    pub(crate) backend: Backend<'a>,
    /// The PCI slot, which tells the guest its disks apart.
    pub(crate) slot: u8,
    /// Whether the rings are packed.
    pub(crate) packed: bool,
}

/// The part of a host that executes a disk's requests.
#[derive(Clone, Copy)]
pub(crate) enum Backend<'a> {
    /// A daemon, at this socket of vhost-user.
    Daemon(&'a Path),
    /// QEMU itself, on this file.
    Qemu(&'a Path),
    /// The same, on a file that a daemon uses, too.
    Shared(&'a Path),
}

impl Disk<'_> {
    /// QEMU's options for the backend, and the beginning of the device's.
    fn options(&self) -> Result<(Vec<(&'static str, String)>, String)> {
        let name = self.name;
        Ok(match self.backend {
            Backend::Daemon(socket) => {
                let socket = format!("socket,id=socket-{name},path={}", text(socket)?);
                (vec![("-chardev", socket)], format!("vhost-user-blk-pci,chardev=socket-{name}"))
            }
            Backend::Qemu(file) => {
                let file = text(file)?;
                let drive = format!("if=none,id=drive-{name},format=raw,file={file}");
                // Only kicks that QEMU handles in the virtual CPU's thread are in its trace.
                let device = format!("virtio-blk-pci,drive=drive-{name},ioeventfd=off");
                let trace = vec![
                    ("-drive", drive),
                    ("-trace", KICK.to_owned()),
                    ("-D", format!("{file}{TRACE}")),
                ];
                (trace, device)
            }
            Backend::Shared(file) => {
                let drive = format!("if=none,id=drive-{name},format=raw,cache=writethrough");
                let drive = format!("{drive},file.locking=off,file={}", text(file)?);
                (vec![("-drive", drive)], format!("virtio-blk-pci,drive=drive-{name}"))
            }
        })
    }
}

/// QEMU's trace event for a kick of a virtio queue.
pub(crate) const KICK: &str = "virtio_queue_notify";
/// The end of the name of the trace's file, which begins with that of the disk's file.
pub(crate) const TRACE: &str = ".trace";

/// A PCI Express port, into which a device can be plugged, also while the guest runs.
pub(crate) struct Port {
    /// The port's PCI slot, by which the guest identifies the device behind it.
    pub(crate) slot: u8,
    /// The device in the port when the guest boots.
    pub(crate) device: Option<Value>,
}

impl Port {
    /// QEMU's option for the port in a slot.
    pub(crate) fn description(slot: u8) -> String {
        format!("pcie-root-port,id={},chassis={slot},addr={slot:#x}", Port::name(slot))
    }

    fn name(slot: u8) -> String {
        format!("port{slot:02x}")
    }
}

/// QEMU's description of a vfio-user device for the port in a slot.
pub(crate) fn function(name: &str, socket: &Path, slot: u8) -> Result<Value> {
    let socket = json!({ "type": "unix", "path": text(socket)? });
    Ok(json!({ "driver": VFIO_USER, "id": name, "bus": Port::name(slot), "socket": socket }))
}

/// The devices of a guest.
pub(crate) struct Equipment<'a> {
    /// Whether the drivers make queues that they poll.
    pub(crate) polled: bool,
    pub(crate) disks: &'a [Disk<'a>],
    pub(crate) ports: &'a [Port],
    pub(crate) nics: &'a [Nic<'a>],
}

/// A NIC of the guest.
pub(crate) struct Nic<'a> {
    pub(crate) name: &'a str,
    pub(crate) mac: &'a str,
    pub(crate) cable: Cable<'a>,
    /// Whether the rings are packed.
    pub(crate) packed: bool,
}

/// The other end of a NIC's cable.
#[derive(Clone, Copy)]
pub(crate) enum Cable<'a> {
    /// A daemon, at this socket of vhost-user.
    Daemon(&'a Path),
    /// The TAP interface of this name, in QEMU's network namespace.
    Tap(&'a str),
}

impl Nic<'_> {
    /// QEMU's options.
    fn options(&self, accelerator: Accelerator) -> Result<Vec<(&'static str, String)>> {
        let Nic { name, mac, cable, packed } = self;
        let packed = if *packed { "on" } else { "off" };
        // No firmware: the guest does not boot from the network.
        let device = format!("virtio-net-pci,netdev=net-{name},mac={mac},packed={packed},romfile=");
        Ok(match cable {
            Cable::Daemon(socket) => {
                // QEMU 7.2 crashes with MSI-X of a vhost NIC where there is no KVM to route it.
                let vectors = match accelerator {
                    Accelerator::Kvm => "",
                    Accelerator::Tcg => ",vectors=0",
                };
                vec![
                    ("-chardev", format!("socket,id=socket-{name},path={}", text(socket)?)),
                    ("-netdev", format!("vhost-user,id=net-{name},chardev=socket-{name}")),
                    ("-device", device + vectors),
                ]
            }
            Cable::Tap(interface) => {
                let tap = format!("tap,id=net-{name},ifname={interface},script=no,downscript=no");
                vec![("-netdev", tap), ("-device", device)]
            }
        })
    }
}

pub(crate) struct Machine<'a> {
    /// The guest's name, which marks its lines.
    pub(crate) name: &'static str,
    pub(crate) emulator: &'a Emulator,
    pub(crate) accelerator: Accelerator,
    pub(crate) kernel: &'a Path,
    pub(crate) initramfs: &'a Path,
    /// The file for the kernel's messages.
    pub(crate) kernel_log: &'a Path,
    /// QEMU's control socket, which only a guest with ports has.
    pub(crate) control: &'a Path,
    pub(crate) equipment: &'a Equipment<'a>,
    /// Settings for the guest's script, as words of the kernel's command line.
    pub(crate) settings: String,
}

/// Enough for fio and for the image, which the kernel holds twice while it unpacks it.
const MEMORY: &str = "768M";

impl Machine<'_> {
    pub(crate) fn start(&self, inbox: &Inbox) -> Result<Running> {
        let (program, words) = self.emulator.command.split_first().context("an empty command")?;
        let arguments = words.iter().map(OsString::from).chain(self.arguments()?);
        Running::start(
            inbox,
            program.as_ref(),
            arguments,
            Source::Guest(self.name),
            Source::Qemu(self.name),
        )
    }

    fn arguments(&self) -> Result<Vec<OsString>> {
        let (accelerator, cpu) = match self.accelerator {
            Accelerator::Kvm => ("kvm", "host"),
            Accelerator::Tcg => ("tcg", "max"),
        };
        let mut arguments: Vec<String> = Vec::new();
        let mut add = |option: &str, value: String| arguments.extend([option.to_owned(), value]);
        // The daemon maps the guest's memory, so the memory must be a file that can be shared.
        add("-object", format!("memory-backend-memfd,id=memory,size={MEMORY},share=on"));
        add("-machine", "q35,memory-backend=memory".to_owned());
        add("-accel", accelerator.to_owned());
        add("-cpu", cpu.to_owned());
        add("-m", MEMORY.to_owned());
        // The driver makes at most one queue per possible CPU, and polls all but one of them at
        // most. So the machine has two CPUs, of which the kernel starts only one (maxcpus), because
        // the sidecore has a core of the host for itself.
        add("-smp", "2".to_owned());
        add("-kernel", text(self.kernel)?.to_owned());
        add("-initrd", text(self.initramfs)?.to_owned());
        // If a busy host delays an emulated CPU, the kernel must not distrust its timers and fall
        // back to slow ones.
        let kernel =
            "console=ttyS1 quiet maxcpus=1 panic=-1 mitigations=off no_timer_check tsc=reliable";
        // The setting for an nvme driver that is built into the kernel.
        let polled = u8::from(self.equipment.polled);
        add(
            "-append",
            format!(
                "{kernel} nvme.poll_queues={polled} SIDECORE_POLLED={polled} {}",
                self.settings
            ),
        );
        add("-display", "none".to_owned());
        add("-chardev", "stdio,id=dialogue,signal=off".to_owned());
        add("-serial", "chardev:dialogue".to_owned());
        add("-serial", format!("file:{}", text(self.kernel_log)?));
        for disk in self.equipment.disks {
            let (backend, device) = disk.options()?;
            backend.iter().for_each(|(option, value)| add(option, value.clone()));
            let (queues, slot) = (QUEUES, disk.slot);
            let packed = if disk.packed { "on" } else { "off" };
            add("-device", format!("{device},num-queues={queues},packed={packed},addr={slot:#x}"));
        }
        for nic in self.equipment.nics {
            nic.options(self.accelerator)?
                .iter()
                .for_each(|(option, value)| add(option, value.clone()));
        }
        for port in self.equipment.ports {
            add("-device", Port::description(port.slot));
            if let Some(device) = &port.device {
                add("-device", device.to_string());
            }
        }
        if !self.equipment.ports.is_empty() {
            add("-qmp", format!("unix:{},server=on,wait=off", text(self.control)?));
        }
        arguments.extend(["-nodefaults", "-no-user-config", "-no-reboot"].map(str::to_owned));
        Ok(arguments.into_iter().map(OsString::from).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn virtualization_is_read_from_the_flags_alone() {
        assert!(has_virtualization("processor\t: 0\nflags\t\t: fpu vmx sse\n"));
        assert!(has_virtualization("flags\t\t: fpu svm\n"));
        assert!(!has_virtualization("flags\t\t: fpu sse vmxx\nvmx flags\t: vnmi vmx\n"));
        assert!(!has_virtualization(""));
    }

    fn has(equipment: &Equipment<'_>, words: &[&str]) {
        let machine = Machine {
            name: "guest",
            emulator: &Emulator { command: vec!["qemu".to_owned()] },
            accelerator: Accelerator::Tcg,
            kernel: Path::new("/k"),
            initramfs: Path::new("/i"),
            kernel_log: Path::new("/l"),
            control: Path::new("/c"),
            equipment,
            settings: "A=b".to_owned(),
        };
        let arguments = machine.arguments().unwrap();
        for word in words {
            assert!(
                arguments.iter().any(|argument| argument.to_str() == Some(word)),
                "{word} in {arguments:?}"
            );
        }
    }

    #[test]
    fn each_disk_gets_a_socket_and_a_slot() {
        let backend = Backend::Daemon(Path::new("/t/ram.sock"));
        let disks = [Disk { name: "ram", backend, slot: 6, packed: true }];
        let words = [
            "socket,id=socket-ram,path=/t/ram.sock",
            "vhost-user-blk-pci,chardev=socket-ram,num-queues=2,packed=on,addr=0x6",
            "tcg",
        ];
        has(&Equipment { polled: false, disks: &disks, ports: &[], nics: &[] }, &words);
    }

    #[test]
    fn a_nic_gets_its_address_and_a_socket() {
        let cable = Cable::Daemon(Path::new("/t/nic.sock"));
        let nics = [Nic { name: "nic", mac: "52:54:00:00:00:01", cable, packed: true }];
        let words = [
            "socket,id=socket-nic,path=/t/nic.sock",
            "vhost-user,id=net-nic,chardev=socket-nic",
            "virtio-net-pci,netdev=net-nic,mac=52:54:00:00:00:01,packed=on,romfile=,vectors=0",
        ];
        has(&Equipment { polled: false, disks: &[], ports: &[], nics: &nics }, &words);
    }

    #[test]
    fn a_nic_of_a_host_is_a_tap_interface_without_scripts() {
        let nics = [Nic {
            name: "nic",
            mac: "52:54:00:00:00:01",
            cable: Cable::Tap("eth3"),
            packed: false,
        }];
        let words = [
            "tap,id=net-nic,ifname=eth3,script=no,downscript=no",
            "virtio-net-pci,netdev=net-nic,mac=52:54:00:00:00:01,packed=off,romfile=",
        ];
        has(&Equipment { polled: false, disks: &[], ports: &[], nics: &nics }, &words);
    }

    #[test]
    fn a_disk_of_qemu_is_a_drive_whose_kicks_are_traced() {
        let backend = Backend::Qemu(Path::new("/t/own.img"));
        let disks = [Disk { name: "own", backend, slot: 5, packed: false }];
        let words = [
            "if=none,id=drive-own,format=raw,file=/t/own.img",
            "virtio-blk-pci,drive=drive-own,ioeventfd=off,num-queues=2,packed=off,addr=0x5",
            "virtio_queue_notify",
            "/t/own.img.trace",
        ];
        has(&Equipment { polled: false, disks: &disks, ports: &[], nics: &[] }, &words);
    }

    #[test]
    fn a_file_that_a_daemon_uses_too_is_not_locked() {
        let backend = Backend::Shared(Path::new("/t/pool.img"));
        let disks = [Disk { name: "raw", backend, slot: 6, packed: false }];
        let words = [
            "if=none,id=drive-raw,format=raw,cache=writethrough,file.locking=off,file=/t/pool.img",
            "virtio-blk-pci,drive=drive-raw,num-queues=2,packed=off,addr=0x6",
        ];
        has(&Equipment { polled: false, disks: &disks, ports: &[], nics: &[] }, &words);
    }

    #[test]
    fn a_port_comes_before_its_device_and_with_a_control_socket() {
        let device = function("vf", Path::new("/t/vf.sock"), 10).unwrap();
        assert_eq!(
            (&device["bus"], &device["socket"]["path"]),
            (&json!("port0a"), &json!("/t/vf.sock"))
        );
        let described = device.to_string();
        let ports = [Port { slot: 10, device: Some(device) }];
        let words = [
            "pcie-root-port,id=port0a,chassis=10,addr=0xa",
            &described,
            "unix:/c,server=on,wait=off",
        ];
        has(&Equipment { polled: true, disks: &[], ports: &ports, nics: &[] }, &words);
    }
}
