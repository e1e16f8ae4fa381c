//! The control API over a real socket, in front of a stand-in.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;

use serde_json::json;
use sidecore_assembly::spec::{
    DeviceSpec, RemoteKind, RemotePart, ScheduleSpec, SocketAccess, StoreSpec,
};
use sidecore_assembly::{
    AddedStage, AssemblyError, Capture, ControllerHandle, ErrorKind, OperationError, Trace,
};
use sidecore_control::report::{
    ClosedControllerReport, DeviceReport, DeviceState, DeviceStats, LegReport, LinkMove,
    MirrorReport, QueueCounters, QueueCounts, ReactorCounts, RemoteReport, ScheduleReport,
    ScheduledVolumeReport, SidecoreReport, StageChange, StageReport, StagesReport, Stats,
    SwitchReport,
};
use sidecore_control::{
    Api, BindError, CaptureQuery, Client, ClientError, NewSchedule, NewSchedules, NewStage,
    RepairOfLeg, Socket, Source, TraceQuery,
};

struct StandIn;

fn queue() -> QueueCounters {
    let counts = QueueCounts { kicks: 3, requests: 30, ..QueueCounts::default() };
    QueueCounters { index: 1, counts, bytes: 0 }
}

impl Source for StandIn {
    fn stats(&self) -> Stats {
        let counts = ReactorCounts { turns: 5, ..ReactorCounts::default() };
        let sidecore = SidecoreReport {
            name: "sc0".to_owned(),
            cpu: Some(1),
            counts,
            ..SidecoreReport::default()
        };
        Stats {
            uptime_ns: 9,
            interval_ns: None,
            sidecores: vec![sidecore],
            devices: vec![DeviceStats { name: "vd0".to_owned(), queues: vec![queue()] }],
            meters: Vec::new(),
            stages: Vec::new(),
        }
    }

    fn devices(&self) -> Vec<DeviceReport> {
        vec![DeviceReport {
            name: "vd0".to_owned(),
            front_end: "virtio-blk".to_owned(),
            store: "mem".to_owned(),
            store_type: "ram".to_owned(),
            stages: Vec::new(),
            controller: None,
            volume: None,
            switch: None,
            socket: "/run/vd0.sock".to_owned(),
            capacity_bytes: 1 << 20,
            block_bytes: 512,
            read_only: true,
            queues: 2,
            queues_running: 0,
            sidecores: vec!["sc0".to_owned()],
            idle: "poll".to_owned(),
            state: DeviceState::Broken,
            reason: Some("queue 1: nonsense".to_owned()),
            warnings: vec!["a file has two readers".to_owned()],
            needs_reset: true,
            disconnect: None,
            counters: queue(),
        }]
    }

    fn controllers(&self) -> Vec<Arc<ControllerHandle>> {
        Vec::new()
    }

    fn closed_controllers(&self) -> Vec<ClosedControllerReport> {
        Vec::new()
    }

    fn remote(&self) -> RemoteReport {
        RemoteReport::default()
    }

    fn schedules(&self) -> Vec<ScheduleReport> {
        let schedule = ScheduleReport { name: "s".to_owned(), ..ScheduleReport::default() };
        vec![ScheduleReport { volumes: vec![ScheduledVolumeReport::default()], ..schedule }]
    }

    fn set_schedules(&self, schedules: Vec<ScheduleSpec>) -> Result<(), AssemblyError> {
        let kept: Vec<String> = schedules.iter().map(|spec| spec.keep.to_string()).collect();
        assert_eq!(kept, ["2 daily"]);
        let [ScheduleSpec { name, controller: Some(controller), .. }] = &schedules[..] else {
            return Ok(());
        };
        let (user, name) = (format!("schedule \"{name}\""), controller.clone());
        Err(AssemblyError::Unknown { user, kind: "controller", name })
    }

    fn run_schedules(&self) -> Vec<ScheduleReport> {
        let mut schedules = self.schedules();
        schedules[0].made = 1;
        schedules
    }

    fn mirrors(&self) -> Vec<MirrorReport> {
        let leg = LegReport { store: Some("a".to_owned()), ..LegReport::default() };
        vec![MirrorReport { name: "m".to_owned(), legs: vec![leg], ..MirrorReport::default() }]
    }

