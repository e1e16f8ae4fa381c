//! A controller in a few pages, for the tests of this module: it does what it is told, in one
//! thread, and can be told to misbehave. It is written against the standards' text and the device's
//! side of the rings only.

use std::collections::BTreeMap;
use std::io::{IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use sidecore_memory::{GuestAddress, GuestMemory, RegionHint, RegionSpec, UserAddress};
use sidecore_ring::nvme::{
    Completion, CompletionQueue, Doorbells, ShadowDoorbells, SubmissionQueue,
};
use sidecore_spec_nvme::register::{CC, CSTS};

use super::transport::Transport;
use super::wire::Wire;

/// The behaviour of the controller.
#[derive(Clone, Debug)]
pub(super) struct Character {
    pub mapped: bool,
    pub shadow: bool,
    pub block_bytes: usize,
    pub max_entries: u32,
    pub class: [u8; 3],
    /// Takes I/O commands and never completes them.
    pub swallows: bool,
    /// Completes I/O commands under another identifier.
    pub lies: bool,
    /// Says CSTS.CFS when it is enabled.
    pub dies: bool,
    /// Fails every Create I/O Submission Queue.
    pub stingy: bool,
    pub vectors: u32,
}

impl Default for Character {
    fn default() -> Self {
        Self {
            mapped: true,
            shadow: false,
            block_bytes: 512,
            max_entries: 1024,
            class: [2, 8, 1],
            swallows: false,
            lies: false,
            dies: false,
            stingy: false,
            vectors: 64,
        }
    }
}

pub(super) type Disk = Arc<Mutex<Vec<u8>>>;

pub(super) const DISK_BYTES: usize = 16 << 20;

const BAR_BYTES: u32 = 1 << 20;

pub(super) fn disk() -> Disk {
    Arc::new(Mutex::new(vec![0; DISK_BYTES]))
}

/// The actions of the client, reported when it has hung up.
#[derive(Debug, Default)]
pub(super) struct Report {
    pub io_doorbell_messages: u64,
    pub dma_maps: usize,
}

/// Starts one; it ends when the client hangs up.
pub(super) fn start(character: &Character, disk: &Disk) -> (Transport, JoinHandle<Report>) {
    let (here, there) = UnixStream::pair().unwrap();
    here.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    let fake = Fake::new(there, character.clone(), disk.clone());
    let thread = std::thread::spawn(move || fake.run());
    (Transport::negotiate(Wire::over(here)).unwrap(), thread)
}

struct Pair {
    commands: SubmissionQueue,
    completions: CompletionQueue,
    vector: Option<u32>,
}

struct Fake {
    socket: UnixStream,
    character: Character,
    disk: Disk,
    memory: GuestMemory,
    config: [u8; 256],
    registers: BTreeMap<u64, u32>,
    admin: Option<Pair>,
    new_completion_queue: Option<(CompletionQueue, Option<u32>)>,
    queues: BTreeMap<u16, Pair>,
    doorbells: Doorbells,
    shadow: Option<ShadowDoorbells>,
    events: BTreeMap<u32, OwnedFd>,
    report: Report,
}

impl Fake {
    fn new(socket: UnixStream, character: Character, disk: Disk) -> Self {
        let mut config = [0; 256];
        config[9..12].copy_from_slice(&character.class);
        Self {
            socket,
            character,
            disk,
            memory: GuestMemory::empty(),
            config,
            registers: BTreeMap::new(),
            admin: None,
            new_completion_queue: None,
            queues: BTreeMap::new(),
            doorbells: Doorbells::new(8).unwrap(),
            shadow: None,
            events: BTreeMap::new(),
            report: Report::default(),
        }
    }

    fn run(mut self) -> Report {
        loop {
            let worked = self.work();
            let mut fds = [PollFd::new(&self.socket, PollFlags::IN)];
            let readable = rustix::event::poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }))
                .unwrap()
                > 0;
            if readable && !self.serve() {
                return self.report;
            }
            if !worked && !readable {
                std::thread::yield_now();
            }
        }
    }

    fn stride(&self) -> u64 {
        if self.character.mapped { 64 } else { 4 }
    }

    /// One message; false when there are no more.
    fn serve(&mut self) -> bool {
        let mut header = [0; 16];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let to = &mut [IoSliceMut::new(&mut header)];
        let received = rustix::net::recvmsg(&self.socket, to, &mut control, RecvFlags::empty());
        let Ok(count @ 1..) = received.map(|message| message.bytes) else { return false };
        let mut files = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                files.extend(rights);
            }
        }
        self.socket.read_exact(&mut header[count..]).unwrap();
        let size = u32::from_le_bytes(header[4..8].try_into().unwrap()) as usize;
        let mut body = vec![0; size - 16];
        self.socket.read_exact(&mut body).unwrap();
        let command = u16::from_le_bytes([header[2], header[3]]);
        let (reply, file) = match self.answer(command, &body, files) {
            Ok(answer) => answer,
            Err(errno) => {
                header[4..8].copy_from_slice(&16_u32.to_le_bytes());
                header[8..12].copy_from_slice(&0x21_u32.to_le_bytes());
                header[12..16].copy_from_slice(&errno.to_le_bytes());
                return self.socket.write_all(&header).is_ok();
            }
        };
        if header[8] & 0x10 != 0 {
            return true;
        }
        header[4..8].copy_from_slice(&(16 + reply.len() as u32).to_le_bytes());
        header[8..12].copy_from_slice(&1_u32.to_le_bytes());
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fds: Vec<BorrowedFd<'_>> = file.iter().map(AsFd::as_fd).collect();
        if !fds.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
        }
        let parts = [IoSlice::new(&header), IoSlice::new(&reply)];
        rustix::net::sendmsg(&self.socket, &parts, &mut control, SendFlags::NOSIGNAL).is_ok()
    }

    fn answer(
        &mut self,
        command: u16,
        body: &[u8],
        files: Vec<OwnedFd>,
    ) -> Result<(Vec<u8>, Option<OwnedFd>), u32> {
        const EINVAL: u32 = 22;
        let word = |index: usize| u32::from_le_bytes(body[index * 4..][..4].try_into().unwrap());
        let long = |at: usize| u64::from_le_bytes(body[at..][..8].try_into().unwrap());
        let words =
            |words: &[u32]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>();
        let reply = match command {
            1 => [&[0, 0, 1, 0][..], b"{\"capabilities\":{}}\0"].concat(),
            2 => {
                let file = files.into_iter().next().ok_or(EINVAL)?;
                self.map((long(16), long(24)), file, long(8)).ok_or(EINVAL)?;
                Vec::new()
            }
            3 => {
                let at = (GuestAddress(long(8)), UserAddress(long(8)));
                self.memory =
                    self.memory.without_region(at.0, at.1, long(16)).map_err(|_| EINVAL)?;
                self.rebind();
                body.to_vec()
            }
            4 => words(&[16, 3, 9, 5]),
            5 if word(2) == 0 && self.character.mapped => {
                let file = self.doorbells.file().try_clone_to_owned().unwrap();
                let region = [80, 0b1111, 0, 32, BAR_BYTES, 0, 0, 0];
                let area = [1 | 1 << 16, 0, 1, 0, 0x1000, 0, 0x1000, 0];
                return Ok((words(&[region, area].concat()), Some(file)));
            }
            5 => {
                let sizes = BTreeMap::from([(0, BAR_BYTES), (7, 256)]);
                words(&[32, 3, word(2), 0, sizes.get(&word(2)).copied().unwrap_or(0), 0, 0, 0])
            }
            7 => words(&[16, 1, word(2), if word(2) == 2 { self.character.vectors } else { 0 }]),
            8 => {
                self.events.extend((word(3)..).zip(files));
                Vec::new()
            }
            9 => {
                let data = self.read(word(2), long(0), word(3) as usize).ok_or(EINVAL)?;
                [&body[..16], &data].concat()
            }
            10 => {
                self.write(word(2), long(0), &body[16..]).ok_or(EINVAL)?;
                body[..16].to_vec()
            }
            13 => {
                self.stop();
                self.registers.clear();
                Vec::new()
            }
            _ => return Err(95),
        };
        Ok((reply, None))
    }

    fn map(
        &mut self,
        (address, len_bytes): (u64, u64),
        file: OwnedFd,
        file_offset_bytes: u64,
    ) -> Option<()> {
        self.report.dma_maps += 1;
        let (guest_address, user_address) = (GuestAddress(address), UserAddress(address));
        let spec = RegionSpec { guest_address, user_address, len_bytes, file, file_offset_bytes };
        self.memory = self.memory.with_region(spec).ok()?;
        self.rebind();
        Some(())
    }

    fn read(&self, region: u32, offset: u64, count: usize) -> Option<Vec<u8>> {
        if region == 7 {
            return Some(self.config.get(offset as usize..)?.get(..count)?.to_vec());
        }
        let capabilities = u64::from(self.character.max_entries - 1)
            | 1 << 16
            | 2 << 24
            | u64::from((self.stride() / 4).ilog2()) << 32
            | 1 << 37;
        let dword = |at: u64| match at {
            0 => capabilities as u32,
            4 => (capabilities >> 32) as u32,
            8 => 0x2_0000,
            at => self.registers.get(&at).copied().unwrap_or(0),
        };
        (region == 0).then(|| {
            let bytes =
                (offset..offset + count as u64).step_by(4).flat_map(|at| dword(at).to_le_bytes());
            bytes.take(count).collect()
        })
    }

    fn write(&mut self, region: u32, offset: u64, data: &[u8]) -> Option<()> {
        if region == 7 {
            self.config.get_mut(offset as usize..)?.get_mut(..data.len())?.copy_from_slice(data);
            return Some(());
        }
        for (at, dword) in (offset..).step_by(4).zip(data.chunks_exact(4)) {
            let value = u32::from_le_bytes(dword.try_into().unwrap());
            match at.checked_sub(0x1000).map(|at| at / self.stride()) {
                None => self.write_register(at, value),
                Some(0) => {
                    self.admin.as_mut()?.commands.set_tail(value).unwrap();
                    self.run_admin();
                }
                Some(1) => self.admin.as_mut()?.completions.set_head(value).unwrap(),
                Some(doorbell) => {
                    self.report.io_doorbell_messages += 1;
                    let queue = (doorbell / 2) as u16;
                    if doorbell % 2 == 0 {
                        self.doorbells.set_submission_tail(queue, value);
                    } else {
                        self.doorbells.set_completion_head(queue, value);
                    }
                }
            }
        }
        Some(())
    }

    fn write_register(&mut self, at: u64, value: u32) {
        self.registers.insert(at, value);
        if at != CC {
            return;
        }
        if value & 3 << 14 != 0 {
            self.registers.insert(CSTS, 0b1001);
        } else if value & 1 == 0 {
            self.stop();
        } else if self.character.dies {
            self.registers.insert(CSTS, 2);
        } else if self.admin.is_none() {
            assert_eq!(value, 6 << 16 | 4 << 20 | 1);
            let register = |at| u64::from(self.registers[&at]);
            let [asq, acq] =
                [0x28, 0x30].map(|at| GuestAddress(register(at) | register(at + 4) << 32));
            let aqa = self.registers[&0x24];
            self.admin = Some(Pair {
                commands: SubmissionQueue::new(&self.memory, asq, (aqa & 0xfff) + 1, 0).unwrap(),
                completions: CompletionQueue::new(&self.memory, acq, (aqa >> 16) + 1).unwrap(),
                vector: Some(0),
            });
            self.registers.insert(CSTS, 1);
        }
    }

    fn stop(&mut self) {
        self.admin = None;
        self.new_completion_queue = None;
        self.queues.clear();
        self.shadow = None;
        self.registers.insert(CSTS, 0);
    }

    fn rebind(&mut self) {
        for pair in self.queues.values_mut().chain(&mut self.admin) {
            let _ = pair.commands.rebind(&self.memory);
            let _ = pair.completions.rebind(&self.memory);
        }
    }

    fn run_admin(&mut self) {
        while let Some(entry) = self.admin.as_mut().and_then(|admin| admin.commands.pop()) {
            let dword =
                |index: usize| u32::from_le_bytes(entry[index * 4..][..4].try_into().unwrap());
            let (result, status) = self.admin_command(&dword);
            let Some(result) = result else { continue };
            if let Some(admin) = &mut self.admin {
                complete(admin, 0, (dword(0) >> 16) as u16, result, status);
            }
            self.signal(0);
        }
    }

    /// `None` for a command that completes when something happens, which it never does.
    fn admin_command(&mut self, dword: &dyn Fn(usize) -> u32) -> (Option<u32>, u16) {
        let prp = |index: usize| {
            GuestAddress(u64::from(dword(index)) | u64::from(dword(index + 1)) << 32)
        };
        let queue = dword(10) as u16;
        let entries = (dword(10) >> 16) + 1;
        match dword(0) as u8 {
            0 => (self.queues.remove(&queue).map(|_| 0).or(Some(0)), 0),
            4 => (Some(0), 0),
            5 => {
                let vector = (dword(11) & 2 != 0).then_some(dword(11) >> 16);
                self.doorbells.set_completion_head(queue, 0);
                let completions = CompletionQueue::new(&self.memory, prp(6), entries).unwrap();
                self.new_completion_queue = Some((completions, vector));
                (Some(0), 0)
            }
            1 if self.character.stingy => (Some(0), 0x4102),
            1 => {
                self.doorbells.set_submission_tail(queue, 0);
                let (completions, vector) = self.new_completion_queue.take().unwrap();
                let commands = SubmissionQueue::new(&self.memory, prp(6), entries, 0).unwrap();
                self.queues.insert(queue, Pair { commands, completions, vector });
                (Some(0), 0)
            }
            6 => {
                self.memory
                    .write_slice(prp(6), &self.identify(dword(10)), &mut RegionHint::default())
                    .unwrap();
                (Some(0), 0)
            }
            9 => (Some(7 << 16 | 7), 0),
            0x0c => (None, 0),
            0x7c if self.character.shadow => {
                self.shadow =
                    Some(ShadowDoorbells::new(&self.memory, prp(6), prp(8), 8, 4).unwrap());
                (Some(0), 0)
            }
            _ => (Some(0), 0x4001),
        }
    }

    fn identify(&self, cns: u32) -> [u8; 4096] {
        let mut raw = [0; 4096];
        match cns {
            0 => {
                let blocks = (DISK_BYTES / self.character.block_bytes) as u64;
                raw[0..8].copy_from_slice(&blocks.to_le_bytes());
                raw[128 + 2] = self.character.block_bytes.ilog2() as u8;
            }
            1 => {
                raw[24..29].copy_from_slice(b"fake ");
                raw[77] = 8;
                raw[257] = self.character.shadow.into();
                raw[536] = 1;
            }
            _ => raw[0] = 1,
        }
        raw
    }

    fn signal(&self, vector: u32) {
        if let Some(event) = self.events.get(&vector) {
            rustix::io::write(event, &1_u64.to_ne_bytes()).unwrap();
        }
    }

    /// A turn of the I/O queues.
    fn work(&mut self) -> bool {
        let mut worked = false;
        let mut signals = Vec::new();
        for (id, pair) in &mut self.queues {
            let (mut tail, mut head) =
                (self.doorbells.submission_tail(*id), self.doorbells.completion_head(*id));
            if let Some(shadow) = &self.shadow {
                (tail, head) = (shadow.submission_tail(*id), shadow.completion_head(*id));
            }
            pair.commands.set_tail(tail).unwrap();
            pair.completions.set_head(head).unwrap();
            let mut posted = false;
            while pair.completions.room() > 0
                && let Some(entry) = pair.commands.pop()
            {
                worked = true;
                if self.character.swallows {
                    continue;
                }
                let status = execute(&entry, &self.memory, &self.disk, self.character.block_bytes);
                let cid = u16::from_le_bytes([entry[2], entry[3]])
                    ^ if self.character.lies { 0x100 } else { 0 };
                complete(pair, *id, cid, 0, status);
                posted = true;
            }
            if posted {
                signals.extend(pair.vector);
            }
        }
        signals.into_iter().for_each(|vector| self.signal(vector));
        worked
    }
}

