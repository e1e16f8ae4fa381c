//! Interrupts: MSI-X (PCI Express base 5.0, 6.1.4), as the client of a vfio-user socket drives it;
//! and MSI, which has no table.
//!
//! A vector signals the event that the client has set for it. A client that keeps the table to
//! itself, as QEMU does, sets no event for a vector that is masked, and its guest's masks never get
//! here. A client that passes on writes to the table has them obeyed: a vector's own mask counts
//! from the first write to it on.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use sidecore_reactor::{EventFd, MakeSignal, Signal};

use crate::handover::MsixState;
use crate::pci::bar::{PENDING_OFFSET, TABLE_OFFSET};

/// Bytes of an entry: message address, message data, vector control.
const ENTRY_BYTES: usize = 16;

/// Where vector control is in an entry; its bit 0 masks the vector.
const CONTROL: usize = 12;
const MASKED: u8 = 1;

pub(crate) struct Msix {
    vectors: Vec<Vector>,
    /// A completion was posted to the admin queue while vector 0 could not signal.
    admin_pending: bool,
    /// Vectors that the controller's registers mask.
    masked: u32,
    make: MakeSignal,
}

/// The event that the client has set for a vector.
struct Event {
    fd: EventFd,
    /// Made when it is signalled from here for the first time: of most vectors only the queues do
    /// that.
    signal: Option<Box<dyn Signal>>,
    /// Whether the failure to make the signal is logged already.
    logged: bool,
}

impl Event {
    /// Signals it; false if there is nothing to do so with.
    fn signal(&mut self, make: MakeSignal) -> bool {
        if self.signal.is_none() {
            match make(self.fd.as_fd()) {
                Ok(signal) => self.signal = Some(signal),
                Err(error) if !std::mem::replace(&mut self.logged, true) => {
                    tracing::error!(%error, "an interrupt cannot be raised");
                }
                Err(_) => {}
            }
        }
        self.signal.as_mut().is_some_and(|signal| {
            signal.signal();
            true
        })
    }
}

#[derive(Default)]
struct Vector {
    event: Option<Event>,
    entry: [u8; ENTRY_BYTES],
    control_written: bool,
    /// The controller's registers say so.
    masked: bool,
}

impl Vector {
    /// The event that the vector signals now.
    fn effective(&mut self) -> Option<&mut Event> {
        let masked = self.is_masked();
        self.event.as_mut().filter(|_| !masked)
    }

    fn is_masked(&self) -> bool {
        let [.., zero, _, _, _] = &self.entry;
        self.masked || self.control_written && zero & MASKED != 0
    }

    fn reset(&mut self) {
        self.entry = [0; ENTRY_BYTES];
        if let Some(control) = self.entry.get_mut(CONTROL) {
            *control = MASKED;
        }
        self.control_written = false;
        self.masked = false;
    }
}

impl Msix {
    pub(crate) fn new(vectors: u16, make: MakeSignal) -> Self {
        let mut vectors: Vec<_> = (0..vectors).map(|_| Vector::default()).collect();
        vectors.iter_mut().for_each(Vector::reset);
        Self { vectors, admin_pending: false, masked: 0, make }
    }

    /// The table, for another process, and what the vectors signal.
    ///
    /// # Errors
    /// The process has too many descriptors open.
    pub(crate) fn hand_over(&self) -> io::Result<(MsixState, Vec<(u16, OwnedFd)>)> {
        let vectors = self
            .vectors
            .iter()
            .map(|vector| (vector.entry.to_vec(), vector.control_written))
            .collect();
        let events = (0_u16..).zip(&self.vectors).filter_map(|(number, vector)| {
            let event = vector.event.as_ref()?.fd.as_fd().try_clone_to_owned();
            Some(event.map(|event| (number, event)))
        });
        Ok((MsixState { vectors }, events.collect::<io::Result<_>>()?))
    }

    /// The table that another process has left.
    pub(crate) fn take_over(&mut self, state: &MsixState) {
        for (vector, (entry, control_written)) in self.vectors.iter_mut().zip(&state.vectors) {
            vector.control_written = *control_written;
            if let Some(entry) = entry.first_chunk() {
                vector.entry = *entry;
            }
        }
    }

    /// How many there are.
    pub(crate) fn len(&self) -> u16 {
        u16::try_from(self.vectors.len()).unwrap_or(u16::MAX)
    }

