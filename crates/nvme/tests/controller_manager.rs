//! A primary controller: namespaces, their attachment, and secondary controllers.

mod controller_rig;

use std::sync::Arc;

use controller_rig::manager::FakeManager;
use controller_rig::{CC, DATA, ENABLE, Options, Rig, identify};
use sidecore_nvme::{Command, Done, PciFunction, QueueEvent, Region, Status};

fn rig() -> (Rig, Arc<FakeManager>) {
    let manager = Arc::new(FakeManager::new());
    let rig = Rig::ready_with(Options { manager: Some(manager.clone()), ..Options::default() });
    (rig, manager)
}

fn management(select: u32, nsid: u32) -> Command {
    Command::build(0x0D, 0, nsid).with_prps(DATA, 0).with_dword(10, select)
}

fn attachment(select: u32, nsid: u32) -> Command {
    Command::build(0x15, 0, nsid).with_prps(DATA, 0).with_dword(10, select)
}

fn virtualization(action: u32, resource: u32, controller: u32, count: u32) -> Command {
    let dword10 = action | resource << 8 | controller << 16;
    Command::build(0x1C, 0, 0).with_dword(10, dword10).with_dword(11, count)
}

/// Of so many blocks of 512 bytes.
fn put_creation(rig: &Rig, blocks: u64) {
    rig.fill(DATA, 0, 4096);
    rig.poke(DATA, &blocks.to_le_bytes());
    rig.poke(DATA + 8, &blocks.to_le_bytes());
}

fn put_controllers(rig: &Rig, ids: &[u16]) {
    rig.fill(DATA, 0, 4096);
    let words: Vec<u8> =
        [ids.len() as u16].iter().chain(ids).flat_map(|id| id.to_le_bytes()).collect();
    rig.poke(DATA, &words);
}

#[test]
fn namespaces_are_created_attached_detached_and_deleted() {
    let (mut rig, manager) = rig();
    put_creation(&rig, 2048);
    assert_eq!(rig.ok(management(0, 0)), 2);
    put_creation(&rig, 4096);
    assert_eq!(rig.ok(management(0, 0)), 3);
    assert_eq!(
        &rig.identify(0x10, 0)[..16],
        &[1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0],
        "allocated"
    );
    assert_eq!(&rig.identify(0x02, 0)[..8], &[1, 0, 0, 0, 0, 0, 0, 0], "active");
    assert_eq!(&rig.identify(0x11, 3)[..8], &4096_u64.to_le_bytes());
    assert_eq!(rig.identify(0x00, 3), vec![0; 4096], "not attached to this controller");
    assert_eq!(rig.identify(0x11, 9), vec![0; 4096], "not allocated");
    put_controllers(&rig, &[2, 3]);
    rig.ok(attachment(0, 3));
    rig.refused(attachment(0, 3), Status::NAMESPACE_ALREADY_ATTACHED);
    assert_eq!(&rig.identify(0x12, 3)[..6], &[2, 0, 2, 0, 3, 0]);
    put_controllers(&rig, &[3]);
    rig.ok(attachment(1, 3));
    rig.refused(attachment(1, 3), Status::NAMESPACE_NOT_ATTACHED);
    rig.ok(management(1, 3));
    assert_eq!(manager.books().namespaces.len(), 1);
    rig.ok(management(1, u32::MAX));
    assert!(manager.books().namespaces.is_empty());
}

#[test]
fn what_cannot_be_managed_is_refused() {
    let (mut rig, _manager) = rig();
    put_creation(&rig, 0);
    rig.refused(management(0, 0), Status::INVALID_FIELD);
    put_creation(&rig, 2048);
    rig.refused(management(0, 0).with_dword(11, 2 << 24), Status::INVALID_FIELD);
    rig.refused(management(2, 0), Status::INVALID_FIELD);
    rig.refused(management(0, 0).with_prps(DATA + 1, 0), Status::INVALID_PRP_OFFSET);
    rig.refused(management(1, 1), Status::OPERATION_DENIED);
    rig.refused(management(1, 9), Status::INVALID_FIELD);
    rig.refused(management(1, 17), Status::INVALID_NAMESPACE);
    rig.refused(management(1, 0), Status::INVALID_NAMESPACE);
    rig.ok(management(0, 0));
    put_controllers(&rig, &[]);
    rig.refused(attachment(0, 2), Status::CONTROLLER_LIST_INVALID);
    for ids in [&[1][..], &[9], &[3, 2]] {
        put_controllers(&rig, ids);
        rig.refused(attachment(0, 2), Status::CONTROLLER_LIST_INVALID);
    }
    rig.refused(attachment(2, 2), Status::INVALID_FIELD);
}

