//! Admin commands: queues, identify, features, log pages.

mod controller_rig;

use controller_rig::{
    BASE, CC, DATA, ENABLE, MEMORY_BYTES, Options, QUEUES, Rig, create_completion_queue,
    create_submission_queue, delete_completion_queue, delete_submission_queue, get_features,
    get_log_page, identify, set_features,
};
use sidecore_memory::GuestAddress;
use sidecore_nvme::{Command, Status};

#[test]
fn queues_are_created_only_as_they_can_be() {
    let mut rig = Rig::ready();
    let refused = |rig: &mut Rig, command: Command, status| rig.refused(command, status);
    let cq = create_completion_queue(1);
    for id in [0, 65, 0xFFFF] {
        refused(&mut rig, create_completion_queue(id), Status::INVALID_QUEUE_ID);
    }
    for size in [0, 0xFFFF] {
        refused(&mut rig, cq.with_dword(10, size << 16 | 1), Status::INVALID_QUEUE_SIZE);
    }
    refused(&mut rig, cq.with_dword(11, 0b10), Status::INVALID_FIELD);
    refused(&mut rig, cq.with_dword(11, 64 << 16 | 0b11), Status::INVALID_INTERRUPT_VECTOR);
    refused(&mut rig, cq.with_prps(QUEUES + 8, 0), Status::INVALID_PRP_OFFSET);
    refused(&mut rig, cq.with_prps(BASE + MEMORY_BYTES, 0), Status::DATA_TRANSFER_ERROR);
    refused(&mut rig, create_submission_queue(1, 1), Status::INVALID_COMPLETION_QUEUE);
    rig.ok(cq);
    refused(&mut rig, cq, Status::INVALID_QUEUE_ID);
    let sq = create_submission_queue(1, 1);
    for completion_queue in [0, 65] {
        let command = create_submission_queue(1, completion_queue);
        refused(&mut rig, command, Status::INVALID_QUEUE_ID);
    }
    refused(&mut rig, create_submission_queue(1, 2), Status::INVALID_COMPLETION_QUEUE);
    refused(&mut rig, sq.with_dword(11, 1 << 16), Status::INVALID_FIELD);
    rig.ok(sq);
    refused(&mut rig, sq, Status::INVALID_QUEUE_ID);
    // Several submission queues complete into one completion queue.
    rig.ok(create_submission_queue(7, 1));
    refused(&mut rig, delete_completion_queue(1), Status::INVALID_QUEUE_DELETION);
    refused(&mut rig, delete_completion_queue(0), Status::INVALID_QUEUE_ID);
    refused(&mut rig, delete_submission_queue(0), Status::INVALID_QUEUE_ID);
    refused(&mut rig, delete_submission_queue(2), Status::INVALID_QUEUE_ID);
    for id in [1, 7] {
        rig.ok(delete_submission_queue(id));
    }
    rig.ok(delete_completion_queue(1));
    rig.ok(create_completion_queue(1).with_dword(11, 0xFFFF_0001));
    assert_eq!(
        rig.host.books().completion[&1],
        None,
        "a polled queue has no vector, whatever the field says"
    );
}

#[test]
fn queues_need_entry_sizes_and_a_grant() {
    let mut rig = Rig::new();
    rig.enable();
    rig.write32(CC, 1);
    rig.refused(create_completion_queue(1), Status::INVALID_QUEUE_SIZE);
    rig.write32(CC, ENABLE);
    assert_eq!(rig.ok(set_features(7, 3 << 16 | 1)), 3 << 16 | 1);
    for id in 1..=4 {
        rig.ok(create_completion_queue(id));
    }
    rig.refused(create_completion_queue(5), Status::INVALID_QUEUE_ID);
    rig.ok(create_submission_queue(2, 4));
    rig.refused(create_submission_queue(3, 4), Status::INVALID_QUEUE_ID);
    rig.refused(set_features(7, 3), Status::COMMAND_SEQUENCE_ERROR);
}

