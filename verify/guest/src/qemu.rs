//! The virtual machine around the guest.

use crate::process::{Inbox, Running, Source};
use crate::{install, text};
use anyhow::Result;
use std::ffi::OsString;
use std::path::Path;

/// Who executes the guest's instructions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Accelerator {
    Kvm,
    Tcg,
}

impl Accelerator {
    pub(crate) fn choose() -> Accelerator {
        let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        // The device alone proves nothing: it can be there, open, and still not run a guest.
        let opens = || std::fs::File::options().read(true).write(true).open("/dev/kvm").is_ok();
        if has_virtualization(&cpuinfo) && opens() { Accelerator::Kvm } else { Accelerator::Tcg }
    }

    pub(crate) fn explanation(self) -> &'static str {
        match self {
            Accelerator::Kvm => "guests run on the processor itself (KVM)",
            Accelerator::Tcg => "no KVM to be used here: guests are emulated (TCG), slowly; counts stay meaningful",
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

/// One disk of the guest.
pub(crate) struct Disk<'a> {
    pub(crate) name: &'a str,
    pub(crate) socket: &'a Path,
    /// The PCI slot, by which the guest tells its disks apart.
    pub(crate) slot: u8,
    /// Whether its rings are packed ones.
    pub(crate) packed: bool,
}

pub(crate) struct Machine<'a> {
    /// The guest's name, for what it says.
    pub(crate) name: &'static str,
    pub(crate) accelerator: Accelerator,
    pub(crate) kernel: &'a Path,
    pub(crate) initramfs: &'a Path,
    /// Where the kernel's messages go.
    pub(crate) kernel_log: &'a Path,
    pub(crate) disks: &'a [Disk<'a>],
    pub(crate) queues: u16,
    /// Settings for the guest's script, as words of the kernel's command line.
    pub(crate) settings: String,
}

/// Enough for the image, which the kernel holds twice while it unpacks it, and for fio.
const MEMORY: &str = "768M";

impl Machine<'_> {
    pub(crate) fn start(&self, inbox: &Inbox<'_>) -> Result<Running> {
        let program = install::require("qemu-system-x86_64")?;
        Running::start(inbox, program.as_os_str(), self.arguments()?, Source::Guest(self.name), Source::Qemu(self.name))
    }

    fn arguments(&self) -> Result<Vec<OsString>> {
        let (accelerator, cpu) = match self.accelerator {
            Accelerator::Kvm => ("kvm", "host"),
            Accelerator::Tcg => ("tcg", "max"),
        };
        let mut arguments: Vec<String> = Vec::new();
        let mut add = |option: &str, value: String| arguments.extend([option.to_owned(), value]);
        // The daemon maps the guest's memory, so it must be a file that can be shared.
        add("-object", format!("memory-backend-memfd,id=memory,size={MEMORY},share=on"));
        add("-machine", "q35,memory-backend=memory".to_owned());
        add("-accel", accelerator.to_owned());
        add("-cpu", cpu.to_owned());
        add("-m", MEMORY.to_owned());
        // The driver makes no more queues than there could be CPUs, and polls at most all but one: there have to be two,
        // but the kernel is told to start one only (maxcpus), since the sidecore has a core of the host for itself.
        add("-smp", "2".to_owned());
        add("-kernel", text(self.kernel)?.to_owned());
        add("-initrd", text(self.initramfs)?.to_owned());
        // An emulated CPU that a busy host held up for a moment must not make the kernel doubt its timers: it would fall
        // back to slow ones.
        let kernel = "console=ttyS1 quiet maxcpus=1 panic=-1 mitigations=off no_timer_check tsc=reliable";
        add("-append", format!("{kernel} {}", self.settings));
        add("-display", "none".to_owned());
        add("-chardev", "stdio,id=dialogue,signal=off".to_owned());
        add("-serial", "chardev:dialogue".to_owned());
        add("-serial", format!("file:{}", text(self.kernel_log)?));
        for disk in self.disks {
            let name = disk.name;
            add("-chardev", format!("socket,id=socket-{name},path={}", text(disk.socket)?));
            let (queues, slot) = (self.queues, disk.slot);
            let packed = if disk.packed { "on" } else { "off" };
            let device = format!("vhost-user-blk-pci,chardev=socket-{name},num-queues={queues},packed={packed}");
            add("-device", format!("{device},addr={slot:#x}"));
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

    #[test]
    fn each_disk_gets_a_socket_and_a_slot() {
        let disks = [Disk { name: "ram", socket: Path::new("/t/ram.sock"), slot: 6, packed: true }];
        let machine = Machine {
            name: "guest",
            accelerator: Accelerator::Tcg,
            kernel: Path::new("/k"),
            initramfs: Path::new("/i"),
            kernel_log: Path::new("/l"),
            disks: &disks,
            queues: 2,
            settings: "A=b".to_owned(),
        };
        let arguments = machine.arguments().unwrap();
        let has = |text: &str| arguments.iter().any(|argument| argument.to_str() == Some(text));
        assert!(has("socket,id=socket-ram,path=/t/ram.sock"));
        assert!(has("vhost-user-blk-pci,chardev=socket-ram,num-queues=2,packed=on,addr=0x6"));
        assert!(has("tcg"));
    }
}
