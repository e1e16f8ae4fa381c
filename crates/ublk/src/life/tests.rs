use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::io;

use super::*;

const NUMBER: u32 = 7;
const NAME: &str = "d";
const NO_FILE: i32 = 2;
const INVALID: i32 = 22;
const CANCELED: i32 = 125;

/// When the kernel notices that the process of a device has ended.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kernel {
    /// Until Linux 6.15: as soon as its rings are gone.
    Early,
    /// From Linux 6.16 on: when its files are closed.
    Late,
}

/// How a process is killed at a command.
#[derive(Clone, Copy, Debug)]
enum Kill {
    /// Before the kernel has begun the command.
    Before,
    /// While the kernel carries the command out, which ends after so many moments.
    Within(u32),
    /// When the command has ended.
    After,
}

#[derive(Clone, Copy, Debug)]
enum Command {
    Add(UblkInfo),
    SetParameters,
    Fetch,
    Start,
    Flush,
    Stop,
    Close,
    Delete,
    BeginRecovery,
    EndRecovery,
}

struct Device {
    serial: u32,
    info: UblkInfo,
    open_by: Option<i32>,
    has_fetched: bool,
    is_deleted: bool,
    has_cached_writes: bool,
}

/// A command of a killed process, with the moments that it takes. The kernel looks up its device
/// when the command begins.
struct InFlight {
    left: u32,
    pid: i32,
    command: Command,
    serial: Option<u32>,
}

/// The kernel, with processes that end a while after they were killed.
struct World {
    kernel: Kernel,
    devices: BTreeMap<u32, Device>,
    serial: u32,
    /// Commands of killed processes.
    in_flight: Vec<InFlight>,
    /// Killed processes, with the moments until their files are closed.
    dying: Vec<(u32, i32)>,
    /// A device was stopped that had cached writes.
    has_lost: bool,
}

impl World {
    fn new(kernel: Kernel) -> RefCell<Self> {
        RefCell::new(Self {
            kernel,
            devices: BTreeMap::new(),
            serial: 0,
            in_flight: Vec::new(),
            dying: Vec::new(),
            has_lost: false,
        })
    }

    fn state(&self) -> Option<UblkState> {
        self.devices.get(&NUMBER).map(|device| device.info.state())
    }

    fn set(&mut self, state: UblkState) {
        let device = self.devices.get_mut(&NUMBER).unwrap();
        device.info = device.info.in_state(state);
    }

    /// A moment passes.
    fn pass(&mut self) {
        for in_flight in std::mem::take(&mut self.in_flight) {
            match in_flight.left.checked_sub(1) {
                Some(left) => self.in_flight.push(InFlight { left, ..in_flight }),
                // The process does not learn the result.
                None if in_flight.serial == self.serial_now() => {
                    let _ = self.execute(in_flight.pid, in_flight.command);
                }
                None => {}
            }
        }
        for (left, pid) in std::mem::take(&mut self.dying) {
            match left.checked_sub(1) {
                Some(left) => self.dying.push((left, pid)),
                None => self.close(pid),
            }
        }
        self.release();
    }

    fn serial_now(&self) -> Option<u32> {
        self.devices.get(&NUMBER).map(|device| device.serial)
    }

    /// Frees the number of a deleted device that nothing holds any longer.
    fn release(&mut self) {
        let Some(device) = self.devices.get(&NUMBER) else { return };
        let is_held = self.in_flight.iter().any(|it| it.serial == Some(device.serial));
        if device.is_deleted && device.open_by.is_none() && !is_held {
            self.devices.remove(&NUMBER);
        }
    }

    /// Waits for the device's mutex, which a removal holds. A look at the device takes no mutex.
    fn lock(&mut self) {
        let removes = |it: &InFlight| matches!(it.command, Command::Stop | Command::Delete);
        while self.in_flight.iter().any(|it| removes(it) && it.serial == self.serial_now()) {
            self.pass();
        }
    }

    fn settle(&mut self) {
        while !self.in_flight.is_empty() || !self.dying.is_empty() {
            self.pass();
        }
    }

    fn is_alive(&self, pid: i32) -> bool {
        self.dying.iter().any(|(_, dying)| *dying == pid)
    }

