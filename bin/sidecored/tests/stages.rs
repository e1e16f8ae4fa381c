//! Stages come and go while guests use their disks.

mod common;

use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{Scope, ScopedJoinHandle};
use std::time::{Duration, Instant};

use common::Daemon;
use rustix::process::Signal;
use sidecore_control::report::{DeviceReport, DeviceState, StageChange};
use sidecore_control::{Client, ClientError, NewStage};
use sidecore_driver::{
    BlkClient, BlkQueue, ClientOptions, Notify, NvmeClient, NvmeOptions, NvmeQueue, Queue, Status,
};
use sidecore_kit::guest::{self, complete};
use sidecore_kit::wait;
use sidecore_units::Sector;

const DISK_BYTES: u64 = 4 << 20;
const PAGES: u64 = DISK_BYTES / 4096;
const CHANGES: usize = 100;
/// Requests that a queue holds at once.
const SLOTS: u16 = 8;
const PATIENCE: Duration = Duration::from_secs(60);

/// A disk of each kind of store and front end that shares queues between two sidecores.
const CONFIG: &str = r#"
control_socket = "control.sock"
[[sidecore]]
name = "sc0"
[[sidecore]]
name = "sc1"
[[store]]
name = "mem"
type = "ram"
size = "4MiB"
[[store]]
name = "file"
type = "file"
path = "disk.img"
[[store]]
name = "slow"
type = "store"
store = "mem"
[[store.stage]]
type = "delay"
delay_us = 1
[[device]]
name = "blk"
store = "file"
socket = "blk.sock"
queues = 2
sidecores = ["sc0", "sc1"]
[[device]]
name = "fn"
front_end = "nvme"
store = "slow"
socket = "fn.sock"
queues = 2
sidecores = ["sc0", "sc1"]
"#;

fn start() -> Daemon {
    // In memory: the test is not about a disk's latencies.
    let directory = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
    let disk = std::fs::File::create(directory.path().join("disk.img")).unwrap();
    disk.set_len(DISK_BYTES).unwrap();
    Daemon::start(directory, CONFIG)
}

fn delay(delay_us: u64) -> NewStage {
    NewStage::new("delay").with("delay_us", delay_us)
}

/// All requests that touch the first sector fail.
fn bad_sector() -> NewStage {
    NewStage::new("fault").with("ranges", serde_json::json!([[0, 0]]))
}

fn blk(directory: &Path) -> BlkClient {
    let (slots, notify) = (SLOTS, Notify::Interrupt);
    let options =
        ClientOptions { queues: 2, slots, notify, huge_pages: false, ..ClientOptions::default() };
    BlkClient::connect(directory.join("blk.sock"), &options).unwrap()
}

fn nvme(directory: &Path) -> NvmeClient {
    let (slots, notify) = (SLOTS, Notify::Interrupt);
    let options =
        NvmeOptions { queues: 2, slots, notify, huge_pages: false, ..NvmeOptions::default() };
    NvmeClient::connect(directory.join("fn.sock"), &options).unwrap()
}

fn words(stages: &sidecore_control::report::StagesReport) -> Vec<(usize, &str, bool)> {
    let stages = stages.stages.iter();
    stages.map(|stage| (stage.position, stage.word.as_str(), stage.is_live)).collect()
}

fn said<T: std::fmt::Debug>(result: Result<T, ClientError>) -> (u16, String) {
    match result {
        Err(ClientError::Denied { status, why }) => (status, why),
        other => panic!("{other:?}"),
    }
}

/// The load of a guest.
struct Load {
    /// Set after a failure, too: the guest's threads end with the test.
    ends: AtomicBool,
    /// The requests that each queue has completed.
    done: Vec<AtomicU64>,
}

impl Load {
    fn new(queues: usize) -> Self {
        let done = (0..queues).map(|_| AtomicU64::new(0)).collect();
        Self { ends: AtomicBool::new(false), done }
    }

    /// Waits until each queue has completed more requests.
    fn goes_on(&self) {
        let count = |done: &AtomicU64| done.load(Ordering::Relaxed);
        let before: Vec<u64> = self.done.iter().map(count).collect();
        wait::until("each queue goes on", PATIENCE, || {
            self.done.iter().zip(&before).all(|(done, before)| count(done) >= before + 8)
        });
    }

