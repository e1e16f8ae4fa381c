//! The records that every experiment writes: one JSON object a line.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// The system name of floors, which are measurements of the machine itself.
pub const FLOOR: &str = "floor";
/// The system name of this build's daemon.
pub const OURS: &str = "sidecored";

/// Parameters of a measurement, by name; a name ends in its unit.
pub type Params = Map<String, Value>;

/// One line of the records.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
#[serde(untagged)]
pub enum Record {
    /// A number that was measured.
    Measure(Measure),
    /// Two systems' numbers, divided round by round.
    Ratio(Ratio),
}

/// A number that was measured.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
pub struct Measure {
    /// The name of the experiment.
    pub experiment: String,
    /// The case, for instance `null/randread/qd1`.
    pub case: String,
    /// The program that was measured, or [`FLOOR`].
    pub system: String,
    /// The measured metric, for instance `iops`.
    pub metric: String,
    /// The median of the rounds.
    pub value: f64,
    /// The value's unit, for instance `1/s` or `ns`.
    pub unit: String,
    /// The circumstances of the measurement, and the spread of the rounds.
    pub params: Params,
    /// The commit that was measured.
    pub revision: String,
}

/// Two systems' numbers, divided round by round.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
pub struct Ratio {
    /// The name of the experiment.
    pub experiment: String,
    /// The case, for instance `null/randread/qd1`.
    pub case: String,
    /// Always `ratio`.
    pub metric: String,
    /// The metric that was divided.
    pub of: String,
    /// The dividend's system.
    pub ours: String,
    /// The divisor's system.
    pub peer: String,
    /// The median of the rounds' ratios.
    pub value: f64,
    /// The spread of the rounds, and whether the rounds count.
    pub params: Params,
    /// The commit that was measured.
    pub revision: String,
}

impl Ratio {
    /// The two numbers with this ratio, of one round; `None` if only the ratios of the rounds are
    /// known.
    #[must_use]
    pub fn pair(&self) -> Option<(f64, f64)> {
        let number = |name| self.params.get(name).and_then(Value::as_f64);
        Some((number("ours")?, number("theirs")?))
    }
}

/// All records of one run, in the order of their measurement.
#[derive(Debug)]
pub struct Records {
    experiment: String,
    revision: String,
    records: Vec<Record>,
}

impl Records {
    /// Starts the records of `experiment`.
    #[must_use]
    pub fn new(experiment: &str) -> Self {
        Self { experiment: experiment.to_owned(), revision: revision(), records: Vec::new() }
    }

    /// Reads records of `experiment` that several runs of one revision wrote.
    ///
    /// # Errors
    /// A file cannot be read, is not in the format of `--json`, has records of another experiment
    /// or revision, or there are no records at all.
    pub fn read(experiment: &str, files: &[PathBuf]) -> Result<Self> {
        let mut all: Option<Self> = None;
        for file in files {
            let name = file.display();
            let text =
                std::fs::read_to_string(file).with_context(|| format!("cannot read {name}"))?;
            for line in text.lines() {
                let record: Record = serde_json::from_str(line)
                    .with_context(|| format!("{name} is not what `--json` writes"))?;
                let (Record::Measure(Measure { experiment: of, revision, .. })
                | Record::Ratio(Ratio { experiment: of, revision, .. })) = &record;
                ensure!(of == experiment, "{name} has records of {of}: leave them out");
                let all = all.get_or_insert_with(|| Self {
                    experiment: experiment.to_owned(),
                    revision: revision.clone(),
                    records: Vec::new(),
                });
                ensure!(
                    *revision == all.revision,
                    "{name} has records of revision {revision} and of {}: measure all cases of \
                     one revision",
                    all.revision
                );
                all.records.push(record);
            }
        }
        all.context("there are no records")
    }

    /// The name of the experiment.
    #[must_use]
    pub fn experiment(&self) -> &str {
        &self.experiment
    }

    /// Adds a measurement.
    pub fn measure(
        &mut self,
        case: &str,
        system: &str,
        metric: &str,
        value: f64,
        unit: &str,
        params: Params,
    ) {
        self.records.push(Record::Measure(Measure {
            experiment: self.experiment.clone(),
            case: case.to_owned(),
            system: system.to_owned(),
            metric: metric.to_owned(),
            value,
            unit: unit.to_owned(),
            params,
            revision: self.revision.clone(),
        }));
    }

    /// Adds a ratio.
    pub fn ratio(
        &mut self,
        case: &str,
        of: &str,
        ours: &str,
        peer: &str,
        value: f64,
        params: Params,
    ) {
        self.records.push(Record::Ratio(Ratio {
            experiment: self.experiment.clone(),
            case: case.to_owned(),
            metric: "ratio".to_owned(),
            of: of.to_owned(),
            ours: ours.to_owned(),
            peer: peer.to_owned(),
            value,
            params,
            revision: self.revision.clone(),
        }));
    }

