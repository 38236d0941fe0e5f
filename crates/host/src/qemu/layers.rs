//! The backing chain of a disk of a running QEMU, from the active layer to the base.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::disks::{Bitmap, bitmaps_of, keeps_bitmaps};
use super::graph::Graph;
use crate::qemu::jobs::list;
use crate::qemu::qmp::{Monitor, Result};

/// Filter nodes, which show the content of their child `file`.
const FILTERS: [&str; 5] = [
    "copy-on-read",
    "throttle",
    "compress",
    "preallocate",
    "copy-before-write",
];
/// Drivers of files and devices of this host.
const LOCAL: [&str; 3] = ["file", "host_device", "host_cdrom"];
/// The index of the start time in a thread's `stat` file, counted after the name.
const START_FIELD: usize = 19;
/// A limit above the depth that QEMU supports.
const LAYER_COUNT_MAX: usize = 1000;

/// A layer of a disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layer {
    /// The name of its node.
    pub node: String,
    /// The driver: "qcow2", "raw"...
    pub driver: String,
    /// QEMU's name of its image.
    pub image: String,
    /// Size of the virtual disk in bytes.
    pub size_bytes: u64,
    /// Whether the image can store bitmaps. Such an image (qcow2, version 3) also records for each cluster whether it
    /// was written.
    pub keeps_bitmaps: bool,
    /// Whether the next layer is its direct backing image, without a filter in between.
    pub is_on_backing: bool,
    /// The bitmaps.
    pub bitmaps: Vec<Bitmap>,
    /// The names of the bitmaps in its image, which QEMU found when it opened the image.
    pub stored_bitmaps: Vec<String>,
    /// An identifier of the QEMU process that is unique on this host; none if unknown.
    pub process: Option<String>,
    /// The files and devices with the layer's content; none if one of them is not on this host.
    pub files: Option<Vec<PathBuf>>,
}

/// A snapshot of all nodes of a QEMU.
pub struct Layers {
    graph: Graph,
    nodes: BTreeMap<String, Value>,
    process: Option<String>,
}

impl Layers {
    /// Queries QEMU.
    pub fn query(monitor: &dyn Monitor) -> Result<Self> {
        let graph = Graph::query(monitor)?;
        let nodes = list(monitor, "query-named-block-nodes", json!({ "flat": true }))?;
        let named = nodes.into_iter().filter_map(|node| {
            let name = node.get("node-name")?.as_str()?.to_owned();
            Some((name, node))
        });
        Ok(Self {
            graph,
            nodes: named.collect(),
            process: process_of(monitor)?,
        })
    }

    /// The layers from the node `top` down, including `top`; none if QEMU does not describe all of them.
    pub fn of(&self, top: &str) -> Option<Vec<Layer>> {
        let mut layers = Vec::new();
        let mut next = Some(top);
        while let Some(name) = next {
            if layers.len() == LAYER_COUNT_MAX {
                return None;
            }
            let backing = self.graph.child(name, "backing");
            let layer = self.layer(name, backing.is_some())?;
            next = match backing {
                None if FILTERS.contains(&&layer.driver[..]) => Some(self.graph.child(name, "file")?),
                other => other,
            };
            layers.push(layer);
        }
        Some(layers)
    }

    /// The files and devices that receive writes to the node `top`, as far as QEMU describes them and they are on this
    /// host.
    pub fn written_files(&self, top: &str) -> Vec<PathBuf> {
        // Filters above the first image have no files.
        let files = self.of(top).unwrap_or_default().into_iter().map(|layer| layer.files);
        let mut files = files.map(Option::unwrap_or_default).skip_while(Vec::is_empty);
        files.next().unwrap_or_default()
    }

    fn layer(&self, name: &str, is_on_backing: bool) -> Option<Layer> {
        let node = self.nodes.get(name)?;
        let driver = node.get("drv")?.as_str()?;
        let is_filter = FILTERS.contains(&driver);
        Some(Layer {
            node: name.to_owned(),
            driver: driver.to_owned(),
            image: node.get("file").and_then(Value::as_str).unwrap_or_default().to_owned(),
            size_bytes: node.get("image")?.get("virtual-size")?.as_u64()?,
            keeps_bitmaps: keeps_bitmaps(node),
            is_on_backing,
            bitmaps: bitmaps_of(node),
            stored_bitmaps: stored_bitmaps(node),
            process: self.process.clone(),
            files: if is_filter { Some(Vec::new()) } else { self.files(name) },
        })
    }

    /// The files below a node, without those of its backing images.
    fn files(&self, name: &str) -> Option<Vec<PathBuf>> {
        let below = self.graph.children(name);
        let below: Vec<&str> = below
            .filter(|(edge, _)| *edge != "backing")
            .map(|(_, child)| child)
            .collect();
        if !below.is_empty() {
            let files = below.into_iter().map(|child| self.files(child));
            return Some(files.collect::<Option<Vec<_>>>()?.concat());
        }
        let node = self.nodes.get(name)?;
        let path = Path::new(node.get("file")?.as_str()?);
        let is_local = LOCAL.contains(&node.get("drv")?.as_str()?) && path.is_absolute();
        is_local.then(|| vec![path.to_owned()])
    }
}

