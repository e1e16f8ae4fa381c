//! Answers of an etcd that is late, wrong or broken.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use sidecore_cluster::{Endpoint, Gateway};
use sidecore_kit::namespace::Namespace;
use sidecore_ownership::{Answer, Call};

const HEADER: &str =
    r#""header":{"cluster_id":"7","member_id":"8","revision":"9","raft_term":"2"}"#;
/// Longer than a busy machine needs for a call, but for the call that has no answer.
const PATIENCE: Duration = Duration::from_secs(60);

fn http(status: &str, body: &str) -> Vec<u8> {
    format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\n\r\n{body}", body.len()).into_bytes()
}

/// The answer to a call at two endpoints: one that replies so to each request, and one that grants
/// a lease.
fn answers(call: &Call, reply: &[u8], patience: Duration) -> [Answer; 2] {
    let grant = http("200 OK", &format!("{{{HEADER},\"ID\":\"5\",\"TTL\":\"3\"}}"));
    let listeners = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
    let endpoint = |listener: &TcpListener| listener.local_addr().unwrap().to_string().parse();
    let endpoints: Vec<Endpoint> =
        listeners.iter().map(|listener| endpoint(listener).unwrap()).collect();
    let mut gateway = Gateway::new(endpoints, "test", patience);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    std::thread::scope(|scope| {
        for (listener, reply) in listeners.iter().zip([reply, &grant]) {
            scope.spawn(move || {
                let (mut stream, _) = listener.accept().unwrap();
                let mut request = [0; 1 << 16];
                // A reply to each request, until the gateway closes the connection.
                while stream.read(&mut request).is_ok_and(|len_bytes| len_bytes > 0) {
                    if stream.write_all(reply).is_err() {
                        break;
                    }
                }
            });
        }
        let first = runtime.block_on(gateway.carry_out(call));
        let second = runtime.block_on(gateway.carry_out(&Call::Grant { ttl_s: 3 }));
        // Ends the connections, and with them the threads. One that was not asked waits for one.
        drop((gateway, runtime));
        for listener in &listeners {
            let _ = TcpStream::connect(listener.local_addr().unwrap());
        }
        [first, second]
    })
}

fn assert_fails(call: &Call, reply: &[u8], patience: Duration, expected: &str) {
    let [first, second] = answers(call, reply, patience);
    let Answer::Failed { reason } = first else { panic!("{expected}: {first:?}") };
    assert!(reason.starts_with("etcd at http://127.0.0.1:"), "{reason}");
    assert!(reason.contains(expected), "not \"{expected}\": {reason}");
    let granted = matches!(second, Answer::Granted { lease: 5, ttl_s: 3, .. });
    assert!(granted, "the next endpoint was not asked: {second:?}");
}

#[test]
fn an_answer_that_is_wrong_is_a_failure_and_the_next_endpoint_is_asked() {
    let namespace = match Namespace::new() {
        Ok(namespace) => namespace,
        Err(error) => return sidecore_skip::skip(error),
    };
    namespace.ip("link set lo up").unwrap();
    let (grant, renew) = (Call::Grant { ttl_s: 3 }, Call::Renew { lease: 5 });
    let ok = |body: &str| http("200 OK", body);
    let pad = "x".repeat(5 << 20);
    let cases = [
        (&grant, b"SSH-2.0-OpenSSH_9.2\r\n\r\n".to_vec(), ""),
        (&grant, ok("<html>"), "no JSON"),
        (&grant, ok("{}"), "no header"),
        (&grant, ok("[1]"), "no header"),
        (&grant, ok(&format!("{{{HEADER},\"ID\":\"x\",\"TTL\":\"3\"}}")), "`ID` is no number"),
        (&grant, ok(&format!("{{{HEADER},\"ID\":\"5\",\"TTL\":-3}}")), "`TTL` is no number"),
        (&grant, ok(&format!("{{{HEADER}}}")), "no lease"),
        (&grant, ok(&format!("{{\"x\":\"{pad}\"}}")), "length limit exceeded"),
        (&grant, http("503 Busy", "{\"error\":\"etcdserver: no leader\"}"), "no leader"),
        (&renew, ok("{\"error\":{\"message\":\"etcdserver: lost\"}}"), "etcdserver: lost"),
        // The renewal is answered, and the read is not.
        (&renew, ok(&format!("{{\"result\":{{{HEADER},\"TTL\":\"3\"}}}}")), "no header"),
    ];
    namespace
        .within(|| {
            for (call, reply, expected) in &cases {
                assert_fails(call, reply, PATIENCE, expected);
            }
            // The second call is in time, or the machine is very busy.
            assert_fails(&grant, b"", Duration::from_secs(2), "no answer within 2000 ms");
        })
        .unwrap();
}