    /// Finds the measurement of a case, a system and a metric.
    #[must_use]
    pub fn find(&self, case: &str, system: &str, metric: &str) -> Option<&Measure> {
        self.records.iter().find_map(|record| match record {
            Record::Measure(m) if m.case == case && m.system == system && m.metric == metric => {
                Some(m)
            }
            _ => None,
        })
    }

    /// Finds the ratio of a case and a metric to a peer.
    #[must_use]
    pub fn find_ratio(&self, case: &str, of: &str, peer: &str) -> Option<&Ratio> {
        self.records.iter().find_map(|record| match record {
            Record::Ratio(r) if r.case == case && r.of == of && r.peer == peer => Some(r),
            _ => None,
        })
    }

    /// All records in order.
    #[must_use]
    pub fn all(&self) -> &[Record] {
        &self.records
    }

    /// The commit that is measured.
    #[must_use]
    pub fn revision(&self) -> &str {
        &self.revision
    }

    /// Appends all records to a file, a line each.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn append_to(&self, path: &Path) -> Result<()> {
        let mut lines = String::new();
        for record in &self.records {
            lines.push_str(&serde_json::to_string(record)?);
            lines.push('\n');
        }
        let mut file = std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(path)
            .with_context(|| format!("cannot open {}", path.display()))?;
        file.write_all(lines.as_bytes()).with_context(|| format!("cannot write {}", path.display()))
    }
}

/// Whether the measurement was undisturbed, or does not depend on disturbances.
#[must_use]
pub fn counts(params: &Params) -> bool {
    params.get("counts").and_then(Value::as_bool).unwrap_or(true)
}

/// Makes parameters from pairs of names and values.
#[must_use]
pub fn params<const N: usize>(pairs: [(&str, Value); N]) -> Params {
    pairs.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

/// The commit that is checked out, with `-dirty` if the tree differs from it; `unknown` outside of
/// a repository. Changes of README.md and docs do not count, because experiments write into them:
/// all experiments of one session have the same revision.
fn revision() -> String {
    let git = |arguments: &[&str]| {
        let output = std::process::Command::new("git").args(arguments).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let Some(commit) = git(&["rev-parse", "--short", "HEAD"]) else { return "unknown".to_owned() };
    let changed = git(&[
        "status",
        "--porcelain",
        "--untracked-files=no",
        "--",
        ":/",
        ":(top,exclude)README.md",
        ":(top,exclude)docs",
    ]);
    if changed.is_none_or(|changed| !changed.is_empty()) { commit + "-dirty" } else { commit }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_the_documented_fields() {
        let mut records =
            Records { experiment: "e".into(), revision: "r".into(), records: Vec::new() };
        records.measure(
            "null/randread/qd1",
            OURS,
            "iops",
            2.5,
            "1/s",
            params([("rounds", 5.into())]),
        );
        records.ratio("null/randread/qd1", "iops", OURS, FLOOR, 0.5, Params::new());
        let lines: Vec<String> =
            records.all().iter().map(|r| serde_json::to_string(r).unwrap()).collect();
        assert_eq!(
            lines[0],
            concat!(
                r#"{"experiment":"e","case":"null/randread/qd1","system":"sidecored","#,
                r#""metric":"iops","value":2.5,"unit":"1/s","params":{"rounds":5},"revision":"r"}"#
            )
        );
        assert_eq!(
            lines[1],
            concat!(
                r#"{"experiment":"e","case":"null/randread/qd1","metric":"ratio","of":"iops","#,
                r#""ours":"sidecored","peer":"floor","value":0.5,"params":{},"revision":"r"}"#
            )
        );
        assert!(records.find("null/randread/qd1", OURS, "iops").is_some());
        assert!(records.find_ratio("null/randread/qd1", "iops", FLOOR).is_some());
        assert!(records.find("null/randread/qd1", FLOOR, "iops").is_none());
    }

    #[test]
    fn records_of_several_runs_are_read_together_if_their_revision_is_one() {
        let directory = tempfile::tempdir().unwrap();
        let write = |name: &str, revision: &str, case: &str| {
            let (experiment, revision) = ("e".to_owned(), revision.to_owned());
            let mut records = Records { experiment, revision, records: Vec::new() };
            records.measure(case, OURS, "iops", 2.0, "1/s", Params::new());
            records.ratio(case, "iops", OURS, FLOOR, 0.5, params([("counts", true.into())]));
            let path = directory.path().join(name);
            records.append_to(&path).unwrap();
            (path, records)
        };
        let ((one, of_one), (two, of_two)) = (write("1", "r", "a"), write("2", "r", "b"));
        let read = Records::read("e", &[one.clone(), two]).unwrap();
        assert_eq!(read.all(), [of_one.all(), of_two.all()].concat());
        assert_eq!((read.experiment(), read.revision()), ("e", "r"));
        let (other, _) = write("3", "s", "c");
        let message = |name, files: &[PathBuf]| Records::read(name, files).unwrap_err().to_string();
        assert!(message("e", &[one.clone(), other]).contains("of revision s and of r"));
        assert!(message("f", &[one]).contains("has records of e"));
        assert_eq!(message("e", &[]), "there are no records");
    }
}
