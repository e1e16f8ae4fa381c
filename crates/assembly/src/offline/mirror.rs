//! A mirror that is made of stores which no daemon has open.

use std::sync::Arc;

use sidecore_block::BlockDevice;
use sidecore_mirror::{CreateOptions, LegError, MirrorError, Sleep};

use super::OfflineError;
use crate::plan::{Parts, check};
use crate::spec::{MirrorSpec, Spec, StoreKind, StoreSpec};
use crate::stores::{behind, open_file};

/// How a mirror is made.
#[derive(Clone, Debug, Default)]
pub struct MirrorOptions {
    /// The mirror's identity: random.
    pub uuid: [u8; 16],
    /// Those of its legs that it is made of; all if this is empty.
    pub legs: Vec<String>,
    /// The unit in which legs are compared and copied; `None` for what suits their size.
    pub region_bytes: Option<u64>,
    /// Whether all stores hold the same bytes, for instance zeros. Otherwise those of the first one
    /// are copied to the others when a daemon opens the mirror.
    pub are_equal: bool,
    /// Whether headers of other mirrors are overwritten.
    pub force: bool,
}

/// A mirror that was made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewMirror {
    /// The size in bytes.
    pub capacity_bytes: u64,
    /// The unit in bytes in which legs are compared and copied.
    pub region_bytes: u64,
    /// The stores, by the numbers of the legs.
    pub legs: Vec<String>,
}

/// Makes the mirror that a store of this specification is. Its stages are not passed, and those of
/// its legs are.
///
/// # Errors
/// There is no such mirror, or a store cannot be a leg: then nothing was changed. Or one cannot be
/// written.
pub fn create_mirror(
    spec: &Spec,
    name: &str,
    options: &MirrorOptions,
) -> Result<NewMirror, OfflineError> {
    let refused = |why: String| OfflineError::Mirror { name: name.to_owned(), why };
    check(spec).map_err(|error| refused(error.to_string()))?;
    let parts = Parts::of(spec);
    let mirror = parts.store(name).and_then(|store| store.kind.mirror());
    let mirror = mirror.ok_or_else(|| refused("there is no mirror of this name".to_owned()))?;
    let legs = legs(mirror, &options.legs).map_err(refused)?;
    let mut devices = Vec::new();
    for leg in &legs {
        let opened = open(leg, &parts);
        devices.push(opened.map_err(|why| refused(format!("leg \"{leg}\": {why}")))?);
    }
    let creation = CreateOptions {
        uuid: options.uuid,
        region_bytes: options.region_bytes,
        are_equal: options.are_equal,
        force: options.force,
    };
    let made = sidecore_mirror::create(&devices, &creation, &mut Sleep::default());
    let layout = made.map_err(|error| refused(explained(error, &legs)))?;
    let (capacity_bytes, region_bytes) = (layout.capacity_bytes, layout.region_bytes);
    Ok(NewMirror { capacity_bytes, region_bytes, legs })
}

/// The legs that are asked for, in the order of the specification.
fn legs(mirror: &MirrorSpec, asked: &[String]) -> Result<Vec<String>, String> {
    if let Some(unknown) = asked.iter().find(|leg| !mirror.legs.contains(leg)) {
        return Err(format!("\"{unknown}\" is none of its `legs`"));
    }
    let is_asked = |leg: &&String| asked.is_empty() || asked.contains(leg);
    Ok(mirror.legs.iter().filter(is_asked).cloned().collect())
}

/// Opens the store of a leg, with the stages in front of its file.
fn open(leg: &str, parts: &Parts<'_>) -> Result<Arc<dyn BlockDevice>, String> {
    let mut below: Vec<&StoreSpec> = parts.down(leg).collect();
    let bottom = below.pop().ok_or("there is no such store")?;
    if !matches!(bottom.kind, StoreKind::File(_) | StoreKind::HostFile(_)) {
        return Err(format!(
            "a store of type \"{}\" is opened by the daemon only: name the other legs with --leg, \
             and add this one with `sidecore mirror add` when the daemon runs",
            bottom.kind.word()
        ));
    }
    below
        .into_iter()
        .rev()
        .try_fold(open_file(bottom).map_err(|error| error.to_string())?, |below, store| {
            behind(store, below).map_err(|error| error.to_string())
        })
}

fn explained(error: MirrorError, legs: &[String]) -> String {
    match error {
        MirrorError::Leg { store, error } => {
            let leg = legs.get(store).map_or("", String::as_str);
            let remedy = if error == LegError::HasHeader { " (--force overwrites it)" } else { "" };
            format!("leg \"{leg}\": {error}{remedy}")
        }
        error => error.to_string(),
    }
}
