//! Asynchronous events, wrong doorbells, and completion queues that are full.

mod controller_rig;

use controller_rig::{
    Answer, CC, DATA, Rig, event_request, get_log_page, identify, namespace, set_features,
};
use sidecore_nvme::{Command, Done, QueueEvent, Status};

#[test]
fn a_changed_namespace_is_told_once_until_its_log_is_read() {
    let mut rig = Rig::ready();
    rig.ok(set_features(0x0B, 0x100));
    let request = rig.submit(event_request());
    assert_eq!(rig.answer(), None);
    rig.function.set_namespace(Some(namespace(2, 4096)), Done::ignored());
    let answer = rig.answer().unwrap();
    assert_eq!((answer.id, answer.result, answer.status), (request, 0x04_0002, Status::SUCCESS));
    assert_eq!(&rig.identify(0, 1)[..8], &512_u64.to_le_bytes());
    rig.submit(event_request());
    rig.function.set_namespace(None, Done::ignored());
    assert_eq!(rig.answer(), None, "masked until the log is read");
    assert_eq!(&rig.identify(2, 0)[..4], &[0; 4]);
    assert_eq!(rig.identify(0, 1), vec![0; 4096], "inactive");
    // Reading it with Retain Asynchronous Event clears nothing.
    rig.ok(get_log_page(4 | 1 << 15, 4096));
    assert_eq!(rig.peek(DATA, 8), [1, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(rig.log_page(4, 8), [1, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(rig.log_page(4, 8), [0; 8]);
    rig.function.set_namespace(Some(namespace(1, 512)), Done::ignored());
    assert_eq!(rig.answer().unwrap().result, 0x04_0002);
}

#[test]
fn a_host_that_wants_no_notices_gets_none() {
    let mut rig = Rig::ready();
    rig.submit(event_request());
    rig.function.set_namespace(None, Done::ignored());
    assert_eq!(rig.answer(), None);
    assert_eq!(rig.log_page(4, 4), [1, 0, 0, 0]);
}

#[test]
fn event_requests_are_limited_and_can_be_aborted() {
    let mut rig = Rig::ready();
    let requests: Vec<_> = (0..4).map(|_| rig.submit(event_request())).collect();
    rig.refused(event_request(), Status::ASYNC_EVENT_LIMIT_EXCEEDED);
    let abort = Command::build(0x08, 0, 0).with_dword(10, u32::from(requests[2]) << 16);
    rig.submit(abort);
    let answers: Vec<Answer> = std::iter::from_fn(|| rig.answer()).collect();
    assert_eq!((answers[0].id, answers[0].status), (requests[2], Status::ABORT_REQUESTED));
    assert_eq!((answers[1].result, answers[1].status), (0, Status::SUCCESS));
    assert_eq!(rig.ok(abort), 1, "it is gone");
    rig.refused(Command::build(0x08, 0, 0).with_dword(10, 9), Status::INVALID_FIELD);
    // A reset forgets the requests.
    rig.write32(CC, 0);
    rig.enable();
    for _ in 0..4 {
        rig.submit(event_request());
    }
    assert_eq!(rig.answer(), None);
}

#[test]
fn temperatures_are_warned_of() {
    let mut rig = Rig::ready();
    let request = rig.submit(event_request());
    rig.ok(set_features(0x0B, 0xFF));
    rig.submit(set_features(0x04, 300));
    let answers: Vec<Answer> = std::iter::from_fn(|| rig.answer()).collect();
    let event = answers.iter().find(|answer| answer.id == request).unwrap();
    assert_eq!(event.result, 0x02_0101);
    assert_eq!(rig.log_page(2, 512)[0], 2);
}

#[test]
fn doorbells_that_are_wrong_have_no_effect_and_are_told() {
    let mut rig = Rig::ready();
    let request = rig.submit(event_request());
    rig.write32(rig.tail_doorbell(0), 32);
    let answer = rig.answer().unwrap();
    assert_eq!((answer.id, answer.result), (request, 0x01_0100), "invalid doorbell write value");
    assert_eq!(rig.log_page(1, 64)[8..12], [0xFF; 4], "it is no command's");
    rig.submit(event_request());
    // A queue that there is not, a place between doorbells, and one behind them all.
    for offset in [rig.tail_doorbell(3), rig.tail_doorbell(0) + 4, 0xF_FFFC] {
        rig.write32(offset, 1);
    }
    assert_eq!(rig.answer().unwrap().result, 0x01_0000, "invalid doorbell register");
    rig.identify(1, 0);
    // A head that is past what was posted.
    rig.log_page(1, 64);
    rig.submit(event_request());
    let head = rig.head_doorbell(0);
    rig.write32(head, 31);
    rig.write32(head, u32::MAX);
    assert_eq!(rig.answer().unwrap().result, 0x01_0100);
    assert_eq!(rig.status(), 1, "none of it is fatal");
}

#[test]
fn queues_report_what_they_find() {
    let mut rig = Rig::ready();
    rig.submit(event_request());
    rig.function.report(QueueEvent::InvalidDoorbellValue { queue: 1 });
    rig.function.run();
    assert_eq!(rig.answer().unwrap().result, 0x01_0100);
    rig.function.report(QueueEvent::Fatal { queue: 1 });
    rig.function.run();
    assert_eq!(rig.status(), 0b11, "ready, and fatal");
    rig.submit(identify(1, 0));
    assert_eq!(rig.answer(), None);
    rig.write32(CC, 0);
    assert_eq!(rig.status(), 0);
    rig.enable();
    rig.identify(1, 0);
}

#[test]
fn a_full_completion_queue_stops_the_queue_until_its_head_moves() {
    let mut rig = Rig::new();
    rig.enable_with(4);
    for _ in 0..3 {
        rig.queue(identify(1, 0));
    }
    rig.ring();
    let answers: Vec<_> = std::iter::from_fn(|| rig.peek_answer()).collect();
    assert_eq!(answers.len(), 3, "one entry is always free");
    rig.submit(identify(1, 0));
    assert_eq!(rig.peek_answer(), None);
    rig.write32(rig.head_doorbell(0), 3);
    assert_eq!(rig.peek_answer().unwrap().id, 4);
}

#[test]
fn an_event_for_a_full_completion_queue_is_posted_when_there_is_room() {
    let mut rig = Rig::new();
    rig.enable_with(4);
    rig.ok(set_features(0x0B, 0x100));
    let request = rig.submit(event_request());
    rig.queue(identify(1, 0));
    rig.queue(identify(1, 0));
    rig.ring();
    rig.submit(identify(1, 0));
    let answers: Vec<_> = std::iter::from_fn(|| rig.peek_answer()).collect();
    assert_eq!(answers.len(), 3);
    rig.function.set_namespace(None, Done::ignored());
    assert_eq!(rig.peek_answer(), None);
    rig.write32(rig.head_doorbell(0), 0);
    assert_eq!(rig.peek_answer().unwrap().id, request);
}

#[test]
fn commands_of_io_queues_are_aborted_where_the_queue_is() {
    let mut rig = Rig::ready();
    rig.create_pair(9);
    let abort = Command::build(0x08, 0, 0).with_dword(10, 7 << 16 | 9);
    let ids: Vec<_> = (0..4).map(|_| rig.submit(abort)).collect();
    rig.refused(abort, Status::ABORT_LIMIT_EXCEEDED);
    let aborts = std::mem::take(&mut rig.host.books().aborts);
    for (index, (queue, command, reply)) in aborts.into_iter().enumerate() {
        assert_eq!((queue, command), (9, 7));
        reply(index == 0);
    }
    rig.function.run();
    let answers: Vec<Answer> = std::iter::from_fn(|| rig.answer()).collect();
    assert_eq!(answers.iter().map(|answer| answer.id).collect::<Vec<_>>(), ids);
    assert_eq!(answers.iter().map(|answer| answer.result).collect::<Vec<_>>(), [0, 1, 1, 1]);
    // One that is never answered.
    let id = rig.submit(abort);
    rig.host.books().aborts.clear();
    rig.function.run();
    let answer = rig.answer().unwrap();
    assert!(answer.id == id && answer.status.is_same_code(Status::INTERNAL_ERROR));
}
