//! Descriptors that a service manager kept, and invalid environments, in processes of their own.

use std::fs::File;
use std::io::{Read as _, Seek as _};
use std::os::fd::AsRawFd as _;
use std::process::Command;

use sidecore_linux::{KeptDescriptor, take_kept};

/// The program of the tests below, and no test by itself: prints the kept descriptors, their
/// contents, and the result of a second call.
#[test]
fn child() {
    if std::env::var_os("SIDECORE_KEPT_TEST").is_none() {
        return;
    }
    // Opens a file earlier than the daemon's first line, as a library could.
    let own = std::env::var_os("SIDECORE_KEPT_OWN").map(|_| File::open("/dev/null").unwrap());
    match take_kept() {
        Ok(kept) => kept.into_iter().for_each(describe),
        Err(error) => println!("\n> error: {error}"),
    }
    println!("\n> again: {}", take_kept().unwrap().len());
    if let Some(own) = own {
        assert!(own.metadata().is_ok());
        println!("\n> own: {}", own.as_raw_fd());
    }
}

fn describe(kept: KeptDescriptor) {
    let number = kept.fd.as_raw_fd();
    let closed_on_exec =
        rustix::io::fcntl_getfd(&kept.fd).unwrap().contains(rustix::io::FdFlags::CLOEXEC);
    let (mut file, mut text) = (File::from(kept.fd), String::new());
    file.rewind().unwrap();
    file.read_to_string(&mut text).unwrap();
    println!("\n> {number} {} {text:?} {closed_on_exec}", kept.name);
}

/// Returns the output of the process above with these variables, set by a shell; `$$` is its
/// number.
fn say(variables: &str, redirections: &str) -> Vec<String> {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("one"), "first").unwrap();
    std::fs::write(directory.path().join("two"), "second").unwrap();
    let script = format!("export SIDECORE_KEPT_TEST=1 {variables}; exec \"$@\" {redirections}");
    let mut shell = Command::new("sh");
    shell.args(["-c", &script, "sh"]).arg(std::env::current_exe().unwrap());
    shell
        .args(["--exact", "child", "--nocapture", "--test-threads=1"])
        .current_dir(directory.path());
    shell.env_remove("LISTEN_PID").env_remove("LISTEN_FDS").env_remove("LISTEN_FDNAMES");
    let output = shell.output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(
        output.status.success(),
        "{variables}: {text} {}",
        String::from_utf8_lossy(&output.stderr)
    );
    // The other lines are the test runner's.
    text.lines().filter_map(|line| line.strip_prefix("> ")).map(str::to_owned).collect()
}

#[test]
fn descriptors_are_taken_once_by_name() {
    let said = say("LISTEN_PID=$$ LISTEN_FDS=2 LISTEN_FDNAMES=a:b", "3<one 4<two");
    assert_eq!(said, ["3 a \"first\" true", "4 b \"second\" true", "again: 0"]);
}

#[test]
fn gaps_and_an_exaggerated_number_are_left_out() {
    let said = say("LISTEN_PID=$$ LISTEN_FDS=3 LISTEN_FDNAMES=a:b:c", "3<one 4<&- 5<two");
    assert_eq!(said, ["3 a \"first\" true", "5 c \"second\" true", "again: 0"]);
    let closed = "3<one 4<&- 5<&- 6<&- 7<&- 8<&- 9<&-";
    assert_eq!(say("LISTEN_PID=$$ LISTEN_FDS=7", closed), ["3 unknown \"first\" true", "again: 0"]);
}

#[test]
fn a_file_of_this_process_is_not_taken_if_the_environment_says_so() {
    let said =
        say("SIDECORE_KEPT_OWN=1 LISTEN_PID=$$ LISTEN_FDS=2 LISTEN_FDNAMES=a:b", "3<&- 4<two");
    assert_eq!(said, ["4 b \"second\" true", "again: 0", "own: 3"]);
}

#[test]
fn no_descriptor_is_taken_for_another_process_or_in_an_invalid_environment() {
    assert_eq!(say("LISTEN_PID=1 LISTEN_FDS=1", "3<one"), ["again: 0"]);
    for (variables, culprit) in [
        ("LISTEN_PID=$$ LISTEN_FDS=99999999999999999999", "LISTEN_FDS"),
        ("LISTEN_PID=$$ LISTEN_FDS=-1", "LISTEN_FDS"),
        ("LISTEN_PID=$$ LISTEN_FDS=2 LISTEN_FDNAMES=a", "LISTEN_FDNAMES"),
        ("LISTEN_PID=me LISTEN_FDS=1", "LISTEN_PID"),
    ] {
        let said = say(variables, "3<one");
        assert!(said[0].starts_with(&format!("error: the environment has {culprit}=")), "{said:?}");
    }
}
