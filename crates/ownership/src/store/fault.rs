//! Errors of a store's tasks, as operators see them.

use super::Phase;

/// An error of a phase's task.
pub(super) fn describe(phase: &Phase, name: &str, why: &str) -> String {
    match phase {
        Phase::Fencing { suspects, .. } if suspects.is_empty() => {
            format!("the fence of store \"{name}\" failed: {why}")
        }
        Phase::Fencing { suspects, .. } => {
            let suspects: Vec<String> = suspects.iter().map(ToString::to_string).collect();
            format!(
                "store \"{name}\" may still be written by {}, and the fence failed: {why}",
                suspects.join(", ")
            )
        }
        Phase::Opening => format!("store \"{name}\" cannot be opened: {why}"),
        Phase::Closing { .. } => format!("store \"{name}\" cannot be closed: {why}"),
        _ => format!("the record of store \"{name}\": {why}"),
    }
}
