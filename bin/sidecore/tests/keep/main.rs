//! `sidecore keep`, with the daemon's side of the protocol: descriptors outlive a process.
//!
//! The kept command is this test binary, as [`child`], and gets commands over a socket.

mod child;
mod keeper;

use std::os::unix::net::UnixDatagram;
use std::time::Duration;

use keeper::Keeper;
use rustix::process::Signal;

#[test]
fn a_restart_gives_everything_back_by_name() {
    let keeper = Keeper::start(&[]);
    let mut first = keeper.next();
    assert_eq!(first.ask("names"), "");
    first.ask("file nvme.disk0 some content");
    first.ask("pipe nvme.disk1 in the pipe");
    first.ask("queue nvme.disk2 messages with files");
    keeper.signal(Signal::HUP);
    assert!(first.gets_sigterm());

    let mut second = keeper.next();
    assert_ne!(second.pid, first.pid);
    assert_eq!(second.ask("names"), "nvme.disk0:nvme.disk1:nvme.disk2");
    assert_eq!(second.ask("read nvme.disk0"), "some content");
    assert_eq!(second.ask("read nvme.disk1"), "in the pipe");
    // Unread messages are kept with the descriptors in them.
    assert_eq!(second.ask("read nvme.disk2"), "messages with files, each");
    assert_eq!(second.ask("inheritable"), "0");
    assert_eq!(second.ask("take again"), "0");
}

#[test]
fn removed_descriptors_do_not_come_back() {
    let keeper = Keeper::start(&[]);
    let mut first = keeper.next();
    for command in
        ["file a 1", "file b 2", "file a 3", "file c 4", "forget a", "forget missing", "file d 5"]
    {
        first.ask(command);
    }
    keeper.signal(Signal::HUP);
    let mut second = keeper.next();
    assert_eq!(second.ask("names"), "b:c:d");
    // A descriptor that is not removed stays, also after a process has taken it.
    second.ask("forget c");
    keeper.signal(Signal::HUP);
    let mut third = keeper.next();
    assert_eq!(third.ask("names"), "b:d");
    assert_eq!(third.ask("read d"), "5");
}

#[test]
fn the_last_messages_of_a_process_are_handled() {
    let keeper = Keeper::start(&[]);
    // More messages than the queue of a datagram socket holds, sent from the signal on, without a
    // pause before the end.
    let mut first = keeper.next();
    first.ask("at end store 200");
    keeper.signal(Signal::HUP);
    let mut second = keeper.next();
    assert_eq!(second.ask("names").split(':').count(), 200);
    for index in [0, 1, 57, 199] {
        assert_eq!(second.ask(&format!("read last{index}")), format!("content {index}"));
    }
}

#[test]
fn messages_in_the_socket_at_the_end_are_handled() {
    let keeper = Keeper::start(&[]);
    let mut first = keeper.next();
    keeper.signal(Signal::STOP);
    keeper::until(keeper.pid(), "T");
    for name in ["a", "b", "c"] {
        first.ask(&format!("file {name} content"));
    }
    first.send("exit 1");
    keeper::until(first.pid, "Z");
    keeper.signal(Signal::CONT);
    assert_eq!(keeper.next().ask("names"), "a:b:c");
}

#[test]
fn the_number_of_descriptors_is_limited() {
    let keeper = Keeper::start(&["--max", "3"]);
    let mut first = keeper.next();
    for name in ["a", "b", "c", "d"] {
        first.ask(&format!("file {name} x"));
    }
    first.ask("forget b");
    first.ask("file e x");
    assert_eq!(first.ask("variable FDSTORE"), "3");
    keeper.signal(Signal::HUP);
    assert_eq!(keeper.next().ask("names"), "a:c:e");
    assert!(keeper.log().contains("a descriptor of \"d\" is not kept"), "{}", keeper.log());
}

#[test]
fn a_command_that_fails_is_started_again_with_what_is_kept() {
    let mut keeper = Keeper::start(&[]);
    let mut first = keeper.next();
    first.ask("file a content");
    first.send("exit 1");
    let mut second = keeper.next();
    assert_eq!(second.ask("read a"), "content");
    second.send("crash");
    let mut third = keeper.next();
    assert_eq!(third.ask("read a"), "content");
    // A command that succeeds is not started again.
    third.send("exit 0");
    assert_eq!(keeper.wait().code(), Some(0));
}

#[test]
fn a_command_that_fails_too_often_ends_it() {
    let mut keeper = Keeper::start(&[]);
    keeper.next().ask("file a content");
    let mut starts = 0;
    while let Some(mut session) = keeper.next_or_end() {
        session.send("exit 3");
        starts += 1;
    }
    // The first process is not counted: it has failed before the loop, when its session was
    // dropped.
    assert_eq!((starts, keeper.wait().code()), (5, Some(1)));
    assert!(
        keeper.log().contains("too often (exit status: 3); 1 descriptors are lost"),
        "{}",
        keeper.log()
    );
}

