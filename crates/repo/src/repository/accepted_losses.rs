//! Accepted losses: packs that no longer stop gc.

use std::collections::HashSet;

use crate::error::{Error, Result};
use crate::id::PackId;
use crate::repository::pending_deletes::{CONDEMNED_BYTES_MAX, decode_condemned};
use crate::store::{ObjectKind, ObjectName, StoreError};
use crate::vault::Vault;

pub(crate) const ACCEPTED_START: &str = "accepted.";

/// Whether a name is that of a list of packs with accepted loss.
pub(crate) fn is_accepted_record(name: &ObjectName) -> bool {
    let number = name.name().strip_prefix(ACCEPTED_START);
    name.kind() == ObjectKind::Scrub && number.is_some_and(|text| u64::from_str_radix(text, 16).is_ok())
}

/// The packs in a list of accepted losses.
pub(crate) fn read_accepted(vault: &Vault, name: &ObjectName) -> Result<Vec<PackId>> {
    let bytes = vault.get_sealed(name, CONDEMNED_BYTES_MAX)?;
    decode_condemned(&bytes).map_err(|error| Error::malformed(name, 0, "list of accepted losses", error))
}

/// The packs whose loss was accepted. An unreadable list accepts nothing.
pub(crate) fn accepted_packs(vault: &Vault) -> Result<HashSet<PackId>> {
    let mut accepted = HashSet::new();
    for name in vault
        .names(ObjectKind::Scrub)?
        .iter()
        .filter(|name| is_accepted_record(name))
    {
        match read_accepted(vault, name) {
            Ok(packs) => accepted.extend(packs),
            Err(Error::Store(StoreError::NotFound { .. })) => {}
            Err(error) if error.is_about_one_object() || error.is_unreadable() => {}
            Err(error) => return Err(error),
        }
    }
    Ok(accepted)
}
