mod exposition;
mod manual;

use std::collections::BTreeSet;

use sidecore_assembly::report::{
    ClientReport, DeviceStats, ExecutorReport, FindingsReport, FirewallReport, FunctionReport,
    FunctionStats, HeldReport, HypervisorCounts, IohostReport, Latency, LatencyCounts, LegReport,
    LegWord, LinkReport, MeterReport, MirrorState, PortReport, QueueCounts, ReactorCounts,
    RecordingReport, RemoteDeviceReport, RuleReport, ScheduledVolumeReport, ServeReport,
    SpaceReport, TranslationCounts, TreeMemoryReport, TreeReport, WireReport,
};

use super::*;

fn sidecore() -> SidecoreReport {
    SidecoreReport {
        name: "sc0".to_owned(),
        cpu: Some(1),
        counts: ReactorCounts {
            turns: 16,
            busy_turns: 17,
            busy_ns: 500_000_000,
            sleeps: 18,
            asleep_ns: 1_500_000_000,
            yields: 21,
            messages: 19,
            queues: 20,
            ..ReactorCounts::default()
        },
        utilisation: 0.25,
        warning: None,
    }
}

/// Every number different, so that a value in the wrong place shows.
fn example() -> (Stats, Vec<DeviceReport>) {
    let mut counts = QueueCounts {
        kicks: 1,
        interrupts: 2,
        polls: 3,
        empty_polls: 4,
        batches: 5,
        requests: 6,
        reads: 7,
        writes: 8,
        flushes: 9,
        discards: 10,
        write_zeroes: 11,
        errors: 12,
        rejected: 13,
        bytes_read: 14,
        bytes_written: 15,
        ..QueueCounts::default()
    };
    counts.latency_ns =
        Latency::of(LatencyCounts { buckets: vec![(191, 1), (1023, 2), (1087, 1)], sum_ns: 3_000 });
    let queue = QueueCounters { index: 3, counts, bytes: 29 };
    let device = DeviceReport {
        name: "vd0".to_owned(),
        front_end: "virtio-blk".to_owned(),
        store: "disk".to_owned(),
        store_type: "ram".to_owned(),
        stages: Vec::new(),
        controller: None,
        volume: None,
        switch: None,
        socket: "/run/vd0.sock".to_owned(),
        capacity_bytes: 1 << 30,
        block_bytes: 512,
        read_only: false,
        queues: 4,
        queues_running: 1,
        sidecores: vec!["sc0".to_owned()],
        idle: "adaptive".to_owned(),
        state: DeviceState::Running,
        reason: None,
        warnings: Vec::new(),
        needs_reset: false,
        disconnect: None,
        counters: queue.clone(),
    };
    let stats = Stats {
        uptime_ns: 2_000_000_000,
        interval_ns: None,
        sidecores: vec![sidecore()],
        devices: vec![DeviceStats { name: "vd0".to_owned(), queues: vec![queue] }],
        meters: vec![MeterReport { name: "disk".to_owned(), ..MeterReport::default() }],
        stages: vec![StageStats {
            device: "vd0".to_owned(),
            position: 1,
            word: "delay".to_owned(),
            threads: 2,
            threads_ran_ns: 2_000_000_000,
            recording: Some(RecordingReport::default()),
            findings: Some(FindingsReport::default()),
            ..StageStats::default()
        }],
    };
    (stats, vec![device])
}

/// A switch with a port.
fn switches() -> Vec<SwitchReport> {
    let rule = RuleReport { text: "to drop".to_owned(), ..RuleReport::default() };
    let firewall = FirewallReport { rules: vec![rule], ..FirewallReport::default() };
    let port = PortReport {
        name: "nic".to_owned(),
        firewall: Some(firewall),
        wire: Some(WireReport::default()),
        ..PortReport::default()
    };
    vec![SwitchReport { name: "lan".to_owned(), ports: vec![port], ..SwitchReport::default() }]
}

/// A schedule with a volume.
fn schedules() -> Vec<ScheduleReport> {
    let volume = ScheduledVolumeReport {
        snapshots: 9,
        later: 8,
        error: Some("no space".to_owned()),
        held: vec![HeldReport::default(); 7],
        ..ScheduledVolumeReport::default()
    };
    vec![ScheduleReport {
        name: "nightly".to_owned(),
        next_unix_s: 101,
        last_success_unix_s: Some(100),
        made: 5,
        deleted: 4,
        failures: 3,
        volumes: vec![volume],
        ..ScheduleReport::default()
    }]
}

