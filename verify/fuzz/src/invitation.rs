//! The text of an invitation that someone has written: it is refused, or it means what it says.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sidecore_trust::Invitation;

fuzz_target!(|text: &str| {
    match Invitation::from_text(text) {
        Ok(invitation) => {
            let written = invitation.to_text();
            let read = Invitation::from_text(&written).expect("our own text");
            assert_eq!(read.client, invitation.client);
            assert_eq!(read.iohost, invitation.iohost);
            assert_eq!(read.key.public(), invitation.key.public());
            let name = invitation.client.as_str();
            assert!(!name.is_empty() && !name.contains(['/', '\0', '\n']), "{name:?}");
        }
        Err(error) => assert!(error.to_string().len() < 300, "{error}"),
    }
});
