//! The Changed Namespace List log page (NVMe base 2.0, 5.16.1.5).

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::bytes::Bytes;

/// Most numbers that the page holds.
const MAX_ENTRIES: usize = 1024;

/// The namespaces that have changed since the host last read of it.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct ChangedNamespaces(BTreeSet<u32>);

impl ChangedNamespaces {
    pub(crate) fn insert(&mut self, nsid: u32) {
        // An entry beyond those that fit stands for an overflow: the page then lists no numbers.
        if self.0.len() <= MAX_ENTRIES {
            self.0.insert(nsid);
        }
    }

    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }

    /// The numbers in ascending order, or FFFFFFFFh alone if there are more than fit.
    pub(crate) fn page(&self) -> Vec<u8> {
        let mut page = Bytes::new(MAX_ENTRIES.saturating_mul(4));
        if self.0.len() > MAX_ENTRIES {
            page.put(0, &[0xFF; 4]);
        } else {
            for (index, nsid) in self.0.iter().enumerate() {
                page.put(index.saturating_mul(4), &nsid.to_le_bytes());
            }
        }
        page.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_sorted_once_each_and_too_many_are_told_as_such() {
        let mut changed = ChangedNamespaces::default();
        for nsid in [7, 3, 7] {
            changed.insert(nsid);
        }
        assert_eq!(&changed.page()[..12], &[3, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0]);
        (1..5000).for_each(|nsid| changed.insert(nsid));
        assert_eq!(&changed.page()[..8], &[0xFF, 0xFF, 0xFF, 0xFF, 0, 0, 0, 0]);
        changed.clear();
        assert_eq!(changed.page(), vec![0; 4096]);
    }
}
