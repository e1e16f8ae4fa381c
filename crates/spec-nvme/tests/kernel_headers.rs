//! The numbers and layouts against those of the kernel, which has them from other hands.
#![forbid(unsafe_code)]

use sidecore_kit::field_offsets;
use sidecore_kit::headers::assert_matches;
use sidecore_spec_nvme::pci::{self, capability, command, offset};
use sidecore_spec_nvme::vfio;
use sidecore_spec_nvme::vfio_user::{
    CapabilityHeader, DeviceInfo, IrqInfo, IrqSetHeader, RegionInfoHeader, SparseArea, SparseHeader,
};

#[test]
fn pci_configuration_space() {
    let [interface, sub_class, class] = pci::CLASS_NVME;
    assert_matches(
        &["linux/pci_regs.h"],
        &[
            ("PCI_CFG_SPACE_EXP_SIZE", pci::CONFIG_BYTES as u64),
            ("PCI_VENDOR_ID", offset::ID as u64),
            ("PCI_COMMAND", offset::COMMAND as u64),
            ("PCI_REVISION_ID", offset::REVISION as u64),
            ("PCI_CLASS_PROG", offset::CLASS as u64),
            ("PCI_CACHE_LINE_SIZE", offset::CACHE_LINE_SIZE as u64),
            ("PCI_BASE_ADDRESS_0", offset::BAR0 as u64),
            ("PCI_BASE_ADDRESS_4 - PCI_BASE_ADDRESS_0", 4 * pci::BAR_BYTES as u64),
            ("PCI_SUBSYSTEM_VENDOR_ID", offset::SUBSYSTEM as u64),
            ("PCI_CAPABILITY_LIST", offset::CAPABILITIES as u64),
            ("PCI_INTERRUPT_LINE", offset::INTERRUPT_LINE as u64),
            ("PCI_COMMAND_MEMORY", command::MEMORY.into()),
            ("PCI_COMMAND_MASTER", command::BUS_MASTER.into()),
            ("PCI_COMMAND_PARITY", command::PARITY_ERROR.into()),
            ("PCI_COMMAND_SERR", command::SERR.into()),
            ("PCI_COMMAND_INTX_DISABLE", command::INTERRUPT_DISABLE.into()),
            ("PCI_STATUS_CAP_LIST", pci::STATUS_CAPABILITIES.into()),
            ("PCI_BASE_ADDRESS_MEM_TYPE_64", pci::BAR_MEMORY_64.into()),
            ("PCI_CAP_ID_PM", capability::POWER_MANAGEMENT.into()),
            ("PCI_CAP_ID_MSI", capability::MSI.into()),
            ("PCI_CAP_ID_EXP", capability::EXPRESS.into()),
            ("PCI_CAP_ID_MSIX", capability::MSIX.into()),
        ],
    );
    // The kernel's PCI_CLASS_STORAGE_EXPRESS, which is not among its exported headers.
    assert_eq!(u32::from_be_bytes([0, class, sub_class, interface]), 0x01_0802);
}

