//! The codes of a protocol's messages.

/// Declares the messages of a protocol by their codes and names. An unknown code is kept, so that
/// it can be shown and answered.
///
/// ```
/// sidecore_units::codes! {
///     /// The requests.
///     pub enum Request: u32, "VHOST_USER_", "request" {
///         GetFeatures = 1 "GET_FEATURES",
///     }
/// }
/// assert_eq!(Request::from_code(1), Request::GetFeatures);
/// assert_eq!(Request::GetFeatures.to_string(), "GET_FEATURES");
/// assert_eq!(Request::from_code(2).to_string(), "request 2");
/// ```
#[macro_export]
macro_rules! codes {
    (
        $(#[$meta:meta])*
        pub enum $name:ident: $code_type:ty, $prefix:literal, $noun:literal {
            $($variant:ident = $code:literal $text:literal,)*
        }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum $name {
            $(#[doc = concat!($prefix, $text)] $variant,)*
            /// A code that the specification has no name for.
            Unknown($code_type),
        }

        impl $name {
            /// All that have names.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// The message of this code.
            #[must_use]
            pub const fn from_code(code: $code_type) -> Self {
                match code {
                    $($code => Self::$variant,)*
                    other => Self::Unknown(other),
                }
            }

            /// Its code on the wire.
            #[must_use]
            pub const fn code(self) -> $code_type {
                match self {
                    $(Self::$variant => $code,)*
                    Self::Unknown(code) => code,
                }
            }

            /// Its name without the prefix.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $text,)*
                    Self::Unknown(_) => concat!("an unknown ", $noun),
                }
            }
        }

        impl ::std::fmt::Display for $name {
            fn fmt(&self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                match self {
                    Self::Unknown(code) => write!(f, concat!($noun, " {}"), code),
                    known => f.write_str(known.name()),
                }
            }
        }
    };
}
