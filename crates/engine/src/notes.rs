//! What a snapshot records beside its disks: keys of notes, and names of streams. `docs/format/snapshot-notes.md` has the same table.
//!
//! A new key is lower-case words with hyphens. Five keys of early snapshots have underscores; [`note`] reads both spellings.

use std::collections::BTreeMap;

use holdfast_repo::{DiskRecord, Manifest};

// Of a snapshot.

/// How the disks of the machine were read.
pub const NOTE_METHOD: &str = "method";
/// How consistent the disks are.
pub const NOTE_CONSISTENCY: &str = "consistency";
/// UUID of the machine at its hypervisor.
pub(crate) const NOTE_UUID: &str = "uuid";
/// Identities of other snapshots with the same machine name that are the same machine; separated by blanks.
pub(crate) const NOTE_CONTINUES: &str = "continues";
/// Hypervisor or archive format of the machine, if it is not libvirt.
pub(crate) const NOTE_HYPERVISOR: &str = "imported-from";
/// The pool of XenServer that the machine belongs to.
pub(crate) const NOTE_POOL: &str = "pool";
/// Origin of a copy: the first repository and snapshot, separated by `/`.
pub const NOTE_ORIGIN: &str = "origin";
/// In a copy: the first digits of the ids of the snapshots of this machine that were copied before.
pub(crate) const NOTE_COPIED: &str = "copied";

// Of a template.

/// The signed statement that describes the template.
pub(crate) const NOTE_TEMPLATE: &str = "template";
/// The signature of the statement.
pub(crate) const NOTE_TEMPLATE_SIGNATURE: &str = "template-signature";
/// Bytes that the push added to the repository.
pub(crate) const NOTE_TEMPLATE_OWN_BYTES: &str = "template-own-bytes";
/// Process of a push that has not finished.
pub(crate) const NOTE_TEMPLATE_DRAFT: &str = "template-draft";
/// Prefix of the machine name of a template. No machine can have such a name.
pub(crate) const TEMPLATE_MACHINE_PREFIX: &str = "template:";

// Of the state of a machine that is stored with host snapshots.

/// The set of host snapshots that the state belongs to.
pub(crate) const NOTE_HOST_SNAPSHOT_SET: &str = "host-snapshot-set";
/// The host snapshots of that set with disks of the machine.
pub(crate) const NOTE_HOST_SNAPSHOTS: &str = "host-snapshots";
/// Paths of the machine's disks in these host snapshots.
pub(crate) const NOTE_HOST_SNAPSHOT_DISKS: &str = "host-snapshot-disks";

// Of a disk.

/// Path of the image, with symbolic links resolved.
pub const NOTE_PATH: &str = "path";
/// Format of the image.
pub const NOTE_FORMAT: &str = "format";
/// Sector size in bytes, if it is not 512.
pub(crate) const NOTE_SECTOR_BYTES: &str = "sector-bytes";
/// Name of the disk in the archive that it was imported from.
pub(crate) const NOTE_LABEL: &str = "label";
/// Name of the dirty bitmap that was started at the point in time of the snapshot.
pub(crate) const NOTE_BITMAP: &str = "bitmap";
/// Marks that the bitmap has contained since its start: offsets in bytes, separated by blanks.
pub(crate) const NOTE_BITMAP_WITNESS: &str = "bitmap-witness";
/// Stamps of the images that the image was based on: a blank between layers, a comma between the files of a layer.
pub(crate) const NOTE_BITMAP_BASES: &str = "bitmap-bases";
/// QEMU process and image in which the bitmap was started, separated by a blank.
pub(crate) const NOTE_BITMAP_PLACE: &str = "bitmap-place";
/// The host snapshot that the disk was read from; it is held for the next backup.
pub(crate) const NOTE_HOST_SNAPSHOT: &str = "host-snapshot";
/// Identity of that host snapshot, which distinguishes it from a later one of the same name.
pub(crate) const NOTE_HOST_SNAPSHOT_IDENTITY: &str = "host-snapshot-identity";
/// Path of the image in that host snapshot; empty for a volume.
pub(crate) const NOTE_HOST_SNAPSHOT_PATH: &str = "host-snapshot-path";
/// UUID of the container that the disk belongs to.
pub(crate) const NOTE_CONTAINER: &str = "container";
/// UUID of the layer of the container that the disk was read from; it is kept for the next backup.
pub(crate) const NOTE_CONTAINER_LAYER: &str = "container-layer";
/// UUID of the disk in its pool of XenServer.
pub(crate) const NOTE_XEN_DISK: &str = "xen-disk";
/// UUID of the snapshot of the disk that the pool keeps for the next backup.
pub(crate) const NOTE_XEN_BASE: &str = "xen-base";
/// UUID of the disk in the pool's records of the suspended machine.
pub(crate) const NOTE_XEN_SUSPENDED_DISK: &str = "xen-suspended-disk";

// Of a stream: content that is stored like a disk but is not a disk.

