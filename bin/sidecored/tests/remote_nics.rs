//! A guest's NIC on a VMhost whose port is at an IOhost: two daemons with a memory link between
//! them, a guest behind the one and a station on the switch of the other.

mod common;

use std::path::Path;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use sidecore_control::NewDevice;
use sidecore_control::report::{DeviceState, PortCounts};
use sidecore_driver::{NetClient, NetClientOptions, NetQueues, PacketHeader};
use sidecore_kit::wait;

use common::Daemon;

const SOON: Duration = Duration::from_secs(60);
/// A frame that has not come by then is lost.
const LOST: Duration = Duration::from_secs(5);
/// More losses are not those of a machine that is busy.
const LOSSES_MAX: u32 = 40;
const ETHERTYPE: [u8; 2] = [0x88, 0xb5];

fn mac(station: u8) -> [u8; 6] {
    [0x52, 0x54, 0, 0, 0, station]
}

/// An IOhost with a switch: a station, and the NIC of a guest of the client `vmhost`.
fn iohost(shared: &Path, mtu: u16, keys: &str) -> String {
    format!(
        "control_socket = \"control.sock\"\nkey_directory = \"{0}/keys\"\n[[sidecore]]\nname = \
         \"io0\"\n[[sidecore]]\nname = \"io1\"\n\
         [[link]]\nname = \"wire\"\ntype = \"memory\"\nsocket = \"{0}/wire.sock\"\n\
         sidecores = [\"io0\"]\n\
         [[client]]\nname = \"vmhost\"\nlinks = [\"wire\"]\n{keys}\
         [[switch]]\nname = \"lan\"\nsidecore = \"io1\"\n\
         [[device]]\nname = \"station\"\nfront_end = \"virtio-net\"\nswitch = \"lan\"\n\
         mac = \"52:54:00:00:00:02\"\nsocket = \"station.sock\"\nmtu = {mtu}\n\
         [[device]]\nname = \"guest\"\nfront_end = \"vrio-net\"\nclient = \"vmhost\"\n\
         switch = \"lan\"\nmac = \"52:54:00:00:00:01\"\nipv4 = [\"10.0.0.1\"]\nmtu = {mtu}\n",
        shared.display()
    )
}

/// The VMhost with the guest, whose addresses it does not check.
fn vmhost(shared: &Path, mtu: u16, keys: &str) -> String {
    format!(
        "control_socket = \"control.sock\"\n[[sidecore]]\nname = \"vm0\"\n\
         [[link]]\nname = \"wire\"\ntype = \"memory\"\nsocket = \"{}/wire.sock\"\n\
         [[iohost]]\nname = \"io1\"\nlink = \"wire\"\nclient = \"vmhost\"\n{keys}\
         [[switch]]\nname = \"one\"\n\
         [[device]]\nname = \"far\"\nfront_end = \"remote-net\"\niohost = \"io1\"\n\
         device = \"guest\"\nswitch = \"one\"\nmtu = {mtu}\n\
         [[device]]\nname = \"guest\"\nfront_end = \"virtio-net\"\nswitch = \"one\"\n\
         mac = \"52:54:00:00:00:01\"\nsocket = \"guest.sock\"\nmtu = {mtu}\nany_source = true\n",
        shared.display()
    )
}

fn start(config: &str) -> Daemon {
    Daemon::start(tempfile::tempdir().unwrap(), config)
}

fn connect(daemon: &Daemon, socket: &str) -> NetClient {
    let options = NetClientOptions { buffer_bytes: 16 << 10, ..NetClientOptions::default() };
    NetClient::connect(daemon.directory.path().join(socket), &options).unwrap()
}

fn counts(daemon: &Daemon, name: &str) -> PortCounts {
    let switches = daemon.client().switches().unwrap();
    let ports = switches.into_iter().flat_map(|switch| switch.ports);
    ports.into_iter().find(|port| port.name == name).unwrap().counters
}

/// Waits until both ports of the NIC are up.
fn wait_until_up(daemons: [(&Daemon, &str); 2]) {
    for (daemon, port) in daemons {
        let control = daemon.client();
        wait::until("the port is up", SOON, || {
            let switches = control.switches().unwrap();
            let mut ports = switches.iter().flat_map(|switch| &switch.ports);
            ports.any(|other| other.name == port && other.is_up)
        });
    }
}

/// A frame whose payload says which one it is, and can be checked.
fn frame(to: [u8; 6], from: [u8; 6], number: u32, len_bytes: usize) -> Vec<u8> {
    let mut frame = [&to[..], &from, &ETHERTYPE, &number.to_be_bytes()].concat();
    let head = frame.len();
    frame.extend((head..len_bytes).map(|at| (at as u32 * 31 + at as u32 / 256 + number) as u8));
    frame
}

