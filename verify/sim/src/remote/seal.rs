//! A seal that notices damage, as an encrypting one would.

use sidecore_vrio::Seal;

/// A checksum over counter, headers and payload.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Checksum;

impl Seal for Checksum {
    const TAG_BYTES: usize = 16;

    fn seal(&mut self, counter: u64, associated: &[u8], sealed: &mut [u8]) {
        let (payload, tag) = sealed.split_at_mut(sealed.len() - Self::TAG_BYTES);
        tag.fill(0);
        tag[..8].copy_from_slice(&sum(counter, associated, payload).to_le_bytes());
    }

    fn open<'a>(
        &'a mut self,
        counter: u64,
        associated: &[u8],
        sealed: &'a [u8],
    ) -> Option<&'a [u8]> {
        let (payload, tag) = sealed.split_at(sealed.len() - Self::TAG_BYTES);
        (tag[..8] == sum(counter, associated, payload).to_le_bytes()).then_some(payload)
    }

    fn start(&mut self, _session: u64) {}
}

/// FNV-1a over words.
fn sum(counter: u64, associated: &[u8], payload: &[u8]) -> u64 {
    let mut sum = 0xcbf2_9ce4_8422_2325 ^ counter;
    for part in [associated, payload] {
        let (words, rest) = part.as_chunks::<8>();
        let mut last = [0; 8];
        last[..rest.len()].copy_from_slice(rest);
        for word in words.iter().chain([&last]) {
            sum = (sum ^ u64::from_le_bytes(*word)).wrapping_mul(0x0100_0000_01b3);
            sum ^= sum >> 29;
        }
    }
    sum
}
