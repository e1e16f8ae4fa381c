//! The metrics of controllers and their functions.

use sidecore_assembly::report::{ControllerReport, FunctionReport};

use super::{Metric, Page, Value, counter, gauge};

const CONTROLLERS: &[Metric<ControllerReport>] = &[
    gauge("sidecore_controller_read_only", "1 if nothing may be changed any more.", |c| {
        Value::Whole(c.read_only.into())
    }),
    gauge("sidecore_controller_store_full", "1 if the store had no space for the last commit, which is kept.", |c| {
        Value::Whole(c.full.is_some().into())
    }),
    gauge("sidecore_controller_nearly_full", "1 if more is in use than `warn_used_percent`.", |c| {
        Value::Whole(c.nearly_full_percent.is_some().into())
    }),
    gauge("sidecore_controller_promised_bytes", "The sizes of its volumes together, without snapshots.", |c| {
        Value::Whole(c.promised_bytes)
    }),
    gauge("sidecore_controller_damaged", "How much was found damaged.", |c| Value::Whole(c.damage.len() as u64)),
    gauge("sidecore_controller_volumes", "Volumes and snapshots.", |c| Value::Whole(c.volumes)),
    gauge("sidecore_controller_extents", "Extents that map their blocks.", |c| Value::Whole(c.extents)),
    gauge("sidecore_controller_functions", "Virtual functions that are open.", |c| {
        Value::Whole(c.functions.len() as u64)
    }),
    gauge("sidecore_controller_tree_memory_bytes", "Memory of the extent trees.", |c| {
        Value::Whole(c.tree_memory.used_bytes)
    }),
    gauge("sidecore_controller_tree_memory_max_bytes", "The most that it may be.", |c| {
        Value::Whole(c.tree_memory.max_bytes)
    }),
    counter("sidecore_controller_btlb_hits_total", "Translations found in the buffer.", |c| {
        Value::Whole(c.translation.btlb_hits)
    }),
    counter("sidecore_controller_walks_total", "Translations that walked a tree.", |c| {
        Value::Whole(c.translation.walks)
    }),
    counter("sidecore_controller_walk_nodes_total", "Nodes that walks went through.", |c| {
        Value::Whole(c.translation.nodes_visited)
    }),
    counter("sidecore_controller_pruned_nodes_total", "Nodes of trees dropped from memory.", |c| {
        Value::Whole(c.pruned_nodes)
    }),
    counter("sidecore_controller_commits_total", "Times that metadata was made durable.", |c| Value::Whole(c.commits)),
];

const FUNCTIONS: &[Metric<FunctionReport>] = &[
    gauge("sidecore_function_weight", "Share among those that want to be served.", |f| Value::Whole(f.weight.into())),
    gauge("sidecore_function_queues", "Queues that are open.", |f| Value::Whole(f.channels)),
    gauge("sidecore_function_tree_depth", "Levels of the extent tree.", |f| Value::Whole(f.tree.depth.into())),
    gauge("sidecore_function_tree_nodes", "Nodes of the extent tree.", |f| Value::Whole(f.tree.nodes)),
    gauge("sidecore_function_tree_extents", "Extents in the tree.", |f| Value::Whole(f.tree.extents)),
    gauge("sidecore_function_mapped_bytes", "Bytes that they map.", |f| Value::Whole(f.tree.mapped_bytes)),
    gauge("sidecore_function_stalled", "Requests that wait for the hypervisor right now.", |f| Value::Whole(f.stalled)),
    counter("sidecore_function_last_extent_hits_total", "Requests that stayed in the queue's last extent.", |f| {
        Value::Whole(f.last_hits)
    }),
    counter("sidecore_function_translations_total", "Requests that were translated.", |f| Value::Whole(f.translations)),
    counter("sidecore_function_splits_total", "Requests cut at the borders of extents.", |f| Value::Whole(f.splits)),
    counter("sidecore_function_misses_total", "Writes that found no block of their own.", |f| Value::Whole(f.misses)),
    counter("sidecore_function_prune_misses_total", "Requests that came upon a pruned part of the tree.", |f| {
        Value::Whole(f.prune_misses)
    }),
    counter("sidecore_function_rewalks_total", "Walks after a miss was served.", |f| Value::Whole(f.rewalks)),
    counter("sidecore_function_throttled_total", "Requests held back by limits.", |f| Value::Whole(f.throttled)),
];

impl Page {
    pub(super) fn controllers(&mut self, controllers: &[ControllerReport]) {
        let name = "sidecore_controller_info";
        self.family(name, "gauge", "Always 1; what the controller is, in labels.");
        for controller in controllers {
            let block_bytes = controller.block_bytes.to_string();
            let labels =
                [("controller", controller.name.as_str()), ("store", &controller.store), ("block_bytes", &block_bytes)];
            self.sample(name, &labels, Value::Whole(1));
        }
        let name = "sidecore_controller_space_bytes";
        self.family(name, "gauge", "What the store's bytes are used for.");
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
                self.sample(name, &[("controller", controller.name.as_str()), ("use", usage)], Value::Whole(bytes));
            }
        }
        for metric in CONTROLLERS {
            self.metric("", metric, controllers.iter().map(|c| (vec![("controller", c.name.as_str())], c)));
        }
        let functions: Vec<(&str, String, &FunctionReport)> = controllers
            .iter()
            .flat_map(|controller| controller.functions.iter().map(move |function| (controller, function)))
            .map(|(controller, function)| (controller.name.as_str(), function.id.to_string(), function))
            .collect();
        for metric in FUNCTIONS {
            let labelled = functions.iter().map(|(controller, id, function)| {
                let labels =
                    vec![("controller", *controller), ("function", id.as_str()), ("volume", function.volume.as_str())];
                (labels, *function)
            });
            self.metric("", metric, labelled);
        }
    }
}
