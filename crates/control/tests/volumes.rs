//! Controllers, volumes and devices over the control socket, in front of an assembly.

mod schema;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use sidecore_assembly::Assembly;
use sidecore_assembly::spec::{
    ControllerSpec, FormatSpec, SidecoreSpec, SocketAccess, Spec, StoreKind, StoreSpec,
};
use sidecore_control::report::DedupPhase;
use sidecore_control::{
    Api, Client, ClientError, CreateVolume, Dedup, ExtentsQuery, NewDevice, Socket,
};
use tempfile::TempDir;

struct Daemon {
    _api: Api,
    directory: TempDir,
}

impl Daemon {
    fn start() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let spec = Spec {
            sidecores: vec![SidecoreSpec { name: "sc0".to_owned(), cpu: None }],
            stores: vec![StoreSpec::new(
                "below",
                StoreKind::Ram { size_bytes: 32 << 20, block_bytes: 512 },
            )],
            controllers: vec![ControllerSpec {
                format: Some(FormatSpec::default()),
                ..ControllerSpec::new("pool", "below")
            }],
            ..Spec::default()
        };
        let socket =
            Socket::bind(&directory.path().join("control.sock"), &SocketAccess::default()).unwrap();
        let assembly = Arc::new(Assembly::start(&spec).unwrap());
        Self { _api: Api::start(socket, assembly, || {}).unwrap(), directory }
    }

    fn socket(&self) -> PathBuf {
        self.directory.path().join("control.sock")
    }

    fn client(&self) -> Client {
        Client::new(&self.socket()).unwrap()
    }
}

/// Sends a request, and returns the status and the body of the answer.
fn ask(path: &Path, request: &str, body: &str) -> (u16, String) {
    let mut stream = UnixStream::connect(path).unwrap();
    let length = body.len();
    write!(
        stream,
        "{request} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n\
         {body}"
    )
    .unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let status = answer.get(9..12).and_then(|status| status.parse().ok());
    let body = answer.split_once("\r\n\r\n").map_or("", |(_, body)| body);
    (status.unwrap_or_else(|| panic!("{answer}")), body.to_owned())
}

const VOLUMES: &str = "/v1/controllers/pool/volumes";
const DEDUP: &str = "/v1/controllers/pool/dedup";

#[test]
fn every_operation_has_its_status() {
    let daemon = Daemon::start();
    check_volumes(&daemon.socket());
    check_others(&daemon.socket(), &daemon.directory.path().join("d.sock"));
}

fn check_volumes(socket: &Path) {
    let volumes = VOLUMES;
    let (name, size) = ("{\"name\":\"b\"}", "{\"size_bytes\":2097152}");
    check_answers(
        socket,
        &[
            ("GET /v1/controllers".to_owned(), "", 200, "\"space\":{\"total_bytes\":33554432"),
            (
                "GET /v1/controllers/pool".to_owned(),
                "",
                200,
                "\"name\":\"pool\",\"store\":\"below\"",
            ),
            (
                "PUT /v1/schedules".to_owned(),
                "{\"schedules\":[{\"name\":\"s\",\"volumes\":[\"*\"],\"keep\":\"2 daily\"}]}",
                204,
                "",
            ),
            ("GET /v1/schedules".to_owned(), "", 200, "\"keep\":\"2 daily\""),
            ("POST /v1/schedules/run".to_owned(), "", 200, "\"failures\":0"),
            ("PUT /v1/schedules".to_owned(), "{\"schedules\":[]}", 204, ""),
            ("PUT /v1/schedules".to_owned(), "{}", 400, "missing field"),
            ("GET /v1/controllers/pond".to_owned(), "", 404, "there are \\\"pool\\\""),
            (
                format!("POST {volumes}"),
                "{\"name\":\"a\",\"size_bytes\":1048576}",
                201,
                "\"size_bytes\":1048576",
            ),
            (format!("POST {volumes}"), "{\"name\":\"a\",\"size_bytes\":1048576}", 409, "already"),
            (
                format!("POST {volumes}"),
                "{\"name\":\"a/b\",\"size_bytes\":1048576}",
                400,
                "no name",
            ),
            (format!("POST {volumes}"), "{\"name\":\"c\",\"size_bytes\":1}", 400, "multiple"),
            (
                format!("POST {volumes}"),
                "{\"name\":\"c\",\"size_bytes\":-1}",
                400,
                "the request is invalid",
            ),
            (format!("POST {volumes}"), "{\"name\":\"c\"}", 400, "missing field `size_bytes`"),
            (format!("GET {volumes}"), "", 200, "\"volumes\":[{\"id\":"),
            (format!("GET {volumes}/a"), "", 200, "\"controller\":\"pool\""),
            (format!("GET {volumes}/z"), "", 404, "there is no volume called"),
            (format!("GET {volumes}/%2e%2e%2fa"), "", 404, "../a"),
            (format!("POST {volumes}/a/snapshot"), name, 201, "\"read_only\":true"),
            (format!("POST {volumes}/a/clone"), name, 409, "already"),
            (format!("POST {volumes}/b/clone"), "{\"name\":\"c\"}", 201, "\"origin_name\":\"b\""),
            (format!("POST {volumes}/a/resize"), size, 200, "\"size_bytes\":2097152"),
            (
                format!("POST {volumes}/a/quota"),
                "{\"quota_bytes\":1048576}",
                200,
                "\"quota_bytes\":1048576",
            ),
            (
                format!("POST {volumes}/a/quota"),
                "{\"quota_bytes\":null}",
                200,
                "\"quota_bytes\":null",
            ),
            (format!("POST {volumes}/c/rename"), "{\"name\":\"d\"}", 200, "\"name\":\"d\""),
        ],
    );
}