/// An identifier of the QEMU process: the thread of its first vCPU, and its start time.
fn process_of(monitor: &dyn Monitor) -> Result<Option<String>> {
    let processors = list(monitor, "query-cpus-fast", Value::Null)?;
    let thread = processors.first().and_then(|first| first.get("thread-id")?.as_u64());
    Ok(thread.and_then(|thread| Some(format!("{thread}:{}", start_of(thread)?))))
}

/// The start time of a thread, in ticks since the boot of the host.
fn start_of(thread: u64) -> Option<u64> {
    let thread_stat = std::fs::read_to_string(format!("/proc/{thread}/stat")).ok()?;
    // The name of the thread is in parentheses, and may contain any character.
    let (_, fields) = thread_stat.rsplit_once(')')?;
    fields.split_whitespace().nth(START_FIELD)?.parse().ok()
}

/// The names of the bitmaps in the image of a node.
fn stored_bitmaps(node: &Value) -> Vec<String> {
    let stored = node
        .pointer("/image/format-specific/data/bitmaps")
        .and_then(Value::as_array);
    let names = stored
        .into_iter()
        .flatten()
        .filter_map(|bitmap| bitmap.get("name")?.as_str());
    names.map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use serde_json::{Value, json};

    use super::Layers;
    use crate::qemu::graph::Graph;

    fn layers(nodes: &[Value], edges: &[(u64, &str, u64)]) -> Layers {
        let ids = nodes
            .iter()
            .zip(1..)
            .map(|(node, id)| json!({ "id": id, "name": node["node-name"] }));
        let edges = edges
            .iter()
            .map(|(parent, name, child)| json!({ "parent": parent, "name": name, "child": child }));
        let graph = json!({ "nodes": ids.collect::<Vec<_>>(), "edges": edges.collect::<Vec<_>>() });
        let named = nodes
            .iter()
            .map(|node| (node["node-name"].as_str().unwrap().to_owned(), node.clone()));
        Layers {
            graph: Graph::parse(&graph).unwrap(),
            nodes: named.collect(),
            process: None,
        }
    }

    fn node(name: &str, driver: &str, file: &str, compat: &str) -> Value {
        json!({
            "node-name": name, "drv": driver, "file": file,
            "image": { "virtual-size": 100, "format-specific": { "data": { "compat": compat } } },
            "dirty-bitmaps": [{ "name": "one", "granularity": 512, "count": 0, "recording": true }],
        })
    }

    #[test]
    fn layers_are_found_through_filters_with_all_their_files() {
        let nodes = [
            node("cor", "copy-on-read", "/a", ""),
            node("top", "qcow2", "json:{}", "1.1"),
            node("base", "qcow2", "/b", "0.10"),
            node("top-file", "file", "/a", ""),
            node("base-file", "file", "/b", ""),
            node("base-data", "host_device", "/dev/c", ""),
        ];
        let edges = [
            (1, "file", 2),
            (2, "backing", 3),
            (2, "file", 4),
            (3, "file", 5),
            (3, "data-file", 6),
        ];
        let found = layers(&nodes, &edges).of("cor").unwrap();
        let summary: Vec<_> = found
            .iter()
            .map(|layer| (&layer.node[..], layer.keeps_bitmaps, layer.is_on_backing))
            .collect();
        assert_eq!(
            summary,
            [("cor", false, false), ("top", true, true), ("base", false, false)]
        );
        let files = |at: usize| found[at].files.clone().unwrap();
        assert_eq!(files(0), [] as [PathBuf; 0]);
        assert_eq!(files(1), [PathBuf::from("/a")]);
        assert_eq!(files(2), [PathBuf::from("/b"), PathBuf::from("/dev/c")]);
        assert_eq!(found[1].bitmaps[0].name, "one");
        let all = layers(&nodes, &edges);
        assert_eq!(all.written_files("cor"), [PathBuf::from("/a")]);
        assert_eq!(all.written_files("base"), files(2));
        assert_eq!(all.written_files("none"), [] as [PathBuf; 0]);
    }

    #[test]
    fn files_on_other_hosts_have_no_path() {
        for (driver, file) in [("nbd", "nbd://host/x"), ("file", "relative.raw")] {
            let nodes = [node("top", "raw", file, ""), node("file", driver, file, "")];
            let found = layers(&nodes, &[(1, "file", 2)]).of("top").unwrap();
            assert_eq!((found.len(), &found[0].files), (1, &None), "{driver}");
        }
        assert!(layers(&[], &[]).of("top").is_none());
    }
}
