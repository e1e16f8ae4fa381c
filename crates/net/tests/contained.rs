//! A panic in the code of a stage fails the frames of its port, each counted, and nothing else.
#![forbid(unsafe_code)]

mod harness;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use harness::{Lan, Place, mac, plain};
use sidecore_net::{
    DropReason, Dropped, FrameStage, Harm, HeldFrames, StageFailure, StageFrame, StagePlace,
    StageRun, SwitchEvent, Verdict,
};
use sidecore_units::Nanos;

/// The code of a stage that panics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Panics {
    Never,
    Frame,
    /// In the middle of a run.
    Run,
    Look,
    Held,
    NextRelease,
    Inherit,
    Decided,
    Dropped,
    Always,
}

/// A stage that panics once the test lights its fuse.
struct Bomb {
    panics: Panics,
    is_lit: Arc<AtomicBool>,
    calls: Arc<AtomicU32>,
    held: Option<HeldFrames>,
}

impl Bomb {
    fn call(&self, panics: Panics) {
        self.calls.fetch_add(1, Ordering::Relaxed);
        let is_its = self.panics == panics || self.panics == Panics::Always;
        assert!(!self.is_lit.load(Ordering::Relaxed) || !is_its, "a bug\nin it");
    }
}

impl FrameStage for Bomb {
    fn frame(&mut self, now: Nanos, frame: &StageFrame<'_>) -> Verdict {
        self.call(Panics::Frame);
        match &mut self.held {
            Some(held) => {
                assert!(held.hold(frame, now.after(Nanos::from_millis(50)), Harm::default()));
                Verdict::Held
            }
            None => Verdict::Pass,
        }
    }

    fn run(&mut self, now: Nanos, run: &mut StageRun<'_>) {
        for number in 0..run.len() {
            if number == 2 {
                self.call(Panics::Run);
            }
            if let Some(frame) = run.frame(number) {
                run.decide(number, self.frame(now, &frame));
            }
        }
    }

    fn decided(&mut self, _: Nanos, _: &StageFrame<'_>, _: Option<Dropped>) {
        self.call(Panics::Decided);
    }

    fn look(&mut self, _: Nanos) {
        self.call(Panics::Look);
    }

    fn inherit(&mut self, _: &mut dyn FrameStage) {
        self.call(Panics::Inherit);
    }

    fn held(&mut self) -> Option<&mut HeldFrames> {
        self.call(Panics::Held);
        self.held.as_mut()
    }

    fn next_release(&self) -> Option<Nanos> {
        self.call(Panics::NextRelease);
        self.held.as_ref()?.deadline()
    }
}

impl Drop for Bomb {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.call(Panics::Dropped);
        }
    }
}

/// A switch with three stations, the first of which has a stage at `at`.
struct Test {
    lan: Lan,
    places: [Place; 3],
    is_lit: Arc<AtomicBool>,
    calls: Arc<AtomicU32>,
    at: StagePlace,
}

impl Test {
    fn new(panics: Panics, at: StagePlace, holds: bool) -> Self {
        let mut lan = Lan::new();
        let places = lan.stations();
        lan.learn(&[&places[0], &places[1], &places[2]]);
        let (is_lit, calls) = (Arc::default(), Arc::default());
        let mut test = Self { lan, places, is_lit, calls, at };
        test.set(panics, holds);
        test
    }

    fn set(&mut self, panics: Panics, holds: bool) {
        let (is_lit, calls) = (Arc::clone(&self.is_lit), Arc::clone(&self.calls));
        let held = holds.then(|| HeldFrames::new(16).unwrap());
        let bomb = Box::new(Bomb { panics, is_lit, calls, held });
        drop(self.lan.switch.set_stage(self.places[0].port, self.at, Some(bomb)).unwrap());
    }

    fn light(&self) {
        self.is_lit.store(true, Ordering::Relaxed);
    }

    /// Sends `count` frames from each station to each other, and turns for over a millisecond.
    fn talk(&mut self, count: usize) {
        for (from, place) in (1_u8..).zip(&self.places) {
            for to in (1..=3).filter(|to| *to != from) {
                for _ in 0..count {
                    place.station.send(&plain(mac(to), mac(from), 100));
                }
            }
        }
        self.lan.turns(1200);
    }

    /// The frames that each station has got.
    fn got(&self) -> [usize; 3] {
        self.places.each_ref().map(|place| place.frames().len())
    }

    fn failure(&self) -> Option<&StageFailure> {
        self.lan.switch.failure(self.places[0].port)
    }

    fn events(&mut self) -> Vec<SwitchEvent> {
        let mut events = Vec::new();
        self.lan.switch.take_events(&mut events);
        events
    }

    fn failed(&self) -> SwitchEvent {
        let failure = StageFailure { place: self.at, message: "a bug in it".to_owned() };
        SwitchEvent::StageFailed { port: "p".to_owned(), failure }
    }
}

