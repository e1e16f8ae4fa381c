//! Tests against a tree of files like a guest's `/sys` and `/proc`, and a kernel in memory.

use crate::boot::{self, Next};
use crate::napi::{Napi, Napis};
use crate::nic::Nics;
use crate::report::{Finding, State, table};
use crate::system::System;
use crate::tree::Tree;
use anyhow::Result;
use std::cell::RefCell;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::rc::Rc;
use tempfile::TempDir;

const NEXT: Next = Next { poll_queues: 2, is_quiet: true, has_command_line: false, huge_pages: 0 };
const NIC: &str = "/sys/class/net/eth0";

/// A kernel with NAPI instances of one NIC, which has the number 2.
#[derive(Clone, Default)]
struct Fake(Rc<RefCell<Vec<Napi>>>);

impl Napis for Fake {
    fn list(&mut self, ifindex: u32) -> Result<Option<Vec<Napi>>> {
        Ok(Some(if ifindex == 2 { self.0.borrow().clone() } else { Vec::new() }))
    }

    fn set_threaded(&mut self, id: u32, mode: u64) -> Result<()> {
        let mut napis = self.0.borrow_mut();
        let napi = napis.iter_mut().find(|napi| napi.id == id).unwrap();
        napi.threaded = Some(mode);
        Ok(())
    }
}

/// The path on this machine of a path in the guest.
fn place_of(guest: &Guest, path: &str) -> PathBuf {
    guest.directory.path().join(path.trim_start_matches('/'))
}

/// A guest with a NIC and two disks of two queues each.
pub(crate) struct Guest {
    directory: TempDir,
    pub(crate) system: System,
    napis: Rc<RefCell<Vec<Napi>>>,
}

impl Guest {
    pub(crate) fn new(release: &str) -> Guest {
        let directory = tempfile::tempdir().unwrap();
        let fake = Fake::default();
        let threaded = Some(0);
        fake.0.borrow_mut().extend([8193, 8194].map(|id| Napi { id, threaded }));
        let napis = Rc::clone(&fake.0);
        let system = System { tree: Tree::new(directory.path()), napis: Box::new(fake) };
        let guest = Guest { directory, system, napis };
        for (path, text) in [
            ("/proc/sys/kernel/osrelease", release),
            ("/proc/sys/kernel/random/boot_id", "one"),
            ("/proc/sys/net/core/busy_read", "0"),
            ("/proc/sys/net/core/busy_poll", "0"),
            ("/proc/sys/vm/nr_hugepages", "0"),
            ("/proc/cmdline", "quiet root=/dev/vda1"),
            ("/etc/default/grub", ""),
            ("/sys/class/net/lo/ifindex", "1"),
            ("/sys/class/net/eth0/ifindex", "2"),
            ("/sys/class/net/eth0/device/vendor", "0x1af4"),
            ("/sys/class/net/eth0/operstate", "up"),
            ("/sys/class/net/eth0/gro_flush_timeout", "0"),
            ("/sys/class/net/eth0/napi_defer_hard_irqs", "7"),
            ("/sys/module/virtio_net/initstate", "live"),
            ("/sys/module/virtio_net/parameters/napi_tx", "Y"),
            ("/sys/module/virtio_blk/initstate", "live"),
            ("/sys/module/virtio_blk/parameters/poll_queues", "0"),
            ("/sys/module/nvme/parameters/poll_queues", "0"),
        ] {
            guest.write(path, text);
        }
        let driver = place_of(&guest, "/sys/class/net/eth0/device/driver");
        symlink("/sys/bus/virtio/drivers/virtio_net", driver).unwrap();
        for disk in ["vda", "nvme0n1"] {
            guest.write(&format!("/sys/block/{disk}/device/vendor"), "0x1af4");
            guest.write(&format!("/sys/block/{disk}/queue/io_poll"), "0");
            guest.write(&format!("/sys/block/{disk}/mq/0/cpu_list"), "0");
            guest.write(&format!("/sys/block/{disk}/mq/1/cpu_list"), "1");
        }
        guest
    }

    pub(crate) fn write(&self, path: &str, text: &str) {
        let place = place_of(self, path);
        fs::create_dir_all(place.parent().unwrap()).unwrap();
        fs::write(place, text).unwrap();
    }

    fn apply(&mut self, nics: Nics) -> Vec<String> {
        self.system.apply(nics, Some(&NEXT)).unwrap()
    }

    fn find(&mut self, device: &str, setting: &str) -> Finding {
        let findings = self.system.status().unwrap();
        let mut found =
            findings.into_iter().filter(|f| (f.device.as_str(), f.setting) == (device, setting));
        found.next().unwrap()
    }

    fn state(&mut self, device: &str, setting: &str) -> State {
        self.find(device, setting).state
    }

    fn undo(&mut self) -> Vec<String> {
        let mut said = self.system.undo().unwrap();
        said.extend(boot::remove(&self.system.tree).unwrap());
        said
    }

