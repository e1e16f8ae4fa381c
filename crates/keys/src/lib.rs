//! Configuration keys, each declared once.
//!
//! A [`Key`] has a name, a kind of value with its limits, the default in words and the meaning. The
//! parser of the configuration file and of the control API, the flags of the command line, the rows
//! of docs/config.md and the schemas of the API's OpenAPI document are all made of such tables.
//! [`keys!`] declares a structure of a specification together with the table of its keys.
#![forbid(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::indexing_slicing,
        clippy::arithmetic_side_effects,
        clippy::todo,
        clippy::unimplemented
    )
)]

pub mod size;

use std::collections::BTreeMap;
use std::path::PathBuf;

/// A key of a section.
#[derive(Clone, Copy, Debug)]
pub struct Key {
    /// As it is written.
    pub name: &'static str,
    /// The kind of its value.
    pub kind: Kind,
    /// The rule that a value of the right kind may still break, with the message about the key of
    /// this name.
    pub check: fn(&str, &Value) -> Result<(), String>,
    /// An example, if the section makes no sense without the key.
    pub required: Option<&'static str>,
    /// Whether only the configuration file may have it, and no request of the control API.
    pub in_file_only: bool,
    /// The default in Markdown.
    pub default: &'static str,
    /// The meaning in Markdown, in lower case and without a full stop.
    pub meaning: &'static str,
}

impl Key {
    /// A key that may be left out.
    #[must_use]
    pub const fn new(
        name: &'static str,
        kind: Kind,
        default: &'static str,
        meaning: &'static str,
    ) -> Self {
        let check = |_: &str, _: &Value| Ok(());
        Self { name, kind, check, required: None, in_file_only: false, default, meaning }
    }

    /// Reports a required key that is missing; `example` is a value for the message.
    #[must_use]
    pub const fn required(
        name: &'static str,
        kind: Kind,
        example: &'static str,
        meaning: &'static str,
    ) -> Self {
        Self::new(name, kind, "required", meaning).with_example(example)
    }

    /// The same key, now required.
    #[must_use]
    pub const fn with_example(self, example: &'static str) -> Self {
        Self { required: Some(example), ..self }
    }

    /// The same key, now refused outside of the configuration file.
    #[must_use]
    pub const fn in_file_only(self) -> Self {
        Self { in_file_only: true, ..self }
    }

    /// The same with another rule.
    #[must_use]
    pub const fn checked(self, check: fn(&str, &Value) -> Result<(), String>) -> Self {
        Self { check, ..self }
    }
}

/// A type of sections, where there are several: it decides which keys belong to a section.
#[derive(Clone, Copy, Debug)]
pub struct Variant {
    /// The value of the key `type`.
    pub word: &'static str,
    /// A paragraph in Markdown.
    pub meaning: &'static str,
    /// The keys besides `type`.
    pub keys: &'static [Key],
}

/// The kinds of values.
#[derive(Clone, Copy, Debug)]
pub enum Kind {
    /// A text without limits of its own.
    Text,
    /// A path; relative ones start from the directory of the configuration file.
    Path,
    /// One of a few words.
    Word(&'static [&'static str]),
    /// True or false; the value of a key that is left out.
    Flag(bool),
    /// A whole number within limits, both included.
    Number(u64, u64),
    /// A number of bytes, with a unit if it is written as text.
    Size,
    /// A list of texts without commas.
    Texts,
    /// A list of texts that may have commas.
    Lines,
    /// A list of pairs of a first and a last number.
    Ranges,
    /// A list of sections under this heading, each of one of these types.
    Sections(&'static str, &'static [Variant]),
}