#[test]
fn a_manager_may_take_its_time() {
    let (mut rig, manager) = rig();
    manager.books().holds = true;
    put_creation(&rig, 2048);
    let id = rig.submit(management(0, 0));
    assert_eq!(rig.answer(), None);
    rig.ok(identify(1, 0));
    manager.release();
    rig.function.run();
    let answer = rig.answer().unwrap();
    assert_eq!((answer.id, answer.result), (id, 2));
    // A reply after a reset is dropped.
    rig.submit(management(1, 2));
    rig.write32(CC, 0);
    rig.enable();
    manager.release();
    rig.function.run();
    assert_eq!(rig.answer(), None);
}

#[test]
fn secondary_controllers_are_listed_and_managed() {
    let (mut rig, manager) = rig();
    let controller = rig.identify(1, 0);
    let supported = u16::from_le_bytes([controller[256], controller[257]]);
    assert_eq!((supported, controller[76]), (1 << 3 | 1 << 7, 2));
    assert_eq!(
        (&controller[280..288], &controller[296..304]),
        (&(1_u64 << 30).to_le_bytes()[..], &(1_u64 << 29).to_le_bytes()[..])
    );
    assert_eq!(&rig.identify(0x13, 0)[..8], &[3, 0, 1, 0, 2, 0, 3, 0]);
    let primary = rig.identify(0x14, 0);
    assert_eq!((primary[0], primary[4], primary[32], primary[36]), (1, 1, 128, 16));
    let secondary = rig.identify(0x15 | 3 << 16, 0);
    assert_eq!(
        (secondary[0], &secondary[32..46]),
        (1, &[3, 0, 1, 0, 1, 0, 0, 0, 2, 0, 8, 0, 8, 0][..])
    );

    rig.refused(virtualization(8, 0, 2, 4), Status::INVALID_SECONDARY_STATE);
    rig.ok(virtualization(7, 0, 2, 0));
    assert_eq!(rig.ok(virtualization(8, 0, 2, 4)), 4);
    rig.ok(virtualization(9, 0, 2, 0));
    let assigned = manager.books().controllers[0];
    assert_eq!((assigned.queues, assigned.online), (4, true));
    rig.ok(virtualization(7, 0, 3, 0));
    rig.refused(virtualization(8, 0, 3, 65), Status::INVALID_RESOURCE_COUNT);
    rig.refused(virtualization(8, 1, 3, 1), Status::INVALID_RESOURCE_ID);
    rig.refused(virtualization(8, 2, 3, 1), Status::INVALID_RESOURCE_ID);
    for action in [7, 8, 9] {
        rig.refused(virtualization(action, 0, 1, 0), Status::INVALID_CONTROLLER_ID);
    }
    rig.refused(virtualization(1, 0, 2, 1), Status::INVALID_CONTROLLER_ID);
    rig.refused(virtualization(1, 0, 1, 1), Status::INVALID_RESOURCE_COUNT);
    rig.refused(virtualization(2, 0, 1, 1), Status::INVALID_FIELD);
}

/// They serve other hosts, who are not to lose their disks because this one restarts.
#[test]
fn secondary_controllers_stay_as_they_are_whatever_becomes_of_the_primary_one() {
    let (mut rig, manager) = rig();
    rig.ok(virtualization(7, 0, 3, 0));
    let before = manager.books().controllers.clone();
    assert_eq!(
        before.iter().map(|controller| controller.online).collect::<Vec<_>>(),
        [true, false]
    );
    let resets: [fn(&mut Rig); 5] = [
        |rig| rig.write32(CC, 0),
        |rig| rig.write32(CC, ENABLE | 1 << 14),
        |rig| rig.function.reset(Done::ignored()),
        |rig| rig.function.write(Region::Config, 0x69, &[0x80]).unwrap(),
        |rig| rig.function.report(QueueEvent::Fatal { queue: 1 }),
    ];
    for reset in resets {
        reset(&mut rig);
        rig.function.run();
        assert_eq!(manager.books().controllers, before);
        rig.write32(CC, 0);
        rig.enable();
        let listed = rig.identify(0x15, 0);
        assert_eq!((listed[0], listed[32 + 4], listed[64 + 4]), (2, 1, 0));
    }
}
