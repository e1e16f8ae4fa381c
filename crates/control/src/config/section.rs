//! Reads one table of the file key by key, and remembers which keys there are, so that every wrong one is reported and
//! not only the first.

use std::fmt::Display;
use std::ops::{Range, RangeInclusive};
use std::path::PathBuf;

use sidecore_assembly::spec::{FromValue, Key, Kind, Value, Values, Variant};
use toml::Spanned;
use toml::de::{DeArray, DeInteger, DeTable, DeValue};

use super::problem::Collector;
use super::{nearest, size};

/// A table being read.
pub(super) struct Section<'t, 'c, 'p> {
    table: &'t DeTable<'t>,
    /// Where its heading is.
    heading: Range<usize>,
    /// What messages call it.
    subject: String,
    /// The keys that were asked for: all that it may have.
    known: Vec<&'static str>,
    problems: &'c mut Collector<'p>,
}

impl<'t, 'c, 'p> Section<'t, 'c, 'p> {
    pub(super) fn new(
        table: &'t DeTable<'t>,
        heading: Range<usize>,
        subject: impl Into<String>,
        problems: &'c mut Collector<'p>,
    ) -> Self {
        Self { table, heading, subject: subject.into(), known: Vec::new(), problems }
    }

    /// Where its heading is.
    pub(super) fn heading(&self) -> Range<usize> {
        self.heading.clone()
    }

    /// Reports something about the value at `span`.
    pub(super) fn complain(&mut self, span: Range<usize>, message: impl Into<String>) {
        self.problems.add(span, &self.subject, message);
    }

    /// A key without which the section makes no sense; `example` is shown when it is missing.
    pub(super) fn required<T>(&mut self, key: &'static str, value: Option<T>, example: &str) -> Option<T> {
        if value.is_none() && !self.has(key) {
            let heading = self.heading();
            self.complain(heading, format!("`{key}` is missing; add for instance `{key} = {example}`"));
        }
        value
    }

    /// Whether the key is there, of whatever type.
    pub(super) fn has(&self, key: &str) -> bool {
        self.table.contains_key(key)
    }

    /// The same for a key that belongs to sections of another kind.
    pub(super) fn has_other(&mut self, key: &'static str) -> bool {
        let is_there = self.has(key);
        if is_there {
            self.known.push(key);
        }
        is_there
    }

    pub(super) fn string(&mut self, key: &'static str) -> Option<Spanned<String>> {
        self.value(key, "a string in quotes", |value| value.as_str().map(str::to_owned))
    }