    fn add_leg(&self, mirror: &str, store: &str) -> Result<usize, OperationError> {
        assert_eq!(store, "b");
        self.permit_mirror(mirror, &[1, 3]).map(|()| 1)
    }

    fn remove_leg(&self, mirror: &str, leg: &str) -> Result<(), OperationError> {
        assert_eq!(leg, "1");
        self.permit_mirror(mirror, &[1, 3])
    }

    fn attach_leg(&self, mirror: &str, store: &str) -> Result<(), OperationError> {
        assert_eq!(store, "b");
        self.permit_mirror(mirror, &[1, 3])
    }

    fn repair_leg(
        &self,
        mirror: &str,
        legs: (&str, &str),
        range: (u64, Option<u64>),
    ) -> Result<(), OperationError> {
        assert_eq!((legs, range), (("0", "b"), (4096, None)));
        self.permit_mirror(mirror, &[1, 3])
    }

    fn permit_mirror(&self, mirror: &str, without: &[usize]) -> Result<(), OperationError> {
        assert_eq!(without, [1, 3]);
        if mirror == "m" { Ok(()) } else { self.revoke(mirror) }
    }

    fn switches(&self, _: bool) -> Vec<SwitchReport> {
        Vec::new()
    }

    fn set_rules(&self, port: &str, rules: &[String]) -> Result<(), OperationError> {
        assert_eq!(rules, ["to drop"]);
        if port == "nic" { Ok(()) } else { self.revoke(port) }
    }

    fn set_limits(&self, port: &str, limits: &[String]) -> Result<(), OperationError> {
        assert_eq!(limits, ["from 1/s"]);
        if port == "nic" { Ok(()) } else { self.revoke(port) }
    }

    fn set_faults(&self, port: &str, faults: &str) -> Result<(), OperationError> {
        assert_eq!(faults, "loss 1%");
        if port == "nic" { Ok(()) } else { self.revoke(port) }
    }

    fn capture(&self, port: &str, snaplen: u32) -> Result<Capture, OperationError> {
        let why = format!("no capture of {snaplen} bytes of {port}");
        Err(OperationError::new(ErrorKind::Conflict, why))
    }

    fn trace_port(&self, port: &str) -> Result<Trace, OperationError> {
        Err(OperationError::new(ErrorKind::Conflict, format!("no trace of {port}")))
    }

    fn trace_switch(&self, switch: &str) -> Result<Trace, OperationError> {
        Err(OperationError::new(ErrorKind::NotFound, format!("no switch {switch}")))
    }

    fn invite(&self, client: &str) -> Result<String, OperationError> {
        Ok(format!("the invitation of {client}"))
    }

    fn revoke(&self, client: &str) -> Result<(), OperationError> {
        Err(OperationError::new(ErrorKind::NotFound, format!("no {client}")))
    }

    fn drain_client(&self, client: &str) -> Result<(), OperationError> {
        if client == "vmhost1" { Ok(()) } else { self.revoke(client) }
    }

    fn undrain_client(&self, client: &str) -> Result<(), OperationError> {
        self.drain_client(client)
    }

    fn drain_iohost(&self, iohost: &str) -> Result<(), OperationError> {
        if iohost == "io1" { Ok(()) } else { self.revoke(iohost) }
    }

    fn move_iohost(&self, iohost: &str, link: &str) -> Result<LinkMove, OperationError> {
        self.drain_iohost(iohost)?;
        let (iohost, link) = (iohost.to_owned(), link.to_owned());
        Ok(LinkMove { iohost, link, sessions: 2, pause_ns: 1_000 })
    }

    fn undrain_iohost(&self, iohost: &str) -> Result<(), OperationError> {
        self.drain_iohost(iohost)
    }

    fn add_part(&self, part: &RemotePart) -> Result<(), AssemblyError> {
        let (kind, name) = (part.kind().word(), part.name().to_owned());
        if name == "new" { Ok(()) } else { Err(AssemblyError::Duplicate { kind, name }) }
    }

