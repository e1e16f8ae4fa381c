//! The experiment's page: a table for each figure, and one of their shapes.

use std::fmt::Write as _;

use super::{BYTES, Model, STREAM_DEPTH};

/// A figure of the paper, and this system's.
struct Shape {
    figure: &'static str,
    paper: &'static str,
    ours: String,
    agrees: bool,
}

/// The most columns of a line of text.
const COLUMNS: usize = 100;

/// Breaks a paragraph into lines.
fn wrapped(text: &str) -> String {
    let (mut lines, mut columns) = (String::new(), 0);
    for word in text.split(' ') {
        let length = word.chars().count();
        if columns > 0 && columns + 1 + length > COLUMNS {
            lines.push('\n');
            columns = 0;
        } else if columns > 0 {
            lines.push(' ');
            columns += 1;
        }
        lines.push_str(word);
        columns += length;
    }
    lines
}

/// The tables so far.
#[derive(Default)]
pub(super) struct Page {
    shapes: Vec<Shape>,
    tables: String,
}

impl Page {
    /// Says whether a figure has the paper's shape.
    pub(super) fn shape(
        &mut self,
        figure: &'static str,
        paper: &'static str,
        ours: String,
        agrees: bool,
    ) {
        eprintln!("  {figure}: {ours}: {}", if agrees { "agrees" } else { "does not agree" });
        self.shapes.push(Shape { figure, paper, ours, agrees });
    }

    /// Adds a table.
    pub(super) fn table(&mut self, caption: &str, head: &[&str], rows: &[Vec<String>]) {
        let _ = writeln!(self.tables, "\n{}\n", wrapped(caption));
        let _ = writeln!(self.tables, "| {} |", head.join(" | "));
        let _ = writeln!(self.tables, "|{}", " --- |".repeat(head.len()));
        for row in rows {
            let _ = writeln!(self.tables, "| {} |", row.join(" | "));
        }
    }

    /// Adds the constants of the simulation.
    pub(super) fn costs(&mut self, model: &Model) {
        let mut rows = Vec::new();
        for (disk, costed) in [("ram", &model.ram), ("encrypted", &model.encrypted)] {
            for (operation, remote, local) in [
                ("read", &costed.remote.read, &costed.local.read),
                ("write", &costed.remote.write, &costed.local.write),
            ] {
                let stages =
                    [remote.client, remote.here, remote.forward, remote.helper, remote.answer];
                let local = [local.client, local.here];
                let mut row = vec![format!("{disk}, {operation}")];
                row.extend(stages.iter().chain(&local).map(|stage| {
                    let depth = f64::from(STREAM_DEPTH);
                    let [one, many] = [1.0, depth].map(|depth| stage.in_batch(BYTES, depth));
                    format!("{one:.0}, {many:.0}")
                }));
                rows.push(row);
            }
        }
        let head = [
            "counted: ns of a 4 KiB request, alone and of 32",
            "client",
            "IOhost",
            "hands over",
            "helper",
            "answers",
            "local guest",
            "local sidecore",
        ];
        let caption = format!(
            "**Costs**, counted on one core. The way from a client's core to a sidecore's takes \
             {:.0} ns remotely and {:.0} ns locally, by the latency of one request that was timed; \
             from a sidecore to another one {:.0} ns. The library of AES-256-XTS alone encrypts \
             {:.2} and decrypts {:.2} GB/s in sectors of 512 bytes.",
            model.remote_wire_ns,
            model.local_wire_ns,
            model.crossing_ns,
            1.0 / model.library.encrypt_ns,
            1.0 / model.library.decrypt_ns,
        );
        self.table(&caption, &head, &rows);
    }

    /// All of it, in Markdown.
    pub(super) fn to_markdown(&self) -> String {
        let mut page =
            String::from("| figure | vRIO | here | agrees |\n| --- | --- | --- | --- |\n");
        for Shape { figure, paper, ours, agrees } in &self.shapes {
            let agrees = if *agrees { "yes" } else { "**no**" };
            let _ = writeln!(page, "| {figure} | {paper} | {ours} | {agrees} |");
        }
        page + &self.tables
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_paragraph_is_broken_between_words() {
        let text = format!("{} {} c", "a".repeat(60), "b".repeat(39));
        assert_eq!(wrapped(&text), format!("{} {}\nc", "a".repeat(60), "b".repeat(39)));
    }

    #[test]
    fn a_page_has_the_shapes_and_then_the_tables() {
        let mut page = Page::default();
        page.table("A caption.", &["a", "b"], &[vec!["1".to_owned(), "2".to_owned()]]);
        page.shape("1", "rises", "falls".to_owned(), false);
        assert_eq!(
            page.to_markdown(),
            "| figure | vRIO | here | agrees |\n| --- | --- | --- | --- |\n\
             | 1 | rises | falls | **no** |\n\nA caption.\n\n| a | b |\n| --- | --- |\n\
             | 1 | 2 |\n"
        );
    }
}
