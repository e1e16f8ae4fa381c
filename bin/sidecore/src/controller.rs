//! `sidecore controller`.

use std::path::PathBuf;

use anyhow::Result;
use clap::Subcommand;
use sidecore_control::config::size;
use sidecore_control::report::{ControllerReport, FunctionReport, SpaceReport};
use sidecore_control::{Client, Controllers, Place, Share, offline};

use crate::flags::FormatFlags;
use crate::pick::{self, OnController};
use crate::table::Table;
use crate::units::{bytes, percent, short, time};
use crate::{print, print_json, volume};

/// The arguments of `sidecore controller`.
pub(crate) type Arguments = OnController<Command>;

#[derive(Subcommand)]
pub(crate) enum Command {
    /// List the controllers.
    List,
    /// Show a controller: space, fragmentation, translation, functions, and recent events.
    Show,
    /// Drop extent trees from memory; they are read again as they are needed.
    Prune {
        /// Drop only the tree of this volume.
        #[arg(long, value_name = "NAME")]
        volume: Option<String>,
    },
    /// Empty the sidecores' buffers of translations (BTLB).
    Flush,
    /// Map blocks of one volume to equal blocks of another volume (or of the same one).
    ///
    /// The controller compares the blocks first; blocks that differ stay as they are. Guests may
    /// use both volumes meanwhile.
    Remap {
        /// The blocks that stay, as VOLUME:BLOCK.
        #[arg(value_parser = place)]
        from: Place,
        /// The blocks that are freed for them, as VOLUME:BLOCK.
        #[arg(value_parser = place)]
        to: Place,
        /// The number of blocks.
        count: u64,
    },
    /// Format a file or block device as the store of an empty controller. No daemon may have it
    /// open.
    Format {
        /// The file or block device.
        path: PathBuf,
        #[command(flatten)]
        format: FormatFlags,
        /// Format a store that is not blank, too: its contents are lost.
        #[arg(long)]
        force: bool,
        /// Format the store of a killed daemon whose log of answered changes has not been replayed,
        /// too.
        #[arg(long, requires = "force")]
        accept_loss: bool,
    },
}

fn place(text: &str) -> Result<Place, String> {
    let wrong = || format!("`{text}` is not VOLUME:BLOCK, as in root:2048");
    let (volume, first) = text.rsplit_once(':').ok_or_else(wrong)?;
    Ok(Place { volume: volume.to_owned(), first: first.parse().map_err(|_| wrong())? })
}

pub(crate) fn run(socket: &std::path::Path, arguments: Arguments) -> Result<()> {
    let OnController { controller, json, command } = arguments;
    if let Command::Format { path, format: FormatFlags(spec), force, accept_loss } = &command {
        let give_up = match (force, accept_loss) {
            (false, _) => offline::GiveUp::Nothing,
            (true, false) => offline::GiveUp::Contents,
            (true, true) => offline::GiveUp::Unreplayed,
        };
        offline::format(path, spec, give_up)?;
        return if json {
            print_json(&serde_json::json!(
                { "formatted": path, "block_bytes": spec.block_bytes, "label": spec.label }
            ))
        } else {
            Ok(print(&format!(
                "formatted: {}, in blocks of {}\n",
                path.display(),
                size::show(spec.block_bytes.into())
            ))?)
        };
    }
    let client = Client::new(socket)?;
    if matches!(command, Command::List) {
        return list(&client.all_controllers()?, json);
    }
    let report = pick::controller(&client, controller.as_deref())?;
    let name = report.name.as_str();
    let done = match command {
        Command::Show => return show(&client, &report, json),
        Command::Prune { volume } => {
            client.prune(name, volume.as_deref())?;
            "pruned"
        }
        Command::Flush => {
            client.flush_btlb(name)?;
            "flushed"
        }
        Command::Remap { from, to, count } => {
            client.share(name, &Share { from, to, count })?;
            "remapped"
        }
        Command::List | Command::Format { .. } => return Ok(()),
    };
    if json {
        print_json(&serde_json::json!({ "done": done }))
    } else {
        Ok(print(&format!("{done}\n"))?)
    }
}

