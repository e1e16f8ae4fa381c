//! What a guest says on its serial line. The scripts in `guest` are the other end.

use anyhow::{Context, Result, bail};

/// The beginning or the end of the measured window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Edge {
    Begin,
    End,
}

/// What is measured on which disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Window<'a> {
    pub(crate) disk: &'a str,
    pub(crate) what: &'a str,
}

/// One line of the guest, understood.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Word<'a> {
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
    /// Part of the answer to an order.
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

/// Understands a line; `None` for one that is not meant for us.
pub(crate) fn parse(line: &str) -> Result<Option<Word<'_>>> {
    // Firmware may have left control characters in front.
    let Some((_, said)) = line.split_once("SIDECORE ") else { return Ok(None) };
    let said = said.trim();
    word(said).map(Some).with_context(|| format!("cannot understand the guest's line '{said}'"))
}

fn word(said: &str) -> Result<Word<'_>> {
    let (key, rest) = split(said);
    // Most lines name a disk next, and say the rest about it.
    let (disk, about) = split(rest);
    Ok(match key {
        "booted" => Word::Booted { release: rest },
        "tree" => Word::Tree { files: disk, kib: about },
        "disk" => {
            let (device, about) = split(about);
            let (virtio, _) = split(about);
            Word::Disk { disk, device, virtio }
        }
        "step" => Word::Step { disk, what: about },
        "verified" => {
            let (what, verdict) = split(about);
            let (verdict, complaint) = split(verdict);
            let complaint = match verdict {
                "true" => None,
                "false" => Some(complaint),
                _ => bail!("a verdict is true or false"),
            };
            Word::Verified { disk, what, complaint }
        }
        "window" => {
            let (window, about) = window(rest);
            Word::Window { window, edge: edge(about)? }
        }
        "interrupts" => {
            let (window, about) = window(rest);
            let (which, line) = split(about);
            Word::Interrupts { window, edge: edge(which)?, line }
        }
        "stat" => {
            let (window, about) = window(rest);
            let (which, line) = split(about);
            Word::Stat { window, edge: edge(which)?, line }
        }
        "fio" => {
            let (window, json) = window(rest);
            Word::Fio { window, json }
        }
        "value" => Word::Value { key: disk, text: about },
        "finished" => Word::Finished { order: rest },
        "failed" => Word::Failed { why: rest },
        "done" => Word::Done,
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

    fn understood(line: &str) -> Word<'_> {
        parse(line).unwrap().unwrap()
    }

    #[test]
    fn each_word_is_understood() {
        assert_eq!(understood("SIDECORE booted 6.1.0-9"), Word::Booted { release: "6.1.0-9" });
        assert_eq!(
            understood("SIDECORE disk file vda virtio0 1"),
            Word::Disk { disk: "file", device: "vda", virtio: "virtio0" }
        );
        assert_eq!(understood("SIDECORE step ram mkfs.ext4"), Word::Step { disk: "ram", what: "mkfs.ext4" });
        assert_eq!(
            understood("SIDECORE verified ram tree true"),
            Word::Verified { disk: "ram", what: "tree", complaint: None }
        );
        assert_eq!(
            understood("SIDECORE verified ram read false ./x: FAILED"),
            Word::Verified { disk: "ram", what: "read", complaint: Some("./x: FAILED") }
        );
        let window = Window { disk: "file", what: "read" };
        assert_eq!(understood("SIDECORE window file read end"), Word::Window { window, edge: Edge::End });
        assert_eq!(
            understood("SIDECORE interrupts file read begin 24: 3 PCI-MSI virtio0-req.0"),
            Word::Interrupts { window, edge: Edge::Begin, line: "24: 3 PCI-MSI virtio0-req.0" }
        );
        assert_eq!(understood("SIDECORE fio file read {\"a\": 1}"), Word::Fio { window, json: "{\"a\": 1}" });
        assert_eq!(understood("SIDECORE value verdict false ./x"), Word::Value { key: "verdict", text: "false ./x" });
        assert_eq!(understood("SIDECORE finished search"), Word::Finished { order: "search" });
        assert_eq!(understood("SIDECORE done\r"), Word::Done);
    }

    #[test]
    fn foreign_lines_are_passed_over_and_garbled_ones_refused() {
        assert_eq!(parse("[    0.1] Linux version").unwrap(), None);
        assert_eq!(parse("").unwrap(), None);
        assert_eq!(understood("\u{1b}c\u{1b}[?7lSIDECORE done"), Word::Done);
        assert!(parse("SIDECORE verified ram tree perhaps").is_err());
        assert!(parse("SIDECORE window ram read middle").is_err());
        assert!(parse("SIDECORE unheard of").is_err());
    }
}
