//! Text in aligned columns.

use comfy_table::{CellAlignment, ContentArrangement, presets};

/// Rows of text under headings. Numbers go to the right, words to the left.
pub(crate) struct Table(comfy_table::Table);

impl Table {
    /// Makes a table with these headings; a heading that starts with `>` is that of numbers.
    pub(crate) fn new(headings: &[&str]) -> Self {
        let mut table = comfy_table::Table::new();
        table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
        table.set_header(headings.iter().map(|heading| heading.trim_start_matches('>')));
        for (index, heading) in headings.iter().enumerate() {
            if let Some(column) = table.column_mut(index) {
                let numeric = heading.starts_with('>');
                column.set_cell_alignment(if numeric {
                    CellAlignment::Right
                } else {
                    CellAlignment::Left
                });
                column.set_padding((if index == 0 { 0 } else { 2 }, 0));
            }
        }
        Self(table)
    }

    pub(crate) fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.0.add_row(cells);
    }

    /// Formats the table, a line for each row.
    pub(crate) fn render(&self) -> String {
        self.0.lines().map(|line| format!("{}\n", line.trim_end())).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_left_and_numbers_right() {
        let mut table = Table::new(&["NAME", ">IOPS"]);
        table.row(["a".to_owned(), "1".to_owned()]);
        table.row(["longer".to_owned(), "12345".to_owned()]);
        assert_eq!(table.render(), "NAME     IOPS\na           1\nlonger  12345\n");
    }
}