    fn kill(&mut self, pid: i32, moments: u32) {
        self.dying.push((moments, pid));
        let is_its = self.devices.get(&NUMBER).is_some_and(|device| device.open_by == Some(pid));
        if is_its && self.kernel == Kernel::Early && self.state() == Some(UblkState::Live) {
            self.set(UblkState::Quiesced);
        }
    }

    fn close(&mut self, pid: i32) {
        let Some(device) = self.devices.get_mut(&NUMBER) else { return };
        if device.open_by != Some(pid) {
            return;
        }
        device.open_by = None;
        if device.info.state() == UblkState::Live {
            self.set(UblkState::Quiesced);
        }
        self.release();
    }

    /// Carries out the part of a command that is seen while the rest takes its time.
    fn begin(&mut self, pid: i32, command: Command) {
        match (command, self.state()) {
            (Command::Stop, Some(UblkState::Live)) if self.kernel == Kernel::Early => {
                self.set(UblkState::Quiesced);
            }
            // Only requests make a removal slow.
            (Command::Stop | Command::Delete, Some(UblkState::Dead)) => {
                let _ = self.execute(pid, command);
            }
            _ => {}
        }
    }

    fn stop(&mut self) {
        let device = self.devices.get_mut(&NUMBER).unwrap();
        if device.info.state() != UblkState::Dead {
            self.has_lost |= device.has_cached_writes;
            device.info = of(-1, device.info.in_state(UblkState::Dead));
        }
    }

    fn add(&mut self, pid: i32, info: UblkInfo) {
        self.serial += 1;
        let device = Device {
            serial: self.serial,
            info: of(pid, info),
            open_by: None,
            has_fetched: false,
            is_deleted: false,
            has_cached_writes: false,
        };
        self.devices.insert(NUMBER, device);
    }

    /// Carries a command out, or returns its errno.
    fn execute(&mut self, pid: i32, command: Command) -> Result<(), i32> {
        let Some(device) = self.devices.get_mut(&NUMBER) else {
            return match command {
                Command::Add(info) => {
                    self.add(pid, info);
                    Ok(())
                }
                Command::Fetch => Err(NO_FILE),
                Command::Close | Command::Flush => Ok(()),
                _ => Err(NO_DEVICE),
            };
        };
        let state = device.info.state();
        let is_its = device.open_by == Some(pid);
        match command {
            Command::Add(_) => return Err(EXISTS),
            Command::Fetch if device.is_deleted => return Err(NO_FILE),
            Command::Fetch if device.open_by.is_some() || device.has_fetched => return Err(BUSY),
            Command::Fetch => (device.open_by, device.has_fetched) = (Some(pid), true),
            Command::Start if device.is_deleted => return Err(NO_DEVICE),
            Command::Start | Command::EndRecovery if !is_its || !device.has_fetched => {
                panic!("{command:?} waits for ever")
            }
            Command::Start if state == UblkState::Dead => {
                device.info = of(pid, device.info.in_state(UblkState::Live));
            }
            Command::Start => return Err(EXISTS),
            Command::EndRecovery if state == UblkState::Quiesced => {
                device.info = of(pid, device.info.in_state(UblkState::Live));
            }
            Command::BeginRecovery if !device.has_fetched => return Err(INVALID),
            Command::BeginRecovery if device.open_by.is_none() && state == UblkState::Quiesced => {
                device.has_fetched = false;
            }
            Command::EndRecovery | Command::BeginRecovery => return Err(BUSY),
            Command::SetParameters => {}
            Command::Flush => device.has_cached_writes = false,
            Command::Stop => self.stop(),
            Command::Close => self.close(pid),
            Command::Delete => {
                device.is_deleted = true;
                self.stop();
                self.release();
            }
        }
        Ok(())
    }
}

/// A daemon.
struct Process<'a> {
    pid: i32,
    world: &'a RefCell<World>,
    /// The commands until it is killed.
    left: Cell<u32>,
    kill: Kill,
    /// The moments that its end takes.
    end: u32,
    is_dead: Cell<bool>,
    pauses: Cell<u32>,
}

impl<'a> Process<'a> {
    fn new(world: &'a RefCell<World>, pid: i32, (left, kill, end): (u32, Kill, u32)) -> Self {
        let (is_dead, pauses) = (Cell::new(false), Cell::new(0));
        Self { pid, world, left: Cell::new(left), kill, end, is_dead, pauses }
    }

