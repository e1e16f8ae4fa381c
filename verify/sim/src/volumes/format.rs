//! The format of a store, with a power cut after every write and flush.

use sidecore_volume::{FormatOptions, Volumes, format};

use super::cut::Cutter;
use super::disk::SimDisk;
use super::world::World;
use crate::history::History;
use crate::violation::{Violation, no_panic};

/// Formats a disk with this content, with a power cut after every write and flush.
pub(super) fn format_and_cut(
    history: &mut History<World>,
    bytes: Vec<u8>,
) -> Result<Vec<u8>, Box<Violation>> {
    let disk = SimDisk::new(bytes);
    let mut uuid = [0; 16];
    uuid.fill_with(|| history.random.below(256) as u8);
    let label = format!("seed {}", history.seed);
    let options =
        FormatOptions { block_bytes: history.tuning().block_bytes, label, uuid, force: true };
    let trace = [(0, "format".to_owned())];
    format(&mut disk.clone(), &options)
        .map_err(|error| history.violation("formatting", error.to_string(), &trace, 1))?;
    let recording = disk.recording();
    let mut cutter = Cutter::new(&recording);
    while cutter.advance() {
        let position = cutter.position();
        history.ledger.outcome.cut_points += 1;
        history.ledger.outcome.disks += 1;
        let done = position == recording.log.len();
        let uuid_found = cutter.cut(&mut history.random, true, |image| {
            no_panic(|| match Volumes::open(image) {
                // An incomplete format need not be a store, and may be the former one, damaged.
                Ok(volumes) if volumes.uuid() == uuid && volumes.list().next().is_some() => {
                    Err("volumes in a store that was just formatted".to_owned())
                }
                Ok(volumes) => Ok(Some(volumes.uuid())),
                Err(error) if done => Err(format!("open: {error}")),
                Err(_) => Ok(None),
            })
        });
        let right = uuid_found.and_then(|found| match found {
            Some(found) if done && found != uuid => Err("the former store is back".to_owned()),
            _ => Ok(()),
        });
        right.map_err(|what| {
            history.violation(&format!("cut {position} of a format"), what, &trace, position)
        })?;
    }
    Ok(disk.bytes())
}