/// After [`check_volumes`].
fn check_others(socket: &Path, device_socket: &Path) {
    let volumes = VOLUMES;
    let device = format!(
        "{{\"name\":\"d\",\"socket\":\"{}\",\"volume\":{{\"controller\":\"pool\",\
         \"volume\":\"a\"}}}}",
        device_socket.display()
    );
    let share = "{\"from\":{\"volume\":\"a\",\"first\":0},\
                 \"to\":{\"volume\":\"a\",\"first\":8},\"count\":4}";
    check_answers(
        socket,
        &[
            (
                format!("GET {volumes}/a/extents"),
                "",
                200,
                "{\"block_bytes\":1024,\"extents\":[],\"next\":null}",
            ),
            (
                format!("GET {volumes}/a/extents?from=18446744073709551615&max=65536"),
                "",
                200,
                "\"extents\":[]",
            ),
            (format!("GET {volumes}/a/extents?to=1"), "", 400, "unknown field"),
            ("POST /v1/controllers/pool/check".to_owned(), "", 200, "\"clean\":true"),
            ("POST /v1/controllers/pool/prune".to_owned(), "", 204, ""),
            ("POST /v1/controllers/pool/prune".to_owned(), "{\"volume\":\"z\"}", 404, "no volume"),
            ("POST /v1/controllers/pool/flush-btlb".to_owned(), "", 204, ""),
            ("POST /v1/controllers/pool/share".to_owned(), share, 409, "differ"),
            (format!("GET {DEDUP}"), "", 404, "was not deduplicated since the daemon"),
            (format!("DELETE {DEDUP}"), "", 404, "was not deduplicated since the daemon"),
            (format!("POST {DEDUP}"), "{\"volumes\":[\"z\"]}", 404, "no volume"),
            (format!("POST {DEDUP}"), "{\"rate_bytes_per_s\":0}", 400, "a number from 1 on"),
            (format!("POST {DEDUP}"), "{\"dry\":true}", 400, "unknown field"),
            (
                format!("POST {DEDUP}"),
                "{\"across\":true,\"dry_run\":true,\"volumes\":[\"a\"]}",
                202,
                "\"rate_bytes_per_s\":134217728",
            ),
            (format!("DELETE {DEDUP}"), "", 200, "\"volumes\":[\"a\"],\"across\":true"),
            (format!("GET {DEDUP}"), "", 200, "\"dry_run\":true"),
            ("GET /v1/controllers/pool/check".to_owned(), "", 405, "there is no GET"),
            (
                "POST /v1/devices".to_owned(),
                &device,
                201,
                "\"type\":\"volume\",\"controller\":\"pool\",\"volume\":\"a\"",
            ),
            ("POST /v1/devices".to_owned(), &device, 409, "already"),
            (format!("DELETE {volumes}/a"), "", 409, "remove its device first"),
            (
                "GET /metrics".to_owned(),
                "",
                200,
                "sidecore_function_weight{controller=\"pool\",function=\"1\",volume=\"a\"} 100",
            ),
            ("DELETE /v1/devices/d".to_owned(), "", 204, ""),
            ("DELETE /v1/devices/d".to_owned(), "", 404, "no device"),
            (format!("DELETE {volumes}/a"), "", 204, ""),
            (format!("DELETE {volumes}/a"), "", 404, "no volume"),
            // The origin is deleted, but its copies are not.
            (format!("GET {volumes}/b"), "", 200, "\"origin_name\":null"),
        ],
    );
}