fn complete(pair: &mut Pair, sq_id: u16, command_id: u16, result: u32, status: u16) {
    let sq_head = pair.commands.head();
    let entry = Completion {
        result,
        reserved_or_result_high: 0,
        sq_head,
        sq_id,
        command_id,
        status: status << 1,
    };
    assert!(pair.completions.push(entry), "the client must leave room");
}

/// Executes an I/O command; returns its status.
fn execute(entry: &[u8; 64], memory: &GuestMemory, disk: &Disk, block_bytes: usize) -> u16 {
    let dword = |index: usize| u32::from_le_bytes(entry[index * 4..][..4].try_into().unwrap());
    let hint = &mut RegionHint::default();
    let lba = u64::from(dword(10)) | u64::from(dword(11)) << 32;
    let len = ((dword(12) & 0xffff) as usize + 1) * block_bytes;
    let mut disk = disk.lock().unwrap();
    let opcode = entry[0];
    if opcode == 0 {
        return 0;
    }
    assert_eq!(dword(1), 1, "the namespace");
    if opcode == 9 {
        assert_eq!((dword(10), dword(11)), (0, 4));
        let mut range = [0; 16];
        memory.read_slice(GuestAddress(pieces(entry, memory, 16)[0].0), &mut range, hint).unwrap();
        let blocks = u32::from_le_bytes(range[4..8].try_into().unwrap()) as usize;
        let lba = u64::from_le_bytes(range[8..16].try_into().unwrap()) as usize;
        disk[lba * block_bytes..][..blocks * block_bytes].fill(0);
        return 0;
    }
    let Some(blocks) = usize::try_from(lba)
        .ok()
        .and_then(|lba| lba.checked_mul(block_bytes))
        .and_then(|start| disk.get_mut(start..start.checked_add(len)?))
    else {
        return 0x4080;
    };
    match opcode {
        8 => blocks.fill(0),
        0x0c => {}
        _ => return transfer(entry, memory, blocks),
    }
    0
}

