//! Moves the sessions with an IOhost to its other link, while guests use its devices.

use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use sidecore_remote::client::Moved;

use super::using::UsedIohost;
use super::{Remote, known};
use crate::operation::{ErrorKind, OperationError};
use crate::report::LinkMove;

/// More than the moves of sessions take that succeed or fail.
const PATIENCE: Duration = Duration::from_secs(10);

impl Remote {
    /// Moves the sessions with an IOhost to this link, one of its two, and waits for that.
    pub(crate) fn move_iohost(&self, name: &str, link: &str) -> Result<LinkMove, OperationError> {
        let moves = known(&mut self.lock().iohosts, "iohost", name)?.begin_move(link)?;
        // The parts are not locked meanwhile.
        let deadline = Instant::now() + PATIENCE;
        let sessions = moves.len();
        let mut pause = Duration::ZERO;
        let mut refusals = Vec::new();
        for moved in moves {
            let left = deadline.saturating_duration_since(Instant::now());
            match moved.recv_timeout(left) {
                Ok(Ok(its)) => pause = pause.max(its),
                Ok(Err(error)) => refusals.push(error.to_string()),
                Err(_) => refusals.push("its session has ended, or gives no answer".to_owned()),
            }
        }
        if let Some(message) = failure(name, link, &refusals, sessions) {
            return Err(OperationError::new(ErrorKind::Failed, message));
        }
        let pause_ns = u64::try_from(pause.as_nanos()).unwrap_or(u64::MAX);
        Ok(LinkMove { iohost: name.to_owned(), link: link.to_owned(), sessions, pause_ns })
    }
}

/// The error of a move after which sessions stay on their link, for these reasons. The others have
/// moved.
fn failure(name: &str, link: &str, refusals: &[String], sessions: usize) -> Option<String> {
    let reason = refusals.last()?;
    let failed = refusals.len();
    Some(if failed == sessions {
        format!("iohost \"{name}\" was not moved to link \"{link}\": {reason}")
    } else {
        format!(
            "{failed} of {sessions} sessions with iohost \"{name}\" were not moved to link \
             \"{link}\": {reason}; repeat the move for them, or move all back"
        )
    })
}

impl UsedIohost {
    /// Has each session move. Returns where their answers come.
    fn begin_move(&self, link: &str) -> Result<Vec<Receiver<Moved>>, OperationError> {
        let Some(place) = self.spec.links().position(|its| its == link) else {
            let links: Vec<String> = self.spec.links().map(|link| format!("\"{link}\"")).collect();
            let message = format!(
                "link \"{link}\" does not lead to iohost \"{}\": its links are {}",
                self.spec.name,
                links.join(" and ")
            );
            return Err(OperationError::new(ErrorKind::Invalid, message));
        };
        Ok(self.sessions.iter().map(|(iohost, _)| iohost.begin_move(place == 1)).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_move_that_fails_says_how_many_sessions_stay() {
        let refusals = ["no answer".to_owned()];
        assert_eq!(failure("io1", "spare", &[], 2), None);
        let whole = failure("io1", "spare", &refusals, 1).unwrap();
        assert_eq!(whole, "iohost \"io1\" was not moved to link \"spare\": no answer");
        let part = failure("io1", "spare", &refusals, 3).unwrap();
        assert!(part.starts_with("1 of 3 sessions with iohost \"io1\" were not moved"), "{part}");
        assert!(part.contains("link \"spare\": no answer; repeat the move"), "{part}");
    }
}