    fn remove_part(&self, kind: RemoteKind, name: &str) -> Result<(), AssemblyError> {
        let (kind, name) = (kind.word(), name.to_owned());
        if name == "old" { Ok(()) } else { Err(AssemblyError::NoPart { kind, name }) }
    }

    fn add_device(&self, _: &DeviceSpec, _: Option<&StoreSpec>) -> Result<(), AssemblyError> {
        Err(AssemblyError::Ending)
    }

    fn remove_device(&self, name: &str) -> Result<(), AssemblyError> {
        Err(AssemblyError::NoDevice { name: name.to_owned() })
    }

    fn accept_loss(&self, name: &str) -> Result<(), AssemblyError> {
        Err(AssemblyError::NothingMissing { name: name.to_owned() })
    }

    fn stages(&self, device: &str) -> Result<StagesReport, OperationError> {
        let stage = StageReport {
            position: 1,
            word: "delay".to_owned(),
            is_live: true,
            settings: vec!["delay_us=5".to_owned()],
            threads: 0,
            failure: None,
            recording: None,
            findings: None,
        };
        Ok(StagesReport { device: device.to_owned(), stages: vec![stage] })
    }

    fn add_stage(
        &self,
        device: &str,
        stage: &AddedStage,
        position: usize,
    ) -> Result<StageChange, OperationError> {
        Ok(changed(device, stage.spec.word(), position))
    }

    fn remove_stage(&self, device: &str, stage: &str) -> Result<StageChange, OperationError> {
        if stage != "delay" {
            return Err(OperationError::new(ErrorKind::NotFound, "there is none"));
        }
        Ok(changed(device, stage, 1))
    }
}

fn changed(device: &str, word: &str, position: usize) -> StageChange {
    let (device, word) = (device.to_owned(), word.to_owned());
    StageChange { device, word, position, queues: 2, pause_ns: 1_000 }
}

fn serve(path: &Path) -> Api {
    Api::start(Socket::bind(path, &SocketAccess::default()).unwrap(), Arc::new(StandIn), || {})
        .unwrap()
}

/// Returns the raw text of the answer.
fn raw(path: &Path, request: &str) -> String {
    let mut stream = UnixStream::connect(path).unwrap();
    write!(stream, "{request} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn the_client_reads_the_reports_of_the_source() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("control.sock");
    let api = serve(&path);
    let client = Client::new(&path).unwrap();
    assert_eq!(client.stats().unwrap(), StandIn.stats());
    assert_eq!(client.devices().unwrap(), StandIn.devices());
    assert_eq!(client.sidecores().unwrap(), StandIn.stats().sidecores);
    assert_eq!(client.remote().unwrap(), StandIn.remote());
    assert_eq!(client.invite("a b").unwrap().invitation, "the invitation of a b");
    assert_eq!(client.revoke("x").unwrap_err().to_string(), "no x");
    let query = CaptureQuery { snaplen: 96, count: Some(1), seconds: Some(2) };
    let refused = client.capture("n/1", &query, || Ok(std::io::sink())).unwrap_err();
    assert!(matches!(&refused, ClientError::Denied { status: 409, .. }), "{refused:?}");
    assert_eq!(refused.to_string(), "no capture of 96 bytes of n/1");
    let query = TraceQuery { count: Some(1), seconds: Some(2) };
    let refused = client.trace_port("n/1", &query, || Ok(std::io::sink())).unwrap_err();
    assert_eq!(refused.to_string(), "no trace of n/1");
    let refused = client.trace_switch("a b", &TraceQuery::default(), || Ok(std::io::sink()));
    assert_eq!(refused.unwrap_err().to_string(), "no switch a b");
    let rules = || vec!["to drop".to_owned()];
    client.set_faults("nic", "loss 1%").unwrap();
    client.set_limits("nic", vec!["from 1/s".to_owned()]).unwrap();
    client.set_rules("nic", rules()).unwrap();
    assert_eq!(client.set_rules("a/b", rules()).unwrap_err().to_string(), "no a/b");
    let unknown = client.rules("nic").unwrap_err().to_string();
    assert_eq!(unknown, "there is no port \"nic\"");
    let moved = client.move_iohost("io1", "near").unwrap();
    assert_eq!((moved.link.as_str(), moved.sessions, moved.pause_ns), ("near", 2, 1_000));
    assert_eq!(client.move_iohost("x", "near").unwrap_err().to_string(), "no x");
    for undo in [false, true] {
        client.drain("vmhost1", undo).unwrap();
        assert_eq!(client.drain("x", undo).unwrap_err().to_string(), "no x");
        client.drain_iohost("io1", undo).unwrap();
        assert_eq!(client.drain_iohost("x", undo).unwrap_err().to_string(), "no x");
    }
    assert!(
        client.metrics(false).unwrap().contains("sidecore_device_kicks_total{device=\"vd0\"} 3\n")
    );
    let of_queue = "sidecore_queue_kicks_total{device=\"vd0\",queue=\"1\"} 3\n";
    assert!(!client.metrics(false).unwrap().contains(of_queue));
    assert!(client.metrics(true).unwrap().contains(of_queue));
    drop(api);
    assert!(!path.exists());
}

#[test]
fn mirrors_are_shown_and_changed() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("control.sock");
    let _api = serve(&path);
    let client = Client::new(&path).unwrap();
    assert_eq!(client.mirrors().unwrap(), StandIn.mirrors());
    client.add_leg("m", "b").unwrap();
    client.attach_leg("m", "b").unwrap();
    client.remove_leg("m", "1").unwrap();
    let repair = RepairOfLeg {
        from: "0".to_owned(),
        to: "b".to_owned(),
        offset_bytes: 4096,
        len_bytes: None,
    };
    client.repair_leg("m", &repair).unwrap();
    client.permit_mirror("m", &[1, 3]).unwrap();
    assert!(client.permit_mirror("x", &[1, 3]).is_err());
}

