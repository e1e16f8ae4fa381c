//! The simulation beside known results of queueing theory.

use super::*;

const MS: f64 = 1e6;

/// Clients of one sidecore with one thread each, a sidecore's time for a request, and the mean of
/// the guest's work.
fn closed(clients: usize, service_ns: f64, guest_ns: f64) -> System {
    let here = Stage { request_ns: service_ns, ..Stage::default() };
    let path = Path { here, ..Path::default() };
    let client = Client { home: 0, threads: vec![Work::Read(4096)], guest_ns, every_ns: 0.0 };
    System {
        clients: vec![client; clients],
        batch: 1,
        ..System::new(Costs { read: path, write: path }, 1)
    }
}

fn assert_near(value: f64, expected: f64, tolerance: f64) {
    assert!((value / expected - 1.0).abs() < tolerance, "{value} instead of {expected}");
}

/// The probability that an M/M/1//N queue is empty: with `clients` that think for `think_ns`.
fn empty(clients: u32, service_ns: f64, think_ns: f64) -> f64 {
    let mut term = 1.0;
    let mut sum = 1.0;
    for in_queue in 0..clients {
        term *= f64::from(clients - in_queue) * service_ns / think_ns;
        sum += term;
    }
    1.0 / sum
}

/// The machine repairman: exponential service and thought, a finite number of clients. An arriving
/// request sees the queue as it is with one client less (the arrival theorem).
#[test]
fn exponential_times_give_the_throughput_of_m_m_1_n() {
    for clients in [1, 2, 8, 28] {
        let (service_ns, think_ns) = (2_000.0, 20_000.0);
        let mut system = closed(clients, service_ns, think_ns);
        system.spread = |random, ns| random.exponential(ns);
        let outcome = run(&system, 5.0 * MS, 2_000.0 * MS, 7);
        let clients = clients as u32;
        let useful = 1.0 - empty(clients, service_ns, think_ns);
        assert_near(outcome.useful[0], useful, 0.01);
        assert_near(outcome.requests_per_s, useful / service_ns * 1e9, 0.01);
        let waited = 1.0 - empty(clients - 1, service_ns, think_ns);
        assert!((outcome.waited - waited).abs() < 0.01, "{} instead of {waited}", outcome.waited);
    }
}

/// Many clients that seldom ask are a Poisson stream: the wait of M/D/1 is half that of M/M/1
/// (Pollaczek and Khinchine), and a request waits with the probability that the server is busy.
#[test]
fn a_poisson_stream_waits_as_in_m_d_1() {
    let service_ns = 1_000.0;
    for load in [0.3, 0.6, 0.8] {
        let clients = 2_000;
        let wait_ns = load * service_ns / (2.0 * (1.0 - load));
        let guest_ns = clients as f64 * service_ns / load - service_ns - wait_ns;
        let system = closed(clients, service_ns, guest_ns);
        let outcome = run(&system, 10.0 * MS, 400.0 * MS, 11);
        assert_near(outcome.useful[0], load, 0.02);
        assert_near(outcome.latency_ns - service_ns, wait_ns, 0.06);
        assert!((outcome.waited - load).abs() < 0.02, "{} instead of {load}", outcome.waited);
    }
}

/// An open M/M/1 queue: the time in the system is exponential, so its hundredth part is known.
#[test]
fn an_open_stream_of_exponential_times_has_the_p99_of_m_m_1() {
    let service_ns = 1_000.0;
    for load in [0.2, 0.5, 0.8] {
        let mut system = closed(4, service_ns, 0.0);
        system.spread = |random, ns| random.exponential(ns);
        for client in &mut system.clients {
            client.every_ns = 4.0 * service_ns / load;
        }
        let outcome = run(&system, 10.0 * MS, 1_000.0 * MS, 13);
        let mean_ns = service_ns / (1.0 - load);
        assert_near(outcome.requests_per_s, load / service_ns * 1e9, 0.01);
        assert_near(outcome.latency_ns, mean_ns, 0.03);
        assert_near(outcome.latency_p99_ns, mean_ns * 100.0_f64.ln(), 0.04);
        assert_near(outcome.useful[0], load, 0.01);
    }
}

/// A stream of more work than a sidecore can do: the sidecore is always busy, and latencies grow
/// with the time.
#[test]
fn an_open_stream_of_too_much_work_has_no_steady_latency() {
    let mut system = closed(1, 1_000.0, 0.0);
    system.clients[0].every_ns = 500.0;
    let [short, long] = [10.0, 40.0].map(|ms| run(&system, MS, ms * MS, 17));
    assert_near(long.requests_per_s, 1e9 / 1_000.0, 0.01);
    assert!(long.latency_p99_ns > 3.0 * short.latency_p99_ns, "{long:?} {short:?}");
}

