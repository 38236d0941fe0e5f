//! A block node: what it shows of what lies below it, and the bitmaps that record what is written through it.

use std::collections::BTreeSet;
use std::fs::File;

use holdfast_block::DirtyBitmap;
use serde_json::{Value, json};

/// Bytes that a filter copies at once, and that a bit of a bitmap stands for.
pub(crate) const CLUSTER_BYTES: u64 = 64 << 10;

/// A node, and its children by the names of the edges.
#[derive(Debug)]
pub(crate) struct Node {
    /// Grows from one node to the next.
    pub(crate) number: u64,
    pub(crate) driver: Driver,
    pub(crate) size_bytes: u64,
    pub(crate) filename: String,
    pub(crate) children: Vec<(&'static str, String)>,
    pub(crate) bitmaps: Vec<Bitmap>,
    /// Whether `blockdev-add` made it: it may be deleted by name then.
    pub(crate) is_monitor_owned: bool,
    /// The set of files that it has open.
    pub(crate) fd_set: Option<u64>,
}

/// What a node does.
#[derive(Debug)]
pub(crate) enum Driver {
    File(File),
    Raw,
    /// What the guest sees of the image. The image itself is a file that the model does not read.
    Qcow2(Vec<u8>),
    CopyBeforeWrite(SavedClusters),
    SnapshotAccess,
    NullCo,
}

/// What a copy-before-write filter has saved, by number of the cluster.
#[derive(Debug, Default)]
pub(crate) struct SavedClusters {
    pub(crate) saved: BTreeSet<u64>,
    /// What was discarded through the snapshot: it is not saved any more.
    pub(crate) discarded: BTreeSet<u64>,
}

/// A dirty bitmap.
#[derive(Debug, Clone)]
pub(crate) struct Bitmap {
    pub(crate) name: String,
    pub(crate) is_recording: bool,
    pub(crate) is_persistent: bool,
    /// Exports and jobs that use it.
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

    /// As `query-named-block-nodes` describes it.
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