/// A mirror whose second leg is copied to, and whose third one has failed.
fn mirrors() -> Vec<MirrorReport> {
    let leg = |state| LegReport { state, ..LegReport::default() };
    let copying = LegReport { to_copy_bytes: 99, ..leg(LegWord::Copying) };
    vec![MirrorReport {
        name: "m".to_owned(),
        state: MirrorState::Waiting,
        dirty_regions: 98,
        copied_bytes: 97,
        leg_failures: 96,
        retried_reads: 95,
        legs: vec![leg(LegWord::InSync), copying, leg(LegWord::Failed)],
        ..MirrorReport::default()
    }]
}

#[test]
fn mirrors_tell_the_states_of_their_legs() {
    let stats = Stats::default();
    let page = render(&stats, &[], &[], &RemoteReport::default(), (&[], &[], &mirrors()), false);
    for line in [
        "sidecore_mirror_legs{mirror=\"m\",state=\"in-sync\"} 1",
        "sidecore_mirror_legs{mirror=\"m\",state=\"failed\"} 1",
        "sidecore_mirror_legs{mirror=\"m\",state=\"missing\"} 0",
        "sidecore_mirror_waiting{mirror=\"m\"} 1",
        "sidecore_mirror_refused{mirror=\"m\"} 0",
        "sidecore_mirror_dirty_regions{mirror=\"m\"} 98",
        "sidecore_mirror_to_copy_bytes{mirror=\"m\"} 99",
        "sidecore_mirror_copied_bytes_total{mirror=\"m\"} 97",
        "sidecore_mirror_leg_failures_total{mirror=\"m\"} 96",
        "sidecore_mirror_retried_reads_total{mirror=\"m\"} 95",
    ] {
        assert!(page.lines().any(|found| found == line), "{line} is not in\n{page}");
    }
}

#[test]
fn schedules_tell_their_last_success_and_their_failures() {
    let stats = Stats::default();
    let page = render(&stats, &[], &[], &RemoteReport::default(), (&[], &schedules(), &[]), false);
    for (name, value) in [
        ("last_success_timestamp_seconds", 100),
        ("next_timestamp_seconds", 101),
        ("volumes", 1),
        ("failing_volumes", 1),
        ("snapshots", 9),
        ("held_snapshots", 7),
        ("later_snapshots", 8),
        ("made_total", 5),
        ("deleted_total", 4),
        ("failures_total", 3),
    ] {
        let line = format!("\nsidecore_schedule_{name}{{schedule=\"nightly\"}} {value}\n");
        assert!(page.contains(&line), "{line}{page}");
    }
}

/// The same for each part of the remote channel.
fn remote() -> RemoteReport {
    let link = LinkReport {
        name: "wire".to_owned(),
        link_type: "memory".to_owned(),
        state: "up".to_owned(),
        frame_bytes: 8100,
        executors: vec![ExecutorReport { sidecore: "sc0".to_owned(), ..Default::default() }],
        ..LinkReport::default()
    };
    let client = ClientReport {
        name: "vmhost1".to_owned(),
        state: "connected".to_owned(),
        sessions_open: 2,
        credits: 128,
        executing: 3,
        ..ClientReport::default()
    };
    let device = RemoteDeviceReport {
        store: "r1".to_owned(),
        device: "disk1".to_owned(),
        wait_reason: Some("iohost".to_owned()),
        since_unix_s: 1_700_000_000,
        ..RemoteDeviceReport::default()
    };
    let iohost = IohostReport {
        name: "io1".to_owned(),
        state: "connected".to_owned(),
        round_trip_ns: 2_000,
        devices: vec![device],
        ..IohostReport::default()
    };
    let serve = ServeReport {
        name: "db".to_owned(),
        iohost: "io1".to_owned(),
        devices: vec!["db-1".to_owned()],
        ..ServeReport::default()
    };
    RemoteReport {
        links: vec![link],
        clients: vec![client],
        iohosts: vec![iohost],
        serves: vec![serve],
    }
}

