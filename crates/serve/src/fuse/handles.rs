//! Open files and directories.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::tree::ListedEntry;
use super::wire::{Attributes, HandleId, NodeId};
use crate::nbd::ExportDevice;

/// Limit of open files. Each device of a snapshot has a cache of up to 12 MiB.
pub(super) const FILE_COUNT_MAX: usize = 64;
/// Limit of open directories. Each has a copy of its listing.
pub(super) const LISTING_COUNT_MAX: usize = 1024;

/// An open file.
#[derive(Clone)]
pub(super) struct OpenFile {
    /// Attributes of its node. The kernel asks for them when a program reads up to the end of the file, also after the
    /// file was removed from the tree.
    pub(super) attributes: Attributes,
    pub(super) device: ExportDevice,
}

#[derive(Default)]
struct Table {
    files: BTreeMap<HandleId, OpenFile>,
    /// A listing does not change while it is read.
    listings: BTreeMap<HandleId, Arc<[ListedEntry]>>,
    last: u64,
}

impl Table {
    fn next(&mut self) -> HandleId {
        self.last += 1;
        HandleId(self.last)
    }
}

/// The open files and directories of a file system.
pub(super) struct Handles {
    table: Mutex<Table>,
}

/// Handles of one server are consecutive numbers, and those of its successor begin at the next multiple of this.
const HANDLES_OF_SERVER: u64 = 1 << 32;

impl Handles {
    /// The handles of the server that has this number of predecessors.
    pub(super) fn new(predecessor_count: u32) -> Self {
        let table = Table {
            last: u64::from(predecessor_count) * HANDLES_OF_SERVER,
            ..Table::default()
        };
        Self {
            table: Mutex::new(table),
        }
    }

    /// Adds a file that a predecessor has opened, under its handle.
    pub(super) fn adopt(&self, handle: HandleId, file: OpenFile) {
        self.lock().files.insert(handle, file);
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a file; `None` if too many are open.
    pub(super) fn open_file(&self, file: OpenFile) -> Option<HandleId> {
        let mut table = self.lock();
        if table.files.len() >= FILE_COUNT_MAX {
            return None;
        }
        let handle = table.next();
        table.files.insert(handle, file);
        Some(handle)
    }

    /// Adds a listing; `None` if too many directories are open.
    pub(super) fn open_listing(&self, entries: Vec<ListedEntry>) -> Option<HandleId> {
        let mut table = self.lock();
        if table.listings.len() >= LISTING_COUNT_MAX {
            return None;
        }
        let handle = table.next();
        table.listings.insert(handle, entries.into());
        Some(handle)
    }

    /// The open file of a node. All opens of a node share its device.
    pub(super) fn file_of(&self, node: NodeId) -> Option<OpenFile> {
        let table = self.lock();
        table.files.values().find(|file| file.attributes.node == node).cloned()
    }

    pub(super) fn file(&self, handle: HandleId) -> Option<OpenFile> {
        self.lock().files.get(&handle).cloned()
    }

    pub(super) fn listing(&self, handle: HandleId) -> Option<Arc<[ListedEntry]>> {
        self.lock().listings.get(&handle).cloned()
    }

    pub(super) fn close_file(&self, handle: HandleId) {
        let closed = self.lock().files.remove(&handle);
        // The caches of a device are freed outside the lock.
        drop(closed);
    }

    pub(super) fn close_listing(&self, handle: HandleId) {
        self.lock().listings.remove(&handle);
    }

    /// The open files that can be written, each node once.
    pub(super) fn writable_files(&self) -> Vec<OpenFile> {
        let table = self.lock();
        let mut files: BTreeMap<NodeId, OpenFile> = BTreeMap::new();
        for file in table.files.values().filter(|file| file.device.writer().is_some()) {
            files.insert(file.attributes.node, file.clone());
        }
        files.into_values().collect()
    }

    pub(super) fn file_count(&self) -> usize {
        self.lock().files.len()
    }
}