    /// Writes pages and reads them, in no order, until the load ends; each page is used by one
    /// request at a time, so that its bytes are known. Ends with a read of all pages.
    fn run<Q: Queue>(&self, index: usize, queue: &mut Q, pages: Range<u64>) {
        let mut guest = Guest::new(pages);
        let mut completions = Vec::with_capacity(64);
        while !self.ends.load(Ordering::Relaxed) || guest.in_flight > 0 {
            if !self.ends.load(Ordering::Relaxed) {
                guest.submit(queue);
            }
            let count = guest.complete(queue, &mut completions);
            self.done[index].fetch_add(count, Ordering::Relaxed);
        }
        for page in 0..guest.held.len() {
            guest.read(queue, page);
            while guest.in_flight > 0 {
                guest.complete(queue, &mut completions);
            }
        }
    }

    fn spawn<'s, 'e, Q: Queue + Send + 's>(
        &'e self,
        scope: &'s Scope<'s, 'e>,
        index: usize,
        mut queue: Q,
    ) -> ScopedJoinHandle<'s, ()> {
        let half = PAGES / 2;
        let first = index as u64 * half;
        scope.spawn(move || self.run(index, &mut queue, first..first + half))
    }
}

/// The pages of one queue, and what they hold.
struct Guest {
    first: u64,
    /// A page is full of one word.
    held: Vec<u64>,
    is_used: Vec<bool>,
    /// By the slots' numbers: the page of each request, and the word that a write writes.
    requests: Vec<(usize, Option<u64>)>,
    in_flight: usize,
    random: u64,
}

impl Guest {
    fn new(pages: Range<u64>) -> Self {
        let count = (pages.end - pages.start) as usize;
        Self {
            first: pages.start,
            held: vec![0; count],
            is_used: vec![false; count],
            requests: vec![(0, None); 64],
            in_flight: 0,
            random: pages.start + 1,
        }
    }

    fn random(&mut self) -> u64 {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        self.random >> 33
    }

    fn submit<Q: Queue>(&mut self, queue: &mut Q) {
        for _ in 0..8 {
            let page = (self.random() % self.held.len() as u64) as usize;
            if self.is_used[page] {
                continue;
            }
            if self.random().is_multiple_of(2) {
                self.read(queue, page);
                continue;
            }
            let Some(slot) = queue.take_slot() else { break };
            let word = self.random() << 8 | 1;
            queue.write_data(slot, 0, &word.to_le_bytes().repeat(512));
            queue.submit_write(slot, self.sector(page), 4096).unwrap();
            self.begin(slot.index(), page, Some(word));
        }
        queue.publish().unwrap();
    }

    fn read<Q: Queue>(&mut self, queue: &mut Q, page: usize) {
        let Some(slot) = queue.take_slot() else { return };
        queue.submit_read(slot, self.sector(page), 4096).unwrap();
        queue.publish().unwrap();
        self.begin(slot.index(), page, None);
    }

    fn sector(&self, page: usize) -> Sector {
        Sector((self.first + page as u64) * 8)
    }

    fn begin(&mut self, slot: usize, page: usize, word: Option<u64>) {
        self.requests[slot] = (page, word);
        self.is_used[page] = true;
        self.in_flight += 1;
    }

    fn complete<Q: Queue>(&mut self, queue: &mut Q, completions: &mut Vec<Q::Completion>) -> u64 {
        let mut count = queue.poll_completions(completions).unwrap();
        if count == 0 && self.in_flight > 0 {
            assert!(queue.wait(PATIENCE).unwrap(), "no request completes");
            count = queue.poll_completions(completions).unwrap();
        }
        for completion in completions.drain(..) {
            let (slot, is_ok) = Q::outcome(completion);
            assert!(is_ok, "{completion:?}");
            let (page, word) = self.requests[slot.index()];
            match word {
                Some(word) => self.held[page] = word,
                None => assert_eq!(queue.sum_data(slot), self.held[page] * 512, "page {page}"),
            }
            self.is_used[page] = false;
            self.in_flight -= 1;
            queue.release_slot(slot);
        }
        count as u64
    }
}

/// Ends a load.
struct End<'a>(&'a Load);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.ends.store(true, Ordering::Relaxed);
    }
}

