//! Clients and IOhosts of earlier versions: each side of a recorded conversation is played to the
//! other side of this version.
//!
//! `SIDECORE_RECORD=NAME cargo test --package sidecore-vrio --test conversations` writes the
//! conversation of this version to `tests/conversations/NAME.txt`, at a release.

mod common;
mod recorded;

use std::collections::BTreeSet;
use std::path::PathBuf;

use recorded::format::{Conversation, Event, Line, from_text, to_text};
use recorded::said::Said;
use recorded::{client, host, recorder};
use sidecore_vrio::{Reason, Request, VrioCounts};

fn directory() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/conversations")
}

/// The recorded conversations of earlier versions, and the one of this version.
fn conversations() -> Vec<(String, Conversation)> {
    let files = std::fs::read_dir(directory()).unwrap().map(|entry| entry.unwrap().path());
    let mut all: Vec<_> = files
        .map(|path| {
            let text = std::fs::read_to_string(&path).unwrap();
            (path.file_stem().unwrap().to_string_lossy().into_owned(), from_text(&text))
        })
        .collect();
    assert!(!all.is_empty(), "no conversation in {}", directory().display());
    all.push(("this version".to_owned(), recorder::record()));
    all
}

fn frames(conversation: &Conversation) -> impl Iterator<Item = &Vec<u8>> {
    conversation.iter().filter_map(|(_, line)| match line {
        Line::Frame { of_client: false, frame, .. } => Some(frame),
        _ => None,
    })
}

fn events(conversation: &Conversation) -> impl Iterator<Item = &Event> {
    conversation.iter().filter_map(|(_, line)| match line {
        Line::Event(event) => Some(event),
        Line::Frame { .. } => None,
    })
}

fn sorted(requests: impl Iterator<Item = Request>) -> Vec<String> {
    let mut texts: Vec<_> = requests.map(|request| format!("{request:?}")).collect();
    texts.sort();
    texts
}

/// The reasons for which frames were dropped.
fn drops(counts: &VrioCounts) -> Vec<Reason> {
    Reason::ALL.iter().copied().filter(|reason| counts.dropped(*reason) > 0).collect()
}

#[test]
fn an_iohost_serves_the_client_of_each_earlier_version() {
    for (name, conversation) in conversations() {
        let heard = client::play(&conversation);
        let then = Said::by(frames(&conversation));
        let now = Said::by(&heard.frames);
        assert_eq!(now, then, "{name}");
        let stored = events(&conversation).filter_map(|event| match event {
            Event::Store(request) => Some(*request),
            _ => None,
        });
        assert_eq!(sorted(heard.rig.disk.log.iter().copied()), sorted(stored), "{name}");
        // A frame for the session of the killed IOhost.
        assert_eq!(drops(&heard.rig.host_counts()), [Reason::Session], "{name}");
    }
}

#[test]
fn a_client_uses_the_iohost_of_each_earlier_version() {
    for (name, conversation) in conversations() {
        let served = host::play(&conversation);
        let order = |event: &&Event| match event {
            Event::Done { tag, .. } => *tag,
            _ => 0,
        };
        let is_done = |event: &&Event| matches!(event, Event::Done { .. });
        let mut then: Vec<_> = events(&conversation).filter(is_done).collect();
        let mut now: Vec<_> = served.done.iter().collect();
        then.sort_by_key(order);
        now.sort_by_key(order);
        assert_eq!(now, then, "{name}");
        // Replayed writes, too.
        assert_eq!(served.missing, [], "{name}");
        assert_eq!(drops(&served.rig.client_counts()), [], "{name}");
        assert_eq!(served.rig.client_counts().sessions, 2, "{name}");
    }
}

#[test]
fn a_conversation_is_written_and_read() {
    let conversation = recorder::record();
    let text = to_text(&conversation);
    assert_eq!(from_text(&text), conversation);
    let kinds: BTreeSet<u8> = conversation
        .iter()
        .filter_map(|(_, line)| match line {
            Line::Frame { frame, .. } => Some(frame[1]),
            Line::Event(_) => None,
        })
        .collect();
    assert!((1..=13).all(|kind| kinds.contains(&kind)), "{kinds:?}");
    if let Some(name) = std::env::var_os("SIDECORE_RECORD") {
        let path = directory().join(name).with_extension("txt");
        std::fs::write(path, text).unwrap();
    }
}
