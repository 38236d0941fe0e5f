//! Emergency space: frees space on a full store, because gc has to write a little before it can delete much.
//!
//! Only objects that can be rebuilt are deleted: records of scrubs, and segments of the index, which the next backup
//! rebuilds from the directories of the packs. Nothing that a snapshot needs is touched.

use crate::error::{Error, Result};
use crate::repository::accepted_losses::is_accepted_record;
use crate::repository::damage_records::damaged_pack;
use crate::store::{ObjectKind, StoreError};
use crate::vault::Vault;

/// More than gc writes before it deletes the first pack.
const ROOM_BYTES: u64 = 1 << 20;

/// Calls `put`; if the store is full, frees space and calls it again.
pub(crate) fn with_room<T>(vault: &Vault, put: impl Fn() -> Result<T>) -> Result<T> {
    match put() {
        Err(Error::Store(StoreError::NoSpace { .. })) => {
            make_room(vault)?;
            put()
        }
        other => other,
    }
}

/// Deletes objects that can be rebuilt, the smallest first, until a mebibyte is free or none is left.
fn make_room(vault: &Vault) -> Result<()> {
    let mut spare = Vec::new();
    for kind in [ObjectKind::Scrub, ObjectKind::Index] {
        vault.store.list(kind, &mut |name, length| {
            // Damage records are the only information about lost data.
            if damaged_pack(&name).is_none() && !is_accepted_record(&name) {
                spare.push((length, name));
            }
            Ok(())
        })?;
    }
    spare.sort_unstable();
    let mut freed = 0;
    for (length, name) in spare {
        if freed >= ROOM_BYTES {
            break;
        }
        vault.store.delete(&name)?;
        freed += length;
    }
    Ok(())
}
