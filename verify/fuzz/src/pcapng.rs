//! The input as a capture file: the reader of the tests refuses it, or it is what the writer writes
//! for its contents. And files with the input's packets, which the reader gives back; the reader
//! of flows gets the bytes of all packets.

#![no_main]

use libfuzzer_sys::fuzz_target;
use sidecore_fuzz::Input;
use sidecore_stage_capture::Flow;
use sidecore_stage_capture::pcapng::{Direction, File, ReadPacket, read};

fuzz_target!(|input: &[u8]| {
    if let Ok(file) = read(input) {
        check(&file);
    }
    check(&file_of(input));
});

/// A file survives that it is written and read again.
fn check(file: &File) {
    let mut bytes = Vec::new();
    file.write(&mut bytes);
    assert_eq!(read(&bytes).as_ref(), Ok(file));
    for packet in &file.packets {
        let Some(flow) = Flow::read(&packet.bytes) else {
            assert!(packet.bytes.len() < 14, "an Ethernet header has addresses");
            continue;
        };
        // Ports are of IP, and a protocol is of an address.
        assert!(flow.ports.is_none() || flow.protocol.is_some());
        assert!(flow.protocol.is_none() || flow.addresses.is_some());
        assert!(flow.vlan.is_none_or(|vlan| vlan > 0 && vlan < 4096));
    }
}

/// A file with packets whose facts and bytes are from the input.
fn file_of(bytes: &[u8]) -> File {
    let mut input = Input::new(bytes);
    let mut file = File { application: "fuzz".to_owned(), ..File::default() };
    let known = [1 << 32, 4096, 65_553];
    while let (Some(setup), Some(at_ns)) = (input.byte(), input.number(&known)) {
        let count = input.byte().unwrap_or(0);
        let bytes: Vec<u8> = std::iter::from_fn(|| input.byte()).take(count.into()).collect();
        file.packets.push(ReadPacket {
            at_ns,
            direction: if setup & 1 == 0 { Direction::Inbound } else { Direction::Outbound },
            len_bytes: input.number(&known).unwrap_or(0) as u32,
            lost: if setup & 2 == 0 { 0 } else { at_ns >> 3 },
            comment: (setup & 4 != 0).then(|| String::from_utf8_lossy(&bytes).into_owned()),
            bytes,
        });
        if setup & 8 != 0 {
            file.end = Some((at_ns, at_ns >> 1, at_ns >> 2));
        }
    }
    file
}