/// Adds a stage and removes it, so many times in all. Returns the pauses, in their order.
fn change(client: &Client, device: &str, load: &Load) -> Vec<u64> {
    // Bad sectors behind the end of the disk.
    let end = DISK_BYTES / 512;
    let harmless = NewStage::new("fault").with("ranges", serde_json::json!([[end, end + 7]]));
    let mut pauses = Vec::new();
    for turn in 0..CHANGES / 2 {
        let stage = if turn % 2 == 0 { delay(20) } else { harmless.clone() };
        // On the sidecores, or on threads of its own.
        let stage = stage.with("threads", turn % 3);
        let added = client.add_stage(device, &stage).unwrap();
        assert_eq!((added.position, added.queues), (1, 2), "{added:?}");
        load.goes_on();
        let removed = client.remove_stage(device, "1").unwrap();
        assert_eq!((removed.word.as_str(), removed.queues), (added.word.as_str(), 2));
        load.goes_on();
        pauses.extend([added.pause_ns, removed.pause_ns]);
    }
    pauses.sort_unstable();
    pauses
}

/// Has stages come and go while a guest uses both queues of a device.
fn come_and_go<Q: Queue + Send>(client: &Client, device: &str, queues: [Q; 2]) {
    let load = Load::new(2);
    let pauses = std::thread::scope(|scope| {
        let _end = End(&load);
        for (index, queue) in queues.into_iter().enumerate() {
            load.spawn(scope, index, queue);
        }
        change(client, device, &load)
    });
    let us = |index: usize| pauses[index] / 1_000;
    let (median, longest) = (us(pauses.len() / 2), us(pauses.len() - 1));
    println!("{device}: {} pauses, median {median} us, longest {longest} us", pauses.len());
}

#[test]
fn a_stage_comes_and_goes_a_hundred_times_under_load_and_no_byte_is_wrong() {
    let mut daemon = start();
    let (mut blk, mut nvme) = (blk(daemon.directory.path()), nvme(daemon.directory.path()));
    let client = daemon.client();
    let queues: [BlkQueue; 2] = [0, 1].map(|index| blk.take_queue(index).unwrap());
    come_and_go(&client, "blk", queues);
    let queues: [NvmeQueue; 2] = [0, 1].map(|index| nvme.take_queue(index).unwrap());
    come_and_go(&client, "fn", queues);
    assert_eq!(words(&client.stages("blk").unwrap()), []);
    assert_eq!(words(&client.stages("fn").unwrap()), [(1, "delay", false)]);
    drop((blk, nvme));
    daemon.signal(Signal::TERM);
    let (status, log) = daemon.wait();
    assert_eq!(status.code(), Some(0), "{log}");
}

/// The time of one read.
fn time<Q: Queue>(queue: &mut Q) -> (Duration, bool) {
    let begun = Instant::now();
    let slot = queue.take_slot().unwrap();
    queue.submit_read(slot, Sector(0), 4096).unwrap();
    let (slot, is_ok) = Q::outcome(complete(queue));
    queue.release_slot(slot);
    (begun.elapsed(), is_ok)
}

/// Stages are in the way of requests while they are in the list, and in its order.
fn stages_act<Q: Queue>(client: &Client, device: &str, queue: &mut Q, configured: &[&str]) {
    // A request is held for 200 ms of the sidecore's clock, which it may have read before the test
    // has read its own, and then lost its core.
    const DELAY: Duration = Duration::from_millis(100);
    let list = |added: &[&str]| {
        let stages = client.stages(device).unwrap();
        let expected: Vec<_> = added.iter().map(|word| (*word, true)).collect();
        let expected = expected.into_iter().chain(configured.iter().map(|word| (*word, false)));
        let expected: Vec<_> =
            (1..).zip(expected).map(|(position, (word, live))| (position, word, live)).collect();
        assert_eq!(words(&stages), expected);
        let listed = client.devices().unwrap().into_iter().find(|report| report.name == device);
        assert_eq!(listed.unwrap().stages, [added, configured].concat());
    };
    assert!(time(queue).1);
    client.add_stage(device, &delay(200_000)).unwrap();
    list(&["delay"]);
    let (took, is_ok) = time(queue);
    assert!(is_ok && took >= DELAY, "{took:?}");
    // Behind the delay: its errors are late.
    let added = client.add_stage(device, &bad_sector().with("position", 2)).unwrap();
    assert_eq!((added.word.as_str(), added.position), ("fault", 2));
    list(&["delay", "fault"]);
    let (took, is_ok) = time(queue);
    assert!(!is_ok && took >= DELAY, "{took:?}");
    let StageChange { word, position, .. } = client.remove_stage(device, "2").unwrap();
    assert_eq!((word.as_str(), position), ("fault", 2));
    let (took, is_ok) = time(queue);
    assert!(is_ok && took >= DELAY, "{took:?}");
    // In front of it: a request that fails is not delayed, which a later one shows.
    client.add_stage(device, &bad_sector()).unwrap();
    list(&["fault", "delay"]);
    assert!(!time(queue).1);
    let stages = client.stages(device).unwrap();
    assert_eq!(stages.stages[0].settings, ["ranges=[[0,0]]"]);
    client.remove_stage(device, "fault").unwrap();
    client.remove_stage(device, "delay").unwrap();
    list(&[]);
    assert!(time(queue).1);
}

