//! Evidence that has to last over many claims and crashes, and disks that change between two looks.

use super::*;

#[test]
fn a_candidate_that_is_refused_reserves_no_disk_without_a_registration_of_a_rival() {
    let mut disk = Disk::default();
    let (orders, error) = acquire_as(&mut disk, 1, &far(9), &of(&[far(7)]));
    assert!(error.contains("no host has noted an answer"), "{error}");
    assert_eq!(disk.holder, None, "{orders:?}");
}

#[test]
fn a_disk_that_lists_another_registration_at_each_look_fails() {
    let mut acquisition = Acquisition::new(DISK, &member(7), &of(&[]), Notes::default());
    let mut looks = 0;
    for _ in 0..100 {
        let Some(order) = acquisition.order() else { break };
        acquisition.replied(match order {
            Order::Read => {
                looks += 1;
                let keys = vec![key(7), key(100 + looks)];
                Reply::Read(Some(Found { keys, holder: Some(key(7)), is_write_exclusive: true }))
            }
            _ => Reply::Done,
        });
    }
    let result = acquisition.result().expect("it goes on for ever");
    let error = result.clone().unwrap_err();
    assert!(error.contains("another registration at each look"), "{error}");
    assert_eq!(looks, 4, "after three sweeps");
}
