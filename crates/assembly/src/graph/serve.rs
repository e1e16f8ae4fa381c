//! New devices get their sockets, and the clients of another process.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use sidecore_nvme_subsystem::restore;

use super::{Graph, Occasion, lock};
use crate::AssemblyError;
use crate::disk::Disk;
use crate::front_end::Place;
use crate::volume_service::Volumes;

/// Serves the created devices, after functions have got the state that they had under another
/// process. The graph is locked for each function and each device, so the caller must not have
/// locked it.
///
/// # Errors
/// The first failure, unless the occasion tolerates it. The failed device is removed.
pub(crate) fn serve_created(
    graph: &Mutex<Graph>,
    created: Vec<Arc<Disk>>,
    occasion: Occasion,
) -> Result<(), AssemblyError> {
    let (services, states, subsystems) = {
        let graph = lock(graph);
        let controllers = graph.lists.controllers.all();
        let volumes = |controller| Volumes::new(controller, &graph.this, &graph.lists.disks);
        let services: Vec<Volumes> = controllers.iter().map(volumes).collect();
        let states: BTreeMap<_, _> =
            graph.left.iter().flat_map(|left| left.subsystem().functions).collect();
        (services, states, Arc::clone(&graph.lists.subsystems))
    };
    services.iter().for_each(|service| restore(service, &states));
    subsystems.refresh();
    // Physical functions come last: requests of their hosts may concern other functions, whose
    // clients must be connected by then.
    let (last, first): (Vec<_>, Vec<_>) = created.into_iter().partition(|disk| disk.manages());
    for disk in first.into_iter().chain(last) {
        // Resolved before the graph is locked: the name service may take a while to answer.
        let access = disk.spec.access.resolve();
        let mut graph = lock(graph);
        let name = &disk.spec.name;
        if graph.ends {
            return Err(AssemblyError::Ending);
        }
        // Removed meanwhile.
        if !graph.lists.all_disks().iter().any(|listed| Arc::ptr_eq(listed, &disk)) {
            continue;
        }
        let account = |error| AssemblyError::Account { name: name.clone(), error };
        let place = match graph.listening.remove(name) {
            Some(listening) => Ok(Place::Listening(listening)),
            None => access.map(Place::New).map_err(account),
        };
        let at = graph.left.iter().position(|left| left.name == *name);
        let served = place.and_then(|place| disk.serve(place, at.map(|at| graph.left.remove(at))));
        match served {
            Ok(()) if occasion == Occasion::Late => {
                tracing::info!(device = name, "served, its store is open now")
            }
            Ok(()) => {}
            Err(error) => {
                graph.forget(&disk);
                match occasion {
                    Occasion::Late => graph.refuse_device(name, error.to_string()),
                    Occasion::Addition => {
                        let _ = graph.unwant(name);
                    }
                    Occasion::Opening | Occasion::Start => return Err(error),
                }
                graph.close_unneeded();
                if occasion == Occasion::Addition {
                    return Err(error);
                }
            }
        }
    }
    Ok(())
}
