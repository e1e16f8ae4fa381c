//! The log of written pages: every page that the device changes is in it, and a copy of the memory
//! that only follows the log is the memory in the end.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use sidecore_memory::{
    DirtyLog, GuestAddress, RegionHint, RegionSpec, UserAddress, Words, reaper::wait_until_reaped,
};
use sidecore_virtio::blk::Log;

use super::*;

const PAGE: usize = 4096;
/// Where the driver's memory begins, in the guest's addresses.
const BASE: u64 = 0x1_0000_0000;
/// The log's bytes before the bits of that memory.
const LEAD_BYTES: u64 = BASE / 4096 / 8;
const LOG_BYTES: u64 = LEAD_BYTES + 1024;

/// The VMM's end of a log.
struct Vmm {
    file: OwnedFd,
    bits: Words<AtomicU8>,
}

impl Vmm {
    fn new() -> Self {
        let file = memfd_create("log", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, LOG_BYTES).unwrap();
        let memory = GuestMemory::map(vec![RegionSpec {
            guest_address: GuestAddress(0),
            user_address: UserAddress(0),
            len_bytes: LOG_BYTES,
            file: file.try_clone().unwrap(),
            file_offset_bytes: 0,
        }]);
        let bits = Words::new(&memory.unwrap(), UserAddress(0), LOG_BYTES as usize, 1).unwrap();
        Self { file, bits }
    }

    fn pages(&self) -> DirtyLog {
        DirtyLog::map(self.file.try_clone().unwrap(), 0, LOG_BYTES).unwrap()
    }

    fn log(&self) -> QueueLog {
        QueueLog { pages: self.pages(), event: None }
    }

    /// Clears the log; returns the pages that were in it, counted from [`BASE`].
    fn sync(&self) -> Vec<usize> {
        let (before, after) = self.bits.words().split_at(LEAD_BYTES as usize);
        assert!(before.iter().all(|bits| bits.load(Ordering::Relaxed) == 0), "other memory");
        let mut pages = Vec::new();
        for (index, bits) in after.iter().enumerate() {
            let marks = bits.swap(0, Ordering::SeqCst);
            pages.extend((0..8).filter(|bit| marks >> bit & 1 == 1).map(|bit| index * 8 + bit));
        }
        pages
    }
}

fn copy_page(memory: &GuestMemory, page: usize, to: &mut [u8]) {
    let address = GuestAddress(BASE + (page * PAGE) as u64);
    let to = &mut to[page * PAGE..][..PAGE];
    memory.read_slice(address, to, &mut RegionHint::default()).unwrap();
}

fn copy_of(memory: &GuestMemory) -> Vec<u8> {
    let mut copy = vec![0; memory.len_bytes() as usize];
    (0..copy.len() / PAGE).for_each(|page| copy_page(memory, page, &mut copy));
    copy
}

fn changed(before: &[u8], after: &[u8]) -> Vec<usize> {
    let pages = before.chunks(PAGE).zip(after.chunks(PAGE)).enumerate();
    pages.filter(|(_, (before, after))| before != after).map(|(page, _)| page).collect()
}

/// The next number of a sequence that looks random (xorshift).
fn next(seed: &mut u64) -> u64 {
    *seed ^= *seed << 13;
    *seed ^= *seed >> 7;
    *seed ^= *seed << 17;
    *seed
}

impl Pair {
    /// Submits a request of any kind, with new data in the store's or in the slot's blocks, and
    /// returns whether the device has data to write for it.
    fn submit_any(&mut self, slot: Slot, seed: &mut u64) -> bool {
        let random = next(seed);
        let sector = Sector(random % 64 * 8);
        let len_bytes = (1 + random as u32 / 64 % 16) * 512;
        match random % 7 {
            0 | 1 => {
                self.driver.write_data(slot, 0, &[random as u8; 8192]);
                self.driver.submit_write(slot, sector, len_bytes).unwrap();
            }
            2 => self.driver.submit_flush(slot).unwrap(),
            3 => self.driver.submit_chain(slot, 99, Sector(0), &[]).unwrap(),
            4 => {
                self.driver.submit_get_id(slot).unwrap();
                return true;
            }
            _ => {
                self.driver.submit_read(slot, sector, len_bytes).unwrap();
                return true;
            }
        }
        false
    }
}

fn options_of_logs() -> impl Iterator<Item = ClientOptions> {
    every_option().map(|options| ClientOptions { slots: 6, slot_bytes: 8192, ..options })
}

#[test]
fn each_page_that_the_device_changes_is_in_the_log() {
    for options in options_of_logs() {
        let vmm = Vmm::new();
        let mut pair = Pair::with_log(&options, Some(vmm.log()));
        let slots: Vec<Slot> = std::iter::from_fn(|| pair.driver.take_slot()).collect();
        let seed = &mut 0x5eed;
        let mut before = copy_of(&pair.memory);
        vmm.sync();
        for round in 0..60 {
            let count = 1 + next(seed) as usize % slots.len();
            let mut has_data = false;
            for slot in &slots[..count] {
                has_data |= pair.submit_any(*slot, seed);
            }
            pair.driver.publish().unwrap();
            before.copy_from_slice(&copy_of(&pair.memory));
            // Sleeping and waking changes the device's wish to be notified.
            pair.device.arm();
            pair.device.disarm();
            pair.poll_device();
            pair.poll_device();
            let after = copy_of(&pair.memory);
            let marked = vmm.sync();
            for page in changed(&before, &after) {
                assert!(marked.contains(&page), "page {page}, round {round} of {options:?}");
            }
            // Status bytes and the ring, and nothing else, if there are no data.
            assert!(has_data || marked.len() <= count + 4, "{marked:?}, {options:?}");
            let mut completions = Vec::new();
            pair.driver.poll_completions(&mut completions).unwrap();
            assert_eq!(completions.len(), count, "{options:?}");
        }
    }
}

