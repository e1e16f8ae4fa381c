//! Draws the demo as an animated SVG in which its output scrolls through a terminal, in the rhythm
//! of the run.
//!
//! The lines are one group, and one CSS animation moves the group up, line by line. The picture
//! needs no script, font or other program; viewers without animations, and readers who have
//! switched them off, see the end.

use std::fmt::Write as _;
use std::time::Duration;

/// The length of the recording, after which it starts again.
const SECONDS: f64 = 20.0;
/// The share of the recording in which the run's lines appear. The result stays for the rest.
const RUN_SHARE: f64 = 0.72;
/// Longer waits between two lines are cut to this.
const LONGEST_WAIT: Duration = Duration::from_secs(5);
const ROWS: usize = 24;
const COLUMNS: usize = 104;
const FONT: f64 = 13.0;
const LINE: f64 = 18.0;
const COLUMN: f64 = 7.85;
const MARGIN: f64 = 14.0;
const BAR: f64 = 26.0;

/// Draws a run that was started by `command`: its lines with their times, and then the lines of its
/// result.
pub(crate) fn svg(command: &str, said: &[(Duration, String)], result: &str) -> String {
    let mut lines = vec![(0.0, "cmd", format!("$ {command}"))];
    let moments = without_long_waits(said);
    let end = moments.last().copied().unwrap_or_default().max(1e-3);
    for ((_, line), moment) in said.iter().zip(moments) {
        let class = if line.contains(": ok: ") { "ok" } else { "" };
        lines.push((moment / end * RUN_SHARE, class, line.clone()));
    }
    lines.push((RUN_SHARE, "", String::new()));
    lines.extend(result.lines().map(|line| (RUN_SHARE + 0.02, "end", line.to_owned())));
    draw(command, &lines)
}

/// The times of the lines in seconds, with every wait for a line cut to [`LONGEST_WAIT`]. Otherwise
/// a build would take most of the recording.
fn without_long_waits(said: &[(Duration, String)]) -> Vec<f64> {
    let (mut moment, mut before) = (0.0, Duration::ZERO);
    let next = |(at, _): &(Duration, String)| {
        moment += at.saturating_sub(before).min(LONGEST_WAIT).as_secs_f64();
        before = *at;
        moment
    };
    said.iter().map(next).collect()
}

/// Draws the lines, each with its time as a share of the recording and its class.
fn draw(title: &str, lines: &[(f64, &str, String)]) -> String {
    let (width, height) =
        (COLUMNS as f64 * COLUMN + 2.0 * MARGIN, ROWS as f64 * LINE + BAR + MARGIN);
    let title = escape(title);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {height:.0}\" \
         role=\"img\">\n\
         <title>{title}</title>\n<style>\n\
         text {{ font: {FONT}px ui-monospace, Menlo, Consolas, monospace; fill: #c9d1d9; \
         white-space: pre }}\n\
         .cmd, .end {{ fill: #ffffff }}\n.ok {{ fill: #7ee787 }}\n\
         .lines {{ transform: translateY({:.0}px); animation: scroll {SECONDS}s step-end infinite \
         }}\n\
         @media (prefers-reduced-motion: reduce) {{ .lines {{ animation: none }} }}\n\
         @keyframes scroll {{\n",
        offset(lines.len())
    );
    for (index, (moment, ..)) in lines.iter().enumerate() {
        // Of several lines with one time, the last one decides.
        if lines.get(index + 1).is_none_or(|(next, ..)| percent(*next) != percent(*moment)) {
            let _ = writeln!(
                svg,
                "{}% {{ transform: translateY({:.0}px) }}",
                percent(*moment),
                offset(index + 1)
            );
        }
    }
    let _ = write!(
        svg,
        "100% {{ transform: translateY({:.0}px) }}\n}}\n</style>\n\
         <clipPath id=\"screen\"><rect y=\"{BAR}\" width=\"{width:.0}\" \
         height=\"{:.0}\"/></clipPath>\n\
         <rect width=\"100%\" height=\"100%\" rx=\"8\" fill=\"#161b22\"/>\n\
         <g fill=\"#484f58\"><circle cx=\"16\" cy=\"13\" r=\"5\"/><circle cx=\"32\" cy=\"13\" \
         r=\"5\"/><circle cx=\"48\" cy=\"13\" r=\"5\"/></g>\n\
         <g clip-path=\"url(#screen)\"><g class=\"lines\">\n",
        offset(lines.len()),
        // Without the margin below, where the next line would show its upper half.
        ROWS as f64 * LINE
    );
    for (index, (_, class, line)) in lines.iter().enumerate() {
        let y = BAR + (index + 1) as f64 * LINE - 4.0;
        let class = if class.is_empty() { String::new() } else { format!(" class=\"{class}\"") };
        let line = escape(&shorten(line));
        let _ = writeln!(svg, "<text x=\"{MARGIN}\" y=\"{y:.0}\"{class}>{line}</text>");
    }
    svg.push_str("</g></g>\n</svg>\n");
    svg
}

