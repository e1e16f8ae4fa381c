//! The regions: six base address registers, and the configuration space.

use std::os::fd::OwnedFd;

use sidecore_nvme::{BarInfo, MappableArea, PciFunction, Region};

use crate::body::{INFO_BYTES, REGION_INFO_BYTES};
use crate::dma::PAGE_BYTES;
use crate::message::{DeviceInfo, RegionInfo, SparseArea};
use crate::refusal::Refusal;
use sidecore_spec_nvme::vfio;

/// Answers DEVICE_GET_INFO. QEMU demands the PCI flag, regions up to the configuration space, and
/// interrupts up to MSI-X.
pub(crate) fn device_info(request: &DeviceInfo) -> Result<DeviceInfo, Refusal> {
    check_argsz(request.argsz, INFO_BYTES)?;
    Ok(DeviceInfo {
        argsz: INFO_BYTES,
        flags: vfio::DEVICE_FLAGS_PCI | vfio::DEVICE_FLAGS_RESET,
        regions: vfio::PCI_NUM_REGIONS,
        irqs: vfio::PCI_NUM_IRQS,
    })
}

/// Answers DEVICE_GET_REGION_INFO, with the file of the mappable area.
///
/// If the client's buffer is too small for the capability, the reply has the needed size, and
/// neither the capability nor its flag: QEMU fails on that flag without a capability. The file
/// comes only with the capability.
pub(crate) fn region_info(
    function: &dyn PciFunction,
    request: &RegionInfo,
) -> Result<(RegionInfo, Option<OwnedFd>), Refusal> {
    check_argsz(request.argsz, REGION_INFO_BYTES)?;
    let index = request.index;
    let bar = bar_number(index).and_then(|bar| function.bar(bar));
    let len_bytes = match (index, bar) {
        (vfio::PCI_CONFIG_REGION_INDEX, _) => function.config_bytes(),
        (_, Some(bar)) => bar.len_bytes,
        (0..vfio::PCI_NUM_REGIONS, None) => 0,
        _ => return Err(Refusal::NoSuchIndex { index }),
    };
    let flags =
        if len_bytes == 0 { 0 } else { vfio::REGION_INFO_FLAG_READ | vfio::REGION_INFO_FLAG_WRITE };
    let mut info = RegionInfo {
        argsz: REGION_INFO_BYTES,
        flags,
        index,
        len_bytes,
        offset_bytes: 0,
        areas: Vec::new(),
    };
    let Some((area, base_bytes)) = bar.and_then(|bar| mappable(function.name(), index, &bar))
    else {
        return Ok((info, None));
    };
    info.argsz = RegionInfo::bytes_with(1);
    info.flags |= vfio::REGION_INFO_FLAG_MMAP;
    info.offset_bytes = base_bytes;
    if request.argsz < info.argsz {
        return Ok((info, None));
    }
    info.flags |= vfio::REGION_INFO_FLAG_CAPS;
    info.areas.push(SparseArea { offset_bytes: area.offset_bytes, len_bytes: area.len_bytes });
    let file = bar_number(index)
        .map(|bar| function.area_file(bar))
        .transpose()
        .map_err(Refusal::Descriptor)?;
    Ok((info, file))
}

/// Returns the mappable area, and the file's offset that belongs to the region's first byte. An
/// area's offset in the file is the region's offset plus its own; so an area cannot be nearer to
/// the file's start than to the region's.
fn mappable(name: &str, index: u32, bar: &BarInfo) -> Option<(MappableArea, u64)> {
    let area = bar.mappable?;
    let base_bytes = area.file_offset_bytes.checked_sub(area.offset_bytes);
    let whole_pages = [area.offset_bytes, area.len_bytes, area.file_offset_bytes]
        .iter()
        .all(|bytes| bytes.is_multiple_of(PAGE_BYTES));
    let inside =
        area.offset_bytes.checked_add(area.len_bytes).is_some_and(|end| end <= bar.len_bytes);
    match base_bytes {
        Some(base_bytes) if whole_pages && inside && area.len_bytes > 0 => Some((area, base_bytes)),
        _ => {
            tracing::error!(
                function = name,
                region = index,
                ?area,
                "the mappable area is not whole pages inside of its register and its file"
            );
            None
        }
    }
}

/// Returns the region with this index. Whether the register exists is for the function to check.
pub(crate) fn region(index: u32) -> Result<Region, Refusal> {
    if index == vfio::PCI_CONFIG_REGION_INDEX {
        return Ok(Region::Config);
    }
    bar_number(index).map(Region::Bar).ok_or(Refusal::NoSuchIndex { index })
}

fn bar_number(index: u32) -> Option<u8> {
    u8::try_from(index).ok().filter(|_| index < vfio::PCI_ROM_REGION_INDEX)
}

pub(crate) fn check_argsz(argsz: u32, needed: u32) -> Result<(), Refusal> {
    if argsz < needed { Err(Refusal::ShortArgsz { argsz, needed }) } else { Ok(()) }
}