/// Executes a command with data.
fn transfer(entry: &[u8; 64], memory: &GuestMemory, blocks: &mut [u8]) -> u16 {
    let hint = &mut RegionHint::default();
    let (opcode, len) = (entry[0], blocks.len());
    let mut data = blocks.to_vec();
    let mut at = 0;
    for (address, count) in pieces(entry, memory, len) {
        if opcode == 2 {
            memory.write_slice(GuestAddress(address), &data[at..at + count], hint).unwrap();
        } else {
            memory.read_slice(GuestAddress(address), &mut data[at..at + count], hint).unwrap();
        }
        at += count;
    }
    assert_eq!(at, len);
    match opcode {
        1 => blocks.copy_from_slice(&data),
        5 if *blocks != data[..] => return 0x4285,
        2 | 5 => {}
        _ => return 0x4001,
    }
    0
}

/// Where a command's data is.
fn pieces(entry: &[u8; 64], memory: &GuestMemory, len: usize) -> Vec<(u64, usize)> {
    let hint = &mut RegionHint::default();
    let long = |at: usize| u64::from_le_bytes(entry[at..][..8].try_into().unwrap());
    let (first, second) = (long(24), long(32));
    match (entry[1] >> 6, entry[39] >> 4) {
        (1, 0) => vec![(first, second as u32 as usize)],
        (1, 3) => (0..u64::from(second as u32) / 16)
            .map(|index| {
                let raw: [u8; 16] =
                    memory.read_array(GuestAddress(first + index * 16), hint).unwrap();
                assert_eq!(raw[12..16], [0; 4]);
                let word = |at: usize| u64::from_le_bytes(raw[at..][..8].try_into().unwrap());
                (word(0), word(8) as u32 as usize)
            })
            .collect(),
        (0, _) => {
            let in_first = (4096 - first % 4096).min(len as u64) as usize;
            let mut pieces = vec![(first, in_first)];
            let rest = len - in_first;
            let pages = rest.div_ceil(4096);
            for page in 0..pages {
                let address = if pages == 1 {
                    second
                } else {
                    assert_eq!(second % 8, 0);
                    assert!(second % 4096 + pages as u64 * 8 <= 4096, "the list crosses a page");
                    u64::from_le_bytes(
                        memory.read_array(GuestAddress(second + page as u64 * 8), hint).unwrap(),
                    )
                };
                assert_eq!(address % 4096, 0);
                pieces.push((address, (rest - page * 4096).min(4096)));
            }
            pieces
        }
        other => panic!("data pointer {other:?}"),
    }
}
