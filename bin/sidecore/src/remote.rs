//! `sidecore remote`.

use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result};
use clap::{Args, Subcommand};
use serde_json::{Map, Value};
use sidecore_control::config::size;
use sidecore_control::report::{
    ClientReport, Counts, ExportReport, IohostReport, LinkCounts, LinkReport, RemoteReport,
    ServeReport, VrioCounts,
};
use sidecore_control::{Client, RemoteKind};

use crate::flags::{ClientFlags, IohostFlags, LinkFlags, ServeFlags};
use crate::table::Table;
use crate::{print, print_json, units};

/// The arguments of `sidecore remote`.
#[derive(Args)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    command: Command,
    /// Print the control API's JSON instead of text.
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Subcommand)]
enum Command {
    /// List the links, the clients of this host, and the IOhosts that this host is a client of.
    List,
    /// Make a key for a client, and write its invitation to a new file, which the client needs.
    ///
    /// The file is a secret: it lets its owner use the client's devices. The daemon keeps only the
    /// public half of the key. Move the file to the client, and name it as `invitation` in the
    /// `[[iohost]]` there.
    Invite {
        /// The client, a `[[client]]` of the configuration.
        client: String,
        /// The file to write.
        file: PathBuf,
    },
    /// Forget a client's key, and end its sessions. Its devices and their data stay.
    Revoke {
        /// The client.
        client: String,
    },
    /// Let a client's requests wait, before work on its stores; or those to an IOhost, before it is
    /// taken away.
    ///
    /// Requests in flight are answered first, and their stores are flushed. Guests wait until
    /// `--undo`, or until this daemon starts again.
    Drain {
        /// The client of this host.
        #[arg(required_unless_present = "iohost", conflicts_with = "iohost")]
        client: Option<String>,
        /// The IOhost that this host uses.
        #[arg(long)]
        iohost: Option<String>,
        /// Let the requests go on.
        #[arg(long)]
        undo: bool,
    },
    /// Move the sessions with an IOhost to its other link, while guests use its devices.
    ///
    /// Requests wait for a moment. An IOhost that does not answer on that link is used on the one
    /// where it was.
    Move {
        /// The IOhost that this host uses.
        iohost: String,
        /// One of its two links: its `link` or its `second_link`.
        link: String,
    },
    /// Add and remove links.
    #[command(subcommand)]
    Link(Part<LinkFlags>),
    /// Add and remove clients: hosts that use devices of this one.
    #[command(subcommand)]
    Client(Part<ClientFlags>),
    /// Add and remove IOhosts: hosts whose devices this one uses.
    #[command(subcommand)]
    Iohost(Part<IohostFlags>),
    /// Add and remove patterns by which devices of an IOhost are served, as soon as it has them.
    ///
    /// The devices of a removed pattern are removed when no VMM is connected to them.
    #[command(subcommand)]
    Serve(Part<ServeArguments>),
}

/// The arguments of a pattern behind its name.
#[derive(Args)]
struct ServeArguments {
    /// The socket of each device, with `{device}` in the place of the device's name.
    #[arg(value_name = "SOCKET")]
    sockets: PathBuf,
    #[command(flatten)]
    flags: ServeFlags,
}

impl ServeArguments {
    fn keys(self) -> Map<String, Value> {
        // The daemon has another working directory.
        let socket = std::path::absolute(&self.sockets).unwrap_or(self.sockets);
        let mut keys = self.flags.0;
        keys.insert("socket".to_owned(), socket.display().to_string().into());
        keys
    }
}

#[derive(Subcommand)]
enum Part<F: Args> {
    /// Add one, until it is removed or the daemon ends.
    Add {
        /// Its name.
        name: String,
        #[command(flatten)]
        keys: F,
    },
    /// Remove one that is not in use.
    Remove {
        /// Its name.
        name: String,
    },
}