    /// The table as after power on; what the vectors signal is the client's and stays.
    pub(crate) fn reset(&mut self) {
        self.vectors.iter_mut().for_each(Vector::reset);
        self.admin_pending = false;
        self.masked = 0;
    }

    /// Masks the vectors whose bits are set, and no others; those that may signal something else
    /// now.
    pub(crate) fn mask(&mut self, masked: u32) -> Vec<u16> {
        let changed = self.masked ^ masked;
        if changed == 0 {
            return Vec::new();
        }
        self.masked = masked;
        let mut touched = Vec::new();
        for (index, vector) in (0..u32::BITS).zip(&mut self.vectors) {
            vector.masked = masked >> index & 1 != 0;
            if changed >> index & 1 != 0 {
                touched.extend(u16::try_from(index));
            }
        }
        self.retry_admin();
        touched
    }

    /// Sets the event of a vector.
    pub(crate) fn set(&mut self, vector: u16, event: Option<EventFd>) {
        if let Some(vector) = self.vectors.get_mut(usize::from(vector)) {
            vector.event = event.map(|fd| Event { fd, signal: None, logged: false });
        }
        self.retry_admin();
    }

    /// Signals the client's event of a vector, masked or not.
    pub(crate) fn signal(&mut self, vector: u16) {
        if let Some(event) =
            self.vectors.get_mut(usize::from(vector)).and_then(|vector| vector.event.as_mut())
        {
            event.signal(self.make);
        }
    }

    /// A descriptor of what a vector signals now, for its queues.
    ///
    /// # Errors
    /// The process has too many open.
    pub(crate) fn duplicate(&self, vector: u16) -> io::Result<Option<OwnedFd>> {
        let vector = self.vectors.get(usize::from(vector)).filter(|vector| !vector.is_masked());
        let event = vector.and_then(|vector| vector.event.as_ref());
        event.map(|event| event.fd.as_fd().try_clone_to_owned()).transpose()
    }

    /// Signals completions of the admin queue, which has vector 0.
    pub(crate) fn signal_admin(&mut self) {
        self.admin_pending = true;
        self.retry_admin();
    }

    fn retry_admin(&mut self) {
        if self.admin_pending
            && let Some(event) = self.vectors.first_mut().and_then(Vector::effective)
        {
            self.admin_pending = !event.signal(self.make);
        }
    }

    /// Reads a byte; `is_pending` knows about the queues of a vector.
    pub(crate) fn read(&self, offset: u64, is_pending: impl Fn(u16) -> bool) -> u8 {
        if let Some((vector, byte)) = self.place(offset) {
            let entry = self.vectors.get(vector).map_or([0; ENTRY_BYTES], |vector| vector.entry);
            return entry.get(byte).copied().unwrap_or(0);
        }
        let Some(first) = offset.checked_sub(PENDING_OFFSET).and_then(|byte| byte.checked_mul(8))
        else {
            return 0;
        };
        (0..8).zip(first..).fold(0, |bits, (bit, vector)| {
            let Some(vector) = u16::try_from(vector).ok().filter(|vector| *vector < self.len())
            else {
                return bits;
            };
            let pending = is_pending(vector) || vector == 0 && self.admin_pending;
            bits | u8::from(pending) << bit
        })
    }

    /// Writes bytes; the vectors that may signal something else now.
    pub(crate) fn write(&mut self, offset: u64, data: &[u8]) -> Vec<u16> {
        let mut touched = Vec::new();
        for (at, new) in (offset..).zip(data) {
            let Some((index, byte)) = self.place(at) else { continue };
            let Some(vector) = self.vectors.get_mut(index) else { continue };
            if let Some(place) = vector.entry.get_mut(byte) {
                // Of vector control, the mask is all there is; of the address, bits 1:0 are zero.
                *place = match byte {
                    0 => new & !0b11,
                    CONTROL => new & MASKED,
                    13.. => 0,
                    _ => *new,
                };
            }
            if byte == CONTROL {
                vector.control_written = true;
                touched.extend(u16::try_from(index));
            }
        }
        if !touched.is_empty() {
            self.retry_admin();
        }
        touched
    }

