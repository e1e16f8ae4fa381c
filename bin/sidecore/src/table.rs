//! Columns that line up.

/// Rows of text under headings. Numbers go to the right, words to the left.
pub(crate) struct Table {
    rows: Vec<Vec<String>>,
    /// Which columns hold numbers.
    numeric: Vec<bool>,
}

impl Table {
    /// A table with these headings; a heading that starts with `>` is that of numbers.
    pub(crate) fn new(headings: &[&str]) -> Self {
        let numeric = headings.iter().map(|heading| heading.starts_with('>')).collect();
        let headings = headings.iter().map(|heading| heading.trim_start_matches('>').to_owned()).collect();
        Self { rows: vec![headings], numeric }
    }

    pub(crate) fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.rows.push(cells.into_iter().collect());
    }

    /// The text, a line for each row.
    pub(crate) fn render(&self) -> String {
        let width = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(column));
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..self.numeric.len()).map(width).collect();
        let mut text = String::new();
        for row in &self.rows {
            let mut line = String::new();
            for ((cell, width), numeric) in row.iter().zip(&widths).zip(&self.numeric) {
                if !line.is_empty() {
                    line.push_str("  ");
                }
                line.push_str(&if *numeric { format!("{cell:>width$}") } else { format!("{cell:<width$}") });
            }
            text.push_str(line.trim_end());
            text.push('\n');
        }
        text
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
