//! Evidence that has to last over many claims and crashes, and disks that change between two looks.

use super::*;

#[test]
fn a_candidate_that_is_refused_reserves_no_disk_without_a_registration_of_a_rival() {
    let mut disk = Disk::default();
    let (orders, error) = acquire_as(&mut disk, 1, &far(9), &of(&[far(7)]));
    assert!(error.contains("no host has noted an answer"), "{error}");
    assert_eq!(disk.holder, None, "{orders:?}");
}
