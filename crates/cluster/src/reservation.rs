//! The fence by the reservations of the store's disks.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use sidecore_linux::{DiskReservation, ReservationError, ReservedDisk, stacked_on};
use sidecore_ownership::{Acquisition, Found, Member, Order, Reply, Rivals};

use crate::{Claim, Fence, LockFence, NotesFile, Others};

/// A fence by persistent reservations, for candidates on several hosts.
///
/// The owner's host alone is registered at the store's disks: they refuse the writes of all others,
/// also of a host that was paused and does not know that it was replaced. Former daemons of this
/// host are fenced by locks, because the disks cannot tell them from this one
/// (docs/decisions/0085-reservations.md).
#[derive(Debug)]
pub struct ReservationFence {
    /// Whole SCSI or NVMe disks.
    pub disks: Vec<ProbedDisk>,
    /// An order that takes longer has failed.
    pub time_limit: Duration,
    /// For former daemons of this host.
    pub local: LockFence,
    /// The keys and the answered preemptions of this host.
    pub notes: NotesFile,
    /// The attempt that has not ended, also not in time.
    pub late: LateAttempt,
}

/// A disk that knows reservations.
#[derive(Clone, Debug)]
pub struct ProbedDisk {
    /// Its path.
    pub path: PathBuf,
    /// The identity by which all hosts know it.
    pub id: String,
    /// Whether the kernel shows its keys. Looked up once: a kernel that shows them at one time and
    /// not at another has failed.
    pub shows_keys: bool,
}

/// An attempt whose order hangs in the kernel. There is no second one beside it.
#[derive(Debug, Default)]
pub struct LateAttempt(Mutex<Option<(Receiver<()>, Arc<Attempt>)>>);

/// The state of an attempt while it goes on.
#[derive(Debug)]
struct Attempt {
    is_given_up: AtomicBool,
    /// The path that it waits for, and the begin of the wait.
    at: Mutex<(String, Instant)>,
}

impl Attempt {
    fn new() -> Self {
        Self {
            is_given_up: AtomicBool::new(false),
            at: Mutex::new((String::new(), Instant::now())),
        }
    }

    fn is_given_up(&self) -> bool {
        self.is_given_up.load(Ordering::SeqCst)
    }

    /// A step begins, which has the whole time limit.
    fn waits_for(&self, what: &Path) {
        let mut at = self.at.lock().unwrap_or_else(PoisonError::into_inner);
        *at = (what.display().to_string(), Instant::now());
    }

    /// The time that the step has left.
    fn left(&self, limit: Duration) -> Duration {
        let at = self.at.lock().unwrap_or_else(PoisonError::into_inner);
        limit.saturating_sub(at.1.elapsed())
    }

    fn too_late(&self, limit: Duration) -> String {
        let at = self.at.lock().unwrap_or_else(PoisonError::into_inner);
        format!(
            "{} has not answered within {} s: look at the disk, its path and the kernel's log; \
             the attempt is waited for, and the next one follows",
            at.0,
            limit.as_secs_f32()
        )
    }
}

/// Why there is no result of work.
#[derive(Debug, PartialEq, Eq)]
enum Failure {
    /// It failed.
    Failed(String),
    /// A step of it hangs.
    Hangs(String),
}

impl Failure {
    fn reason(self) -> String {
        match self {
            Self::Failed(why) | Self::Hangs(why) => why,
        }
    }
}

impl LateAttempt {
    /// Does work on a thread of its own, and waits for each of its steps for a limited time. `work`
    /// ends early if the attempt is given up.
    fn run<T: Send + 'static>(
        &self,
        limit: Duration,
        work: impl FnOnce(&Attempt) -> Result<T, String> + Send + 'static,
    ) -> Result<T, Failure> {
        let mut late = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((end, attempt)) = late.take()
            && end.recv_timeout(limit) == Err(RecvTimeoutError::Timeout)
        {
            let why = attempt.too_late(limit);
            *late = Some((end, attempt));
            return Err(Failure::Hangs(why));
        }
        let attempt = Arc::new(Attempt::new());
        let known = Arc::clone(&attempt);
        let ((result, answer), (ends, end)) = (channel(), channel::<()>());
        let run = move || {
            let _ = result.send(work(&attempt));
            drop(ends);
        };
        let thread = std::thread::Builder::new().name("reservation".to_owned()).spawn(run);
        thread.map_err(|error| Failure::Failed(format!("no thread for it: {error}")))?;
        loop {
            let left = known.left(limit);
            match answer.recv_timeout(left) {
                Ok(result) => return result.map_err(Failure::Failed),
                Err(RecvTimeoutError::Timeout) if !known.left(limit).is_zero() => {}
                Err(_) => {
                    known.is_given_up.store(true, Ordering::SeqCst);
                    let why = known.too_late(limit);
                    *late = Some((end, known));
                    return Err(Failure::Hangs(why));
                }
            }
        }
    }
}

