//! Sessions with arbitrary messages.

use super::*;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// The recorder checks that no queue is started twice, and that the device is reset with all
    /// queues stopped.
    #[test]
    fn any_sequence_of_messages_ends_with_all_rings_stopped(seeds in vec(any::<u64>(), 0..200)) {
        let mut fixture = Fixture::ready(SPLIT);
        for seed in seeds {
            // An error would close the connection; a worse peer continues.
            let _ = fixture.send(message_of(seed));
        }
        let Fixture { device, session } = fixture;
        drop(session);
        prop_assert_eq!(device.running(), Vec::<u16>::new());
    }

    #[test]
    fn any_bytes_are_served_or_refused(
        messages in vec((0_u32..46, vec(any::<u8>(), 0..80), 0_usize..3), 0..50),
    ) {
        let mut fixture = Fixture::ready(SPLIT);
        for (code, payload, fds) in messages {
            let words = [code, 0x9, payload.len() as u32].map(u32::to_ne_bytes);
            let header =
                crate::message::Header::parse(words.as_flattened().try_into().unwrap()).unwrap();
            let fds = (0..fds).map(|_| memfd("bytes", 4096)).collect();
            if let Ok(message) = Message::parse(header, &payload, fds) {
                let _ = fixture.send(message);
            }
        }
    }
}
