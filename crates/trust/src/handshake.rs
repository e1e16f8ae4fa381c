//! The parts of the handshake, Noise IK, that both sides share.
//!
//! ```text
//! <- s                      the invitation has the IOhost's public key
//! -> e, es, s, ss  HELLO    the client's public key, and the fields
//! <- e, ee, se     WELCOME  the fields, and a secret for the keys of frames
//! ```

use sidecore_vrio::handshake::code;
use sidecore_vrio::wire::{Hello, VERSION, Welcome};
use snow::{Builder, HandshakeState};

use crate::crypto::{Primitives, TAG_BYTES};
use crate::keys::{PrivateKey, PublicKey};

/// The protocol's name (Noise, section 8).
const PROTOCOL: &str = "Noise_IK_25519_AESGCM_SHA256";
/// Size of a public key.
const KEY_BYTES: usize = 32;
/// Size of the secret that a WELCOME carries.
pub(crate) const SECRET_BYTES: usize = 32;
/// Size of the payload of a WELCOME's message.
pub(crate) const WELCOME_BYTES: usize = Welcome::BYTES + SECRET_BYTES;
/// Size of the message of a HELLO: ephemeral key, sealed static key, sealed fields.
pub(crate) const HELLO_MESSAGE_BYTES: usize =
    KEY_BYTES + KEY_BYTES + TAG_BYTES + Hello::BYTES + TAG_BYTES;
/// Size of the message of a WELCOME: ephemeral key, sealed fields and secret.
pub(crate) const WELCOME_MESSAGE_BYTES: usize = KEY_BYTES + WELCOME_BYTES + TAG_BYTES;

/// Both sides must agree on it: the purpose, the version of the format, and the handshake's code.
const PROLOGUE: &[u8] = &{
    let mut prologue = *b"sidecore vrio handshake \0\0";
    prologue[24] = VERSION;
    prologue[25] = code::NOISE;
    prologue
};

fn builder<'a>() -> Option<Builder<'a>> {
    let builder = Builder::with_resolver(PROTOCOL.parse().ok()?, Box::new(Primitives));
    builder.prologue(PROLOGUE).ok()
}

/// The client's end.
pub(crate) fn initiator(own: &PrivateKey, iohost: &PublicKey) -> Option<HandshakeState> {
    let builder = builder()?.local_private_key(own.as_bytes()).ok()?;
    builder.remote_public_key(&iohost.0).ok()?.build_initiator().ok()
}

/// The IOhost's end.
pub(crate) fn responder(own: &PrivateKey) -> Option<HandshakeState> {
    builder()?.local_private_key(own.as_bytes()).ok()?.build_responder().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(hex: &str) -> Vec<u8> {
        let byte = |at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap();
        (0..hex.len()).step_by(2).map(byte).collect()
    }

    /// The vector of this protocol in the collection of the Noise project (cacophony): both
    /// messages, and the hash that binds them.
    #[test]
    fn the_handshake_is_that_of_other_implementations() {
        let build = |s: &str, e: &str, rs: Option<&str>| {
            let (s, e) = (bytes(s), bytes(e));
            let rs = rs.map(bytes);
            let builder = Builder::with_resolver(PROTOCOL.parse().unwrap(), Box::new(Primitives))
                .prologue(b"John Galt")
                .unwrap()
                .local_private_key(&s)
                .unwrap()
                .fixed_ephemeral_key_for_testing_only(&e);
            match &rs {
                Some(rs) => builder.remote_public_key(rs).unwrap().build_initiator().unwrap(),
                None => builder.build_responder().unwrap(),
            }
        };
        let mut client = build(
            "e61ef9919cde45dd5f82166404bd08e38bceb5dfdfded0a34c8df7ed542214d1",
            "893e28b9dc6ca8d611ab664754b8ceb7bac5117349a4439a6b0569da977c464a",
            Some("31e0303fd6418d2f8c0e78b91f22e8caed0fbe48656dcf4767e4834f701b8f62"),
        );
        let mut host = build(
            "4a3acbfdb163dec651dfa3194dece676d437029c62a408b4c5ea9114246e4893",
            "bbdb4cdbd309f1a1f2e1456967fe288cadd6f712d65dc7b7793d5e63da6b375b",
            None,
        );
        let (mut message, mut payload) = ([0; 256], [0; 256]);
        let len = client.write_message(b"Ludwig von Mises", &mut message).unwrap();
        assert_eq!(
            message[..len],
            bytes(concat!(
                "ca35def5ae56cec33dc2036731ab14896bc4c75dbb07a61f879f8e3afa4c7944",
                "4e417bc55c7a8166c993356c1be41ef67818a292426f301556c7f26b21d25ddb",
                "097153891a9a956cff47b83e63ad8d701c1342c209cff1ca5ecd43402762ac24",
                "9e3bd3a4c0a145fe07cb5dae28ea13a3",
            ))
        );
        let len = host.read_message(&message[..len], &mut payload).unwrap();
        assert_eq!(&payload[..len], b"Ludwig von Mises");
        let len = host.write_message(b"Murray Rothbard", &mut message).unwrap();
        assert_eq!(
            message[..len],
            bytes(concat!(
                "95ebc60d2b1fa672c1f46a8aa265ef51bfe38e7ccb39ec5be34069f144808843",
                "af2ccf9972e22afc67aeafcd25162f7f98c363b7762e3e4cb7d272e39f27a5",
            ))
        );
        client.read_message(&message[..len], &mut payload).unwrap();
        let hash = bytes("669c8640d9e42a3cda2f232f78597ceefb01daa6e3df81181ccce6fc6b5026bf");
        assert_eq!(client.get_handshake_hash(), hash);
        assert_eq!(host.get_handshake_hash(), hash);
    }

    #[test]
    fn the_messages_fit_into_a_frame() {
        let longest = HELLO_MESSAGE_BYTES.max(WELCOME_MESSAGE_BYTES);
        assert!(longest <= sidecore_vrio::handshake::MESSAGE_MAX);
    }
}