#[test]
fn stages_act_from_their_addition_to_their_removal() {
    let daemon = start();
    let (mut blk, mut nvme) = (blk(daemon.directory.path()), nvme(daemon.directory.path()));
    let client = daemon.client();
    stages_act(&client, "blk", blk.queue(1).unwrap(), &[]);
    stages_act(&client, "fn", nvme.queue(0).unwrap(), &["delay"]);
    // Without a guest, the next one meets the stage.
    drop(blk);
    wait::until("the guest is gone", PATIENCE, || client.devices().unwrap()[0].queues_running == 0);
    let added = client.add_stage("blk", &bad_sector()).unwrap();
    assert_eq!((added.queues, added.pause_ns), (0, 0));
    let mut blk = guest::connect(&daemon.directory.path().join("blk.sock"));
    assert_eq!(guest::write(&mut blk, 0, 1), Status::IoError);
    assert_eq!(guest::write(&mut blk, 8, 1), Status::Ok);
}

fn device(client: &Client, name: &str) -> DeviceReport {
    client.devices().unwrap().into_iter().find(|device| device.name == name).unwrap()
}

/// The metric of a stage that has failed.
fn has_failed(client: &Client, device: &str) -> bool {
    let name = format!("sidecore_stage_failed{{device=\"{device}\",position=\"1\",");
    client
        .metrics(false)
        .unwrap()
        .lines()
        .any(|line| line.starts_with(&name) && line.ends_with(" 1"))
}

/// A stage that panics fails its device, and not the one beside it on the same sidecores, until it
/// is removed.
fn panics<Q: Queue, R: Queue>(
    client: &Client,
    (name, queue): (&str, &mut Q),
    beside: &mut R,
    threads: usize,
) {
    let stage = NewStage::new("fault").with("panic_every", 2).with("threads", threads);
    client.add_stage(name, &stage).unwrap();
    assert!(time(queue).1, "the first of two");
    for _ in 0..3 {
        assert!(!time(queue).1);
        assert!(time(beside).1);
    }
    let report = device(client, name);
    let reason = format!(
        "all requests fail: stage \"fault\" has failed, it has panicked: planned by \
         `panic_every`; remove it with `sidecore stage remove {name} 1`"
    );
    assert_eq!((report.state, report.reason), (DeviceState::Broken, Some(reason)));
    let failure = client.stages(name).unwrap().stages[0].failure.clone().unwrap();
    assert_eq!(failure, "it has panicked: planned by `panic_every`");
    assert!(has_failed(client, name));
    assert!(client.stats().unwrap().stages.iter().any(|stage| stage.has_failed));
    client.remove_stage(name, "fault").unwrap();
    assert!(time(queue).1 && time(beside).1);
    let report = device(client, name);
    assert_eq!((report.state, report.reason), (DeviceState::Running, None));
    assert!(!has_failed(client, name));
}

#[test]
fn a_stage_that_panics_fails_its_device_alone() {
    let mut daemon = start();
    let (mut blk, mut nvme) = (blk(daemon.directory.path()), nvme(daemon.directory.path()));
    let client = daemon.client();
    for index in 0..2 {
        let (blk, nvme) = (blk.queue(index).unwrap(), nvme.queue(index).unwrap());
        for threads in 0..2 {
            panics(&client, ("blk", blk), nvme, threads);
            panics(&client, ("fn", nvme), blk, threads);
        }
    }
    // Another queue of the device fails, too, and the device stops all the same.
    client.add_stage("blk", &NewStage::new("fault").with("panic_every", 1)).unwrap();
    assert!(!time(blk.queue(0).unwrap()).1 && !time(blk.queue(1).unwrap()).1);
    drop((blk, nvme));
    daemon.signal(Signal::TERM);
    let (status, log) = daemon.wait();
    assert_eq!(status.code(), Some(0), "{log}");
    assert!(log.contains("a stage has failed"), "{log}");
}

