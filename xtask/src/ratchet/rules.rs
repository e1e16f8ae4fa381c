//! The rules that look at one file alone.

use std::path::Path;

/// Wider lines are wrapped.
const COLUMNS: usize = 100;
/// Longer functions, from signature to closing brace, do not fit on a screen.
const FUNCTION_LINES: usize = 70;
/// Longer files are split.
const FILE_LINES: usize = 700;

/// Words that must not begin a comment, because a comment begins with the name of its subject.
const OPENERS: [&str; 12] = [
    "what",
    "whatever",
    "who",
    concat!("who", "ever"),
    "whom",
    "whose",
    concat!("no", "body"),
    concat!("some", "body"),
    concat!("any", "body"),
    concat!("every", "body"),
    "someone",
    "anyone",
];

/// Words that cannot be a subject. Spelt in halves, so that this file passes its own check.
const SUBJECTS: [&str; 4] = [
    concat!("no", "body"),
    concat!("some", "body"),
    concat!("any", "body"),
    concat!("who", "ever"),
];

/// Line numbers, from 1, and the start of each line.
pub(super) type Violations = Vec<(usize, String)>;

/// The violations of each rule in this file.
pub(super) fn check(file: &Path, text: &str) -> Vec<(&'static str, Violations)> {
    let mut found = vec![("columns", Vec::new()), ("subjects", subjects(text))];
    if file.extension().is_some_and(|extension| extension == "rs") {
        found[0].1 = wide_lines(text);
        found.extend([
            ("functions", long_functions(text)),
            ("lines", long_file(text)),
            ("openers", openers(text)),
        ]);
    } else {
        found[0].1 = wide_prose(text);
    }
    found
}

/// Wide lines of Rust. Code counts too: rustfmt leaves an expression as it is, and says nothing,
/// if a literal in it does not fit.
fn wide_lines(text: &str) -> Violations {
    lines(text).filter(|(_, line)| is_too_wide(line)).map(shorten).collect()
}

/// Wide lines of Markdown, but for tables and blocks of code, which cannot be wrapped.
fn wide_prose(text: &str) -> Violations {
    let mut in_code = false;
    let mut wide = Vec::new();
    for (number, line) in lines(text) {
        let start = line.trim_start();
        if start.starts_with("```") {
            in_code = !in_code;
        }
        let is_fixed = in_code
            || start.starts_with('|')
            || start.starts_with("<!--")
            || line.starts_with("    ");
        if !is_fixed && is_too_wide(line) {
            wide.push(shorten((number, line)));
        }
    }
    wide
}

/// Whether the line is too wide and can be wrapped: a link, a path or a literal without spaces
/// cannot if it is alone.
fn is_too_wide(line: &str) -> bool {
    let mut words =
        line.split_whitespace().filter(|word| !["//", "///", "//!", "-", "*"].contains(word));
    line.chars().count() > COLUMNS && words.nth(1).is_some()
}

/// Functions over the limit, by the layout that rustfmt gives them: the closing brace has the
/// indent of the signature. Clippy's `too_many_lines` leaves out comments, which also take room on
/// a screen, and needs a build.
fn long_functions(text: &str) -> Violations {
    let all: Vec<&str> = text.lines().collect();
    let mut long = Vec::new();
    for (index, line) in all.iter().enumerate() {
        if !is_signature(line) {
            continue;
        }
        let indent = &line[..line.len() - line.trim_start().len()];
        let closing = format!("{indent}}}");
        let below =
            all[index..].iter().position(|below| **below == closing || is_bodiless(below, indent));
        let length = below.map_or(0, |below| below + 1);
        if length > FUNCTION_LINES {
            long.push((index + 1, format!("{length} lines: {}", line.trim())));
        }
    }
    long
}

fn is_signature(line: &str) -> bool {
    let mut words = line.split_whitespace().take_while(|word| !word.starts_with("//"));
    words.find(|word| !is_qualifier(word)) == Some("fn")
}

fn is_qualifier(word: &str) -> bool {
    ["const", "async", "unsafe", "extern", "\"C\""].contains(&word)
        || word.starts_with("pub")
        || word == "super)"
}

/// Whether the line ends a function without a block below it: a declaration in a trait, or a body
/// on the signature's line.
fn is_bodiless(line: &str, indent: &str) -> bool {
    let rest = line.strip_prefix(indent).unwrap_or_default();
    let is_outermost = !rest.starts_with(' ');
    is_outermost && (rest.ends_with(';') || (rest.contains('{') && rest.ends_with('}')))
}

fn long_file(text: &str) -> Violations {
    // Each line beyond the limit is one violation, so that a long file can shrink in steps.
    let count = text.lines().count();
    (FILE_LINES..count).map(|line| (line + 1, format!("{count} lines"))).collect()
}

