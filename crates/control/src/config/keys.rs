//! The tables of keys: for the command line, the manual and the API's document.

pub use sidecore_assembly::spec::{FrontEndSpec, Key, Kind, STAGE, STRUCTURE, StageSpec, VOLUME, Variant};

use sidecore_assembly::spec::DeviceSpec;

/// The keys of every device.
pub fn device() -> impl Iterator<Item = &'static Key> {
    STRUCTURE.iter().chain(DeviceSpec::KEYS)
}

/// The keys of devices with a certain front end.
pub fn front_ends() -> impl Iterator<Item = &'static Key> {
    FrontEndSpec::KINDS.iter().flat_map(|(_, keys)| keys.iter())
}

/// The meaning of a key without Markdown, as a sentence.
#[must_use]
pub fn sentence(meaning: &str) -> String {
    let mut text = String::new();
    let mut rest = meaning;
    while let Some((before, link)) = rest.split_once('[')
        && let Some((label, after)) = link.split_once("](")
        && let Some((_, after)) = after.split_once(')')
    {
        text.push_str(before);
        text.push_str(label);
        rest = after;
    }
    text.push_str(rest);
    let mut characters = text.chars();
    let first = characters.next().into_iter().flat_map(char::to_uppercase);
    first.chain(characters).filter(|c| *c != '`').collect()
}