#[test]
fn numbers_of_vfio() {
    assert_matches(
        &["linux/vfio.h"],
        &[
            ("VFIO_DEVICE_FLAGS_RESET", vfio::DEVICE_FLAGS_RESET.into()),
            ("VFIO_DEVICE_FLAGS_PCI", vfio::DEVICE_FLAGS_PCI.into()),
            ("VFIO_PCI_BAR0_REGION_INDEX", vfio::PCI_BAR0_REGION_INDEX.into()),
            ("VFIO_PCI_BAR4_REGION_INDEX", vfio::PCI_BAR4_REGION_INDEX.into()),
            ("VFIO_PCI_ROM_REGION_INDEX", vfio::PCI_ROM_REGION_INDEX.into()),
            ("VFIO_PCI_CONFIG_REGION_INDEX", vfio::PCI_CONFIG_REGION_INDEX.into()),
            ("VFIO_PCI_VGA_REGION_INDEX", vfio::PCI_VGA_REGION_INDEX.into()),
            ("VFIO_PCI_NUM_REGIONS", vfio::PCI_NUM_REGIONS.into()),
            ("VFIO_PCI_INTX_IRQ_INDEX", vfio::PCI_INTX_IRQ_INDEX.into()),
            ("VFIO_PCI_MSI_IRQ_INDEX", vfio::PCI_MSI_IRQ_INDEX.into()),
            ("VFIO_PCI_MSIX_IRQ_INDEX", vfio::PCI_MSIX_IRQ_INDEX.into()),
            ("VFIO_PCI_ERR_IRQ_INDEX", vfio::PCI_ERR_IRQ_INDEX.into()),
            ("VFIO_PCI_REQ_IRQ_INDEX", vfio::PCI_REQ_IRQ_INDEX.into()),
            ("VFIO_PCI_NUM_IRQS", vfio::PCI_NUM_IRQS.into()),
            ("VFIO_REGION_INFO_FLAG_READ", vfio::REGION_INFO_FLAG_READ.into()),
            ("VFIO_REGION_INFO_FLAG_WRITE", vfio::REGION_INFO_FLAG_WRITE.into()),
            ("VFIO_REGION_INFO_FLAG_MMAP", vfio::REGION_INFO_FLAG_MMAP.into()),
            ("VFIO_REGION_INFO_FLAG_CAPS", vfio::REGION_INFO_FLAG_CAPS.into()),
            ("VFIO_REGION_INFO_CAP_SPARSE_MMAP", vfio::REGION_INFO_CAP_SPARSE_MMAP.into()),
            ("VFIO_IRQ_INFO_EVENTFD", vfio::IRQ_INFO_EVENTFD.into()),
            ("VFIO_IRQ_SET_DATA_NONE", vfio::IRQ_SET_DATA_NONE.into()),
            ("VFIO_IRQ_SET_DATA_BOOL", vfio::IRQ_SET_DATA_BOOL.into()),
            ("VFIO_IRQ_SET_DATA_EVENTFD", vfio::IRQ_SET_DATA_EVENTFD.into()),
            ("VFIO_IRQ_SET_ACTION_MASK", vfio::IRQ_SET_ACTION_MASK.into()),
            ("VFIO_IRQ_SET_ACTION_UNMASK", vfio::IRQ_SET_ACTION_UNMASK.into()),
            ("VFIO_IRQ_SET_ACTION_TRIGGER", vfio::IRQ_SET_ACTION_TRIGGER.into()),
            ("VFIO_DMA_MAP_FLAG_READ", vfio::DMA_MAP_FLAG_READ.into()),
            ("VFIO_DMA_MAP_FLAG_WRITE", vfio::DMA_MAP_FLAG_WRITE.into()),
            ("VFIO_DMA_UNMAP_FLAG_ALL", vfio::DMA_UNMAP_FLAG_ALL.into()),
        ],
    );
}

/// vfio-user carries these structures of VFIO's as they are, and puts each capability's first area
/// where the kernel does.
#[test]
fn structures_of_vfio() {
    let mut expected = vec![
        ("offsetof(struct vfio_device_info, cap_offset)", DeviceInfo::BYTES as u64),
        ("sizeof(struct vfio_region_info)", RegionInfoHeader::BYTES as u64),
        ("sizeof(struct vfio_irq_info)", IrqInfo::BYTES as u64),
        ("offsetof(struct vfio_irq_set, data)", IrqSetHeader::BYTES as u64),
        ("offsetof(struct vfio_region_info_cap_sparse_mmap, areas)", SparseHeader::BYTES as u64),
        ("sizeof(struct vfio_region_sparse_mmap_area)", SparseArea::BYTES as u64),
    ];
    expected.extend(field_offsets!(DeviceInfo, "struct vfio_device_info", {
        argsz: "argsz",
        flags: "flags",
        regions: "num_regions",
        irqs: "num_irqs",
    }));
    expected.extend(field_offsets!(RegionInfoHeader, "struct vfio_region_info", {
        argsz: "argsz",
        flags: "flags",
        index: "index",
        capability_offset: "cap_offset",
        len_bytes: "size",
        offset_bytes: "offset",
    }));
    expected.extend(field_offsets!(CapabilityHeader, "struct vfio_info_cap_header", {
        id: "id",
        version: "version",
        next: "next",
    }));
    expected.extend(field_offsets!(SparseHeader, "struct vfio_region_info_cap_sparse_mmap", {
        id: "header.id",
        version: "header.version",
        next: "header.next",
        areas: "nr_areas",
    }));
    expected.extend(field_offsets!(SparseArea, "struct vfio_region_sparse_mmap_area", {
        offset_bytes: "offset",
        len_bytes: "size",
    }));
    expected.extend(field_offsets!(IrqInfo, "struct vfio_irq_info", {
        argsz: "argsz",
        flags: "flags",
        index: "index",
        count: "count",
    }));
    expected.extend(field_offsets!(IrqSetHeader, "struct vfio_irq_set", {
        argsz: "argsz",
        flags: "flags",
        index: "index",
        start: "start",
        count: "count",
    }));
    assert_matches(&["linux/vfio.h"], &expected);
}
