//! `sidecore stage`: stages come and go while a disk is in use.

use anyhow::Result;
use clap::Subcommand;
use serde_json::Value;
use sidecore_control::config::keys::{self, Kind};
use sidecore_control::report::{RecordingCounts, RecordingReport, StageChange, StagesReport};
use sidecore_control::{Client, NewStage};

use crate::table::Table;
use crate::{flags, print, print_json, units};

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Print the control API's JSON instead of text.
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Add a stage to a disk in use, until the stage is removed, or the disk, or the daemon ends.
    ///
    /// The guest's requests wait for a moment, which is printed.
    Add {
        /// The disk.
        device: String,
        /// The type of the stage, as in the configuration: delay or fault, for instance.
        stage: String,
        /// The keys of the stage, as in `delay_us=100`.
        #[arg(value_name = "KEY=VALUE")]
        keys: Vec<String>,
        /// The place among the stages that were added; 1 is the first that a request meets.
        #[arg(long, value_name = "NUMBER", default_value_t = 1)]
        position: u64,
    },
    /// Remove a stage that was added.
    Remove {
        /// The disk.
        device: String,
        /// The type of the stage, or its position in the list.
        stage: String,
    },
    /// List the stages of a disk, in the order in which a request meets them.
    List {
        /// The disk.
        device: String,
    },
}

pub(crate) fn run(client: &Client, arguments: Arguments) -> Result<()> {
    let json = arguments.json;
    match arguments.command {
        Command::Add { device, stage, keys, position } => {
            let new = new_stage(&stage, &keys).map_err(anyhow::Error::msg)?;
            let added = client.add_stage(&device, &new.with("position", position))?;
            warn(&client.stages(&device)?, added.position);
            show("added", &added, json)
        }
        Command::Remove { device, stage } => {
            show("removed", &client.remove_stage(&device, &stage)?, json)
        }
        Command::List { device } => {
            let stages = client.stages(&device)?;
            if json { print_json(&stages) } else { Ok(print(&list(&stages))?) }
        }
    }
}

fn show(what: &str, change: &StageChange, json: bool) -> Result<()> {
    if json {
        return print_json(change);
    }
    let StageChange { device, word, position, queues, pause_ns } = change;
    let pause = match queues {
        0 => "no queue was running".to_owned(),
        _ => {
            let queues = units::count(*queues, "queue");
            format!("{queues} paused for {} us", units::micros(*pause_ns as f64))
        }
    };
    Ok(print(&format!("{what}: \"{word}\" at position {position} of \"{device}\"; {pause}\n"))?)
}

/// Warns of a stage that was added and does not do what it is for.
fn warn(stages: &StagesReport, position: usize) {
    let added = stages.stages.iter().find(|stage| stage.position == position);
    let recording = added.and_then(|stage| stage.recording.as_ref());
    if let Some(problem) = recording.and_then(|recording| recording.problem.as_ref()) {
        eprintln!("sidecore: {problem}; remove the stage");
    }
}

fn list(stages: &StagesReport) -> String {
    let mut table = Table::new(&[">POSITION", "STAGE", "FROM", "SETTINGS"]);
    for stage in &stages.stages {
        let from = if stage.is_live { "added" } else { "configuration" };
        let cells = [stage.position.to_string(), stage.word.clone(), from.to_owned()];
        table.row(cells.into_iter().chain([stage.settings.join(" ")]));
    }
    let lines = stages.stages.iter().filter_map(|stage| {
        let recording = stage.recording.as_ref()?;
        Some(format!("{}: {}\n", stage.position, state(recording)))
    });
    let lines: String = lines.collect();
    table.render() + if lines.is_empty() { "" } else { "\n" } + &lines
}

/// A recording in a line.
fn state(recording: &RecordingReport) -> String {
    let RecordingReport { file, file_bytes, is_full, problem, counts } = recording;
    if let Some(problem) = problem {
        return problem.clone();
    }
    let ended = if *is_full { ", which has its largest size and takes no more" } else { "" };
    let RecordingCounts { recorded, dropped } = counts;
    let size = units::bytes(*file_bytes);
    format!("{recorded} requests recorded, {dropped} missing, in {file} ({size}){ended}")
}

/// The stage of this type, with its keys as they were written.
fn new_stage(word: &str, keys: &[String]) -> Result<NewStage, String> {
    let mut stage = NewStage::new(word);
    for text in keys {
        let Some((key, value)) = text.split_once('=') else {
            return Err(format!("`{text}` is not KEY=VALUE, as in `delay_us=100`"));
        };
        if stage.0.contains_key(key) {
            return Err(format!("`{key}` is there twice, or is not a key; write each key once"));
        }
        let value = if is_path(word, key) && !is_name_of_recording(word, value) {
            // The daemon has another working directory.
            let path = std::path::absolute(value).map_err(|error| format!("`{key}`: {error}"))?;
            let path = path.into_os_string().into_string();
            Value::String(path.map_err(|_| format!("`{key}` is not UTF-8"))?)
        } else {
            flags::value(value)
        };
        stage = stage.with(key, value);
    }
    Ok(stage)
}

/// Whether a path is the bare name of a recording: a file in the daemon's directory of them.
fn is_name_of_recording(word: &str, value: &str) -> bool {
    word == "record" && !value.contains('/')
}

/// Whether the key of stages of this type is the path of a file.
fn is_path(word: &str, key: &str) -> bool {
    let mut variants = keys::StageSpec::VARIANTS.iter();
    let variant = variants.find(|variant| variant.word == word);
    let found = variant.and_then(|variant| variant.keys.iter().find(|known| known.name == key));
    found.is_some_and(|key| matches!(key.kind, Kind::Path))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn new(word: &str, keys: &[&str]) -> Result<Value, String> {
        let keys: Vec<String> = keys.iter().map(|&key| key.to_owned()).collect();
        new_stage(word, &keys).map(|stage| Value::Object(stage.0))
    }

    #[test]
    fn keys_are_numbers_lists_text_or_absolute_paths() {
        let delay = json!({ "type": "delay", "delay_us": 100 });
        assert_eq!(new("delay", &["delay_us=100"]).unwrap(), delay);
        let fault = json!({ "type": "fault", "ranges": [[0, 7]], "x": "a=b" });
        assert_eq!(new("fault", &["ranges=[[0, 7]]", "x=a=b"]).unwrap(), fault);
        let here = std::env::current_dir().unwrap().join("disk.luks");
        let header = new("encrypt", &["header=disk.luks"]).unwrap();
        assert_eq!(header["header"], here.to_str().unwrap());
        let record = new("record", &["file=a.recording"]).unwrap();
        assert_eq!(record["file"], "a.recording");
        let record = new("record", &["file=./a.recording"]).unwrap();
        let here = std::env::current_dir().unwrap().join("a.recording");
        assert_eq!(record["file"], here.to_str().unwrap());
        assert!(new("delay", &["100"]).unwrap_err().contains("`100` is not KEY=VALUE"));
        for keys in [&["delay_us=1", "delay_us=2"][..], &["type=fault"]] {
            assert!(new("delay", keys).unwrap_err().contains("twice"), "{keys:?}");
        }
    }
}