#[test]
fn a_stage_that_takes_long_is_named_with_its_cost() {
    let mut daemon = start();
    let mut blk = blk(daemon.directory.path());
    let client = daemon.client();
    client.add_stage("blk", &delay(1)).unwrap();
    let stall = NewStage::new("fault").with("stall_every", 1).with("position", 2);
    client.add_stage("blk", &stall).unwrap();
    for index in [0, 1, 1] {
        assert!(time(blk.queue(index).unwrap()).1);
    }
    let stages = client.stats().unwrap().stages;
    let of = |word: &str| {
        stages.iter().find(|stage| stage.device == "blk" && stage.word == word).unwrap()
    };
    let (fault, delay) = (of("fault"), of("delay"));
    assert!(!fault.has_failed && fault.position == 2, "{fault:?}");
    assert_eq!((fault.counts.requests, fault.counts.long_turns), (3, 3), "{fault:?}");
    assert!(fault.longest_turn_ns >= 2_000_000 && fault.counts.busy_ns >= 6_000_000, "{fault:?}");
    assert_eq!(delay.counts.requests, 3);
    // Another thread may have taken its core; three times is something else.
    assert!(delay.counts.long_turns < 3, "{delay:?}");
    let metrics = client.metrics(false).unwrap();
    let name = "sidecore_stage_long_turns_total{device=\"blk\",position=\"2\",stage=\"fault\"} 3";
    assert!(metrics.lines().any(|line| line == name), "{metrics}");
    drop(blk);
    daemon.signal(Signal::TERM);
    let (status, log) = daemon.wait();
    assert_eq!(status.code(), Some(0), "{log}");
    assert!(log.contains("a stage has taken over a millisecond of a turn"), "{log}");
}

#[test]
fn a_stage_on_threads_of_its_own_is_shown_with_them() {
    let mut daemon = start();
    let mut blk = blk(daemon.directory.path());
    let client = daemon.client();
    let stall = NewStage::new("fault").with("stall_every", 1).with("threads", 2);
    client.add_stage("blk", &stall).unwrap();
    for index in [0, 1, 1] {
        assert!(time(blk.queue(index).unwrap()).1);
    }
    let listed = client.stages("blk").unwrap();
    assert_eq!((listed.stages[0].threads, listed.stages[0].settings.len()), (2, 2), "{listed:?}");
    let stages = client.stats().unwrap().stages;
    let fault = stages.iter().find(|stage| stage.device == "blk").unwrap();
    assert_eq!((fault.counts.requests, fault.counts.long_turns), (3, 0), "{fault:?}");
    assert!(fault.counts.busy_ns >= 6_000_000, "{fault:?}");
    assert!(fault.threads == 2 && fault.threads_ran_ns > 0, "{fault:?}");
    let metrics = client.metrics(false).unwrap();
    let name = "sidecore_stage_threads{device=\"blk\",position=\"1\",stage=\"fault\"} 2";
    assert!(metrics.lines().any(|line| line == name), "{metrics}");
    assert_eq!(device(&client, "blk").warnings, [""; 0]);
    drop(blk);
    daemon.signal(Signal::TERM);
    let (status, log) = daemon.wait();
    assert_eq!(status.code(), Some(0), "{log}");
    assert!(!log.contains("over a millisecond of a turn"), "no disk has waited: {log}");
}

