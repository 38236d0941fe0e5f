//! Adds nodes, changes their children, and deletes them.

use std::fs::File;

use serde_json::Value;

use crate::node::{Driver, Node, SavedClusters};
use crate::refusal::{Answer, Refusal, items, text};
use crate::state::State;

/// Prefix of the names of files that a client has passed.
const FD_SET: &str = "/dev/fdset/";

impl State {
    pub(super) fn add_node(&mut self, options: &Value) -> Answer<()> {
        let name = text(options, "node-name")?.to_owned();
        if self.nodes.contains_key(&name) {
            return Err(Refusal::generic(format!("Duplicate nodes with node-name='{name}'")));
        }
        let node = self.open_node(options)?;
        self.insert_node(name.clone(), node);
        self.check_permissions().inspect_err(|_| self.remove_node(&name))
    }

    fn open_node(&mut self, options: &Value) -> Answer<Node> {
        let driver = text(options, "driver")?.to_owned();
        match &driver[..] {
            "null-co" => {
                let size_bytes = options.get("size").and_then(Value::as_u64).unwrap_or(1 << 30);
                Ok(Node::new(Driver::NullCo, size_bytes))
            }
            "file" => self.open_file(text(options, "filename")?),
            "raw" => self.above(options, Driver::Raw),
            "snapshot-access" => self.above(options, Driver::SnapshotAccess),
            "copy-before-write" => {
                let target = text(options, "target")?.to_owned();
                self.node(&target)?;
                let mut node = self.above(options, Driver::CopyBeforeWrite(SavedClusters::default()))?;
                node.children.push(("target", target));
                Ok(node)
            }
            other => Err(Refusal::generic(format!(
                "Parameter 'driver' does not accept value '{other}'"
            ))),
        }
    }

    /// A node above another one, which the options name or describe.
    fn above(&mut self, options: &Value, driver: Driver) -> Answer<Node> {
        let child = match &options["file"] {
            Value::String(name) => name.clone(),
            described => {
                let mut node = self.open_node(described)?;
                node.is_monitor_owned = false;
                let name = format!("#block{}", self.number());
                self.insert_node(name.clone(), node);
                name
            }
        };
        let below = self.node(&child)?;
        let (size_bytes, filename) = (below.size_bytes, below.filename.clone());
        let mut node = Node::new(driver, size_bytes);
        node.filename = filename;
        node.children.push(("file", child));
        Ok(node)
    }

    fn open_file(&mut self, filename: &str) -> Answer<Node> {
        let failed = |error: std::io::Error| Refusal::generic(format!("Could not open '{filename}': {error}"));
        let number = filename.strip_prefix(FD_SET).and_then(|number| number.parse().ok());
        let file = match number {
            None => File::options().read(true).write(true).open(filename),
            Some(number) => {
                let set = self.fd_sets.get_mut(&number).filter(|set| !set.is_removed);
                let set = set.ok_or_else(|| failed(std::io::ErrorKind::NotFound.into()))?;
                set.user_count += 1;
                set.file.try_clone()
            }
        };
        let file = file.map_err(failed)?;
        let size_bytes = file.metadata().map_err(failed)?.len();
        let mut node = Node::new(Driver::File(file), size_bytes);
        filename.clone_into(&mut node.filename);
        node.fd_set = number;
        Ok(node)
    }

    pub(super) fn delete_node(&mut self, arguments: &Value) -> Answer<()> {
        let name = text(arguments, "node-name")?;
        let Some(node) = self.nodes.get(name) else {
            return Err(Refusal::generic(format!("Failed to find node with node-name='{name}'")));
        };
        if !node.is_monitor_owned {
            return Err(Refusal::generic(format!("Node {name} is not owned by the monitor")));
        }
        if self.is_in_use(name) {
            return Err(Refusal::generic(format!("Block device {name} is in use")));
        }
        self.remove_node(name);
        Ok(())
    }

    /// Moves pass-through nodes to other children: all of them, or none.
    pub(super) fn reopen(&mut self, arguments: &Value) -> Answer<()> {
        let mut before = Vec::new();
        let mut moved = Ok(());
        for options in items(arguments, "options") {
            match self.move_child(options) {
                Ok(undo) => before.push(undo),
                Err(refusal) => moved = moved.and(Err(refusal)),
            }
        }
        moved.and_then(|()| self.check_permissions()).inspect_err(|_| {
            for (name, child) in before.into_iter().rev() {
                if let Some(node) = self.nodes.get_mut(&name) {
                    node.children = vec![("file", child)];
                }
            }
        })
    }

    fn move_child(&mut self, options: &Value) -> Answer<(String, String)> {
        let (name, child) = (text(options, "node-name")?, text(options, "file")?);
        let driver = text(options, "driver")?;
        let node = self.node(name)?;
        if node.driver.name() != driver {
            return Err(Refusal::generic("Cannot change the option 'driver'"));
        }
        let Some(old) = node.child("file").map(str::to_owned) else {
            return Err(Refusal::generic("Cannot change the option 'file'"));
        };
        self.node(child)?;
        if self.is_below(name, child) {
            return Err(Refusal::generic(format!(
                "Making '{child}' a child of '{name}' would create a cycle"
            )));
        }
        self.node_mut(name)?.children = vec![("file", child.to_owned())];
        Ok((name.to_owned(), old))
    }

    /// Whether `wanted` is `top`, or a node below it.
    fn is_below(&self, wanted: &str, top: &str) -> bool {
        let children = self.nodes.get(top).map_or(&[][..], |node| &node.children);
        wanted == top || children.iter().any(|(_, child)| self.is_below(wanted, child))
    }
}