    /// One of a few words.
    pub(super) fn word(&mut self, key: &'static str, words: &[&'static str]) -> Option<Spanned<&'static str>> {
        let text = self.string(key)?;
        let found = words.iter().find(|word| **word == text.get_ref());
        if found.is_none() {
            let list = words.iter().map(|word| format!("\"{word}\"")).collect::<Vec<_>>().join(", ");
            self.complain(text.span(), format!("{key} = \"{}\" is not one of {list}", text.get_ref()));
        }
        found.map(|word| Spanned::new(text.span(), *word))
    }

    /// The values of the keys of a table that are there.
    pub(super) fn all(&mut self, keys: &'static [Key]) -> Values {
        Values(keys.iter().filter_map(|key| Some((key.name, self.key(key)?.into_inner()))).collect())
    }

    /// The value of one key of a table.
    pub(super) fn one<T: FromValue>(&mut self, keys: &'static [Key], name: &str) -> Option<Spanned<T>> {
        let value = self.key(keys.iter().find(|key| key.name == name)?)?;
        Some(Spanned::new(value.span(), T::from_value(value.get_ref())?))
    }

    fn key(&mut self, key: &'static Key) -> Option<Spanned<Value>> {
        let name = key.name;
        let value = match key.kind {
            Kind::Text => self.string(name).map(|text| map(text, Value::Text)),
            Kind::Path => self.path(name).map(|path| map(path, Value::Path)),
            Kind::Word(words) => self.word(name, words).map(|word| map(word, Value::Word)),
            Kind::Flag(_) => self.flag(name).map(|flag| map(flag, Value::Flag)),
            Kind::Number(least, most) => self.number(name, least..=most).map(|number| map(number, Value::Number)),
            Kind::Size => self.size(name).map(|bytes| map(bytes, Value::Number)),
            Kind::Texts => {
                let texts = |texts: Vec<_>| Value::Texts(texts.into_iter().map(Spanned::into_inner).collect());
                self.strings(name).map(|list| map(list, texts))
            }
            Kind::Ranges => self.ranges(name).map(|ranges| map(ranges, Value::Ranges)),
            Kind::Sections(heading, variants) => {
                self.sections(name, heading, variants).map(|sections| map(sections, Value::Sections))
            }
        };
        let value = match key.required {
            Some(example) => self.required(name, value, example),
            None => value,
        }?;
        match (key.check)(name, value.get_ref()) {
            Ok(()) => Some(value),
            Err(message) => {
                self.complain(value.span(), message);
                None
            }
        }
    }

    /// A path, taken from the directory of the configuration file if it is relative.
    pub(super) fn path(&mut self, key: &'static str) -> Option<Spanned<PathBuf>> {
        let text = self.string(key)?;
        if text.get_ref().is_empty() || text.get_ref().contains('\0') {
            self.complain(text.span(), format!("`{key}` is no path; write an absolute path"));
            return None;
        }
        let path = match &self.problems.base {
            Some(base) => base.join(text.get_ref()),
            None => PathBuf::from(text.get_ref()),
        };
        if !path.is_absolute() {
            self.complain(text.span(), format!("`{key}` is an absolute path"));
            return None;
        }
        Some(Spanned::new(text.span(), path))
    }

    pub(super) fn flag(&mut self, key: &'static str) -> Option<Spanned<bool>> {
        self.value(key, "true or false, without quotes", DeValue::as_bool)
    }

    /// A whole number within limits.
    pub(super) fn number<T>(&mut self, key: &'static str, limits: RangeInclusive<T>) -> Option<Spanned<T>>
    where
        T: TryFrom<u64> + PartialOrd + Display,
    {
        let wanted = format!("a whole number from {} to {}", limits.start(), limits.end());
        let within = |number: u64| T::try_from(number).ok().filter(|number| limits.contains(number));
        self.value(key, &wanted, |value| value.as_integer().and_then(integer).and_then(within))
    }

    /// A size in bytes.
    pub(super) fn size(&mut self, key: &'static str) -> Option<Spanned<u64>> {
        let value = self.get(key)?;
        let span = value.span();
        let result = match value.get_ref() {
            DeValue::String(text) => size::parse(text),
            DeValue::Integer(number) => integer(number).ok_or_else(|| format!("`{number}` is no size in bytes")),
            other => Err(format!("expected a size like \"512MiB\", not {}", kind(other))),
        };
        match result {
            Ok(bytes) => Some(Spanned::new(span, bytes)),
            Err(why) => {
                self.complain(span, format!("{key}: {why}"));
                None
            }
        }
    }

    /// A list of strings.
    pub(super) fn strings(&mut self, key: &'static str) -> Option<Spanned<Vec<Spanned<String>>>> {
        let entry = |value: &Spanned<DeValue<'_>>| {
            value.get_ref().as_str().map(|text| Spanned::new(value.span(), text.to_owned()))
        };
        self.value(key, "a list of strings, as in [\"a\", \"b\"]", |value| {
            value.as_array().and_then(|array| array.iter().map(entry).collect())
        })
    }

    /// A list of pairs of whole numbers, each with its first not after its last.
    pub(super) fn ranges(&mut self, key: &'static str) -> Option<Spanned<Vec<(u64, u64)>>> {
        let pair = |value: &Spanned<DeValue<'_>>| {
            let mut numbers = value.get_ref().as_array()?.iter();
            let mut next = || numbers.next().and_then(|number| number.get_ref().as_integer()).and_then(integer);
            let (first, last) = (next()?, next()?);
            (numbers.next().is_none() && first <= last).then_some((first, last))
        };
        self.value(key, "a list of pairs [first, last], as in [[0, 7], [64, 64]]", |value| {
            value.as_array().and_then(|array| array.iter().map(pair).collect())
        })
    }

    /// Sections of several types, each with the keys of its type.
    fn sections(
        &mut self,
        key: &'static str,
        heading: &str,
        variants: &'static [Variant],
    ) -> Option<Spanned<Vec<(&'static str, Values)>>> {
        let span = self.table.get(key).map(Spanned::span)?;
        let words: Vec<&'static str> = variants.iter().map(|variant| variant.word).collect();
        let mut sections = Vec::new();
        for (at, table) in self.tables(key, heading) {
            let subject = format!("[[{heading}]] of {}", self.subject);
            let mut section = Section::new(table, at, subject, self.problems);
            let word = section.word("type", &words).map(Spanned::into_inner);
            let word = section.required("type", word, &format!("\"{}\"", words.first().unwrap_or(&"")));
            // Without the type it is not known which keys belong here.
            let Some(variant) = variants.iter().find(|variant| Some(variant.word) == word) else { continue };
            sections.push((variant.word, section.all(variant.keys)));
            section.finish();
        }
        Some(Spanned::new(span, sections))
    }

    /// The tables of a list of tables, as `[[heading]]` writes them, with where each begins.
    pub(super) fn tables(&mut self, key: &'static str, heading: &str) -> Vec<(Range<usize>, &'t DeTable<'t>)> {
        let table = |value: &'t Spanned<DeValue<'t>>| value.get_ref().as_table().map(|table| (value.span(), table));
        let Some(value) = self.get(key) else { return Vec::new() };
        let found = value.get_ref().as_array().and_then(|array: &DeArray<'t>| array.iter().map(table).collect());
        if found.is_none() {
            self.complain(value.span(), format!("`{key}` is a list of sections: write [[{heading}]]"));
        }
        found.unwrap_or_default()
    }

    /// A table within this one.
    pub(super) fn table(&mut self, key: &'static str) -> Option<&'t Spanned<DeValue<'t>>> {
        let value = self.get(key)?;
        if value.get_ref().as_table().is_none() {
            self.complain(value.span(), format!("`{key}` must be a section, not {}", kind(value.get_ref())));
            return None;
        }
        Some(value)
    }

    /// Reports every key that was never asked for.
    pub(super) fn finish(self) {
        for key in self.table.keys() {
            let name = key.get_ref().as_ref();
            if self.known.contains(&name) {
                continue;
            }
            let remedy = match nearest(name, self.known.iter().copied()) {
                Some(near) => format!("did you mean `{near}`?"),
                None => format!("known here: {}", self.known.join(", ")),
            };
            self.problems.add(key.span(), &self.subject, format!("unknown key `{name}`; {remedy}"));
        }
    }

    fn get(&mut self, key: &'static str) -> Option<&'t Spanned<DeValue<'t>>> {
        self.known.push(key);
        self.table.get(key)
    }

    /// The key's value as `convert` understands it; complains if it does not.
    fn value<T>(
        &mut self,
        key: &'static str,
        wanted: &str,
        convert: impl Fn(&DeValue<'t>) -> Option<T>,
    ) -> Option<Spanned<T>> {
        let value = self.get(key)?;
        let converted = convert(value.get_ref());
        if converted.is_none() {
            self.complain(value.span(), format!("`{key}` must be {wanted}, not {}", kind(value.get_ref())));
        }
        converted.map(|converted| Spanned::new(value.span(), converted))
    }
}

/// Another value in the same place.
pub(super) fn map<T, U>(value: Spanned<T>, change: impl FnOnce(T) -> U) -> Spanned<U> {
    let span = value.span();
    Spanned::new(span, change(value.into_inner()))
}

fn integer(number: &DeInteger<'_>) -> Option<u64> {
    u64::from_str_radix(number.as_str(), number.radix()).ok()
}

/// What a value is, for a message about what it should be.
fn kind(value: &DeValue<'_>) -> String {
    match value {
        DeValue::Integer(number) => number.to_string(),
        DeValue::String(text) if text.chars().count() <= 40 => format!("\"{text}\""),
        other => format!("a {}", other.type_str()),
    }
}
