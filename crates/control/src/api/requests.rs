//! What clients ask for: the bodies of requests, as they are in JSON.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::document::{Schema, described, object};

/// Declares bodies and queries, with the schema that the API's document has of them.
macro_rules! requests {
    ($( $(#[$attribute:meta])* pub struct $name:ident {
        $( #[doc = $meaning:literal] $(#[$field_attribute:meta])* $field:ident: $type:ty, )*
    } )*) => { $(
        $(#[$attribute])*
        #[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(deny_unknown_fields)]
        pub struct $name {
            $( #[doc = $meaning] $(#[$field_attribute])* pub $field: $type, )*
        }

        impl Schema for $name {
            fn schema() -> Value {
                let mut properties = Map::new();
                let mut required = Vec::new();
                $(
                    properties.insert(stringify!($field).to_owned(), described(<$type>::schema(), $meaning));
                    required.extend(<$type>::IS_REQUIRED.then_some(stringify!($field)));
                )*
                object(properties, &required)
            }
        }
    )* };
}

requests! {
    /// Makes a volume: `POST /v1/controllers/{controller}/volumes`.
    #[derive(Default)]
    pub struct CreateVolume {
        /// Its name.
        name: String,
        /// Its size as guests see it, in bytes.
        size_bytes: u64,
        /// The most that it may refer to, in bytes.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        quota_bytes: Option<u64>,
    }

    /// The name of a snapshot or clone, or a volume's new one: `POST` to `.../snapshot`, `.../clone`
    /// and `.../rename`.
    #[derive(Default)]
    pub struct Named {
        /// The name.
        name: String,
    }

    /// A volume's new size: `POST .../resize`.
    #[derive(Copy, Default)]
    pub struct Resize {
        /// In bytes.
        size_bytes: u64,
    }

    /// A volume's new quota: `POST .../quota`.
    #[derive(Copy, Default)]
    pub struct Quota {
        /// In bytes; `null` for none.
        quota_bytes: Option<u64>,
    }

    /// Which part of a volume's mapping: the query of `GET .../extents`.
    #[derive(Copy)]
    pub struct ExtentsQuery {
        /// The first block.
        #[serde(default)]
        from: u64,
        /// The most extents to answer with, 1 to 65536.
        #[serde(default = "ExtentsQuery::usual_max")]
        max: usize,
    }

    /// How much `GET /metrics` tells: its query.
    #[derive(Copy, Default)]
    pub struct MetricsQuery {
        /// 1 for the metrics of each queue as well.
        #[serde(default)]
        per_queue: u8,
    }

    /// Drops extent trees from memory: `POST /v1/controllers/{controller}/prune`.
    #[derive(Default)]
    pub struct Prune {
        /// Of this volume only.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        volume: Option<String>,
    }

    /// Lets equal blocks be one: `POST /v1/controllers/{controller}/share`.
    #[derive(Default)]
    pub struct Share {
        /// The blocks that stay.
        from: Place,
        /// The blocks that are given up for them.
        to: Place,
        /// How many.
        count: u64,
    }

    /// A block of a volume.
    #[derive(Default)]
    pub struct Place {
        /// The volume.
        volume: String,
        /// Its block.
        first: u64,
    }
}

impl ExtentsQuery {
    /// The most that may be asked for at once.
    pub const MAX: usize = 65_536;

    fn usual_max() -> usize {
        1000
    }
}
