//! Evidence that has to last over many claims and crashes, and disks that change between two looks.

use std::rc::Rc;

use super::*;

/// A later claim of the daemon `far(9)`.
fn claim(incarnation: u64) -> Member {
    Member { incarnation, ..far(9) }
}

/// A host registers, and its attempt ends before the disk's next reply.
fn register_and_fail(disk: &mut Disk, host: usize, me: &Member, rivals: &Rivals) {
    let id = disk.id.clone();
    let mut acquisition = Acquisition::new(("/dev/disk", &id), me, rivals, disk.notes_of(host));
    while let Some(order) = acquisition.order() {
        let reply = match order {
            Order::Reserve { .. } | Order::Read => Reply::Failed("no path".to_owned()),
            order => disk.carry_out(host, order),
        };
        acquisition.replied(reply);
    }
    let result = acquisition.result().unwrap();
    assert_eq!(result, &Err("no path".to_owned()));
    assert_eq!(disk.keys[&host], me.reservation_key());
}

#[test]
fn evidence_outlives_many_claims_that_fail_at_one_of_ten_disks() {
    let files = Files::default();
    let disk =
        |number| Disk { id: format!("naa.{number}"), files: Rc::clone(&files), ..Disk::default() };
    let mut disks: Vec<Disk> = (0..10).map(disk).collect();
    let (owner, mut claims) = (far(7), Vec::new());
    for disk in &mut disks {
        assert_eq!(acquire_as(disk, 0, &owner, &of(&[])).1, "");
    }
    let others = |claims: &[Member]| of(&[std::slice::from_ref(&owner), claims].concat());
    for incarnation in 100..200 {
        let (me, rivals) = (claim(incarnation), others(&claims));
        for (index, disk) in disks.iter_mut().enumerate() {
            if index > 0 || claims.is_empty() {
                let error = acquire_as(disk, 1, &me, &rivals).1;
                assert_eq!(error, "", "claim {incarnation} at disk {index}");
            } else {
                register_and_fail(disk, 1, &me, &rivals);
            }
        }
        claims.push(me);
        // As many as the ledger keeps.
        claims.drain(..claims.len().saturating_sub(16));
    }
    // This host dies. Another one finds the evidence of each disk.
    for (index, disk) in disks.iter_mut().enumerate() {
        let error = acquire_as(disk, 2, &far(11), &others(&claims)).1;
        assert_eq!(error, "", "disk {index}");
    }
}

/// A disk whose owner `far(7)` was fenced by `far(9)`, which has died since.
fn fenced() -> Disk {
    let mut disk = Disk { can_read: false, ..Disk::default() };
    assert_eq!(acquire_as(&mut disk, 0, &far(7), &of(&[])).1, "");
    assert_eq!(acquire_as(&mut disk, 1, &far(9), &of(&[far(7)])).1, "");
    disk
}

#[test]
fn a_host_that_dies_before_its_new_key_is_noted_leaves_the_evidence() {
    let mut disk = fenced();
    let rivals = of(&[far(7), far(9)]);
    let mut acquisition = Acquisition::new(DISK, &claim(10), &rivals, disk.notes_of(1));
    let replaces = Order::Register { old: key(9), new: key(10) };
    while let Some(order) = acquisition.order() {
        let dies = order == replaces;
        let reply = disk.carry_out(1, order);
        if dies {
            break;
        }
        acquisition.replied(reply);
    }
    assert_eq!(disk.keys[&1], key(10));
    let rivals = of(&[far(7), far(9), claim(10)]);
    assert_eq!(acquire_as(&mut disk, 2, &far(11), &rivals).1, "");
}

#[test]
fn a_key_that_is_not_replaced_is_noted_as_replaced_by_no_later_order() {
    let mut disk = fenced();
    disk.clear();
    let rivals = of(&[far(7), far(9), claim(8)]);
    let mut acquisition = Acquisition::new(DISK, &claim(10), &rivals, disk.notes_of(1));
    let mut tried = 0;
    while let Some(order) = acquisition.order() {
        if let Order::Register { old, .. } = order {
            tried += 1;
            let noted = disk.notes_of(1).ended;
            let is_false = |ended: &&Ended| ended.by == key(10) && ended.key != old;
            assert_eq!(noted.iter().find(is_false), None, "before the order to replace {old:#x}");
        }
        acquisition.replied(disk.carry_out(1, order));
    }
    assert_eq!(tried, 4, "its own key, two former ones and none");
    let error = acquisition.result().unwrap().clone().unwrap_err();
    assert!(error.contains("switch that host off"), "{error}");
}

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
