//! The kept command: a process that gets commands from a test.

use std::fs::File;
use std::io::{BufRead as _, BufReader, IoSlice, IoSliceMut, Read as _, Seek as _, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::time::Duration;

use rustix::cmsg_space;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};
use rustix::pipe::{PipeFlags, pipe_with};
use sidecore_linux::{KeptDescriptor, ServiceManager, take_kept};

/// The variable with the socket of the test.
pub const TALK: &str = "SIDECORE_KEEP_TEST_TALK";

/// The reaction to a SIGTERM.
enum End {
    Exit,
    /// Waits for a command.
    Wait,
    Store(usize),
}

/// A test only by its form: the command that the other tests start.
#[test]
fn child() {
    let Some(talk) = std::env::var_os(TALK) else { return };
    let kept = take_kept().unwrap();
    let manager = ServiceManager::from_environment().unwrap().unwrap();
    let (ended, writer) = UnixStream::pair().unwrap();
    signal_hook::low_level::pipe::register(signal_hook::consts::SIGTERM, writer).unwrap();
    let stream = BufReader::new(UnixStream::connect(talk).unwrap());
    Process { kept, manager, ended, stream, end: End::Exit, signals: 0 }.run();
}

struct Process {
    kept: Vec<KeptDescriptor>,
    manager: ServiceManager,
    ended: UnixStream,
    stream: BufReader<UnixStream>,
    end: End,
    signals: usize,
}

impl Process {
    fn run(mut self) {
        self.send(&std::process::id().to_string());
        loop {
            let mut fds = [
                PollFd::new(self.stream.get_ref(), PollFlags::IN),
                PollFd::new(&self.ended, PollFlags::IN),
            ];
            rustix::io::retry_on_intr(|| poll(&mut fds, None)).unwrap();
            let [received, signalled] = fds.map(|fd| !fd.revents().is_empty());
            if signalled {
                self.signals += self.ended.read(&mut [0; 64]).unwrap();
                self.on_signal();
            }
            if received {
                let mut line = String::new();
                self.stream.read_line(&mut line).unwrap();
                if line.is_empty() {
                    // The test has ended with this session; the next process will see whether the
                    // keeper has ended, too.
                    std::process::exit(3);
                }
                self.handle(line.trim_end());
            }
        }
    }

    fn on_signal(&mut self) {
        self.send("SIGTERM");
        match self.end {
            End::Exit => std::process::exit(0),
            End::Wait => {}
            End::Store(count) => {
                for index in 0..count {
                    self.manager
                        .store(&format!("last{index}"), file(&format!("content {index}")).as_fd())
                        .unwrap();
                }
                std::process::exit(0);
            }
        }
    }

    fn handle(&mut self, line: &str) {
        let (command, rest) = line.split_once(' ').unwrap_or((line, ""));
        let (name, content) = rest.split_once(' ').unwrap_or((rest, ""));
        let answer = match command {
            "names" => {
                self.kept.iter().map(|kept| kept.name.as_str()).collect::<Vec<_>>().join(":")
            }
            "file" => self.store(name, &file(content)),
            "pipe" => self.store(name, &pipe(content)),
            "queue" => self.store(name, &queue(content)),
            "forget" => done(self.manager.forget(name)),
            "ready" => done(self.manager.ready()),
            "barrier" => done(self.manager.barrier(Duration::from_secs(20))),
            "read" => self.read(name),
            "variable" => std::env::var(name).unwrap_or_default(),
            "take" => take_kept().unwrap().len().to_string(),
            "inheritable" => {
                let inheritable =
                    |kept: &&KeptDescriptor| rustix::io::fcntl_getfd(&kept.fd).unwrap().is_empty();
                self.kept.iter().filter(inheritable).count().to_string()
            }
            "signals" => self.signals.to_string(),
            "nonsense" => nonsense(),
            "at" => {
                let mut words = rest.split(' ').skip(1);
                self.end = match words.next().unwrap() {
                    "wait" => End::Wait,
                    _ => End::Store(words.next().unwrap().parse().unwrap()),
                };
                String::new()
            }
            "exit" => std::process::exit(name.parse().unwrap()),
            "crash" => std::process::abort(),
            _ => panic!("{line}"),
        };
        self.send(&answer);
    }