fn send(queues: &mut NetQueues, frame: &[u8]) {
    wait::until("there is a free slot", SOON, || {
        queues.publish().unwrap();
        queues.send(&PacketHeader::default(), frame).unwrap()
    });
    queues.publish().unwrap();
}

/// The next frame of a type that a NIC gets; `None` if none comes for a while.
fn receive_type(queues: &mut NetQueues, ether_type: [u8; 2], wait: Duration) -> Option<Vec<u8>> {
    let (mut frame, end) = (Vec::new(), Instant::now() + wait);
    loop {
        if queues.receive(&mut frame).unwrap().is_some() {
            queues.publish().unwrap();
            if frame[12..14] == ether_type {
                return Some(frame);
            }
        } else if Instant::now() >= end {
            return None;
        } else {
            queues.wait(wait).unwrap();
        }
    }
}

/// The next frame of the other NIC; announcements are passed over.
fn receive(queues: &mut NetQueues) -> Option<Vec<u8>> {
    receive_type(queues, ETHERTYPE, LOST)
}

fn number_of(frame: &[u8]) -> u32 {
    u32::from_be_bytes(*frame[14..].first_chunk().unwrap())
}

/// Two NICs, and what was lost between them.
struct Wire<'a> {
    guest: &'a mut NetQueues,
    station: &'a mut NetQueues,
    lost: u32,
}

impl Wire<'_> {
    /// Sends these frames one way, the last one until it arrives: as a network does, because a
    /// daemon that gets no CPU for a second loses its session, and packets with it. Each frame that
    /// arrives is one of them, and later than the one before it.
    fn pass(&mut self, to_station: bool, numbers: std::ops::Range<u32>, len_bytes: usize) {
        let (from, to) = match to_station {
            true => (&mut *self.guest, &mut *self.station),
            false => (&mut *self.station, &mut *self.guest),
        };
        let stations = if to_station { (mac(2), mac(1)) } else { (mac(1), mac(2)) };
        let made = |number| frame(stations.0, stations.1, number, len_bytes);
        numbers.clone().for_each(|number| send(from, &made(number)));
        let (mut next, last) = (numbers.start, numbers.end - 1);
        while next <= last {
            let Some(got) = receive(to) else {
                self.lost += 1;
                assert!(self.lost < LOSSES_MAX, "{} of {next} to {last} are lost", self.lost);
                send(from, &made(last));
                continue;
            };
            let number = number_of(&got);
            if number < numbers.start {
                // Sent twice, because it was late.
                continue;
            }
            assert!((next..=last).contains(&number), "{number} comes after {next}");
            assert!(got == made(number), "frame {number} has changed");
            self.lost += number - next;
            next = number + 1;
        }
    }
}

/// Frames of all sizes between the guest and the station, one at a time and then several. Returns
/// how many were lost.
fn exchange(guest: &mut NetQueues, station: &mut NetQueues, mtu: usize, first: u32) -> u32 {
    let mut wire = Wire { guest, station, lost: 0 };
    for number in first..first + 200 {
        let len_bytes = 60 + (number as usize * 397) % (mtu + 14 - 60);
        wire.pass(true, number..number + 1, len_bytes);
        wire.pass(false, number..number + 1, len_bytes);
    }
    for round in 0..30 {
        let number = first + 200 + 16 * round;
        wire.pass(true, number..number + 16, 1_000);
        wire.pass(false, number..number + 16, 1_000);
    }
    wire.lost
}

fn end(mut daemon: Daemon) {
    daemon.signal(Signal::TERM);
    let (status, complaint) = daemon.wait();
    assert!(status.success(), "{complaint}");
}