    /// A daemon that is not killed.
    fn lasting(world: &'a RefCell<World>, pid: i32) -> Self {
        Self::new(world, pid, (u32::MAX, Kill::Before, 0))
    }

    fn command(&self, command: Command) -> Result<(), i32> {
        if self.is_dead.get() {
            return Err(CANCELED);
        }
        let mut world = self.world.borrow_mut();
        world.pass();
        if !matches!(command, Command::Fetch | Command::Close | Command::Flush) {
            world.lock();
        }
        if let Some(left) = self.left.get().checked_sub(1) {
            self.left.set(left);
            return world.execute(self.pid, command);
        }
        self.is_dead.set(true);
        let mut end = self.end;
        match self.kill {
            Kill::Before => {}
            // These are calls of the process, and no commands for the kernel's threads.
            Kill::Within(_) if matches!(command, Command::Fetch | Command::Close) => {}
            Kill::After => {
                let _ = world.execute(self.pid, command);
            }
            Kill::Within(moments) => {
                world.begin(self.pid, command);
                let (pid, serial) = (self.pid, world.serial_now());
                world.in_flight.push(InFlight { left: moments, pid, command, serial });
                // The threads that carry it out keep the files of the process open.
                end += moments;
            }
        }
        world.kill(self.pid, end);
        Err(CANCELED)
    }

    fn control(&self, name: &'static str, command: Command) -> Result<(), UblkError> {
        self.command(command).map_err(|errno| failed(name, errno))
    }

    /// Makes or takes over the device, writes, and removes it.
    fn live(&self, life: &Life) {
        if life.bring_up(self, self).unwrap() != Up::Ends {
            self.world.borrow_mut().devices.get_mut(&NUMBER).unwrap().has_cached_writes = true;
        }
        let _ = self.command(Command::Flush);
        life.remove(self, || self.stop_queues());
    }
}

/// A device of this process.
fn of(server: i32, mut info: UblkInfo) -> UblkInfo {
    info.server = server;
    info
}

fn failed(command: &'static str, errno: i32) -> UblkError {
    let error = io::Error::from_raw_os_error(errno);
    UblkError::Command { command, number: NUMBER, error }
}

const PARAMETERS: UblkParameters = UblkParameters {
    capacity_bytes: 1 << 20,
    block_bytes: 512,
    physical_block_bytes: 4096,
    io_bytes_max: 1 << 16,
    read_only: false,
    volatile_cache: true,
    discard: true,
    write_zeroes: true,
};

impl Control for Process<'_> {
    fn info(&self, _: u32) -> Result<Option<UblkInfo>, UblkError> {
        let mut world = self.world.borrow_mut();
        world.pass();
        Ok(world.devices.get(&NUMBER).map(|device| device.info))
    }

    fn add(&self, wanted: UblkInfo) -> Result<UblkInfo, UblkError> {
        self.control("ADD_DEV", Command::Add(wanted)).map(|()| wanted)
    }

    fn set_parameters(&self, _: u32, _: UblkParameters) -> Result<(), UblkError> {
        self.control("SET_PARAMS", Command::SetParameters)
    }

    fn parameters(&self, _: u32) -> Result<UblkParameters, UblkError> {
        let mut world = self.world.borrow_mut();
        world.pass();
        world.lock();
        let device = world.devices.get(&NUMBER);
        device.map(|_| PARAMETERS).ok_or_else(|| failed("GET_PARAMS", NO_DEVICE))
    }

    fn start(&self, _: u32, _: &dyn Fn() -> bool) -> Result<(), UblkError> {
        self.control("START_DEV", Command::Start)
    }

    fn stop(&self, _: u32) -> Result<(), UblkError> {
        self.control("STOP_DEV", Command::Stop)
    }

    fn delete(&self, _: u32, gives_up: &dyn Fn() -> bool) -> Result<(), UblkError> {
        self.control("DEL_DEV", Command::Delete)?;
        for _ in 0..100 {
            let mut world = self.world.borrow_mut();
            if !world.devices.contains_key(&NUMBER) {
                return Ok(());
            }
            world.pass();
            drop(world);
            if gives_up() {
                return Err(failed("DEL_DEV", CANCELED));
            }
        }
        panic!("DEL_DEV waits for ever");
    }

    fn begin_recovery(&self, _: u32) -> Result<(), UblkError> {
        self.control("START_USER_RECOVERY", Command::BeginRecovery)
    }

    fn end_recovery(&self, _: u32, _: &dyn Fn() -> bool) -> Result<(), UblkError> {
        self.control("END_USER_RECOVERY", Command::EndRecovery)
    }
}