/// Comments that begin with one of [`OPENERS`].
fn openers(text: &str) -> Violations {
    let mut found = Vec::new();
    let mut was_comment = false;
    for (number, line) in lines(text) {
        let comment = comment(line);
        if let (false, Some(words)) = (was_comment, comment) {
            let first = words
                .split(|c: char| !c.is_alphanumeric())
                .find(|word| !word.is_empty())
                .unwrap_or("");
            if OPENERS.contains(&first.to_lowercase().as_str()) {
                found.push(shorten((number, line)));
            }
        }
        // A blank line of a comment ends a paragraph.
        was_comment = comment.is_some_and(|words| !words.trim().is_empty());
    }
    found
}

fn comment(line: &str) -> Option<&str> {
    line.trim_start().strip_prefix("//").map(|rest| rest.trim_start_matches(['/', '!']))
}

/// Each use of one of [`SUBJECTS`], in names and messages, too.
fn subjects(text: &str) -> Violations {
    let mut found = Vec::new();
    for (number, line) in lines(text) {
        let words = line.split(|c: char| !c.is_alphanumeric());
        let bad = words.filter(|word| SUBJECTS.contains(&word.to_lowercase().as_str()));
        found.extend(bad.map(|_| shorten((number, line))));
    }
    found
}

fn lines(text: &str) -> impl Iterator<Item = (usize, &str)> {
    text.lines().enumerate().map(|(index, line)| (index + 1, line))
}

fn shorten((number, line): (usize, &str)) -> (usize, String) {
    (number, line.trim().chars().take(COLUMNS).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count(file: &str, text: &str, rule: &str) -> usize {
        check(file.as_ref(), text)
            .into_iter()
            .find(|(name, _)| *name == rule)
            .map_or(0, |(_, found)| found.len())
    }

    #[test]
    fn wide_comments_and_wide_code_count_and_a_lone_link_does_not() {
        let wide = "word ".repeat(21);
        assert_eq!(count("a.rs", &format!("    /// {wide}\n"), "columns"), 1);
        assert_eq!(count("a.rs", &format!("let text = \"{wide}\";\n"), "columns"), 1);
        assert_eq!(count("a.rs", &format!("    \"{}\",\n", "x".repeat(100)), "columns"), 0);
        assert_eq!(
            count("a.rs", &format!("//! <https://example.org/{}>\n", "x".repeat(100)), "columns"),
            0
        );
        assert_eq!(count("a.rs", &format!("// {}\n", "x".repeat(97)), "columns"), 0);
    }

    #[test]
    fn wide_prose_counts_and_tables_and_code_do_not() {
        let wide = "word ".repeat(21);
        let page = format!("{wide}\n| {wide} |\n```\n{wide}\n```\n    {wide}\n- {wide}\n");
        assert_eq!(count("a.md", &page, "columns"), 2);
    }

    #[test]
    fn a_function_is_measured_from_its_signature_to_its_brace() {
        let body = |lines: usize| "        f();\n".repeat(lines);
        let function = |lines| {
            format!("    pub(crate) async fn f(\n        a: A,\n    ) {{\n{}    }}\n", body(lines))
        };
        assert_eq!(count("a.rs", &function(66), "functions"), 0);
        assert_eq!(count("a.rs", &function(67), "functions"), 1);
        // Functions without a body, and on one line, end where they are.
        let short = format!("    fn f(&self);\n    fn g() {{}}\n{}    }}\n", body(80));
        assert_eq!(count("a.rs", &short, "functions"), 0);
        assert_eq!(count("a.rs", &format!("// fn f() {{\n{}}}\n", body(80)), "functions"), 0);
    }

    #[test]
    fn each_line_beyond_the_limit_counts() {
        assert_eq!(count("a.rs", &"x\n".repeat(700), "lines"), 0);
        assert_eq!(count("a.rs", &"x\n".repeat(703), "lines"), 3);
        assert_eq!(count("a.md", &"x\n".repeat(703), "lines"), 0);
    }

    #[test]
    fn only_the_first_word_of_a_paragraph_is_an_opener() {
        let text = "/// What it does.\nfn f() {}\n// The queue knows\n// what it does.\n\
                    //\n// Who asks?\nlet who = 1;\n";
        assert_eq!(count("a.rs", text, "openers"), 2);
    }

    #[test]
    fn words_that_name_nothing_count_in_names_and_messages_too() {
        let word = SUBJECTS[1];
        let text = format!("fn {word}_asks() {{}}\n// {word}, and {word}'s.\nlet x{word} = 1;\n");
        assert_eq!(count("a.rs", &text, "subjects"), 3);
        assert_eq!(count("a.md", "Whole bodies of text.\n", "subjects"), 0);
    }
}