#[test]
fn deleting_a_queue_with_commands_in_flight_delays_no_other_command() {
    let mut rig = Rig::ready();
    rig.create_pair(1);
    rig.host.books().holds = true;
    let deletion = rig.submit(delete_submission_queue(1));
    assert_eq!(rig.answer(), None);
    rig.refused(delete_submission_queue(1), Status::INVALID_QUEUE_ID);
    rig.refused(create_submission_queue(1, 1), Status::INVALID_QUEUE_ID);
    rig.refused(delete_completion_queue(1), Status::INVALID_QUEUE_DELETION);
    rig.identify(1, 0);
    rig.host.release();
    rig.function.run();
    let answer = rig.answer().unwrap();
    assert_eq!((answer.id, answer.status), (deletion, Status::SUCCESS));
    // And the same of the completion queue, over a reset: its answer belongs to a queue that is
    // gone.
    rig.submit(delete_completion_queue(1));
    rig.refused(create_submission_queue(1, 1), Status::INVALID_COMPLETION_QUEUE);
    rig.write32(CC, 0);
    assert_eq!(rig.host.release(), 2);
    rig.function.run();
    rig.host.books().holds = false;
    rig.enable();
    assert_eq!(rig.answer(), None);
    rig.create_pair(1);
}

#[test]
fn identify_refuses_what_it_does_not_have() {
    let mut rig = Rig::ready();
    for (structure, nsid, status) in [
        (0x00, 0, Status::INVALID_NAMESPACE),
        (0x00, 2, Status::INVALID_NAMESPACE),
        (0x00, u32::MAX, Status::INVALID_NAMESPACE),
        (0x02, 0xFFFF_FFFE, Status::INVALID_NAMESPACE),
        (0x02, u32::MAX, Status::INVALID_NAMESPACE),
        (0x03, 2, Status::INVALID_NAMESPACE),
        (0x04, 0, Status::INVALID_FIELD),
        (0x10, 0, Status::INVALID_FIELD),
        (0x11, 1, Status::INVALID_FIELD),
        (0x14, 0, Status::INVALID_FIELD),
        (0x15, 0, Status::INVALID_FIELD),
        (0x1C, 0, Status::INVALID_FIELD),
        (0xFF, 0, Status::INVALID_FIELD),
    ] {
        rig.refused(identify(structure, nsid), status);
    }
    // Another command set.
    rig.refused(identify(6, 0).with_dword(11, 2 << 24), Status::INVALID_FIELD);
    // Data pointers that are wrong.
    rig.refused(identify(1, 0).with_prps(DATA + 1, 0), Status::INVALID_PRP_OFFSET);
    rig.refused(identify(1, 0).with_prps(BASE + MEMORY_BYTES, 0), Status::DATA_TRANSFER_ERROR);
    rig.refused(
        identify(1, 0).with_prps(DATA + 2048, u64::MAX - 4095),
        Status::DATA_TRANSFER_ERROR,
    );
    for flags in [1, 2, 0x40, 0x80, 0xC0] {
        rig.refused(identify(1, 0).with_dword(0, 0x06 | flags << 8), Status::INVALID_FIELD);
    }
    // Data that begins within a page goes on in the next one that is named.
    rig.ok(identify(1, 0).with_prps(DATA + 4096 - 80, DATA + 8192));
    assert_eq!(rig.peek(DATA + 4096 - 80 + 4, 6), b"SERIAL");
    // The list of a subsystem that is this controller and nothing else.
    assert_eq!(&rig.identify(0x13, 0)[..4], &[1, 0, 1, 0]);
    assert_eq!(&rig.identify(0x12, 1)[..4], &[1, 0, 1, 0]);
    assert_eq!(&rig.identify(0x13 | 2 << 16, 0)[..4], &[0; 4], "none from 2 on");
}

#[test]
fn commands_that_are_not_supported_are_invalid() {
    let mut rig = Rig::ready();
    // Firmware, self-test, namespaces and virtualization of a virtual function, doorbell buffers
    // that are not needed, Format NVM, Security, Sanitize, directives, and numbers that mean
    // nothing.
    for opcode in [
        0x10, 0x11, 0x14, 0x0D, 0x15, 0x1C, 0x7C, 0x80, 0x81, 0x82, 0x84, 0x19, 0x1A, 0x03, 0x7F,
        0xC0, 0xFF,
    ] {
        rig.refused(Command::build(opcode, 0, 0), Status::INVALID_OPCODE);
    }
}

