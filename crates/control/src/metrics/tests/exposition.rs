//! A strict parser of Prometheus' text format, version 0.0.4, as its documentation describes it:
//! more than the format asks for is an error here (one HELP and one TYPE before the samples of each
//! family, all of them together).

use std::collections::{BTreeMap, BTreeSet};

/// A sample's labels, in their order, without `le`, and its value.
type Labels = Vec<(String, String)>;

#[derive(Debug, Default)]
pub(super) struct Family {
    pub(super) kind: String,
    /// By the sample's name (a histogram has several) and its labels, in the order of the lines.
    pub(super) samples: Vec<(String, Labels, f64)>,
}

/// Returns the families of a page by name.
///
/// # Errors
/// The first line that breaks a rule, and the rule.
pub(super) fn parse(page: &str) -> Result<BTreeMap<String, Family>, String> {
    let mut families: BTreeMap<String, Family> = BTreeMap::new();
    let mut helped = BTreeSet::new();
    let mut current = String::new();
    if !page.ends_with('\n') {
        return Err("the last line has no end".to_owned());
    }
    for line in page.lines() {
        let wrong = |why: &str| Err(format!("{why}: {line}"));
        if let Some(rest) = line.strip_prefix("# HELP ") {
            let Some((name, help)) = rest.split_once(' ') else { return wrong("no help") };
            if !is_name(name) || help.is_empty() || !helped.insert(name.to_owned()) {
                return wrong("a bad name, or a second HELP");
            }
        } else if let Some(rest) = line.strip_prefix("# TYPE ") {
            let Some((name, kind)) = rest.split_once(' ') else { return wrong("no type") };
            if !["counter", "gauge", "histogram"].contains(&kind) || !helped.contains(name) {
                return wrong("an unknown type, or no HELP before it");
            }
            if (kind == "counter") != name.ends_with("_total") {
                return wrong("counters, and no others, end in _total");
            }
            let family = Family { kind: kind.to_owned(), ..Family::default() };
            if families.insert(name.to_owned(), family).is_some() {
                return wrong("a second TYPE");
            }
            name.clone_into(&mut current);
        } else {
            let sample = sample(line)?;
            let Some(family) = families.get_mut(&current) else {
                return wrong("a sample before any TYPE");
            };
            let suffixes: &[&str] =
                if family.kind == "histogram" { &["_bucket", "_sum", "_count"] } else { &[""] };
            if sample.0.strip_prefix(&current).is_none_or(|suffix| !suffixes.contains(&suffix)) {
                return wrong("a sample of another family");
            }
            if family
                .samples
                .iter()
                .any(|(name, labels, _)| (name, labels) == (&sample.0, &sample.1))
            {
                return wrong("a sample twice");
            }
            if family.kind == "counter" && !(sample.2.is_finite() && sample.2 >= 0.0) {
                return wrong("a counter is finite and not negative");
            }
            family.samples.push(sample);
        }
    }
    for (name, family) in families.iter().filter(|(_, family)| family.kind == "histogram") {
        histogram(name, family)?;
    }
    Ok(families)
}

fn is_name(name: &str) -> bool {
    let first = |c: char| c.is_ascii_alphabetic() || c == '_' || c == ':';
    name.starts_with(first) && name.chars().all(|c| first(c) || c.is_ascii_digit())
}

/// Reads a line `name{label="text",...} value`.
fn sample(line: &str) -> Result<(String, Labels, f64), String> {
    let wrong = |why: &str| format!("{why}: {line}");
    let end = line.find(['{', ' ']).ok_or_else(|| wrong("no value"))?;
    let (name, mut rest) = line.split_at(end);
    if !is_name(name) {
        return Err(wrong("a bad name"));
    }
    let mut labels = Labels::new();
    if let Some(inside) = rest.strip_prefix('{') {
        rest = inside;
        loop {
            let (label, text) =
                rest.split_once("=\"").ok_or_else(|| wrong("a label without a text"))?;
            if !is_name(label)
                || label.contains(':')
                || labels.iter().any(|(other, _)| other == label)
            {
                return Err(wrong("a bad label, or one twice"));
            }
            let (text, after) =
                quoted(text).ok_or_else(|| wrong("a text without an end, or a bad escape"))?;
            labels.push((label.to_owned(), text));
            match after.strip_prefix(',') {
                Some(more) => rest = more,
                None => {
                    rest = after.strip_prefix('}').ok_or_else(|| wrong("labels without an end"))?;
                    break;
                }
            }
        }
    }
    let value = rest.strip_prefix(' ').ok_or_else(|| wrong("no space before the value"))?;
    let number = value.parse().map_err(|_| wrong("no number"))?;
    Ok((name.to_owned(), labels, number))
}

