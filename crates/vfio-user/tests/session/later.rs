//! Commands that take time, resets, and the end of a session.

use sidecore_vfio_user::{Answer, Body, Command, Message, ProtocolError};

use crate::common::*;
use crate::fixture::*;

#[test]
fn what_takes_time_is_answered_when_it_is_done() {
    let mut fixture = Fixture::new();
    fixture.map(0, PAGE);
    fixture.function.hold(true);
    let asks = [
        (dma_map(map(PAGE, PAGE)), vec![memfd(PAGE)], Body::Empty),
        (dma_unmap(unmap(0, PAGE)), vec![], Body::DmaUnmap(unmap(0, PAGE))),
        (reset(), vec![], Body::Empty),
    ];
    for (number, (ask, fds, body)) in (1..).zip(asks) {
        let command = ask.0;
        assert!(matches!(fixture.handle(ask, fds), Ok(Answer::Later)));
        assert!(fixture.session.is_waiting());
        assert!(matches!(fixture.session.resume(), Answer::Later));
        let early = fixture.handle(reset(), Vec::new()).unwrap_err();
        assert_eq!(early, ProtocolError::OutOfTurn { command: Command::DeviceReset });
        fixture.function.release();
        assert_eq!(fixture.woken(), number);
        let Answer::Reply(reply) = fixture.session.resume() else { panic!() };
        assert_eq!((reply.id, reply.command, reply.body), (42, command, body));
        assert!(matches!(fixture.session.resume(), Answer::Nothing));
    }
    assert_eq!(fixture.function.memory().region_count(), 1);
    fixture.function.hold(false);
}

#[test]
fn who_wants_no_reply_gets_none_later_either() {
    let mut fixture = Fixture::new();
    fixture.function.hold(true);
    let message = Message::command(1, Command::DeviceReset, Body::Empty, Vec::new()).without_reply();
    assert!(matches!(fixture.session.handle(message), Ok(Answer::Later)));
    fixture.function.release();
    assert!(matches!(fixture.session.resume(), Answer::Nothing));
    assert!(!fixture.session.is_waiting());
    fixture.function.hold(false);
}

#[test]
fn a_reset_keeps_memory_and_eventfds() {
    let mut fixture = Fixture::new();
    fixture.map(0, PAGE);
    fixture.succeeds(set_irqs(irqs(EVENTFD, MSIX, 0, 1)), vec![event()]);
    fixture.function.take_events();
    fixture.succeeds(reset(), Vec::new());
    assert_eq!(fixture.function.events(), [Event::Reset]);
}

#[test]
fn the_end_is_one_step_after_the_other() {
    let mut fixture = Fixture::new();
    fixture.map(0, PAGE);
    fixture.succeeds(set_irqs(irqs(EVENTFD, MSIX, 7, 1)), vec![event()]);
    fixture.function.take_events();
    fixture.function.hold(true);
    assert!(matches!(fixture.handle(dma_map(map(PAGE, PAGE)), vec![memfd(PAGE)]), Ok(Answer::Later)));
    let asked = Event::Memory(2, 2 * PAGE);
    assert!(!fixture.session.end() && !fixture.session.end());
    assert_eq!(fixture.function.take_events(), [asked], "what was asked last is waited for");
    fixture.function.release();
    assert!(!fixture.session.end() && !fixture.session.end());
    assert_eq!(fixture.function.take_events(), [Event::Vector(7, false), Event::Reset]);
    fixture.function.release();
    assert!(!fixture.session.end() && !fixture.session.end());
    assert_eq!(fixture.function.take_events(), [Event::Memory(0, 0)]);
    fixture.function.release();
    assert!(fixture.session.end() && fixture.session.end());
    assert_eq!(fixture.woken(), 3);
    let command = Command::DeviceReset;
    assert_eq!(fixture.handle(reset(), Vec::new()).unwrap_err(), ProtocolError::OutOfTurn { command });
    drop(fixture.session);
    assert_eq!(fixture.function.events(), []);
}

#[test]
fn a_session_that_is_dropped_lets_go_of_everything() {
    let mut fixture = Fixture::new();
    fixture.map(0, PAGE);
    fixture.succeeds(set_irqs(irqs(EVENTFD, MSIX, 7, 1)), vec![event()]);
    fixture.function.take_events();
    drop(fixture.session);
    assert_eq!(fixture.function.events(), [Event::Vector(7, false), Event::Reset, Event::Memory(0, 0)]);
}