/// The same for a controller with a function.
fn controllers() -> Vec<ControllerReport> {
    let space = SpaceReport {
        total_bytes: 28,
        free_bytes: 1,
        data_bytes: 2,
        metadata_bytes: 4,
        reserved_bytes: 5,
        granted_bytes: 6,
        pending_bytes: 10,
    };
    let function = FunctionReport {
        id: 7,
        volume: "root".to_owned(),
        weight: 100,
        channels: 2,
        tree: TreeReport {
            depth: 3,
            nodes: 40,
            extents: 50,
            mapped_bytes: 60,
            pruned_ranges: 70,
            pruned_bytes: 0,
        },
        stats: FunctionStats {
            last_hits: 71,
            translations: 72,
            stalled: 78,
            ..FunctionStats::default()
        },
        ..FunctionReport::default()
    };
    vec![ControllerReport {
        name: "pool".to_owned(),
        store: "file".to_owned(),
        block_bytes: 1024,
        damage: vec!["a node".to_owned()],
        space,
        volumes: 80,
        extents: 81,
        tree_memory: TreeMemoryReport { used_bytes: 82, max_bytes: 83 },
        translation: TranslationCounts {
            btlb_hits: 84,
            walks: 85,
            nodes_visited: 86,
            ..Default::default()
        },
        counts: HypervisorCounts { commits: 87, ..Default::default() },
        functions: vec![function],
        ..ControllerReport::default()
    }]
}

/// A page with a sample of each metric.
fn full((stats, devices): (&Stats, &[DeviceReport]), per_queue: bool) -> String {
    let others = (&*switches(), &*schedules(), &*mirrors());
    render(stats, devices, &controllers(), &remote(), others, per_queue)
}

#[test]
fn numbers_carry_their_labels_and_units() {
    let (stats, devices) = example();
    let page = full((&stats, &devices), true);
    for line in [
        "sidecore_uptime_seconds 2",
        "sidecore_reactor_turns_total{sidecore=\"sc0\"} 16",
        "sidecore_reactor_asleep_seconds_total{sidecore=\"sc0\"} 1.5",
        "sidecore_device_info{device=\"vd0\",front_end=\"virtio-blk\",store=\"disk\",\
         type=\"ram\",idle=\"adaptive\"} 1",
        "sidecore_device_state{device=\"vd0\",state=\"running\"} 1",
        "sidecore_device_state{device=\"vd0\",state=\"broken\"} 0",
        "sidecore_device_capacity_bytes{device=\"vd0\"} 1073741824",
        "sidecore_queue_kicks_total{device=\"vd0\",queue=\"3\"} 1",
        "sidecore_queue_written_bytes_total{device=\"vd0\",queue=\"3\"} 15",
        "sidecore_reactor_busy_seconds_total{sidecore=\"sc0\"} 0.5",
        "sidecore_device_kicks_total{device=\"vd0\"} 1",
        "sidecore_device_latency_seconds_bucket{device=\"vd0\",le=\"0.000000255\"} 1",
        "sidecore_device_latency_seconds_bucket{device=\"vd0\",le=\"0.000001023\"} 3",
        "sidecore_device_latency_seconds_bucket{device=\"vd0\",le=\"17.179869183\"} 4",
        "sidecore_device_latency_seconds_bucket{device=\"vd0\",le=\"+Inf\"} 4",
        "sidecore_device_latency_seconds_sum{device=\"vd0\"} 0.000003",
        "sidecore_queue_latency_seconds_bucket{device=\"vd0\",queue=\"3\",le=\"0.000002047\"} 4",
        "sidecore_queue_latency_seconds_count{device=\"vd0\",queue=\"3\"} 4",
        "sidecore_controller_info{controller=\"pool\",store=\"file\",block_bytes=\"1024\"} 1",
        "sidecore_controller_space_bytes{controller=\"pool\",use=\"pending\"} 10",
        "sidecore_controller_damaged{controller=\"pool\"} 1",
        "sidecore_controller_walk_nodes_total{controller=\"pool\"} 86",
        "sidecore_function_last_extent_hits_total{controller=\"pool\",function=\"7\",\
         volume=\"root\"} 71",
        "sidecore_function_stalled{controller=\"pool\",function=\"7\",volume=\"root\"} 78",
    ] {
        assert!(page.lines().any(|found| found == line), "{line} is not in\n{page}");
    }
}

