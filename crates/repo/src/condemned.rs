//! Packs that gc is going to delete.
//!
//! Before gc deletes packs it says so. A writer that begins afterwards sees it and does not refer to them; one that began
//! before is waited for. Plaintext of the sealed object `condemned/<writer>`: u8 format version 1, then 16 bytes for each
//! pack. Beside it, when there were writers to wait for, `condemned/<writer>.waits`: JSON that names them.

use std::collections::HashSet;

use crate::error::{Error, Result};
use crate::id::{PackId, WriterId};
use crate::repository::Vault;
use crate::store::{ObjectKind, ObjectName, StoreError};

const FORMAT_VERSION: u8 = 1;
pub(crate) const CONDEMNED_BYTES_MAX: u64 = 64 << 20;

/// The name of what the gc run `writer` condemns.
pub(crate) fn condemned_name(writer: WriterId) -> ObjectName {
    ObjectName::new(ObjectKind::Condemned, &writer.to_string()).expect("hex digits are a name")
}

/// The name of the list of writers that the gc run `writer` has to wait for before it may delete what it condemned.
pub(crate) fn waits_name(writer: WriterId) -> ObjectName {
    ObjectName::new(ObjectKind::Condemned, &format!("{writer}.waits")).expect("hex digits and letters are a name")
}

pub(crate) fn encode_condemned<'a>(packs: impl IntoIterator<Item = &'a PackId>) -> Vec<u8> {
    let mut bytes = vec![FORMAT_VERSION];
    packs
        .into_iter()
        .for_each(|pack| bytes.extend_from_slice(pack.as_bytes()));
    bytes
}

/// What each gc run is going to delete.
///
/// A list that cannot be read is an error: what it names must not be referred to.
pub(crate) fn condemnations(vault: &Vault) -> Result<Vec<(WriterId, Vec<PackId>)>> {
    let mut lists = Vec::new();
    for name in vault.names(ObjectKind::Condemned)? {
        let Ok(writer) = name.name().parse() else { continue };
        let bytes = match vault.get_sealed(&name, CONDEMNED_BYTES_MAX) {
            // It was carried out while we looked.
            Err(Error::Store(StoreError::NotFound { .. })) => continue,
            other => other?,
        };
        let Some((&FORMAT_VERSION, ids)) = bytes.split_first() else {
            return Err(Error::damaged(&name, 0, "unknown version of a list of condemned packs"));
        };
        let (ids, rest) = ids.as_chunks();
        if !rest.is_empty() {
            return Err(Error::damaged(
                &name,
                bytes.len() as u64,
                "a list of condemned packs ends within a pack",
            ));
        }
        lists.push((writer, ids.iter().map(|id| PackId::from_bytes(*id)).collect()));
    }
    Ok(lists)
}

/// All packs that somebody is going to delete.
pub(crate) fn condemned_packs(vault: &Vault) -> Result<HashSet<PackId>> {
    Ok(condemnations(vault)?.into_iter().flat_map(|(_, packs)| packs).collect())
}
