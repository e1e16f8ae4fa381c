//! Reads one table of the file key by key, and remembers which keys there are, so that every wrong
//! one is reported and not only the first.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;

use sidecore_assembly::spec::{Key, Kind, Value, Values, Variant, is_name};
use toml::Spanned;
use toml::de::{DeArray, DeInteger, DeTable, DeValue};

use super::problem::Collector;
use super::{nearest, size};

/// Places in the text.
type Place = Range<usize>;

/// A section that was read: its name, and where its parts are.
pub(super) struct Head {
    /// `None` if the name is missing or invalid.
    pub(super) name: Option<String>,
    /// The section's name in messages.
    pub(super) subject: String,
    /// The place of the section's heading.
    pub(super) heading: Place,
    /// Where the values are that obey the rules of their keys. The elements of a list come after
    /// it.
    places: BTreeMap<&'static str, Vec<Place>>,
}

impl Head {
    pub(super) fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// Where the value of a key is, if it is there and obeys the key's rules.
    pub(super) fn place(&self, key: &str) -> Option<Place> {
        self.places.get(key)?.first().cloned()
    }

    /// The same for each element of a list.
    pub(super) fn places(&self, key: &str) -> &[Place] {
        self.places.get(key).and_then(|places| places.get(1..)).unwrap_or_default()
    }
}

/// A table being read.
pub(super) struct Section<'t, 'c, 'p> {
    table: &'t DeTable<'t>,
    head: Head,
    /// The keys that were read so far; after the last one, all valid keys.
    known: Vec<&'static str>,
    problems: &'c mut Collector<'p>,
}

impl<'t, 'c, 'p> Section<'t, 'c, 'p> {
    pub(super) fn new(
        table: &'t DeTable<'t>,
        heading: Place,
        subject: impl Into<String>,
        problems: &'c mut Collector<'p>,
    ) -> Self {
        let head = Head { name: None, subject: subject.into(), heading, places: BTreeMap::new() };
        Self { table, head, known: Vec::new(), problems }
    }

    /// A section of this kind, called by its name if it has one.
    pub(super) fn open(
        kind: &str,
        table: &'t DeTable<'t>,
        heading: Place,
        problems: &'c mut Collector<'p>,
    ) -> Self {
        let name =
            table.get("name").and_then(|name| name.get_ref().as_str()).filter(|name| is_name(name));
        let subject =
            name.map_or_else(|| format!("[[{kind}]]"), |name| format!("[[{kind}]] \"{name}\""));
        Self::new(table, heading, subject, problems)
    }

    /// Where the value of a key is, if it was read and obeys the key's rules.
    pub(super) fn place(&self, key: &str) -> Option<Place> {
        self.head.place(key)
    }

    /// Reports something about the value at `place`.
    pub(super) fn complain(&mut self, place: Place, message: impl Into<String>) {
        self.problems.add(place, &self.head.subject, message);
    }

    /// Reports something about a value that obeys the rules of its key.
    pub(super) fn complain_about(&mut self, key: &str, message: impl Into<String>) {
        let place = self.head.place(key).unwrap_or_else(|| self.head.heading.clone());
        self.complain(place, message);
    }

    /// Reports that a key is missing; `example` is a value for the message.
    pub(super) fn complain_of_missing(&mut self, key: &str, example: &str) {
        let message = format!("`{key}` is missing; add for instance `{key} = {example}`");
        self.complain(self.head.heading.clone(), message);
    }

    /// Whether the table has the key, with a value of any type.
    pub(super) fn has(&self, key: &str) -> bool {
        self.table.contains_key(key)
    }

    /// Reports a key that belongs to sections of another kind.
    pub(super) fn refuse(&mut self, key: &'static str, message: impl Into<String>) {
        if self.has(key) {
            self.known.push(key);
            self.complain(self.head.heading.clone(), message);
        }
    }

    /// The values of those of these keys that are there and obey their rules.
    pub(super) fn all(&mut self, keys: impl IntoIterator<Item = &'static Key>) -> Values {
        let values =
            Values(keys.into_iter().filter_map(|key| Some((key.name, self.key(key)?))).collect());
        self.head.name = self.head.name.take().or_else(|| values.get("name"));
        values
    }