    fn read(&self, path: &str) -> String {
        self.system.tree.read(path).unwrap()
    }
}

#[test]
fn an_old_kernel_defers_interrupts_and_says_why_it_does_no_more() {
    let mut guest = Guest::new("6.1.0-18-amd64");
    let threaded = guest.find("eth0", "threaded busy polling");
    assert_eq!(threaded.state, State::Cannot);
    assert!(threaded.reason.contains("6.1.0-18-amd64") && threaded.reason.contains("6.19"));
    assert_eq!(guest.state("eth0", "deferred interrupts"), State::Off);
    guest.apply(Nics::Auto);
    assert_eq!(guest.state("eth0", "deferred interrupts"), State::InForce);
    assert_eq!(guest.state("sockets", "busy polling"), State::InForce);
    assert_eq!(guest.read(&format!("{NIC}/gro_flush_timeout")), "50000");
    let error = guest.system.apply(Nics::BusyPoll, Some(&NEXT)).unwrap_err().to_string();
    assert!(error.contains("eth0") && error.contains("--nics defer"), "{error}");
}

#[test]
fn a_new_kernel_polls_by_threads_alone() {
    let mut guest = Guest::new("7.2.0");
    assert_eq!(guest.state("eth0", "threaded busy polling"), State::Off);
    guest.apply(Nics::Auto);
    assert_eq!(guest.state("eth0", "threaded busy polling"), State::InForce);
    assert!(guest.napis.borrow().iter().all(|napi| napi.threaded == Some(2)));
    assert_eq!(guest.state("sockets", "busy polling"), State::Off);
    guest.napis.borrow_mut()[1].threaded = Some(1);
    let found = guest.find("eth0", "threaded busy polling");
    assert_eq!((found.state, found.value.as_str()), (State::Off, "1 of 2 NAPI instances"));
}

#[test]
fn a_driver_without_instances_falls_back_and_an_interface_that_is_down_is_named() {
    let mut guest = Guest::new("7.2.0");
    guest.napis.borrow_mut().clear();
    guest.apply(Nics::Auto);
    assert_eq!(guest.state("eth0", "deferred interrupts"), State::InForce);
    assert!(guest.find("eth0", "threaded busy polling").reason.contains("driver"));
    guest.write(&format!("{NIC}/operstate"), "down\n");
    assert!(guest.find("eth0", "threaded busy polling").reason.contains("down"));
}

#[test]
fn a_second_run_changes_nothing_and_undo_restores_the_first_values() {
    for release in ["6.1.0", "6.19.1"] {
        let mut guest = Guest::new(release);
        let before = guest.system.status().unwrap();
        assert!(!guest.apply(Nics::Auto).is_empty());
        let after = guest.system.status().unwrap();
        assert_ne!(after, before);
        assert_eq!(guest.apply(Nics::Auto), Vec::<String>::new());
        assert_eq!(guest.system.status().unwrap(), after);
        assert!(!guest.undo().is_empty());
        assert_eq!(guest.system.status().unwrap(), before);
        assert_eq!(guest.read(&format!("{NIC}/napi_defer_hard_irqs")), "7");
        assert!(!guest.system.tree.exists(crate::memory::PATH));
        assert_eq!(guest.undo(), Vec::<String>::new());
    }
}

#[test]
fn undo_leaves_out_a_nic_that_is_gone() {
    let mut guest = Guest::new("7.2.0");
    guest.apply(Nics::Auto);
    guest.napis.borrow_mut().retain(|napi| napi.id == 8194);
    guest.undo();
    assert_eq!(*guest.napis.borrow(), [Napi { id: 8194, threaded: Some(0) }]);
    assert!(!guest.system.tree.exists(crate::memory::PATH));
}

#[test]
fn poll_queues_are_of_the_next_boot_unless_the_disk_or_its_driver_has_none() {
    let mut guest = Guest::new("6.1.0");
    assert_eq!(guest.state("vda", "poll queues"), State::Off);
    assert!(guest.find("nvme0n1", "poll queues").reason.contains("--next-boot"));
    let loud = Next { is_quiet: false, ..NEXT };
    let said = guest.system.apply(Nics::Off, Some(&loud)).unwrap();
    assert!(said.len() == 1 && said[0].contains("update-initramfs"), "{said:?}");
    assert_eq!(guest.state("vda", "poll queues"), State::AfterReboot);
    assert_eq!(guest.state("nvme0n1", "poll queues"), State::Off);
    guest.write("/sys/block/vda/queue/io_poll", "1\n");
    assert_eq!(guest.state("vda", "poll queues"), State::InForce);

    guest.write("/sys/block/vdb/device/vendor", "0x1af4");
    guest.write("/sys/block/vdb/mq/0/cpu_list", "0");
    assert!(guest.find("vdb", "poll queues").reason.contains("one queue"));
    guest.write("/sys/block/sda/device/vendor", "x");
    assert_eq!(guest.state("sda", "poll queues"), State::Cannot);
    guest.system.tree.remove("/sys/module/nvme/parameters/poll_queues").unwrap();
    assert!(guest.find("nvme0n1", "poll queues").reason.contains("5.0"));
}

