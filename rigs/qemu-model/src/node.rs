//! A block node: how it reads the nodes below it, and the bitmaps that record writes through it.

use std::collections::BTreeSet;
use std::fs::File;

use holdfast_block::DirtyBitmap;
use serde_json::{Value, json};

/// Cluster size of a filter, and granularity of bitmaps.
pub(crate) const CLUSTER_BYTES: u64 = 64 << 10;

/// A node, and its children by the names of the edges.
#[derive(Debug)]
pub(crate) struct Node {
    /// Increases with each new node.
    pub(crate) number: u64,
    pub(crate) driver: Driver,
    pub(crate) size_bytes: u64,
    pub(crate) filename: String,
    pub(crate) children: Vec<(&'static str, String)>,
    pub(crate) bitmaps: Vec<Bitmap>,
    /// Whether `blockdev-add` created the node: only such nodes can be deleted by name.
    pub(crate) is_monitor_owned: bool,
    /// The file set that the node has open.
    pub(crate) fd_set: Option<u64>,
}

/// The driver of a node.
#[derive(Debug)]
pub(crate) enum Driver {
    File(File),
    Raw,
    /// The content that the guest sees. The model does not read the image file.
    Qcow2(Vec<u8>),
    CopyBeforeWrite(SavedClusters),
    SnapshotAccess,
    NullCo,
}

/// The clusters that a copy-before-write filter has saved, by number.
#[derive(Debug, Default)]
pub(crate) struct SavedClusters {
    pub(crate) saved: BTreeSet<u64>,
    /// Clusters that were discarded through the snapshot: they are no longer saved.
    pub(crate) discarded: BTreeSet<u64>,
}

/// A dirty bitmap.
#[derive(Debug, Clone)]
pub(crate) struct Bitmap {
    pub(crate) name: String,
    pub(crate) is_recording: bool,
    pub(crate) is_persistent: bool,
    /// Number of exports and jobs that use the bitmap.
    pub(crate) user_count: usize,
    pub(crate) dirty: DirtyBitmap,
}

impl Node {
    pub(crate) fn new(driver: Driver, size_bytes: u64) -> Self {
        Self {
            number: 0,
            driver,
            size_bytes,
            filename: String::new(),
            children: Vec::new(),
            bitmaps: Vec::new(),
            is_monitor_owned: true,
            fd_set: None,
        }
    }

    pub(crate) fn child(&self, edge: &str) -> Option<&str> {
        let mut children = self.children.iter();
        children.find(|(name, _)| *name == edge).map(|(_, child)| &child[..])
    }

    pub(crate) fn bitmap(&self, name: &str) -> Option<&Bitmap> {
        self.bitmaps.iter().find(|bitmap| bitmap.name == name)
    }

    pub(crate) fn bitmap_mut(&mut self, name: &str) -> Option<&mut Bitmap> {
        self.bitmaps.iter_mut().find(|bitmap| bitmap.name == name)
    }

    pub(crate) fn mark(&mut self, offset: u64, length: u64) {
        for bitmap in self.bitmaps.iter_mut().filter(|bitmap| bitmap.is_recording) {
            bitmap.dirty.set(offset..offset + length);
        }
    }

    /// The description of the node in the form of `query-named-block-nodes`.
    pub(crate) fn describe(&self, name: &str) -> Value {
        let mut image =
            json!({ "filename": self.filename, "format": self.driver.name(), "virtual-size": self.size_bytes });
        if matches!(self.driver, Driver::Qcow2(_)) {
            image["format-specific"] = json!({ "type": "qcow2", "data": { "compat": "1.1" } });
        }
        let mut described = json!({
            "node-name": name,
            "drv": self.driver.name(),
            "file": self.filename,
            "ro": false,
            "image": image,
        });
        if !self.bitmaps.is_empty() {
            described["dirty-bitmaps"] = self.bitmaps.iter().map(Bitmap::describe).collect();
        }
        described
    }
}

impl Driver {
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::File(_) => "file",
            Self::Raw => "raw",
            Self::Qcow2(_) => "qcow2",
            Self::CopyBeforeWrite(_) => "copy-before-write",
            Self::SnapshotAccess => "snapshot-access",
            Self::NullCo => "null-co",
        }
    }
}

impl Bitmap {
    fn describe(&self) -> Value {
        json!({
            "name": self.name,
            "granularity": self.dirty.granularity_bytes(),
            "count": self.dirty.dirty_bytes(),
            "recording": self.is_recording,
            "persistent": self.is_persistent,
            "busy": self.user_count > 0,
        })
    }
}
