//! AES-256-XTS of whole sectors (IEEE Std 1619-2018), with the initial values of `plain64`.

use aes::cipher::{BlockCipherDecrypt, BlockCipherEncrypt, KeyInit};
use aes::{Aes256Dec, Aes256Enc, Block};

/// Bytes of a key: one of AES-256 for the data, then one for the tweaks.
pub const KEY_BYTES: usize = 64;

const BLOCK_BYTES: usize = 16;
/// Bytes that are encrypted at once: the largest sector, and few enough for the first-level cache.
const CHUNK_BYTES: usize = 4096;
const CHUNK_BLOCKS: usize = CHUNK_BYTES / BLOCK_BYTES;
/// The smallest sector, and the unit in which `plain64` counts whatever the size of sectors.
const UNIT_BYTES: usize = 512;
const CHUNK_UNITS: usize = CHUNK_BYTES / UNIT_BYTES;
/// Chains of tweaks that do not wait for each other.
const LANES: usize = 8;

/// The size of encrypted sectors: 512, 1024, 2048 or 4096 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SectorSize(u32);

impl SectorSize {
    /// 512 bytes.
    pub const SMALLEST: Self = Self(512);

    /// `None` for a size that LUKS2 does not have.
    #[must_use]
    pub const fn new(bytes: u32) -> Option<Self> {
        match bytes {
            512 | 1024 | 2048 | 4096 => Some(Self(bytes)),
            _ => None,
        }
    }

    /// In bytes.
    #[must_use]
    pub const fn bytes(self) -> u32 {
        self.0
    }
}

/// Space for the tweaks of a chunk, which is not cleared for each request.
#[derive(Clone, Debug)]
pub struct Tweaks([Block; CHUNK_BLOCKS]);

impl Default for Tweaks {
    fn default() -> Self {
        Self([Block::default(); CHUNK_BLOCKS])
    }
}

/// Data that is no whole number of sectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{len_bytes} bytes are no whole number of sectors of {sector_bytes} bytes")]
pub struct RaggedData {
    /// Size of the data.
    pub len_bytes: usize,
    /// Size of a sector.
    pub sector_bytes: u32,
}

/// A key of AES-256-XTS, expanded.
pub struct Xts {
    encrypt: Aes256Enc,
    decrypt: Aes256Dec,
    tweak: Aes256Enc,
}

impl std::fmt::Debug for Xts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Xts(..)")
    }
}

impl Xts {
    /// Expands a key.
    #[must_use]
    pub fn new(key: &[u8; KEY_BYTES]) -> Self {
        let (data, tweak) = key.split_at(KEY_BYTES / 2);
        let (data, tweak) = (half(data), half(tweak));
        Self {
            encrypt: Aes256Enc::new(&(*data).into()),
            decrypt: Aes256Dec::new(&(*data).into()),
            tweak: Aes256Enc::new(&(*tweak).into()),
        }
    }

    /// Encrypts whole sectors in place. `first_unit` is the number of the first sector in units of
    /// 512 bytes.
    ///
    /// # Errors
    /// The data is no whole number of sectors; it is as it was.
    #[inline]
    pub fn encrypt(
        &self,
        first_unit: u64,
        sector: SectorSize,
        data: &mut [u8],
        tweaks: &mut Tweaks,
    ) -> Result<(), RaggedData> {
        let carry_out = |blocks: &mut [Block]| self.encrypt.encrypt_blocks(blocks);
        self.each_chunk(first_unit, sector, data, tweaks, carry_out)
    }

    /// The inverse of [`encrypt`](Self::encrypt).
    ///
    /// # Errors
    /// As for encryption.
    #[inline]
    pub fn decrypt(
        &self,
        first_unit: u64,
        sector: SectorSize,
        data: &mut [u8],
        tweaks: &mut Tweaks,
    ) -> Result<(), RaggedData> {
        let carry_out = |blocks: &mut [Block]| self.decrypt.decrypt_blocks(blocks);
        self.each_chunk(first_unit, sector, data, tweaks, carry_out)
    }

