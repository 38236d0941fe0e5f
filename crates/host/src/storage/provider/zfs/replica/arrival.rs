//! What has arrived: it is compared with what was announced, and protected.

use std::sync::PoisonError;

use super::super::super::replica::{ReceiveRequest, ReplicaSnapshot};
use super::super::super::{ProviderError, ProviderResult};
use super::super::stream::Arrivals;
use super::super::{any_full_name, record_property};
use super::ZfsSide;

/// What a copy has where nobody has set anything, by property.
const GUARDED: [(&str, &str); 5] = [
    ("readonly", "on"),
    ("canmount", "noauto"),
    ("setuid", "off"),
    ("devices", "off"),
    ("exec", "off"),
];
/// What a copy has from the datasets above it.
const INHERITED: [&str; 4] = ["mountpoint", "sharenfs", "sharesmb", "zoned"];
const GUARDED_PROPERTIES: &str = "type,readonly,canmount,setuid,devices,exec";

impl ZfsSide {
    /// A copy is not mounted by itself, is read-only, and gives no rights to programs and devices in it. What an administrator has set on the
    /// copy, or above it, stays; what came with a stream of the source does not count.
    pub(super) fn guard(&self, dataset: &str) -> ProviderResult<()> {
        let found = self.zfs.get(&[], GUARDED_PROPERTIES, dataset)?;
        let source = |property: &str| found.get(dataset).and_then(|found| found.source(property));
        for (property, value) in GUARDED {
            // Volumes have only the first one.
            if matches!(source(property), Some("default" | "received")) {
                let word = format!("{property}={value}");
                self.zfs.ask(("protect", dataset), &["set", &word, dataset])?;
            }
        }
        // Their values are any text, so only their sources are asked for.
        let words = ["get", "-H", "-o", "source", &INHERITED.join(","), dataset];
        let sources = self.zfs.ask(("look at", dataset), &words)?;
        for (property, source) in INHERITED.into_iter().zip(sources.lines()) {
            if source == "received" {
                self.zfs.ask(("protect", dataset), &["inherit", property, dataset])?;
            }
        }
        Ok(())
    }

    /// Notes records of snapshots which have none. Each has the guid that the sender says.
    pub(super) fn note(&self, dataset: &str, snapshots: &[&ReplicaSnapshot]) -> ProviderResult<()> {
        let news = snapshots.iter().filter_map(|one| Some((one, one.record.as_ref()?)));
        let news: Vec<_> = news.collect();
        if news.is_empty() {
            return Ok(());
        }
        // What is noted stays.
        let noted = self.records(dataset, false)?;
        for (snapshot, record) in news {
            let full = any_full_name(dataset, &snapshot.name)?;
            if !noted.contains_key(&full) {
                let record = record_property(record)?;
                self.zfs.ask(("note the record of", &full), &["set", &record, &full])?;
            }
        }
        Ok(())
    }

    /// Refuses where a snapshot has not the guid that it should have.
    pub(super) fn check_guid(&self, (dataset, name): (&str, &str), guid: &str) -> ProviderResult<()> {
        let full = any_full_name(dataset, name)?;
        let found = self.zfs.get(&[], "guid", &full)?;
        let is_it = found.get(&full).and_then(|found| found.value("guid")) == Some(guid);
        is_it.then_some(()).ok_or_else(|| ProviderError::Refused {
            action: "receive",
            what: full,
            reason: "it is another snapshot than was sent".to_owned(),
        })
    }

    /// Looks at what has arrived.
    pub(super) fn finish(&self, receiving: &ReceiveRequest, arrived: &Arrivals) -> ProviderResult<()> {
        self.guard(&receiving.dataset)?;
        let brought = arrived.lock().unwrap_or_else(PoisonError::into_inner).take();
        let brought = brought.ok_or_else(|| ProviderError::Refused {
            action: "receive",
            what: receiving.dataset.clone(),
            reason: "the stream did not come to its end".to_owned(),
        })?;
        let mut known = Vec::new();
        for (name, guid) in &brought {
            let guid = guid.to_string();
            self.check_guid((&receiving.dataset, name), &guid)?;
            let is_it = |one: &&ReplicaSnapshot| one.name == *name && (one.identity.is_empty() || one.identity == guid);
            known.extend(receiving.snapshots.iter().find(is_it));
        }
        self.note(&receiving.dataset, &known)
    }
}