/// Adds or removes a part.
fn change<F: Args>(
    client: &Client,
    kind: RemoteKind,
    part: Part<F>,
    json: bool,
    keys: impl Fn(F) -> Map<String, Value>,
) -> Result<()> {
    let (done, name) = match part {
        Part::Add { name, keys: flags } => {
            let mut keys = keys(flags);
            keys.insert("name".to_owned(), name.as_str().into());
            client.add_part(kind, &keys)?;
            ("added", name)
        }
        Part::Remove { name } => {
            client.remove_part(kind, &name)?;
            ("removed", name)
        }
    };
    if json {
        return print_json(&serde_json::json!({ done: name }));
    }
    Ok(print(&format!("{done}: {} \"{name}\"\n", kind.word()))?)
}

/// Moves the sessions with an IOhost to this link.
fn move_iohost(client: &Client, iohost: &str, link: &str, json: bool) -> Result<()> {
    let moved = client.move_iohost(iohost, link)?;
    if json {
        return print_json(&moved);
    }
    let pause_us = units::micros(moved.pause_ns as f64);
    let sessions = units::count(moved.sessions, "session");
    Ok(print(&format!(
        "moved: {sessions} with \"{iohost}\" to link \"{link}\", paused for {pause_us} us\n"
    ))?)
}

pub(crate) fn run(client: &Client, arguments: Arguments) -> Result<()> {
    let json = arguments.json;
    match arguments.command {
        Command::Drain { client: of, iohost, undo } => {
            match (&of, &iohost) {
                (_, Some(iohost)) => client.drain_iohost(iohost, undo)?,
                (Some(of), None) => client.drain(of, undo)?,
                // Refused by the parser.
                (None, None) => {}
            }
            let name = iohost.or(of).unwrap_or_default();
            let done = if undo { "undrained" } else { "drained" };
            if json {
                return print_json(&serde_json::json!({ done: name }));
            }
            Ok(print(&format!("{done}: \"{name}\"\n"))?)
        }
        Command::Move { iohost, link } => move_iohost(client, &iohost, &link, json),
        Command::Link(part) => change(client, RemoteKind::Link, part, json, |flags| flags.0),
        Command::Client(part) => change(client, RemoteKind::Client, part, json, |flags| flags.0),
        Command::Iohost(part) => change(client, RemoteKind::Iohost, part, json, |flags| flags.0),
        Command::Serve(part) => change(client, RemoteKind::Serve, part, json, ServeArguments::keys),
        Command::Invite { client: name, file } => {
            // The file is made first: a key that cannot be written would be lost.
            let mut out = std::fs::OpenOptions::new()
                .write(true)
                .create_new(true)
                .mode(0o600)
                .open(&file)
                .with_context(|| format!("cannot make {}", file.display()))?;
            let written = client.invite(&name).map_err(anyhow::Error::from).and_then(|answer| {
                out.write_all(answer.invitation.as_bytes())?;
                Ok(out.sync_all()?)
            });
            if let Err(error) = written {
                let _ = std::fs::remove_file(&file);
                return Err(error);
            }
            if json {
                return print_json(&serde_json::json!({ "invited": name, "file": file }));
            }
            Ok(print(&format!("invited: \"{name}\", its invitation is {}\n", file.display()))?)
        }
        Command::Revoke { client: name } => {
            client.revoke(&name)?;
            if json {
                return print_json(&serde_json::json!({ "revoked": name }));
            }
            Ok(print(&format!("revoked: \"{name}\"\n"))?)
        }
        Command::List => {
            let remote = client.remote()?;
            if json {
                return print_json(&remote);
            }
            Ok(print(&list(&remote, SystemTime::now()))?)
        }
    }
}

fn list(remote: &RemoteReport, now: SystemTime) -> String {
    if *remote == RemoteReport::default() {
        return "no links: docs/remote.md says how to set one up\n".to_owned();
    }
    let mut parts = vec![links(&remote.links)];
    parts.extend(executors(&remote.links));
    if !remote.clients.is_empty() {
        parts.push(clients(&remote.clients, now));
    }
    if !remote.iohosts.is_empty() {
        parts.push(iohosts(&remote.iohosts));
        parts.push(devices(&remote.iohosts, now));
    }
    parts.extend(nics(remote, now));
    if !remote.serves.is_empty() {
        parts.push(serves(&remote.serves));
    }
    parts.join("\n")
}

