//! A keyed hash, for cookies and for random numbers that a peer cannot guess.

/// SipHash-2-4 of words, by its authors' description (Aumasson and Bernstein, 2012).
pub(crate) fn keyed_hash(key: [u64; 2], words: impl IntoIterator<Item = u64>) -> u64 {
    let [k0, k1] = key;
    let mut state = [
        k0 ^ 0x736f_6d65_7073_6575,
        k1 ^ 0x646f_7261_6e64_6f6d,
        k0 ^ 0x6c79_6765_6e65_7261,
        k1 ^ 0x7465_6462_7974_6573,
    ];
    let mut count = 0_u64;
    for word in words {
        state = absorb(state, word);
        count = count.wrapping_add(1);
    }
    // The length in bytes, modulo 256, is the last byte of the last word.
    state = absorb(state, count.wrapping_mul(8).wrapping_shl(56));
    let [a, b, c, d] = state;
    state = [a, b, c ^ 0xff, d];
    for _ in 0..4 {
        state = round(state);
    }
    let [a, b, c, d] = state;
    a ^ b ^ c ^ d
}

/// The words of a message, zeros behind it.
pub(crate) fn words(message: &[u8]) -> impl Iterator<Item = u64> + '_ {
    message.chunks(8).map(|chunk| {
        let mut word = [0; 8];
        for (to, from) in word.iter_mut().zip(chunk) {
            *to = *from;
        }
        u64::from_le_bytes(word)
    })
}

fn absorb([a, b, c, d]: [u64; 4], word: u64) -> [u64; 4] {
    let [a, b, c, d] = round(round([a, b, c, d ^ word]));
    [a ^ word, b, c, d]
}

const fn round([mut a, mut b, mut c, mut d]: [u64; 4]) -> [u64; 4] {
    a = a.wrapping_add(b);
    b = b.rotate_left(13) ^ a;
    a = a.rotate_left(32);
    c = c.wrapping_add(d);
    d = d.rotate_left(16) ^ c;
    a = a.wrapping_add(d);
    d = d.rotate_left(21) ^ a;
    c = c.wrapping_add(b);
    b = b.rotate_left(17) ^ c;
    c = c.rotate_left(32);
    [a, b, c, d]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_is_that_of_its_authors() {
        // The vectors of the reference code, for the messages of 0, 8 and 16 bytes.
        let bytes: Vec<u8> = (0..16).collect();
        let key: Vec<u64> = words(&bytes).collect();
        let hash = |len: usize| keyed_hash([key[0], key[1]], words(&bytes[..len]));
        assert_eq!(hash(0), 0x726f_db47_dd0e_0e31);
        assert_eq!(hash(8), 0x93f5_f579_9a93_2462);
        assert_eq!(hash(16), 0x3f2a_cc7f_57c2_9bdb);
    }
}
