//! Numbers that vfio-user takes from Linux's `<linux/vfio.h>`, under their names there.

/// DEVICE_GET_INFO: DEVICE_RESET works.
pub const DEVICE_FLAGS_RESET: u32 = 1 << 0;
/// DEVICE_GET_INFO: it is a PCI device.
pub const DEVICE_FLAGS_PCI: u32 = 1 << 1;

/// Base address register 0.
pub const PCI_BAR0_REGION_INDEX: u32 = 0;
/// Base address register 4.
pub const PCI_BAR4_REGION_INDEX: u32 = 4;
/// The expansion ROM's region; 0 to 5 are the base address registers.
pub const PCI_ROM_REGION_INDEX: u32 = 6;
/// The configuration space's region.
pub const PCI_CONFIG_REGION_INDEX: u32 = 7;
/// The VGA ranges.
pub const PCI_VGA_REGION_INDEX: u32 = 8;
/// How many regions a PCI device has.
pub const PCI_NUM_REGIONS: u32 = 9;

/// The interrupt pin.
pub const PCI_INTX_IRQ_INDEX: u32 = 0;
/// MSI.
pub const PCI_MSI_IRQ_INDEX: u32 = 1;
/// MSI-X.
pub const PCI_MSIX_IRQ_INDEX: u32 = 2;
/// An error that the device does not recover from.
pub const PCI_ERR_IRQ_INDEX: u32 = 3;
/// The device asks to be released.
pub const PCI_REQ_IRQ_INDEX: u32 = 4;
/// How many kinds of interrupts a PCI device has.
pub const PCI_NUM_IRQS: u32 = 5;

/// The region can be read.
pub const REGION_INFO_FLAG_READ: u32 = 1 << 0;
/// The region can be written.
pub const REGION_INFO_FLAG_WRITE: u32 = 1 << 1;
/// The region, or what its capabilities say, can be mapped.
pub const REGION_INFO_FLAG_MMAP: u32 = 1 << 2;
/// Capabilities follow in this very reply.
pub const REGION_INFO_FLAG_CAPS: u32 = 1 << 3;
/// The capability that says which parts of a region can be mapped.
pub const REGION_INFO_CAP_SPARSE_MMAP: u16 = 1;

/// Interrupts of this kind can signal an eventfd.
pub const IRQ_INFO_EVENTFD: u32 = 1 << 0;

/// SET_IRQS: for all interrupts named.
pub const IRQ_SET_DATA_NONE: u32 = 1 << 0;
/// SET_IRQS: for those whose byte is not 0.
pub const IRQ_SET_DATA_BOOL: u32 = 1 << 1;
/// SET_IRQS: an eventfd for each; none at all takes them away.
pub const IRQ_SET_DATA_EVENTFD: u32 = 1 << 2;
/// SET_IRQS: mask.
pub const IRQ_SET_ACTION_MASK: u32 = 1 << 3;
/// SET_IRQS: unmask.
pub const IRQ_SET_ACTION_UNMASK: u32 = 1 << 4;
/// SET_IRQS: what is signalled, or signal it now.
pub const IRQ_SET_ACTION_TRIGGER: u32 = 1 << 5;

/// DMA_MAP: the device may read.
pub const DMA_MAP_FLAG_READ: u32 = 1 << 0;
/// DMA_MAP: the device may write.
pub const DMA_MAP_FLAG_WRITE: u32 = 1 << 1;
/// DMA_MAP: the descriptor is to be mapped (libvfio-user's; the specification means this whenever
/// there is one).
pub const DMA_MAP_FLAG_MMAP: u32 = 1 << 2;

/// DMA_UNMAP: everything.
pub const DMA_UNMAP_FLAG_ALL: u32 = 1 << 1;