fn links(links: &[LinkReport]) -> String {
    let mut table = Table::new(&[
        "LINK",
        "TYPE",
        "MODE",
        "STATE",
        "ADDRESS",
        ">FRAME",
        ">RECEIVED",
        ">SENT",
        ">DROPPED",
        "SIDECORES",
    ]);
    let mut notes = String::new();
    for link in links {
        if let Some(reason) = &link.reason {
            notes.push_str(&format!("link {} is {}: {reason}\n", link.name, link.state));
        }
        notes.push_str(&drops::<LinkCounts>(&format!("link {}", link.name), &link.counts));
        table.row([
            link.name.clone(),
            link.link_type.clone(),
            link.mode.clone(),
            link.state.clone(),
            link.address.clone(),
            link.frame_bytes.to_string(),
            link.counts.received.to_string(),
            link.counts.sent.to_string(),
            link.dropped.to_string(),
            link.sidecores.join(","),
        ]);
    }
    table.render() + &notes
}

/// The shares of the sidecores that execute requests from links, if several do.
fn executors(links: &[LinkReport]) -> Option<String> {
    let mut table = Table::new(&["LINK", "SIDECORE", ">REQUESTS", ">SUB-BATCHES", ">SHARE"]);
    let several: Vec<_> = links.iter().filter(|link| link.executors.len() > 1).collect();
    for link in &several {
        let all: u64 = link.executors.iter().map(|executor| executor.counts.requests).sum();
        for executor in &link.executors {
            let share = executor.counts.requests.saturating_mul(100).checked_div(all);
            table.row([
                link.name.clone(),
                executor.sidecore.clone(),
                executor.counts.requests.to_string(),
                executor.counts.sub_batches.to_string(),
                share.map_or_else(String::new, |share| format!("{share} %")),
            ]);
        }
    }
    (!several.is_empty()).then(|| table.render())
}

fn clients(clients: &[ClientReport], now: SystemTime) -> String {
    let mut table = Table::new(&[
        "CLIENT",
        "STATE",
        ">SINCE",
        "ADDRESS",
        "SEALED",
        ">SESSIONS",
        ">CREDITS",
        ">EXECUTING",
        ">REQUESTS",
        "DEVICES",
    ]);
    let mut notes = String::new();
    for client in clients {
        let subject = format!("client {}", client.name);
        notes.push_str(&drops::<VrioCounts>(&subject, &client.counts));
        let device = |device: &ExportReport| device.device.clone();
        table.row([
            client.name.clone(),
            client.state.clone(),
            ago(client.since_unix_s, now),
            client.address.clone().unwrap_or_default(),
            client.encryption.clone(),
            client.sessions_open.to_string(),
            client.credits.to_string(),
            client.executing.to_string(),
            client.counts.requests.to_string(),
            client.devices.iter().map(device).collect::<Vec<_>>().join(", "),
        ]);
    }
    table.render() + &notes
}

fn iohosts(iohosts: &[IohostReport]) -> String {
    let mut table = Table::new(&[
        "IOHOST",
        "STATE",
        "LINK",
        "ADDRESS",
        "AS",
        "SEALED",
        ">FRAME",
        ">ROUND-TRIP",
        ">CREDITS",
        ">REQUESTS",
        ">RESENT",
        ">REPLAYED",
    ]);
    let mut notes = String::new();
    for iohost in iohosts {
        let subject = format!("iohost {}", iohost.name);
        notes.push_str(&drops::<VrioCounts>(&subject, &iohost.counts));
        table.row([
            iohost.name.clone(),
            iohost.state.clone(),
            iohost.link.clone(),
            iohost.address.clone(),
            iohost.client.clone(),
            iohost.encryption.clone(),
            iohost.frame_bytes.to_string(),
            match iohost.round_trip_ns {
                0 => String::new(),
                ns => format!("{}.{} us", ns / 1000, ns % 1000 / 100),
            },
            iohost.credits.to_string(),
            iohost.counts.requests.to_string(),
            iohost.counts.retransmissions.to_string(),
            iohost.counts.replayed.to_string(),
        ]);
    }
    table.render() + &notes
}

