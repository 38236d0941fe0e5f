//! Writes relocations so that a writer that is suspended in between does no harm.
//!
//! A relocation leads to packs that have no other references yet. Its writer may be suspended for a month just
//! before putting it, and be considered dead; the packs would be deleted, and the relocation would be dangling.
//! Relocations are therefore announced:
//!
//! 1. The writer puts `condemned/<writer>.move-<number>`, with everything that it is going to put under `relocations/`.
//! 2. It checks that its own announcement still exists. If not, it gives up.
//! 3. It checks that the packs that the relocations lead to exist. If not, it gives up.
//! 4. It puts the relocations, under names derived from the number, and deletes the announcement.
//!
//! A process that considers a writer dead does the opposite: it deletes the announcement of the writer first and looks
//! for moves second. So the writer notices that it was considered dead, or its moves are noticed: then they are
//! executed on its behalf, and what they lead to is alive. It does not matter if the writer wakes up and repeats that.
//!
//! Plaintext (integers named *n* are of variable length, see `wire`):
//!
//! ```text
//! u8   format version, 1
//! n    packs, each:  16 bytes identity of the old pack, n length, plaintext of its relocation
//! ```

use std::collections::{BTreeMap, BTreeSet, HashSet};

use crate::error::{Error, Result};
use crate::format::relocation::RelocationTable;
use crate::id::{PackId, WriterId};
use crate::repository::Repository;
use crate::repository::pending_deletes::{CONDEMNED_BYTES_MAX, condemned_packs};
use crate::repository::relocations::{RelocationId, Replica, read_replica, relocations};
use crate::store::{ObjectKind, ObjectName, StoreError};
use crate::vault::Vault;
use crate::wire::{Decoder, Malformed, put_varint};
use crate::writers::lease;
use crate::writers::lease::{Lease, WriterRecord};

const FORMAT_VERSION: u8 = 1;
const SUFFIX_START: &str = "move-";

/// The new locations of bytes, by old pack.
pub(crate) type Moves = BTreeMap<PackId, RelocationTable>;

fn move_name(writer: WriterId, number: u64) -> ObjectName {
    let name = format!("{writer}.{SUFFIX_START}{number:016x}");
    ObjectName::new(ObjectKind::Condemned, &name).expect("hex digits, dots and letters are a name")
}

/// The writer that announced a move, and the number of its relocations.
pub(crate) fn move_of(name: &ObjectName) -> Option<(WriterId, u64)> {
    let (writer, rest) = name.name().split_once('.')?;
    let writer: WriterId = writer.parse().ok()?;
    let number = u64::from_str_radix(rest.strip_prefix(SUFFIX_START)?, 16).ok()?;
    (move_name(writer, number) == *name).then_some((writer, number))
}

fn encode(moves: &Moves) -> Vec<u8> {
    let mut bytes = vec![FORMAT_VERSION];
    put_varint(&mut bytes, moves.len() as u64);
    for (pack, table) in moves {
        let table = table.encode();
        bytes.extend_from_slice(pack.as_bytes());
        put_varint(&mut bytes, table.len() as u64);
        bytes.extend_from_slice(&table);
    }
    bytes
}

fn decode(bytes: &[u8]) -> std::result::Result<Moves, Malformed> {
    let mut decoder = Decoder::new(bytes);
    if decoder.u8()? != FORMAT_VERSION {
        return decoder.fail("has an unknown version");
    }
    let mut moves = Moves::new();
    for _ in 0..decoder.count(PackId::LENGTH + 1)? {
        let pack = PackId::from_bytes(decoder.array()?);
        let length = decoder.count(1)?;
        let mut table = RelocationTable::default();
        table.decode_into(decoder.take(length)?)?;
        moves.insert(pack, table);
    }
    decoder.finish()?;
    Ok(moves)
}

fn targets(moves: &Moves) -> BTreeSet<PackId> {
    let all = moves.values().flat_map(RelocationTable::moves);
    all.map(|moved| moved.to.pack).collect()
}

impl Repository {
    /// Records durably where bytes of packs were moved. The destinations of `moves` must be durable.
    ///
    /// [`Error::Revoked`] if the writer was considered dead; [`Error::MissingPack`] if a destination pack is gone.
    pub(crate) fn commit_moves(&self, lease: &Lease<'_>, mut moves: Moves) -> Result<()> {
        moves.retain(|_, table| !table.is_empty());
        if moves.is_empty() {
            return Ok(());
        }
        let number = u64::from_le_bytes(self.vault.environment.draw()?);
        let name = move_name(lease.record.writer, number);
        self.vault.put_sealed(&name, &encode(&moves))?;
        let allowed = lease.check().and_then(|()| self.check_targets(&moves));
        if let Err(error) = allowed {
            self.vault.store.delete(&name).ok();
            return Err(error);
        }
        for (pack, table) in &moves {
            self.put_relocation(*pack, number, table)?;
        }
        Ok(self.vault.store.delete(&name)?)
    }

    fn check_targets(&self, moves: &Moves) -> Result<()> {
        for pack in targets(moves) {
            if self.is_absent(pack)? {
                return Err(Error::MissingPack { pack });
            }
        }
        Ok(())
    }

