//! A guest's NIC whose port is at the IOhost: two switches, the units of both ends, and the frames
//! of stations behind them, in simulated time.

// Each test file is a crate of its own and uses its part of this.
#![allow(dead_code)]

use std::sync::Arc;

use crate::common::{IOHOST, STEP, client_id, iohost_on, link_options, station};
use sidecore_link::{Faults, LinkAddress, Network};
use sidecore_net::contract::{NIC, Station};
use sidecore_net::{MacAddress, PortConfig, PortId, Properties, QueueId, Switch, SwitchOptions};
use sidecore_reactor::{CoreContext, IdleMode, Pollable as _};
use sidecore_remote::client::{Iohost, Session, SessionOptions};
use sidecore_remote::export::{ClientId, ClientShare, ClientSpec, Export, ExportedNic};
use sidecore_remote::{NicMonitor, NicState, remote_nic};
use sidecore_telemetry::CounterSet as _;
use sidecore_units::Nanos;
use sidecore_vrio::{ClientOptions, OnDisconnect, Plain, ServerOptions, VrioCounts};

/// The guest behind the VMhost's switch, and a station at the IOhost's.
pub const GUEST: MacAddress = MacAddress([2, 0, 0, 0, 1, 1]);
pub const SERVER: MacAddress = MacAddress([2, 0, 0, 0, 1, 2]);
pub const JUMBO: Properties = Properties { frame_bytes: 9018, ..NIC };

/// A switch with a station, and a remote NIC.
pub struct Side {
    pub switch: Switch,
    pub station: Station,
    pub nic: QueueId,
    pub nic_port: PortId,
    pub monitor: NicMonitor,
}

impl Side {
    pub fn new(now: Nanos) -> (Self, sidecore_remote::NicEnd) {
        let mut switch = Switch::new(SwitchOptions::new(7));
        let (station, queue) = Station::new(JUMBO, true);
        let stats = Arc::default();
        let port = switch.add_port(now, "station", PortConfig::station(), stats).unwrap();
        switch.attach(port, Box::new(queue)).unwrap();
        station.post(1024, 16 << 10);
        let (nic, end) = remote_nic(9000).unwrap();
        let monitor = nic.monitor();
        let (config, stats) = (PortConfig::station(), Arc::default());
        let nic_port = switch.add_port(now, "nic", config, stats).unwrap();
        let nic = switch.attach(nic_port, Box::new(nic)).unwrap();
        (Self { switch, station, nic, nic_port, monitor }, end)
    }

    pub fn frames(&self) -> Vec<Vec<u8>> {
        self.station.received().into_iter().map(|received| received.frame).collect()
    }
}

pub struct Rig {
    pub now: Nanos,
    pub network: Network,
    pub vmhost: Side,
    pub iohost: Side,
    pub session: Session<Plain>,
    pub named: Iohost,
    pub export: Box<Export<Plain>>,
    pub id: ClientId,
    pub number: u16,
}

pub fn exported() -> ExportedNic {
    ExportedNic { name: "nic1".into(), mac: GUEST.0, mtu: 9000, is_up: true, epoch: 1 }
}

pub fn admit(export: &mut Export<Plain>) -> ClientId {
    let share = ClientShare::default();
    let spec = ClientSpec { name: "client".into(), id: client_id(1), queues: 1, share };
    export.add_client(&spec).unwrap()
}

impl Rig {
    pub fn new(faults: Faults, frame_bytes: u32) -> Self {
        let now = Nanos::from_millis(1);
        let network = Network::new(11, Faults::default());
        let (vmhost, vmhost_end) = Side::new(now);
        let (iohost, iohost_end) = Side::new(now);
        let link = Box::new(network.link(IOHOST, &link_options()).unwrap());
        let (mut export, _) = iohost_on(link, 1, 0, ServerOptions::default());
        let id = admit(&mut export);
        let number = export.add_nic(id, &exported(), iohost_end).unwrap();
        let named = Iohost::new("io1").unwrap();
        named.open_nic("nic1", vmhost_end).unwrap();
        let options = SessionOptions {
            client: ClientOptions {
                client: client_id(1),
                life: 3,
                frame_bytes,
                on_disconnect: OnDisconnect::Stall,
                ..ClientOptions::default()
            },
            address: LinkAddress::Ethernet(IOHOST),
            idle: IdleMode::Poll,
        };
        let link = Box::new(network.link(station(1), &link_options()).unwrap());
        let session = Session::new(&CoreContext::default(), &named, link, Plain, &options).unwrap();
        let mut rig = Self { now, network, vmhost, iohost, session, named, export, id, number };
        rig.run_until(|rig| rig.is_up());
        // The switches notice once a millisecond, and learn from the first frames.
        rig.run_for(Nanos::from_millis(2));
        for _ in 0..3 {
            rig.vmhost.station.send(&frame(SERVER, GUEST, 0, 60));
            rig.iohost.station.send(&frame(GUEST, SERVER, 0, 60));
            rig.run_for(Nanos::from_millis(1));
        }
        drop((rig.vmhost.frames(), rig.iohost.frames()));
        rig.network.set_faults(faults);
        rig
    }

    pub fn is_up(&self) -> bool {
        let states = [&self.vmhost, &self.iohost].map(|side| side.monitor.state());
        states == [NicState::Up; 2]
    }

    pub fn step(&mut self) {
        self.vmhost.switch.turn(self.now, 32);
        self.session.poll(self.now, 64);
        self.export.poll(self.now, 64);
        self.iohost.switch.turn(self.now, 32);
        self.now = self.now.after(STEP);
    }

    pub fn run_for(&mut self, time: Nanos) {
        let end = self.now.after(time);
        while self.now < end {
            self.step();
        }
    }

    pub fn run_until(&mut self, until: impl Fn(&Self) -> bool) {
        let end = self.now.after(Nanos::from_millis(5_000));
        while !until(self) {
            assert!(self.now < end, "it does not happen");
            self.step();
        }
    }

    pub fn client(&self) -> VrioCounts {
        self.named.vrio_stats().counts()
    }

    pub fn host(&mut self) -> VrioCounts {
        self.export.status().sessions.remove(0).counts
    }
}

/// A frame of this size with a number, whose other bytes follow from the number.
pub fn frame(to: MacAddress, from: MacAddress, number: u32, len_bytes: usize) -> Vec<u8> {
    let head = [&to.0[..], &from.0, &[0x88, 0xb5], &number.to_le_bytes()].concat();
    let rest = (head.len()..len_bytes).map(|at| (at * 13 + at / 256 + number as usize * 31) as u8);
    head.iter().copied().chain(rest).collect()
}