/// A guest goes while a thread has its requests: the device waits for them, and serves the next.
#[test]
fn a_device_stops_when_its_stages_threads_have_sent_all_requests_back() {
    let mut daemon = start();
    let client = daemon.client();
    client.add_stage("blk", &delay(300_000).with("threads", 2)).unwrap();
    for _ in 0..2 {
        let mut blk = blk(daemon.directory.path());
        let mut queues = [0, 1].map(|index| blk.take_queue(index).unwrap());
        for queue in &mut queues {
            for page in 0..u64::from(SLOTS) {
                let slot = queue.take_slot().unwrap();
                queue.submit_write(slot, Sector(page * 8), 4096).unwrap();
            }
            queue.publish().unwrap();
        }
        let is_taken = || {
            let stages = client.stats().unwrap().stages;
            stages.iter().any(|stage| stage.device == "blk" && stage.counts.requests > 0)
        };
        wait::until("the stage has the requests", PATIENCE, is_taken);
        drop((queues, blk));
        wait::until("the queues stop", PATIENCE, || device(&client, "blk").queues_running == 0);
    }
    let mut blk = guest::connect(&daemon.directory.path().join("blk.sock"));
    assert_eq!(guest::write(&mut blk, 0, 1), Status::Ok);
    drop(blk);
    daemon.signal(Signal::TERM);
    let (status, log) = daemon.wait();
    assert_eq!(status.code(), Some(0), "{log}");
}

#[test]
fn a_refused_change_has_a_reason_and_changes_nothing() {
    let daemon = start();
    let client = daemon.client();
    let mut blk = guest::connect(&daemon.directory.path().join("blk.sock"));
    client.add_stage("blk", &delay(1)).unwrap();
    let read_only = NewStage::new("read-only");
    let encrypt = NewStage::new("encrypt").with("header", "/no/header").with("key_file", "/no/key");
    for (status, wanted, stage) in [
        (400, "type = \"tape\" is not one of", NewStage::new("tape")),
        (400, "`delay_us` is missing", NewStage::new("delay")),
        (400, "position 3 is none of 1 to 2", delay(1).with("position", 3)),
        (400, "position 0 is none of 1 to 2", delay(1).with("position", 0)),
        (400, "stage \"encrypt\" changes the bytes", encrypt),
        (409, "would change the write protection", read_only),
    ] {
        let (code, why) = said(client.add_stage("blk", &stage));
        assert!(code == status && why.contains(wanted), "{wanted}: {code} {why}");
    }
    let gone = said(client.add_stage("none", &delay(1)));
    assert_eq!(gone, (404, "there is no device \"none\"".to_owned()));
    for (status, wanted, device, stage) in [
        (404, "does not exist", "blk", "fault"),
        (404, "does not exist", "blk", "0"),
        (404, "does not exist", "blk", "2"),
        (409, "belongs to its store", "fn", "delay"),
        (409, "belongs to its store", "fn", "1"),
        (404, "there is no device", "none", "1"),
    ] {
        let (code, why) = said(client.remove_stage(device, stage));
        assert!(code == status && why.contains(wanted), "{wanted}: {code} {why}");
    }
    assert_eq!(words(&client.stages("blk").unwrap()), [(1, "delay", true)]);
    (1..8).for_each(|_| drop(client.add_stage("blk", &delay(1)).unwrap()));
    let (code, why) = said(client.add_stage("blk", &delay(1)));
    assert!(code == 409 && why.contains("has 8 added stages already"), "{code} {why}");
    let (code, why) = said(client.remove_stage("blk", "delay"));
    assert!(code == 409 && why.contains("is there several times"), "{code} {why}");
    assert_eq!(guest::write(&mut blk, 8, 1), Status::Ok);
    assert_eq!(guest::read(&mut blk, 8), 1);
}

#[test]
fn requests_that_do_not_end_keep_the_stages_as_they_are() {
    let daemon = start();
    let client = daemon.client();
    let mut blk = guest::connect(&daemon.directory.path().join("blk.sock"));
    client.add_stage("blk", &delay(60_000_000)).unwrap();
    guest::submit_write(&mut blk, 8, 1);
    wait::until("the request is in flight", PATIENCE, || {
        client.stats().unwrap().devices[0].queues.iter().any(|queue| queue.batches > 0)
    });
    let (code, why) = said(client.remove_stage("blk", "delay"));
    assert!(code == 500 && why.contains("have not ended within 5 seconds"), "{code} {why}");
    assert_eq!(words(&client.stages("blk").unwrap()), [(1, "delay", true)]);
    // The queue takes requests again: this one has no need of the store.
    let queue = blk.queue(0).unwrap();
    let slot = queue.take_slot().unwrap();
    queue.submit_get_id(slot).unwrap();
    assert_eq!(complete(queue).status, Status::Ok);
}
