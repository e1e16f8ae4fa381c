//! Vectors, their eventfds, and signals by message.

use sidecore_vfio_user::{Body, Command, IrqSet, vfio};

use crate::common::*;
use crate::fixture::*;

#[test]
fn each_kind_of_interrupts_has_its_count() {
    let mut fixture = Fixture::new();
    for (index, count) in [(0, 0), (1, 0), (2, VECTORS.into()), (3, 1), (4, 1)] {
        let Body::IrqInfo(info) =
            fixture.succeeds((Command::DeviceGetIrqInfo, irq_info(index)), Vec::new())
        else {
            panic!()
        };
        assert_eq!(
            (info.argsz, info.flags, info.index, info.count),
            (16, vfio::IRQ_INFO_EVENTFD, index, count)
        );
    }
    for index in [5, u32::MAX] {
        assert_eq!(fixture.fails((Command::DeviceGetIrqInfo, irq_info(index)), Vec::new()), EINVAL);
    }
}

#[test]
fn vectors_get_their_eventfds_and_lose_them() {
    let mut fixture = Fixture::new();
    let events = |count| (0..count).map(|_| event()).collect();
    fixture.succeeds(set_irqs(irqs(EVENTFD, MSIX, 2, 3)), events(3));
    assert_eq!(fixture.function.assigned(), [2, 3, 4]);
    fixture.succeeds(set_irqs(irqs(EVENTFD, MSIX, 24, 16)), events(16));
    // QEMU enables MSI-X without a vector by this message, and takes eventfds away by it.
    fixture.succeeds(set_irqs(irqs(EVENTFD, MSIX, 0, 1)), Vec::new());
    fixture.succeeds(set_irqs(irqs(EVENTFD, MSIX, 3, 30)), Vec::new());
    assert_eq!(fixture.function.assigned(), [2, 33, 34, 35, 36, 37, 38, 39]);
    fixture.succeeds(set_irqs(irqs(DISABLE, MSIX, 0, 0)), Vec::new());
    assert!(fixture.function.assigned().is_empty());
    for index in [vfio::PCI_INTX_IRQ_INDEX, vfio::PCI_MSI_IRQ_INDEX] {
        fixture.succeeds(set_irqs(irqs(DISABLE, index, 0, 0)), Vec::new());
    }
    for index in [vfio::PCI_ERR_IRQ_INDEX, vfio::PCI_REQ_IRQ_INDEX] {
        fixture.succeeds(set_irqs(irqs(EVENTFD, index, 0, 1)), events(1));
        fixture.succeeds(set_irqs(irqs(EVENTFD, index, 0, 1)), Vec::new());
        fixture.succeeds(set_irqs(irqs(DISABLE, index, 0, 0)), Vec::new());
    }
}

#[test]
fn a_function_with_msi_has_vectors_of_msi_and_none_of_msi_x() {
    const MSI: u32 = vfio::PCI_MSI_IRQ_INDEX;
    let mut fixture = Fixture::new();
    fixture.function.use_msi();
    for (index, count) in [(MSI, VECTORS.into()), (MSIX, 0), (vfio::PCI_INTX_IRQ_INDEX, 0)] {
        let Body::IrqInfo(info) =
            fixture.succeeds((Command::DeviceGetIrqInfo, irq_info(index)), Vec::new())
        else {
            panic!()
        };
        assert_eq!(info.count, count);
    }
    fixture.succeeds(set_irqs(irqs(EVENTFD, MSI, 0, 2)), vec![event(), event()]);
    assert_eq!(fixture.function.assigned(), [0, 1]);
    assert_eq!(fixture.fails(set_irqs(irqs(EVENTFD, MSIX, 0, 1)), vec![event()]), EINVAL);
    fixture.succeeds(set_irqs(irqs(DISABLE, MSI, 1, 1)), Vec::new());
    assert_eq!(fixture.function.take_events().last(), Some(&Event::Signal(1)));
    fixture.succeeds(set_irqs(irqs(DISABLE, MSI, 0, 0)), Vec::new());
    assert!(fixture.function.assigned().is_empty());
}