#[test]
fn a_signal_to_end_is_passed_on_once_and_the_code_is_the_commands() {
    for signal in [Signal::TERM, Signal::INT] {
        let mut keeper = Keeper::start(&[]);
        let mut session = keeper.next();
        session.ask("file a content");
        session.ask("at end wait");
        keeper.signal(signal);
        assert!(session.gets_sigterm());
        // A second signal at once, as from senders that signal the process and its group.
        keeper.signal(signal);
        keeper::until(keeper.pid(), "S");
        assert_eq!(session.ask("signals"), "1");
        // A restart is no longer possible.
        keeper.signal(Signal::HUP);
        session.send("exit 7");
        assert_eq!(keeper.wait().code(), Some(7));
        assert!(keeper.left_behind().is_empty(), "{:?}", keeper.left_behind());
    }
}

#[test]
fn an_end_during_a_restart_is_no_second_signal() {
    let mut keeper = Keeper::start(&[]);
    let mut session = keeper.next();
    session.ask("at end wait");
    keeper.signal(Signal::HUP);
    assert!(session.gets_sigterm());
    keeper.signal(Signal::TERM);
    keeper::until(keeper.pid(), "S");
    assert_eq!(session.ask("signals"), "1");
    // After the time in which a second signal means the same, another one is passed on.
    std::thread::sleep(Duration::from_millis(2100));
    keeper.signal(Signal::TERM);
    assert!(session.gets_sigterm());
    session.send("exit 0");
    assert_eq!(keeper.wait().code(), Some(0));
}

#[test]
fn the_command_does_not_outlive_its_keeper() {
    let keeper = Keeper::start(&[]);
    let mut session = keeper.next();
    keeper.signal(Signal::KILL);
    assert!(session.gets_sigterm());
}

#[test]
fn messages_of_other_processes_are_ignored() {
    let keeper = Keeper::start(&[]);
    let mut session = keeper.next();
    let path = session.ask("variable NOTIFY_SOCKET");
    let stranger = UnixDatagram::unbound().unwrap();
    stranger.send_to(b"FDSTOREREMOVE=1\nFDNAME=a", &path).unwrap();
    session.ask("file a content");
    stranger.send_to(b"FDSTOREREMOVE=1\nFDNAME=a", &path).unwrap();
    session.ask("barrier");
    keeper.signal(Signal::HUP);
    assert_eq!(keeper.next().ask("names"), "a");
    assert!(keeper.log().contains("another process"), "{}", keeper.log());
}

#[test]
fn nonsense_from_the_command_changes_nothing() {
    let keeper = Keeper::start(&[]);
    let mut session = keeper.next();
    session.ask("file a content");
    session.ask("nonsense");
    session.ask("barrier");
    keeper.signal(Signal::HUP);
    assert_eq!(keeper.next().ask("names"), "a:stored");
}

#[test]
fn a_command_that_is_not_there_is_an_error_at_once() {
    let mut keeper = Keeper::of(&[], &["/no/such/command"], &[]);
    assert_eq!(keeper.wait().code(), Some(127));
    assert!(keeper.log().contains("cannot run /no/such/command"), "{}", keeper.log());
}

#[test]
fn a_manager_above_is_notified_of_the_start_and_the_end() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("above");
    let above = UnixDatagram::bind(&path).unwrap();
    above.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let mut keeper = Keeper::with_environment(&[
        ("NOTIFY_SOCKET", path.to_str().unwrap()),
        ("LISTEN_FDS", "nonsense"),
    ]);
    let mut session = keeper.next();
    // The variables of the manager above are not for the command.
    assert_eq!(session.ask("variable LISTEN_FDS"), "");
    assert_ne!(session.ask("variable NOTIFY_SOCKET"), path.to_str().unwrap());
    session.ask("ready");
    let mut bytes = [0; 64];
    let length = above.recv(&mut bytes).unwrap();
    assert_eq!(&bytes[..length], b"READY=1");
    keeper.signal(Signal::TERM);
    let length = above.recv(&mut bytes).unwrap();
    assert_eq!(&bytes[..length], b"STOPPING=1");
    assert_eq!(keeper.wait().code(), Some(0));
}

#[test]
fn a_command_that_is_not_in_the_path_is_looked_for_beside_the_program() {
    let keep = |command: &str| {
        let mut keep = std::process::Command::new(env!("CARGO_BIN_EXE_sidecore"));
        keep.args(["keep", "--", command, "--version"])
            .env("PATH", "/nonexistent")
            .env_remove("NOTIFY_SOCKET");
        keep.output().unwrap()
    };
    let output = keep("sidecore");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.stdout.starts_with(b"sidecore "));
    // A path is not searched for, and a name that is not found is an error.
    for missing in ["./sidecore", "no-such-program"] {
        assert_eq!(keep(missing).status.code(), Some(127), "{missing}");
    }
}
