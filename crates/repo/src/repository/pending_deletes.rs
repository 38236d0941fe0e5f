//! Packs that gc is going to delete.
//!
//! Gc announces the packs before it deletes them. A writer that begins afterwards does not refer to them; gc waits for
//! writers that began before. Plaintext of the sealed object `condemned/<writer>`: u8 format version 1, then 16 bytes
//! for each pack. Beside it, if there were writers to wait for, `condemned/<writer>.waits`: JSON that names them.

use std::collections::HashSet;

use crate::error::{Error, Result};
use crate::id::{PackId, WriterId};
use crate::store::{ObjectKind, ObjectName, StoreError};
use crate::vault::Vault;
use crate::wire::{Decoder, Malformed};

const FORMAT_VERSION: u8 = 1;
pub(crate) const CONDEMNED_BYTES_MAX: u64 = 64 << 20;

/// The object name of the list of packs that the gc run `writer` condemned.
pub(crate) fn condemned_name(writer: WriterId) -> ObjectName {
    ObjectName::new(ObjectKind::Condemned, &writer.to_string()).expect("hex digits are a name")
}

/// The object name of the list of writers that the gc run `writer` has to wait for before it may delete the
/// condemned packs.
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

pub(crate) fn decode_condemned(bytes: &[u8]) -> std::result::Result<Vec<PackId>, Malformed> {
    let mut decoder = Decoder::new(bytes);
    if decoder.u8()? != FORMAT_VERSION {
        return decoder.fail("has an unknown version");
    }
    let (ids, rest) = decoder.take(decoder.remaining())?.as_chunks();
    if !rest.is_empty() {
        return decoder.fail("ends within a pack");
    }
    Ok(ids.iter().map(|id| PackId::from_bytes(*id)).collect())
}

/// The packs that each gc run is going to delete.
///
/// An unreadable list is an error, since its packs must not be referenced.
pub(crate) fn condemnations(vault: &Vault) -> Result<Vec<(WriterId, Vec<PackId>)>> {
    let mut lists = Vec::new();
    for name in vault.names(ObjectKind::Condemned)? {
        let Ok(writer) = name.name().parse() else { continue };
        let bytes = match vault.get_sealed(&name, CONDEMNED_BYTES_MAX) {
            // The deletions were completed meanwhile.
            Err(Error::Store(StoreError::NotFound { .. })) => continue,
            other => other?,
        };
        let packs =
            decode_condemned(&bytes).map_err(|error| Error::malformed(&name, 0, "list of condemned packs", error))?;
        lists.push((writer, packs));
    }
    Ok(lists)
}

/// All packs that are pending deletion.
pub(crate) fn condemned_packs(vault: &Vault) -> Result<HashSet<PackId>> {
    Ok(condemnations(vault)?.into_iter().flat_map(|(_, packs)| packs).collect())
}
