//! nvme-cli's commands to the physical function: a guest makes a volume and lets a virtual function
//! show it.

use super::Found;
use super::commands::{Cli, succeeded};
use crate::checks::Checks;
use crate::config::POOL;
use crate::guest::Guest;
use crate::session::Session;
use anyhow::{Context, Result, ensure};

/// The second virtual function, and the namespace of its volume, by the order of the devices in the
/// configuration. The first namespace is the whole store.
const CONTROLLER: u64 = 2;
const NAMESPACE: u64 = 3;
/// Secondary Controller States (NVMe base 2.0, figure 278).
const OFFLINE: u64 = 0;
const ONLINE: u64 = 1;
/// Actions of Virtualization Management (NVMe base 2.0, 5.29).
const TAKE_OFFLINE: u64 = 7;
const TAKE_ONLINE: u64 = 9;

/// Makes a volume of so many MiB, and attaches it to the second virtual function in place of that
/// function's volume. Returns the volume's namespace.
pub(super) fn make(
    session: &mut Session<'_>,
    guest: &mut Guest,
    found: &Found,
    checks: &mut Checks,
    mib: u64,
) -> Result<u64> {
    let mut cli = Cli { session, guest, found, checks };
    let before = cli.namespaces()?;
    let states = cli.states()?;
    let ok = before == [1, 2, NAMESPACE] && states == [(1, ONLINE), (CONTROLLER, ONLINE)];
    let what = "the physical function's host sees all volumes, and all virtual functions";
    cli.note(
        what,
        ok,
        format!("namespaces {before:?}; secondary controllers and their states {states:?}"),
    );

    let controller = cli.controller();
    let (bytes, format) = cli.format()?;
    let blocks = (mib << 20) / bytes;
    let create = format!("create-ns {controller} --nsze={blocks} --ncap={blocks} --flbas={format}");
    let made = number_behind(&cli.run(&create)?, "nsid:")?;
    let volume = format!("ns-{made}");
    let volumes = cli.session.sidecore().run(&["volume", "--controller", POOL, "list"])?;
    let ok = cli.namespaces()?.contains(&made) && volumes.contains(&volume);
    cli.note(
        "nvme create-ns makes a volume",
        ok,
        format!("namespace {made}, volume {volume} of {mib} MiB"),
    );

    cli.run(&format!("virt-mgmt {controller} --cntlid={CONTROLLER} --act={TAKE_OFFLINE}"))?;
    let offline = cli.states()?;
    cli.run(&format!("virt-mgmt {controller} --cntlid={CONTROLLER} --act={TAKE_ONLINE}"))?;
    let online = cli.states()?;
    let ok = offline == [(1, ONLINE), (CONTROLLER, OFFLINE)] && online == states;
    cli.note(
        "nvme virt-mgmt takes a function offline and online",
        ok,
        format!("{offline:?}, then {online:?}"),
    );

    cli.run(&format!(
        "detach-ns {controller} --namespace-id={NAMESPACE} --controllers={CONTROLLER}"
    ))?;
    cli.run(&format!("attach-ns {controller} --namespace-id={made} --controllers={CONTROLLER}"))?;
    let refused = cli.nvme(&format!("delete-ns {controller} --namespace-id={made}"))?;
    let ok = refused.text("code")? != "0" && cli.namespaces()?.contains(&made);
    let words = format!("{}{}", refused.text("out")?, refused.text("err")?);
    cli.note("nvme delete-ns refuses what a function shows", ok, words);
    Ok(made)
}

/// Attaches the virtual function's own volume again, and deletes the other volume.
pub(super) fn unmake(
    session: &mut Session<'_>,
    guest: &mut Guest,
    found: &Found,
    checks: &mut Checks,
    made: u64,
) -> Result<()> {
    let mut cli = Cli { session, guest, found, checks };
    let controller = cli.controller();
    cli.run(&format!("detach-ns {controller} --namespace-id={made} --controllers={CONTROLLER}"))?;
    cli.run(&format!(
        "attach-ns {controller} --namespace-id={NAMESPACE} --controllers={CONTROLLER}"
    ))?;
    cli.run(&format!("delete-ns {controller} --namespace-id={made}"))?;
    let volumes = cli.session.sidecore().run(&["volume", "--controller", POOL, "list"])?;
    let (left, gone) = (cli.namespaces()?, !volumes.contains(&format!("ns-{made}")));
    cli.note(
        "nvme delete-ns deletes the volume",
        gone && !left.contains(&made),
        format!("left: {left:?}"),
    );
    Ok(())
}

impl Cli<'_, '_> {
    fn controller(&self) -> String {
        format!("/dev/{}", self.found.controller)
    }

    /// The output of a command, which must succeed.
    fn run(&mut self, arguments: &str) -> Result<String> {
        let answer = self.nvme(arguments)?;
        Ok(succeeded(&answer).with_context(|| format!("nvme {arguments}"))?.to_owned())
    }

    /// All namespaces, attached or not.
    fn namespaces(&mut self) -> Result<Vec<u64>> {
        let said = self.run(&format!("list-ns {} --all", self.controller()))?;
        numbers_behind(&said, "]:")
    }

    /// The secondary controllers with their states.
    fn states(&mut self) -> Result<Vec<(u64, u64)>> {
        let said = self.run(&format!("list-secondary {}", self.controller()))?;
        let ids = numbers_behind(&said, "Secondary Controller Identifier :")?;
        let states = numbers_behind(&said, "Secondary Controller State :")?;
        ensure!(ids.len() == states.len(), "nvme list-secondary prints '{said}'");
        Ok(ids.into_iter().zip(states).filter(|(id, _)| *id != 0).collect())
    }
}

/// The numbers, in C's notation, that directly follow `key`.
fn numbers_behind(said: &str, key: &str) -> Result<Vec<u64>> {
    let number = |rest: &str| {
        let word: String =
            rest.trim_start().chars().take_while(char::is_ascii_alphanumeric).collect();
        let number = match word.strip_prefix("0x") {
            Some(digits) => u64::from_str_radix(digits, 16),
            None => word.parse(),
        };
        number.with_context(|| format!("no number behind '{key}' in '{said}'"))
    };
    said.split(key).skip(1).map(number).collect()
}

fn number_behind(said: &str, key: &str) -> Result<u64> {
    numbers_behind(said, key)?.first().copied().with_context(|| format!("no '{key}' in '{said}'"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_found_behind_their_words() {
        assert_eq!(numbers_behind("[ 0]:0x1 [ 1]:0x1f", "]:").unwrap(), [1, 31]);
        assert_eq!(number_behind("create-ns: Success, created nsid:4", "nsid:").unwrap(), 4);
        assert!(numbers_behind("nothing", "]:").unwrap().is_empty());
        assert!(numbers_behind("[ 0]:x", "]:").is_err());
        assert!(number_behind("nothing", "nsid:").is_err());
    }
}