    #[inline]
    fn each_chunk(
        &self,
        first_unit: u64,
        sector: SectorSize,
        data: &mut [u8],
        tweaks: &mut Tweaks,
        carry_out: impl Fn(&mut [Block]),
    ) -> Result<(), RaggedData> {
        let sector_bytes = sector.0 as usize;
        if !data.len().is_multiple_of(sector_bytes) {
            return Err(RaggedData { len_bytes: data.len(), sector_bytes: sector.0 });
        }
        let units = (sector_bytes / UNIT_BYTES) as u64;
        let mut unit = first_unit;
        for chunk in data.chunks_mut(CHUNK_BYTES) {
            let sectors = chunk.len().checked_div(sector_bytes).unwrap_or(0);
            let mut first = [Block::default(); CHUNK_UNITS];
            let Some(first) = first.get_mut(..sectors) else { continue };
            for tweak in &mut *first {
                *tweak = u128::from(unit).to_le_bytes().into();
                unit = unit.wrapping_add(units);
            }
            self.tweak.encrypt_blocks(first);
            fill(tweaks, first, sector_bytes / BLOCK_BYTES);
            let (blocks, _) = Block::slice_as_chunks_mut(chunk);
            mask(blocks, tweaks);
            carry_out(blocks);
            mask(blocks, tweaks);
        }
        Ok(())
    }
}

fn half(key: &[u8]) -> zeroize::Zeroizing<[u8; KEY_BYTES / 2]> {
    let mut half = zeroize::Zeroizing::new([0; KEY_BYTES / 2]);
    half.iter_mut().zip(key).for_each(|(to, from)| *to = *from);
    half
}

/// The tweak of the next block: times x in GF(2^128) modulo x^128 + x^7 + x^2 + x + 1 (IEEE Std
/// 1619-2018, 5.2). It takes the same time for every value.
#[inline]
fn times_x(tweak: u128) -> u128 {
    (tweak << 1) ^ ((tweak >> 127).wrapping_neg() & 0x87)
}

/// The tweak eight blocks on: times x^8. The byte that is shifted out comes back times
/// x^7 + x^2 + x + 1.
#[inline]
fn times_x_8(tweak: u128) -> u128 {
    let out = tweak >> 120;
    (tweak << 8) ^ out ^ (out << 1) ^ (out << 2) ^ (out << 7)
}

/// The tweaks of all blocks of sectors, from those of their first blocks.
#[inline]
fn fill(tweaks: &mut Tweaks, first: &[Block], blocks_per_sector: usize) {
    for (tweaks, first) in tweaks.0.chunks_exact_mut(blocks_per_sector).zip(first) {
        let mut lanes = [0_u128; LANES];
        let mut next = u128::from_le_bytes((*first).into());
        for lane in &mut lanes {
            *lane = next;
            next = times_x(next);
        }
        for group in tweaks.chunks_exact_mut(LANES) {
            for (tweak, lane) in group.iter_mut().zip(&mut lanes) {
                *tweak = lane.to_le_bytes().into();
                *lane = times_x_8(*lane);
            }
        }
    }
}

