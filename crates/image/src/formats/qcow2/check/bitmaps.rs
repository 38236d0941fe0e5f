//! Checks the clusters of persistent bitmaps.

use super::super::bitmap;
use super::super::geometry::POINTER_BYTES;
use super::Checker;
use crate::formats::qcow2::features::AUTOCLEAR_BITMAPS;
use crate::{ProblemKind, Result};

impl Checker<'_> {
    /// Counts everything that the bitmap directory refers to.
    pub(super) fn claim_bitmaps(&mut self) -> Result<()> {
        if self.header.autoclear & AUTOCLEAR_BITMAPS == 0 {
            return Ok(());
        }
        let found = bitmap::directory(self.header, self.file_bytes, self.image)
            .and_then(|directory| Ok((directory, bitmap::load(self.file, self.header, self.image)?)));
        let (directory, bitmaps) = match found {
            Ok(found) => found,
            Err(error) => {
                self.has_damaged_bitmaps = true;
                self.structure(&error);
                return Ok(());
            }
        };
        if let Some(directory) = directory {
            let start = self.geometry.cluster_of(directory.offset);
            let clusters = self.geometry.clusters_for(directory.length_bytes);
            self.claim("bitmap directory", start..start + clusters)?;
        }
        let mut table_bytes = 0;
        for bitmap in bitmaps {
            // Overlapping tables would make the work exceed the file size.
            table_bytes += bitmap.table.entries * POINTER_BYTES;
            if table_bytes > self.file_bytes {
                let detail = "the bitmap tables are larger than the file: some overlap".to_owned();
                self.has_damaged_bitmaps = true;
                self.damage(ProblemKind::Structure { detail });
                break;
            }
            let start = self.geometry.cluster_of(bitmap.table.offset);
            let clusters = self.geometry.clusters_for(bitmap.table.entries * POINTER_BYTES);
            self.claim("bitmap table", start..start + clusters)?;
            for word in bitmap::load_table(self.file, bitmap.table)? {
                if let bitmap::TableEntry::Cluster(offset) = bitmap::table_entry(word) {
                    let cluster = self.geometry.cluster_of(offset);
                    self.claim("bitmap", cluster..cluster + 1)?;
                }
            }
        }
        Ok(())
    }
}
