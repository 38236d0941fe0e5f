//! Checks received snapshots against the announcement, and protects them.

use std::sync::PoisonError;

use super::super::super::replica::{ReceiveRequest, ReplicaScope, ReplicaSnapshot};
use super::super::super::{ProviderError, ProviderResult};
use super::super::stream::Arrivals;
use super::super::{any_full_name, record_property};
use super::ZfsSide;

/// Properties that are set on a copy, unless an administrator has set them.
const GUARDED: [(&str, &str); 5] = [
    ("readonly", "on"),
    ("canmount", "noauto"),
    ("setuid", "off"),
    ("devices", "off"),
    ("exec", "off"),
];
/// Properties that a copy inherits from its parent.
const INHERITED: [&str; 4] = ["mountpoint", "sharenfs", "sharesmb", "zoned"];
const GUARDED_PROPERTIES: &str = "type,readonly,canmount,setuid,devices,exec";

impl ZfsSide {
    /// Sets a copy read-only, without automatic mount, and without rights for programs and devices in it. Settings
    /// that an administrator made on the copy or above it are kept. Settings that came with the source's stream are
    /// not.
    pub(super) fn guard(&self, dataset: &str) -> ProviderResult<()> {
        let found = self.zfs.get(&[], GUARDED_PROPERTIES, dataset)?;
        let source = |property: &str| found.get(dataset).and_then(|found| found.source(property));
        for (property, value) in GUARDED {
            // Volumes have only the first property.
            if matches!(source(property), Some("default" | "received")) {
                let word = format!("{property}={value}");
                self.zfs.ask("protect", dataset, &["set", &word, dataset])?;
            }
        }
        // The values can be any text, so only the sources are requested.
        let arguments = ["get", "-H", "-o", "source", &INHERITED.join(","), dataset];
        let sources = self.zfs.ask("inspect", dataset, &arguments)?;
        for (property, source) in INHERITED.into_iter().zip(sources.lines()) {
            if source == "received" {
                self.zfs.ask("protect", dataset, &["inherit", property, dataset])?;
            }
        }
        Ok(())
    }

    /// Writes the records of snapshots that have none. Each must have the GUID that the sender reported.
    pub(super) fn note(&self, dataset: &str, snapshots: &[&ReplicaSnapshot]) -> ProviderResult<()> {
        let news = snapshots.iter().filter_map(|one| Some((one, one.record.as_ref()?)));
        let news: Vec<_> = news.collect();
        if news.is_empty() {
            return Ok(());
        }
        // Existing records are kept.
        let noted = self.records(dataset, ReplicaScope::Dataset)?;
        for (snapshot, record) in news {
            let full = any_full_name(dataset, &snapshot.name)?;
            if !noted.contains_key(&full) {
                let record = record_property(record)?;
                self.zfs.ask("write the record of", &full, &["set", &record, &full])?;
            }
        }
        Ok(())
    }

    /// Refuses a snapshot with another GUID than expected.
    pub(super) fn check_guid(&self, dataset: &str, name: &str, guid: &str) -> ProviderResult<()> {
        let full = any_full_name(dataset, name)?;
        let found = self.zfs.get(&[], "guid", &full)?;
        let is_same = found.get(&full).and_then(|found| found.value("guid")) == Some(guid);
        is_same.then_some(()).ok_or_else(|| ProviderError::Refused {
            action: "receive",
            what: full,
            reason: "it is not the snapshot that was sent".to_owned(),
        })
    }

    /// Checks the received snapshots.
    pub(super) fn finish(&self, receiving: &ReceiveRequest, arrived: &Arrivals) -> ProviderResult<()> {
        self.guard(&receiving.dataset)?;
        let brought = arrived.lock().unwrap_or_else(PoisonError::into_inner).take();
        let brought = brought.ok_or_else(|| ProviderError::Refused {
            action: "receive",
            what: receiving.dataset.clone(),
            reason: "the stream is incomplete".to_owned(),
        })?;
        let mut known = Vec::new();
        for (name, guid) in &brought {
            let guid = guid.to_string();
            self.check_guid(&receiving.dataset, name, &guid)?;
            let is_announced =
                |one: &&ReplicaSnapshot| one.name == *name && (one.identity.is_empty() || one.identity == guid);
            known.extend(receiving.snapshots.iter().find(is_announced));
        }
        self.note(&receiving.dataset, &known)
    }
}
