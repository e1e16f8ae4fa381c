//! Two daemons, an IOhost and a VMhost, in network namespaces of their own, with links of each kind
//! between them.

mod common;

use std::fmt::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::sync_channel;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use sidecore_control::report::{DeviceReport, DeviceState, IohostReport, LinkCounts, RemoteReport};
use sidecore_driver::{BlkClient, BlkQueue, ClientOptions, Slot, Status};
use sidecore_kit::guest::{complete, complete_all};
use sidecore_kit::namespace::{End, Namespace};
use sidecore_kit::wait;
use sidecore_skip::skip;
use sidecore_units::Sector;
use sidecore_wire::{Chances, Handle, Wires};
use tempfile::TempDir;

use common::Daemon;
use common::remote::{BLOCK, data, flush, read, submit, survives_kills, write};

const SOON: Duration = Duration::from_secs(60);
const DISK_BYTES: u64 = 16 << 20;
const SECTORS: u64 = BLOCK as u64 / 512;
const LONG: u32 = 64 << 10;
const MTU: usize = 9000;
/// The MTU of the ends of a wire, to which packets of several frames come in one piece.
const WIRE_MTU: usize = 65_535;
/// Every frame that fits into the MTU.
const ALL: usize = usize::MAX;

const IOHOST: End<'_> = End { interface: "eth0", address: "02:00:00:00:00:01" };
const VMHOST: End<'_> = End { interface: "eth0", address: "02:00:00:00:00:02" };

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Packet,
    Xdp,
    Udp,
}

impl Kind {
    fn keys(self) -> &'static str {
        match self {
            Self::Packet => "type = \"packet\"\ninterface = \"eth0\"\n",
            Self::Xdp => "type = \"xdp\"\ninterface = \"eth0\"\n",
            Self::Udp => "type = \"udp\"\n",
        }
    }

    /// The IOhost's address.
    fn address(self) -> &'static str {
        match self {
            Self::Packet | Self::Xdp => IOHOST.address,
            Self::Udp => "10.9.0.1:34997",
        }
    }
}

/// A wire that a test can cut, in a namespace between those of the hosts.
struct Middle {
    handle: Handle,
    end: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Middle {
    fn new(namespace: Namespace) -> Self {
        let end = Arc::new(AtomicBool::new(false));
        let (sender, receiver) = sync_channel(1);
        let run = {
            let end = Arc::clone(&end);
            move || {
                let run = || {
                    let between = [["left", "right"].map(str::to_owned)];
                    let opened = Wires::open(&between, 0x88b5, 7, Chances::default());
                    let mut wires = opened.unwrap();
                    sender.send(wires.handles().remove(0)).unwrap();
                    wires.run(&end).unwrap();
                };
                namespace.within(run).unwrap();
            }
        };
        let thread = Some(std::thread::spawn(run));
        Self { handle: receiver.recv_timeout(SOON).expect("a wire"), end, thread }
    }
}

impl Drop for Middle {
    fn drop(&mut self) {
        self.end.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            assert!(std::thread::panicking() || ended.is_ok(), "the wire has failed");
        }
    }
}

/// The hosts, and the files that both see.
struct Place {
    kind: Kind,
    /// Of the IOhost and of the VMhost.
    hosts: [Namespace; 2],
    shared: TempDir,
    sidecores: usize,
    disks: usize,
    /// Keys of the IOhost's link and of the VMhost's.
    link: [&'static str; 2],
    /// Keys of the VMhost's `[[iohost]]`.
    away: &'static str,
    /// There is a second link, `routed`, of type `udp`.
    has_second: bool,
}

impl Place {
    /// Hosts that a wire connects. `None`, and a word about it, if this machine has no namespaces.
    fn new(kind: Kind) -> Option<Self> {
        let place = Self::unconnected(kind)?;
        let [iohost, vmhost] = &place.hosts;
        if let Err(error) = iohost.connect(&IOHOST, vmhost, &VMHOST, MTU) {
            skip(error);
            return None;
        }
        if kind == Kind::Udp {
            for (host, number) in [(iohost, 1), (vmhost, 2)] {
                host.ip(&format!("addr add 10.9.0.{number}/24 dev eth0")).unwrap();
            }
        }
        Some(place)
    }