fn list(all: &Controllers, json: bool) -> Result<()> {
    if json {
        return print_json(all);
    }
    let controllers = &all.controllers;
    let mut table = Table::new(&[
        "NAME",
        "STATE",
        "STORE",
        ">SIZE",
        ">FREE",
        ">BLOCK",
        ">VOLUMES",
        ">FUNCTIONS",
        ">TREES",
        "LABEL",
    ]);
    for controller in controllers {
        table.row([
            controller.name.clone(),
            state(controller).to_owned(),
            controller.store.clone(),
            size::show(controller.capacity_bytes),
            bytes(controller.space.free_bytes),
            size::show(controller.block_bytes.into()),
            controller.volumes.to_string(),
            controller.functions.len().to_string(),
            bytes(controller.tree_memory.used_bytes),
            controller.label.clone(),
        ]);
    }
    for closed in &all.closed {
        let known = [&closed.name, closed.state.word(), &closed.store];
        table.row(known.into_iter().chain(["-"; 6]).map(str::to_owned));
    }
    let mut text = table.render();
    for closed in &all.closed {
        text.push_str(&format!("{closed}\n"));
    }
    for controller in controllers {
        if let Some(percent) = controller.nearly_full_percent {
            text.push_str(&format!("{} is nearly full: {percent} % are in use\n", controller.name));
        }
        if let Some(reason) = &controller.reason {
            text.push_str(&format!("{} is read-only: {reason}\n", controller.name));
        }
    }
    Ok(print(&text)?)
}

fn state(controller: &ControllerReport) -> &'static str {
    match (controller.read_only, controller.damage.is_empty()) {
        _ if controller.full.is_some() => "full",
        (true, _) => "read-only",
        (false, false) => "damaged",
        (false, true) => "fine",
    }
}

fn show(client: &Client, report: &ControllerReport, json: bool) -> Result<()> {
    if json {
        return print_json(report);
    }
    let allocated = client.volumes(&report.name)?.iter().map(|volume| volume.allocated_bytes).sum();
    let mut text = about(report, allocated).render();
    text.push_str(&space(&report.space));
    text.push('\n');
    text.push_str(&translation(report).render());
    if !report.functions.is_empty() {
        text.push('\n');
        text.push_str(&functions(&report.functions).render());
    }
    for damage in &report.damage {
        text.push_str(&format!("\ndamaged: {damage}"));
    }
    if !report.events.is_empty() {
        text.push_str("\nlately:\n");
    }
    for event in &report.events {
        let times =
            if event.times > 1 { format!(" ({} times)", event.times) } else { String::new() };
        text.push_str(&format!("  {}  {}{times}\n", time(event.at_unix_s), event.what));
    }
    Ok(print(&text)?)
}

fn about(report: &ControllerReport, allocated_bytes: u64) -> Table {
    let mut table = Table::new(&["controller", &report.name]);
    let mut line = |name: &str, value: String| table.row([name.to_owned(), value]);
    let state = match &report.reason {
        Some(reason) => format!("read-only: {reason}"),
        None if report.full.is_some() => {
            format!("full: {}", report.full.as_deref().unwrap_or_default())
        }
        None => state(report).to_owned(),
    };
    line("state", state);
    line("store", format!("{}, {}", report.store, size::show(report.capacity_bytes)));
    line("label", if report.label.is_empty() { "-".to_owned() } else { report.label.clone() });
    line("block size", size::show(report.block_bytes.into()));
    line("volumes", report.volumes.to_string());
    let provisioned = format!(
        "{} ({} of the store)",
        bytes(report.provisioned_bytes),
        percent(report.provisioned_bytes, report.space.total_bytes)
    );
    line("provisioned", provisioned);
    line("extents", report.extents.to_string());
    line("fragmentation", volume::fragmentation(report.extents, allocated_bytes));
    let memory = &report.tree_memory;
    line(
        "tree memory",
        format!("{} of at most {}", bytes(memory.used_bytes), size::show(memory.max_bytes)),
    );
    line("commits", report.commits.to_string());
    table
}

/// Draws a bar of the uses of the space, and lists the numbers.
fn space(space: &SpaceReport) -> String {
    const WIDTH: u64 = 60;
    let parts = [
        ('#', "data", space.data_bytes),
        ('m', "metadata", space.metadata_bytes),
        ('r', "reserved", space.reserved_bytes),
        ('w', "being written", space.granted_bytes),
        ('p', "pending", space.pending_bytes),
        ('.', "free", space.free_bytes),
    ];
    let mut bar = String::new();
    let mut before = 0_u64;
    for (letter, _, bytes) in parts {
        before = before.saturating_add(bytes);
        // The end of a part is rounded and not its size, so that rounding errors do not add up.
        let end = u128::from(before) * u128::from(WIDTH) / u128::from(space.total_bytes.max(1));
        while (bar.len() as u128) < end.min(u128::from(WIDTH)) {
            bar.push(letter);
        }
    }
    let numbers = parts.iter().filter(|(_, _, bytes)| *bytes > 0).map(|(letter, name, part)| {
        format!(
            "  {letter} {name:<14}{:>10}{:>8}\n",
            bytes(*part),
            percent(*part, space.total_bytes)
        )
    });
    format!("\n[{bar}] {} in all\n{}", bytes(space.total_bytes), numbers.collect::<String>())
}