#[test]
fn transmission_without_interrupts_is_of_the_next_boot_and_of_virtio_net() {
    let setting = "transmission without interrupts";
    let mut guest = Guest::new("6.1.0");
    assert_eq!(guest.state("eth0", setting), State::Off);
    guest.apply(Nics::Auto);
    assert_eq!(guest.state("eth0", setting), State::AfterReboot);
    let options = guest.read("/etc/modprobe.d/sidecore-guest-tune.conf");
    assert!(options.ends_with("options virtio_net napi_tx=0"), "{options}");
    guest.system.apply(Nics::Off, None).unwrap();
    assert_eq!(guest.state("eth0", setting), State::AfterReboot);
    guest.system.apply(Nics::Off, Some(&Next { is_quiet: false, ..NEXT })).unwrap();
    assert_eq!(guest.state("eth0", setting), State::Off);
    guest.write("/sys/module/virtio_net/parameters/napi_tx", "N\n");
    assert_eq!(guest.state("eth0", setting), State::InForce);
    guest.system.tree.remove("/sys/module/virtio_net/parameters/napi_tx").unwrap();
    assert!(guest.find("eth0", setting).reason.contains("napi_tx"));
    guest.system.tree.remove("/sys/class/net/eth0/device/driver").unwrap();
    assert!(guest.find("eth0", setting).reason.contains("driver"));
}

#[test]
fn the_next_boot_has_a_command_line_and_huge_pages_when_asked() {
    let mut guest = Guest::new("6.1.0");
    let next = Next { has_command_line: true, huge_pages: 64, ..NEXT };
    let said = guest.system.apply(Nics::Defer, Some(&next)).unwrap();
    assert!(said.iter().any(|said| said.contains("update-grub")), "{said:?}");
    let grub = guest.read("/etc/default/grub.d/sidecore-guest-tune.cfg");
    let words = "idle=poll virtio_blk.poll_queues=2 nvme.poll_queues=2 virtio_net.napi_tx=0\"";
    assert!(grub.ends_with(words), "{grub}");
    for (device, setting) in
        [("CPUs", "idle=poll"), ("memory", "huge pages"), ("nvme0n1", "poll queues")]
    {
        assert_eq!(guest.state(device, setting), State::AfterReboot, "{device}");
    }
    guest.write("/proc/cmdline", "quiet idle=poll\n");
    guest.write("/proc/sys/vm/nr_hugepages", "64\n");
    assert_eq!(guest.state("CPUs", "idle=poll"), State::InForce);
    assert_eq!(guest.find("memory", "huge pages").value, "64");
    let said = guest.undo();
    assert_eq!(said.iter().filter(|said| said.starts_with("removed")).count(), 3, "{said:?}");
    assert!(!guest.system.tree.exists("/etc/default/grub.d/sidecore-guest-tune.cfg"));
}

#[test]
fn a_file_of_another_program_is_neither_replaced_nor_removed() {
    let mut guest = Guest::new("6.1.0");
    let path = "/etc/modprobe.d/sidecore-guest-tune.conf";
    guest.write(path, "options virtio_blk poll_queues=9\n");
    let error = guest.system.apply(Nics::Off, Some(&NEXT)).unwrap_err().to_string();
    assert!(error.contains(path), "{error}");
    guest.undo();
    assert!(guest.read(path).ends_with("=9"));
}

#[test]
fn files_that_are_missing_or_of_nonsense_are_reported_and_do_not_panic() {
    let directory = tempfile::tempdir().unwrap();
    let tree = Tree::new(directory.path());
    let mut system = System { tree, napis: Box::new(Fake::default()) };
    assert!(system.status().unwrap().iter().any(|found| found.state == State::Cannot));
    for (text, expected) in [("", (0, 0)), ("x.y", (0, 0)), ("6", (0, 0)), ("6.12-rc1+", (6, 12))] {
        let mut guest = Guest::new(text);
        assert_eq!(guest.system.release(), expected, "{text}");
        guest.write(&format!("{NIC}/gro_flush_timeout"), "\u{0}-1 no number");
        guest.write(&format!("{NIC}/ifindex"), "99999999999999999999");
        assert_eq!(guest.state("eth0", "deferred interrupts"), State::Cannot);
    }
}

#[test]
fn the_table_has_a_line_for_each_setting() {
    let mut guest = Guest::new("6.1.0");
    let text = table(&guest.system.status().unwrap());
    assert!(
        text.contains("eth0     threaded busy polling            cannot be       Linux 6.1.0"),
        "{text}"
    );
    assert!(text.lines().all(|line| line.trim_end() == line));
}
