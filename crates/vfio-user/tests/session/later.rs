//! Commands that take time, resets, and the end of a session.

use std::thread::{self, JoinHandle};

use sidecore_vfio_user::{Body, Command, Message, ProtocolError};

use crate::common::*;
use crate::fixture::*;

/// Runs a call of the session that takes time, on another thread.
fn later<T: Send + 'static>(
    mut fixture: Fixture,
    call: impl FnOnce(&mut Fixture) -> T + Send + 'static,
) -> JoinHandle<(Fixture, T)> {
    let function = fixture.function.clone();
    let called = thread::spawn(move || {
        let result = call(&mut fixture);
        (fixture, result)
    });
    wait_until(|| function.is_held());
    assert!(!called.is_finished());
    called
}

#[test]
fn a_command_that_takes_time_is_answered_when_the_function_is_done() {
    let mut fixture = Fixture::new();
    fixture.map(0, PAGE);
    fixture.function.hold(true);
    let function = fixture.function.clone();
    let asks = [
        (dma_map(map(PAGE, PAGE)), vec![memfd(PAGE)], Body::Empty),
        (dma_unmap(unmap(0, PAGE)), vec![], Body::DmaUnmap(unmap(0, PAGE))),
        (reset(), vec![], Body::Empty),
    ];
    for (ask, fds, body) in asks {
        let command = ask.0;
        let called = later(fixture, move |fixture| fixture.handle(ask, fds).unwrap().unwrap());
        function.release();
        let (back, reply) = called.join().unwrap();
        fixture = back;
        assert_eq!((reply.id, reply.command, reply.body), (42, command, body));
    }
    assert_eq!(function.memory().region_count(), 1);
    function.hold(false);
}

#[test]
fn a_client_that_wants_no_reply_gets_none_later_either() {
    let fixture = Fixture::new();
    fixture.function.hold(true);
    let function = fixture.function.clone();
    let message =
        Message::command(1, Command::DeviceReset, Body::Empty, Vec::new()).without_reply();
    let called = later(fixture, move |fixture| fixture.session.handle(message));
    function.release();
    let (_fixture, reply) = called.join().unwrap();
    assert!(matches!(reply, Ok(None)));
    function.hold(false);
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
fn a_session_ends_step_by_step() {
    let mut fixture = Fixture::new();
    fixture.map(0, PAGE);
    fixture.succeeds(set_irqs(irqs(EVENTFD, MSIX, 7, 1)), vec![event()]);
    let function = fixture.function.clone();
    function.take_events();
    function.hold(true);
    let ended = later(fixture, |fixture| fixture.session.end());
    assert_eq!(function.take_events(), [Event::Vector(7, false), Event::Reset]);
    function.release();
    wait_until(|| function.is_held());
    assert!(!ended.is_finished());
    assert_eq!(function.take_events(), [Event::Memory(0, 0)]);
    function.release();
    let (mut fixture, ()) = ended.join().unwrap();
    fixture.session.end();
    let command = Command::DeviceReset;
    assert_eq!(
        fixture.handle(reset(), Vec::new()).unwrap_err(),
        ProtocolError::OutOfTurn { command }
    );
    drop(fixture.session);
    assert!(function.events().is_empty());
}

#[test]
fn a_dropped_session_releases_everything() {
    let mut fixture = Fixture::new();
    fixture.map(0, PAGE);
    fixture.succeeds(set_irqs(irqs(EVENTFD, MSIX, 7, 1)), vec![event()]);
    fixture.function.take_events();
    drop(fixture.session);
    assert_eq!(
        fixture.function.events(),
        [Event::Vector(7, false), Event::Reset, Event::Memory(0, 0)]
    );
}