impl Server for Process<'_> {
    fn ends(&self) -> bool {
        self.is_dead.get()
    }

    fn pause(&self) {
        self.pauses.set(self.pauses.get() + 1);
        self.world.borrow_mut().pass();
    }

    fn may_recover(&self) -> bool {
        true
    }

    fn wanted(&self, word: u64) -> UblkInfo {
        UblkInfo::new(NUMBER, (1, 4), 1 << 16, word)
    }

    fn parameters(&self, _: &UblkInfo) -> UblkParameters {
        PARAMETERS
    }

    fn fits(&self, shown: &UblkParameters) -> Result<(), String> {
        if *shown == PARAMETERS { Ok(()) } else { Err("another store".to_owned()) }
    }

    fn start_queues(&self, _: &UblkInfo, _: &UblkParameters) -> Result<(), String> {
        for _ in 0..100 {
            match self.command(Command::Fetch) {
                Err(BUSY) => {}
                result => return result.map_err(|errno| errno.to_string()),
            }
        }
        Err("busy".to_owned())
    }

    fn stop_queues(&self) {
        let _ = self.command(Command::Close);
    }
}

/// Calls for kernels and for daemons that are killed in each manner, with a limit of commands that
/// is counted up until a call returns false, because its daemon was not killed.
fn at_each_point(mut call: impl FnMut(Kernel, (u32, Kill, u32)) -> bool) -> u32 {
    let mut count = 0;
    for kernel in [Kernel::Early, Kernel::Late] {
        let within = [0, 1, 2, 3, 5, 8].map(Kill::Within);
        for kill in within.into_iter().chain([Kill::Before, Kill::After]) {
            for end in [0, 1, 3, 9] {
                count += (0..).take_while(|left| call(kernel, (*left, kill, end))).count() as u32;
            }
        }
    }
    count
}

/// The next daemon serves the device, and takes over what a daemon had begun to serve and not to
/// stop.
fn check_successor(world: &RefCell<World>, pid: i32, stays: bool, what: &dyn std::fmt::Debug) {
    let was_shown = {
        let world = world.borrow();
        let is_ending =
            world.in_flight.iter().any(|it| matches!(it.command, Command::Stop | Command::Delete));
        !is_ending && matches!(world.state(), Some(UblkState::Live | UblkState::Quiesced))
    };
    let (process, life) = (Process::lasting(world, pid), Life::new(NUMBER, NAME, stays));
    let up = life.bring_up(&process, &process);
    let up = up.unwrap_or_else(|reason| panic!("{what:?}: {reason}"));
    // The kernel takes at most 17 moments for the end of a process.
    assert!(process.pauses.get() < 30, "{what:?}: {} pauses", process.pauses.get());
    if was_shown && stays {
        assert_eq!(up, Up::Recovered, "{what:?}");
    }
    if !stays {
        assert_eq!(up, Up::Made, "{what:?}");
    }
    let mut world = world.borrow_mut();
    world.settle();
    let device = &world.devices[&NUMBER];
    let served = (device.info.state(), device.info.server, device.open_by);
    assert_eq!(served, (UblkState::Live, pid, Some(pid)), "{what:?}");
    assert!(life.is_made() && (!world.has_lost || !stays), "{what:?}");
}

#[test]
fn a_device_is_served_after_a_kill_at_any_point_of_its_life() {
    for stays in [true, false] {
        let count = at_each_point(|kernel, kill| {
            let world = World::new(kernel);
            let process = Process::new(&world, 1, kill);
            process.live(&Life::new(NUMBER, NAME, stays));
            if process.is_dead.get() {
                check_successor(&world, 2, stays, &(kernel, kill));
            } else {
                assert!(world.borrow().devices.is_empty());
            }
            process.is_dead.get()
        });
        // Made, fetched, started, flushed, stopped, closed and deleted: eight commands.
        assert_eq!(count, 2 * 8 * 4 * 8);
    }
}