    /// Executes or drops the announced moves of writers that are no longer active.
    ///
    /// `dead` are writers that were announced when this run began, and that it considered dead. Other moves belong to
    /// writers that gave up; their destinations may be about to be deleted, and then they are dropped.
    pub(crate) fn settle_moves(&self, own: WriterId, dead: &[WriterRecord]) -> Result<()> {
        let names = self.vault.names(ObjectKind::Condemned)?;
        if !names.iter().any(|name| move_of(name).is_some()) {
            return Ok(());
        }
        let dead: HashSet<WriterId> = dead.iter().map(|record| record.writer).collect();
        // An unreadable announcement may be that of any active writer.
        let (writers, unread) = lease::readable_writers(&self.vault)?;
        let active: HashSet<WriterId> = writers.into_iter().map(|record| record.writer).collect();
        let condemned = condemned_packs(&self.vault)?;
        for name in &names {
            let Some((writer, number)) = move_of(name).filter(|(writer, _)| *writer != own) else {
                continue;
            };
            let is_at_work = !dead.contains(&writer) && (active.contains(&writer) || !unread.is_empty());
            if is_at_work {
                continue;
            }
            let bytes = match self.vault.get_sealed(name, CONDEMNED_BYTES_MAX) {
                Err(Error::Store(StoreError::NotFound { .. })) => continue,
                other => other?,
            };
            let moves = decode(&bytes).map_err(|error| Error::malformed(name, 0, "announced move", error))?;
            let is_doomed = !dead.contains(&writer) && targets(&moves).iter().any(|pack| condemned.contains(pack));
            match self.check_targets(&moves) {
                Ok(()) if !is_doomed => {
                    for (pack, table) in &moves {
                        self.put_relocation(*pack, number, table)?;
                    }
                }
                Ok(()) | Err(Error::MissingPack { .. }) => {}
                Err(error) => return Err(error),
            }
            self.vault.store.delete(name)?;
        }
        Ok(())
    }
}

/// The missing replicas of relocations, if no active writer is going to put them.
///
/// Repair checks between its steps, each of which puts both.
pub(crate) fn missing_replicas(vault: &Vault) -> Result<Vec<ObjectName>> {
    let is_there = |name: &ObjectName| match vault.store.length(name) {
        Ok(_) => Ok(true),
        Err(StoreError::NotFound { .. }) => Ok(false),
        Err(error) => Err(Error::from(error)),
    };
    let lone: Vec<(RelocationId, Replica)> = relocations(&*vault.store)?
        .into_iter()
        .filter_map(|(id, replicas)| match replicas.len() {
            1 => replicas.into_iter().next().map(|replica| (id, replica)),
            _ => None,
        })
        .collect();
    if lone.is_empty() || lease::is_another_writer_active(vault)? {
        return Ok(Vec::new());
    }
    let mut missing = Vec::new();
    for (id, replica) in lone {
        // Checked again after all processes that may have been putting or deleting both have ended.
        let other = id.name(replica.other());
        if is_there(&id.name(replica))? && !is_there(&other)? {
            missing.push(other);
        }
    }
    Ok(missing)
}

impl Repository {
    /// Records durably, in two replicas, where bytes of `pack` are now. Part of
    /// [`commit_moves`](Self::commit_moves).
    pub(crate) fn put_relocation(&self, pack: PackId, number: u64, table: &RelocationTable) -> Result<()> {
        let id = RelocationId { pack, number };
        for replica in Replica::BOTH {
            self.vault.put_sealed(&id.name(replica), &table.encode())?;
        }
        Ok(())
    }

    /// Rewrites one replica of a relocation from the other.
    pub(crate) fn restore_replica(&self, id: &RelocationId, replica: Replica) -> Result<()> {
        let table = read_replica(&*self.vault.store, &self.vault.keyring, id, replica.other())?;
        let name = id.name(replica);
        // After a crash between the two, the missing replica is found and written by the next run.
        self.vault.store.delete(&name)?;
        self.vault.put_sealed(&name, &table.encode())?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{any, proptest};

    use super::{Moves, decode, encode, move_name, move_of};
    use crate::format::pack::Location;
    use crate::format::relocation::{Move, RelocationTable};
    use crate::id::{PackId, WriterId};
    use crate::store::{ObjectKind, ObjectName};

    #[test]
    fn moves_round_trip() {
        let mut moves = Moves::new();
        for pack in 1..4 {
            let mut table = RelocationTable::default();
            table.add(Move {
                frame: 1,
                offset: 4096,
                length: 8192,
                to: Location {
                    pack: PackId::from_bytes([9; 16]),
                    frame: 2,
                    offset: 0,
                },
            });
            moves.insert(PackId::from_bytes([pack; 16]), table);
        }
        assert_eq!(decode(&encode(&moves)).unwrap(), moves);
    }

    #[test]
    fn only_announced_moves_have_such_names() {
        let writer = WriterId::from_bytes([7; 16]);
        assert_eq!(move_of(&move_name(writer, 12)), Some((writer, 12)));
        for strange in [
            format!("{writer}"),
            format!("{writer}.waits"),
            format!("{writer}.move-12"),
        ] {
            let name = ObjectName::new(ObjectKind::Condemned, &strange).unwrap();
            assert_eq!(move_of(&name), None, "{strange}");
        }
    }

    proptest! {
        #[test]
        fn hostile_moves_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            drop(decode(&bytes));
        }
    }
}
