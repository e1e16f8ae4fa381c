//! The time that the library of the seal needs for the frames of a request.

use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use sidecore_vrio::wire::DATA_HEADER_BYTES;

use crate::load::Work;

/// The name of the library in the records.
pub(super) const LIBRARY: &str = "library";
/// The metric of the time that a request spends on seals.
pub(super) const METRIC: &str = "sealing";

const PER_READING: u32 = 64;

/// Seals and opens the question and the answer of a request, for about `duration`. Returns the
/// nanoseconds for a request.
///
/// # Errors
/// The library refuses a key or a frame.
pub(super) fn library_ns(work: &Work, duration: Duration) -> Result<f64> {
    let refused = |_| anyhow!("the library refuses a frame");
    let key = LessSafeKey::new(UnboundKey::new(&AES_256_GCM, &[7; 32]).map_err(refused)?);
    let head = [3; DATA_HEADER_BYTES];
    let mut frames = [Vec::new(), vec![0x5a; work.bytes as usize]];
    let (begin, mut count) = (Instant::now(), 0_u32);
    while begin.elapsed() < duration {
        for _ in 0..PER_READING {
            count += 1;
            let mut nonce = [0; 12];
            nonce[..4].copy_from_slice(&count.to_le_bytes());
            for payload in &mut frames {
                let nonce = || Nonce::assume_unique_for_key(nonce);
                let len = payload.len();
                let tag = key.seal_in_place_separate_tag(nonce(), Aad::from(head), payload);
                payload.extend_from_slice(tag.map_err(refused)?.as_ref());
                key.open_in_place(nonce(), Aad::from(head), payload).map_err(refused)?;
                payload.truncate(len);
            }
        }
    }
    Ok(begin.elapsed().as_nanos() as f64 / f64::from(count))
}