/// The distance by which the group moves down (up, if negative) so that line number `shown`, from
/// 1, is the last one in view.
fn offset(shown: usize) -> f64 {
    (ROWS as f64 - shown as f64) * LINE
}

fn percent(share: f64) -> String {
    format!("{:.2}", share * 100.0)
}

/// The line without control characters, which XML does not allow, cut to the width of the screen.
fn shorten(line: &str) -> String {
    let mut characters = line.chars().filter(|character| !character.is_control());
    let mut short: String = characters.by_ref().take(COLUMNS).collect();
    if characters.next().is_some() {
        short.pop();
        short.push('…');
    }
    short
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAX_BYTES: usize = 100 << 10;

    fn texts(svg: &str) -> Vec<String> {
        let document = roxmltree::Document::parse(svg).unwrap();
        let texts = document.descendants().filter(|node| node.has_tag_name("text"));
        texts.map(|node| node.text().unwrap_or("").to_owned()).collect()
    }

    /// The keyframes as pairs of share and offset.
    fn frames(svg: &str) -> Vec<(f64, f64)> {
        let frame = |line: &str| {
            let (share, rest) = line.split_once("% { transform: translateY(")?;
            Some((share.parse().ok()?, rest.split_once("px")?.0.parse().ok()?))
        };
        svg.lines().filter_map(frame).collect()
    }

    #[test]
    fn a_recording_is_xml_and_scrolls_to_its_end() {
        let said: Vec<_> = (0..300_u64)
            .map(|second| {
                (
                    Duration::from_secs(second),
                    format!("[{second:4} s] a < b & \"c\"\u{7} {}", "x".repeat(200)),
                )
            })
            .collect();
        let svg = svg("make demo", &said, "mode  IOPS\npolled 1");
        let texts = texts(&svg);
        assert_eq!(texts.len(), 1 + 300 + 1 + 2);
        assert_eq!((texts[0].as_str(), texts[303].as_str()), ("$ make demo", "polled 1"));
        assert!(
            texts[1].starts_with("[   0 s] a < b & \"c\" x") && texts[1].ends_with('…'),
            "{}",
            texts[1]
        );
        assert_eq!(texts[1].chars().count(), COLUMNS);
        let frames = frames(&svg);
        assert!(
            frames.is_sorted_by(|(before, above), (after, below)| before < after && above >= below),
            "{frames:?}"
        );
        assert_eq!((frames[0].0, frames.last().unwrap().0), (0.0, 100.0));
        assert_eq!(frames.last().unwrap().1, offset(304));
        assert!(svg.len() < MAX_BYTES);
        assert!(svg.contains(&whole_rows()));
        roxmltree::Document::parse(&super::svg("make demo", &[], "")).unwrap();
    }

    /// The end of the screen's clip path, below the last whole row.
    fn whole_rows() -> String {
        format!("height=\"{:.0}\"/></clipPath>", ROWS as f64 * LINE)
    }

    #[test]
    fn a_long_wait_is_cut() {
        let said = [1, 2, 900, 901].map(|second| (Duration::from_secs(second), String::new()));
        assert_eq!(without_long_waits(&said), [1.0, 2.0, 7.0, 8.0]);
    }

    #[test]
    fn the_recording_in_the_documentation_is_of_a_run_that_passed() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/demo.svg");
        let svg = std::fs::read_to_string(path).unwrap();
        assert!(svg.len() < MAX_BYTES, "{} bytes", svg.len());
        let texts = texts(&svg);
        assert_eq!(texts[0], "$ make demo");
        assert!(svg.contains(&whole_rows()));
        assert!(texts.iter().filter(|text| text.contains(": ok: ")).count() > 20);
        assert!(!texts.iter().any(|text| text.contains("NOT SO")));
        let path = texts.iter().find_map(|text| machine_path(text));
        assert_eq!(path, None, "a path of the machine that made the recording");
    }

    /// The first absolute path in a text other than a disk of the guest.
    fn machine_path(text: &str) -> Option<&str> {
        let words = text
            .split(|character: char| !character.is_alphanumeric() && !"/._-".contains(character));
        let mut paths = words.filter(|word| word.len() > 1 && word.starts_with('/'));
        paths.find(|path| !["/dev/vd", "/dev/nvme"].iter().any(|disk| path.starts_with(disk)))
    }

    #[test]
    fn only_disks_of_the_guest_may_be_named_by_a_path() {
        assert_eq!(machine_path("0.5 kicks/request (/dev/vda) on /dev/nvme0n1 / other"), None);
        assert_eq!(
            machine_path("written to '/some/place/demo.json'"),
            Some("/some/place/demo.json")
        );
        assert_eq!(machine_path("/dev/shm"), Some("/dev/shm"));
    }
}
