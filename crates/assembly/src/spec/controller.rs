//! Controllers and their keys.

use std::path::{Path, PathBuf};
use std::time::Duration;

use sidecore_controller::DEFAULT_WARN_USED_PERCENT;
use sidecore_keys::{Key, Kind, Value, Values, keys, size};

use super::rules::NAME;

/// With less, volumes that are served side by side would push each other's trees out all the time.
const TREE_MEMORY_LEAST: u64 = 4 << 20;

/// A log is memory that is taken when the store is opened: 16 million changes are more than any
/// commit makes durable.
const CRASH_LOG_LIMIT: u64 = 1 << 30;

/// Longest label, in bytes.
const LABEL_MAX: usize = 64;

/// The keys of a controller whose values depend on each other, or lead to other sections.
pub const CONTROLLER: &[Key] = &[
    NAME,
    Key::required(
        "store",
        Kind::Text,
        "\"the name of a [[store]]\"",
        "the store that it owns: a `file` or `ram` store, with or without stages",
    ),
    Key::new(
        "format",
        Kind::Word(&["never", "blank"]),
        "`\"never\"`",
        "`blank` formats a blank store, whose first and last megabyte are zero; `never` leaves \
         that to `sidecore controller format`. A store with other contents is never formatted here",
    ),
    // An hour: metadata that is older than this was forgotten, not put off.
    Key::new(
        "commit_interval_ms",
        Kind::Number(1, 3_600_000),
        "5000",
        "how long changed metadata may wait to be written when no guest flushes; 1 to 3600000",
    ),
    Key::new(
        "crash_log",
        Kind::Path,
        "`log` next to the control socket",
        "a directory on tmpfs, for changes that were answered and are not durable yet: the next \
         daemon replays them if this one is killed. On another filesystem, writes to fresh blocks \
         are answered when their mappings are durable, which takes longer; the log warns",
    ),
    Key::new(
        "crash_log_size",
        Kind::Size,
        "`\"8MiB\"`",
        "memory for each controller's log, from 8 KiB to 1 GiB; each change of a mapping takes 64 \
         bytes until the next commit",
    )
    .checked(holds_a_log),
];

keys! {
    /// A controller: a store divided into volumes, each of them seen through a virtual function.
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct ControllerSpec {
        plain {
            /// Unique among the controllers.
            name: String = String::new();
            /// The store that it owns.
            store: String = String::new();
            /// How to format the store if it is blank; `None` refuses a blank store.
            format: Option<FormatSpec> = None;
            /// The longest that changed metadata waits to be written.
            commit_interval: Duration = Duration::from_secs(5);
            /// Where changes of the volumes' mappings are kept that were answered and are not
            /// durable yet, for the case that this process dies and its guests do not. `None`: they
            /// are answered when they are durable, which takes longer.
            crash_log: Option<CrashLogSpec> = None;
        }
        keys {
            // More entries take longer to look through than a walk.
            "btlb" => btlb_entries: usize = 8, Kind::Number(0, 1024), "8",
                "entries of each sidecore's buffer of translations; 0 for none, at most 1024";
            "tree_memory" => tree_memory_bytes: u64 = 64 << 20, Kind::Size, "`\"64MiB\"`",
                "the most memory of the extent trees, at least 4MiB; beyond it, parts that were \
                 not used lately are dropped, and read again when they are needed", holds_a_tree;
            "warn_used_percent" => warn_used_percent: u8 = DEFAULT_WARN_USED_PERCENT,
                Kind::Number(1, 100), "80",
                "from this share of the store in use on, an event, a metric and `sidecore list` \
                 say that it is nearly full; 1 to 100, and 100 for never";
            "physical_function" => physical_function: bool = false, Kind::Flag(false), "`false`",
                "whether a store of type `pf` may use it";
        }
    }
}

impl ControllerSpec {
    /// A controller that owns `store`, with the usual settings: a blank store is refused.
    #[must_use]
    pub fn new(name: impl Into<String>, store: impl Into<String>) -> Self {
        Self { name: name.into(), store: store.into(), ..Self::default() }
    }

    /// The controller with these values of all keys, whose log is in `crash_log` unless they say
    /// otherwise.
    #[must_use]
    pub fn from_section(values: &Values, crash_log: &Path) -> Self {
        let is_blank = values.get::<String>("format").is_some_and(|format| format == "blank");
        let usual = Self::from_values(values);
        Self {
            name: values.get("name").unwrap_or_default(),
            store: values.get("store").unwrap_or_default(),
            format: is_blank.then(|| FormatSpec::from_values(values)),
            commit_interval: values
                .get("commit_interval_ms")
                .map_or(usual.commit_interval, Duration::from_millis),
            crash_log: Some(CrashLogSpec {
                directory: values.get("crash_log").unwrap_or_else(|| crash_log.to_owned()),
                size_bytes: values.get("crash_log_size").unwrap_or(CrashLogSpec::SIZE_BYTES),
            }),
            ..usual
        }
    }
}

/// A log in memory that outlives the process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CrashLogSpec {
    /// A directory on tmpfs; it is made if it is not there.
    pub directory: PathBuf,
    /// The size of a store's log.
    pub size_bytes: usize,
}

impl CrashLogSpec {
    /// The size unless told otherwise: 131,008 changes between two commits.
    pub const SIZE_BYTES: usize = 8 << 20;

    /// A log of the usual size in a file in `directory`.
    #[must_use]
    pub fn new(directory: impl Into<PathBuf>) -> Self {
        Self { directory: directory.into(), size_bytes: Self::SIZE_BYTES }
    }
}

keys! {
    /// The volume format that a blank store gets.
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct FormatSpec {
        plain {}
        keys {
            "block_size" => block_bytes: u32 = 1024, Kind::Size, "`\"1KiB\"`",
                "the unit of translation that a store is formatted with, `512`, `\"1KiB\"` or \
                 `\"4KiB\"`; it never changes afterwards", is_granularity;
            "label" => label: String = String::new(), Kind::Text, "none",
                "a name for people that a store is formatted with, at most 64 bytes", is_label;
        }
    }
}

fn is_granularity(key: &str, value: &Value) -> Result<(), String> {
    match value.number() {
        512 | 1024 | 4096 => Ok(()),
        other => {
            Err(format!("{key} = {} is none of 512, \"1KiB\" and \"4KiB\"", size::show(other)))
        }
    }
}

fn is_label(key: &str, value: &Value) -> Result<(), String> {
    let label = value.text();
    if label.len() <= LABEL_MAX && !label.chars().any(char::is_control) {
        return Ok(());
    }
    Err(format!("`{key}` has more than {LABEL_MAX} bytes, or control characters"))
}

fn holds_a_tree(key: &str, value: &Value) -> Result<(), String> {
    if value.number() >= TREE_MEMORY_LEAST {
        return Ok(());
    }
    Err(format!("`{key}` is less than {}, which holds no tree", size::show(TREE_MEMORY_LEAST)))
}

fn holds_a_log(key: &str, value: &Value) -> Result<(), String> {
    let (least, most) = (sidecore_volume::MIN_LOG_BYTES as u64, CRASH_LOG_LIMIT);
    let bytes = value.number();
    if (least..=most).contains(&bytes) {
        return Ok(());
    }
    Err(format!(
        "{key} = {} is not between {} and {}",
        size::show(bytes),
        size::show(least),
        size::show(most)
    ))
}
