//! Stores of several legs, and their keys.

use sidecore_keys::{Key, Kind, Values};

use sidecore_mirror::MAX_LEGS;

use super::StoreKind;
use super::rules::is_positive;

/// The keys of a store of type `mirror`.
pub(super) const MIRROR: &[Key] = &[
    Key::required(
        "legs",
        Kind::Texts,
        "[\"a\", \"b\"]",
        "the names of 1 to 8 other stores that hold the same bytes: of type `file`, `volume`, \
         `remote`, or `store` in front of one of these; nothing else may use them. `sidecore \
         mirror create` [makes the mirror](mirror.md)",
    ),
    Key::new("read", Kind::Text, "the leg with the lowest number", "the leg that is read"),
    Key::new(
        "copy_bps",
        Kind::Size,
        "`\"64MiB\"`",
        "the most bytes a second that are copied to a leg that was away",
    )
    .checked(is_positive),
    Key::new(
        "witness",
        Kind::Word(&["none", "operator"]),
        "`\"none\"`",
        "decides whether half of an even number of legs goes on without the others: with `none` \
         requests wait for one of them, with `operator` also for `sidecore mirror permit`",
    ),
];

/// A store of several legs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MirrorSpec {
    /// The names of the stores.
    pub legs: Vec<String>,
    /// The store that is read while it is in sync.
    pub read: Option<String>,
    /// The rate of copies to a leg that was away.
    pub copy_bytes_per_s: u64,
    /// Whether an operator may permit half of the legs to go on.
    pub asks_operator: bool,
}

impl MirrorSpec {
    /// The rate of copies unless told otherwise.
    pub const COPY_BYTES_PER_S: u64 = 64 << 20;

    /// A mirror of these stores.
    #[must_use]
    pub fn new(legs: impl IntoIterator<Item = impl Into<String>>) -> Self {
        Self {
            legs: legs.into_iter().map(Into::into).collect(),
            read: None,
            copy_bytes_per_s: Self::COPY_BYTES_PER_S,
            asks_operator: false,
        }
    }

    pub(super) fn from_values(values: &Values) -> Option<Self> {
        let new = Self::new(values.get::<Vec<String>>("legs")?);
        Some(Self {
            read: values.get("read"),
            copy_bytes_per_s: values.get("copy_bps").unwrap_or(new.copy_bytes_per_s),
            asks_operator: values.get::<String>("witness").is_some_and(|it| it == "operator"),
            ..new
        })
    }
}

const READ_ONLY: &str = "is read-only; a leg is written, so leave out `read_only`";

impl StoreKind {
    /// Why a store of this type is no leg of a mirror, and nothing below one; `None` if it may be.
    fn unfit_as_leg(&self) -> Option<&'static str> {
        match self {
            Self::Null { .. } | Self::Ram { .. } => Some(
                "loses its bytes when the daemon ends; choose a file, a volume or a remote device",
            ),
            Self::Mirror(_) => Some("is a mirror itself; list the legs of both in one"),
            Self::PhysicalFunction { .. } => {
                Some("is all of a controller's store; choose a volume of it")
            }
            Self::File(options) if options.read_only => Some(READ_ONLY),
            Self::HostFile(options) if options.read_only => Some(READ_ONLY),
            Self::Volume(volume) if volume.read_only => Some(READ_ONLY),
            _ => None,
        }
    }
}

/// Why a mirror cannot have this number of legs; `None` if it can.
#[must_use]
pub fn unfit_number_of_legs(count: usize) -> Option<String> {
    let is_good = (1..=MAX_LEGS).contains(&count);
    (!is_good).then(|| format!("a mirror has 1 to {MAX_LEGS} legs, not {count}"))
}

/// The parts that a leg of a mirror can lie on, by their names.
pub trait Below {
    /// The type of a store; `None` if there is none, which other checks report.
    fn store(&self, name: &str) -> Option<&StoreKind>;

    /// The store of a controller.
    fn store_of_controller(&self, controller: &str) -> Option<&str>;

    /// Whether requests wait for an IOhost for as long as it is away.
    fn waits_for(&self, iohost: &str) -> bool;
}

/// Why a store is no leg of a mirror; `None` if it may be one. All that it lies on counts, also
/// below controllers: a store that waits for long, or loses its bytes, does that to a volume, too.
#[must_use]
pub fn unfit_as_leg(leg: &str, parts: &dyn Below) -> Option<String> {
    let mut name = leg;
    let mut on = String::new();
    // Each step reaches a new store, unless they form a cycle, which other checks report.
    for _ in 0..DEEP_MAX {
        let kind = parts.store(name)?;
        let unfit = match kind {
            StoreKind::Remote(remote) => {
                parts.waits_for(&remote.iohost).then(|| waits_for_iohost(&remote.iohost))
            }
            kind => kind.unfit_as_leg().map(str::to_owned),
        };
        if let Some(unfit) = unfit {
            return Some(format!("leg \"{leg}\" {on}{unfit}"));
        }
        name = match (kind.inner(), kind.controller()) {
            (Some(inner), _) => inner,
            (None, Some(controller)) => {
                let below = parts.store_of_controller(controller)?;
                on = format!("lies on store \"{below}\" of controller \"{controller}\", which ");
                below
            }
            (None, None) => return None,
        };
    }
    None
}

/// More stores below each other are an accident.
const DEEP_MAX: usize = 64;

/// Why a device of an IOhost whose requests wait for it is no leg.
fn waits_for_iohost(iohost: &str) -> String {
    format!(
        "is a device of iohost \"{iohost}\", and the mirror would wait for it for as long as it is \
         away; set `on_disconnect = \"fail\"` there"
    )
}

/// Why a store below a mirror must not have these two users.
#[must_use]
pub fn used_twice(store: &str, one: &str, other: &str) -> String {
    format!(
        "store \"{store}\" is used by {one} and by {other}; nothing else may use what is below a \
         mirror"
    )
}
