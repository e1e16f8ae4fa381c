//! nvme-cli's commands to a function, and the answers that they must get.

use super::{COMMANDS, Found};
use crate::checks::Checks;
use crate::config::{FUNCTION_MIB, POOL, VF};
use crate::guest::{Answer, Guest};
use crate::session::Session;
use anyhow::{Context, Result, ensure};
use serde_json::Value;

const MIB: u64 = 1 << 20;
/// The bits of Identify's Optional NVM Command Support (ONCS) that must be set: Compare, Dataset
/// Management, Write Zeroes.
const ONCS: u64 = 1 << 0 | 1 << 2 | 1 << 3;
/// The number of blocks of 4 KiB that the commands write, compare and deallocate.
const COUNT: u64 = 8;

pub(super) fn run(
    session: &mut Session<'_>,
    guest: &mut Guest,
    found: &Found,
    checks: &mut Checks,
) -> Result<()> {
    let mut cli = Cli { session, guest, found, checks };
    cli.identify()?;
    let bytes = cli.namespace()?;
    cli.compare(bytes)?;
    cli.zeroes(bytes)?;
    cli.give_up(bytes)?;
    cli.health()?;
    cli.reset()
}

/// nvme-cli in the guest, on one function.
pub(super) struct Cli<'c, 'a> {
    pub(super) session: &'c mut Session<'a>,
    pub(super) guest: &'c mut Guest,
    pub(super) found: &'c Found,
    pub(super) checks: &'c mut Checks,
}

impl Cli<'_, '_> {
    pub(super) fn note(&mut self, what: &str, ok: bool, found: impl Into<String>) {
        self.checks.note(self.session, what, ok, found);
    }

    pub(super) fn nvme(&mut self, arguments: &str) -> Result<Answer> {
        self.guest.order(self.session, &format!("nvme {arguments}"))
    }

    /// The JSON output of a command, which must succeed.
    fn json(&mut self, arguments: &str) -> Result<Value> {
        let answer = self.nvme(&format!("{arguments} --output-format=json"))?;
        let said = succeeded(&answer).with_context(|| format!("nvme {arguments}"))?;
        // Some versions print other text before the JSON.
        let from = said.find('{').with_context(|| format!("nvme {arguments} prints '{said}'"))?;
        serde_json::from_str(&said[from..])
            .with_context(|| format!("cannot read the output of nvme {arguments}"))
    }

    fn identify(&mut self) -> Result<()> {
        let controller = format!("/dev/{}", self.found.controller);
        let identity = self.json(&format!("id-ctrl {controller}"))?;
        let oncs = number(&identity, "oncs")?;
        let name = |key: &str| identity[key].as_str().unwrap_or_default().trim().to_owned();
        let (model, serial, subsystem) = (name("mn"), name("sn"), name("subnqn"));
        // Entries of 64 bytes and of 16, as powers of two: the required and the maximum size.
        let entries = number(&identity, "sqes")? == 0x66 && number(&identity, "cqes")? == 0x44;
        let ok = entries && oncs & ONCS == ONCS && !model.is_empty() && !serial.is_empty();
        let found = format!("{model}, serial {serial}, {subsystem}, ONCS {oncs:#x}");
        self.note("nvme id-ctrl", ok && subsystem.starts_with("nqn."), found);

        let list = self.json(&format!("list-ctrl {controller}"))?;
        let ids = controllers(&list)?;
        let ours = number(&identity, "cntlid")?;
        self.note(
            "nvme list-ctrl has the controller itself",
            ids.contains(&ours),
            format!("{ids:?}, ours is {ours}"),
        );
        Ok(())
    }

    fn id_ns(&mut self) -> Result<Value> {
        self.json(&format!("id-ns /dev/{} --namespace-id=1", self.found.controller))
    }

    /// The size of the namespace's logical blocks in bytes, and the number of that format.
    pub(super) fn format(&mut self) -> Result<(u64, u64)> {
        format_in_use(&self.id_ns()?)
    }

    /// Checks that the namespace is as large as its volume. Returns the size of its logical blocks
    /// in bytes.
    fn namespace(&mut self) -> Result<u64> {
        let identity = self.id_ns()?;
        let blocks = number(&identity, "nsze")?;
        let (bytes, _) = format_in_use(&identity)?;
        let unique = ["nguid", "eui64"].iter().any(|key| {
            identity[key].as_str().is_some_and(|id| {
                id.bytes().any(|digit| digit.is_ascii_hexdigit() && digit != b'0')
            })
        });
        let ok = blocks * bytes == FUNCTION_MIB * MIB && unique;
        let found = format!(
            "{blocks} blocks of {bytes} bytes, NGUID {}",
            identity["nguid"].as_str().unwrap_or("none")
        );
        self.note("nvme id-ns", ok, found);
        Ok(bytes)
    }

    fn compare(&mut self, bytes: u64) -> Result<()> {
        self.stamp()?;
        let compare = format!(
            "compare /dev/{} {} --data-size={}",
            self.found.dev,
            blocks(bytes),
            COUNT * 4096
        );
        let same = self.nvme(&format!("{compare} --data=/tmp/stamp"))?;
        let other = self.nvme(&format!("{compare} --data=/tmp/other"))?;
        let ok = same.text("code")? == "0" && other.text("code")? != "0";
        let words = format!("{}{}", other.text("out")?, other.text("err")?);
        let ok = ok && words.to_lowercase().contains("compare failure");
        let found = format!("equal: code {}; one byte differs: {words}", same.text("code")?);
        self.note("nvme compare tells equal from different", ok, found);
        Ok(())
    }

