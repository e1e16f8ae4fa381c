//! An IOhost's end of a link through shared memory, to which the other end writes what the input
//! says.

#![no_main]

use libfuzzer_sys::fuzz_target;
use sidecore_fuzz::Input;
use sidecore_link::{Buffer, Frame, Link, LinkAddress, LinkOptions, LinkState, MemoryLink};
use sidecore_memory::{GuestAddress, RegionHint};
use sidecore_reactor::EventFd;
use sidecore_units::Nanos;

const SLOTS: usize = 4;
const FRAME_BYTES: usize = 1_232;
/// Entries of the first round: of the smallest frame, the largest, and one that is too long.
const ENTRIES: [u64; 4] =
    [1 << 48, (1 << 48) | 1, (1 << 48) | FRAME_BYTES as u64, (2 << 48) | (3 << 32) | 64];

struct Host {
    link: MemoryLink,
    frames: Vec<Frame>,
    buffers: Vec<Buffer>,
}

impl Host {
    /// One call, with its argument in the high bits.
    fn call(&mut self, step: u8) {
        let count = usize::from(step >> 4);
        match step & 7 {
            0 | 1 => self.link.receive(Nanos::ZERO, count, &mut self.frames),
            2 => {
                let mut some = self.frames.split_off(self.frames.len().saturating_sub(count));
                self.link.give_back(&mut some);
            }
            3 => self.link.buffers(LinkAddress::Peer(0), count, &mut self.buffers),
            4 => {
                let mut some = self.buffers.split_off(self.buffers.len().saturating_sub(count));
                let len_bytes = FRAME_BYTES * count / 8;
                some.iter_mut().for_each(|buffer| buffer.address(LinkAddress::Peer(0), len_bytes));
                self.link.send(Nanos::ZERO, &mut some);
            }
            5 => self.link.cancel(&mut self.buffers),
            6 => {
                let _ = self.link.arm();
            }
            _ => {
                self.link.on_wake();
                self.link.disarm();
            }
        }
    }

    /// The link lends no slot twice and nothing outside of its memory.
    fn check(&self) {
        assert!(self.frames.len() <= SLOTS && self.buffers.len() <= SLOTS);
        let frames = self.frames.iter().map(Frame::pieces);
        let mut places = Vec::new();
        for pieces in frames.chain(self.buffers.iter().map(Buffer::pieces)) {
            assert!((1..=FRAME_BYTES).contains(&pieces.len_bytes()));
            let mut bytes = [0; FRAME_BYTES];
            assert!(pieces.read(self.link.memory(), 0, &mut bytes) == pieces.len_bytes());
            places.extend(pieces.part(0, 1).map(|piece| piece.address()));
        }
        places.sort_unstable();
        assert!(places.windows(2).all(|pair| pair[0] < pair[1]));
    }
}

fuzz_target!(|input: &[u8]| {
    let options = LinkOptions {
        frame_bytes: FRAME_BYTES,
        header_bytes: 82,
        receive_frames: SLOTS,
        transmit_frames: SLOTS,
    };
    let (link, _client) = MemoryLink::pair(&options, EventFd::peer_signal).expect("a link");
    let words = link.memory().len_bytes() / 8;
    let mut host = Host { link, frames: Vec::new(), buffers: Vec::new() };
    let mut input = Input::new(input);
    while let Some(step) = input.byte() {
        if step & 8 == 0 {
            host.call(step);
            host.check();
            continue;
        }
        let (Some(place), Some(entry)) =
            (input.number(&[512, 1024, 2560, 3072]), input.number(&ENTRIES))
        else {
            break;
        };
        let at = GuestAddress(place % words * 8);
        host.link
            .memory()
            .write_slice(at, &entry.to_ne_bytes(), &mut RegionHint::default())
            .expect("in range");
    }
    host.link.give_back(&mut host.frames);
    host.link.cancel(&mut host.buffers);
    assert_eq!(host.link.state(), LinkState::Up, "a client ends its own channel only");
});
