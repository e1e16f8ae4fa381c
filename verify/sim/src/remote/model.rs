//! The contents that a device may hold.

use super::store::Stamp;

/// How a write of a block fared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It may take effect.
    Unanswered,
    /// It has taken effect.
    Answered,
    /// It failed, or its client died: it may have taken effect.
    Failed,
}

#[derive(Clone, Copy, Debug)]
struct Version {
    stamp: Stamp,
    fate: Fate,
}

/// A block: what was written to it, in the order of submission, which is the order of effect.
#[derive(Clone, Debug)]
pub struct Block {
    versions: Vec<Version>,
    /// This one or a later one survives everything: a flush has covered it.
    safe: usize,
    /// Versions that are no longer in the list.
    gone: usize,
}

impl Default for Block {
    fn default() -> Self {
        Self { versions: vec![Version { stamp: 0, fate: Fate::Answered }], safe: 0, gone: 0 }
    }
}

impl Block {
    /// A write is submitted. Returns its number.
    pub fn write(&mut self, stamp: Stamp) -> usize {
        self.versions.push(Version { stamp, fate: Fate::Unanswered });
        self.gone + self.versions.len() - 1
    }

    /// A write ended; if it was `durable`, it survives everything.
    pub fn end(&mut self, number: usize, fate: Fate, durable: bool) {
        // The block was settled meanwhile.
        let Some(index) = number.checked_sub(self.gone) else { return };
        self.versions[index].fate = fate;
        if durable && fate == Fate::Answered {
            self.flushed(number);
        }
    }

    /// The number of the newest write that was answered.
    #[must_use]
    pub fn answered(&self) -> usize {
        let newest = self.versions.iter().rposition(|version| version.fate == Fate::Answered);
        self.gone + newest.unwrap_or(0)
    }

    /// A flush that began when `number` was answered has covered it.
    pub fn flushed(&mut self, number: usize) {
        self.safe = self.safe.max(number);
    }

    /// The number of the first write that a read which begins now may return.
    #[must_use]
    pub fn low(&self) -> usize {
        let newest = self.versions.iter().rposition(|version| version.fate != Fate::Failed);
        self.gone + newest.unwrap_or(0)
    }

    /// Whether a read may return this that began when [`low`](Self::low) was `low`.
    #[must_use]
    pub fn allows(&self, low: usize, stamp: Stamp) -> bool {
        self.versions[low.saturating_sub(self.gone)..].iter().any(|version| version.stamp == stamp)
    }

    /// Writes that were answered and not flushed.
    #[must_use]
    pub fn unflushed(&self) -> usize {
        let from = self.safe.saturating_sub(self.gone) + 1;
        self.versions.iter().skip(from).filter(|version| version.fate == Fate::Answered).count()
    }

    /// The client died.
    pub fn client_died(&mut self) {
        for version in &mut self.versions {
            if version.fate == Fate::Unanswered {
                version.fate = Fate::Failed;
            }
        }
    }

    /// After the client's death, a flush, and this read: the block is known again. False if it may
    /// not hold this.
    pub fn settle(&mut self, stamp: Stamp) -> bool {
        let allowed = self.allows(self.safe, stamp);
        self.gone += self.versions.len();
        self.versions = vec![Version { stamp, fate: Fate::Answered }];
        self.safe = self.gone;
        allowed
    }

    /// Describes the allowed contents, for a message.
    #[must_use]
    pub fn show(&self, low: usize) -> String {
        let from = low.saturating_sub(self.gone);
        let shown: Vec<String> =
            self.versions.iter().map(|v| format!("{} {:?}", v.stamp, v.fate)).collect();
        format!("one of [{}] from the one with index {from} on", shown.join(", "))
    }
}