    fn unconnected(kind: Kind) -> Option<Self> {
        let (Ok(iohost), Ok(vmhost)) = (Namespace::new(), Namespace::new()) else {
            skip("no network namespace can be made (CAP_SYS_ADMIN)");
            return None;
        };
        let shared = tempfile::tempdir().unwrap();
        Some(Self {
            kind,
            hosts: [iohost, vmhost],
            shared,
            sidecores: 1,
            disks: 1,
            link: [""; 2],
            away: "",
            has_second: false,
        })
    }

    /// Hosts with a wire that two links share.
    fn with_two_links() -> Option<Self> {
        let mut place = Self::new(Kind::Udp)?;
        (place.kind, place.has_second, place.sidecores) = (Kind::Packet, true, 2);
        Some(place)
    }

    /// Hosts with a wire between them that loses and delays what the test says.
    fn with_wire(kind: Kind) -> Option<(Self, Middle)> {
        let place = Self::unconnected(kind)?;
        let Ok(middle) = Namespace::new() else {
            skip("no network namespace can be made (CAP_SYS_ADMIN)");
            return None;
        };
        let [iohost, vmhost] = &place.hosts;
        let end = |interface, address| End { interface, address };
        // An end has the address of the station behind the other one.
        if let Err(error) = iohost.connect(&IOHOST, &middle, &end("left", VMHOST.address), MTU) {
            skip(error);
            return None;
        }
        vmhost.connect(&VMHOST, &middle, &end("right", IOHOST.address), MTU).unwrap();
        for end in ["left", "right"] {
            middle.ip(&format!("link set dev {end} mtu {WIRE_MTU}")).unwrap();
        }
        Some((place, Middle::new(middle)))
    }

    fn cores(&self, name: &str) -> (String, String) {
        let names: Vec<String> =
            (0..self.sidecores).map(|number| format!("\"{name}{number}\"")).collect();
        let sidecores = names.iter().map(|name| format!("[[sidecore]]\nname = {name}\n"));
        (sidecores.collect(), names.join(", "))
    }

