//! Plays the client of a recorded conversation to an IOhost of this version.

use std::collections::BTreeMap;

use sidecore_units::Nanos;
use sidecore_vrio::{ClientOptions, Peer};

use super::format::{Conversation, Event, Line};
use super::frame::*;
use super::recorder::rig;
use crate::common::{HOP, Rig};

/// The IOhost has so long for a frame that the client waits for.
const PATIENCE: Nanos = Nanos::from_millis(10_000);

/// The client's sessions: names of the recording, and those of the IOhost now.
#[derive(Default)]
struct Names {
    /// The number of a session by its recorded name.
    recorded: BTreeMap<u64, u64>,
    /// By its number: when the newest CHALLENGE was sent, and its cookie.
    challenges: BTreeMap<u64, (u64, u64)>,
    /// The session's name and incarnation by its number.
    sessions: BTreeMap<u64, (u64, u64)>,
}

impl Names {
    /// Names of the recording.
    fn of(conversation: &Conversation) -> Self {
        let mut names = Self::default();
        for (_, line) in conversation {
            if let Line::Frame { of_client: false, frame, .. } = line
                && kind(frame) == WELCOME
            {
                names.recorded.insert(get(frame, WELCOME_SESSION), get(frame, NUMBER));
            }
        }
        names
    }

    /// The IOhost has sent this frame.
    fn learn(&mut self, frame: &[u8]) {
        match kind(frame) {
            CHALLENGE => {
                let challenge = (get(frame, CHALLENGED), get(frame, COOKIE));
                self.challenges.insert(get(frame, NUMBER), challenge);
            }
            WELCOME => {
                let session = (get(frame, WELCOME_SESSION), get(frame, WELCOME_INCARNATION));
                self.sessions.insert(get(frame, NUMBER), session);
            }
            _ => {}
        }
    }

    /// The client's frame with what the IOhost has chosen now in place of what it chose then;
    /// `None` before it has chosen.
    fn translate(&self, frame: &[u8]) -> Option<Vec<u8>> {
        let mut frame = frame.to_vec();
        if kind(&frame) == HELLO {
            if get(&frame, COOKIE) != 0 {
                let (challenged, cookie) = *self.challenges.get(&get(&frame, NUMBER))?;
                set(&mut frame, CHALLENGED, challenged);
                set(&mut frame, COOKIE, cookie);
                set(&mut frame, HELLO_COOKIE, cookie);
            }
            return Some(frame);
        }
        let number = self.recorded[&get(&frame, SESSION)];
        let (session, incarnation) = *self.sessions.get(&number)?;
        set(&mut frame, SESSION, session);
        set(&mut frame, INCARNATION, incarnation);
        Some(frame)
    }
}

/// An IOhost of this version that has heard the recorded client, and all that it has said.
pub struct Heard {
    pub rig: Rig,
    pub frames: Vec<Vec<u8>>,
}

/// Sends the frames of the recorded client that were not lost, at their times or as soon as the
/// IOhost has sent what they refer to, and has the IOhost's events happen.
pub fn play(conversation: &Conversation) -> Heard {
    let mut rig = rig(ClientOptions::default());
    // Another IOhost than the recorded one.
    rig.host_options.incarnation = 0x5151_5151;
    rig.host_options.secret = [0x0dd0, 0x0ee0];
    rig.restart(false);
    let mut names = Names::of(conversation);
    let mut heard = Heard { rig, frames: Vec::new() };
    let end = conversation.last().expect("a conversation has lines").0;
    let mut lines = conversation.iter().peekable();
    while heard.rig.now < end.after(PATIENCE) {
        heard.rig.poll_host();
        heard.rig.now = heard.rig.now.after(HOP);
        for frame in std::mem::take(&mut heard.rig.to_client.frames) {
            names.learn(&frame);
            heard.frames.push(frame);
        }
        let now = heard.rig.now;
        while let Some((_, line)) = lines.peek().filter(|(time, _)| *time <= now) {
            if !happen(&mut heard.rig, &names, line) {
                break;
            }
            lines.next();
        }
        heard.rig.execute();
        if lines.peek().is_none() && !heard.rig.holds {
            return heard;
        }
    }
    panic!("the IOhost has not sent what the client waits for at {:?}", lines.peek());
}

/// False if the IOhost has to send something before.
fn happen(rig: &mut Rig, names: &Names, line: &Line) -> bool {
    match line {
        Line::Frame { of_client: true, is_lost: false, frame } => {
            let Some(frame) = names.translate(frame) else { return false };
            rig.host_receives(Peer(9), &frame);
        }
        Line::Frame { .. } => {}
        Line::Event(Event::Holds(holds)) => rig.holds = *holds,
        Line::Event(Event::Limit(slots)) => rig.host.set_slot_limit(rig.now, 0, *slots),
        Line::Event(Event::Grow(bytes)) => {
            rig.devices[0].capacity_bytes = *bytes;
            rig.set_devices();
        }
        Line::Event(Event::Restart) => rig.restart(true),
        Line::Event(Event::Submit { .. } | Event::Done { .. } | Event::End | Event::Store(_)) => {}
    }
    true
}