impl ReservationFence {
    /// Looks at disks. Fails if one knows no reservations, or does not answer. `unused` is a random
    /// number.
    ///
    /// # Errors
    /// The reason, with the disk's name.
    pub fn probe(
        disks: &[PathBuf],
        unused: u64,
        limit: Duration,
    ) -> Result<Vec<ProbedDisk>, String> {
        let disks = disks.to_vec();
        let probed = LateAttempt::default().run(limit, move |attempt| {
            let probe = |path: &PathBuf| {
                attempt.waits_for(path);
                let disk = ReservedDisk::open(path)?;
                disk.probe(unused)?;
                let (id, shows_keys) = (disk.id()?, disk.read()?.is_some());
                Ok(ProbedDisk { path: path.clone(), id, shows_keys })
            };
            let probed: Result<Vec<_>, ReservationError> = disks.iter().map(probe).collect();
            probed.map_err(|error| error.to_string())
        });
        probed.map_err(Failure::reason)
    }
}

impl Fence for ReservationFence {
    fn fence(&self, claim: &Claim, others: Others<'_>) -> Result<(), String> {
        let Others { suspects, former, owner } = others;
        let all = suspects.iter().chain(former).cloned().collect();
        let work = Work {
            disks: self.disks.clone(),
            local: self.local.clone(),
            notes: self.notes.clone(),
            claim: claim.clone(),
            rivals: Rivals { all, owner: owner.cloned() },
        };
        let done = self.late.run(self.time_limit, move |attempt| work.run(attempt));
        done.map_err(|failure| {
            if matches!(failure, Failure::Hangs(_)) {
                claim.give_up();
            }
            failure.reason()
        })
    }

    fn watch(&self, me: &Member) -> Option<Watch> {
        let disks = self.disks.iter().map(|disk| (disk.path.clone(), None)).collect();
        Some(Watch { key: me.reservation_key(), disks })
    }
}

/// Sees whether another host has fenced this one.
#[derive(Debug)]
pub struct Watch {
    key: u64,
    /// Opened once: udev looks at a disk again after each close.
    disks: Vec<(PathBuf, Option<ReservedDisk>)>,
}

impl Watch {
    /// The time between two looks while the store is served.
    pub const PERIOD: Duration = Duration::from_secs(1);

    /// Looks at all disks. A disk that fails says nothing about other hosts. It may hang.
    ///
    /// # Errors
    /// This host's writes fail, because another one has the reservation.
    pub fn look(&mut self) -> Result<(), String> {
        for (path, disk) in &mut self.disks {
            if disk.is_none() {
                *disk = ReservedDisk::open(path).ok();
            }
            // The holder may reserve again.
            let held = disk.as_ref().map(|disk| disk.reserve(self.key));
            match held {
                Some(Err(ReservationError::Conflict(_))) => {
                    return Err(format!(
                        "{} has refused this host's reservation: another host has fenced this \
                         owner",
                        path.display()
                    ));
                }
                Some(Err(_)) => *disk = None,
                _ => {}
            }
        }
        Ok(())
    }
}

/// The work of one attempt.
struct Work {
    disks: Vec<ProbedDisk>,
    local: LockFence,
    notes: NotesFile,
    claim: Claim,
    rivals: Rivals,
}

impl Work {
    fn run(&self, attempt: &Attempt) -> Result<(), String> {
        // A registration lets the whole host write. So nothing of it may be in flight, also if the
        // daemon that sent it was fenced before, and no other may begin.
        for ProbedDisk { path, .. } in &self.disks {
            attempt.waits_for(path);
            if let Some(over) = stacked_on(path) {
                return Err(format!(
                    "{} is on {}, and the kernel can write through it at any time: serve the whole \
                     disk, and nothing on it",
                    over.display(),
                    path.display()
                ));
            }
        }
        let _locks = self.local.quiet()?;
        let answers = |disk: &ProbedDisk| {
            attempt.waits_for(&disk.path);
            self.open(disk)?.answers(self.claim.me.reservation_key()).map_err(show)
        };
        let acquire = |disk: &ProbedDisk| {
            attempt.waits_for(&disk.path);
            self.acquire(disk, attempt)
        };
        let ends = || attempt.is_given_up() || self.claim.has_ended();
        all_disks(&self.disks, (answers, acquire), ends)
    }

    fn open(&self, probed: &ProbedDisk) -> Result<ReservedDisk, String> {
        let disk = ReservedDisk::open(&probed.path).map_err(show)?;
        // A second device of the disk can have come since.
        if disk.id().map_err(show)? != probed.id {
            let name = probed.path.display();
            return Err(format!("{name} is another disk now: start `sidecore own` again"));
        }
        Ok(disk)
    }