#[test]
fn a_guest_of_a_vmhost_is_on_the_switch_of_an_iohost() {
    let shared = tempfile::tempdir().unwrap();
    let vmhost = start(&vmhost(shared.path(), 1500, ""));
    let control = vmhost.client();
    wait::until("the list says for whom the NIC waits", SOON, || {
        let devices = control.devices().unwrap();
        let far = devices.iter().find(|device| device.name == "far").unwrap();
        far.warnings.iter().any(|warning| warning.contains("waits for iohost \"io1\""))
    });
    let io1 = start(&iohost(shared.path(), 1500, ""));
    wait_until_up([(&vmhost, "far"), (&io1, "guest")]);
    wait::until("both reports have the NIC", SOON, || {
        let (here, there) = (control.remote().unwrap(), io1.client().remote().unwrap());
        let (Some(iohost), Some(client)) = (here.iohosts.first(), there.clients.first()) else {
            return false;
        };
        let (Some(used), Some(exported)) = (iohost.nics.first(), client.nics.first()) else {
            return false;
        };
        assert_eq!((used.device.as_str(), used.nic.as_str()), ("far", "guest"));
        assert_eq!((exported.device.as_str(), exported.mtu), ("guest", 1500));
        assert_eq!(exported.mac, "52:54:00:00:00:01");
        // A pattern that serves disks does not see it.
        let is_no_disk = iohost.announced.as_ref().is_some_and(Vec::is_empty);
        let is_told = used.mac.as_ref() == Some(&exported.mac) && used.mtu == Some(1500);
        is_no_disk && is_told && used.state == "up" && exported.state == "up"
    });
    let (mut guest, mut station) = (connect(&vmhost, "guest.sock"), connect(&io1, "station.sock"));
    let lost = exchange(guest.pair(0).unwrap(), station.pair(0).unwrap(), 1500, 0);
    // The IOhost checks the guest's address, whatever the VMhost lets pass.
    let forged = frame(mac(2), mac(9), 1, 100);
    wait::until("the IOhost drops it", SOON, || {
        send(guest.pair(0).unwrap(), &forged);
        counts(&io1, "guest").dropped_spoofed_mac > 0
    });
    let passed = counts(&io1, "guest");
    assert!(passed.in_frames + u64::from(lost) >= 680, "{passed:?}");
    assert_eq!((passed.dropped_too_long, passed.dropped_bad_offload), (0, 0));
    // Another IOhost in its place: what came from the old one is over, and the port is up again.
    end(io1);
    wait::until("the port is down", SOON, || {
        let switches = control.switches().unwrap();
        let mut ports = switches.iter().flat_map(|switch| &switch.ports);
        ports.any(|port| port.name == "far" && !port.is_up)
    });
    wait::until("the report says so", SOON, || {
        control.remote().unwrap().iohosts[0].nics[0].state == "away"
    });
    let io1 = start(&iohost(shared.path(), 1500, ""));
    wait_until_up([(&vmhost, "far"), (&io1, "guest")]);
    let mut station = connect(&io1, "station.sock");
    exchange(guest.pair(0).unwrap(), station.pair(0).unwrap(), 1500, 10_000);
    let devices = control.devices().unwrap();
    let far = devices.iter().find(|device| device.name == "far").unwrap();
    assert_eq!((far.state, far.front_end.as_str()), (DeviceState::Running, "remote-net"));
    assert!(far.warnings.is_empty(), "{:?}", far.warnings);
    end(vmhost);
    end(io1);
}

#[test]
fn sealed_frames_of_9000_bytes_pass_and_the_nic_is_removed_and_added() {
    let shared = tempfile::tempdir().unwrap();
    let io1 = start(&iohost(shared.path(), 9000, "encryption = \"on\"\n"));
    let invitation = io1.client().invite("vmhost").unwrap();
    let path = shared.path().join("vmhost.invitation");
    std::fs::write(&path, invitation.invitation).unwrap();
    std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    let keys = format!("encryption = \"on\"\ninvitation = {path:?}\n");
    let mut station = connect(&io1, "station.sock");
    let vmhost = start(&vmhost(shared.path(), 9000, &keys));
    // The guest's address is announced as soon as a session has its NIC.
    let rarp = receive_type(station.pair(0).unwrap(), [0x80, 0x35], SOON).unwrap();
    assert_eq!((&rarp[..6], &rarp[6..12]), (&[0xff; 6][..], &mac(1)[..]));
    let arp = receive_type(station.pair(0).unwrap(), [0x08, 0x06], SOON).unwrap();
    assert_eq!(
        (&arp[6..12], &arp[28..32], &arp[38..42]),
        (&mac(1)[..], &[10, 0, 0, 1][..], &[10, 0, 0, 1][..])
    );
    wait_until_up([(&vmhost, "far"), (&io1, "guest")]);
    let mut guest = connect(&vmhost, "guest.sock");
    exchange(guest.pair(0).unwrap(), station.pair(0).unwrap(), 9000, 0);
    let control = io1.client();
    control.remove_device("guest").unwrap();
    let there = vmhost.client();
    wait::until("the VMhost's port is down", SOON, || {
        let switches = there.switches().unwrap();
        let mut ports = switches.iter().flat_map(|switch| &switch.ports);
        ports.any(|port| port.name == "far" && !port.is_up)
    });
    let again = NewDevice::default().with("name", "guest").with("front_end", "vrio-net");
    let again = again.with("client", "vmhost").with("switch", "lan").with("mtu", 9000);
    let again = again.with("mac", "52:54:00:00:00:01");
    control.add_device(&again).unwrap();
    wait_until_up([(&vmhost, "far"), (&io1, "guest")]);
    exchange(guest.pair(0).unwrap(), station.pair(0).unwrap(), 9000, 10_000);
    end(vmhost);
    end(io1);
}