/// A VMM that migrates: it syncs the log and copies pages all the time, the driver's own changes
/// among them, as KVM reports them.
#[test]
fn a_copy_that_follows_the_log_is_the_memory_in_the_end() {
    for options in options_of_logs().step_by(3) {
        let (devices, drivers) = (Vmm::new(), Vmm::new());
        let mut pair = Pair::with_log(&options, Some(devices.log()));
        let slots: Vec<Slot> = std::iter::from_fn(|| pair.driver.take_slot()).collect();
        let driver_log = drivers.pages();
        let memory = pair.memory.clone();
        let mut copy = copy_of(&memory);
        let stopped = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let migration = scope.spawn(|| {
                loop {
                    // The last pass begins when the device has stopped.
                    let is_last = stopped.load(Ordering::Acquire);
                    for page in devices.sync().into_iter().chain(drivers.sync()) {
                        copy_page(&memory, page, &mut copy);
                    }
                    if is_last {
                        return;
                    }
                }
            });
            let seed = &mut 0x5eed;
            for _ in 0..150 {
                let before = copy_of(&pair.memory);
                for slot in &slots {
                    pair.submit_any(*slot, seed);
                }
                pair.driver.publish().unwrap();
                for page in changed(&before, &copy_of(&pair.memory)) {
                    driver_log.mark(GuestAddress(BASE + (page * PAGE) as u64), 1);
                }
                pair.poll_device();
                pair.poll_device();
                let before = copy_of(&pair.memory);
                let mut completions = Vec::new();
                pair.driver.poll_completions(&mut completions).unwrap();
                assert_eq!(completions.len(), slots.len(), "{options:?}");
                for page in changed(&before, &copy_of(&pair.memory)) {
                    driver_log.mark(GuestAddress(BASE + (page * PAGE) as u64), 1);
                }
            }
            stopped.store(true, Ordering::Release);
            migration.join().unwrap();
        });
        let missed = changed(&copy, &copy_of(&pair.memory));
        assert!(missed.is_empty(), "pages {missed:?}, {options:?}");
    }
}

#[test]
fn a_request_in_flight_is_in_the_log_that_is_there_when_it_completes() {
    // The store continues so large a request in another poll.
    let options = ClientOptions { slots: 1, slot_bytes: 1 << 20, ..ClientOptions::default() };
    let (old, new) = (Vmm::new(), Vmm::new());
    let mut pair = Pair::with_log(&options, Some(old.log()));
    let slot = pair.driver.take_slot().unwrap();
    pair.driver.submit_read(slot, Sector(0), 1 << 20).unwrap();
    pair.driver.publish().unwrap();
    pair.poll_device();
    let swapped = pair.device.set_log(Some(Log::new(new.log(), EventFd::peer_signal).unwrap()));
    drop(swapped);
    old.sync();
    pair.all(1);
    let data = (pair.driver.data_address(slot) - BASE) as usize / PAGE;
    let marked = new.sync();
    for page in data..data + 256 {
        assert!(marked.contains(&page), "page {page} of {marked:?}");
    }
    assert!(old.sync().is_empty(), "the old log is not in use");
    // Without a log no page is marked.
    pair.device.set_log(None);
    pair.driver.submit_read(slot, Sector(0), 4096).unwrap();
    pair.all(1);
    assert!(old.sync().is_empty() && new.sync().is_empty());
}

#[test]
fn the_vmm_is_notified_if_it_wants_that() {
    use std::os::fd::AsFd;
    let (vmm, event) = (Vmm::new(), EventFd::new().unwrap());
    let theirs = Some(event.as_fd().try_clone_to_owned().unwrap());
    let log = QueueLog { pages: vmm.pages(), event: theirs };
    let mut pair = Pair::with_log(&ClientOptions::default(), Some(log));
    let slot = pair.driver.take_slot().unwrap();
    event.drain();
    pair.driver.submit_flush(slot).unwrap();
    pair.one();
    assert_ne!(event.drain(), 0);
    assert!(!vmm.sync().is_empty());
}

#[test]
fn a_truncated_log_breaks_its_device() {
    let vmm = Vmm::new();
    let mut pair = Pair::with_log(&ClientOptions::default(), Some(vmm.log()));
    let slot = pair.driver.take_slot().unwrap();
    pair.driver.submit_flush(slot).unwrap();
    pair.one();
    ftruncate(&vmm.file, 0).unwrap();
    pair.driver.submit_flush(slot).unwrap();
    pair.driver.publish().unwrap();
    // The queue sees the loss at its next request.
    pair.poll_device();
    let _ = pair.driver.submit_flush(slot);
    let _ = pair.driver.publish();
    pair.poll_device();
    let reason = pair.disk.broken().unwrap();
    assert!(reason.contains("the log of written pages was truncated"), "{reason}");
    drop(pair);
    wait_until_reaped();
}
