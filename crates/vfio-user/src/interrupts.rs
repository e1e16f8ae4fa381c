//! Interrupts: the function's vectors, of MSI-X or MSI, and two kinds that QEMU expects.

use std::ops::Range;
use std::os::fd::OwnedFd;

use sidecore_nvme::{Interrupts, PciFunction};

use crate::body::{INFO_BYTES, IRQ_SET_BYTES};
use crate::message::{IrqInfo, IrqSet};
use crate::refusal::Refusal;
use crate::regions::check_argsz;
use sidecore_spec_nvme::vfio;

const DATA_MASK: u32 =
    vfio::IRQ_SET_DATA_NONE | vfio::IRQ_SET_DATA_BOOL | vfio::IRQ_SET_DATA_EVENTFD;
const ACTION_MASK: u32 =
    vfio::IRQ_SET_ACTION_MASK | vfio::IRQ_SET_ACTION_UNMASK | vfio::IRQ_SET_ACTION_TRIGGER;

/// The index of the kind that the function's vectors are.
fn vectors_index(function: &dyn PciFunction) -> u32 {
    match function.interrupts() {
        Interrupts::MsiX => vfio::PCI_MSIX_IRQ_INDEX,
        Interrupts::Msi => vfio::PCI_MSI_IRQ_INDEX,
    }
}

/// Returns the number of interrupts of a kind.
///
/// ERR has one, because QEMU warns of a device without it; and so has REQ, for symmetry. The server
/// signals neither: ERR stops the whole VM, REQ unplugs the device.
fn count(function: &dyn PciFunction, index: u32) -> Result<u32, Refusal> {
    match index {
        _ if index == vectors_index(function) => Ok(function.vectors().into()),
        vfio::PCI_ERR_IRQ_INDEX | vfio::PCI_REQ_IRQ_INDEX => Ok(1),
        vfio::PCI_INTX_IRQ_INDEX | vfio::PCI_MSI_IRQ_INDEX | vfio::PCI_MSIX_IRQ_INDEX => Ok(0),
        _ => Err(Refusal::NoSuchIndex { index }),
    }
}

/// Answers DEVICE_GET_IRQ_INFO. No kind can be masked by message: a masked vector is a vector
/// without an eventfd.
pub(crate) fn info(function: &dyn PciFunction, request: &IrqInfo) -> Result<IrqInfo, Refusal> {
    check_argsz(request.argsz, INFO_BYTES)?;
    let index = request.index;
    Ok(IrqInfo {
        argsz: INFO_BYTES,
        flags: vfio::IRQ_INFO_EVENTFD,
        index,
        count: count(function, index)?,
    })
}

/// The effect of a SET_IRQS.
#[derive(Debug)]
enum Change {
    /// Vectors lose their eventfds.
    Release(Range<u32>),
    /// Vectors, from this one on, get the eventfds of the message.
    Assign(u32),
    /// Vectors are signalled now; with `IRQ_SET_DATA_BOOL`, those whose byte in the message is not
    /// 0.
    Signal(Range<u32>),
}

/// Carries out a SET_IRQS, completely or not at all.
pub(crate) fn set(
    function: &dyn PciFunction,
    set: &IrqSet,
    fds: Vec<OwnedFd>,
) -> Result<(), Refusal> {
    let change = change(function, set, fds.len())?;
    if set.index != vectors_index(function) {
        // ERR and REQ are never signalled, so their eventfds are closed.
        return Ok(());
    }
    match change {
        Change::Release(vectors) => release(function, vectors),
        Change::Assign(start) => {
            for (vector, fd) in (start..).zip(fds) {
                let assigned =
                    number(vector).and_then(|vector| Ok(function.set_vector(vector, Some(fd))?));
                if let Err(refusal) = assigned {
                    let _ = release(function, start..vector);
                    return Err(refusal);
                }
            }
            Ok(())
        }
        Change::Signal(vectors) => {
            let is_named = set.flags & vfio::IRQ_SET_DATA_BOOL != 0;
            for (place, vector) in vectors.enumerate() {
                if !is_named || set.data.get(place).is_some_and(|byte| *byte != 0) {
                    function.signal(number(vector)?)?;
                }
            }
            Ok(())
        }
    }
}

/// Takes the eventfds from `vectors`.
pub(crate) fn release(function: &dyn PciFunction, vectors: Range<u32>) -> Result<(), Refusal> {
    for vector in vectors {
        function.set_vector(number(vector)?, None)?;
    }
    Ok(())
}

fn number(vector: u32) -> Result<u16, Refusal> {
    u16::try_from(vector).map_err(|_| Refusal::NoSuchIndex { index: vector })
}

/// Parses and checks the whole message before any change is made.
///
/// A client may have a vector signalled as a test (DATA_NONE or DATA_BOOL with ACTION_TRIGGER): a
/// vector without an eventfd is skipped, as in Linux' vfio. ERR and REQ keep no eventfd, and no
/// kind can be masked (VFIO_IRQ_INFO_MASKABLE is not set), so such messages are refused.
fn change(function: &dyn PciFunction, set: &IrqSet, fds: usize) -> Result<Change, Refusal> {
    check_argsz(set.argsz, IRQ_SET_BYTES)?;
    let IrqSet { flags, index, start, count: named, .. } = *set;
    let available = count(function, index)?;
    let (data, action) = (flags & DATA_MASK, flags & ACTION_MASK);
    if flags & !(DATA_MASK | ACTION_MASK) != 0 || data.count_ones() != 1 || action.count_ones() != 1
    {
        return Err(Refusal::BadFlags { flags });
    }
    let values = if data == vfio::IRQ_SET_DATA_BOOL {
        usize::try_from(named).unwrap_or(usize::MAX)
    } else {
        0
    };
    if set.data.len() < values {
        return Err(Refusal::Malformed { len_bytes: set.data.len() });
    }
    let eventfds = data == vfio::IRQ_SET_DATA_EVENTFD;
    if fds != 0 && (!eventfds || u32::try_from(fds) != Ok(named)) {
        return Err(Refusal::FdCount { count: fds });
    }
    let disable = vfio::IRQ_SET_DATA_NONE | vfio::IRQ_SET_ACTION_TRIGGER;
    if named == 0 {
        // "As a special case, a count (and start) of 0, with data flags of VFIO_IRQ_SET_DATA_NONE
        // disables all": also for a kind without interrupts.
        return if start == 0 && flags == disable {
            Ok(Change::Release(0..available))
        } else {
            Err(bad_range(set))
        };
    }
    let end =
        start.checked_add(named).filter(|end| *end <= available).ok_or_else(|| bad_range(set))?;
    match (action, eventfds) {
        (vfio::IRQ_SET_ACTION_TRIGGER, true) if fds == 0 => Ok(Change::Release(start..end)),
        (vfio::IRQ_SET_ACTION_TRIGGER, true) => Ok(Change::Assign(start)),
        (vfio::IRQ_SET_ACTION_TRIGGER, false) if index == vectors_index(function) => {
            Ok(Change::Signal(start..end))
        }
        _ => Err(Refusal::NotOffered),
    }
}

fn bad_range(set: &IrqSet) -> Refusal {
    Refusal::BadRange { start: set.start.into(), count: set.count.into() }
}
