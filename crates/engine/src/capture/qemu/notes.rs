//! The notes of a machine's snapshot and of its disks.

use crate::notes::{NOTE_CONSISTENCY, NOTE_FORMAT, NOTE_METHOD, NOTE_PATH, NOTE_UUID};
use std::collections::BTreeMap;

use holdfast_host::{DiskSource, MachineDisk};

use super::{Method, QemuCapture};

impl QemuCapture<'_> {
    /// The notes of the snapshot.
    pub(super) fn notes(&self, method: Method, consistency: &str) -> BTreeMap<String, String> {
        let uuid = &self.description.summary.uuid;
        let notes = [
            (NOTE_METHOD, method.word()),
            (NOTE_CONSISTENCY, consistency),
            (NOTE_UUID, uuid),
        ];
        notes
            .into_iter()
            .map(|(key, text)| (key.to_owned(), text.to_owned()))
            .collect()
    }
}

/// The notes about the place of a disk.
pub(super) fn notes_of(disk: &MachineDisk) -> BTreeMap<String, String> {
    let mut notes = BTreeMap::new();
    if let DiskSource::File(path) | DiskSource::Device(path) = &disk.source {
        notes.insert(NOTE_PATH.to_owned(), path.display().to_string());
    }
    if let Some(format) = &disk.format {
        notes.insert(NOTE_FORMAT.to_owned(), format.clone());
    }
    notes
}