/// Requests, with the status of their answers and a part of each answer. Answers are as the API's
/// document has them.
fn check_answers(socket: &Path, cases: &[(String, &str, u16, &str)]) {
    let document = serde_json::from_str(&ask(socket, "GET /openapi.json", "").1).unwrap();
    for (request, body, status, wanted) in cases {
        let (found, answer) = ask(socket, request, body);
        assert_eq!(found, *status, "{request} {body}: {answer}");
        assert!(answer.contains(wanted), "{request} {body}: no {wanted} in {answer}");
        if answer.starts_with('{') && *status < 300 {
            schema::check_answer(&document, request, *status, &answer);
        }
    }
}

#[test]
fn the_client_has_every_operation() {
    let daemon = Daemon::start();
    let client = daemon.client();
    let new = |name: &str| CreateVolume {
        name: name.to_owned(),
        size_bytes: 1 << 20,
        quota_bytes: Some(1 << 19),
    };
    let made = client.create_volume("pool", &new("a")).unwrap();
    // The space that a volume has to itself is computed only on request.
    let made = sidecore_control::report::VolumeReport {
        exclusive_bytes: Some(0),
        shared_bytes: Some(0),
        ..made
    };
    assert_eq!(client.volume("pool", "a").unwrap(), made);
    assert_eq!(client.volumes("pool").unwrap(), [made]);
    client.snapshot_volume("pool", "a", "s").unwrap();
    client.clone_volume("pool", "s", "c").unwrap();
    assert_eq!(client.resize_volume("pool", "c", 2 << 20).unwrap().size_bytes, 2 << 20);
    assert_eq!(client.set_quota("pool", "c", None).unwrap().quota_bytes, None);
    assert_eq!(client.rename_volume("pool", "c", "d").unwrap().name, "d");
    assert_eq!(client.extents("pool", "d", ExtentsQuery { from: 0, max: 1 }).unwrap().next, None);
    assert!(client.check_controller("pool").unwrap().clean);
    client.prune("pool", None).unwrap();
    client.flush_btlb("pool").unwrap();
    let started = client.start_dedup("pool", &Dedup { across: true, ..Dedup::default() }).unwrap();
    assert_eq!((started.controller.as_str(), started.counts.total_bytes), ("pool", 0));
    let stopped = client.stop_dedup("pool").unwrap();
    assert_ne!(stopped.state, DedupPhase::Running);
    assert_eq!(client.dedup("pool").unwrap(), stopped);
    assert_eq!(client.controllers().unwrap()[0].volumes, 3);
    let mut device =
        NewDevice::new("vd", &daemon.directory.path().join("vd.sock")).of_volume("pool", "d");
    device.0["volume"]["read_iops"] = 7.into();
    let device = device.with("queues", 2);
    let report = client.add_device(&device).unwrap();
    assert_eq!(
        (report.queues, report.capacity_bytes, report.sidecores),
        (2, 2 << 20, vec!["sc0".to_owned()])
    );
    let function = &client.controller("pool").unwrap().functions[0];
    assert_eq!((function.volume.as_str(), function.read_iops), ("d", Some(7)));
    let error = client.delete_volume("pool", "d").unwrap_err();
    assert!(matches!(error, ClientError::Denied { status: 409, .. }), "{error}");
    client.remove_device("vd").unwrap();
    client.delete_volume("pool", "d").unwrap();
    assert_eq!(client.volumes("pool").unwrap().len(), 2);
}

#[test]
fn parallel_operations_do_not_delay_each_other_or_get_mixed_up() {
    let daemon = Daemon::start();
    std::thread::scope(|scope| {
        for worker in 0..8 {
            let client = daemon.client();
            scope.spawn(move || {
                for round in 0..8 {
                    let name = format!("v{worker}-{round}");
                    let new =
                        CreateVolume { name: name.clone(), size_bytes: 1 << 20, quota_bytes: None };
                    assert_eq!(client.create_volume("pool", &new).unwrap().name, name);
                    client.stats().unwrap();
                    if round % 2 == 0 {
                        client.delete_volume("pool", &name).unwrap();
                    }
                }
            });
        }
    });
    assert_eq!(daemon.client().volumes("pool").unwrap().len(), 32);
    assert!(daemon.client().check_controller("pool").unwrap().clean);
}
