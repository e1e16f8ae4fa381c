//! Bar charts on a logarithmic axis, as SVG.

use std::fmt::Write as _;

/// A chart of groups of bars.
#[derive(Clone, Debug)]
pub struct Chart {
    /// The text above the chart.
    pub title: String,
    /// The names of the colours, at most three.
    pub series: Vec<String>,
    /// The groups, from top to bottom.
    pub groups: Vec<Group>,
}

/// Bars that belong together.
#[derive(Clone, Debug)]
pub struct Group {
    /// The name to the left of the bars.
    pub name: String,
    /// The bars from top to bottom.
    pub bars: Vec<Bar>,
}

/// A bar of a group.
#[derive(Clone, Copy, Debug)]
pub struct Bar {
    /// The index of the bar's series in the chart.
    pub series: usize,
    /// The length of the bar, in requests a second.
    pub value: f64,
}

const COLOURS: [&str; 3] = ["#1a7f5a", "#b0663a", "#b9bec4"];
const LEFT: f64 = 160.0;
const WIDTH: f64 = 600.0;
const RIGHT: f64 = 90.0;
const TOP: f64 = 76.0;
const BAR: f64 = 13.0;
const GAP: f64 = 10.0;

impl Chart {
    /// Draws the chart.
    #[must_use]
    pub fn to_svg(&self) -> String {
        let values = || {
            self.groups
                .iter()
                .flat_map(|group| &group.bars)
                .map(|bar| bar.value)
                .filter(|value| *value > 0.0)
        };
        // The axis goes from one power of ten to another, which enclose all bars.
        let low = values().fold(f64::INFINITY, f64::min).log10().floor();
        let high = values().fold(0.0, f64::max).log10().ceil();
        let (low, high) = if low < high { (low, high) } else { (0.0, 1.0) };
        let length = |value: f64| ((value.max(1.0).log10() - low) / (high - low) * WIDTH).max(0.0);
        let rows = |group: &Group| group.bars.len().max(1) as f64 * BAR + GAP;
        let height: f64 = self.groups.iter().map(rows).sum();
        let (full_width, full_height) = (LEFT + WIDTH + RIGHT, TOP + height + 30.0);

        let mut svg =
            head((full_width, full_height), &self.title, &self.series, (LEFT, 190.0), colour);
        for power in low as i32..=high as i32 {
            let x = LEFT + length(10_f64.powi(power));
            let bottom = TOP + height;
            let _ = writeln!(
                svg,
                "<line x1=\"{x}\" y1=\"{}\" x2=\"{x}\" y2=\"{bottom}\" stroke=\"#ddd\"/>",
                TOP - 6.0
            );
            let label = per_second(10_f64.powi(power));
            let _ = writeln!(
                svg,
                "<text x=\"{x}\" y=\"{}\" text-anchor=\"middle\">{label}</text>",
                TOP - 12.0
            );
        }
        let mut y = TOP;
        for group in &self.groups {
            let middle = y + (rows(group) - GAP) / 2.0 + 4.0;
            let _ = writeln!(
                svg,
                "<text x=\"{}\" y=\"{middle}\" text-anchor=\"end\">{}</text>",
                LEFT - 8.0,
                escape(&group.name)
            );
            for (row, bar) in group.bars.iter().enumerate() {
                let (top, width) = (y + row as f64 * BAR, length(bar.value));
                let _ = writeln!(
                    svg,
                    "<rect x=\"{LEFT}\" y=\"{top}\" width=\"{width:.1}\" height=\"{}\" \
                     fill=\"{}\"/>",
                    BAR - 2.0,
                    colour(bar.series)
                );
                let x = LEFT + width + 5.0;
                let _ = writeln!(
                    svg,
                    "<text x=\"{x:.1}\" y=\"{}\">{}</text>",
                    top + 9.5,
                    per_second(bar.value)
                );
            }
            y += rows(group);
        }
        svg.push_str("</svg>\n");
        svg
    }
}

fn colour(series: usize) -> &'static str {
    COLOURS[series % COLOURS.len()]
}

/// The beginning of a drawing of this size: its title, and a legend whose entries begin at `left`,
/// `step` apart.
pub(crate) fn head(
    (width, height): (f64, f64),
    title: &str,
    series: &[String],
    (left, step): (f64, f64),
    colour: fn(usize) -> &'static str,
) -> String {
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" \
         font-family=\"sans-serif\" font-size=\"11\" fill=\"#333\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
         <text x=\"10\" y=\"20\" font-size=\"14\">{}</text>\n",
        escape(title)
    );
    for (index, name) in series.iter().enumerate() {
        let x = left + index as f64 * step;
        let _ = writeln!(
            svg,
            "<rect x=\"{x}\" y=\"34\" width=\"12\" height=\"12\" fill=\"{}\"/>",
            colour(index)
        );
        let _ = writeln!(svg, "<text x=\"{}\" y=\"44\">{}</text>", x + 18.0, escape(name));
    }
    svg
}

/// Formats a rate in few digits, for instance `12.3 M/s`.
#[must_use]
pub fn per_second(value: f64) -> String {
    let (scaled, unit) = match value {
        1e6.. => (value / 1e6, " M/s"),
        1e3.. => (value / 1e3, " k/s"),
        _ => (value, "/s"),
    };
    let digits = if scaled >= 100.0 || scaled.fract() == 0.0 {
        0
    } else if scaled >= 10.0 {
        1
    } else {
        2
    };
    format!("{scaled:.digits$}{unit}")
}

/// Escapes text for SVG.
pub(crate) fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_short() {
        let rates =
            [5.0, 83_400.0, 404_000.0, 1_000_000.0, 3_014_000.0, 12_740_000.0].map(per_second);
        assert_eq!(rates, ["5/s", "83.4 k/s", "404 k/s", "1 M/s", "3.01 M/s", "12.7 M/s"]);
    }

    #[test]
    fn a_chart_has_a_bar_for_each_value_and_its_text_is_escaped() {
        let bars = vec![Bar { series: 0, value: 1e6 }, Bar { series: 1, value: 5e4 }];
        let groups = vec![
            Group { name: "a<b".to_owned(), bars },
            Group { name: "none".to_owned(), bars: Vec::new() },
        ];
        let chart = Chart {
            title: "t & u".to_owned(),
            series: vec!["x".to_owned(), "y".to_owned()],
            groups,
        };
        let svg = chart.to_svg();
        assert_eq!(svg.matches("<rect").count(), 1 + 2 + 2);
        assert!(svg.contains("a&lt;b") && svg.contains("t &amp; u") && svg.ends_with("</svg>\n"));
        let empty = Chart { title: String::new(), series: Vec::new(), groups: Vec::new() };
        assert!(!empty.to_svg().contains("NaN"));
    }
}
