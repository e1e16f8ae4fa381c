//! A controller as a driver sees it: its function, its registers, its states.

mod controller_rig;

use std::os::fd::AsFd;
use std::sync::Arc;

use controller_rig::{
    BASE, CC, COMPLETION, CSTS, ENABLE, MEMORY_BYTES, Options, Rig, SUBMISSION,
    delete_submission_queue, get_features, identify, set_features,
};
use sidecore_memory::GuestMemory;
use sidecore_nvme::{Command, Done, Interrupts, PciFunction, QueueEvent, Region, Status};
use sidecore_reactor::EventFd;

/// The steps of Linux' driver, from finding the function to its namespace.
#[test]
fn it_comes_up_as_linux_wants_it() {
    let mut rig = Rig::ready();
    let controller = rig.identify(1, 0);
    assert_eq!(&controller[4..24], b"SERIAL              ");
    assert_eq!(controller[77], 8, "MDTS");
    assert_eq!(
        u32::from_le_bytes(controller[80..84].try_into().unwrap()),
        rig.read32(8),
        "VER is VS"
    );
    assert_eq!((controller[111], controller[512], controller[513]), (1, 0x66, 0x44));
    assert_eq!(u32::from_le_bytes(controller[516..520].try_into().unwrap()), 1, "NN");
    assert_eq!(&controller[768..780], b"nqn.2014-08.");
    assert_eq!(
        u16::from_le_bytes([controller[256], controller[257]]),
        0,
        "a mapped virtual function manages nothing"
    );

    // Every log page that the driver may read along the way.
    let effects = rig.log_page(5, 4096);
    assert_eq!(effects[0x06 * 4] & 1, 1);

    assert_eq!(rig.ok(set_features(7, 63 << 16 | 63)), 63 << 16 | 63);
    rig.ok(set_features(0x0B, 0x100));
    for id in 1..=64 {
        rig.create_pair(id);
    }
    assert_eq!(rig.host.books().completion.len(), 64);
    assert_eq!(
        rig.host.books().completion[&64],
        Some(0),
        "vector 0 is shared with the admin queue"
    );
    assert_eq!(&rig.identify(2, 0)[..8], &[1, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(&rig.identify(3, 1)[..4], &[2, 16, 0, 0]);
    let blocks = rig.identify(0, 1);
    assert_eq!(&blocks[..8], &2048_u64.to_le_bytes());
    assert_eq!(rig.identify(8, 1)[14], 1, "it is ready");
    rig.identify(5, 1);
    rig.identify(6, 0);
    assert_eq!(rig.host.books().namespace.as_ref().unwrap().id, 1);
}

#[test]
fn configuration_space_and_bars_are_those_of_an_nvme_function() {
    let rig = Rig::new();
    let mut class = [0; 4];
    rig.function.read(Region::Config, 8, &mut class).unwrap();
    assert_eq!(class[1..], [2, 8, 1]);
    let registers = rig.function.bar(0).unwrap();
    let mappable = registers.mappable.unwrap();
    assert_eq!(
        (registers.len_bytes, mappable.offset_bytes, mappable.len_bytes),
        (1 << 20, 0x1000, 3 * 4096)
    );
    assert_eq!(rig.function.bar(4).unwrap().len_bytes, 8192);
    assert!([1, 2, 3, 5, 6, 255].iter().all(|index| rig.function.bar(*index).is_none()));
    let trapped = Rig::with(Options { mapped: false, ..Options::default() });
    assert!(trapped.function.bar(0).unwrap().mappable.is_none());
    for (region, offset) in [(Region::Bar(0), 1 << 20), (Region::Bar(1), 0), (Region::Config, 4096)]
    {
        assert!(rig.function.read(region, offset, &mut [0]).is_err());
        assert!(rig.function.write(region, offset, &[0]).is_err());
    }
    assert!(rig.function.read(Region::Bar(0), u64::MAX, &mut [0; 8]).is_err());
}

#[test]
fn what_it_cannot_run_as_makes_it_fatal_until_it_is_disabled() {
    for (aqa, asq, cc) in [
        (0x1F_001F, SUBMISSION, ENABLE | 1 << 7),
        (0x1F_001F, SUBMISSION, ENABLE | 1 << 11),
        (0x1F_001F, SUBMISSION, ENABLE | 7 << 4),
        (0x1F_0000, SUBMISSION, ENABLE),
        (0x1F, SUBMISSION, ENABLE),
        (0x1F_001F, BASE + MEMORY_BYTES, ENABLE),
        (0xFFF_0FFF, BASE + MEMORY_BYTES - 4096, ENABLE),
        (0x1F_001F, u64::MAX, ENABLE),
    ] {
        let mut rig = Rig::new();
        rig.write32(0x24, aqa);
        rig.write64(0x28, asq);
        rig.write64(0x30, COMPLETION);
        rig.write32(CC, cc);
        assert_eq!(rig.status(), 2, "CFS, and not ready: {aqa:x} {asq:x} {cc:x}");
        rig.write32(CC, 0);
        assert_eq!(rig.status(), 0);
        rig.enable();
        rig.identify(1, 0);
    }
}

#[test]
fn a_reset_is_over_when_nothing_is_in_flight() {
    let mut rig = Rig::ready();
    rig.create_pair(1);
    rig.host.books().holds = true;
    rig.write32(CC, ENABLE & !1);
    assert_eq!(rig.status(), 1, "it is ready until it is not");
    // Nothing is taken any more.
    rig.submit(identify(1, 0));
    assert_eq!(rig.answer(), None);
    assert_eq!(rig.host.release(), 1);
    rig.function.run();
    assert_eq!(rig.status(), 0);
    assert_eq!(rig.read32(0x24), 0x1F_001F, "AQA stays");
    rig.enable();
    rig.create_pair(1);
}

#[test]
fn toggling_enable_under_load_ends_where_the_last_write_wants_it() {
    let mut rig = Rig::ready();
    rig.host.books().holds = true;
    for _ in 0..5 {
        rig.write32(CC, 0);
        rig.write32(CC, ENABLE);
    }
    assert_eq!(rig.host.books().stops, 1, "one stop at a time");
    rig.host.release();
    rig.function.run();
    assert_eq!(rig.status(), 1);
    rig.host.books().holds = false;
    rig.write32(CC, 0);
    rig.enable();
    rig.identify(1, 0);

    rig.host.books().holds = true;
    rig.write32(CC, 0);
    rig.write32(CC, ENABLE);
    rig.write32(CC, 0);
    rig.host.release();
    rig.function.run();
    assert_eq!(rig.status(), 0);
}

const NORMAL: u32 = 1 << 14;
const ABRUPT: u32 = 2 << 14;
/// CSTS.SHST, and CSTS.RDY.
const OCCURRING: u32 = 1 | 1 << 2;
const SHUT_DOWN: u32 = 1 | 2 << 2;

/// Answers what the host was asked.
fn release(rig: &Rig) {
    assert_eq!(rig.host.release(), 1);
    rig.function.run();
}

#[test]
fn a_shutdown_occurs_and_then_is_complete() {
    for (kind, flushes) in [(NORMAL, 1), (ABRUPT, 0)] {
        let mut rig = Rig::ready();
        rig.create_pair(1);
        rig.host.books().holds = true;
        rig.write32(CC, ENABLE | kind);
        assert_eq!(
            (rig.status(), rig.host.books().flushes),
            (OCCURRING, 0),
            "commands are under way"
        );
        release(&rig);
        assert_eq!(rig.host.books().flushes, flushes);
        for _ in 0..flushes {
            assert_eq!(rig.status(), OCCURRING, "nothing is durable yet");
            release(&rig);
        }
        assert_eq!(rig.status(), SHUT_DOWN);
        rig.submit(identify(1, 0));
        assert_eq!(rig.answer(), None, "a controller that is shut down takes no commands");
        rig.host.books().holds = false;
        rig.write32(CC, 0);
        assert_eq!(rig.status(), 0);
        rig.enable();
        rig.identify(1, 0);
    }
    let rig = Rig::new();
    rig.write32(CC, NORMAL);
    assert_eq!(rig.status(), 2 << 2, "nothing runs");
}

#[test]
fn a_flush_that_fails_completes_the_shutdown_and_is_logged() {
    let mut rig = Rig::ready();
    rig.host.books().holds = true;
    rig.write32(CC, ENABLE | NORMAL);
    release(&rig);
    rig.function.report(QueueEvent::FlushFailed);
    release(&rig);
    assert_eq!(rig.status(), SHUT_DOWN);
    rig.host.books().holds = false;
    rig.write32(CC, 0);
    rig.enable();
    let log = rig.log_page(1, 64);
    assert_eq!((log[0], &log[8..12]), (1, &[0xFF; 4][..]), "it is no command's");
    assert_eq!(Status::from_field(u16::from_le_bytes([log[12], log[13]])), Status::WRITE_FAULT);
}

/// A flush takes as long as a disk likes, and clients wait for a reset for seconds only.
#[test]
fn no_reset_waits_for_a_flush_and_a_shutdown_waits_for_its_own() {
    let mut rig = Rig::ready();
    for reset in [false, true] {
        rig.host.books().holds = true;
        rig.write32(CC, ENABLE | NORMAL);
        release(&rig);
        assert_eq!(rig.status(), OCCURRING);
        if reset {
            let (done, over) = std::sync::mpsc::channel();
            rig.function.reset(Done::new(move || done.send(()).unwrap()));
            over.try_recv().unwrap();
        } else {
            rig.write32(CC, 0);
        }
        assert_eq!(rig.status(), 0);
        // Shut down again, before that flush is over.
        rig.enable();
        rig.identify(1, 0);
        let flushes = rig.host.books().flushes;
        rig.write32(CC, ENABLE | NORMAL);
        assert_eq!(rig.host.release(), 2, "the flush from before, and the queues");
        rig.function.run();
        assert_eq!((rig.status(), rig.host.books().flushes), (OCCURRING, flushes + 1));
        release(&rig);
        assert_eq!(rig.status(), SHUT_DOWN);
        rig.host.books().holds = false;
        rig.write32(CC, 0);
        rig.enable();
    }
    // One flush is under way at a time, however often it is shut down meanwhile.
    rig.host.books().flushes = 0;
    rig.host.books().holds = true;
    rig.write32(CC, ENABLE | NORMAL);
    release(&rig);
    for _ in 0..5 {
        rig.write32(CC, 0);
        rig.enable();
        rig.host.books().holds = false;
        rig.write32(CC, ENABLE | NORMAL);
        rig.host.books().holds = true;
        rig.function.run();
        assert_eq!((rig.status(), rig.host.books().flushes), (OCCURRING, 1));
    }
    release(&rig);
    assert_eq!((rig.status(), rig.host.books().flushes), (OCCURRING, 2));
    release(&rig);
    assert_eq!(rig.status(), SHUT_DOWN);
}

#[test]
fn a_disable_overtakes_a_shutdown() {
    let rig = Rig::ready();
    rig.host.books().holds = true;
    rig.write32(CC, ENABLE | NORMAL);
    rig.write32(CC, 0);
    assert_eq!(rig.host.books().stops, 1);
    rig.host.release();
    rig.function.run();
    assert_eq!(rig.status(), 0);
}

#[test]
fn a_reset_of_the_function_answers_when_it_is_over_and_leaves_nothing() {
    let mut rig = Rig::ready();
    rig.create_pair(1);
    rig.ok(set_features(8, 0x0A07));
    rig.host.books().holds = true;
    let (done, over) = std::sync::mpsc::channel();
    rig.function.reset(Done::new(move || done.send(()).unwrap()));
    assert!(over.try_recv().is_err(), "a queue is in flight");
    assert_eq!((rig.status(), rig.read32(CC), rig.read32(0x24)), (0, 0, 0));
    rig.host.release();
    rig.function.run();
    over.try_recv().unwrap();
    assert_eq!(rig.host.books().coalescing, (0, 0));
    // With nothing to stop it is over at once.
    let (done, over) = std::sync::mpsc::channel();
    rig.function.reset(Done::new(move || done.send(()).unwrap()));
    over.try_recv().unwrap();
    rig.host.books().holds = false;
    rig.enable();
    assert_eq!(rig.ok(get_features(8, 0)), 0);
}

#[test]
fn a_function_level_reset_is_a_bit_in_the_configuration_space() {
    let rig = Rig::ready();
    rig.function.write(Region::Config, 0x69, &[0x80]).unwrap();
    assert_eq!((rig.status(), rig.read32(CC), rig.read32(0x28)), (0, 0, 0));
}

#[test]
fn registers_obey_dwords_and_nothing_else() {
    let rig = Rig::new();
    for (offset, data) in
        [(0x14, &[0xFF][..]), (0x14, &[0xFF; 2]), (0x12, &[0xFF; 4]), (0x24, &[0xFF; 8])]
    {
        rig.function.write(Region::Bar(0), offset, data).unwrap();
    }
    rig.function.write(Region::Bar(0), 0x10, &[0xFF; 16]).unwrap();
    rig.function.write(Region::Bar(0), 0x28, &[]).unwrap();
    assert_eq!((rig.read32(CC), rig.read32(0x24), rig.status()), (0, 0, 0));
    let mut page = [0xAA; 4096];
    rig.function.read(Region::Bar(0), 0x1000, &mut page).unwrap();
    assert_eq!(page, [0; 4096], "doorbells read as zeros");
}

#[test]
fn the_admin_queue_is_made_anew_wherever_it_is_put() {
    let mut rig = Rig::ready();
    for _ in 0..3 {
        rig.identify(1, 0);
        // While it is enabled AQA, ASQ and ACQ do not count.
        rig.write64(0x28, 0);
        rig.write64(0x30, u64::MAX);
        rig.write32(0x24, 0);
        rig.identify(1, 0);
        rig.write32(CC, 0);
        rig.enable();
    }
}

#[test]
fn more_commands_than_are_taken_at_once_are_carried_out_by_and_by() {
    let mut rig = Rig::new();
    rig.enable_with(1024);
    for _ in 0..1000 {
        rig.queue(get_features(1, 0));
    }
    rig.ring();
    let mut answers = 0;
    for _ in 0..1000 {
        answers += std::iter::from_fn(|| rig.answer()).count();
        rig.function.run();
    }
    assert_eq!(answers, 1000);
}

#[test]
fn interrupts_of_the_admin_queue_are_vector_0() {
    let mut rig = Rig::ready();
    rig.submit(identify(1, 0));
    let mut pending = [0; 8];
    rig.function.read(Region::Bar(4), 4096, &mut pending).unwrap();
    assert_eq!(pending[0], 1);
    let event = EventFd::new().unwrap();
    rig.function.set_vector(0, Some(event.as_fd().try_clone_to_owned().unwrap())).unwrap();
    assert_eq!(event.drain(), 1, "what was pending is signalled");
    for _ in 0..3 {
        rig.queue(get_features(1, 0));
    }
    rig.ring();
    assert_eq!(event.drain(), 1, "once for all that is posted in a go");
    // A mask that the client passes on.
    rig.function.write(Region::Bar(4), 12, &1_u32.to_le_bytes()).unwrap();
    assert!(!rig.host.books().events[&0]);
    rig.submit(get_features(1, 0));
    assert_eq!(event.drain(), 0);
    rig.function.write(Region::Bar(4), 12, &0_u32.to_le_bytes()).unwrap();
    assert_eq!((event.drain(), rig.host.books().events[&0]), (1, true));
    assert!(rig.function.set_vector(64, None).is_err());
    let (pipe, _other_end) = rustix::pipe::pipe().unwrap();
    assert!(rig.function.set_vector(1, Some(pipe)).is_err());
    rig.host.books().pending.push(9);
    rig.function.read(Region::Bar(4), 4096, &mut pending).unwrap();
    assert_eq!(pending[1], 2);
}

#[test]
fn a_function_with_msi_needs_no_memory_for_it_and_is_masked_by_registers() {
    const INTMS: u64 = 0x0C;
    const INTMC: u64 = 0x10;
    let mut rig = Rig::with(Options { interrupts: Interrupts::Msi, ..Options::default() });
    rig.enable();
    assert_eq!((rig.function.interrupts(), rig.function.vectors()), (Interrupts::Msi, 32));
    assert!(
        rig.function.bar(4).is_none() && rig.function.read(Region::Bar(4), 0, &mut [0; 4]).is_err()
    );
    assert!(rig.function.set_vector(32, None).is_err() && rig.function.signal(32).is_err());
    let event = EventFd::new().unwrap();
    rig.function.set_vector(0, Some(event.as_fd().try_clone_to_owned().unwrap())).unwrap();
    rig.write32(INTMS, 0b11);
    assert!(!rig.host.books().events[&0] && rig.host.books().events.contains_key(&1));
    rig.submit(get_features(1, 0));
    assert_eq!(event.drain(), 0);
    rig.write32(INTMC, 0b01);
    assert_eq!((event.drain(), rig.host.books().events[&0], rig.read32(INTMS)), (1, true, 0b10));
    rig.answer().unwrap();
    // A controller reset leaves nothing masked.
    rig.write32(INTMS, 0b01);
    assert!(!rig.host.books().events[&0]);
    rig.write32(CC, 0);
    assert!(rig.host.books().events[&0]);
    assert_eq!(rig.read32(INTMS), 0);
}

#[test]
fn a_client_has_its_own_interrupts_signalled() {
    let rig = Rig::ready();
    let event = EventFd::new().unwrap();
    rig.function.set_vector(9, Some(event.as_fd().try_clone_to_owned().unwrap())).unwrap();
    rig.function.signal(9).unwrap();
    rig.function.signal(8).unwrap();
    assert_eq!(event.drain(), 1);
    rig.function.set_vector(9, None).unwrap();
    rig.function.signal(9).unwrap();
    assert_eq!(event.drain(), 0);
    assert!(rig.function.signal(64).is_err());
}

#[test]
fn the_admin_queue_waits_for_memory_that_it_is_in() {
    let mut rig = Rig::ready();
    rig.identify(1, 0);
    let (done, over) = std::sync::mpsc::channel();
    rig.function.set_memory(GuestMemory::empty(), Done::new(move || done.send(()).unwrap()));
    over.try_recv().unwrap();
    let id = rig.submit(get_features(1, 0));
    assert_eq!(rig.peek_answer(), None);
    assert_eq!(rig.status(), 1, "it is not fatal: clients take memory away and bring it back");
    let halves = [rig.region(BASE, 2 << 20), rig.region(BASE + (2 << 20), 2 << 20)];
    rig.function.set_memory(GuestMemory::map(halves.into()).unwrap(), Done::ignored());
    assert_eq!(rig.answer().unwrap().id, id);
    rig.identify(1, 0);
}

#[test]
fn memory_that_is_truncated_makes_the_controller_fatal_and_nothing_else() {
    sidecore_memory::sigbus::install().unwrap();
    let mut rig = Rig::ready();
    rig.identify(1, 0);
    rig.truncate();
    let tail = rig.tail_doorbell(0);
    rig.write32(tail, 5);
    rig.function.run();
    assert_eq!(rig.status() & 2, 2);
}

#[test]
fn an_offline_controller_cannot_be_enabled() {
    let mut rig = Rig::ready();
    let (done, over) = std::sync::mpsc::channel();
    rig.function.set_online(false, Done::new(move || done.send(()).unwrap()));
    over.try_recv().unwrap();
    assert_eq!(rig.status(), 2);
    rig.write32(CC, ENABLE);
    assert_eq!(rig.status(), 2);
    rig.function.reset(Done::ignored());
    assert_eq!(rig.status(), 2);
    rig.function.set_online(true, Done::ignored());
    assert_eq!(rig.status(), 0);
    rig.enable();
    rig.identify(1, 0);
    rig.function.set_queue_pairs(2);
    assert_eq!(rig.ok(set_features(7, 0x3F_003F)), 1 << 16 | 1);
}

#[test]
fn the_worker_thread_handles_replies_from_other_threads() {
    let worker = sidecore_nvme::ControllerWorker::start().unwrap();
    let mut rig = Rig::ready_with(Options { worker: Some(worker.clone()), ..Options::default() });
    rig.create_pair(1);
    rig.host.books().holds = true;
    let event = EventFd::new().unwrap();
    rig.function.set_vector(0, Some(event.as_fd().try_clone_to_owned().unwrap())).unwrap();
    event.drain();
    let id = rig.submit(delete_submission_queue(1));
    let host = Arc::clone(&rig.host);
    std::thread::spawn(move || host.release()).join().unwrap();
    // The interrupt says that it is there.
    rustix::event::poll(
        &mut [rustix::event::PollFd::new(&event, rustix::event::PollFlags::IN)],
        Some(&rustix::event::Timespec { tv_sec: 60, tv_nsec: 0 }),
    )
    .unwrap();
    assert_eq!(rig.answer().unwrap().id, id);
    drop(rig);
    drop(worker);
}

#[test]
fn the_keep_alive_timer_wants_to_be_run() {
    let mut rig = Rig::ready_with(Options { mapped: false, ..Options::default() });
    assert_eq!(rig.function.run(), None);
    rig.ok(set_features(0x0F, 60_000));
    let first = rig.function.run().unwrap();
    rig.ok(Command::build(0x18, 0, 0));
    assert!(rig.function.run().unwrap() > first);
    rig.write32(CC, 0);
    assert_eq!(rig.function.run(), None);
    assert_eq!(rig.read32(CSTS), 0);
}