/// The sources of translations, with their counts.
fn translation(report: &ControllerReport) -> Table {
    let counts = &report.translation;
    let sum = |count: fn(&FunctionReport) -> u64| {
        report.functions.iter().map(count).fold(0, u64::saturating_add)
    };
    let last = sum(|function| function.last_hits).max(counts.last_hits);
    let looked_up = counts.btlb_hits.saturating_add(counts.walks);
    let all = last.saturating_add(looked_up);
    let per_walk =
        if counts.walks == 0 { 0.0 } else { counts.nodes_visited as f64 / counts.walks as f64 };
    let mut table = Table::new(&["translation", ">COUNT", ">RATE"]);
    let mut line = |name: &str, number: u64, rate: String| {
        table.row([name.to_owned(), number.to_string(), rate])
    };
    line("in the last extent", last, percent(last, all));
    line("in the BTLB", counts.btlb_hits, percent(counts.btlb_hits, looked_up));
    line("walked", counts.walks, format!("{} nodes each", short(per_walk)));
    line("misses of writes", sum(|function| function.misses), String::new());
    line("misses of pruned parts", sum(|function| function.prune_misses), String::new());
    line("rewalks", sum(|function| function.rewalks), String::new());
    line("nodes pruned", report.pruned_nodes, String::new());
    table
}

fn functions(functions: &[FunctionReport]) -> Table {
    let mut table = Table::new(&[
        ">VF",
        "VOLUME",
        ">WEIGHT",
        ">QUEUES",
        ">DEPTH",
        ">NODES",
        ">EXTENTS",
        ">MAPPED",
        ">PRUNED",
        ">LAST%",
        ">MISSES",
        ">REWALKS",
        ">THROTTLED",
        ">STALLED",
        "LIMITS",
    ]);
    for function in functions {
        table.row([
            function.id.to_string(),
            function.volume.clone(),
            function.weight.to_string(),
            function.channels.to_string(),
            function.tree.depth.to_string(),
            function.tree.nodes.to_string(),
            function.tree.extents.to_string(),
            bytes(function.tree.mapped_bytes),
            bytes(function.tree.pruned_bytes),
            percent(function.last_hits, function.last_hits.saturating_add(function.translations)),
            function.misses.saturating_add(function.prune_misses).to_string(),
            function.rewalks.to_string(),
            function.throttled.to_string(),
            function.stalled.to_string(),
            limits(function),
        ]);
    }
    table
}

fn limits(function: &FunctionReport) -> String {
    let mut words = Vec::new();
    let rates = [
        ("read", function.read_iops, function.read_bps),
        ("write", function.write_iops, function.write_bps),
    ];
    for (word, iops, bps) in rates {
        words.extend(iops.map(|iops| format!("{word} {}/s", short(iops as f64))));
        words.extend(bps.map(|bps| format!("{word} {}/s", bytes(bps))));
    }
    if function.read_only {
        words.push("read-only".to_owned());
    }
    if words.is_empty() { "-".to_owned() } else { words.join(", ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bar_has_its_full_length_for_any_use() {
        let full = SpaceReport {
            total_bytes: 600,
            free_bytes: 599,
            data_bytes: 1,
            ..SpaceReport::default()
        };
        let text = space(&full);
        assert!(text.starts_with(&format!("\n[{}]", ".".repeat(60))), "{text}");
        let half = SpaceReport {
            total_bytes: 600,
            free_bytes: 290,
            data_bytes: 300,
            metadata_bytes: 10,
            ..SpaceReport::default()
        };
        let text = space(&half);
        assert!(
            text.starts_with(&format!("\n[{}m{}] 600B in all\n", "#".repeat(30), ".".repeat(29))),
            "{text}"
        );
        assert!(text.contains("  # data                300B   50.0%\n"), "{text}");
        assert!(space(&SpaceReport::default()).starts_with("\n[] 0B"));
    }

    #[test]
    fn places_are_volumes_with_blocks() {
        assert_eq!(place("root:12").unwrap(), Place { volume: "root".to_owned(), first: 12 });
        for wrong in ["root", "root:", ":x", "root:-1"] {
            assert!(place(wrong).is_err(), "{wrong}");
        }
    }
}
