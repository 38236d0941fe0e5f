//! QEMU's description of itself and of its nodes.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::state::State;

impl State {
    pub(super) fn describe_nodes(&self) -> Value {
        let mut nodes: Vec<_> = self.nodes.iter().collect();
        // Newest first, as QEMU lists them.
        nodes.sort_by_key(|(_, node)| std::cmp::Reverse(node.number));
        nodes.iter().map(|(name, node)| node.describe(name)).collect()
    }

    pub(super) fn describe_graph(&self) -> Value {
        let ids: BTreeMap<&String, usize> = self.nodes.keys().zip(1..).collect();
        let nodes = ids
            .iter()
            .map(|(name, id)| json!({ "id": id, "type": "block-driver", "name": name }));
        let below = |(name, node): (&String, &crate::node::Node)| {
            let parent = ids[name];
            let edges = node
                .children
                .iter()
                .filter_map(|(edge, child)| Some((*edge, *ids.get(child)?)));
            let edges = edges.map(move |(edge, child)| json!({ "parent": parent, "name": edge, "child": child }));
            edges.collect::<Vec<_>>()
        };
        let edges: Vec<Value> = self.nodes.iter().flat_map(below).collect();
        json!({ "nodes": nodes.collect::<Vec<_>>(), "edges": edges })
    }

    /// The answer to a query. Except for `query-status`, it does not depend on the state of the model.
    pub(super) fn describe(&self, name: &str) -> Option<Value> {
        let [major, minor, micro] = self.version;
        Some(match name {
            "query-status" => {
                let status = if self.is_running { "running" } else { "paused" };
                json!({ "running": self.is_running, "status": status, "singlestep": false })
            }
            "query-version" => json!({ "qemu": { "major": major, "minor": minor, "micro": micro }, "package": "" }),
            "query-name" => json!({ "name": "model" }),
            "query-uuid" => json!({ "UUID": "6b1e0d0c-6f0f-4d4e-9d2a-4f2b6d4b8c11" }),
            "query-cpus-fast" => json!([{ "cpu-index": 0, "thread-id": std::process::id() }]),
            "query-memory-size-summary" => json!({ "base-memory": 16 << 20 }),
            "query-migrate-parameters" => json!({ "max-bandwidth": 134_217_728, "downtime-limit": 300 }),
            "query-migrate" => json!({}),
            "query-tpm" | "query-chardev" | "query-pci" => json!([]),
            _ => return None,
        })
    }
}
