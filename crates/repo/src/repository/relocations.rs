//! Relocations in the store, each stored twice.
//!
//! When the old pack of a relocation is deleted, nothing else records where its bytes are: a relocation is the only
//! small object that data depends on and that cannot be rebuilt. It is therefore stored as two objects with the same
//! content, sealed independently, `relocations/<pack>.<random>` and `relocations/<pack>.<random>.copy`. Both are
//! durable before the pack is deleted. Readers take the first readable one; verify and scrub read both; repair rewrites
//! one from the other, and gc the second one if its writer died in between.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::format::relocation::RelocationTable;
use crate::id::PackId;
use crate::key::{Keyring, Purpose, open_object};
use crate::store::{ObjectKind, ObjectName, Store, StoreError};

/// Longest relocation that is read.
const RELOCATION_BYTES_MAX: u64 = 16 << 20;
const COPY_SUFFIX: &str = "copy";

/// A relocation: its pack, and its number among those of the pack.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct RelocationId {
    pub(crate) pack: PackId,
    pub(crate) number: u64,
}

/// One of the two objects of a relocation, which have the same content.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Replica {
    First,
    Copy,
}

impl Replica {
    pub(crate) const BOTH: [Self; 2] = [Self::First, Self::Copy];

    pub(crate) fn other(self) -> Self {
        match self {
            Self::First => Self::Copy,
            Self::Copy => Self::First,
        }
    }
}

impl fmt::Display for RelocationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:016x}", self.pack, self.number)
    }
}

impl RelocationId {
    pub(crate) fn name(&self, replica: Replica) -> ObjectName {
        let text = match replica {
            Replica::First => self.to_string(),
            Replica::Copy => format!("{self}.{COPY_SUFFIX}"),
        };
        ObjectName::new(ObjectKind::Relocation, &text).expect("hex digits, dots and letters are a name")
    }

    /// The relocation and the replica with this object name.
    pub(crate) fn of(name: &ObjectName) -> Option<(Self, Replica)> {
        let (pack, rest) = name.name().split_once('.')?;
        let digits = rest.split('.').next()?;
        let id = Self {
            pack: pack.parse().ok()?,
            number: u64::from_str_radix(digits, 16).ok()?,
        };
        let replica = Replica::BOTH.into_iter().find(|replica| id.name(*replica) == *name)?;
        Some((id, replica))
    }
}

/// All relocations, and the existing replicas of each.
pub(crate) fn relocations(store: &dyn Store) -> Result<BTreeMap<RelocationId, BTreeSet<Replica>>> {
    let mut found: BTreeMap<RelocationId, BTreeSet<Replica>> = BTreeMap::new();
    store.list(ObjectKind::Relocation, &mut |name, _| {
        if let Some((id, replica)) = RelocationId::of(&name) {
            found.entry(id).or_default().insert(replica);
        }
        Ok(())
    })?;
    Ok(found)
}

/// Reads one of the objects of a relocation.
pub(crate) fn read_replica(
    store: &dyn Store,
    keyring: &Keyring,
    id: &RelocationId,
    replica: Replica,
) -> Result<RelocationTable> {
    let name = id.name(replica);
    let sealed = store.get(&name, RELOCATION_BYTES_MAX)?;
    let bytes = open_object(keyring, Purpose::MarkerSealing, &name, &sealed)?;
    let mut table = RelocationTable::default();
    table
        .decode_into(&bytes)
        .map_err(|error| Error::malformed(&name, 0, "relocation", error))?;
    Ok(table)
}

/// Reads a relocation from its first readable replica.
fn read(store: &dyn Store, keyring: &Keyring, id: &RelocationId) -> Result<RelocationTable> {
    let first = match read_replica(store, keyring, id, Replica::First) {
        Err(error) => error,
        read => return read,
    };
    match (first, read_replica(store, keyring, id, Replica::Copy)) {
        (_, Ok(table)) => Ok(table),
        // If only one of them exists, its error describes the problem.
        (Error::Store(StoreError::NotFound { .. }), Err(second)) => Err(second),
        (first, Err(_)) => Err(first),
    }
}

/// The present locations of bytes, by pack.
pub(crate) type RelocationTables = HashMap<PackId, Arc<RelocationTable>>;

/// The locations of relocated bytes; and the errors of relocations without a readable replica.
pub(crate) fn load_relocations(store: &dyn Store, keyring: &Keyring) -> Result<(RelocationTables, Vec<Error>)> {
    let mut tables: HashMap<PackId, RelocationTable> = HashMap::new();
    let mut errors = Vec::new();
    for id in relocations(store)?.into_keys() {
        match read(store, keyring, &id) {
            Ok(table) => table
                .moves()
                .for_each(|moved| tables.entry(id.pack).or_default().add(moved)),
            // It was deleted meanwhile.
            Err(Error::Store(StoreError::NotFound { .. })) => {}
            Err(error) if error.is_about_one_object() || error.is_unreadable() => errors.push(error),
            Err(error) => return Err(error),
        }
    }
    let shared = tables.into_iter().map(|(pack, table)| (pack, Arc::new(table)));
    Ok((shared.collect(), errors))
}

/// Deletes a relocation.
pub(crate) fn delete_relocation(store: &dyn Store, id: &RelocationId) -> Result<()> {
    for replica in Replica::BOTH {
        store.delete(&id.name(replica))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{RelocationId, Replica};
    use crate::id::PackId;
    use crate::store::{ObjectKind, ObjectName};

    #[test]
    fn only_the_two_names_of_a_relocation_are_its_own() {
        let id = RelocationId {
            pack: PackId::from_bytes([0xab; 16]),
            number: 0x0012_3456_789a_bcde,
        };
        for replica in Replica::BOTH {
            assert_eq!(RelocationId::of(&id.name(replica)), Some((id, replica)));
        }
        let pack = id.pack;
        for strange in [
            format!("{pack}"),
            format!("{pack}.12"),
            format!("{pack}.0012345678 9abcde").replace(' ', "-"),
            format!("{pack}.00123456789abcde.copy.copy"),
            format!("{pack}.00123456789abcde.other"),
            format!("{pack}.00123456789abcde.copy-"),
            "ab.00123456789abcde".to_owned(),
        ] {
            let name = ObjectName::new(ObjectKind::Relocation, &strange).unwrap();
            assert_eq!(RelocationId::of(&name), None, "{strange}");
        }
    }
}
