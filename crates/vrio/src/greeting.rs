//! The frames of HELLO and WELCOME.

use crate::channel::send_clear;
use crate::handshake::MESSAGE_MAX;
use crate::port::{Peer, Port};
use crate::wire::{FrameHeader, Greeting};

/// Size of the payload of a HELLO or WELCOME in a frame of `frame_bytes`.
pub(crate) fn padded_bytes(frame_bytes: u32) -> u16 {
    let frame_bytes = usize::try_from(frame_bytes).unwrap_or(usize::MAX);
    u16::try_from(frame_bytes.saturating_sub(FrameHeader::BYTES)).unwrap_or(u16::MAX)
}

/// The clear part and the message of a HELLO or WELCOME.
pub(crate) fn split_greeting(payload: &[u8]) -> Option<(Greeting, &[u8])> {
    let (greeting, rest) = payload.split_first_chunk()?;
    let greeting = Greeting::decode(greeting);
    Some((greeting, rest.get(..greeting.message_bytes.into())?))
}

/// Sends a HELLO or WELCOME.
pub(crate) fn send_greeting(
    port: &mut impl Port,
    to: Peer,
    header: &FrameHeader,
    greeting: &Greeting,
    message: &[u8],
) -> bool {
    let mut room = [0; Greeting::BYTES.saturating_add(MESSAGE_MAX)];
    let (first, rest) = room.split_at_mut(Greeting::BYTES);
    first.copy_from_slice(&greeting.encode());
    let Some(place) = rest.get_mut(..message.len()) else { return false };
    place.copy_from_slice(message);
    let len = Greeting::BYTES.saturating_add(message.len());
    room.get(..len).is_some_and(|payload| send_clear(port, to, header, payload))
}
