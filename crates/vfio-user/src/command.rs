//! The commands and their codes.

use std::fmt;

macro_rules! commands {
    ($($variant:ident = $code:literal $name:literal,)*) => {
        /// What one end asks of the other (specification, "Commands").
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Command {
            $(#[doc = concat!("VFIO_USER_", $name)] $variant,)*
            /// A code that the specification has no name for.
            Unknown(u16),
        }

        impl Command {
            /// All that have names.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// The command of this code.
            #[must_use]
            pub const fn from_code(code: u16) -> Self {
                match code {
                    $($code => Self::$variant,)*
                    other => Self::Unknown(other),
                }
            }

            /// Its code on the wire.
            #[must_use]
            pub const fn code(self) -> u16 {
                match self {
                    $(Self::$variant => $code,)*
                    Self::Unknown(code) => code,
                }
            }
        }

        impl fmt::Display for Command {
            fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self {
                    $(Self::$variant => formatter.write_str($name),)*
                    Self::Unknown(code) => write!(formatter, "command {code}"),
                }
            }
        }
    };
}

commands! {
    Version = 1 "VERSION",
    DmaMap = 2 "DMA_MAP",
    DmaUnmap = 3 "DMA_UNMAP",
    DeviceGetInfo = 4 "DEVICE_GET_INFO",
    DeviceGetRegionInfo = 5 "DEVICE_GET_REGION_INFO",
    DeviceGetRegionIoFds = 6 "DEVICE_GET_REGION_IO_FDS",
    DeviceGetIrqInfo = 7 "DEVICE_GET_IRQ_INFO",
    DeviceSetIrqs = 8 "DEVICE_SET_IRQS",
    RegionRead = 9 "REGION_READ",
    RegionWrite = 10 "REGION_WRITE",
    DmaRead = 11 "DMA_READ",
    DmaWrite = 12 "DMA_WRITE",
    DeviceReset = 13 "DEVICE_RESET",
    DirtyPages = 14 "DIRTY_PAGES",
    RegionWriteMulti = 15 "REGION_WRITE_MULTI",
    DeviceFeature = 16 "DEVICE_FEATURE",
    MigDataRead = 17 "MIG_DATA_READ",
    MigDataWrite = 18 "MIG_DATA_WRITE",
}