    fn zeroes(&mut self, bytes: u64) -> Result<()> {
        self.stamp()?;
        let answer =
            self.nvme(&format!("write-zeroes /dev/{} {}", self.found.dev, blocks(bytes)))?;
        succeeded(&answer).context("nvme write-zeroes")?;
        let left = self.nonzero()?;
        self.note(
            "nvme write-zeroes leaves nothing but zeros",
            left == 0,
            format!("{left} other bytes"),
        );
        Ok(())
    }

    fn give_up(&mut self, bytes: u64) -> Result<()> {
        self.stamp()?;
        let held = self.held()?;
        let (first, count) = (COMMANDS * MIB / bytes, COUNT * 4096 / bytes);
        let dsm = format!(
            "dsm /dev/{} --namespace-id=1 --ad --slbs={first} --blocks={count}",
            self.found.dev
        );
        succeeded(&self.nvme(&dsm)?).context("nvme dsm")?;
        let (left, still) = (self.nonzero()?, self.held()?);
        let ok = left == 0 && held == COUNT * 4096 && still == 0;
        let found = format!(
            "{held} bytes of the store before, {still} after; {left} bytes other than zero"
        );
        self.note("nvme dsm gives blocks back to the store", ok, found);
        Ok(())
    }

    fn health(&mut self) -> Result<()> {
        let log = self.json(&format!("smart-log /dev/{}", self.found.controller))?;
        let [warning, media, reads, writes] =
            ["critical_warning", "media_errors", "host_read_commands", "host_write_commands"]
                .map(|key| number(&log, key));
        let (warning, media, reads, writes) = (warning?, media?, reads?, writes?);
        let found = format!(
            "warning {warning:#x}, {media} media errors, {reads} reads and {writes} writes"
        );
        self.note("nvme smart-log", warning == 0 && media == 0 && reads > 0 && writes > 0, found);
        Ok(())
    }

    fn reset(&mut self) -> Result<()> {
        self.stamp()?;
        let answer = self.nvme(&format!("reset /dev/{}", self.found.controller))?;
        succeeded(&answer).context("nvme reset")?;
        let left = self.nonzero()?;
        let found = format!("{left} of {} random bytes are not zero", COUNT * 4096);
        self.note("nvme reset, and the namespace is as it was", left > 0, found);
        Ok(())
    }

    /// Writes random bytes to the part for the commands.
    fn stamp(&mut self) -> Result<()> {
        self.guest
            .order(self.session, &format!("stamp {} {COUNT}", COMMANDS * MIB / 4096))
            .map(drop)
    }

    /// The number of bytes in that part that are not zero.
    fn nonzero(&mut self) -> Result<u64> {
        let answer = self
            .guest
            .order(self.session, &format!("nonzero {} {COUNT}", COMMANDS * MIB / 4096))?;
        let bytes: u64 = answer.number("bytes")?;
        ensure!(bytes == COUNT * 4096, "the guest read {bytes} bytes, not {}", COUNT * 4096);
        answer.number("nonzero")
    }

    /// The number of bytes in that part that the volume has blocks for.
    fn held(&mut self) -> Result<u64> {
        let extents = self.session.sidecore().extents(POOL, VF, COMMANDS * MIB, COUNT * 4096)?;
        Ok(extents.iter().map(|extent| extent.count).sum())
    }
}

/// The part for the commands, in logical blocks of so many bytes. The count is zero-based.
fn blocks(bytes: u64) -> String {
    format!("--start-block={} --block-count={}", COMMANDS * MIB / bytes, COUNT * 4096 / bytes - 1)
}

pub(super) fn succeeded(answer: &Answer) -> Result<&str> {
    let (code, out, err) = (answer.text("code")?, answer.text("out")?, answer.text("err")?);
    ensure!(code == "0", "ended with {code}: {out} {err}");
    Ok(out)
}

fn format_in_use(identity: &Value) -> Result<(u64, u64)> {
    let format = number(identity, "flbas")? & 0xf;
    let bytes = identity["lbafs"]
        .as_array()
        .and_then(|formats| formats.get(usize::try_from(format).ok()?))
        .and_then(|format| format["ds"].as_u64())
        .map(|log2| 1 << log2);
    Ok((bytes.context("id-ns has no format in use")?, format))
}

/// A number, which some versions print as text if it is large.
fn number(value: &Value, key: &str) -> Result<u64> {
    let value = &value[key];
    let number = value.as_u64().or_else(|| value.as_str()?.trim().parse().ok());
    number.with_context(|| format!("{key} is {value}, no number"))
}

fn controllers(list: &Value) -> Result<Vec<u64>> {
    let entries = list["ctrl_list"].as_array().context("list-ctrl prints no list")?;
    entries.iter().map(|entry| number(entry, "ctrl_id")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn numbers_may_be_text() {
        let value = json!({ "a": 7, "b": "18446744073709551615", "c": "x" });
        assert_eq!(number(&value, "a").unwrap(), 7);
        assert_eq!(number(&value, "b").unwrap(), u64::MAX);
        assert!(number(&value, "c").is_err() && number(&value, "d").is_err());
    }

    #[test]
    fn a_place_is_counted_in_logical_blocks() {
        assert_eq!(blocks(512), "--start-block=344064 --block-count=63");
        assert_eq!(blocks(4096), "--start-block=43008 --block-count=7");
    }

    #[test]
    fn the_list_of_controllers_is_read() {
        assert_eq!(
            controllers(&json!({ "num_ctrl": 1, "ctrl_list": [{ "ctrl_id": 3 }] })).unwrap(),
            [3]
        );
        assert!(controllers(&json!({})).is_err());
    }
}
