//! The status of a unit.

use std::sync::Arc;

use sidecore_block::QueueCounts;
use sidecore_link::{LinkAddress, LinkCounts, LinkState};
use sidecore_telemetry::CounterSet as _;
use sidecore_units::Nanos;
use sidecore_vrio::VrioCounts;
use sidecore_vrio::handshake::HostHandshake;

use super::{ExecutorCounts, Export, SteeringCounts};

/// The state of a unit.
#[derive(Clone, Debug)]
pub struct ExportStatus {
    /// Whether the link carries frames.
    pub link: LinkState,
    /// The counters of the link.
    pub link_counts: LinkCounts,
    /// The incarnation of the IOhost.
    pub incarnation: u64,
    /// The counters of frames that are of no client.
    pub strangers: VrioCounts,
    /// The counters of the executors.
    pub steering: SteeringCounts,
    /// The counters of each executor: that of the unit's sidecore, then those of the helpers in the
    /// order in which they were added.
    pub executors: Vec<ExecutorCounts>,
    /// The sessions, one for each link queue that a client may use.
    pub sessions: Vec<SessionStatus>,
    /// The devices.
    pub devices: Vec<DeviceStatus>,
}

/// The state of a client's session.
#[derive(Clone, Debug)]
pub struct SessionStatus {
    /// The client's name in the configuration.
    pub client: Arc<str>,
    /// The client's link queue.
    pub queue: u8,
    /// The session's name; 0 while there is none.
    pub session: u64,
    /// Where its newest frame came from.
    pub peer: Option<LinkAddress>,
    /// The size of its frames.
    pub frame_bytes: u32,
    /// Slots that the client may use: its credit.
    pub credit: u16,
    /// Requests that a store has, or is to be given.
    pub in_flight: usize,
    /// The client's smoothed round trip, after which a request is acknowledged.
    pub round_trip: Nanos,
    /// When its newest frame arrived.
    pub heard_at: Nanos,
    /// The counters of all of its sessions here.
    pub counts: VrioCounts,
}

/// The state of a device.
#[derive(Clone, Debug)]
pub struct DeviceStatus {
    /// Its number in sessions.
    pub number: u16,
    /// Its name.
    pub name: Arc<str>,
    /// Its client's name; empty if that was removed.
    pub client: Arc<str>,
    /// The owner's epoch.
    pub epoch: u64,
    /// Its size.
    pub capacity_bytes: u64,
    /// Requests that have not ended.
    pub in_flight: u32,
    /// The executor that has them: 0 is the sidecore that polls the link, others are the helpers in
    /// the order in which they were added.
    pub executor: usize,
    /// Its counters, of all executors.
    pub counts: QueueCounts,
}

impl<H: HostHandshake> Export<H> {
    /// The state of the unit, its clients and its devices.
    pub fn status(&mut self) -> ExportStatus {
        let mut sessions = Vec::new();
        for client in self.clients.iter().flatten() {
            for (queue, place, stats) in &client.places {
                let Some(session) = self.host.session(*place) else { continue };
                let is_up = session.session() != 0;
                sessions.push(SessionStatus {
                    client: Arc::clone(&client.name),
                    queue: *queue,
                    session: session.session(),
                    peer: self.port.address(session.peer()).filter(|_| is_up),
                    frame_bytes: session.frame_bytes(),
                    credit: session.credit(),
                    in_flight: session.executing(),
                    round_trip: session.acknowledge_after(),
                    heard_at: session.heard_at(),
                    counts: stats.counts(),
                });
            }
        }
        let devices = (0_u16..).zip(&self.devices).filter_map(|(number, device)| {
            let device = device.as_ref()?;
            let client = self.clients.get(device.client.0).and_then(Option::as_ref);
            let mut counts = QueueCounts::default();
            for stats in &device.stats {
                stats.add_to(&mut counts);
            }
            Some(DeviceStatus {
                number,
                name: Arc::clone(&device.name),
                client: client.map_or_else(|| "".into(), |client| Arc::clone(&client.name)),
                epoch: device.entry.epoch,
                capacity_bytes: device.entry.capacity_bytes,
                in_flight: device.assigned.in_flight,
                executor: device.assigned.sidecore,
                counts,
            })
        });
        ExportStatus {
            link: self.port.state(),
            link_counts: self.port.link_stats().counts(),
            incarnation: self.options.incarnation,
            strangers: self.stats.counts(),
            steering: self.executors.stats().counts(),
            executors: self.executors.counts(),
            devices: devices.collect(),
            sessions,
        }
    }
}
