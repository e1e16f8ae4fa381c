//! Line charts on logarithmic axes, several in one picture, as SVG.

use std::fmt::Write as _;

use crate::plot::{escape, head};

/// Charts with the same lines in them, side by side.
#[derive(Clone, Debug)]
pub struct Figure {
    /// The text above all charts.
    pub title: String,
    /// The names of the colours, at most five.
    pub series: Vec<String>,
    /// The charts, two in a row.
    pub panels: Vec<Panel>,
}

/// A chart of lines on logarithmic axes.
#[derive(Clone, Debug)]
pub struct Panel {
    /// The text above the chart.
    pub title: String,
    /// The lines, in the order in which they are drawn.
    pub lines: Vec<Line>,
    /// Formats a value on the horizontal axis, which is divided by powers of two.
    pub x_label: fn(f64) -> String,
    /// Formats a value on the vertical axis, which is divided by powers of ten.
    pub y_label: fn(f64) -> String,
}

/// A line of a chart, with a dot at each point.
#[derive(Clone, Debug)]
pub struct Line {
    /// The index of the line's series in the figure.
    pub series: usize,
    /// Points from left to right.
    pub points: Vec<(f64, f64)>,
}

const COLOURS: [&str; 5] = ["#1a7f5a", "#2c6fbb", "#b0663a", "#8a8f94", "#9b59b6"];
const LEFT: f64 = 70.0;
const WIDTH: f64 = 330.0;
const HEIGHT: f64 = 220.0;
const TOP: f64 = 80.0;
const BELOW: f64 = 70.0;
const BETWEEN: f64 = 90.0;

impl Figure {
    /// Draws the charts.
    #[must_use]
    pub fn to_svg(&self) -> String {
        let rows = self.panels.len().div_ceil(2).max(1) as f64;
        let full_width = LEFT + 2.0 * WIDTH + BETWEEN + 20.0;
        let full_height = TOP + rows * (HEIGHT + BELOW);
        let mut svg =
            head((full_width, full_height), &self.title, &self.series, (LEFT, 150.0), colour);
        for (index, panel) in self.panels.iter().enumerate() {
            let x = LEFT + (index % 2) as f64 * (WIDTH + BETWEEN);
            let y = TOP + (index / 2) as f64 * (HEIGHT + BELOW);
            panel.draw(&mut svg, x, y);
        }
        svg.push_str("</svg>\n");
        svg
    }
}

/// An axis from one power of `base` to another.
struct Axis {
    base: f64,
    low: i32,
    high: i32,
}

impl Axis {
    fn over(values: impl Iterator<Item = f64>, base: f64) -> Self {
        let (mut low, mut high) = (f64::INFINITY, f64::NEG_INFINITY);
        for value in values.filter(|value| *value > 0.0) {
            let power = value.log(base);
            (low, high) = (low.min(power), high.max(power));
        }
        if low > high {
            return Self { base, low: 0, high: 1 };
        }
        // A rounding error beyond a power does not add the next power.
        let (low, high) = ((low + 1e-9).floor() as i32, (high - 1e-9).ceil() as i32);
        Self { base, low, high: high.max(low + 1) }
    }

    /// The position of `value` along the axis, 0 to 1.
    fn share(&self, value: f64) -> f64 {
        ((value.log(self.base) - f64::from(self.low)) / f64::from(self.high - self.low))
            .clamp(0.0, 1.0)
    }

    fn powers(&self) -> impl Iterator<Item = f64> {
        (self.low..=self.high).map(|power| self.base.powi(power))
    }
}

impl Panel {
    fn draw(&self, svg: &mut String, left: f64, top: f64) {
        let points = || self.lines.iter().flat_map(|line| &line.points);
        let across = Axis::over(points().map(|(x, _)| *x), 2.0);
        let up = Axis::over(points().map(|(_, y)| *y), 10.0);
        let at =
            |x: f64, y: f64| (left + across.share(x) * WIDTH, top + (1.0 - up.share(y)) * HEIGHT);
        let _ = writeln!(
            svg,
            "<text x=\"{left}\" y=\"{}\" font-size=\"12\">{}</text>",
            top - 8.0,
            escape(&self.title)
        );
        for x in across.powers().step_by(2) {
            let (x_at, bottom) = (at(x, 1.0).0, top + HEIGHT);
            let _ = writeln!(
                svg,
                "<line x1=\"{x_at}\" y1=\"{top}\" x2=\"{x_at}\" y2=\"{bottom}\" stroke=\"#eee\"/>"
            );
            let label = escape(&(self.x_label)(x));
            let _ = writeln!(
                svg,
                "<text x=\"{x_at}\" y=\"{}\" text-anchor=\"middle\">{label}</text>",
                bottom + 16.0
            );
        }
        for y in up.powers() {
            let (y_at, right) = (at(1.0, y).1, left + WIDTH);
            let _ = writeln!(
                svg,
                "<line x1=\"{left}\" y1=\"{y_at}\" x2=\"{right}\" y2=\"{y_at}\" stroke=\"#ddd\"/>"
            );
            let label = escape(&(self.y_label)(y));
            let (x, y) = (left - 6.0, y_at + 4.0);
            let _ = writeln!(svg, "<text x=\"{x}\" y=\"{y}\" text-anchor=\"end\">{label}</text>");
        }
        for line in &self.lines {
            let mut path = String::new();
            for (x, y) in line.points.iter().filter(|(_, y)| *y > 0.0) {
                let (x, y) = at(*x, *y);
                let _ = write!(path, "{x:.1},{y:.1} ");
                let dot = colour(line.series);
                let _ =
                    writeln!(svg, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"2.5\" fill=\"{dot}\"/>");
            }
            let (path, colour) = (path.trim_end(), colour(line.series));
            let _ = writeln!(
                svg,
                "<polyline points=\"{path}\" fill=\"none\" stroke=\"{colour}\" \
                 stroke-width=\"1.5\"/>"
            );
        }
    }
}

fn colour(series: usize) -> &'static str {
    COLOURS[series % COLOURS.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn label(value: f64) -> String {
        format!("<{value}>")
    }

    #[test]
    fn every_panel_has_its_lines_and_its_labels() {
        let line = |series| Line { series, points: vec![(512.0, 10.0), (2048.0, 1000.0)] };
        let panel =
            |lines| Panel { title: "a & b".to_owned(), lines, x_label: label, y_label: label };
        let figure = Figure {
            title: "t".to_owned(),
            series: vec!["x".to_owned(), "y".to_owned()],
            panels: vec![panel(vec![line(0), line(1)]), panel(Vec::new())],
        };
        let svg = figure.to_svg();
        assert_eq!((svg.matches("<polyline").count(), svg.matches("<circle").count()), (2, 4));
        assert!(
            svg.contains("a &amp; b")
                && svg.contains("&lt;512&gt;")
                && svg.contains("&lt;1000&gt;")
        );
        assert!(!svg.contains("NaN") && svg.ends_with("</svg>\n"));
    }

    #[test]
    fn an_axis_goes_from_power_to_power() {
        let axis = Axis::over([512.0, 2_097_152.0].into_iter(), 2.0);
        assert_eq!((axis.low, axis.high), (9, 21));
        assert_eq!((axis.share(512.0), axis.share(2_097_152.0)), (0.0, 1.0));
        let single = Axis::over([10.0].into_iter(), 10.0);
        assert!(single.low < single.high && single.share(10.0).is_finite());
    }
}