#[test]
fn a_port_whose_stage_panics_drops_and_counts_all_frames_and_the_others_go_on() {
    for panics in [Panics::Frame, Panics::Run, Panics::Look] {
        let mut test = Test::new(panics, StagePlace::Firewall, false);
        test.talk(4);
        assert_eq!(test.got(), [8, 8, 8], "{panics:?}");
        assert_eq!(test.events(), [], "{panics:?}");
        assert_eq!(test.failure(), None, "{panics:?}");
        test.light();
        test.talk(4);
        assert_eq!(test.events(), [test.failed()], "{panics:?}");
        // Frames that came before the panic have passed, and each other one is counted.
        let [to_it, of_second, of_third] = test.got();
        assert!(of_second >= 4 && of_third >= 4, "{panics:?}: the others go on");
        let passed = (to_it + of_second - 4 + of_third - 4) as u64;
        assert!(passed < 16 || panics == Panics::Look, "{panics:?}");
        let dropped =
            |test: &Test| test.places[0].drops().iter().map(|(_, count)| count).sum::<u64>();
        assert_eq!(passed + dropped(&test), 16, "{panics:?}");
        let calls = test.calls.load(Ordering::Relaxed);
        test.talk(4);
        assert_eq!(test.got(), [0, 4, 4], "{panics:?}");
        assert_eq!(test.calls.load(Ordering::Relaxed), calls, "a failed stage is called");
        assert_eq!(passed + dropped(&test), 16 + 16, "{panics:?}");
        let reasons: Vec<_> = test.places[0].drops().iter().map(|(reason, _)| *reason).collect();
        assert_eq!(reasons, [DropReason::Failed, DropReason::FailedOut], "{panics:?}");
        assert_eq!(test.places[1].drops(), [], "{panics:?}");

        // Another stage takes its place and not its state, which may be wrong.
        test.set(Panics::Inherit, false);
        assert_eq!(test.events(), [], "{panics:?}");
        assert_eq!(test.failure(), None, "{panics:?}");
        test.talk(4);
        assert_eq!(test.got(), [8, 8, 8], "{panics:?}");
    }
}

#[test]
fn frames_that_a_failed_stage_holds_are_counted() {
    let mut test = Test::new(Panics::Look, StagePlace::Wire, true);
    test.lan.switch.turn(test.lan.now, 32);
    test.places[0].station.send(&plain(mac(2), mac(1), 100));
    test.places[1].station.send(&plain(mac(1), mac(2), 100));
    test.lan.turns(10);
    test.light();
    test.lan.turns(1200);
    assert_eq!(test.events(), [test.failed()]);
    assert_eq!(test.got(), [0, 0, 0]);
    let drops = [(DropReason::Failed, 1), (DropReason::FailedOut, 1)];
    assert_eq!(test.places[0].drops(), drops);
    test.lan.now = test.lan.now.after(Nanos::from_millis(100));
    test.lan.turns(10);
    assert_eq!(test.got(), [0, 0, 0], "they do not come later");
    drop(test.lan.switch.set_stage(test.places[0].port, StagePlace::Wire, None).unwrap());
    test.talk(1);
    assert_eq!(test.got(), [2, 2, 2]);
}

#[test]
fn a_capture_that_panics_is_left_out() {
    for panics in [Panics::Frame, Panics::Decided, Panics::Look, Panics::Always] {
        let mut test = Test::new(panics, StagePlace::Capture, false);
        test.light();
        test.talk(4);
        assert_eq!(test.events(), [test.failed()], "{panics:?}");
        assert_eq!(test.got(), [8, 8, 8], "{panics:?}");
        assert_eq!(test.places[0].drops(), [], "{panics:?}");
        // It is dropped, so that its reader learns of the end; the failure is still reported.
        assert_eq!(Arc::strong_count(&test.is_lit), 1, "{panics:?}");
        let port = test.places[0].port;
        assert!(test.failure().is_some(), "{panics:?}");
        assert!(test.lan.switch.set_stage(port, test.at, None).unwrap().is_none(), "{panics:?}");
        assert_eq!(test.failure(), None, "{panics:?}");
        test.is_lit.store(false, Ordering::Relaxed);
        test.set(Panics::Never, false);
        let calls = test.calls.load(Ordering::Relaxed);
        test.talk(1);
        assert_eq!((test.events(), test.got()), (vec![], [2, 2, 2]), "{panics:?}");
        assert!(test.calls.load(Ordering::Relaxed) > calls, "{panics:?}: another one captures");
    }
}

#[test]
fn whatever_else_of_a_stage_panics_is_contained() {
    for panics in [Panics::Held, Panics::NextRelease, Panics::Inherit] {
        let mut test = Test::new(Panics::Never, StagePlace::Wire, true);
        test.light();
        test.set(panics, true);
        test.places[0].station.send(&plain(mac(2), mac(1), 100));
        test.lan.turns(10);
        let _ = test.lan.switch.deadline();
        test.lan.now = test.lan.now.after(Nanos::from_millis(100));
        test.lan.turns(1200);
        assert_eq!(test.events(), [test.failed()], "{panics:?}");
        test.talk(1);
        let [_, second, third] = test.got();
        assert!(second >= 1 && third >= 1, "{panics:?}");
        drop(test.lan.switch.remove_port(test.places[0].port).unwrap());
        assert!(test.lan.switch.failure(test.places[0].port).is_none());
    }
    let mut test = Test::new(Panics::Dropped, StagePlace::Firewall, false);
    test.light();
    drop(test.lan.switch.remove_port(test.places[0].port).unwrap());
    let task = |_: &mut Bomb| panic!("a task");
    let mut test = Test::new(Panics::Never, StagePlace::Firewall, false);
    let port = test.places[0].port;
    assert_eq!(test.lan.switch.with_stage(port, StagePlace::Firewall, task), None::<()>);
    test.talk(1);
    assert_eq!(test.got(), [0, 1, 1]);
    assert!(test.failure().is_some_and(|failure| failure.message == "a task"));
}
