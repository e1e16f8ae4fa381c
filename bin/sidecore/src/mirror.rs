//! `sidecore mirror`: stores of several legs that hold the same bytes.

use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use clap::Subcommand;
use sidecore_control::config::size;
use sidecore_control::offline::{MirrorOptions, create_mirror};
use sidecore_control::report::{LegReport, LegWord, MirrorReport};
use sidecore_control::{Client, Config, Depth, Mirrors, RepairOfLeg};

use crate::table::Table;
use crate::{print, print_json};

#[derive(Subcommand)]
enum Command {
    /// List the mirrors in use, and their legs.
    List,
    /// Make the mirror that a configuration has, while no daemon has its stores open.
    ///
    /// The start of each leg is overwritten. Behind it the first leg keeps its bytes, and the
    /// daemon copies them to the others.
    Create {
        /// The name of the store of type `mirror`.
        mirror: String,
        /// The configuration file.
        #[arg(long, value_name = "FILE")]
        config: PathBuf,
        /// Make it of this leg only, and others that are named. By default all legs are made.
        #[arg(long = "leg", value_name = "STORE")]
        legs: Vec<String>,
        /// The unit in which legs are compared and copied, a power of two. By default 1MiB, and
        /// more if there were too many.
        #[arg(long, value_name = "SIZE", value_parser = size::parse)]
        region_size: Option<u64>,
        /// The stores hold the same bytes already, for instance because all are blank files:
        /// nothing is copied.
        #[arg(long)]
        equal: bool,
        /// Overwrite headers of mirrors.
        #[arg(long)]
        force: bool,
    },
    /// Make a store a new leg, and copy everything to it. It is one of the configured `legs`.
    Add {
        /// The mirror.
        mirror: String,
        /// The store, which is overwritten.
        store: String,
    },
    /// Let a leg go for good: the mirror never waits for it again.
    Remove {
        /// The mirror.
        mirror: String,
        /// The leg, by its store or its number.
        leg: String,
    },
    /// Use a leg again that has failed or was missing. What it missed is copied to it.
    Attach {
        /// The mirror.
        mirror: String,
        /// The store of the leg.
        store: String,
    },
    /// Write the bytes of one leg to another, to undo damage that the mirror cannot see.
    Repair {
        /// The mirror.
        mirror: String,
        /// The leg that is right, by its store or its number.
        #[arg(long, value_name = "LEG")]
        from: String,
        /// The leg that is overwritten, by its store or its number.
        #[arg(long, value_name = "LEG")]
        to: String,
        /// The start on the mirror, a multiple of its block size.
        #[arg(long, value_name = "SIZE", default_value = "0", value_parser = size::parse)]
        offset: u64,
        /// The number of bytes. By default all to the end.
        #[arg(long, value_name = "SIZE", value_parser = size::parse)]
        length: Option<u64>,
    },
    /// Let half of the legs go on without the others, once.
    ///
    /// The other legs must not be in use elsewhere, also not later: what is written there is lost.
    Permit {
        /// The mirror.
        mirror: String,
        /// The numbers of all legs that are missing, separated by commas. If others are missing
        /// now, the permission is refused.
        #[arg(long, value_name = "LEGS", required = true, value_delimiter = ',')]
        without: Vec<usize>,
    },
}

#[derive(clap::Args)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    command: Command,
    /// Print the control API's JSON instead of text.
    #[arg(long, global = true)]
    json: bool,
}

pub(crate) fn run(socket: &Path, arguments: Arguments) -> Result<()> {
    let json = arguments.json;
    let client = || Client::new(socket);
    match arguments.command {
        Command::List => return show(client()?.mirrors()?, json),
        Command::Create { mirror, config, legs, region_size, equal, force } => {
            let options = MirrorOptions {
                uuid: random()?,
                legs,
                region_bytes: region_size,
                are_equal: equal,
                force,
            };
            return create(&config, &mirror, &options);
        }
        Command::Add { mirror, store } => client()?.add_leg(&mirror, &store)?,
        Command::Remove { mirror, leg } => client()?.remove_leg(&mirror, &leg)?,
        Command::Attach { mirror, store } => client()?.attach_leg(&mirror, &store)?,
        Command::Repair { mirror, from, to, offset, length } => {
            let repair = RepairOfLeg { from, to, offset_bytes: offset, len_bytes: length };
            client()?.repair_leg(&mirror, &repair)?;
        }
        Command::Permit { mirror, without } => client()?.permit_mirror(&mirror, &without)?,
    }
    Ok(())
}

fn random() -> Result<[u8; 16]> {
    let mut uuid = [0; 16];
    File::open("/dev/urandom")?.read_exact(&mut uuid)?;
    Ok(uuid)
}

fn create(config: &Path, mirror: &str, options: &MirrorOptions) -> Result<()> {
    let Ok(config) = Config::load(config, Depth::Text).map_err(|faults| eprintln!("{faults}"))
    else {
        bail!("nothing was made");
    };
    let made = create_mirror(&config.spec, mirror, options)?;
    let (size, region) = (size::show(made.capacity_bytes), size::show(made.region_bytes));
    let legs: Vec<String> =
        made.legs.iter().enumerate().map(|(leg, store)| format!("{leg} in \"{store}\"")).collect();
    let legs = legs.join(", ");
    Ok(print(&format!("made: mirror \"{mirror}\" of {size}, regions of {region}, leg {legs}\n"))?)
}