#[test]
fn a_page_is_valid_whatever_names_are_in_it() {
    let (mut stats, mut devices) = example();
    for per_queue in [false, true] {
        let page = full((&stats, &devices), per_queue);
        let families = exposition::parse(&page).unwrap();
        assert_eq!(families["sidecore_device_latency_seconds"].kind, "histogram");
    }
    let odd = "a\"b\\c\nd{},é";
    odd.clone_into(&mut stats.devices[0].name);
    odd.clone_into(&mut devices[0].name);
    let families = exposition::parse(&render(
        &stats,
        &devices,
        &[],
        &RemoteReport::default(),
        (&[], &[], &[]),
        true,
    ))
    .unwrap();
    let (_, labels, _) = &families["sidecore_queue_kicks_total"].samples[0];
    assert_eq!(labels[0], ("device".to_owned(), odd.to_owned()));
}

#[test]
fn queues_have_series_on_request_only() {
    let (stats, devices) = example();
    let series = |page: &str| page.lines().filter(|line| !line.starts_with('#')).count();
    let page = render(&stats, &devices, &[], &RemoteReport::default(), (&[], &[], &[]), false);
    assert!(!page.contains("sidecore_queue_"), "{page}");
    let each = render(&stats, &devices, &[], &RemoteReport::default(), (&[], &[], &[]), true);
    let lines: BTreeSet<&str> = each.lines().collect();
    assert!(page.lines().all(|line| lines.contains(line)), "the rest stays the same");
    // The counters, and of the latency the maximum and a histogram of 28 buckets, sum and count.
    assert_eq!(series(&each) - series(&page), QueueCounts::METRICS.len() + 1 + 30);
}

#[test]
fn the_documented_metrics_are_those_there_are() {
    let (stats, devices) = example();
    let page = full((&stats, &devices), true);
    let rendered: BTreeSet<(&str, &str)> =
        page.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' ')).collect();
    // The manual says of a queue's metrics that they are the device's by another name.
    let (of_queues, rendered): (BTreeSet<_>, BTreeSet<_>) =
        rendered.into_iter().partition(|(name, _)| name.starts_with("sidecore_queue_"));
    for (name, kind) in of_queues {
        let of_device = name.replace("_queue_", "_device_");
        assert!(rendered.contains(&(of_device.as_str(), kind)), "{name}");
    }
    let manual = include_str!("../../../../docs/metrics.md");
    let documented: BTreeSet<(&str, &str)> = manual
        .lines()
        .filter_map(|line| {
            let (name, rest) = line.strip_prefix("| `sidecore_")?.split_once('`')?;
            let kind = rest.split('|').nth(1)?.trim();
            // The name with the prefix that was stripped off.
            let start = line.find("sidecore_")?;
            Some((line.get(start..start + "sidecore_".len() + name.len())?, kind))
        })
        .collect();
    assert_eq!(rendered, documented);
}

#[test]
fn every_counter_of_a_queue_shows_its_own_value() {
    let (mut stats, _) = example();
    let numbered =
        QueueCounts::METRICS.iter().zip(100_u64..).map(|(metric, number)| (metric.field, number));
    let counts: serde_json::Map<_, _> =
        numbered.clone().map(|(field, number)| (field.to_owned(), number.into())).collect();
    stats.devices[0].queues[0].counts = serde_json::from_value(counts.into()).unwrap();
    let page = render(&stats, &[], &[], &RemoteReport::default(), (&[], &[], &[]), true);
    for (metric, (field, number)) in QueueCounts::METRICS.iter().zip(numbered) {
        let name = metric.name.unwrap();
        for line in [
            format!("sidecore_device_{name}{{device=\"vd0\"}} {number}"),
            format!("sidecore_queue_{name}{{device=\"vd0\",queue=\"3\"}} {number}"),
        ] {
            assert!(page.lines().any(|found| found == line), "{field}: {line} is not in\n{page}");
        }
    }
}

#[test]
fn labels_are_escaped() {
    assert_eq!(Escaped("a\"b\\c\nd").to_string(), "a\\\"b\\\\c\\nd");
}
