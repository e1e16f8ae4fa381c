//! The metrics of links, clients and IOhosts.

use sidecore_assembly::report::{
    ClientReport, IohostReport, LinkReport, RemoteDeviceReport, RemoteReport, ServeReport,
};
use sidecore_telemetry::{Metric, Value};

use super::{Page, gauge};

const LINKS: &[Metric<LinkReport>] = &[
    gauge("up", "1 while the link carries frames.", |link| {
        Value::Whole((link.state == "up").into())
    }),
    gauge("frame_bytes", "The largest frame, without the headers of the medium.", |link| {
        Value::Whole(link.frame_bytes)
    }),
];

const CLIENTS: &[Metric<ClientReport>] = &[
    gauge("connected", "1 while the client has a session.", |client| {
        Value::Whole((client.sessions_open > 0).into())
    }),
    gauge("drained", "1 while the client's new requests wait, because it was drained.", |client| {
        Value::Whole(matches!(client.state.as_str(), "draining" | "drained").into())
    }),
    gauge("sessions_open", "Sessions of the client that are open.", |client| {
        Value::Whole(client.sessions_open)
    }),
    gauge("credits", "Requests that the client may have unanswered now.", |client| {
        Value::Whole(client.credits)
    }),
    gauge("executing", "Requests of the client that stores execute now.", |client| {
        Value::Whole(client.executing)
    }),
];

const IOHOSTS: &[Metric<IohostReport>] = &[
    gauge("connected", "1 while there is a session with the IOhost.", |iohost| {
        Value::Whole(iohost.incarnation.is_some().into())
    }),
    gauge(
        "drained",
        "1 while new requests to the IOhost wait, because it was drained here.",
        |iohost| Value::Whole(matches!(iohost.state.as_str(), "draining" | "drained").into()),
    ),
    gauge("round_trip_seconds", "The smoothed round trip of the path; 0 if unknown.", |iohost| {
        Value::seconds(iohost.round_trip_ns)
    }),
    gauge("frame_bytes", "The size of the session's frames.", |iohost| {
        Value::Whole(iohost.frame_bytes.into())
    }),
    gauge("credits", "Requests that may be unanswered at the IOhost now.", |iohost| {
        Value::Whole(iohost.credits)
    }),
];

const DEVICES: &[Metric<RemoteDeviceReport>] = &[
    gauge("ready", "1 while requests to the remote device are carried out.", |device| {
        Value::Whole(device.ready.into())
    }),
    gauge(
        "waiting_since_seconds",
        "Since when requests to the remote device wait for its IOhost, in seconds since 1970; 0 \
         while they do not.",
        |device| Value::Whole(if device.ready { 0 } else { device.since_unix_s }),
    ),
    gauge("in_flight_requests", "Requests to the remote device that have no answer.", |device| {
        Value::Whole(device.in_flight)
    }),
    gauge(
        "unflushed_writes",
        "Answered writes to the remote device that no flush covers, which are kept here.",
        |device| Value::Whole(device.kept_writes),
    ),
];

const WAITS: &[Metric<RemoteDeviceReport>] =
    &[gauge("waiting", "1 while requests to the remote device wait, for this reason.", |_| {
        Value::Whole(1)
    })];

const SERVES: &[Metric<ServeReport>] = &[
    gauge("devices", "Devices of an IOhost that the pattern serves.", |serve| {
        Value::Whole(serve.devices.len() as u64)
    }),
    gauge(
        "leaving_devices",
        "Devices that VMMs are connected to, and that the IOhost has no longer.",
        |serve| Value::Whole(serve.leaving.len() as u64),
    ),
    gauge("refused_devices", "Devices that fit the pattern and are not served.", |serve| {
        Value::Whole(serve.refused.len() as u64)
    }),
];

impl Page {
    pub(super) fn remote(&mut self, remote: &RemoteReport) {
        let links = || {
            remote.links.iter().map(|link| {
                (vec![("link", link.name.as_str()), ("type", link.link_type.as_str())], link)
            })
        };
        self.metrics("sidecore_link_", LINKS, links());
        self.counts("sidecore_link_", links().map(|(labels, link)| (labels, &link.counts)));
        let executors = remote.links.iter().flat_map(|link| {
            link.executors.iter().map(|executor| {
                let sidecore = executor.sidecore.as_str();
                (vec![("link", link.name.as_str()), ("sidecore", sidecore)], &executor.counts)
            })
        });
        self.counts("sidecore_executor_", executors);
        let clients =
            || remote.clients.iter().map(|client| (vec![("client", client.name.as_str())], client));
        self.metrics("sidecore_client_", CLIENTS, clients());
        self.counts("sidecore_client_", clients().map(|(labels, client)| (labels, &client.counts)));
        let iohosts =
            || remote.iohosts.iter().map(|iohost| (vec![("iohost", iohost.name.as_str())], iohost));
        self.metrics("sidecore_iohost_", IOHOSTS, iohosts());
        self.counts("sidecore_iohost_", iohosts().map(|(labels, iohost)| (labels, &iohost.counts)));
        let devices = || {
            remote.iohosts.iter().flat_map(|iohost| {
                iohost.devices.iter().map(|device| {
                    let labels =
                        vec![("iohost", iohost.name.as_str()), ("store", device.store.as_str())];
                    (labels, device)
                })
            })
        };
        self.metrics("sidecore_remote_device_", DEVICES, devices());
        let waits = devices().filter_map(|(mut labels, device)| {
            let reason = device.wait_reason.as_deref()?;
            labels.extend([("device", device.device.as_str()), ("reason", reason)]);
            Some((labels, device))
        });
        self.metrics("sidecore_remote_device_", WAITS, waits);
        let serves = remote.serves.iter().map(|serve| {
            (vec![("iohost", serve.iohost.as_str()), ("serve", serve.name.as_str())], serve)
        });
        self.metrics("sidecore_serve_", SERVES, serves);
    }
}