    fn key(&mut self, key: &'static Key) -> Option<Value> {
        let name = key.name;
        self.known.push(name);
        let Some(written) = self.table.get(name) else {
            if let Some(example) = key.required {
                self.complain_of_missing(name, example);
            }
            return None;
        };
        if key.in_file_only && self.problems.base.is_none() {
            let message = format!("`{name}` is allowed in the configuration file only");
            self.complain(written.span(), message);
            return None;
        }
        let mut places = vec![written.span()];
        let value = match key.kind {
            Kind::Sections(heading, variants) => Ok(self.sections(name, heading, variants)),
            Kind::Path => self.path(name, written.get_ref()),
            _ => value(key, written.get_ref(), &mut places),
        };
        match value.and_then(|value| (key.check)(name, &value).map(|()| value)) {
            Ok(value) => {
                self.head.places.insert(name, places);
                Some(value)
            }
            Err(message) => {
                self.complain(written.span(), message);
                None
            }
        }
    }

    /// Reads a path. A relative path starts at the directory of the configuration file.
    fn path(&self, key: &str, value: &DeValue<'_>) -> Result<Value, String> {
        let text = text(key, value)?;
        if text.is_empty() || text.contains('\0') {
            return Err(format!("`{key}` is no path; write an absolute path"));
        }
        let path = match &self.problems.base {
            Some(base) => base.join(text),
            None => PathBuf::from(text),
        };
        if path.is_absolute() || (self.problems.takes_names && !text.contains('/')) {
            Ok(Value::Path(path))
        } else {
            Err(format!("`{key}` is an absolute path"))
        }
    }

    /// Sections of several types, each with the keys of its type.
    fn sections(
        &mut self,
        key: &'static str,
        heading: &str,
        variants: &'static [Variant],
    ) -> Value {
        let words: Vec<&str> = variants.iter().map(|variant| variant.word).collect();
        let mut sections = Vec::new();
        for (at, table) in self.tables(key, heading) {
            let subject = format!("[[{heading}]] of {}", self.head.subject);
            let mut section = Section::new(table, at, subject, self.problems);
            section.known.push("type");
            let word = match table.get("type") {
                Some(value) => {
                    word("type", value.get_ref(), &words).map_err(|message| (value.span(), message))
                }
                None => {
                    let example = words.first().unwrap_or(&"");
                    let message =
                        format!("`type` is missing; add for instance `type = \"{example}\"`");
                    Err((section.head.heading.clone(), message))
                }
            };
            // The valid keys depend on the type.
            match word.map(|word| variants.iter().find(|variant| variant.word == word)) {
                Ok(Some(variant)) => {
                    sections.push((variant.word, section.all(variant.keys)));
                    section.finish();
                }
                Ok(None) => {}
                Err((place, message)) => section.complain(place, message),
            }
        }
        Value::Sections(sections)
    }