fn show(mirrors: Vec<MirrorReport>, json: bool) -> Result<()> {
    if json {
        return print_json(&Mirrors { mirrors });
    }
    Ok(print(&text(&mirrors))?)
}

fn text(mirrors: &[MirrorReport]) -> String {
    if mirrors.is_empty() {
        return "no mirror is in use\n".to_owned();
    }
    let mut table =
        Table::new(&["MIRROR", "STATE", ">EPOCH", "READ", ">DIRTY", ">COPIED", "RATE", "WITNESS"]);
    let mut legs = Table::new(&["MIRROR", "LEG", "STORE", "STATE", ">TO COPY"]);
    let mut notes = String::new();
    for mirror in mirrors {
        let dirty = mirror.dirty_regions.saturating_mul(mirror.region_bytes);
        table.row([
            mirror.name.clone(),
            mirror.state.word().to_owned(),
            mirror.epoch.to_string(),
            mirror.read.map_or_else(|| "-".to_owned(), |leg| format!("leg {leg}")),
            size::show(dirty),
            size::show(mirror.copied_bytes),
            format!("{}/s", size::show(mirror.copy_bps)),
            mirror.witness.clone(),
        ]);
        if let Some(reason) = &mirror.reason {
            notes.push_str(&format!("mirror \"{}\": {reason}\n", mirror.name));
        }
        notes.push_str(&question(mirror));
        for leg in &mirror.legs {
            legs.row([
                mirror.name.clone(),
                leg.leg.map_or_else(|| "-".to_owned(), |leg| leg.to_string()),
                leg.store.clone().unwrap_or_else(|| "-".to_owned()),
                leg.state.word().to_owned(),
                if leg.state == LegWord::Copying {
                    size::show(leg.to_copy_bytes)
                } else {
                    "-".to_owned()
                },
            ]);
            notes.push_str(&remark(mirror, leg));
        }
    }
    let gap = if notes.is_empty() { "" } else { "\n" };
    format!("{}\n{}{gap}{notes}", table.render(), legs.render())
}

/// The command that has a mirror go on without the legs that are missing, if it asks for that.
fn question(mirror: &MirrorReport) -> String {
    if mirror.asks_without.is_empty() {
        return String::new();
    }
    let legs: Vec<String> = mirror.asks_without.iter().map(ToString::to_string).collect();
    let (name, legs) = (&mirror.name, legs.join(","));
    format!("if these are not in use elsewhere: sidecore mirror permit {name} --without {legs}\n")
}

/// The line below the tables about a leg that is not as it should be.
fn remark(mirror: &MirrorReport, leg: &LegReport) -> String {
    let Some(reason) = &leg.reason else { return String::new() };
    let name = match (&leg.store, leg.leg) {
        (Some(store), _) => format!("\"{store}\""),
        (None, number) => number.unwrap_or(0).to_string(),
    };
    format!("leg {name} of mirror \"{}\" is {}: {reason}\n", mirror.name, leg.state.word())
}

#[cfg(test)]
mod tests {
    use sidecore_control::report::MirrorState;

    use super::*;

    #[test]
    fn a_list_has_the_legs_with_their_states_and_reasons() {
        let leg = |number, store: &str, state| LegReport {
            leg: Some(number),
            store: Some(store.to_owned()),
            state,
            ..LegReport::default()
        };
        let copying = LegReport { to_copy_bytes: 3 << 20, ..leg(1, "b", LegWord::Copying) };
        let failed =
            LegReport { reason: Some("errno 5".to_owned()), ..leg(2, "c", LegWord::Failed) };
        let mirror = MirrorReport {
            name: "m".to_owned(),
            state: MirrorState::Running,
            epoch: 7,
            read: Some(0),
            witness: "none".to_owned(),
            region_bytes: 1 << 20,
            dirty_regions: 4,
            copy_bps: 64 << 20,
            legs: vec![leg(0, "a", LegWord::InSync), copying, failed],
            ..MirrorReport::default()
        };
        assert_eq!(
            text(&[mirror]),
            "MIRROR  STATE    EPOCH  READ   DIRTY  COPIED  RATE     WITNESS\n\
             m       running      7  leg 0   4MiB      0B  64MiB/s  none\n\
             \n\
             MIRROR  LEG  STORE  STATE    TO COPY\n\
             m       0    a      in-sync        -\n\
             m       1    b      copying     3MiB\n\
             m       2    c      failed         -\n\
             \n\
             leg \"c\" of mirror \"m\" is failed: errno 5\n"
        );
        assert_eq!(text(&[]), "no mirror is in use\n");
        let waiting = MirrorReport {
            name: "m".to_owned(),
            reason: Some("legs 1 and 3 missing".to_owned()),
            asks_without: vec![1, 3],
            ..MirrorReport::default()
        };
        let end = "mirror \"m\": legs 1 and 3 missing\n\
                   if these are not in use elsewhere: sidecore mirror permit m --without 1,3\n";
        assert!(text(&[waiting]).ends_with(end));
    }
}