#[test]
fn schedules_are_shown_run_and_replaced() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("control.sock");
    let _api = serve(&path);
    let client = Client::new(&path).unwrap();
    assert_eq!(client.schedules().unwrap(), StandIn.schedules());
    assert_eq!(client.run_schedules().unwrap()[0].made, 1);
    let schedule = |controller: Option<&str>, keep: &str| {
        let keys = json!({
            "name": "s", "controller": controller, "volumes": ["vm*"], "keep": keep,
        });
        NewSchedules { schedules: vec![NewSchedule(keys.as_object().unwrap().clone())] }
    };
    client.set_schedules(&schedule(None, "2 daily")).unwrap();
    let said = |new: NewSchedules| match client.set_schedules(&new) {
        Err(ClientError::Denied { status, why }) => (status, why),
        other => panic!("{other:?}"),
    };
    let (status, why) = said(schedule(Some("pond"), "2 daily"));
    assert_eq!((status, why.contains("names controller \"pond\"")), (400, true), "{why}");
    let (status, why) = said(schedule(None, "2 dayly"));
    assert_eq!((status, why.contains("\"dayly\" is no period")), (400, true), "{why}");
}

#[test]
fn stages_come_and_go_by_name() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("control.sock");
    let _api = serve(&path);
    let client = Client::new(&path).unwrap();
    let stages = client.stages("vd0").unwrap();
    assert_eq!((stages.device.as_str(), stages.stages[0].word.as_str()), ("vd0", "delay"));
    let delay = NewStage::new("delay").with("delay_us", 7).with("position", 2);
    assert_eq!(client.add_stage("vd0", &delay).unwrap(), changed("vd0", "delay", 2));
    assert_eq!(client.remove_stage("vd0", "delay").unwrap(), changed("vd0", "delay", 1));
    let said = |result: Result<StageChange, ClientError>| match result {
        Err(ClientError::Denied { status, why }) => (status, why),
        other => panic!("{other:?}"),
    };
    assert_eq!(said(client.remove_stage("vd0", "a/b")), (404, "there is none".to_owned()));
    let (status, why) = said(client.add_stage("vd0", &NewStage::new("tape")));
    assert_eq!(status, 400);
    assert!(why.contains("is not one of \"delay\""), "{why}");
}

