//! The messages of a guest on its serial line, which the scripts in `guest` write.

use anyhow::{Context, Result, bail};

/// The beginning or the end of the measured window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Edge {
    Begin,
    End,
}

/// A measured window of a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Window<'a> {
    pub(crate) disk: &'a str,
    pub(crate) what: &'a str,
}

/// A message of the guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Message<'a> {
    Booted {
        release: &'a str,
    },
    Tree {
        files: &'a str,
        kib: &'a str,
    },
    Disk {
        disk: &'a str,
        device: &'a str,
        virtio: &'a str,
    },
    Step {
        disk: &'a str,
        what: &'a str,
    },
    Verified {
        disk: &'a str,
        what: &'a str,
        complaint: Option<&'a str>,
    },
    Window {
        window: Window<'a>,
        edge: Edge,
    },
    Interrupts {
        window: Window<'a>,
        edge: Edge,
        line: &'a str,
    },
    Stat {
        window: Window<'a>,
        edge: Edge,
        line: &'a str,
    },
    Fio {
        window: Window<'a>,
        json: &'a str,
    },
    /// A part of the answer to an order.
    Value {
        key: &'a str,
        text: &'a str,
    },
    /// The end of the answer to an order.
    Finished {
        order: &'a str,
    },
    Failed {
        why: &'a str,
    },
    Done,
}

/// Parses a line; `None` for a line that is not a message.
pub(crate) fn parse(line: &str) -> Result<Option<Message<'_>>> {
    // Firmware may have left control characters before the message.
    let Some((_, said)) = line.split_once("SIDECORE ") else { return Ok(None) };
    let said = said.trim();
    message(said).map(Some).with_context(|| format!("cannot understand the guest's line '{said}'"))
}

fn message(said: &str) -> Result<Message<'_>> {
    let (key, rest) = split(said);
    // Most lines name a disk next, and say the rest about it.
    let (disk, about) = split(rest);
    Ok(match key {
        "booted" => Message::Booted { release: rest },
        "tree" => Message::Tree { files: disk, kib: about },
        "disk" => {
            let (device, about) = split(about);
            let (virtio, _) = split(about);
            Message::Disk { disk, device, virtio }
        }
        "step" => Message::Step { disk, what: about },
        "verified" => {
            let (what, verdict) = split(about);
            let (verdict, complaint) = split(verdict);
            let complaint = match verdict {
                "true" => None,
                "false" => Some(complaint),
                _ => bail!("a verdict is true or false"),
            };
            Message::Verified { disk, what, complaint }
        }
        "window" => {
            let (window, about) = window(rest);
            Message::Window { window, edge: edge(about)? }
        }
        "interrupts" => {
            let (window, about) = window(rest);
            let (which, line) = split(about);
            Message::Interrupts { window, edge: edge(which)?, line }
        }
        "stat" => {
            let (window, about) = window(rest);
            let (which, line) = split(about);
            Message::Stat { window, edge: edge(which)?, line }
        }
        "fio" => {
            let (window, json) = window(rest);
            Message::Fio { window, json }
        }
        "value" => Message::Value { key: disk, text: about },
        "finished" => Message::Finished { order: rest },
        "failed" => Message::Failed { why: rest },
        "done" => Message::Done,
        _ => bail!("no such word"),
    })
}

fn window(text: &str) -> (Window<'_>, &str) {
    let (disk, rest) = split(text);
    let (what, rest) = split(rest);
    (Window { disk, what }, rest)
}

fn edge(word: &str) -> Result<Edge> {
    match word {
        "begin" => Ok(Edge::Begin),
        "end" => Ok(Edge::End),
        _ => bail!("a window has a begin and an end"),
    }
}

fn split(text: &str) -> (&str, &str) {
    text.split_once(' ').map_or((text, ""), |(first, rest)| (first, rest.trim_start()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn understood(line: &str) -> Message<'_> {
        parse(line).unwrap().unwrap()
    }

    #[test]
    fn each_word_is_understood() {
        assert_eq!(understood("SIDECORE booted 6.1.0-9"), Message::Booted { release: "6.1.0-9" });
        assert_eq!(
            understood("SIDECORE disk file vda virtio0 1"),
            Message::Disk { disk: "file", device: "vda", virtio: "virtio0" }
        );
        assert_eq!(
            understood("SIDECORE step ram mkfs.ext4"),
            Message::Step { disk: "ram", what: "mkfs.ext4" }
        );
        assert_eq!(
            understood("SIDECORE verified ram tree true"),
            Message::Verified { disk: "ram", what: "tree", complaint: None }
        );
        assert_eq!(
            understood("SIDECORE verified ram read false ./x: FAILED"),
            Message::Verified { disk: "ram", what: "read", complaint: Some("./x: FAILED") }
        );
        let window = Window { disk: "file", what: "read" };
        assert_eq!(
            understood("SIDECORE window file read end"),
            Message::Window { window, edge: Edge::End }
        );
        assert_eq!(
            understood("SIDECORE interrupts file read begin 24: 3 PCI-MSI virtio0-req.0"),
            Message::Interrupts { window, edge: Edge::Begin, line: "24: 3 PCI-MSI virtio0-req.0" }
        );
        assert_eq!(
            understood("SIDECORE fio file read {\"a\": 1}"),
            Message::Fio { window, json: "{\"a\": 1}" }
        );
        assert_eq!(
            understood("SIDECORE value verdict false ./x"),
            Message::Value { key: "verdict", text: "false ./x" }
        );
        assert_eq!(understood("SIDECORE finished search"), Message::Finished { order: "search" });
        assert_eq!(understood("SIDECORE done\r"), Message::Done);
    }

    #[test]
    fn foreign_lines_are_passed_over_and_garbled_ones_refused() {
        assert_eq!(parse("[    0.1] Linux version").unwrap(), None);
        assert_eq!(parse("").unwrap(), None);
        assert_eq!(understood("\u{1b}c\u{1b}[?7lSIDECORE done"), Message::Done);
        assert!(parse("SIDECORE verified ram tree perhaps").is_err());
        assert!(parse("SIDECORE window ram read middle").is_err());
        assert!(parse("SIDECORE unheard of").is_err());
    }
}