/// Kind of the stream.
pub(crate) const NOTE_KIND: &str = "kind";
/// Version of the TPM.
pub(crate) const NOTE_TPM_VERSION: &str = "tpm-version";
/// How swtpm stored the TPM: in a folder or in a file.
pub(crate) const NOTE_TPM_STORE: &str = "tpm-store";

// Names of streams.

/// Configuration of the machine: the domain XML of libvirt.
pub(crate) const STREAM_DOMAIN: &str = "domain.xml";
/// Memory: the pages.
pub(crate) const STREAM_MEMORY: &str = "memory";
/// Memory: the state that QEMU needs beside the pages (`docs/format/memory-state.md`).
pub(crate) const STREAM_MEMORY_STATE: &str = "memory-state";
/// Variables of the firmware.
pub(crate) const STREAM_NVRAM: &str = "nvram";
/// Permanent state of the TPM (`docs/format/tpm-state.md`).
pub(crate) const STREAM_TPM: &str = "tpm";
/// VirtualBox: the settings of the machine, a `.vbox` file.
pub(crate) const STREAM_VIRTUALBOX_SETTINGS: &str = "original-machine.vbox";
/// VirtualBox: variables of the firmware, in its own format.
pub(crate) const STREAM_VIRTUALBOX_NVRAM: &str = "virtualbox.nvram";
/// VirtualBox: memory of a saved machine.
pub(crate) const STREAM_VIRTUALBOX_SAVED: &str = "saved-state.sav";
/// XenServer: records of the machine, from an export without disks.
pub(crate) const STREAM_XEN_RECORDS: &str = "original-ova.xml";
/// XenServer: records of the suspended machine; needed to resume it from its memory.
pub(crate) const STREAM_XEN_SUSPENDED_RECORDS: &str = "suspended-ova.xml";
/// XenServer: memory of the machine (`docs/format/xen-memory.md`).
pub(crate) const STREAM_XEN_MEMORY: &str = "xen-memory";
/// The configuration of a container.
pub(crate) const STREAM_CONTAINER: &str = "container.json";
/// The original descriptor of a Parallels or ploop disk.
pub(crate) const STREAM_DISK_DESCRIPTOR: &str = "DiskDescriptor.xml";

/// Keys that were written with underscores until version 0.1.
const OLD_SPELLINGS: [(&str, &str); 5] = [
    (NOTE_HYPERVISOR, "imported_from"),
    (NOTE_SECTOR_BYTES, "sector_bytes"),
    (NOTE_XEN_DISK, "xen_disk"),
    (NOTE_XEN_BASE, "xen_base"),
    (NOTE_XEN_SUSPENDED_DISK, "xen_suspended_disk"),
];

/// The value of a note. Also finds the old spelling of its key.
pub(crate) fn note<'n>(notes: &'n BTreeMap<String, String>, key: &str) -> Option<&'n String> {
    let old = OLD_SPELLINGS.iter().find(|(new, _)| *new == key);
    notes.get(key).or_else(|| notes.get(old?.1))
}

/// Whether a record holds the memory of the machine.
pub(crate) fn is_memory(record: &DiskRecord) -> bool {
    record.notes.get(NOTE_KIND).is_some_and(|kind| kind == STREAM_MEMORY)
}

/// Whether a record is a part of the memory. Each part is useless without the other.
pub(crate) fn is_part_of_memory(record: &DiskRecord) -> bool {
    is_memory(record) || record.name == STREAM_MEMORY_STATE
}

/// Whether a snapshot is a template or the draft of one, rather than a point in time of a machine.
pub(crate) fn is_template(manifest: &Manifest) -> bool {
    manifest.notes.contains_key(NOTE_TEMPLATE) || is_template_draft(manifest)
}

/// Name and tag of a template, as its notes give them.
pub(crate) fn template_label(manifest: &Manifest) -> String {
    let name = manifest.machine.trim_start_matches(TEMPLATE_MACHINE_PREFIX);
    let statement = manifest.notes.get(NOTE_TEMPLATE).map(String::as_str);
    match statement.and_then(|text| text.lines().nth(2)?.strip_prefix("tag ")) {
        Some(tag) => format!("{name}:{tag}"),
        None => name.to_owned(),
    }
}

/// Whether a snapshot belongs to a push that is running or was killed.
pub(crate) fn is_template_draft(manifest: &Manifest) -> bool {
    manifest.notes.contains_key(NOTE_TEMPLATE_DRAFT)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::{NOTE_HYPERVISOR, NOTE_XEN_BASE, NOTE_XEN_DISK, note};

    #[test]
    fn a_key_is_found_in_both_spellings() {
        let pairs = [("imported_from", "xva"), ("xen_base", "old"), ("xen-base", "new")];
        let notes: BTreeMap<_, _> = pairs.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
        let found = [NOTE_HYPERVISOR, NOTE_XEN_BASE, NOTE_XEN_DISK].map(|key| note(&notes, key).map(String::as_str));
        assert_eq!(found, [Some("xva"), Some("new"), None]);
    }
}