#[test]
fn links_clients_and_iohosts_have_the_keys_of_the_file() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("control.sock");
    let _api = serve(&path);
    let client = Client::new(&path).unwrap();
    let good = [
        (RemoteKind::Link, json!({ "name": "new", "type": "udp", "listen": "127.0.0.1:0" })),
        (RemoteKind::Client, json!({ "name": "new", "links": ["wire"], "read_iops": 100 })),
        (RemoteKind::Iohost, json!({ "name": "new", "link": "wire", "client": "vmhost1" })),
    ];
    for (kind, mut keys) in good {
        client.add_part(kind, &keys).unwrap();
        keys["colour"] = "red".into();
        let why = client.add_part(kind, &keys).unwrap_err().to_string();
        assert!(why.contains("unknown key `colour`"), "{why}");
        keys.as_object_mut().unwrap().remove("colour");
        keys["name"] = "there".into();
        let why = client.add_part(kind, &keys).unwrap_err().to_string();
        assert_eq!(
            why,
            format!("there is a {} \"there\" already; choose another name", kind.word())
        );
        let why = client.add_part(kind, &json!({ "name": "new" })).unwrap_err().to_string();
        assert!(why.contains("is missing; add for instance"), "{why}");
        client.remove_part(kind, "old").unwrap();
        let why = client.remove_part(kind, "other").unwrap_err().to_string();
        assert_eq!(why, format!("there is no {} \"other\"", kind.word()));
    }
}

#[test]
fn the_answers_are_those_of_the_manual() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("control.sock");
    let _api = serve(&path);
    let devices = raw(&path, "GET /v1/devices");
    assert!(devices.starts_with("HTTP/1.1 200 OK\r\n"), "{devices}");
    assert!(devices.contains("content-type: application/json"), "{devices}");
    for field in [
        "\"type\":\"ram\"",
        "\"state\":\"broken\"",
        "\"reason\":\"queue 1: nonsense\"",
        "\"needs_reset\":true",
        "\"warnings\":[\"a file",
    ] {
        assert!(devices.contains(field), "{field}: {devices}");
    }
    let stats = raw(&path, "GET /v1/stats");
    for field in [
        "\"sidecores\":[{\"name\":\"sc0\",\"cpu\":1",
        "\"kicks\":3",
        "\"latency_ns\":{\"count\":0",
        "\"p99_9\":",
        "\"p99_99\":",
    ] {
        assert!(stats.contains(field), "{field}: {stats}");
    }
    assert!(raw(&path, "GET /v1/sidecores").contains("{\"sidecores\":[{\"name\":\"sc0\""));
    assert!(raw(&path, "GET /metrics").contains("content-type: text/plain; version=0.0.4"));
    assert!(!raw(&path, "GET /metrics").contains("sidecore_queue_"));
    assert!(raw(&path, "GET /metrics?per_queue=1").contains("sidecore_queue_kicks_total"));
    for query in ["per_queue=2", "per_queue=x", "queues=1"] {
        assert!(
            raw(&path, &format!("GET /metrics?{query}")).starts_with("HTTP/1.1 400 "),
            "{query}"
        );
    }
    assert!(raw(&path, "GET /v2").starts_with("HTTP/1.1 404 "));
    assert!(raw(&path, "GET /v2").contains("there are /v1/devices"));
    assert!(raw(&path, "POST /v1/stats").starts_with("HTTP/1.1 405 "));
    assert!(raw(&path, "POST /v1/stats").contains("there is no POST of /v1/stats"));
}