/// Returns the text up to the closing quote, and the rest after it.
fn quoted(text: &str) -> Option<(String, &str)> {
    let mut out = String::new();
    let mut chars = text.char_indices();
    while let Some((at, c)) = chars.next() {
        match c {
            '"' => return Some((out, text.get(at + 1..)?)),
            '\\' => out.push(match chars.next()?.1 {
                'n' => '\n',
                escaped @ ('\\' | '"') => escaped,
                _ => return None,
            }),
            other => out.push(other),
        }
    }
    None
}

/// Checks each series of a histogram: bounds ascend up to +Inf, counts do not fall, the last is
/// `_count`, and there is `_sum`.
fn histogram(name: &str, family: &Family) -> Result<(), String> {
    let mut series: BTreeMap<Labels, Vec<(f64, f64)>> = BTreeMap::new();
    for (sample, labels, value) in &family.samples {
        if *sample != format!("{name}_bucket") {
            continue;
        }
        let mut labels = labels.clone();
        let le = labels
            .pop()
            .filter(|(label, _)| label == "le")
            .ok_or("a bucket whose last label is not le")?;
        let bound = if le.1 == "+Inf" {
            f64::INFINITY
        } else {
            le.1.parse().map_err(|_| format!("le {}", le.1))?
        };
        series.entry(labels).or_default().push((bound, *value));
    }
    for suffix in ["_sum", "_count"] {
        let found: BTreeSet<&Labels> = family
            .samples
            .iter()
            .filter(|sample| sample.0 == format!("{name}{suffix}"))
            .map(|s| &s.1)
            .collect();
        if found != series.keys().collect() {
            return Err(format!("{name}: not one {suffix} for each series"));
        }
    }
    for (labels, buckets) in &series {
        if !buckets.windows(2).all(|pair| pair[0].0 < pair[1].0 && pair[0].1 <= pair[1].1) {
            return Err(format!("{name}{labels:?}: buckets are not cumulative"));
        }
        let count =
            family.samples.iter().find(|s| s.0 == format!("{name}_count") && s.1 == *labels);
        if buckets.last() != count.map(|(_, _, count)| (f64::INFINITY, *count)).as_ref() {
            return Err(format!("{name}{labels:?}: the last bucket is not +Inf with the count"));
        }
    }
    Ok(())
}

#[test]
fn the_parser_refuses_pages_that_break_the_format() {
    let head = "# HELP a x\n# TYPE a histogram\n";
    let good =
        format!("{head}a_bucket{{le=\"1\"}} 1\na_bucket{{le=\"+Inf\"}} 2\na_sum 3\na_count 2\n");
    parse(&good).unwrap();
    for (from, to) in [
        ("# HELP a x\n", ""),
        ("le=\"1\"", "le=\"1\",le=\"1\""),
        ("le=\"1\"", "le=\"\\x\""),
        ("le=\"1\"", "1=\"1\""),
        ("le=\"1\"} 1", "le=\"1\"} 3"),
        ("le=\"1\"} 1", "le=\"1\"}1"),
        ("\"+Inf\"", "\"7\""),
        ("a_count 2", "a_count 3"),
        ("a_sum 3\n", ""),
        ("a_sum 3", "a_mean 3"),
        ("a_sum 3", "a_sum three"),
        ("a_count 2\n", "a_count 2"),
        ("a_count 2\n", "a_count 2\na_count 2\n"),
        ("histogram", "summary"),
        ("histogram", "counter"),
    ] {
        let bad = good.replace(from, to);
        assert!(parse(&bad).is_err(), "{bad}");
    }
}
