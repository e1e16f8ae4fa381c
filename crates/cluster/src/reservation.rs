//! The fence by the reservations of the store's disks.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use sidecore_linux::{DiskReservation, ReservationError, ReservedDisk};
use sidecore_ownership::{Acquisition, Found, Member, Order, Reply};

use crate::{Fence, LockFence, Others};

/// A fence by persistent reservations, for candidates on several hosts.
///
/// The owner's host alone is registered at the store's disks: they refuse the writes of all others,
/// also of a host that was paused and does not know that it was replaced. Former daemons of this
/// host are fenced by locks, because the disks cannot tell them from this one
/// (docs/decisions/0085-reservations.md).
#[derive(Debug)]
pub struct ReservationFence {
    /// Whole SCSI or NVMe disks.
    pub disks: Vec<PathBuf>,
    /// An order that takes longer has failed.
    pub time_limit: Duration,
    /// For former daemons of this host.
    pub local: LockFence,
    /// The attempt that has not ended, also not in time.
    pub late: LateAttempt,
}

/// An attempt whose order hangs in the kernel. There is no second one beside it.
#[derive(Debug, Default)]
pub struct LateAttempt(Mutex<Option<Receiver<()>>>);

impl LateAttempt {
    /// Does work on a thread of its own, and waits for a limited time. `work` ends early if the
    /// flag is raised.
    fn run(
        &self,
        limit: Duration,
        work: impl FnOnce(&AtomicBool) -> Result<(), String> + Send + 'static,
    ) -> Result<(), String> {
        let mut late = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let too_late = || format!("a disk has not answered within {} s", limit.as_secs_f32());
        if let Some(end) = late.take()
            && end.recv_timeout(limit) == Err(RecvTimeoutError::Timeout)
        {
            *late = Some(end);
            return Err(too_late());
        }
        let (gives_up, given_up) = {
            let flag = Arc::new(AtomicBool::new(false));
            (Arc::clone(&flag), flag)
        };
        let ((result, answer), (ends, end)) = (channel(), channel::<()>());
        let run = move || {
            let _ = result.send(work(&given_up));
            drop(ends);
        };
        let thread = std::thread::Builder::new().name("reservation".to_owned()).spawn(run);
        thread.map_err(|error| format!("no thread for it: {error}"))?;
        answer.recv_timeout(limit).unwrap_or_else(|_| {
            gives_up.store(true, Ordering::Relaxed);
            *late = Some(end);
            Err(too_late())
        })
    }
}

impl ReservationFence {
    /// Fails if a disk knows no reservations. `unused` is a random number.
    ///
    /// # Errors
    /// The reason, with the disk's name.
    pub fn probe(disks: &[PathBuf], unused: u64) -> Result<(), String> {
        for disk in disks {
            let probed = ReservedDisk::open(disk).and_then(|disk| disk.probe(unused));
            probed.map_err(|error| error.to_string())?;
        }
        Ok(())
    }
}

impl Fence for ReservationFence {
    fn fence(&self, me: &Member, others: Others<'_>) -> Result<(), String> {
        // A registration lets the whole host write. So nothing of it may be in flight, also if the
        // daemon that sent it was fenced before, and no other may begin.
        let lock = self.local.quiet()?;
        let Others { suspects, former } = others;
        let others: Vec<Member> = suspects.iter().chain(former).cloned().collect();
        let (disks, me) = (self.disks.clone(), me.clone());
        self.late.run(self.time_limit, move |given_up| {
            let _lock = lock;
            disks.iter().try_for_each(|path| {
                let disk = ReservedDisk::open(path).map_err(|error| error.to_string())?;
                acquire(
                    &disk,
                    Acquisition::new(&path.display().to_string(), &me, &others),
                    given_up,
                )
            })
        })
    }

    fn watch(&self, me: &Member) -> Option<Watch> {
        let disks = self.disks.iter().map(|path| (path.clone(), None)).collect();
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

/// Carries an acquisition out.
fn acquire(
    disk: &ReservedDisk,
    mut acquisition: Acquisition,
    given_up: &AtomicBool,
) -> Result<(), String> {
    while let Some(order) = acquisition.order() {
        if given_up.load(Ordering::Relaxed) {
            return Err("the attempt was given up".to_owned());
        }
        acquisition.replied(carry_out(disk, order));
    }
    acquisition.result().cloned().unwrap_or(Ok(()))
}

fn carry_out(disk: &ReservedDisk, order: Order) -> Reply {
    let done = match order {
        Order::Register { old, new } => disk.register(old, new),
        Order::PreemptAndAbort { old, new } => disk.preempt_and_abort(old, new),
        Order::Reserve { key } => disk.reserve(key),
        Order::Read => match disk.read() {
            Ok(found) => return Reply::Read(found.map(found_of)),
            Err(error) => Err(error),
        },
    };
    match done {
        Ok(()) => Reply::Done,
        Err(ReservationError::Conflict(_)) => Reply::Conflict,
        Err(error) => Reply::Failed(error.to_string()),
    }
}

fn found_of(disk: DiskReservation) -> Found {
    let DiskReservation { keys, holder, is_write_exclusive } = disk;
    Found { keys, holder, is_write_exclusive }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(60);
    const SHORT: Duration = Duration::from_millis(20);

    #[test]
    fn an_attempt_that_hangs_fails_in_time_and_has_no_second_one_beside_it() {
        let late = LateAttempt::default();
        let (go, wait) = channel::<()>();
        let (told, tells) = channel();
        let error = late.run(SHORT, move |given_up| {
            let _ = wait.recv();
            told.send(given_up.load(Ordering::Relaxed)).unwrap();
            Ok(())
        });
        assert!(error.unwrap_err().contains("has not answered within"));
        let error = late.run(SHORT, |_| panic!("a second one")).unwrap_err();
        assert!(error.contains("has not answered within"), "{error}");
        drop(go);
        assert_eq!(late.run(LONG, |_| Ok(())), Ok(()));
        assert!(tells.recv().unwrap(), "it was not told that it had been given up");
        assert_eq!(late.run(LONG, |_| Err("why".to_owned())), Err("why".to_owned()));
    }

    #[test]
    fn a_disk_without_reservations_is_refused_before_a_takeover() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let error = ReservationFence::probe(&[file.path().to_owned()], 5).unwrap_err();
        assert!(error.contains("is no block device"), "{error}");
        let error = ReservationFence::probe(&["/no/such".into()], 5).unwrap_err();
        assert!(error.contains("cannot open /no/such"), "{error}");
    }
}