    /// Reads a list of tables, as `[[heading]]` writes them, with the place of each.
    pub(super) fn tables(
        &mut self,
        key: &'static str,
        heading: &str,
    ) -> Vec<(Place, &'t DeTable<'t>)> {
        let table = |value: &'t Spanned<DeValue<'t>>| {
            value.get_ref().as_table().map(|table| (value.span(), table))
        };
        if !self.known.contains(&key) {
            self.known.push(key);
        }
        let Some(value) = self.table.get(key) else { return Vec::new() };
        let found = value
            .get_ref()
            .as_array()
            .and_then(|array: &DeArray<'t>| array.iter().map(table).collect());
        if found.is_none() {
            self.complain(
                value.span(),
                format!("`{key}` is a list of sections: write [[{heading}]]"),
            );
        }
        found.unwrap_or_default()
    }

    /// Reads a table within this one.
    pub(super) fn table(&mut self, key: &'static str) -> Option<&'t Spanned<DeValue<'t>>> {
        self.known.push(key);
        let value = self.table.get(key)?;
        if value.get_ref().as_table().is_none() {
            self.complain(
                value.span(),
                format!("`{key}` must be a section, not {}", kind(value.get_ref())),
            );
            return None;
        }
        Some(value)
    }

    /// Reports every key that was never read.
    pub(super) fn finish(self) -> Head {
        for key in self.table.keys() {
            let name = key.get_ref().as_ref();
            if self.known.contains(&name) {
                continue;
            }
            let remedy = match nearest(name, self.known.iter().copied()) {
                Some(near) => format!("did you mean `{near}`?"),
                None => format!("known here: {}", self.known.join(", ")),
            };
            self.problems.add(
                key.span(),
                &self.head.subject,
                format!("unknown key `{name}`; {remedy}"),
            );
        }
        self.head
    }

    /// The end of a section of which it is not known which keys it may have.
    pub(super) fn give_up(self) -> Head {
        self.head
    }
}

/// The value of a key that has no sections, with the places of a list's elements.
fn value(key: &Key, value: &DeValue<'_>, places: &mut Vec<Place>) -> Result<Value, String> {
    let name = key.name;
    let found = match key.kind {
        Kind::Text | Kind::Path => {
            return text(name, value).map(|text| Value::Text(text.to_owned()));
        }
        Kind::Word(words) => return word(name, value, words).map(Value::Word),
        Kind::Size => return bytes(name, value).map(Value::Number),
        Kind::Flag(_) => value.as_bool().map(Value::Flag),
        Kind::Number(least, most) => {
            let number = value.as_integer().and_then(integer);
            number.filter(|number| (least..=most).contains(number)).map(Value::Number)
        }
        Kind::Texts | Kind::Lines => {
            let element = |value: &Spanned<DeValue<'_>>| {
                places.push(value.span());
                value.get_ref().as_str().map(str::to_owned)
            };
            value.as_array().and_then(|array| array.iter().map(element).collect()).map(Value::Texts)
        }
        Kind::Ranges => {
            value.as_array().and_then(|array| array.iter().map(range).collect()).map(Value::Ranges)
        }
        Kind::Sections(..) => None,
    };
    found.ok_or_else(|| {
        let wanted: &str = match key.kind {
            Kind::Flag(_) => "true or false, without quotes",
            Kind::Number(least, most) => &format!("a whole number from {least} to {most}"),
            Kind::Ranges => "a list of pairs [first, last], as in [[0, 7], [64, 64]]",
            _ => "a list of strings, as in [\"a\", \"b\"]",
        };
        wrong(name, wanted, value)
    })
}

fn text<'a>(key: &str, value: &'a DeValue<'_>) -> Result<&'a str, String> {
    value.as_str().ok_or_else(|| wrong(key, "a string in quotes", value))
}

/// Reads a word out of `words`.
fn word(key: &str, value: &DeValue<'_>, words: &[&'static str]) -> Result<&'static str, String> {
    let text = text(key, value)?;
    let found = words.iter().find(|word| **word == text).copied();
    found.ok_or_else(|| {
        let list = words.iter().map(|word| format!("\"{word}\"")).collect::<Vec<_>>().join(", ");
        format!("{key} = \"{text}\" is not one of {list}")
    })
}

/// Reads a size in bytes.
fn bytes(key: &str, value: &DeValue<'_>) -> Result<u64, String> {
    let found = match value {
        DeValue::String(text) => size::parse(text),
        DeValue::Integer(number) => {
            integer(number).ok_or_else(|| format!("`{number}` is no size in bytes"))
        }
        other => Err(format!("expected a size like \"512MiB\", not {}", kind(other))),
    };
    found.map_err(|why| format!("{key}: {why}"))
}

/// A pair of whole numbers, the first not after the last.
fn range(value: &Spanned<DeValue<'_>>) -> Option<(u64, u64)> {
    let mut numbers = value.get_ref().as_array()?.iter();
    let mut next =
        || numbers.next().and_then(|number| number.get_ref().as_integer()).and_then(integer);
    let (first, last) = (next()?, next()?);
    (numbers.next().is_none() && first <= last).then_some((first, last))
}

fn integer(number: &DeInteger<'_>) -> Option<u64> {
    u64::from_str_radix(number.as_str(), number.radix()).ok()
}

fn wrong(key: &str, wanted: &str, value: &DeValue<'_>) -> String {
    format!("`{key}` must be {wanted}, not {}", kind(value))
}

/// The value as a message about its type shows it.
fn kind(value: &DeValue<'_>) -> String {
    match value {
        DeValue::Integer(number) => number.to_string(),
        DeValue::String(text) if text.chars().count() <= 40 => format!("\"{text}\""),
        other => format!("a {}", other.type_str()),
    }
}
