//! The tables of docs/metrics.md, generated from a page of metrics.

use std::fmt::Write as _;

use super::{controllers, example, mirrors, remote, render, schedules, switches};

/// The line before a table has the prefixes of its metrics.
const BEGIN: &str = "<!-- metrics: ";
const BEGIN_END: &str = " -->\n";
const END: &str = "<!-- end of metrics -->\n";

const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/metrics.md");

/// If `cargo xtask metrics` sets this variable, the file is written.
const WRITE: &str = "SIDECORE_WRITE_DOCS";

/// A metric's row in the manual.
struct Row {
    name: String,
    kind: String,
    labels: String,
    help: String,
}

/// Returns the metrics of a page that has a sample of each, in the page's order.
fn rows(page: &str) -> Vec<Row> {
    let mut rows: Vec<Row> = Vec::new();
    for line in page.lines() {
        if let Some((name, help)) =
            line.strip_prefix("# HELP ").and_then(|rest| rest.split_once(' '))
        {
            let (name, help) = (name.to_owned(), help.replace('|', "\\|"));
            rows.push(Row { name, kind: String::new(), labels: String::new(), help });
        } else if let Some((_, kind)) =
            line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' '))
        {
            kind.clone_into(&mut rows.last_mut().unwrap().kind);
        } else if let Some((_, inside)) = line.split_once('{') {
            let labels =
                inside.split(',').filter_map(|label| label.split_once('=')).map(|(label, _)| label);
            rows.last_mut().unwrap().labels =
                labels.filter(|label| *label != "le").collect::<Vec<_>>().join(", ");
        }
    }
    rows
}

/// Returns the table of the metrics with one of these prefixes. A metric that queues have as well
/// is in the table of `sidecore_queue_`, by its device's name.
fn table(rows: &[Row], prefixes: &str) -> String {
    let twin = |row: &Row| row.name.replace("sidecore_device_", "sidecore_queue_");
    let mut text =
        String::from("| metric | type | labels | meaning |\n| --- | --- | --- | --- |\n");
    for Row { name, kind, labels, help } in rows.iter().filter(|row| {
        let twin = twin(row);
        let belongs_to =
            if rows.iter().any(|other| other.name == twin) { &twin } else { &row.name };
        !row.name.starts_with("sidecore_queue_")
            && prefixes.split(' ').any(|prefix| belongs_to.starts_with(prefix))
    }) {
        let gap = if labels.is_empty() { "" } else { " " };
        let _ = writeln!(text, "| `{name}` | {kind} |{gap}{labels} | {help} |");
    }
    text
}

/// Returns the manual with correct tables.
fn rewritten(manual: &str, rows: &[Row]) -> String {
    let mut text = String::new();
    let mut rest = manual;
    while let Some((before, after)) = rest.split_once(BEGIN) {
        let (prefixes, after) =
            after.split_once(BEGIN_END).expect("the line before a table has an end");
        let (_, after) = after.split_once(END).expect("a table has an end");
        let _ = write!(text, "{before}{BEGIN}{prefixes}{BEGIN_END}{}{END}", table(rows, prefixes));
        rest = after;
    }
    text + rest
}

#[test]
fn the_tables_of_the_manual_are_those_of_the_page() {
    let (stats, devices) = example();
    let rows = rows(&render(
        &stats,
        &devices,
        &controllers(),
        &remote(),
        (&switches(), &schedules(), &mirrors()),
        true,
    ));
    let manual = std::fs::read_to_string(FILE).unwrap();
    let right = rewritten(&manual, &rows);
    if std::env::var_os(WRITE).is_some() {
        std::fs::write(FILE, right).unwrap();
        return;
    }
    for line in right.lines() {
        assert!(
            manual.lines().any(|found| found == line),
            "run `cargo xtask metrics`: docs/metrics.md has no line {line}"
        );
    }
    assert!(
        manual == right,
        "run `cargo xtask metrics`: docs/metrics.md has lines that it should not have"
    );
    for Row { name, .. } in rows.iter().filter(|row| !row.name.starts_with("sidecore_queue_")) {
        let lines =
            manual.lines().filter(|line| line.starts_with(&format!("| `{name}` |"))).count();
        assert_eq!(lines, 1, "{name} belongs into one table of docs/metrics.md");
    }
}

#[test]
fn a_table_has_the_metrics_of_the_page() {
    let page = "# HELP a_x Some | thing.\n# TYPE a_x gauge\na_x{one=\"1\",two=\"2\"} 3\n\
                # HELP b_y Other.\n# TYPE b_y counter\nb_y 1\n";
    let manual = format!("# A\n{BEGIN}b_ a_{BEGIN_END}old\n{END}rest\n");
    let table = "| `a_x` | gauge | one, two | Some \\| thing. |\n| `b_y` | counter | | Other. |\n";
    let head = "| metric | type | labels | meaning |\n| --- | --- | --- | --- |\n";
    let right = format!("# A\n{BEGIN}b_ a_{BEGIN_END}{head}{table}{END}rest\n");
    assert_eq!(rewritten(&manual, &rows(page)), right);
}
