//! Changed refcounts, in the form in which a commit writes them.

use std::collections::BTreeMap;

use holdfast_block::Result as BlockResult;

use super::geometry::POINTER_BYTES;
use super::header::REFCOUNT_TABLE_AT;
use crate::file::ImageFile;
use crate::model::bytes::from_words;

/// Changed refcounts that are stored together.
pub(crate) struct RefcountChanges {
    pub(super) cluster_bytes: u64,
    pub(super) blocks: Vec<ChangedBlock>,
    pub(super) table: ChangedRefcountTable,
}

/// A refcount block with changes.
pub(super) struct ChangedBlock {
    pub(super) index: u64,
    pub(super) offset: u64,
    pub(super) bytes: Vec<u8>,
}

/// The changes of the refcount table.
pub(super) enum ChangedRefcountTable {
    None,
    /// Offsets of new blocks, by their indexes.
    Entries {
        table_offset: u64,
        blocks: BTreeMap<u64, u64>,
    },
    Moved {
        table_offset: u64,
        table: Vec<u64>,
    },
}

impl RefcountChanges {
    /// Writes changed blocks, and a moved table to its new place. No stored reference changes its meaning.
    pub(crate) fn write_blocks(&self, file: &dyn ImageFile) -> BlockResult<()> {
        for block in &self.blocks {
            file.write_at(&block.bytes, block.offset)?;
        }
        match &self.table {
            ChangedRefcountTable::Moved { table_offset, table } => file.write_at(&from_words(table), *table_offset),
            ChangedRefcountTable::None | ChangedRefcountTable::Entries { .. } => Ok(()),
        }
    }

    /// Stores references to new blocks in the table, or one to the moved table in the header; returns whether there
    /// were any.
    ///
    /// The writes of [`write_blocks`](Self::write_blocks) must have been synced.
    pub(crate) fn write_table(&self, file: &dyn ImageFile) -> BlockResult<StoreOutcome> {
        match &self.table {
            ChangedRefcountTable::None => return Ok(StoreOutcome::Nothing),
            ChangedRefcountTable::Entries { table_offset, blocks } => {
                for (index, offset) in blocks {
                    file.write_at(&offset.to_be_bytes(), table_offset + index * POINTER_BYTES)?;
                }
            }
            ChangedRefcountTable::Moved { table_offset, table } => {
                let bytes = table.len() as u64 * POINTER_BYTES;
                let clusters = u32::try_from(bytes.div_ceil(self.cluster_bytes)).expect("bounded by 8 MiB");
                // Twelve bytes in the first sector of the header, which is written atomically.
                let mut field = [0; 12];
                field[..8].copy_from_slice(&table_offset.to_be_bytes());
                field[8..].copy_from_slice(&clusters.to_be_bytes());
                file.write_at(&field, REFCOUNT_TABLE_AT)?;
            }
        }
        Ok(StoreOutcome::Something)
    }
}

/// Whether anything was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StoreOutcome {
    Nothing,
    Something,
}
