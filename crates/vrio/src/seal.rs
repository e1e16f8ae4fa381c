//! The seam to encryption.

/// Seals the payloads of one session's frames, and opens those of its peer.
///
/// A frame's counter is never used twice in a session and a direction, so it can be a nonce. All
/// headers are associated data. Frames of the handshake have counter and session 0; for them a seal
/// is what its handshake says.
pub trait Seal {
    /// Bytes of the tag behind a payload.
    const TAG_BYTES: usize;

    /// Seals in place: `sealed` is a payload and room for the tag.
    fn seal(&mut self, counter: u64, associated: &[u8], sealed: &mut [u8]);

    /// The payload in `sealed`, or `None` if the frame is not what the peer sealed. A seal that
    /// decrypts does it into a buffer of its own.
    fn open<'a>(
        &'a mut self,
        counter: u64,
        associated: &[u8],
        sealed: &'a [u8],
    ) -> Option<&'a [u8]>;

    /// A new session begins, with this name.
    fn start(&mut self, session: u64);
}

/// No encryption: the frames of a dedicated cable, or between two daemons of one machine. Damage is
/// left to the link to notice.
#[derive(Clone, Copy, Debug, Default)]
pub struct Plain;

impl Seal for Plain {
    const TAG_BYTES: usize = 0;

    #[inline]
    fn seal(&mut self, _counter: u64, _associated: &[u8], _sealed: &mut [u8]) {}

    #[inline]
    fn open<'a>(
        &'a mut self,
        _counter: u64,
        _associated: &[u8],
        sealed: &'a [u8],
    ) -> Option<&'a [u8]> {
        Some(sealed)
    }

    fn start(&mut self, _session: u64) {}
}
