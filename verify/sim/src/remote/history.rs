//! From a seed to a history.

use sidecore_vrio::Rule;

use super::world::{Step, World};
use crate::many::Total;
use crate::violation::{Violation, no_panic};

/// How long a history is.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Requests of the guest.
    pub requests: u64,
    /// A rule that both engines neglect.
    pub neglect: Option<Rule>,
}

impl Default for Options {
    fn default() -> Self {
        Self { requests: 120, neglect: None }
    }
}

/// The counts of histories.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Requests of the guest.
    pub requests: u64,
    /// Frames that were sent.
    pub frames: u64,
    /// Sessions that began at clients.
    pub sessions: u64,
    /// Attempts after the first one.
    pub retransmissions: u64,
    /// Requests that waited for an overlapping write.
    pub held_back: u64,
    /// Ends of an IOhost.
    pub restarts: u64,
    /// Of which so many were power cuts.
    pub power_cuts: u64,
    /// Of which so many came while requests were unanswered.
    pub restarts_with_unanswered: u64,
    /// Of which so many came while answered writes were not flushed.
    pub restarts_with_resend: u64,
    /// And so many while such writes overlapped.
    pub restarts_with_overlap: u64,
    /// Writes that were sent again to another incarnation.
    pub replayed: u64,
    /// Flushes of full replay logs.
    pub own_flushes: u64,
    /// Of which so many came while several clients had unanswered requests.
    pub restarts_with_several: u64,
    /// Deaths of a client.
    pub client_deaths: u64,
    /// Of which so many came while the store had requests of another client.
    pub deaths_beside_others: u64,
    /// Requests that the store was given while it had some of another client.
    pub beside_others: u64,
    /// Requests that the store was given while a session was replaying to another device.
    pub beside_replays: u64,
    /// Requests that failed because the IOhost was away.
    pub timed_out: u64,
    /// Frames that were dropped because they had been seen.
    pub seen_before: u64,
    /// Frames that were dropped because they were damaged.
    pub damaged: u64,
    /// Restarts while another sidecore executed requests.
    pub restarts_abroad: u64,
    /// Restarts while requests or results were between sidecores.
    pub restarts_with_messages: u64,
    /// Deaths of a client while another sidecore executed requests.
    pub deaths_abroad: u64,
    /// Requests executed on the sidecore of the link.
    pub executed_here: u64,
    /// Requests handed to other sidecores.
    pub handed_over: u64,
    /// Times that a device's requests moved to another sidecore.
    pub moves: u64,
    /// Sessions on another link than the one before.
    pub link_changes: u64,
}

impl Total for Outcome {
    fn add(&mut self, other: Self) {
        self.requests += other.requests;
        self.frames += other.frames;
        self.sessions += other.sessions;
        self.retransmissions += other.retransmissions;
        self.held_back += other.held_back;
        self.restarts += other.restarts;
        self.power_cuts += other.power_cuts;
        self.restarts_with_unanswered += other.restarts_with_unanswered;
        self.restarts_with_resend += other.restarts_with_resend;
        self.restarts_with_overlap += other.restarts_with_overlap;
        self.replayed += other.replayed;
        self.own_flushes += other.own_flushes;
        self.restarts_with_several += other.restarts_with_several;
        self.client_deaths += other.client_deaths;
        self.deaths_beside_others += other.deaths_beside_others;
        self.beside_others += other.beside_others;
        self.beside_replays += other.beside_replays;
        self.timed_out += other.timed_out;
        self.seen_before += other.seen_before;
        self.damaged += other.damaged;
        self.restarts_abroad += other.restarts_abroad;
        self.restarts_with_messages += other.restarts_with_messages;
        self.deaths_abroad += other.deaths_abroad;
        self.executed_here += other.executed_here;
        self.handed_over += other.handed_over;
        self.moves += other.moves;
        self.link_changes += other.link_changes;
    }
}

/// Runs the history of `seed`.
///
/// # Errors
/// Something that must not be.
pub fn run(seed: u64, options: &Options) -> Result<Outcome, Box<Violation>> {
    let mut world = World::new(seed, options.neglect, false);
    if no_panic(|| live(&mut world, options)).is_ok() {
        return Ok(outcome(&world));
    }
    // The same again, with a trace.
    let mut world = World::new(seed, options.neglect, true);
    let what = no_panic(|| live(&mut world, options))
        .err()
        .unwrap_or_else(|| "it is not the same again".to_owned());
    let when = format!("at {} us ({:?})", world.now.0 / 1_000, world.manner);
    Err(Violation::new((seed, 0), when, what, &world.trace, world.trace.len()))
}

fn live(world: &mut World, options: &Options) -> Step {
    world.run(options.requests)?;
    world.heal()?;
    let (client, _) = world.counts();
    // A sidecore that is late looks like a path that is.
    let is_perfect = world.manner.is_calm() && world.manner.sidecores == 0;
    if is_perfect && client.retransmissions > 0 {
        return Err(format!("{} retransmissions on a perfect path", client.retransmissions));
    }
    world.cut_and_read()
}

fn outcome(world: &World) -> Outcome {
    let (client, host) = world.counts();
    let steering = world.steering();
    Outcome {
        requests: world.requests(),
        frames: client.frames_sent + host.frames_sent,
        sessions: client.sessions,
        retransmissions: client.retransmissions,
        held_back: client.held_back,
        replayed: client.replayed,
        own_flushes: client.own_flushes,
        timed_out: client.timed_out,
        seen_before: client.dropped_replayed + host.dropped_replayed,
        damaged: client.dropped_seal + host.dropped_seal,
        executed_here: steering.executed_here,
        handed_over: steering.handed_over,
        moves: steering.moves,
        link_changes: world.link_changes(),
        ..world.outcome
    }
}