    /// The second link with these sidecores, and with `also` where it leads to.
    fn second(&self, names: &str, also: [&'static str; 2]) -> (String, &'static str) {
        if !self.has_second {
            return (String::new(), also[0]);
        }
        let keys = Kind::Udp.keys();
        (format!("[[link]]\nname = \"routed\"\n{keys}sidecores = [{names}]\n"), also[1])
    }

    fn iohost(&self) -> Daemon {
        let (sidecores, names) = self.cores("io");
        let shared = self.shared.path().display();
        let (second, links) = self.second(&names, ["", ", \"routed\""]);
        let mut config = format!(
            "control_socket = \"control.sock\"\nkey_directory = \"{shared}/keys\"\n{sidecores}\
             [[link]]\nname = \"wire\"\n{}{}sidecores = [{names}]\n{second}\
             [[client]]\nname = \"vmhost\"\nlinks = [\"wire\"{links}]\nsessions = {}\n",
            self.kind.keys(),
            self.link[0],
            self.sidecores,
        );
        for disk in 0..self.disks {
            let path = self.shared.path().join(format!("disk{disk}.img"));
            if !path.exists() {
                std::fs::File::create(&path).unwrap().set_len(DISK_BYTES).unwrap();
            }
            write!(
                config,
                "[[store]]\nname = \"file{disk}\"\ntype = \"file\"\npath = \"{}\"\ndirect = \
                 false\n[[device]]\nname = \"disk{disk}\"\nfront_end = \"vrio\"\nclient = \
                 \"vmhost\"\nstore = \"file{disk}\"\n",
                path.display()
            )
            .unwrap();
        }
        Daemon::start_in(&self.hosts[0], tempfile::tempdir().unwrap(), &config)
    }

    /// Starts the IOhost, and has it write an invitation.
    fn inviting_iohost(&self) -> Daemon {
        let iohost = self.iohost();
        let invitation = iohost.client().invite("vmhost").unwrap().invitation;
        let path = self.shared.path().join("invitation");
        std::fs::write(&path, &invitation).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        iohost
    }

    fn vmhost(&self) -> Daemon {
        let (sidecores, names) = self.cores("vm");
        const ON_SECOND: &str = "second_link = \"routed\"\nsecond_address = \"10.9.0.1:34997\"\n";
        let (second, on_second) = self.second(&names, ["", ON_SECOND]);
        let mut config = format!(
            "control_socket = \"control.sock\"\n{sidecores}\
             [[link]]\nname = \"wire\"\n{}{}sidecores = [{names}]\n{second}\
             [[iohost]]\nname = \"io1\"\nlink = \"wire\"\nclient = \"vmhost\"\naddress = \
             \"{}\"\ninvitation = \"{}/invitation\"\n{on_second}{}",
            self.kind.keys(),
            self.link[1],
            self.kind.address(),
            self.shared.path().display(),
            self.away
        );
        for disk in 0..self.disks {
            write!(
                config,
                "[[store]]\nname = \"disk{disk}\"\ntype = \"remote\"\niohost = \
                 \"io1\"\n[[device]]\nname = \"vd{disk}\"\nstore = \"disk{disk}\"\nsocket = \
                 \"vd{disk}.sock\"\nqueues = {}\nsidecores = [{names}]\n",
                self.sidecores
            )
            .unwrap();
        }
        Daemon::start_in(&self.hosts[1], tempfile::tempdir().unwrap(), &config)
    }

    /// The data of a disk at the IOhost.
    fn file(&self, disk: usize) -> Vec<u8> {
        std::fs::read(self.shared.path().join(format!("disk{disk}.img"))).unwrap()
    }

    /// A guest of this disk, once the VMhost serves it.
    fn guest(&self, vmhost: &Daemon, disk: usize) -> BlkClient {
        let control = vmhost.client();
        let name = format!("vd{disk}");
        wait::succeed(SOON, || {
            let devices = control.devices().unwrap();
            let is_it = |it: &DeviceReport| it.name == name && it.state == DeviceState::Waiting;
            let report = || format!("{name} is not attached: {:?}", control.remote().unwrap());
            devices.iter().any(is_it).then_some(()).ok_or_else(report)
        });
        let queues = u16::try_from(self.sidecores).unwrap();
        let slot_bytes = LONG;
        let options =
            ClientOptions { queues, slot_bytes, huge_pages: false, ..ClientOptions::default() };
        let socket = vmhost.directory.path().join(format!("{name}.sock"));
        BlkClient::connect(&socket, &options).unwrap()
    }
}

/// Waits for a report of the remote channel, and returns the time that it took to come.
fn remote(what: &str, daemon: &Daemon, is_it: impl Fn(&RemoteReport) -> bool) -> Duration {
    let (control, begun) = (daemon.client(), Instant::now());
    wait::until(what, SOON, || is_it(&control.remote().unwrap()));
    begun.elapsed()
}

fn has_state(report: &RemoteReport, state: &str) -> bool {
    report.iohosts.iter().any(|iohost| iohost.state == state)
}

fn end(mut daemon: Daemon) {
    daemon.signal(Signal::TERM);
    let (status, complaint) = daemon.wait();
    assert!(status.success(), "{complaint}");
}

/// A sealed disk over a link of this kind, whose IOhost is killed with writes in flight.
fn carries_a_disk(kind: Kind) {
    let Some(place) = Place::new(kind) else { return };
    let iohost = place.inviting_iohost();
    let vmhost = place.vmhost();
    let mut guest = place.guest(&vmhost, 0);
    let queue = guest.queue(0).unwrap();
    let slots: Vec<Slot> = (0..16).map(|_| queue.take_slot().unwrap()).collect();
    for index in 0..32 {
        write(queue, slots[0], index, data(index, 0, LONG));
    }
    for index in 0..32 {
        assert!(read(queue, slots[0], index, LONG) == data(index, 0, LONG), "{index}");
    }
    remote("the link is sealed", &vmhost, |report| {
        let mut iohosts = report.iohosts.iter();
        iohosts.any(|it| it.encryption == "on" && it.frame_bytes == 8100 && it.credits > 0)
    });
    let again = || place.iohost();
    let iohost = survives_kills(queue, &slots, iohost, 2, (again, || place.file(0)));
    remote("sessions", &vmhost, |report| report.iohosts.iter().any(|it| it.counts.sessions >= 3));
    drop(guest);
    end(vmhost);
    end(iohost);
}

#[test]
fn a_packet_link_carries_a_sealed_disk_and_survives_its_iohost() {
    carries_a_disk(Kind::Packet);
}

#[test]
fn an_xdp_link_carries_a_sealed_disk_and_survives_its_iohost() {
    carries_a_disk(Kind::Xdp);
}

#[test]
fn a_udp_link_carries_a_sealed_disk_and_survives_its_iohost() {
    carries_a_disk(Kind::Udp);
}

/// Writes and reads with many requests in flight, and compares all of it.
fn exchange(queue: &mut BlkQueue, slots: &[Slot], rounds: std::ops::Range<u64>) {
    let count = slots.len() as u64;
    for round in rounds {
        for (index, slot) in (0..count).zip(slots) {
            submit(queue, *slot, index, data(index, round, LONG));
        }
        let done = complete_all(queue, slots.len());
        assert!(done.iter().all(|done| done.status == Status::Ok), "{done:?}");
        for (index, slot) in (0..count).zip(slots) {
            queue.write_data(*slot, 0, &vec![0xee; LONG as usize]);
            let sector = Sector(index * u64::from(LONG) / 512);
            queue.submit_read(*slot, sector, LONG).unwrap();
        }
        let done = complete_all(queue, slots.len());
        assert!(done.iter().all(|done| done.status == Status::Ok), "{done:?}");
        for (index, slot) in (0..count).zip(slots) {
            let mut back = vec![0; LONG as usize];
            queue.read_data(*slot, 0, &mut back);
            assert!(back == data(index, round, LONG), "round {round}, {index}");
        }
    }
}

#[test]
fn a_disk_in_use_moves_between_two_links_to_one_iohost() {
    let Some(place) = Place::with_two_links() else { return };
    let iohost = place.inviting_iohost();
    let vmhost = place.vmhost();
    let mut guest = place.guest(&vmhost, 0);
    let queue = guest.queue(0).unwrap();
    let slots: Vec<Slot> = (0..16).map(|_| queue.take_slot().unwrap()).collect();
    remote("two sessions", &vmhost, |report| {
        report.iohosts.iter().all(|iohost| iohost.counts.sessions == 2)
    });
    // They were looked for on both links.
    vmhost.client().move_iohost("io1", "wire").unwrap();
    let is_over = AtomicBool::new(false);
    let mut pauses: Vec<Duration> = std::thread::scope(|threads| {
        let mover = threads.spawn(|| {
            let _over = Over(&is_over);
            let control = vmhost.client();
            let links = ["routed", "wire"].into_iter().cycle().take(20);
            let moves = links.map(|link| {
                let moved = control.move_iohost("io1", link).unwrap();
                assert_eq!((moved.link.as_str(), moved.sessions), (link, 2));
                remote("the other link is used", &vmhost, |report| {
                    report.iohosts.iter().all(|iohost: &IohostReport| iohost.link == link)
                });
                Duration::from_nanos(moved.pause_ns)
            });
            moves.collect()
        });
        for round in 0.. {
            exchange(queue, &slots, round..round + 1);
            if is_over.load(Ordering::Relaxed) {
                break;
            }
        }
        mover.join().unwrap()
    });
    pauses.sort();
    eprintln!("20 moves paused for {:?} to {:?}, median {:?}", pauses[0], pauses[19], pauses[10]);
    let control = vmhost.client();
    let refused = control.move_iohost("io1", "wide").unwrap_err().to_string();
    let wanted =
        "link \"wide\" does not lead to iohost \"io1\": its links are \"wire\" and \"routed\"";
    assert_eq!(refused, wanted);
    flush(queue, slots[0]);
    drop(guest);
    end(vmhost);
    end(iohost);
}

/// Says that a thread has ended, also when it has failed.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// The link of a daemon. A sidecore that is busy may be missing in a report.
fn link_counts(daemon: &Daemon) -> LinkCounts {
    let control = daemon.client();
    wait::succeed(SOON, || {
        let links = control.remote().unwrap().links;
        links.into_iter().next().map(|link| link.counts).ok_or_else(|| "no link".to_owned())
    })
}

const OFFLOAD: &str = "segmentation_offload = true\n";

#[test]
fn long_requests_travel_together_if_both_links_do_so() {
    for (keys, together) in
        [([OFFLOAD, OFFLOAD], true), ([OFFLOAD, ""], false), (["", OFFLOAD], false)]
    {
        let Some(mut place) = Place::new(Kind::Packet) else { return };
        place.link = keys;
        let iohost = place.inviting_iohost();
        let vmhost = place.vmhost();
        let mut guest = place.guest(&vmhost, 0);
        let queue = guest.queue(0).unwrap();
        let slots: Vec<Slot> = (0..16).map(|_| queue.take_slot().unwrap()).collect();
        let is_together = || [&iohost, &vmhost].map(|daemon| link_counts(daemon).offloaded > 0);
        exchange(queue, &slots, 0..4);
        let begun = Instant::now();
        // A link that waits too long for the processor believes an answer no more, and asks again.
        for round in 4.. {
            if !together || is_together() == [true, true] {
                break;
            }
            let counts = || [&iohost, &vmhost].map(link_counts);
            assert!(begun.elapsed() < SOON, "{:?}", counts());
            exchange(queue, &slots, round..round + 1);
        }
        assert_eq!(is_together(), [together; 2], "{keys:?}");
        for daemon in [&iohost, &vmhost] {
            assert_eq!(link_counts(daemon).dropped_malformed, 0);
        }
        drop(guest);
        end(vmhost);
        end(iohost);
    }
}

#[test]
fn a_bad_wire_between_links_with_offload_loses_no_request() {
    let Some((mut place, middle)) = Place::with_wire(Kind::Packet) else { return };
    place.link = [OFFLOAD; 2];
    let iohost = place.inviting_iohost();
    let vmhost = place.vmhost();
    let mut guest = place.guest(&vmhost, 0);
    let queue = guest.queue(0).unwrap();
    let slots: Vec<Slot> = (0..16).map(|_| queue.take_slot().unwrap()).collect();
    middle.handle.set_chances(BAD);
    let begun = Instant::now();
    for round in 1.. {
        exchange(queue, &slots, round..round + 1);
        // Each segment has a fate of its own.
        let fates = middle.handle.segment_counts();
        let is_enough = fates.lost.min(fates.doubled).min(fates.overtaken) > 50;
        let offloaded = [&iohost, &vmhost].map(|daemon| link_counts(daemon).offloaded);
        if is_enough && fates.damaged > 5 && offloaded.iter().all(|frames| *frames > 100) {
            eprintln!("after {round} rounds: {fates:?}, sent in packets of several: {offloaded:?}");
            break;
        }
        assert!(begun.elapsed() < SOON, "{fates:?}, sent in packets of several: {offloaded:?}");
    }
    flush(queue, slots[0]);
    // A path that has become too narrow for packets of several frames gets single frames.
    middle.handle.limit_frames(1500);
    remote("the narrow path is found", &vmhost, has_frames(1452));
    exchange(queue, &slots, 0..2);
    middle.handle.limit_frames(ALL);
    remote("the path is wide again", &vmhost, has_frames(8100));
    exchange(queue, &slots, 2..3);
    drop(guest);
    end(vmhost);
    end(iohost);
}

/// Whether the client is connected, by frames of this size.
fn has_frames(bytes: u32) -> impl Fn(&RemoteReport) -> bool {
    move |report| {
        let mut iohosts = report.iohosts.iter();
        iohosts.any(|it| it.state == "connected" && it.frame_bytes == bytes)
    }
}

/// Faults of a wire that loses no connection by them.
const BAD: Chances = Chances { loss: 10.0, doubling: 10.0, reordering: 10.0, damage: 2.0 };

/// A disk over a wire that loses, doubles, reorders and damages frames, and then is cut.
fn bad_wire(kind: Kind) {
    let Some((mut place, middle)) = Place::with_wire(kind) else { return };
    place.away = "on_disconnect = \"fail\"\nfail_after_s = 5\n";
    let iohost = place.inviting_iohost();
    let vmhost = place.vmhost();
    let mut guest = place.guest(&vmhost, 0);
    let queue = guest.queue(0).unwrap();
    let slots: Vec<Slot> = (0..16).map(|_| queue.take_slot().unwrap()).collect();
    middle.handle.set_chances(BAD);
    exchange(queue, &slots, 1..9);
    flush(queue, slots[0]);
    let carried = middle.handle.counts();
    assert!(carried.lost > 100 && carried.doubled > 100 && carried.overtaken > 50, "{carried:?}");
    let control = vmhost.client();
    let counts = control.remote().unwrap().iohosts.remove(0).counts;
    assert!(counts.retransmissions + counts.asks > 10, "{counts:?}");
    middle.handle.set_chances(Chances::default());
    // A wire that carries one way only is found without any request.
    middle.handle.cut_from_left();
    let took = remote("the one-way wire is found", &vmhost, |report| has_state(report, "away"));
    eprintln!("a one-way wire was reported after {took:?}");
    middle.handle.mend();
    remote("the wire is mended", &vmhost, |report| has_state(report, "connected"));
    write(queue, slots[0], 3, data(3, 100, BLOCK));
    // Requests fail when the IOhost has been away for the time that the configuration names.
    middle.handle.cut();
    submit(queue, slots[0], 3, data(3, 101, BLOCK));
    assert_eq!(complete(queue).status, Status::IoError);
    middle.handle.mend();
    remote("the wire is mended", &vmhost, |report| has_state(report, "connected"));
    wait::until("requests are carried out again", SOON, || {
        submit(queue, slots[0], 3, data(3, 102, BLOCK));
        complete(queue).status == Status::Ok
    });
    assert!(read(queue, slots[0], 3, BLOCK) == data(3, 102, BLOCK));
    drop(guest);
    end(vmhost);
    end(iohost);
}

#[test]
fn a_bad_wire_between_packet_links_loses_no_request_and_its_end_fails_them() {
    bad_wire(Kind::Packet);
}

#[test]
fn a_bad_wire_between_xdp_links_loses_no_request_and_its_end_fails_them() {
    bad_wire(Kind::Xdp);
}

#[test]
fn a_path_that_narrows_is_found_without_a_request() {
    let Some((place, middle)) = Place::with_wire(Kind::Packet) else { return };
    let iohost = place.inviting_iohost();
    let vmhost = place.vmhost();
    let mut guest = place.guest(&vmhost, 0);
    let queue = guest.queue(0).unwrap();
    let slots: Vec<Slot> = (0..8).map(|_| queue.take_slot().unwrap()).collect();
    exchange(queue, &slots, 0..1);
    remote("full frames", &vmhost, has_frames(8100));
    middle.handle.limit_frames(1500);
    let took = remote("the narrow path is found", &vmhost, has_frames(1452));
    eprintln!("a narrow path was reported after {took:?}");
    exchange(queue, &slots, 1..3);
    middle.handle.limit_frames(ALL);
    remote("the path is wide again", &vmhost, has_frames(8100));
    exchange(queue, &slots, 3..4);
    drop(guest);
    end(vmhost);
    end(iohost);
}

#[test]
fn sidecores_share_several_disks_and_keep_the_order_of_each() {
    for kind in [Kind::Packet, Kind::Udp] {
        let Some(mut place) = Place::new(kind) else { return };
        (place.sidecores, place.disks) = (2, 3);
        let iohost = place.inviting_iohost();
        let vmhost = place.vmhost();
        let mut guests: Vec<BlkClient> =
            (0..place.disks).map(|disk| place.guest(&vmhost, disk)).collect();
        let slots: Vec<Vec<Vec<Slot>>> = guests
            .iter_mut()
            .map(|guest| {
                let queues = 0..place.sidecores as u16;
                let take = |queue| {
                    let queue = guest.queue(queue).unwrap();
                    (0..8).map(|_| queue.take_slot().unwrap()).collect()
                };
                queues.map(take).collect()
            })
            .collect();
        for round in 1..=20 {
            for (guest, slots) in guests.iter_mut().zip(&slots) {
                for (number, slots) in (0_u16..).zip(slots) {
                    // Each queue writes one block of its own eight times: the last write counts.
                    let queue = guest.queue(number).unwrap();
                    for (write, slot) in (0..).zip(slots) {
                        let bytes = data(write, round, BLOCK);
                        queue.write_data(*slot, 0, &bytes);
                        let sector = Sector(u64::from(number) * SECTORS);
                        queue.submit_write(*slot, sector, BLOCK).unwrap();
                    }
                    queue.publish().unwrap();
                }
            }
            for (guest, slots) in guests.iter_mut().zip(&slots) {
                for (number, slots) in (0_u16..).zip(slots) {
                    let queue = guest.queue(number).unwrap();
                    let done = complete_all(queue, slots.len());
                    assert!(done.iter().all(|done| done.status == Status::Ok), "{done:?}");
                    let back = read(queue, slots[0], number.into(), BLOCK);
                    assert!(back == data(7, round, BLOCK), "{kind:?}, round {round}");
                }
            }
        }
        // On a busy machine one may have ended and begun again. The IOhost knows both of now.
        remote("both sessions are used", &vmhost, |report| {
            report.iohosts.iter().any(|it| it.counts.sessions >= 2)
        });
        remote("both queues are used", &iohost, |report| {
            let mut clients = report.clients.iter();
            clients.any(|it| it.sessions_open == 2 && it.counts.requests > 900)
        });
        drop(guests);
        end(vmhost);
        end(iohost);
    }
}