/// Little's law, for each combination of parts: requests in flight and at their guests are those of
/// all threads.
#[test]
fn threads_are_the_throughput_times_the_time_around() {
    let stage = |poll_ns, request_ns| Stage { poll_ns, request_ns, byte_ns: 0.05 };
    let read = Path {
        client: stage(100.0, 150.0),
        here: stage(120.0, 300.0),
        forward: stage(130.0, 100.0),
        helper: stage(90.0, 200.0),
        answer: stage(60.0, 80.0),
    };
    let write = Path { client: stage(90.0, 250.0), ..read };
    for (sidecores, store_ns, guest_ns) in
        [(1, 0.0, 0.0), (2, 0.0, 5_000.0), (4, 0.0, 0.0), (1, 80_000.0, 0.0), (3, 80_000.0, 900.0)]
    {
        let client = |home| Client {
            home: home % sidecores,
            threads: vec![Work::Read(4096), Work::Write(4096), Work::Webserver],
            guest_ns,
            every_ns: 0.0,
        };
        let clients: Vec<Client> = (0..6).map(client).collect();
        let threads = clients.len() as f64 * 3.0;
        let system = System {
            clients,
            wire_ns: 200.0,
            crossing_ns: 100.0,
            store_ns,
            ..System::new(Costs { read, write }, sidecores)
        };
        let outcome = run(&system, 5.0 * MS, 100.0 * MS, 5);
        let around_ns = outcome.latency_ns + outcome.guest_ns;
        assert_near(outcome.requests_per_s * around_ns / 1e9, threads, 0.01);
        assert_eq!(outcome, run(&system, 5.0 * MS, 100.0 * MS, 5));
        assert!(outcome.useful.iter().all(|share| *share <= 1.0 + 1e-9), "{outcome:?}");
        let mean = outcome.useful.iter().sum::<f64>() / sidecores as f64;
        assert_near(outcome.parts.iter().sum::<f64>() / PARTS as f64, mean, 1e-6);
    }
}

/// One client alone: every time is paid once, and nothing waits.
#[test]
fn a_request_alone_takes_the_sum_of_its_times() {
    let stage = |request_ns| Stage { poll_ns: 10.0, request_ns, byte_ns: 0.0 };
    let path = Path { client: stage(100.0), here: stage(300.0), ..Path::default() };
    let mut system = System { wire_ns: 50.0, ..System::new(Costs { read: path, write: path }, 1) };
    system.clients =
        vec![Client { home: 0, threads: vec![Work::Read(512)], guest_ns: 0.0, every_ns: 0.0 }];
    let outcome = run(&system, MS, 10.0 * MS, 1);
    assert_near(outcome.latency_ns, 110.0 + 310.0 + 100.0, 1e-6);
    assert_near(outcome.useful[0], 310.0 / 520.0, 1e-3);
    assert_eq!((outcome.waited, outcome.handed_over), (0.0, 0.0));
    system.store_ns = 80_000.0;
    let outcome = run(&system, MS, 100.0 * MS, 1);
    assert_near(outcome.latency_ns, 80_530.0, 1e-6);
}

/// Clients of one link, in front of a sidecore that is the bottleneck: the rule of steering gives a
/// part of the work to a second one, and the useful time of both is that of all requests.
#[test]
fn steering_gives_work_to_a_second_sidecore() {
    let stage = |request_ns| Stage { request_ns, ..Stage::default() };
    let path = Path {
        client: stage(10.0),
        here: stage(2_000.0),
        forward: stage(100.0),
        helper: stage(1_900.0),
        answer: stage(100.0),
    };
    let client =
        Client { home: 0, threads: vec![Work::Read(4096); 4], guest_ns: 4_000.0, every_ns: 0.0 };
    let system = |sidecores| System {
        clients: vec![client.clone(); 5],
        crossing_ns: 50.0,
        ..System::new(Costs { read: path, write: path }, sidecores)
    };
    let [one, two] = [1, 2].map(|sidecores| run(&system(sidecores), MS, 100.0 * MS, 3));
    assert_near(one.requests_per_s, 1e9 / 2_000.0, 0.01);
    assert!(two.requests_per_s > 1.2 * one.requests_per_s, "{one:?} {two:?}");
    let here = path.here.request_ns;
    let over = path.forward.request_ns + path.helper.request_ns + path.answer.request_ns;
    let request_ns = here * (1.0 - two.handed_over) + over * two.handed_over;
    let useful = two.useful.iter().sum::<f64>();
    assert_near(two.requests_per_s * request_ns / 1e9, useful, 0.01);
}

/// Sidecores with a link each, all of which are busy: to hand requests over costs more than it
/// gains.
#[test]
fn sidecores_that_are_all_busy_keep_their_requests() {
    let stage = |request_ns| Stage { request_ns, ..Stage::default() };
    let path = Path {
        client: stage(10.0),
        here: stage(1_000.0),
        forward: stage(300.0),
        helper: stage(700.0),
        answer: stage(300.0),
    };
    for (sidecores, clients) in [(2, 8), (2, 16), (4, 16), (4, 28)] {
        let client = |index| Client {
            home: index % sidecores,
            threads: vec![Work::Read(4096); 4],
            guest_ns: 0.0,
            every_ns: 0.0,
        };
        let system = System {
            clients: (0..clients).map(client).collect(),
            crossing_ns: 50.0,
            wire_ns: 500.0,
            ..System::new(Costs { read: path, write: path }, sidecores)
        };
        let outcome = run(&system, MS, 20.0 * MS, 5);
        assert!(outcome.handed_over < 0.05, "{sidecores}, {clients}: {outcome:?}");
        let most = sidecores as f64 * 1e9 / path.here.request_ns;
        assert_near(outcome.requests_per_s, most, 0.01);
    }
}

/// A batch pays for a client's poll once, for each request, and for each byte.
#[test]
fn a_batch_costs_its_polls_requests_and_bytes() {
    let here = Stage { poll_ns: 1_000.0, request_ns: 100.0, byte_ns: 0.1 };
    let path = Path { here, ..Path::default() };
    let client =
        Client { home: 0, threads: vec![Work::Read(1000); 8], guest_ns: 0.0, every_ns: 0.0 };
    let system =
        System { clients: vec![client], ..System::new(Costs { read: path, write: path }, 1) };
    let outcome = run(&system, MS, 20.0 * MS, 2);
    // A poll begins before the answers of the last one have come back: two batches share the
    // requests.
    assert_near(outcome.requests_per_s, 8.0 / (2.0 * 1_000.0 + 8.0 * 200.0) * 1e9, 0.01);
    assert_near(here.in_batch(1000, 8.0), 325.0, 1e-9);
}