fn devices(iohosts: &[IohostReport], now: SystemTime) -> String {
    let mut table = Table::new(&[
        "STORE",
        "DEVICE",
        "STATE",
        ">SINCE",
        ">SIZE",
        ">IN-FLIGHT",
        ">UNFLUSHED",
        "EPOCH",
    ]);
    let mut notes = String::new();
    for device in iohosts.iter().flat_map(|iohost| &iohost.devices) {
        let since = ago(device.since_unix_s, now);
        if let Some(waits_for) = &device.waits_for {
            notes.push_str(&format!("{} waits for {waits_for}, for {since}\n", device.store));
        }
        table.row([
            device.store.clone(),
            device.device.clone(),
            if device.ready { "ready" } else { "waiting" }.to_owned(),
            since,
            size::show(device.capacity_bytes),
            device.in_flight.to_string(),
            device.kept_writes.to_string(),
            device.epoch.clone().unwrap_or_default(),
        ]);
    }
    table.render() + &notes
}

/// The NICs of clients, and those of this host at IOhosts, if there are any.
fn nics(remote: &RemoteReport, now: SystemTime) -> Option<String> {
    let mut table = Table::new(&["NIC", "FAR-END", "AS", "STATE", ">SINCE", "MAC", ">MTU"]);
    let mut count = 0_usize;
    for client in &remote.clients {
        for nic in &client.nics {
            table.row([
                nic.device.clone(),
                format!("client {}", client.name),
                nic.device.clone(),
                nic.state.clone(),
                ago(nic.since_unix_s, now),
                nic.mac.clone(),
                nic.mtu.to_string(),
            ]);
            count = count.saturating_add(1);
        }
    }
    for iohost in &remote.iohosts {
        for nic in &iohost.nics {
            table.row([
                nic.device.clone(),
                format!("iohost {}", iohost.name),
                nic.nic.clone(),
                nic.state.clone(),
                ago(nic.since_unix_s, now),
                nic.mac.clone().unwrap_or_default(),
                nic.mtu.map_or_else(String::new, |mtu| mtu.to_string()),
            ]);
            count = count.saturating_add(1);
        }
    }
    (count > 0).then(|| table.render())
}

/// Refused devices that are shown by their names, of each pattern.
const REFUSED_SHOWN: usize = 8;

fn serves(serves: &[ServeReport]) -> String {
    let mut table = Table::new(&["SERVE", "IOHOST", "PATTERN", ">REFUSED", "DEVICES"]);
    let mut notes = String::new();
    for serve in serves {
        table.row([
            serve.name.clone(),
            serve.iohost.clone(),
            serve.pattern.clone(),
            serve.refused.len().to_string(),
            serve.devices.join(", "),
        ]);
        for device in &serve.leaving {
            notes.push_str(&format!(
                "{device} is in use, and is removed when its VMM disconnects: the IOhost has it \
                 no longer\n"
            ));
        }
        for refused in serve.refused.iter().take(REFUSED_SHOWN) {
            // An IOhost may send any name.
            let name = refused.device.escape_debug();
            notes.push_str(&format!("\"{name}\" is not served: {}\n", refused.reason));
        }
        if let Some(more) = serve.refused.len().checked_sub(REFUSED_SHOWN).filter(|more| *more > 0)
        {
            notes.push_str(&format!("{more} more devices are not served: see --json\n"));
        }
    }
    table.render() + &notes
}

/// A line with the reasons for which frames were dropped, if any were.
fn drops<C: Counts>(subject: &str, counts: &C) -> String {
    let reasons: Vec<String> = C::METRICS
        .iter()
        .filter_map(|metric| {
            let reason = metric.field.strip_prefix("dropped_")?;
            let count = (metric.value)(counts).to_string();
            (count != "0").then(|| format!("{count} {reason}"))
        })
        .collect();
    if reasons.is_empty() {
        return String::new();
    }
    format!("{subject} has dropped frames: {}\n", reasons.join(", "))
}

