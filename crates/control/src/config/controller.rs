//! `[[controller]]`, and the stores that are its functions, as they were written.

use std::ops::Range;
use std::path::PathBuf;
use std::time::Duration;

use sidecore_assembly::spec::{
    ControllerSpec, CrashLogSpec, FormatSpec, LimitSpec, LimitsSpec, VOLUME, VOLUME_MAX_BYTES, VolumeSpec,
};
use toml::Spanned;
use toml::de::DeTable;

use super::draft::{Head, KindDraft, flag, open};
use super::problem::Collector;
use super::section::Section;
use super::{rules, size};

/// The units of translation that there are, in bytes.
const GRANULARITIES: [u64; 3] = [512, 1024, 4096];

/// More entries than this take longer to look through than a walk.
const BTLB_LIMIT: usize = 1024;

/// With less, volumes that are served side by side would push each other's trees out all the time.
const TREE_MEMORY_LEAST: u64 = 4 << 20;

/// An hour: metadata that is older than this was forgotten, not put off.
const COMMIT_INTERVAL_MAX_MS: u64 = 3_600_000;

/// A log is memory that is taken when the store is opened: 16 million changes are more than any commit makes durable.
const CRASH_LOG_LIMIT: usize = 1 << 30;

/// Longest label, in bytes.
const LABEL_MAX: usize = 64;

/// As [`ControllerSpec`], with places.
pub(super) struct ControllerDraft {
    pub(super) head: Head,
    pub(super) store: Option<Spanned<String>>,
    pub(super) format: Option<FormatSpec>,
    pub(super) btlb_entries: usize,
    pub(super) tree_memory_bytes: u64,
    pub(super) commit_interval: Duration,
    pub(super) warn_used_percent: u8,
    pub(super) physical_function: bool,
    pub(super) crash_log: Option<PathBuf>,
    pub(super) crash_log_bytes: usize,
}

/// As [`VolumeSpec`], with places.
pub(super) struct VolumeDraft {
    pub(super) controller: Spanned<String>,
    pub(super) volume: Spanned<String>,
    pub(super) size: Option<Spanned<u64>>,
    pub(super) quota: Option<Spanned<u64>>,
    pub(super) weight: u32,
    pub(super) limits: LimitsSpec,
    pub(super) read_only: bool,
}

impl VolumeDraft {
    pub(super) fn settle(self) -> VolumeSpec {
        VolumeSpec {
            controller: self.controller.into_inner(),
            volume: self.volume.into_inner(),
            size_bytes: self.size.map(Spanned::into_inner),
            quota_bytes: self.quota.map(Spanned::into_inner),
            weight: self.weight,
            limits: self.limits,
            read_only: self.read_only,
        }
    }
}

pub(super) fn controller(table: &DeTable<'_>, at: Range<usize>, problems: &mut Collector<'_>) -> ControllerDraft {
    let (mut section, head) = open("controller", table, at, problems);
    let store = section.string("store");
    let store = section.required("store", store, "\"the name of a [[store]]\"");
    let word = section.word("format", &["never", "blank"]).map_or("never", Spanned::into_inner);
    let block_size = granularity(&mut section);
    let label = label(&mut section);
    for (key, given) in
        [("block_size", &block_size.as_ref().map(Spanned::span)), ("label", &label.as_ref().map(Spanned::span))]
    {
        if let (Some(span), "never") = (given, word) {
            let message =
                format!("`{key}` is of use only where a store is formatted; add `format = \"blank\"`, or leave it out");
            section.complain(span.clone(), message);
        }
    }
    let format = (word == "blank").then(|| FormatSpec {
        block_bytes: block_size.map_or(ControllerSpec::BLOCK_BYTES, Spanned::into_inner),
        label: label.map_or_else(String::new, Spanned::into_inner),
    });
    let draft = ControllerDraft {
        head,
        store,
        format,
        btlb_entries: section.number("btlb", 0..=BTLB_LIMIT).map_or(ControllerSpec::BTLB_ENTRIES, Spanned::into_inner),
        tree_memory_bytes: tree_memory(&mut section),
        commit_interval: section
            .number("commit_interval_ms", 1..=COMMIT_INTERVAL_MAX_MS)
            .map_or(ControllerSpec::COMMIT_INTERVAL, |ms| Duration::from_millis(ms.into_inner())),
        warn_used_percent: section
            .number("warn_used_percent", 1..=100)
            .and_then(|percent| u8::try_from(percent.into_inner()).ok())
            .unwrap_or(ControllerSpec::WARN_USED_PERCENT),
        physical_function: flag(&mut section, "physical_function", false),
        crash_log: section.path("crash_log").map(Spanned::into_inner),
        crash_log_bytes: crash_log_bytes(&mut section),
    };
    section.finish();
    draft
}