    /// Gets the reservation of a disk.
    fn acquire(&self, probed: &ProbedDisk, attempt: &Attempt) -> Result<(), String> {
        let disk = self.open(probed)?;
        let (name, me) = (probed.path.display().to_string(), &self.claim.me);
        let names = (name.as_str(), probed.id.as_str());
        let mut acquisition = Acquisition::new(names, me, &self.rivals, self.notes.read()?);
        let carry_out = |order| {
            attempt.waits_for(&probed.path);
            self.carry_out((&disk, probed), order)
        };
        drive(&mut acquisition, (attempt, &self.claim), carry_out)
            .unwrap_or_else(|| Err(format!("the attempt at {name} was given up")))
    }

    fn carry_out(&self, (disk, probed): (&ReservedDisk, &ProbedDisk), order: Order) -> Reply {
        let done = match order {
            Order::Note(notes) => {
                return self.notes.write(&notes).map_or_else(Reply::Failed, |()| Reply::Done);
            }
            Order::Recall => {
                return self.notes.recall().map_or_else(Reply::Failed, Reply::Recalled);
            }
            Order::Register { old, new } => disk.register(old, new),
            Order::PreemptAndAbort { victim, mine } => disk.preempt_and_abort(victim, mine),
            Order::Reserve { key } => disk.reserve(key),
            Order::Read if !probed.shows_keys => return Reply::Read(None),
            Order::Read => match disk.read() {
                Ok(Some(found)) => return Reply::Read(Some(found_of(found))),
                Ok(None) => {
                    let name = probed.path.display();
                    return Reply::Failed(format!(
                        "the kernel does not show the keys of {name}, as it did at the start: look \
                         at its log, the disk and the path to it"
                    ));
                }
                Err(error) => Err(error),
            },
        };
        match done {
            Ok(()) => Reply::Done,
            Err(ReservationError::Conflict(_)) => Reply::Conflict,
            Err(error) => Reply::Failed(error.to_string()),
        }
    }
}

fn show(error: ReservationError) -> String {
    error.to_string()
}

/// Acquires disks, and returns the first error.
///
/// The ledger and the notes have the newest keys of a host, and a disk can be held with an older
/// one only as long as no claim reaches it. So all disks have to answer before one is changed, and
/// a disk that is not acquired keeps no other one from getting the key of this claim.
fn all_disks<T>(
    disks: &[T],
    (mut answers, mut acquire): (
        impl FnMut(&T) -> Result<(), String>,
        impl FnMut(&T) -> Result<(), String>,
    ),
    ends: impl Fn() -> bool,
) -> Result<(), String> {
    let goes_on = || if ends() { Err("the attempt was given up".to_owned()) } else { Ok(()) };
    disks.iter().try_for_each(|disk| goes_on().and_then(|()| answers(disk)))?;
    goes_on()?;
    let mut acquired = Ok(());
    for disk in disks {
        if acquired.is_err() && ends() {
            break;
        }
        let result = acquire(disk);
        acquired = acquired.and(result);
    }
    acquired
}

/// Carries an acquisition out, as long as its attempt is not given up. `None` if it was.
fn drive(
    acquisition: &mut Acquisition,
    (attempt, claim): (&Attempt, &Claim),
    mut carry_out: impl FnMut(Order) -> Reply,
) -> Option<Result<(), String>> {
    while let Some(order) = acquisition.order() {
        match order {
            // An answer that is known is noted, also if nothing else follows.
            Order::Note(_) => {}
            Order::Recall | Order::Read if attempt.is_given_up() || claim.has_ended() => {
                return None;
            }
            Order::Recall | Order::Read => {}
            Order::Register { .. } | Order::PreemptAndAbort { .. } | Order::Reserve { .. } => {
                claim.admit();
                if attempt.is_given_up() || claim.has_ended() {
                    return None;
                }
            }
        }
        acquisition.replied(carry_out(order));
    }
    acquisition.result().cloned()
}