/// How long ago a time was, in its largest unit.
fn ago(unix_s: u64, now: SystemTime) -> String {
    let now_s = now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    match now_s.saturating_sub(unix_s) {
        _ if unix_s == 0 => String::new(),
        seconds @ 0..120 => format!("{seconds} s"),
        seconds @ 120..7_200 => format!("{} min", seconds / 60),
        seconds @ 7_200..172_800 => format!("{} h", seconds / 3_600),
        seconds => format!("{} d", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::json;
    use sidecore_control::report::{
        ExecutorCounts, ExecutorReport, ExportedNicReport, RefusedDeviceReport, RemoteDeviceReport,
        RemoteNicReport,
    };

    use super::*;

    #[derive(clap::Parser)]
    struct Line {
        #[arg(long, short, global = true)]
        socket: Option<PathBuf>,
        #[command(flatten)]
        arguments: Arguments,
    }

    #[test]
    fn a_pattern_has_its_sockets_and_the_keys_of_its_devices() {
        let line = "sidecore -s /c serve add db /run/{device}.sock --iohost io1 --front-end nvme";
        let line = <Line as clap::Parser>::try_parse_from(line.split(' ')).unwrap();
        let Command::Serve(Part::Add { name, keys }) = line.arguments.command else {
            panic!("another command")
        };
        let keys = Value::Object(keys.keys());
        let socket = "/run/{device}.sock";
        let wanted = json!({ "iohost": "io1", "front_end": "nvme", "socket": socket });
        assert_eq!((name.as_str(), keys, line.socket), ("db", wanted, Some("/c".into())));
        let line = "sidecore serve add db /{device} --stage read-only --stage delay,delay_us=5";
        let line = <Line as clap::Parser>::try_parse_from(line.split(' ')).unwrap();
        let Command::Serve(Part::Add { keys, .. }) = line.arguments.command else {
            panic!("another command")
        };
        let stages = json!([{ "type": "read-only" }, { "type": "delay", "delay_us": 5 }]);
        assert_eq!(keys.keys()["stage"], stages);
    }

    #[test]
    fn a_move_names_an_iohost_and_a_link() {
        let parse = |line: &str| <Line as clap::Parser>::try_parse_from(line.split(' '));
        let Command::Move { iohost, link } =
            parse("sidecore move io1 near").unwrap().arguments.command
        else {
            panic!("another command")
        };
        assert_eq!((iohost.as_str(), link.as_str()), ("io1", "near"));
        assert!(parse("sidecore move io1").is_err());
    }

    #[test]
    fn a_drain_is_of_a_client_or_of_an_iohost() {
        let parse = |line: &str| <Line as clap::Parser>::try_parse_from(line.split(' '));
        let drained = |line: &str| match parse(line).unwrap().arguments.command {
            Command::Drain { client, iohost, undo } => (client, iohost, undo),
            _ => panic!("another command"),
        };
        let name = |name: &str| Some(name.to_owned());
        assert_eq!(drained("sidecore drain vm1 --undo"), (name("vm1"), None, true));
        assert_eq!(drained("sidecore drain --iohost io1"), (None, name("io1"), false));
        for line in ["sidecore drain", "sidecore drain vm1 --iohost io1"] {
            assert!(parse(line).is_err(), "{line}");
        }
    }

    #[test]
    fn a_list_shows_the_nics_of_both_sides() {
        let now = UNIX_EPOCH + Duration::from_secs(1_000);
        let exported = ExportedNicReport {
            device: "nic-c".to_owned(),
            state: "up".to_owned(),
            since_unix_s: 990,
            mac: "52:54:00:00:00:03".to_owned(),
            mtu: 9000,
        };
        let used = RemoteNicReport {
            device: "far".to_owned(),
            nic: "nic-d".to_owned(),
            state: "away".to_owned(),
            ..RemoteNicReport::default()
        };
        let name = "vmhost1".to_owned();
        let client = ClientReport { name, nics: vec![exported], ..ClientReport::default() };
        let name = "io2".to_owned();
        let iohost = IohostReport { name, nics: vec![used], ..IohostReport::default() };
        let (clients, iohosts) = (vec![client], vec![iohost]);
        let mut remote = RemoteReport { clients, iohosts, ..RemoteReport::default() };
        let text = list(&remote, now);
        let rows: Vec<Vec<_>> =
            text.lines().map(|line| line.split_whitespace().collect()).collect();
        for row in [
            "NIC FAR-END AS STATE SINCE MAC MTU",
            "nic-c client vmhost1 nic-c up 10 s 52:54:00:00:00:03 9000",
            "far iohost io2 nic-d away",
        ] {
            assert!(rows.contains(&row.split(' ').collect()), "{row}{text}");
        }
        (remote.clients[0].nics, remote.iohosts[0].nics) = (Vec::new(), Vec::new());
        assert!(!list(&remote, now).contains("FAR-END"));
    }

    #[test]
    fn a_list_shows_states_drops_by_reason_and_waiting_devices() {
        let now = UNIX_EPOCH + Duration::from_secs(1_000);
        let executor = |sidecore: &str, requests| ExecutorReport {
            sidecore: sidecore.to_owned(),
            counts: ExecutorCounts { requests, ..ExecutorCounts::default() },
        };
        let link = LinkReport {
            name: "wire".to_owned(),
            link_type: "packet".to_owned(),
            state: "down".to_owned(),
            reason: Some("the interface is down".to_owned()),
            counts: LinkCounts { dropped_full: 3, ..LinkCounts::default() },
            executors: vec![executor("io0", 300), executor("io1", 100)],
            dropped: 3,
            ..LinkReport::default()
        };
        let client = ClientReport {
            name: "vmhost1".to_owned(),
            state: "away".to_owned(),
            since_unix_s: 400,
            devices: vec![ExportReport { device: "disk1".to_owned(), ..ExportReport::default() }],
            counts: VrioCounts { dropped_seal: 2, dropped_epoch: 1, ..VrioCounts::default() },
            ..ClientReport::default()
        };
        let device = RemoteDeviceReport {
            store: "r1".to_owned(),
            device: "disk1".to_owned(),
            since_unix_s: 990,
            waits_for: Some("iohost \"io1\"".to_owned()),
            ..RemoteDeviceReport::default()
        };
        let iohost = IohostReport {
            name: "io1".to_owned(),
            round_trip_ns: 12_345,
            devices: vec![device],
            ..IohostReport::default()
        };
        let refused = |number: usize| RefusedDeviceReport {
            device: format!("disk{number}\u{1b}"),
            reason: "no".to_owned(),
        };
        let serve = ServeReport {
            name: "db".to_owned(),
            leaving: vec!["db-1".to_owned()],
            refused: (0..10).map(refused).collect(),
            ..ServeReport::default()
        };
        let remote = RemoteReport {
            links: vec![link],
            clients: vec![client],
            iohosts: vec![iohost],
            serves: vec![serve],
        };
        let text = list(&remote, now);
        for line in [
            "link wire is down: the interface is down\n",
            "link wire has dropped frames: 3 full\n",
            "client vmhost1 has dropped frames: 2 seal, 1 epoch\n",
            "r1 waits for iohost \"io1\", for 10 s\n",
            "db-1 is in use, and is removed when its VMM disconnects: ",
            "\"disk0\\u{1b}\" is not served: no\n",
            "2 more devices are not served: see --json\n",
        ] {
            assert!(text.contains(line), "{line}{text}");
        }
        assert!(text.contains("75 %") && text.contains("25 %"), "{text}");
        assert!(text.contains("10 min") && text.contains("12.3 us"), "{text}");
        assert!(list(&RemoteReport::default(), now).starts_with("no links"));
    }
}