    fn send(&mut self, line: &str) {
        // A test that has read enough may have closed the socket.
        let _ = self.stream.get_mut().write_all(format!("{line}\n").as_bytes());
    }

    fn store(&self, name: &str, fd: &OwnedFd) -> String {
        done(self.manager.store(name, fd.as_fd()))
    }

    /// The content of the last descriptor of this name.
    fn read(&self, name: &str) -> String {
        let kept = self.kept.iter().rfind(|kept| kept.name == name).unwrap();
        let fd = kept.fd.try_clone().unwrap();
        if rustix::fs::FileType::from_raw_mode(rustix::fs::fstat(&fd).unwrap().st_mode).is_socket()
        {
            return unqueue(&fd);
        }
        let (mut file, mut text) = (File::from(fd), String::new());
        let _ = file.rewind();
        file.read_to_string(&mut text).unwrap();
        text
    }
}

fn done(result: std::io::Result<()>) -> String {
    result.unwrap();
    String::new()
}

fn file(content: &str) -> OwnedFd {
    let mut file = File::from(memfd_create("kept", MemfdFlags::CLOEXEC).unwrap());
    file.write_all(content.as_bytes()).unwrap();
    file.into()
}

/// The reading end of a pipe with `content` in it, whose writing end is closed.
fn pipe(content: &str) -> OwnedFd {
    let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).unwrap();
    File::from(writer).write_all(content.as_bytes()).unwrap();
    reader
}

/// The receiving end of a socket pair with a message for each word. Each message holds a file with
/// the word, and the pair's sending end, which no process has open otherwise.
fn queue(content: &str) -> OwnedFd {
    let flags = SocketFlags::CLOEXEC;
    let (ours, theirs) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    for word in content.split(' ') {
        let file = file(word);
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(2))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fds = [file.as_fd(), ours.as_fd()];
        assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
        sendmsg(&ours, &[IoSlice::new(word.as_bytes())], &mut control, SendFlags::empty()).unwrap();
    }
    theirs
}

/// The words in the messages, which must also be in the files.
fn unqueue(queue: &OwnedFd) -> String {
    let mut words = Vec::new();
    loop {
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(2))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut bytes = [0; 64];
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        let Ok(received) = recvmsg(queue, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags)
        else {
            break;
        };
        if received.bytes == 0 {
            break;
        }
        let mut fds: Vec<OwnedFd> = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(some) = message {
                fds.extend(some);
            }
        }
        assert_eq!(fds.len(), 2);
        let mut text = String::new();
        let mut file = File::from(fds.swap_remove(0));
        file.rewind().unwrap();
        file.read_to_string(&mut text).unwrap();
        assert_eq!(text.as_bytes(), &bytes[..received.bytes]);
        words.push(text);
    }
    words.join(" ") + ", each"
}

/// Messages that no daemon sends, and one descriptor without a name.
fn nonsense() -> String {
    let path = std::env::var_os("NOTIFY_SOCKET").unwrap();
    let socket = UnixDatagram::unbound().unwrap();
    socket.connect(path).unwrap();
    for bytes in
        [&b""[..], b"FDSTORE=1\nFDNAME=x", b"FDSTOREREMOVE=1", b"\0\xff\n\n=", &[b'x'; 5000]]
    {
        socket.send(bytes).unwrap();
    }
    let file = file("x");
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = [file.as_fd()];
    assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
    let bytes = IoSlice::new(b"FDNAME=a:b\nUNKNOWN=1\nFDSTORE=1");
    sendmsg(&socket, &[bytes], &mut control, SendFlags::empty()).unwrap();
    String::new()
}