fn found_of(disk: DiskReservation) -> Found {
    let DiskReservation { keys, holder, is_write_exclusive } = disk;
    Found { keys, holder, is_write_exclusive }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use sidecore_ownership::Notes;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);
    const SHORT: Duration = Duration::from_millis(20);

    #[test]
    fn an_attempt_that_hangs_fails_in_time_and_has_no_second_one_beside_it() {
        let late = LateAttempt::default();
        let (go, wait) = channel::<()>();
        let (told, tells) = channel();
        let error = late.run(SHORT, move |attempt| {
            attempt.waits_for("/dev/slow".as_ref());
            let _ = wait.recv();
            told.send(attempt.is_given_up()).unwrap();
            Ok(())
        });
        let hangs = |result: Result<(), Failure>| {
            let Err(Failure::Hangs(why)) = result else { panic!("{result:?}") };
            assert!(why.contains("/dev/slow has not answered within"), "{why}");
        };
        hangs(error);
        hangs(late.run(SHORT, |_| panic!("a second one")));
        drop(go);
        assert_eq!(late.run(LONG, |_| Ok(())), Ok(()));
        assert!(tells.recv().unwrap(), "it was not told that it had been given up");
        let failed: Result<(), _> = late.run(LONG, |_| Err("why".to_owned()));
        assert_eq!(failed, Err(Failure::Failed("why".to_owned())));
    }

    #[test]
    fn the_limit_is_that_of_each_step() {
        let attempt = Attempt::new();
        let begun = Instant::now().checked_sub(LONG).unwrap();
        attempt.at.lock().unwrap().1 = begun;
        assert_eq!(attempt.left(LONG), Duration::ZERO);
        attempt.waits_for("/dev/disk".as_ref());
        assert!(attempt.left(LONG) > LONG / 2, "the next step has the whole limit");
    }

    #[test]
    fn an_attempt_that_sends_no_order_lets_no_host_in() {
        // The orders of an attempt that is given up after so many.
        let orders = |given_up_after: usize| {
            let (attempt, claim) = (Attempt::new(), Claim::new(Member::default()));
            let (rivals, notes) = (Rivals::default(), Notes::default());
            let mut acquisition = Acquisition::new(("disk", "id"), &claim.me, &rivals, notes);
            let mut sent = Vec::new();
            let given_up = |sent: &Vec<Order>| {
                attempt.is_given_up.store(sent.len() >= given_up_after, Ordering::SeqCst);
            };
            given_up(&sent);
            let done = drive(&mut acquisition, (&attempt, &claim), |order| {
                sent.push(order);
                given_up(&sent);
                if matches!(sent.last(), Some(Order::Read)) {
                    Reply::Read(None)
                } else {
                    Reply::Done
                }
            });
            (sent.len(), claim.admits(), done)
        };
        let (sent, admits, done) = orders(usize::MAX);
        assert_eq!((sent, admits, done), (4, true, Some(Ok(()))), "note, register, reserve, read");
        // A note alone is sent by an attempt that is given up.
        assert_eq!((orders(0).0, orders(0).2), (1, None));
        assert_eq!((orders(2).0, orders(2).2), (2, None));
        assert_eq!((orders(3).0, orders(3).2), (3, None));
        let (attempt, claim) = (Attempt::new(), Claim::new(Member::default()));
        let (rivals, notes) = (Rivals::default(), Notes::default());
        let mut acquisition = Acquisition::new(("disk", "id"), &claim.me, &rivals, notes);
        let fails = |_| Reply::Failed("the note".to_owned());
        drive(&mut acquisition, (&attempt, &claim), fails).unwrap().unwrap_err();
        assert!(!claim.admits());
    }

    #[test]
    fn each_claim_changes_all_disks_or_none() {
        // The attempt is given up after so many calls.
        let run = |silent: Option<usize>, failing: Option<usize>, calls: usize| {
            let (mut acquired, left) = (Vec::new(), Cell::new(calls));
            let call = || left.set(left.get().saturating_sub(1));
            let answers = |disk: &usize| {
                call();
                if silent == Some(*disk) { Err("silent".into()) } else { Ok(()) }
            };
            let acquire = |disk: &usize| {
                call();
                acquired.push(*disk);
                if failing.is_some_and(|failing| failing <= *disk) {
                    return Err(format!("disk {disk}"));
                }
                Ok(())
            };
            let result = all_disks(&[1, 2, 3], (answers, acquire), || left.get() == 0);
            (result.err().unwrap_or_default(), acquired)
        };
        assert_eq!(run(None, None, 9), (String::new(), vec![1, 2, 3]));
        assert_eq!(run(Some(2), None, 9), ("silent".to_owned(), vec![]));
        assert_eq!(run(None, Some(2), 9), ("disk 2".to_owned(), vec![1, 2, 3]));
        // An attempt that hangs or has lost its key goes on to no further disk.
        assert_eq!(run(None, Some(2), 5), ("disk 2".to_owned(), vec![1, 2]));
        for calls in 1..=3 {
            assert_eq!(run(None, None, calls), ("the attempt was given up".to_owned(), vec![]));
        }
    }

    #[test]
    fn a_disk_without_reservations_is_refused_before_a_takeover() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let error = ReservationFence::probe(&[file.path().to_owned()], 5, LONG).unwrap_err();
        assert!(error.contains("is no block device"), "{error}");
        let error = ReservationFence::probe(&["/no/such".into()], 5, LONG).unwrap_err();
        assert!(error.contains("cannot open /no/such"), "{error}");
    }
}