fn crash_log_bytes(section: &mut Section<'_, '_, '_>) -> usize {
    let Some(bytes) = section.size("crash_log_size") else { return CrashLogSpec::SIZE_BYTES };
    let (least, most) = (CrashLogSpec::SIZE_BYTES_MIN, CRASH_LOG_LIMIT);
    let found = usize::try_from(*bytes.get_ref()).ok().filter(|bytes| (least..=most).contains(bytes));
    found.unwrap_or_else(|| {
        let message = format!(
            "crash_log_size = {} is not between {} and {}",
            size::show(*bytes.get_ref()),
            size::show(least as u64),
            size::show(most as u64)
        );
        section.complain(bytes.span(), message);
        CrashLogSpec::SIZE_BYTES
    })
}

fn granularity(section: &mut Section<'_, '_, '_>) -> Option<Spanned<u32>> {
    let bytes = section.size("block_size")?;
    let known = u32::try_from(*bytes.get_ref()).ok().filter(|_| GRANULARITIES.contains(bytes.get_ref()));
    if known.is_none() {
        let message = format!("block_size = {} is none of 512, \"1KiB\" and \"4KiB\"", size::show(*bytes.get_ref()));
        section.complain(bytes.span(), message);
    }
    known.map(|known| Spanned::new(bytes.span(), known))
}

fn label(section: &mut Section<'_, '_, '_>) -> Option<Spanned<String>> {
    let label = section.string("label")?;
    if label.get_ref().len() > LABEL_MAX || label.get_ref().chars().any(char::is_control) {
        section.complain(label.span(), format!("`label` has more than {LABEL_MAX} bytes, or control characters"));
        return None;
    }
    Some(label)
}

fn tree_memory(section: &mut Section<'_, '_, '_>) -> u64 {
    let Some(bytes) = section.size("tree_memory") else { return ControllerSpec::TREE_MEMORY_BYTES };
    if *bytes.get_ref() < TREE_MEMORY_LEAST {
        let least = size::show(TREE_MEMORY_LEAST);
        section.complain(bytes.span(), format!("`tree_memory` is less than {least}, which holds no tree"));
    }
    bytes.into_inner()
}

/// `type = "volume"`.
pub(super) fn volume(section: &mut Section<'_, '_, '_>) -> Option<KindDraft> {
    let controller = of_controller(section);
    let volume = section.one::<String>(VOLUME, "volume").filter(|name| {
        let problem = rules::volume_name_problem(name.get_ref());
        if let Some(problem) = &problem {
            section.complain(name.span(), format!("\"{}\" is no name for a volume: {problem}", name.get_ref()));
        }
        problem.is_none()
    });
    let size = positive(section, "size").filter(|size| {
        let fits = *size.get_ref() <= VOLUME_MAX_BYTES;
        if !fits {
            section.complain(size.span(), format!("no volume is larger than {}", size::show(VOLUME_MAX_BYTES)));
        }
        fits
    });
    let quota = positive(section, "quota");
    let weight = section.one(VOLUME, "weight").map_or(VolumeSpec::WEIGHT, Spanned::into_inner);
    let iops = |section: &mut Section<'_, '_, '_>, key| section.one(VOLUME, key);
    let limits = LimitsSpec {
        read_iops: limit(section, ["read_iops", "read_iops_burst"], iops),
        write_iops: limit(section, ["write_iops", "write_iops_burst"], iops),
        read_bps: limit(section, ["read_bps", "read_bps_burst"], positive),
        write_bps: limit(section, ["write_bps", "write_bps_burst"], positive),
    };
    let read_only = flag(section, "read_only", false);
    Some(KindDraft::Volume(VolumeDraft {
        controller: controller?,
        volume: volume?,
        size,
        quota,
        weight,
        limits,
        read_only,
    }))
}

/// `type = "pf"`.
pub(super) fn physical_function(section: &mut Section<'_, '_, '_>) -> Option<KindDraft> {
    Some(KindDraft::PhysicalFunction { controller: of_controller(section)? })
}

fn of_controller(section: &mut Section<'_, '_, '_>) -> Option<Spanned<String>> {
    section.one(VOLUME, "controller")
}

fn positive(section: &mut Section<'_, '_, '_>, key: &'static str) -> Option<Spanned<u64>> {
    let bytes = section.size(key)?;
    if *bytes.get_ref() == 0 {
        section.complain(bytes.span(), format!("`{key}` is nothing; write for instance \"10GiB\", or leave it out"));
        return None;
    }
    Some(bytes)
}

/// A rate and what may be saved up of it: as much as comes in a second, unless told otherwise.
fn limit(
    section: &mut Section<'_, '_, '_>,
    [rate_key, burst_key]: [&'static str; 2],
    read: impl Fn(&mut Section<'_, '_, '_>, &'static str) -> Option<Spanned<u64>>,
) -> Option<LimitSpec> {
    let rate = read(section, rate_key);
    let burst = read(section, burst_key);
    if let Some(burst) = &burst
        && !section.has(rate_key)
    {
        section.complain(burst.span(), format!("`{burst_key}` has no meaning without `{rate_key}`"));
    }
    let per_s = rate?.into_inner();
    Some(LimitSpec { per_s, burst: burst.map_or(per_s, Spanned::into_inner) })
}