#[test]
fn invalid_interrupts_are_refused() {
    let mut fixture = Fixture::new();
    let good = irqs(EVENTFD, MSIX, 0, 2);
    for bad in [
        IrqSet { argsz: 19, ..good.clone() },
        IrqSet { flags: 0, ..good.clone() },
        IrqSet { flags: EVENTFD | vfio::IRQ_SET_DATA_NONE, ..good.clone() },
        IrqSet { flags: EVENTFD | vfio::IRQ_SET_ACTION_MASK, ..good.clone() },
        IrqSet { flags: EVENTFD | 1 << 6, ..good.clone() },
        IrqSet { index: 5, ..good.clone() },
        IrqSet { index: vfio::PCI_INTX_IRQ_INDEX, ..good.clone() },
        IrqSet { index: vfio::PCI_ERR_IRQ_INDEX, ..good.clone() },
        IrqSet { start: 39, ..good.clone() },
        IrqSet { start: u32::MAX, ..good.clone() },
        IrqSet { count: 1, ..good.clone() },
        IrqSet { count: 0, ..good.clone() },
        IrqSet { count: u32::MAX, ..good.clone() },
        IrqSet { flags: DISABLE, ..good.clone() },
    ] {
        assert_eq!(fixture.fails(set_irqs(bad.clone()), vec![event(), event()]), EINVAL, "{bad:?}");
    }
    for bad in [
        IrqSet { start: 39, ..good.clone() },
        IrqSet { start: u32::MAX, ..good.clone() },
        IrqSet { count: u32::MAX, ..good.clone() },
        IrqSet { count: 0, ..good.clone() },
        IrqSet { start: 1, count: 0, flags: DISABLE, ..good.clone() },
        IrqSet {
            flags: vfio::IRQ_SET_DATA_BOOL | vfio::IRQ_SET_ACTION_TRIGGER,
            data: vec![1],
            ..good.clone()
        },
    ] {
        assert_eq!(fixture.fails(set_irqs(bad.clone()), Vec::new()), EINVAL, "{bad:?}");
    }
    assert!(fixture.function.events().is_empty());
}

#[test]
fn vectors_are_signalled_by_message() {
    let mut fixture = Fixture::new();
    fixture.succeeds(set_irqs(irqs(DISABLE, MSIX, 38, 2)), Vec::new());
    assert_eq!(fixture.function.take_events(), [Event::Signal(38), Event::Signal(39)]);
    let each = irqs(vfio::IRQ_SET_DATA_BOOL | vfio::IRQ_SET_ACTION_TRIGGER, MSIX, 4, 4);
    fixture.succeeds(set_irqs(IrqSet { data: vec![0, 1, 0, 0xFF], ..each.clone() }), Vec::new());
    assert_eq!(fixture.function.take_events(), [Event::Signal(5), Event::Signal(7)]);
    for bad in [
        irqs(DISABLE, MSIX, 39, 2),
        irqs(DISABLE, MSIX, u32::MAX, 1),
        irqs(DISABLE, MSIX, 0, u32::MAX),
        irqs(DISABLE, vfio::PCI_INTX_IRQ_INDEX, 0, 1),
        IrqSet { data: vec![1; 3], ..each.clone() },
        IrqSet { start: 37, data: vec![1; 4], ..each.clone() },
        IrqSet { count: 0, ..each },
    ] {
        assert_eq!(fixture.fails(set_irqs(bad.clone()), Vec::new()), EINVAL, "{bad:?}");
    }
    // The server keeps no eventfds of these kinds.
    for index in [vfio::PCI_ERR_IRQ_INDEX, vfio::PCI_REQ_IRQ_INDEX] {
        assert_eq!(fixture.fails(set_irqs(irqs(DISABLE, index, 0, 1)), Vec::new()), ENOTSUP);
    }
    assert!(fixture.function.events().is_empty());
}

#[test]
fn no_vector_is_masked_by_message() {
    let mut fixture = Fixture::new();
    for action in [vfio::IRQ_SET_ACTION_MASK, vfio::IRQ_SET_ACTION_UNMASK] {
        let none = irqs(vfio::IRQ_SET_DATA_NONE | action, MSIX, 0, 2);
        assert_eq!(fixture.fails(set_irqs(none.clone()), Vec::new()), ENOTSUP);
        let each =
            IrqSet { flags: vfio::IRQ_SET_DATA_BOOL | action, data: vec![1, 0], ..none.clone() };
        assert_eq!(fixture.fails(set_irqs(each), Vec::new()), ENOTSUP);
        let by_event = IrqSet { flags: vfio::IRQ_SET_DATA_EVENTFD | action, ..none };
        assert_eq!(fixture.fails(set_irqs(by_event), vec![event(), event()]), ENOTSUP);
    }
    assert!(fixture.function.events().is_empty());
}

#[test]
fn a_vector_that_cannot_be_assigned_undoes_the_others_of_its_message() {
    let mut fixture = Fixture::new();
    fixture.succeeds(set_irqs(irqs(EVENTFD, MSIX, 9, 1)), vec![event()]);
    assert_eq!(
        fixture.fails(set_irqs(irqs(EVENTFD, MSIX, 0, 3)), vec![event(), event(), memfd(0)]),
        EINVAL
    );
    assert_eq!(fixture.function.assigned(), [9]);
}