#[inline]
fn mask(blocks: &mut [Block], tweaks: &Tweaks) {
    for (block, tweak) in blocks.iter_mut().zip(&tweaks.0) {
        let masked = u128::from_ne_bytes((*block).into()) ^ u128::from_ne_bytes((*tweak).into());
        *block = masked.to_ne_bytes().into();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: SectorSize = SectorSize::SMALLEST;
    const LARGE: SectorSize = SectorSize(4096);

    fn bytes(hex: &str) -> Vec<u8> {
        (0..hex.len())
            .step_by(2)
            .map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap())
            .collect()
    }

    /// Keys of the vectors: digits of e and of pi.
    fn xts() -> Xts {
        let key = bytes(
            "27182818284590452353602874713526624977572470936999595749669676273141592653589793238462\
             643383279502884197169399375105820974944592",
        );
        Xts::new(&key.try_into().unwrap())
    }

    /// IEEE Std 1619-2018, annex B, vectors 10 to 14: the first and the last 32 of 512 bytes.
    #[test]
    fn the_vectors_of_the_standard_hold() {
        let vectors = [
            (
                0xff,
                "1c3b3a102f770386e4836c99e370cf9bea00803f5e482357a4ae12d414a3e63b",
                "773dad38014bd2092fa755c824bb5e54c4f36ffda9fcea70b9c6e693e148c151",
            ),
            (
                0xffff,
                "77a31251618a15e6b92d1d66dffe7b50b50bad552305ba0217a610688eff7e11",
                "54fbff89eeaeea791f4a7ab1f9868294a4f9e27b42af8100cb9d59cef9645803",
            ),
            (
                0xff_ffff,
                "e387aaa58ba483afa7e8eb469778317ecf4cf573aa9d4eac23f2cdf914e4e200",
                "ed242c8900dd1fa965bc950dfce09b132263a1eef52dd6888c309f5a7d712826",
            ),
            (
                0xffff_ffff,
                "bf53d2dade78e822a4d949a9bc6766b01b06a8ef70d26748c6a7fc36d80ae4c5",
                "f6516139420fcff3b7361d86322c4bd84c82f335abb152c4a93411373aaa8220",
            ),
            (
                0xff_ffff_ffff,
                "64497e5a831e4a932c09be3e5393376daa599548b816031d224bbf50a818ed23",
                "6975be5e0b4efce51cd3e70c25a1fbbbd609d273ad5b0d59631c531f6a0a57b9",
            ),
        ];
        let plain: Vec<u8> = (0..512).map(|at| at as u8).collect();
        for (unit, start, end) in vectors {
            let mut data = plain.clone();
            xts().encrypt(unit, SMALL, &mut data, &mut Tweaks::default()).unwrap();
            assert_eq!((&data[..32], &data[480..]), (&*bytes(start), &*bytes(end)), "{unit:#x}");
            xts().decrypt(unit, SMALL, &mut data, &mut Tweaks::default()).unwrap();
            assert_eq!(data, plain);
        }
    }

    /// The standard's way: block after block, each tweak from the one before.
    fn slowly(xts: &Xts, unit: u64, data: &mut [u8]) {
        let mut tweak: Block = u128::from(unit).to_le_bytes().into();
        xts.tweak.encrypt_block(&mut tweak);
        let mut tweak: [u8; 16] = tweak.into();
        for block in data.chunks_mut(16) {
            let masked: [u8; 16] = std::array::from_fn(|at| block[at] ^ tweak[at]);
            let mut masked = Block::from(masked);
            xts.encrypt.encrypt_block(&mut masked);
            (0..16).for_each(|at| block[at] = masked[at] ^ tweak[at]);
            let carry = tweak[15] >> 7;
            for at in (0..16).rev() {
                tweak[at] = (tweak[at] << 1) | if at > 0 { tweak[at - 1] >> 7 } else { 0 };
            }
            tweak[0] ^= carry * 0x87;
        }
    }

    #[test]
    fn sectors_of_each_size_are_as_block_after_block() {
        let (xts, mut tweaks) = (xts(), Tweaks::default());
        for sector_bytes in [512, 1024, 2048, 4096] {
            let sector = SectorSize::new(sector_bytes).unwrap();
            for sectors in [0, 1, 2, 3, 7, 8, 9, 33] {
                for first in [0, 8, u64::from(u32::MAX) - 7, u64::MAX - 15] {
                    let len = sectors * sector_bytes as usize;
                    let plain: Vec<u8> = (0..len).map(|at| (at * 7 + at / 256) as u8).collect();
                    let (mut expected, mut data) = (plain.clone(), plain.clone());
                    let units = u64::from(sector_bytes / 512);
                    for (index, part) in expected.chunks_mut(sector_bytes as usize).enumerate() {
                        slowly(&xts, first.wrapping_add(index as u64 * units), part);
                    }
                    xts.encrypt(first, sector, &mut data, &mut tweaks).unwrap();
                    assert!(data == expected, "{sectors} of {sector_bytes} at {first}");
                    xts.decrypt(first, sector, &mut data, &mut tweaks).unwrap();
                    assert!(data == plain);
                }
            }
        }
    }

    #[test]
    fn a_part_of_a_sector_is_refused_and_untouched() {
        for (sector, len) in [(SMALL, 511), (SMALL, 513), (LARGE, 512), (LARGE, 4096 + 2048)] {
            let mut data = vec![5; len];
            let refused = xts().encrypt(0, sector, &mut data, &mut Tweaks::default());
            assert_eq!(refused, Err(RaggedData { len_bytes: len, sector_bytes: sector.0 }));
            assert!(data.iter().all(|byte| *byte == 5));
        }
        assert_eq!([0, 256, 513, 8192].map(SectorSize::new), [None; 4]);
    }
}
