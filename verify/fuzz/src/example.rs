//! The shape of a target, and the proof that coverage steers the fuzzer: it walks in one comparison at a time.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let text = String::from_utf8_lossy(input);
    if let Ok(number) = text.trim().parse::<u64>() {
        assert_eq!(number.to_string().parse(), Ok(number), "a number survives being written and read");
    }
});
