//! The metrics of controllers and their functions.

use sidecore_assembly::report::{ControllerReport, FunctionReport};
use sidecore_telemetry::{Metric, Value};

use super::{Page, gauge};

const CONTROLLERS: &[Metric<ControllerReport>] = &[
    gauge(
        "read_only",
        "1 if changes are refused: metadata is damaged, or could not be written.",
        |c| Value::Whole(c.read_only.into()),
    ),
    gauge("store_full", "1 if the store had no space for the last commit, which is kept.", |c| {
        Value::Whole(c.full.is_some().into())
    }),
    gauge("nearly_full", "1 if more is in use than `warn_used_percent`.", |c| {
        Value::Whole(c.nearly_full_percent.is_some().into())
    }),
    gauge(
        "provisioned_bytes",
        "The sizes of its volumes together, without snapshots: more than its store has is \
         over-commitment.",
        |c| Value::Whole(c.provisioned_bytes),
    ),
    gauge(
        "damaged",
        "How many things were found damaged.",
        |c| Value::Whole(c.damage.len() as u64),
    ),
    gauge("volumes", "Volumes and snapshots.", |c| Value::Whole(c.volumes)),
    gauge("extents", "Extents that map their blocks.", |c| Value::Whole(c.extents)),
    gauge("functions", "Virtual functions that are open.", |c| {
        Value::Whole(c.functions.len() as u64)
    }),
    gauge("tree_memory_bytes", "Memory of the extent trees.", |c| {
        Value::Whole(c.tree_memory.used_bytes)
    }),
    gauge("tree_memory_max_bytes", "The most that the extent trees may use: `tree_memory`.", |c| {
        Value::Whole(c.tree_memory.max_bytes)
    }),
];

const SPACE_HELP: &str = "The store's bytes by their use, which add up to all of them: `free`, \
                          `data`, `metadata`, `reserved` (kept for metadata), `granted` (to writes \
                          in flight), `pending` (freed, not yet reusable).";

const FUNCTIONS: &[Metric<FunctionReport>] = &[
    gauge("weight", "Its share among the functions that compete.", |f| {
        Value::Whole(f.weight.into())
    }),
    gauge("queues", "Queues that are open.", |f| Value::Whole(f.channels)),
    gauge("tree_depth", "Levels of its extent tree.", |f| Value::Whole(f.tree.depth.into())),
    gauge("tree_nodes", "Nodes of 4 KiB of its extent tree.", |f| Value::Whole(f.tree.nodes)),
    gauge("tree_extents", "Extents in the tree.", |f| Value::Whole(f.tree.extents)),
    gauge("mapped_bytes", "Bytes that they map.", |f| Value::Whole(f.tree.mapped_bytes)),
];

impl Page {
    pub(super) fn controllers(&mut self, controllers: &[ControllerReport]) {
        let name = "sidecore_controller_info";
        self.family(name, "gauge", "Always 1; join it to the others for its labels.");
        for controller in controllers {
            let block_bytes = controller.block_bytes.to_string();
            let labels = [
                ("controller", controller.name.as_str()),
                ("store", &controller.store),
                ("block_bytes", &block_bytes),
            ];
            self.sample(name, &labels, Value::Whole(1));
        }
        let name = "sidecore_controller_space_bytes";
        self.family(name, "gauge", SPACE_HELP);
        for controller in controllers {
            let space = &controller.space;
            for (usage, bytes) in [
                ("free", space.free_bytes),
                ("data", space.data_bytes),
                ("metadata", space.metadata_bytes),
                ("reserved", space.reserved_bytes),
                ("granted", space.granted_bytes),
                ("pending", space.pending_bytes),
            ] {
                self.sample(
                    name,
                    &[("controller", controller.name.as_str()), ("use", usage)],
                    Value::Whole(bytes),
                );
            }
        }
        let labelled = || controllers.iter().map(|c| (vec![("controller", c.name.as_str())], c));
        self.metrics("sidecore_controller_", CONTROLLERS, labelled());
        self.counts("sidecore_controller_", labelled().map(|(labels, c)| (labels, &c.translation)));
        self.counts("sidecore_controller_", labelled().map(|(labels, c)| (labels, &c.counts)));
        let functions: Vec<(&str, String, &FunctionReport)> = controllers
            .iter()
            .flat_map(|controller| {
                controller.functions.iter().map(move |function| (controller, function))
            })
            .map(|(controller, function)| {
                (controller.name.as_str(), function.id.to_string(), function)
            })
            .collect();
        let labelled = || {
            functions.iter().map(|(controller, id, function)| {
                let labels = vec![
                    ("controller", *controller),
                    ("function", id.as_str()),
                    ("volume", function.volume.as_str()),
                ];
                (labels, *function)
            })
        };
        self.metrics("sidecore_function_", FUNCTIONS, labelled());
        self.counts("sidecore_function_", labelled().map(|(labels, f)| (labels, &f.stats)));
    }
}