#[test]
fn features_are_what_was_set_until_a_reset() {
    let mut rig = Rig::ready();
    for (feature, value, read_back) in [
        (0x01, 0x0102_0303, 0x0102_0303),
        (0x02, 0x40, 0x40),
        (0x04, 0x0160, 0x0160),
        (0x05, 0x1234, 0x1234),
        (0x08, 0x0A07, 0x0A07),
        (0x0A, 1, 1),
        (0x0B, 0xFFFF_FFFF, 0x1FF),
        (0x0F, 1500, 2000),
    ] {
        let default = rig.ok(get_features(feature, 0));
        assert_eq!(rig.ok(set_features(feature, value)), 0);
        assert_eq!(rig.ok(get_features(feature, 0)), read_back, "{feature:#x}");
        for select in [1, 2] {
            assert_eq!(rig.ok(get_features(feature | select << 8, 0)), default, "{feature:#x}");
        }
        let namespace_specific = if feature == 5 { 2 } else { 0 };
        assert_eq!(
            rig.ok(get_features(feature | 3 << 8, 0)),
            4 | namespace_specific,
            "{feature:#x}"
        );
        rig.refused(get_features(feature | 4 << 8, 0), Status::INVALID_FIELD);
        rig.refused(set_features(feature | 1 << 31, value), Status::FEATURE_NOT_SAVEABLE);
    }
    assert_eq!(rig.host.books().coalescing, (8, 1000));
    rig.ok(set_features(0x0F, 0));
    rig.ok(set_features(0x09, 5 | 1 << 16));
    assert_eq!(rig.ok(get_features(0x09, 5)), 5 | 1 << 16);
    assert_eq!(rig.ok(get_features(0x09, 6)), 6);
    assert!(!rig.host.books().coalesced[&5]);
    rig.write32(CC, 0);
    assert_eq!(rig.host.books().coalescing, (0, 0));
    assert!(rig.host.books().coalesced[&5]);
    rig.enable();
    assert_eq!(rig.ok(get_features(0x0A, 0)), 0);
    assert_eq!(rig.ok(get_features(0x07, 0)), 63 << 16 | 63);
}

#[test]
fn features_refuse_what_cannot_be() {
    let mut rig = Rig::ready();
    for feature in [0x00, 0x03, 0x0C, 0x0D, 0x0E, 0x10, 0x11, 0x16, 0x17, 0x80, 0x81, 0xC0, 0xFF] {
        rig.refused(get_features(feature, 0), Status::INVALID_FIELD);
        rig.refused(set_features(feature, 0), Status::INVALID_FIELD);
    }
    for (feature, value) in [
        (0x02, 1),
        (0x04, 1 << 16),
        (0x04, 2 << 20),
        (0x05, 1 << 16),
        (0x07, 0xFFFF),
        (0x07, 0xFFFF << 16),
        (0x09, 64),
        // The RAM behind the namespace has no volatile cache.
        (0x06, 0),
    ] {
        rig.refused(set_features(feature, value), Status::INVALID_FIELD);
    }
    rig.refused(get_features(0x06, 0), Status::INVALID_FIELD);
    rig.refused(get_features(0x09, 64), Status::INVALID_FIELD);
    let of_namespace = |nsid, feature| Command::build(0x09, 0, nsid).with_dword(10, feature);
    rig.refused(of_namespace(1, 1), Status::FEATURE_NOT_NAMESPACE_SPECIFIC);
    rig.refused(of_namespace(2, 5), Status::INVALID_NAMESPACE);
    rig.ok(of_namespace(1, 5));
    rig.ok(of_namespace(u32::MAX, 1));
}