    /// Which byte of which vector's entry this is.
    fn place(&self, offset: u64) -> Option<(usize, usize)> {
        let at = usize::try_from(offset.checked_sub(TABLE_OFFSET)?).ok()?;
        let vector = at.checked_div(ENTRY_BYTES).filter(|vector| *vector < self.vectors.len())?;
        Some((vector, at.checked_rem(ENTRY_BYTES)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(msix: &Msix, vector: u64) -> Vec<u8> {
        (0..16).map(|byte| msix.read(vector * 16 + byte, |_| false)).collect()
    }

    fn event() -> (EventFd, EventFd) {
        let event = EventFd::new().unwrap();
        let mirror = EventFd::from_peer(event.as_fd().try_clone_to_owned().unwrap()).unwrap();
        (event, mirror)
    }

    #[test]
    fn entries_hold_what_is_written_and_begin_masked() {
        let mut msix = Msix::new(64, EventFd::peer_signal);
        assert_eq!(entry(&msix, 63)[12], 1);
        assert_eq!(msix.write(63 * 16, &[0xFF; 16]), [63]);
        let mut written = [0xFF; 16];
        written[0] = 0xFC;
        written[12..].copy_from_slice(&[1, 0, 0, 0]);
        assert_eq!(entry(&msix, 63), written);
        assert!(msix.write(64 * 16, &[0xFF; 16]).is_empty(), "behind the table");
        assert_eq!(entry(&msix, 64), [0; 16]);
        assert_eq!(msix.write(0, &[0; 1024]).len(), 64);
        msix.reset();
        assert_eq!(entry(&msix, 63)[12], 1);
    }

    #[test]
    fn pending_bits_are_those_of_the_vectors() {
        let mut msix = Msix::new(64, EventFd::peer_signal);
        let pending = |msix: &Msix, byte| msix.read(PENDING_OFFSET + byte, |vector| vector == 9);
        assert_eq!(
            (pending(&msix, 0), pending(&msix, 1), pending(&msix, 7), pending(&msix, 8)),
            (0, 2, 0, 0)
        );
        msix.signal_admin();
        assert_eq!(pending(&msix, 0), 1, "nothing to signal yet");
        assert!(msix.write(PENDING_OFFSET, &[0xFF; 8]).is_empty());
        assert_eq!(msix.read(u64::MAX, |_| true), 0);
    }

    #[test]
    fn a_client_that_keeps_the_table_to_itself_is_signalled() {
        let mut msix = Msix::new(2, EventFd::peer_signal);
        let (event, mirror) = event();
        msix.set(0, Some(event));
        msix.signal_admin();
        assert_eq!(mirror.drain(), 1);
        assert!(msix.duplicate(0).unwrap().is_some() && msix.duplicate(1).unwrap().is_none());
        msix.set(0, None);
        msix.signal_admin();
        assert_eq!(mirror.drain(), 0);
    }

    #[test]
    fn registers_mask_vectors_without_a_table() {
        let mut msix = Msix::new(32, EventFd::peer_signal);
        let (event, mirror) = event();
        msix.set(0, Some(event));
        assert_eq!(msix.mask(1 | 1 << 31), [0, 31]);
        assert!(msix.mask(1 | 1 << 31).is_empty(), "nothing has changed");
        msix.signal_admin();
        assert_eq!(mirror.drain(), 0);
        assert!(msix.duplicate(0).unwrap().is_none());
        assert_eq!(msix.mask(1 << 31), [0]);
        assert_eq!(mirror.drain(), 1);
        msix.reset();
        assert!(msix.mask(0).is_empty());
    }

    #[test]
    fn what_cannot_be_signalled_stays_pending() {
        let mut msix = Msix::new(2, |_| Err(io::Error::other("no ring")));
        let (event, mirror) = event();
        msix.set(0, Some(event));
        msix.signal_admin();
        msix.signal(0);
        assert_eq!((mirror.drain(), msix.read(PENDING_OFFSET, |_| false)), (0, 1));
        // As soon as it can be.
        msix.make = EventFd::peer_signal;
        msix.signal_admin();
        assert_eq!((mirror.drain(), msix.read(PENDING_OFFSET, |_| false)), (1, 0));
    }

    #[test]
    fn what_was_pending_is_signalled_when_the_mask_goes() {
        let mut msix = Msix::new(2, EventFd::peer_signal);
        let (event, mirror) = event();
        msix.write(12, &[1, 0, 0, 0]);
        msix.set(0, Some(event));
        msix.signal_admin();
        assert_eq!(mirror.drain(), 0);
        assert!(msix.duplicate(0).unwrap().is_none());
        assert_eq!(msix.write(12, &[0, 0, 0, 0]), [0]);
        assert_eq!(mirror.drain(), 1);
        assert_eq!(msix.read(PENDING_OFFSET, |_| false), 0);
    }
}