/// A value of a key, as its [`Kind`] says.
#[allow(missing_docs)]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    Text(String),
    Word(&'static str),
    Flag(bool),
    Number(u64),
    Path(PathBuf),
    Texts(Vec<String>),
    Ranges(Vec<(u64, u64)>),
    /// Each with its type.
    Sections(Vec<(&'static str, Values)>),
}

impl Value {
    /// The number, 0 of other kinds.
    #[must_use]
    pub const fn number(&self) -> u64 {
        match self {
            Self::Number(number) => *number,
            _ => 0,
        }
    }

    /// The text, empty for other kinds.
    #[must_use]
    pub fn text(&self) -> &str {
        match self {
            Self::Text(text) => text,
            Self::Word(word) => word,
            _ => "",
        }
    }
}

/// The values of a section, by the names of their keys.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Values(pub BTreeMap<&'static str, Value>);

impl Values {
    /// The value of a key, if it is there and of this type.
    #[must_use]
    pub fn get<T: FromValue>(&self, key: &str) -> Option<T> {
        self.0.get(key).and_then(T::from_value)
    }
}

/// A type of fields in specifications.
pub trait FromValue: Sized {
    /// `None` if the value is of another kind.
    fn from_value(value: &Value) -> Option<Self>;
}

impl<T: FromValue> FromValue for Option<T> {
    fn from_value(value: &Value) -> Option<Self> {
        T::from_value(value).map(Some)
    }
}

impl FromValue for bool {
    fn from_value(value: &Value) -> Option<Self> {
        match value {
            Value::Flag(flag) => Some(*flag),
            _ => None,
        }
    }
}

impl FromValue for String {
    fn from_value(value: &Value) -> Option<Self> {
        match value {
            Value::Text(_) | Value::Word(_) => Some(value.text().to_owned()),
            _ => None,
        }
    }
}

impl FromValue for Vec<(u64, u64)> {
    fn from_value(value: &Value) -> Option<Self> {
        match value {
            Value::Ranges(ranges) => Some(ranges.clone()),
            _ => None,
        }
    }
}

impl FromValue for Vec<(&'static str, Values)> {
    fn from_value(value: &Value) -> Option<Self> {
        match value {
            Value::Sections(sections) => Some(sections.clone()),
            _ => None,
        }
    }
}

impl FromValue for PathBuf {
    fn from_value(value: &Value) -> Option<Self> {
        match value {
            Value::Path(path) => Some(path.clone()),
            _ => None,
        }
    }
}

impl FromValue for Vec<String> {
    fn from_value(value: &Value) -> Option<Self> {
        match value {
            Value::Texts(texts) => Some(texts.clone()),
            _ => None,
        }
    }
}

macro_rules! from_numbers {
    ($($type:ty),*) => {
        $(impl FromValue for $type {
            fn from_value(value: &Value) -> Option<Self> {
                match value {
                    Value::Number(number) => Self::try_from(*number).ok(),
                    _ => None,
                }
            }
        })*
    };
}

from_numbers!(u8, u16, u32, u64, usize);

/// Declares a structure of a specification with its keys: the structure with its `Default`, the
/// table `KEYS`, and `set`, which takes over the values of the keys that are there.
///
/// Fields in `plain` are no keys, or not keys alone. A row of `keys` is a field, its default, and
/// the [`Key`] without its meaning, which is the field's documentation too. `#[required = "..."]`
/// before a row gives the example that is shown when the key is missing.
#[macro_export]
macro_rules! keys {
    (
        $(#[$attribute:meta])*
        pub struct $name:ident {
            plain {
                $( $(#[$plain_doc:meta])* $plain:ident: $plain_type:ty = $plain_default:expr; )*
            }
            keys {
                $( $(#[required = $example:literal])?
                    $key:literal => $field:ident: $type:ty = $default:expr,
                    $kind:expr, $shown:literal, $meaning:literal
                    $(, $check:expr)?; )*
            }
        }
    ) => {
        $(#[$attribute])*
        pub struct $name {
            $( $(#[$plain_doc])* pub $plain: $plain_type, )*
            $( #[doc = $meaning] pub $field: $type, )*
        }

        impl Default for $name {
            fn default() -> Self {
                Self {
                    $( $plain: $plain_default, )*
                    $( $field: $default, )*
                }
            }
        }

        impl $name {
            /// The keys that are fields, in the order of the manual.
            pub const KEYS: &'static [$crate::Key] = &[
                $( $crate::Key::new($key, $kind, $shown, $meaning)
                    $( .with_example($example) )? $( .checked($check) )?, )*
            ];

            /// The values that are there, and otherwise the defaults.
            #[must_use]
            pub fn from_values(values: &$crate::Values) -> Self {
                let mut this = Self::default();
                this.set(values);
                this
            }

            /// Takes over the values of the keys that are there.
            pub fn set(&mut self, values: &$crate::Values) {
                $( if let Some(value) = values.get($key) { self.$field = value; } )*
            }
        }
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    keys! {
        /// A thing.
        #[derive(Debug, PartialEq)]
        pub struct Thing {
            plain {
                /// No key.
                place: u8 = 3;
            }
            keys {
                "is_red" => red: bool = true, Kind::Flag(true), "`true`", "whether it is red";
                #[required = "5"]
                "size" => size_bytes: Option<u32> = None, Kind::Size, "required", "its size",
                    |key, size| {
                        if size.number() < 9 {
                            Ok(())
                        } else {
                            Err(format!("`{key}` is too large"))
                        }
                    };
            }
        }
    }

    #[test]
    fn a_structure_takes_over_the_values_that_are_there() {
        assert_eq!(Thing::default(), Thing { place: 3, red: true, size_bytes: None });
        let mut thing = Thing::from_values(&Values(
            [("is_red", Value::Flag(false)), ("size", Value::Number(7))].into(),
        ));
        assert_eq!(thing, Thing { place: 3, red: false, size_bytes: Some(7) });
        // Values of another kind, or that do not fit, change nothing: the parser reports them.
        thing
            .set(&Values([("is_red", Value::Number(1)), ("size", Value::Number(u64::MAX))].into()));
        assert_eq!(thing, Thing { place: 3, red: false, size_bytes: Some(7) });
    }

    #[test]
    fn the_table_has_a_row_for_each_key() {
        let names: Vec<&str> = Thing::KEYS.iter().map(|key| key.name).collect();
        assert_eq!(names, ["is_red", "size"]);
        assert_eq!((Thing::KEYS[0].required, Thing::KEYS[1].required), (None, Some("5")));
        let size = &Thing::KEYS[1];
        assert_eq!(
            (size.check)(size.name, &Value::Number(9)),
            Err("`size` is too large".to_owned())
        );
    }
}
