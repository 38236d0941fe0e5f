//! Reads and decodes every small object of a repository.

use serde::de::DeserializeOwned;

use super::record::{READ_RECORD_BYTES_MAX, ReadRecord, is_read_record};
use crate::check::finding::{FindingKind, Findings};
use crate::error::{Error, Result};
use crate::format::config::{CONFIG_OBJECT_BYTES_MAX, RepositoryConfig};
use crate::id::{PackId, SegmentId, SnapshotId, WriterId};
use crate::key;
use crate::repository::accepted_losses::{is_accepted_record, read_accepted};
use crate::repository::damage_records::{DAMAGE_BYTES_MAX, DamageRecord, damaged_pack};
use crate::repository::pending_deletes::CONDEMNED_BYTES_MAX;
use crate::repository::relocations::{RelocationId, read_replica};
use crate::store::{ObjectKind, ObjectName, StoreError};
use crate::vault::Vault;
use crate::writers::forget::{ForgottenRecord, is_announcement, protected_by};
use crate::writers::lease::{WriterRecord, heartbeat_writer};
use crate::writers::moves::{missing_replicas, move_of};

const MARKER_BYTES_MAX: u64 = 1 << 20;

/// Checks everything but packs, segments and manifests.
pub(crate) fn check_small_objects(vault: &Vault, findings: &mut Findings) -> Result<()> {
    check_config(vault, findings)?;
    for (name, error) in key::list(&*vault.store)?.damaged {
        findings.object(&name, error.into())?;
    }
    for kind in ObjectKind::ALL {
        for name in vault.names(kind)? {
            if !is_name_of_kind(&name) {
                let detail = "its name is not one that is given here".to_owned();
                findings.push(&name, None, FindingKind::Stranger, detail);
                continue;
            }
            check_one(vault, &name, findings)?;
        }
    }
    check_relocation_replicas(vault, findings)?;
    vault.store.foreign_files(&mut |path| {
        let detail = "it is no object of a repository".to_owned();
        findings.push_path(path, None, FindingKind::Stranger, detail);
        Ok(())
    })?;
    Ok(())
}

/// Checks both objects of all relocations.
pub(crate) fn check_relocations(vault: &Vault, findings: &mut Findings) -> Result<()> {
    for name in vault.names(ObjectKind::Relocation)? {
        check_one(vault, &name, findings)?;
    }
    check_relocation_replicas(vault, findings)
}

fn check_relocation_replicas(vault: &Vault, findings: &mut Findings) -> Result<()> {
    for name in missing_replicas(vault)? {
        let detail = "it is missing; its replica exists".to_owned();
        findings.push(&name, None, FindingKind::Single, detail);
    }
    Ok(())
}

fn check_one(vault: &Vault, name: &ObjectName, findings: &mut Findings) -> Result<()> {
    match check_object(vault, name) {
        // The job that it belongs to ended meanwhile.
        Ok(()) | Err(Error::Store(StoreError::NotFound { .. })) => Ok(()),
        Err(error) => findings.object(name, error),
    }
}

fn check_config(vault: &Vault, findings: &mut Findings) -> Result<()> {
    let name = ObjectName::config();
    let read = vault
        .get_sealed(&name, CONFIG_OBJECT_BYTES_MAX)
        .and_then(|bytes| RepositoryConfig::decode(&bytes));
    match read {
        Ok(config) if config == vault.config => {}
        Ok(_) => {
            let detail = "it is not the configuration that the key slot has".to_owned();
            findings.push(&name, None, FindingKind::Damaged, detail);
        }
        Err(error) => findings.object(&name, error)?,
    }
    Ok(())
}

/// Whether this program gives such names to objects of the kind.
fn is_name_of_kind(name: &ObjectName) -> bool {
    let text = name.name();
    match name.kind() {
        // Key slots are checked with their contents.
        ObjectKind::Config | ObjectKind::Key => true,
        ObjectKind::Pack => text.parse::<PackId>().is_ok(),
        ObjectKind::Index => text.parse::<SegmentId>().is_ok(),
        ObjectKind::Snapshot | ObjectKind::Forgotten => text.parse::<SnapshotId>().is_ok(),
        ObjectKind::Protected => protected_by(name).is_some() || is_announcement(name),
        ObjectKind::Writer => text.parse::<WriterId>().is_ok() || heartbeat_writer(name).is_some(),
        ObjectKind::Condemned if move_of(name).is_some() => true,
        ObjectKind::Condemned => text.strip_suffix(".waits").unwrap_or(text).parse::<WriterId>().is_ok(),
        ObjectKind::Relocation => RelocationId::of(name).is_some(),
        ObjectKind::Scrub => is_read_record(name) || is_accepted_record(name) || damaged_pack(name).is_some(),
    }
}

/// Opens and decodes an object of a kind that is not checked elsewhere.
fn check_object(vault: &Vault, name: &ObjectName) -> Result<()> {
    let malformed = |what| move |error| Error::malformed(name, 0, what, error);
    match name.kind() {
        ObjectKind::Config | ObjectKind::Key | ObjectKind::Pack | ObjectKind::Index | ObjectKind::Snapshot => Ok(()),
        ObjectKind::Forgotten => {
            let record: ForgottenRecord = decode_json(vault, name)?;
            check_name(name, &record.snapshot.to_string())
        }
        ObjectKind::Writer => {
            let record: WriterRecord = decode_json(vault, name)?;
            match heartbeat_writer(name) {
                Some(writer) if writer == record.writer => Ok(()),
                _ => check_name(name, &record.writer.to_string()),
            }
        }
        ObjectKind::Protected => vault.get_sealed(name, MARKER_BYTES_MAX).map(|_| ()),
        ObjectKind::Condemned => vault.get_sealed(name, CONDEMNED_BYTES_MAX).map(|_| ()),
        ObjectKind::Relocation => match RelocationId::of(name) {
            Some((id, replica)) => read_replica(&*vault.store, &vault.keyring, &id, replica).map(|_| ()),
            None => Ok(()),
        },
        ObjectKind::Scrub if is_read_record(name) => {
            let bytes = vault.get_sealed(name, READ_RECORD_BYTES_MAX)?;
            ReadRecord::decode(&bytes)
                .map(|_| ())
                .map_err(malformed("record of a scrub"))
        }
        ObjectKind::Scrub if is_accepted_record(name) => read_accepted(vault, name).map(|_| ()),
        ObjectKind::Scrub => {
            let bytes = vault.get_sealed(name, DAMAGE_BYTES_MAX)?;
            DamageRecord::decode(&bytes)
                .map(|_| ())
                .map_err(malformed("damage record"))
        }
    }
}

fn decode_json<T: DeserializeOwned>(vault: &Vault, name: &ObjectName) -> Result<T> {
    let bytes = vault.get_sealed(name, MARKER_BYTES_MAX)?;
    serde_json::from_slice(&bytes).map_err(|error| Error::damaged(name, error.column() as u64, error.to_string()))
}

fn check_name(name: &ObjectName, expected: &str) -> Result<()> {
    if name.name() == expected {
        Ok(())
    } else {
        Err(Error::damaged(name, 0, format!("it is about {expected}")))
    }
}
