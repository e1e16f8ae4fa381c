//! Settings of the next boot, in files that are this program's own.

use crate::disk;
use crate::nic;
use crate::report::{Finding, State};
use crate::system::System;
use crate::tree::Tree;
use anyhow::{Result, ensure};

const MODPROBE: &str = "/etc/modprobe.d/sidecore-guest-tune.conf";
const GRUB: &str = "/etc/default/grub.d/sidecore-guest-tune.cfg";
const SYSCTL: &str = "/etc/sysctl.d/90-sidecore-guest-tune.conf";
/// The files with the commands that make the system read them.
const FILES: [(&str, Option<&str>); 3] =
    [(MODPROBE, Some("update-initramfs -u")), (GRUB, Some("update-grub")), (SYSCTL, None)];
/// The first line of each file.
const MARK: &str = "# Written by sidecore-guest-tune, which replaces and removes this file.\n";
const COMMAND_LINE: &str = "/proc/cmdline";
const HUGE_PAGES: &str = "/proc/sys/vm/nr_hugepages";
const IDLE: &str = "idle=poll";

/// The wanted settings of the next boot.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Next {
    /// The number of queues of each disk that are polled.
    pub(crate) poll_queues: u32,
    /// Whether NICs send without interrupts.
    pub(crate) is_quiet: bool,
    /// Whether to write the kernel's command line.
    pub(crate) has_command_line: bool,
    /// The number of huge pages, or 0 for the system's own.
    pub(crate) huge_pages: u32,
}

/// A parameter of a driver, which has an effect on devices that the driver finds afterwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Parameter {
    pub(crate) driver: &'static str,
    pub(crate) name: &'static str,
}

impl Parameter {
    /// The file with the parameter of the running kernel, which the driver's version may lack.
    pub(crate) fn path(self) -> String {
        format!("/sys/module/{}/parameters/{}", self.driver, self.name)
    }

    /// Whether the driver is a part of the kernel's image. A module has a state of its own.
    pub(crate) fn is_built_in(self, tree: &Tree) -> bool {
        !tree.exists(&format!("/sys/module/{}/initstate", self.driver))
    }

    /// The value of the next boot, and the file that has it.
    pub(crate) fn of_next_boot(self, tree: &Tree) -> Option<(u32, &'static str)> {
        let option = format!("options {} {}=", self.driver, self.name);
        let word = format!("{}.{}=", self.driver, self.name);
        let of_module = tree.content(MODPROBE).unwrap_or_default();
        let of_module = of_module.lines().find_map(|line| line.strip_prefix(&option)?.parse().ok());
        let of_module = of_module.map(|value| (value, MODPROBE));
        of_module.or_else(|| {
            let line = tree.content(GRUB)?;
            let mut words = line.split([' ', '"', '\n']);
            let value = words.find_map(|found| found.strip_prefix(&word)?.parse().ok());
            value.map(|value| (value, GRUB))
        })
    }
}

/// Writes the files, and returns sentences about those that have changed.
pub(crate) fn write(system: &System, next: &Next) -> Result<Vec<String>> {
    let tree = &system.tree;
    let mut parameters: Vec<(Parameter, u32)> = disk::parameters(system)
        .into_iter()
        .map(|parameter| (parameter, next.poll_queues))
        .collect();
    parameters.extend(nic::parameter(tree, next).map(|parameter| (parameter, 0)));
    let mut words = vec![IDLE.to_owned()];
    let word = |(of, value): &(Parameter, u32)| format!("{}.{}={value}", of.driver, of.name);
    words.extend(parameters.iter().map(word));
    parameters.retain(|(parameter, _)| !parameter.is_built_in(tree));
    let option =
        |(of, value): &(Parameter, u32)| format!("options {} {}={value}\n", of.driver, of.name);
    let options: String = parameters.iter().map(option).collect();
    let variable = "GRUB_CMDLINE_LINUX_DEFAULT";
    let line = format!("{variable}=\"${variable} {}\"\n", words.join(" "));
    let contents = [
        // A file with options that are no longer wanted is replaced as well.
        (!options.is_empty() || is_own(tree, MODPROBE)).then_some(options),
        next.has_command_line.then_some(line),
        (next.huge_pages > 0).then(|| format!("vm.nr_hugepages = {}\n", next.huge_pages)),
    ];
    let mut said = Vec::new();
    for ((path, command), content) in FILES.into_iter().zip(contents) {
        let Some(content) = content.map(|content| format!("{MARK}{content}")) else { continue };
        let found = system.tree.content(path);
        if found.as_ref() == Some(&content) {
            continue;
        }
        ensure!(
            found.is_none_or(|found| found.starts_with(MARK)),
            "{path} was not written by this program: move its lines to another file, and remove it"
        );
        system.tree.replace(path, &content)?;
        said.push(sentence("wrote", path, command));
    }
    if next.has_command_line && !system.tree.exists("/etc/default/grub") {
        said.push(format!(
            "this guest has no GRUB: add to the kernel's command line: {}",
            words.join(" ")
        ));
    }
    Ok(said)
}

/// Removes the files, and returns sentences about them.
pub(crate) fn remove(tree: &Tree) -> Result<Vec<String>> {
    let mut said = Vec::new();
    for (path, command) in FILES {
        if is_own(tree, path) {
            tree.remove(path)?;
            said.push(sentence("removed", path, command));
        }
    }
    Ok(said)
}

/// Whether this program has written the file.
fn is_own(tree: &Tree, path: &str) -> bool {
    tree.content(path).is_some_and(|found| found.starts_with(MARK))
}

fn sentence(verb: &str, path: &str, command: Option<&str>) -> String {
    let run = command.map(|command| format!("run `{command}`, and ")).unwrap_or_default();
    format!("{verb} {path}: {run}reboot")
}

/// The state of settings that only a boot changes.
pub(crate) fn status(tree: &Tree) -> Vec<Finding> {
    let has_word = |text: Option<String>| {
        text.is_some_and(|text| text.split([' ', '"', '\n']).any(|word| word == IDLE))
    };
    let idle = Finding::new("CPUs", "idle=poll");
    let idle = if has_word(tree.content(COMMAND_LINE)) {
        idle.is(State::InForce, "a CPU without work polls")
    } else if has_word(tree.content(GRUB)) {
        idle.is(State::AfterReboot, format!("by {GRUB}"))
    } else {
        idle.is(State::Off, "")
    };
    let pages = Finding::new("memory", "huge pages");
    let pages = match (tree.number(HUGE_PAGES), tree.content(SYSCTL)) {
        (None, _) => pages.cannot("the kernel is built without CONFIG_HUGETLBFS"),
        (Some(0), Some(_)) => pages.is(State::AfterReboot, format!("by {SYSCTL}")),
        (Some(0), None) => pages.is(State::Off, ""),
        (Some(count), _) => pages.is(State::InForce, count.to_string()),
    };
    vec![idle, pages]
}
