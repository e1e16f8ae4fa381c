//! The three ways to ring: a store, a message, or a store and a message when the controller sleeps.

use sidecore_memory::{GuestAddress, GuestMemory, RegionSpec, UserAddress};
use sidecore_ring::driver::nvme::{DoorbellWords, HostShadow};
use sidecore_spec_nvme::vfio;

use super::registers::NvmeCapabilities;
use super::transport::{RegionInfo, Transport};
use crate::arena::Part;
use crate::error::ClientError;

/// The part of BAR0 that is mapped.
#[derive(Debug)]
pub(crate) struct MappedArea(Option<GuestMemory>);

impl MappedArea {
    /// Maps what the device allows; nothing is not an error.
    pub(crate) fn new(bar: &RegionInfo, wanted: bool) -> Result<Self, ClientError> {
        let Some(file) = bar.file.as_ref().filter(|_| wanted) else { return Ok(Self(None)) };
        let region = |area: &super::MappableArea| {
            let file = file
                .try_clone()
                .map_err(|source| ClientError::Io { what: "mapping doorbells", source })?;
            let overflow = || ClientError::Answer {
                request: "DEVICE_GET_REGION_INFO",
                why: "a mappable area past the end of files".to_owned(),
            };
            Ok(RegionSpec {
                guest_address: GuestAddress(area.offset_bytes),
                user_address: UserAddress(area.offset_bytes),
                len_bytes: area.len_bytes,
                file,
                file_offset_bytes: bar
                    .offset_bytes
                    .checked_add(area.offset_bytes)
                    .ok_or_else(overflow)?,
            })
        };
        let regions = bar.areas.iter().map(region).collect::<Result<Vec<_>, ClientError>>()?;
        Ok(Self(if regions.is_empty() { None } else { Some(GuestMemory::map(regions)?) }))
    }

    /// The doorbells in `len_bytes` from `offset_bytes` on, if they are mapped.
    fn words(&self, offset_bytes: u64, len_bytes: usize) -> Option<DoorbellWords> {
        let window =
            self.0.as_ref()?.guest_window(GuestAddress(offset_bytes), len_bytes, 4).ok()?;
        DoorbellWords::new(window).ok()
    }
}

/// The two buffers of Doorbell Buffer Config, in the arena.
#[derive(Clone, Debug)]
pub(crate) struct ShadowBuffers {
    pub shadow: Part,
    pub events: Part,
}

impl ShadowBuffers {
    /// Those of one queue pair: two doorbells from the start of the answer on.
    fn pair(&self, queue: u16, stride_bytes: u32) -> Result<HostShadow, ClientError> {
        let words = |part: &Part| {
            let memory = part.window.memory();
            let at = part.guest_address + 2 * u64::from(queue) * u64::from(stride_bytes);
            let window = memory.guest_window(GuestAddress(at), 2 * stride_bytes as usize, 4)?;
            Ok::<_, ClientError>(DoorbellWords::new(window)?)
        };
        Ok(HostShadow::new(words(&self.shadow)?, words(&self.events)?))
    }
}

#[derive(Debug)]
enum How {
    Mapped { tail: DoorbellWords, head: DoorbellWords },
    Message,
    Shadow { shadow: HostShadow, stride_bytes: usize },
}

/// The doorbells of one queue pair.
#[derive(Debug)]
pub(crate) struct QueueDoorbells {
    how: How,
    /// Where messages go; only mapped doorbells can do without it.
    transport: Option<Transport>,
    tail_at: u64,
    head_at: u64,
    posted: bool,
}

impl QueueDoorbells {
    pub(crate) fn new(
        queue: u16,
        capabilities: NvmeCapabilities,
        area: &MappedArea,
        shadow: Option<&ShadowBuffers>,
        transport: &Transport,
        posted: bool,
    ) -> Result<Self, ClientError> {
        let (tail_at, head_at) = (capabilities.tail_offset(queue), capabilities.head_offset(queue));
        let stride_bytes = capabilities.doorbell_stride_bytes();
        let how = match (area.words(tail_at, 4), area.words(head_at, 4), shadow) {
            (Some(tail), Some(head), _) => How::Mapped { tail, head },
            (_, _, Some(shadow)) => {
                let shadow = shadow.pair(queue, stride_bytes)?;
                shadow.reset(0);
                shadow.reset(stride_bytes as usize);
                How::Shadow { shadow, stride_bytes: stride_bytes as usize }
            }
            _ => How::Message,
        };
        Ok(Self { how, transport: Some(transport.clone()), tail_at, head_at, posted })
    }

    /// Doorbells in memory of the caller's, for a queue without a transport.
    pub(crate) fn in_memory(tail: DoorbellWords, head: DoorbellWords) -> Self {
        Self {
            how: How::Mapped { tail, head },
            transport: None,
            tail_at: 0,
            head_at: 0,
            posted: false,
        }
    }

    pub(crate) fn are_mapped(&self) -> bool {
        matches!(self.how, How::Mapped { .. })
    }

    /// The submission queue's tail is `value`. True if that was a message.
    #[inline]
    pub(crate) fn ring_tail(&self, value: u32) -> Result<bool, ClientError> {
        let wanted = match &self.how {
            How::Mapped { tail, .. } => {
                tail.store(0, value);
                false
            }
            How::Message => true,
            How::Shadow { shadow, .. } => shadow.announce(0, value),
        };
        if wanted { self.message(self.tail_at, value) } else { Ok(false) }
    }

    /// The completion queue's head is `value`. True if that was a message.
    #[inline]
    pub(crate) fn ring_head(&self, value: u32) -> Result<bool, ClientError> {
        let wanted = match &self.how {
            How::Mapped { head, .. } => {
                head.store(0, value);
                false
            }
            How::Message => true,
            How::Shadow { shadow, stride_bytes } => shadow.announce(*stride_bytes, value),
        };
        if wanted { self.message(self.head_at, value) } else { Ok(false) }
    }

    #[cold]
    fn message(&self, at: u64, value: u32) -> Result<bool, ClientError> {
        match &self.transport {
            Some(transport) => transport
                .poke(vfio::PCI_BAR0_REGION_INDEX, at, &value.to_le_bytes(), self.posted)
                .map(|()| true),
            None => Ok(false),
        }
    }
}
