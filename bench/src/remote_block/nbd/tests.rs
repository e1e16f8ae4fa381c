use std::process::Command;

use sidecore_kit::process::{Process, tied_to_this_process};
use sidecore_kit::wait;

use super::*;
use crate::remote_block::wire::{Cable, HOST_IP};

const DISK_BYTES: u64 = 1 << 20;

/// qemu-storage-daemon with an export, in a namespace. `None` if the machine has none.
fn serve(blockdev: &str) -> Option<(Process, Cable, tempfile::TempDir)> {
    let cable = match Cable::ethernet() {
        Ok(cable) => cable,
        Err(error) => {
            sidecore_skip::skip(format_args!("no virtual wire: {error:#}"));
            return None;
        }
    };
    let directory = tempfile::tempdir().unwrap();
    let pid_file = directory.path().join("pid");
    let words = cable.prefix();
    let mut command: Command = tied_to_this_process(words[0].as_ref());
    command.args(&words[1..]).arg("qemu-storage-daemon").arg("--pidfile").arg(&pid_file);
    command.args(["--blockdev", &format!("{blockdev},node-name=disk,size={DISK_BYTES}")]);
    command.args(["--nbd-server", &format!("addr.type=inet,addr.host={HOST_IP},addr.port=10809")]);
    command.args(["--export", "nbd,id=export,node-name=disk,name=disk,writable=on"]);
    let process = Process::start(&mut command).unwrap();
    wait::until("the server listens", PATIENCE, || pid_file.exists());
    Some((process, cable, directory))
}

fn run(cable: &Cable, is_structured: bool, work: Work) -> Result<Sample> {
    let mut client = NbdClient::open(cable.connect(10_809)?, "disk", is_structured)?;
    let blocks = client.disk_bytes() / u64::from(work.bytes);
    client.run(&Work { blocks, duration: Duration::from_millis(10), ..work }, &Clock::new())
}

#[test]
fn requests_of_all_kinds_are_answered() {
    let Some((_process, cable, _directory)) = serve("driver=null-co,read-zeroes=off") else {
        return;
    };
    for is_structured in [false, true] {
        for (write, bytes) in [(false, 4096), (true, 4096), (false, 65_536), (true, 65_536)] {
            for depth in [1, 32, 100] {
                let work = Work { write, bytes, depth, ..Work::default() };
                let sample = run(&cable, is_structured, work).unwrap();
                assert!(sample.iops > 0.0, "{work:?}");
                assert_eq!(sample.latency_p50_ns > 0.0, depth == 1, "{work:?}");
            }
        }
    }
    let missing = NbdClient::open(cable.connect(10_809).unwrap(), "none", true);
    assert!(format!("{:#}", missing.err().unwrap()).contains("no export `none`"));
}

#[test]
fn an_answer_without_data_is_refused() {
    let Some((_process, cable, _directory)) = serve("driver=null-co,read-zeroes=on") else {
        return;
    };
    let refused = run(&cable, true, Work::default()).unwrap_err();
    assert!(refused.to_string().contains("a hole, which carries no data"), "{refused}");
    // A simple reply has no holes: the same zeros come as data.
    run(&cable, false, Work::default()).unwrap();
}

#[test]
fn a_reply_is_parsed_once_it_is_whole() {
    let mut chunk = STRUCTURED_REPLY.to_be_bytes().to_vec();
    chunk.extend([0, 1, 0, 1]);
    chunk.extend(7_u64.to_be_bytes());
    chunk.extend(4104_u32.to_be_bytes());
    for len in 0..chunk.len() {
        assert!(Reply::parse(&chunk[..len]).unwrap().is_none(), "{len}");
    }
    let (reply, len_bytes) = Reply::parse(&chunk).unwrap().unwrap();
    assert_eq!((reply.cookie, len_bytes), (7, STRUCTURED_REPLY_BYTES));
    assert!(matches!(
        reply.kind,
        Kind::Chunk { flags: CHUNK_DONE, of: CHUNK_DATA, len_bytes: 4104 }
    ));
    assert!(Reply::parse(b"HTTP/1.1 400").is_err());
}
