//! The state of QEMU that a backup can read or change.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::OwnedFd;

use crate::node::{Bitmap, Node};
use crate::refusal::{Answer, Refusal};
use crate::serving::NbdServer;

pub(crate) struct State {
    pub(crate) version: [u64; 3],
    pub(crate) nodes: BTreeMap<String, Node>,
    pub(crate) devices: Vec<Device>,
    /// Newest first, as QEMU lists them.
    pub(crate) exports: Vec<Exported>,
    pub(crate) server: Option<NbdServer>,
    pub(crate) jobs: Vec<Job>,
    pub(crate) fd_sets: BTreeMap<u64, FdSet>,
    /// Files that were passed by `getfd`.
    pub(crate) files: BTreeMap<String, OwnedFd>,
    pub(crate) is_running: bool,
    /// Number of clients of the monitor. Without a client, files that no node uses are closed.
    pub(crate) client_count: usize,
    /// The reason for which QEMU has aborted.
    pub(crate) aborted: Option<String>,
    /// Incremented when clients of the NBD server are disconnected.
    pub(crate) generation: u64,
    pub(crate) next_number: u64,
}

/// A device of the guest.
#[derive(Debug, Clone)]
pub(crate) struct Device {
    /// The path in QEMU's object model.
    pub(crate) path: String,
    pub(crate) kind: &'static str,
    pub(crate) node: String,
    pub(crate) iothread: Option<String>,
}

/// An NBD export.
#[derive(Debug, Clone)]
pub(crate) struct Exported {
    pub(crate) id: String,
    pub(crate) node: String,
    pub(crate) name: String,
    pub(crate) is_writable: bool,
    /// Bitmaps of the export: node and name of each.
    pub(crate) bitmaps: Vec<(String, String)>,
}

/// A backup job that copies the ranges in a bitmap.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) id: String,
    pub(crate) source: String,
    pub(crate) target: String,
    pub(crate) filter: String,
    pub(crate) bitmap: String,
    pub(crate) status: JobStatus,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum JobStatus {
    Running,
    Done,
    Cancelled,
}

/// Files that were passed by `add-fd`.
#[derive(Debug)]
pub(crate) struct FdSet {
    pub(crate) label: String,
    pub(crate) file: File,
    pub(crate) is_removed: bool,
    /// Number of nodes that have the set open.
    pub(crate) user_count: usize,
}

impl State {
    pub(crate) fn new(version: [u64; 3]) -> Self {
        Self {
            version,
            nodes: BTreeMap::new(),
            devices: Vec::new(),
            exports: Vec::new(),
            server: None,
            jobs: Vec::new(),
            fd_sets: BTreeMap::new(),
            files: BTreeMap::new(),
            is_running: true,
            client_count: 0,
            aborted: None,
            generation: 0,
            next_number: 100,
        }
    }

    pub(crate) fn number(&mut self) -> u64 {
        self.next_number += 1;
        self.next_number
    }

    pub(crate) fn node(&self, name: &str) -> Answer<&Node> {
        self.nodes.get(name).ok_or_else(|| no_node(name))
    }

    pub(crate) fn node_mut(&mut self, name: &str) -> Answer<&mut Node> {
        self.nodes.get_mut(name).ok_or_else(|| no_node(name))
    }

    pub(crate) fn bitmap_mut(&mut self, node: &str, name: &str) -> Answer<&mut Bitmap> {
        let node = self.node_mut(node)?;
        let found = node.bitmap_mut(name);
        found.ok_or_else(|| Refusal::generic(format!("Dirty bitmap '{name}' not found")))
    }

    pub(crate) fn device(&self, path: &str) -> Answer<&Device> {
        let found = self.devices.iter().find(|device| device.path == path);
        found.ok_or_else(|| Refusal::device_not_found(path))
    }

    /// Whether a device, an export, a job or another node uses a node.
    pub(crate) fn is_in_use(&self, name: &str) -> bool {
        self.devices.iter().any(|device| device.node == name)
            || self.exports.iter().any(|export| export.node == name)
            || self.jobs.iter().any(|job| job.is_running() && job.uses(name))
            || self.parents(name).next().is_some()
    }

    /// The nodes above a node, with the names of the edges.
    pub(crate) fn parents<'a>(&'a self, name: &'a str) -> impl Iterator<Item = (&'a str, &'static str)> + 'a {
        self.nodes.iter().flat_map(move |(parent, node)| {
            let edges = node.children.iter().filter(move |(_, child)| child == name);
            edges.map(move |(edge, _)| (&parent[..], *edge))
        })
    }

    pub(crate) fn insert_node(&mut self, name: String, mut node: Node) {
        node.number = self.number();
        self.nodes.insert(name, node);
    }

    /// Removes a node, and the nodes that only it uses.
    pub(crate) fn remove_node(&mut self, name: &str) {
        let Some(node) = self.nodes.remove(name) else { return };
        if let Some(set) = node.fd_set.and_then(|set| self.fd_sets.get_mut(&set)) {
            set.user_count -= 1;
        }
        for (_, child) in node.children {
            let is_inline = self.nodes.get(&child).is_some_and(|child| !child.is_monitor_owned);
            if is_inline {
                self.remove_node(&child);
            }
        }
        self.close_unused_files();
    }

    /// Closes passed files like QEMU: a file that no node has open is closed once it was removed or the monitor has no
    /// client, but never while the machine is stopped.
    ///
    /// Source: `monitor_fdset_cleanup` in `monitor/fds.c` (7.2: `monitor/misc.c`).
    pub(crate) fn close_unused_files(&mut self) {
        let (is_running, has_clients) = (self.is_running, self.client_count > 0);
        self.fd_sets
            .retain(|_, set| !(is_running && set.user_count == 0 && (set.is_removed || !has_clients)));
    }
}

impl Job {
    pub(crate) fn is_running(&self) -> bool {
        self.status == JobStatus::Running
    }

    fn uses(&self, node: &str) -> bool {
        [&self.source, &self.target].into_iter().any(|used| used == node)
    }
}

pub(crate) fn no_node(name: &str) -> Refusal {
    Refusal::generic(format!("Cannot find device='' nor node-name='{name}'"))
}