#[test]
fn a_refusal_has_a_status_and_a_reason() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("control.sock");
    let _api = serve(&path);
    let device = "{\"name\":\"x\",\"store\":\"mem\",\"socket\":\"/run/x.sock\"}";
    for (request, body, status, reason) in [
        ("GET /v1/controllers/c", "", 404, "there is no controller \\\"c\\\"; there are none"),
        ("POST /v1/controllers/c/volumes", "nonsense", 404, "there is no controller"),
        ("GET /v1/controllers/c/volumes/v/extents?from=x", "", 400, "from"),
        ("GET /v1/controllers/c/volumes/v/extents?max=0", "", 400, "from 1 to 65536"),
        ("DELETE /v1/devices/y", "", 404, "there is no device \\\"y\\\""),
        ("DELETE /v1/devices/%2e%2e%2fy", "", 404, "there is no device \\\"../y\\\""),
        ("DELETE /v1/devices/%ff", "", 400, ""),
        ("POST /v1/devices", "", 400, "a name has 1 to 64"),
        ("POST /v1/devices", "{", 400, "the request is invalid"),
        ("POST /v1/devices", "[1]", 400, "the request is invalid"),
        ("POST /v1/devices", "{\"colour\":1}", 400, "unknown key `colour`"),
        ("POST /v1/devices", &device.replace('/', "r"), 400, "absolute path"),
        ("POST /v1/devices", device, 503, "coming to its end"),
        ("POST /v1/devices", &" ".repeat(1 << 20), 413, "at most 65536 bytes"),
        ("PUT /v1/devices", "", 405, "there is no PUT"),
    ] {
        let mut stream = UnixStream::connect(&path).unwrap();
        let length = body.len();
        write!(
            stream,
            "{request} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n"
        )
        .unwrap();
        // The server may have answered before it received all of the body.
        let _ = stream.write_all(body.as_bytes());
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        let answer = String::from_utf8_lossy(&answer);
        assert!(
            answer.starts_with(&format!("HTTP/1.1 {status} ")),
            "{request} {body:.40}: {answer}"
        );
        assert!(answer.contains(reason), "{request}: {answer}");
    }
    let error = Client::new(&path).unwrap().remove_device("..").unwrap_err();
    assert!(matches!(error, ClientError::Denied { status: 404, .. }), "{error:?}");
    assert_eq!(error.to_string(), "there is no device \"..\"");
}

#[test]
fn the_socket_is_for_its_owner_alone() {
    use std::os::unix::fs::PermissionsExt as _;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("control.sock");
    let _api = serve(&path);
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
}

#[test]
fn nonsense_and_silence_on_one_connection_do_not_delay_another() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("control.sock");
    let _api = serve(&path);
    let _silent: Vec<UnixStream> = (0..16).map(|_| UnixStream::connect(&path).unwrap()).collect();
    let mut babbling = UnixStream::connect(&path).unwrap();
    babbling.write_all(&[0xff; 4096]).unwrap();
    assert_eq!(Client::new(&path).unwrap().stats().unwrap(), StandIn.stats());
}

#[test]
fn a_socket_belongs_to_one_daemon_and_a_dead_ones_is_replaced() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("control.sock");
    // A listener that is closed leaves its file behind.
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    let _api = serve(&path);
    let error = Socket::bind(&path, &SocketAccess::default()).unwrap_err();
    assert!(matches!(error, BindError::Taken(_)), "{error}");
    // The failed attempt has not removed the socket.
    Client::new(&path).unwrap().stats().unwrap();
    let nowhere = Socket::bind(&path.join("such.sock"), &SocketAccess::default()).unwrap_err();
    assert!(nowhere.to_string().contains("cannot listen"), "{nowhere}");
}

#[test]
fn another_file_at_the_sockets_path_is_left_alone() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("precious");
    std::fs::write(&path, "data").unwrap();
    assert!(matches!(
        Socket::bind(&path, &SocketAccess::default()),
        Err(BindError::Refused { .. })
    ));
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "data");
}

#[test]
fn without_a_daemon_the_client_names_the_remedy() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("control.sock");
    let error = Client::new(&path).unwrap().stats().unwrap_err();
    assert!(matches!(error, ClientError::NoDaemon(_)), "{error}");
    assert!(error.to_string().contains("sidecored --config FILE"), "{error}");
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    let error = Client::new(&path).unwrap().stats().unwrap_err();
    assert!(matches!(error, ClientError::NoDaemon(_)), "{error}");
}

#[test]
fn another_server_is_told_apart_from_a_sidecored() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("other.sock");
    let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let server = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let _ = stream.read(&mut [0; 1024]);
        stream.write_all(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n").unwrap();
        let (stream, _) = listener.accept().unwrap();
        drop(stream);
    });
    let client = Client::new(&path).unwrap();
    assert!(matches!(client.stats(), Err(ClientError::Refused { status: 404, .. })));
    assert!(matches!(client.stats(), Err(ClientError::Failed { .. })));
    server.join().unwrap();
}