#[test]
fn a_device_is_served_after_two_kills_at_any_points() {
    let mut kinds = BTreeMap::new();
    for first in 0..8 {
        for first_kill in [Kill::Before, Kill::Within(1), Kill::Within(4), Kill::After] {
            at_each_point(|kernel, kill| {
                let world = World::new(kernel);
                let life = || Life::new(NUMBER, NAME, true);
                Process::new(&world, 1, (first, first_kill, kill.2)).live(&life());
                let second = Process::new(&world, 2, kill);
                second.live(&life());
                if second.is_dead.get() {
                    let before = world.borrow().state().map(|state| format!("{state:?}"));
                    *kinds.entry(before).or_insert(0) += 1;
                    check_successor(&world, 3, true, &(kernel, (first, first_kill), kill));
                }
                second.is_dead.get()
            });
        }
    }
    // The third daemon found no device, and one in each state.
    assert_eq!(kinds.len(), 4, "{kinds:?}");
}

#[test]
fn a_device_that_no_daemon_is_to_serve_stays_whole_or_not_at_all() {
    let mut found = [0; 2];
    at_each_point(|kernel, kill| {
        let world = World::new(kernel);
        let process = Process::new(&world, 1, kill);
        process.live(&Life::new(NUMBER, NAME, true));
        world.borrow_mut().settle();
        let before = world.borrow().state();
        let next = Process::lasting(&world, 2);
        remove_remnants(&next, [NUMBER], |pid| world.borrow().is_alive(pid));
        let after = world.borrow().state();
        match before {
            Some(UblkState::Dead) => assert_eq!(after, None, "{kernel:?} {kill:?}"),
            before => assert_eq!(after, before, "{kernel:?} {kill:?}"),
        }
        found[0] += u32::from(before == Some(UblkState::Dead));
        found[1] += u32::from(before == Some(UblkState::Quiesced));
        process.is_dead.get()
    });
    assert!(found.iter().all(|count| *count > 0), "{found:?}");
}

#[test]
fn devices_of_others_and_of_living_daemons_are_no_remnants() {
    let word = server_word(NAME);
    let dead = of(4, UblkInfo::new(NUMBER, (1, 4), 1 << 16, word));
    let stopped = of(-1, dead);
    let mut foreign = dead;
    foreign.server_word = NUMBER.into();
    for (info, lives, expected) in [
        (dead, false, true),
        (dead, true, false),
        (stopped, true, true),
        (foreign, false, false),
        (dead.in_state(UblkState::Live), false, false),
        (dead.in_state(UblkState::Quiesced), false, false),
    ] {
        assert_eq!(is_remnant(&info, |_| lives), expected, "{info:?} {lives}");
    }
}

#[test]
fn the_next_step_follows_from_what_the_kernel_has() {
    let word = server_word(NAME);
    let info = |state| UblkInfo::new(NUMBER, (1, 4), 1 << 16, word).in_state(state);
    let quiesced = info(UblkState::Quiesced);
    let other = UblkInfo::new(NUMBER, (1, 4), 1 << 16, server_word("e"));
    for (seen, stays, expected) in [
        (None, true, Step::Make),
        (Some(info(UblkState::Dead)), true, Step::Delete),
        (Some(quiesced), true, Step::Recover(quiesced)),
        (Some(quiesced), false, Step::Delete),
        (Some(info(UblkState::Live)), true, Step::Wait(info(UblkState::Live))),
        (Some(info(UblkState::Other(3))), false, Step::Wait(info(UblkState::Other(3)))),
        (Some(other), true, Step::Refuse),
    ] {
        assert_eq!(next_step(seen.as_ref(), word, stays), expected);
    }
}

#[test]
fn a_device_of_another_process_is_neither_taken_nor_removed() {
    let world = World::new(Kernel::Early);
    let (first, second) = (Process::lasting(&world, 1), Process::lasting(&world, 2));
    Life::new(NUMBER, NAME, true).bring_up(&first, &first).unwrap();
    let life = Life::new(NUMBER, NAME, true);
    let reason = life.bring_up(&second, &second).unwrap_err();
    assert!(reason.contains("served by process 1; end that process"), "{reason}");
    assert!(!life.is_made());
    let other = Life::new(NUMBER, "other", true);
    let reason = other.bring_up(&second, &second).unwrap_err();
    assert!(reason.contains("another name") && !other.is_made(), "{reason}");
    assert_eq!(world.borrow().state(), Some(UblkState::Live));
}
