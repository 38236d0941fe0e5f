//! The graph of QEMU's block nodes.

use serde_json::{Value, json};

use crate::qemu::qmp::{Monitor, MonitorError, QmpCommand, Result};

/// A snapshot of QEMU's block graph.
pub(crate) struct Graph {
    /// Node names by id; other ids are devices and jobs.
    nodes: Vec<(u64, String)>,
    /// Parent, name of the edge, child.
    edges: Vec<(u64, String, u64)>,
}

const COMMAND: &str = "x-debug-query-block-graph";

impl Graph {
    /// Queries the graph. No other command of QEMU up to version 10 reports the children of a node. This one exists
    /// since 4.0.
    pub(crate) fn query(monitor: &dyn Monitor) -> Result<Self> {
        let answer = monitor.execute(&QmpCommand::new(COMMAND, Value::Null))?;
        Self::parse(&answer).ok_or_else(|| MonitorError::Invalid {
            command: COMMAND.to_owned(),
            detail: "not a block graph".to_owned(),
        })
    }

    pub(super) fn parse(answer: &Value) -> Option<Self> {
        let text = |value: &Value, key: &str| Some(value.get(key)?.as_str()?.to_owned());
        let number = |value: &Value, key: &str| value.get(key)?.as_u64();
        let nodes = answer.get("nodes")?.as_array()?.iter();
        let nodes = nodes.map(|node| Some((number(node, "id")?, text(node, "name")?)));
        let edges = answer.get("edges")?.as_array()?.iter();
        let edges = edges.map(|edge| Some((number(edge, "parent")?, text(edge, "name")?, number(edge, "child")?)));
        Some(Self {
            nodes: nodes.collect::<Option<_>>()?,
            edges: edges.collect::<Option<_>>()?,
        })
    }

    /// The children of `parent`, with the names of the edges.
    pub(crate) fn children(&self, parent: &str) -> impl Iterator<Item = (&str, &str)> {
        let id = self.nodes.iter().find(|(_, name)| name == parent).map(|(id, _)| *id);
        let edges = self.edges.iter().filter(move |(from, ..)| Some(*from) == id);
        edges.filter_map(|(_, edge, child)| {
            let (_, name) = self.nodes.iter().find(|(id, _)| id == child)?;
            Some((&edge[..], &name[..]))
        })
    }

    /// The child of `parent` by the edge `edge` ("file", "backing").
    pub(crate) fn child(&self, parent: &str, edge: &str) -> Option<&str> {
        let (id, _) = self.nodes.iter().find(|(_, name)| name == parent)?;
        let (_, _, child) = self.edges.iter().find(|(from, name, _)| from == id && name == edge)?;
        let (_, name) = self.nodes.iter().find(|(id, _)| id == child)?;
        Some(name)
    }
}

/// A command about one node.
pub(crate) fn about_node(command: &'static str, node: &str) -> QmpCommand {
    QmpCommand::new(command, json!({ "node-name": node }))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::Graph;

    #[test]
    fn children_are_found_by_their_edge() {
        let answer = json!({
            "nodes": [
                { "id": 1, "type": "block-backend", "name": "" },
                { "id": 2, "type": "block-driver", "name": "filter" },
                { "id": 3, "type": "block-driver", "name": "format" },
                { "id": 4, "type": "block-driver", "name": "scratch" },
            ],
            "edges": [
                { "parent": 1, "name": "root", "child": 2, "perm": [], "shared-perm": [] },
                { "parent": 2, "name": "target", "child": 4, "perm": [], "shared-perm": [] },
                { "parent": 2, "name": "file", "child": 3, "perm": [], "shared-perm": [] },
            ],
        });
        let graph = Graph::parse(&answer).unwrap();
        assert_eq!(graph.child("filter", "file"), Some("format"));
        assert_eq!(graph.child("filter", "backing"), None);
        assert_eq!(graph.child("missing", "file"), None);
        assert!(Graph::parse(&json!({ "nodes": [{}], "edges": [] })).is_none());
    }
}
