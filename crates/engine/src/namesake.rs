//! Two machines of one name are not stored as one: each would be compared with the other, and who restores that name would get either.

use holdfast_repo::Manifest;

use crate::machine_backup::NOTE_UUID;

/// Note of a snapshot: the pool of its machine.
pub(crate) const NOTE_POOL: &str = "pool";
/// Note of a snapshot: what its machine was taken from, if not from libvirt.
pub(crate) const NOTE_HYPERVISOR: &str = "imported_from";

/// Whose the newest snapshot of a name is.
#[derive(Debug, Clone)]
pub(crate) struct Predecessor<'m> {
    /// The snapshot.
    pub(crate) snapshot: &'m Manifest,
    /// The UUID of its machine.
    pub(crate) uuid: &'m str,
    /// The pool of its machine, where that is in one.
    pub(crate) pool: Option<&'m str>,
    /// What it was taken from, if not from libvirt.
    pub(crate) hypervisor: Option<&'m str>,
}

impl<'m> Predecessor<'m> {
    /// The one of the machine that is listed as `name`; none where there is no snapshot, or where that does not say whose it is.
    pub(crate) fn of(manifests: &'m [Manifest], name: &str) -> Option<Self> {
        let own = manifests.iter().filter(|manifest| manifest.machine == name);
        let newest = own.max_by_key(|manifest| manifest.time_ms)?;
        let note = |key: &str| {
            newest
                .notes
                .get(key)
                .map(String::as_str)
                .filter(|text| !text.is_empty())
        };
        Some(Self {
            snapshot: newest,
            uuid: note(NOTE_UUID)?,
            pool: note(NOTE_POOL),
            hypervisor: note(NOTE_HYPERVISOR),
        })
    }

    /// Whether it is of this machine, wherever that is.
    pub(crate) fn is(&self, uuid: &str) -> bool {
        self.uuid.eq_ignore_ascii_case(uuid)
    }

    /// Where its machine is, or was.
    pub(crate) fn place(&self) -> &'m str {
        self.pool.or(self.hypervisor).unwrap_or("libvirt")
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use holdfast_repo::Manifest;

    use super::Predecessor;

    fn manifest(machine: &str, time_ms: i64, notes: &[(&str, &str)]) -> Manifest {
        let notes: BTreeMap<&str, &str> = notes.iter().copied().collect();
        let id = "07".repeat(16);
        let value = serde_json::json!({ "format": 1, "id": id, "machine": machine, "time_ms": time_ms, "disks": [], "copy": id, "notes": notes });
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn the_newest_snapshot_of_a_name_says_whose_it_is() {
        let all = [
            manifest("web1", 1, &[("uuid", "A"), ("pool", "xen://one")]),
            manifest("web1", 3, &[("uuid", "B"), ("imported_from", "VirtualBox")]),
            manifest("web2", 4, &[("uuid", "C")]),
            manifest("web1", 2, &[("uuid", "A")]),
            manifest("db1", 1, &[]),
        ];
        let of = |name: &str| Predecessor::of(&all, name);
        let newest = of("web1").unwrap();
        assert!(newest.is("b") && !newest.is("A"));
        assert_eq!((newest.place(), newest.pool), ("VirtualBox", None));
        assert_eq!(of("web2").unwrap().place(), "libvirt");
        assert_eq!(Predecessor::of(&all[..1], "web1").unwrap().place(), "xen://one");
        assert!(of("db1").is_none() && of("other").is_none());
    }
}
