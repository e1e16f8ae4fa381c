//! The place of a part of a file on the device.

/// A part of a file that is contiguous on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostExtent {
    /// The start in the file, in bytes.
    pub logical_bytes: u64,
    /// The start on the device, in bytes.
    pub physical_bytes: u64,
    /// The length in bytes.
    pub len_bytes: u64,
}

/// Appends an extent, or lengthens the last one if it was appended after the first `first` extents.
pub(super) fn push(extents: &mut Vec<HostExtent>, first: usize, next: HostExtent) {
    if extents.len() > first
        && let Some(last) = extents.last_mut()
        && last.logical_bytes + last.len_bytes == next.logical_bytes
        && last.physical_bytes + last.len_bytes == next.physical_bytes
    {
        last.len_bytes += next.len_bytes;
    } else {
        extents.push(next);
    }
}

/// Returns the first byte of the file for which two lists of extents differ.
pub(super) fn first_difference(expected: &[HostExtent], found: &[HostExtent]) -> Option<u64> {
    let (expected, found) = (joined(expected), joined(found));
    let same =
        expected.iter().zip(&found).take_while(|(expected, found)| expected == found).count();
    match (expected.get(same), found.get(same)) {
        (None, None) => None,
        (Some(one), None) | (None, Some(one)) => Some(one.logical_bytes),
        (Some(one), Some(other)) if one.logical_bytes != other.logical_bytes => {
            Some(one.logical_bytes.min(other.logical_bytes))
        }
        (Some(one), Some(other)) if one.physical_bytes != other.physical_bytes => {
            Some(one.logical_bytes)
        }
        (Some(one), Some(other)) => Some(one.logical_bytes + one.len_bytes.min(other.len_bytes)),
    }
}

/// Merges adjacent extents.
fn joined(extents: &[HostExtent]) -> Vec<HostExtent> {
    let mut joined = Vec::with_capacity(extents.len());
    extents.iter().for_each(|extent| push(&mut joined, 0, *extent));
    joined
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extents_that_continue_each_other_are_one() {
        let extent = |logical_bytes, physical_bytes| HostExtent {
            logical_bytes,
            physical_bytes,
            len_bytes: 4096,
        };
        let mut extents = vec![extent(0, 8192)];
        push(&mut extents, 1, extent(4096, 12288));
        assert_eq!(extents.len(), 2, "earlier extents stay unchanged");
        push(&mut extents, 1, extent(8192, 16384));
        assert_eq!(extents[1].len_bytes, 8192);
        push(&mut extents, 1, extent(16384, 20480));
        push(&mut extents, 1, extent(20480, 4096));
        assert_eq!(extents.len(), 4);
    }

    #[test]
    fn the_first_difference_is_found() {
        let extent = |logical_bytes, physical_bytes, len_bytes| HostExtent {
            logical_bytes,
            physical_bytes,
            len_bytes,
        };
        let expected = [extent(0, 100, 10), extent(10, 110, 10), extent(40, 500, 10)];
        for (found, difference) in [
            (vec![extent(0, 100, 20), extent(40, 500, 10)], None),
            (vec![extent(0, 100, 20)], Some(40)),
            (vec![extent(0, 100, 15), extent(40, 500, 10)], Some(15)),
            (vec![extent(0, 100, 20), extent(30, 500, 20)], Some(30)),
            (vec![extent(0, 101, 20), extent(40, 500, 10)], Some(0)),
            (vec![extent(0, 100, 20), extent(40, 500, 10), extent(60, 1, 1)], Some(60)),
            (vec![], Some(0)),
        ] {
            assert_eq!(first_difference(&expected, &found), difference, "{found:?}");
        }
    }
}