#[test]
fn log_pages_have_lengths_and_offsets() {
    let mut rig = Rig::ready();
    let health = rig.log_page(2, 512);
    assert_eq!((health[0], &health[1..3], health[3]), (0, &300_u16.to_le_bytes()[..], 100));
    assert_eq!((health[32], health[80]), (2, 7), "data units are rounded up");
    assert_eq!(&rig.log_page(3, 512)[..9], b"\x01\0\0\0\0\0\0\x000");
    let supported = rig.log_page(0, 1024);
    let listed: Vec<_> = (0..256).filter(|page| supported[page * 4] == 1).collect();
    assert_eq!(listed, [0, 1, 2, 3, 4, 5, 0x12, 0x13]);
    for page in listed {
        rig.log_page(page as u32, 4);
    }
    // A part from the middle, and more than there is.
    rig.fill(DATA, 0xAA, 4096);
    rig.ok(get_log_page(2, 1024).with_dword(12, 32));
    let part = rig.peek(DATA, 1028);
    assert_eq!((part[0], &part[480..1024], &part[1024..]), (2, &[0; 544][..], &[0xAA; 4][..]));
    rig.ok(get_log_page(2, 4).with_dword(12, 512));
    for (dword, value) in [(12, 516), (12, 2), (13, 1), (14, 1 << 23), (11, 0xFFFF)] {
        rig.refused(get_log_page(2, 4).with_dword(dword, value), Status::INVALID_FIELD);
    }
    for page in [0x06, 0x07, 0x0D, 0x80, 0xFF] {
        rig.refused(get_log_page(page, 4), Status::INVALID_LOG_PAGE);
    }
    let of_namespace = get_log_page(2, 512).with_dword(1, 1);
    rig.refused(of_namespace, Status::INVALID_FIELD);
    rig.ok(get_log_page(2, 512).with_dword(1, u32::MAX));
}

#[test]
fn errors_are_logged_and_counted() {
    let mut rig = Rig::ready();
    let answer = rig.admin(Command::build(0xFF, 0, 3));
    assert_eq!(answer.status, Status::INVALID_OPCODE.more());
    assert!(answer.status.is_do_not_retry());
    let log = rig.log_page(1, 128);
    assert_eq!((log[0], log[8], log[24], log[31]), (1, 0, 3, 0xFF));
    assert_eq!(u16::from_le_bytes([log[10], log[11]]), answer.id);
    assert_eq!(
        Status::from_field(u16::from_le_bytes([log[12], log[13]])),
        Status::INVALID_OPCODE.more()
    );
    assert_eq!((log[63], &log[64..]), (1, &[0; 64][..]));
    assert_eq!(rig.log_page(2, 512)[176], 1);
    rig.write32(CC, 0);
    rig.enable();
    assert_eq!(rig.log_page(1, 64)[0], 1, "the log outlives a reset");
}

#[test]
fn doorbell_buffers_are_for_functions_whose_doorbells_are_messages() {
    let mut rig = Rig::ready_with(Options { mapped: false, ..Options::default() });
    assert_eq!(rig.read32(4) & 0xF, 0, "DSTRD");
    let controller = rig.identify(1, 0);
    assert_eq!(u16::from_le_bytes([controller[256], controller[257]]), 1 << 8);
    let config = |shadow, event| Command::build(0x7C, 0, 0).with_prps(shadow, event);
    rig.refused(config(DATA + 4, DATA), Status::INVALID_FIELD);
    rig.refused(config(DATA, BASE + MEMORY_BYTES), Status::INVALID_FIELD);
    rig.ok(config(DATA, DATA + 4096));
    assert_eq!(rig.host.books().shadow, Some((GuestAddress(DATA), GuestAddress(DATA + 4096))));
    rig.create_pair(5);
    rig.write32(rig.tail_doorbell(5), 3);
    rig.write32(rig.head_doorbell(5), 2);
    assert_eq!(rig.host.books().kicks, [5, 5]);
    assert_eq!((rig.doorbells.submission_tail(5), rig.doorbells.completion_head(5)), (3, 2));
    rig.write32(CC, 0);
    assert_eq!(rig.host.books().shadow, None);
    rig.enable();
    rig.create_pair(5);
    assert_eq!((rig.doorbells.submission_tail(5), rig.doorbells.completion_head(5)), (0, 0));
}
