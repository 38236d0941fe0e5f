//! The frame tables of packs in segments.

use super::{SegmentKeys, SegmentReader};
use crate::error::{Error, Result};
use crate::format::pack::{Directory, decode_frame_table};
use crate::id::{PackId, SegmentId};
use crate::store::{ObjectKind, Store, StoreError};

/// The frames of `pack` from the index, as a directory without chunks; `None` if no segment has them.
///
/// Unreadable segments are skipped.
pub(crate) fn find_frame_table(store: &dyn Store, keys: &SegmentKeys, pack: PackId) -> Result<Option<Directory>> {
    // Segments may be merged during the search: the second attempt finds the merged one.
    for _ in 0..2 {
        let mut segments: Vec<SegmentId> = Vec::new();
        store.list(ObjectKind::Index, &mut |name, _| {
            segments.extend(name.name().parse::<SegmentId>());
            Ok(())
        })?;
        let mut vanished = false;
        for segment in segments {
            let read = SegmentReader::open(store, keys, segment).and_then(|reader| reader.frame_table(store, pack));
            match read {
                Ok(Some(bytes)) => {
                    if let Ok(directory) = decode_frame_table(&bytes) {
                        return Ok(Some(directory));
                    }
                }
                Ok(None) => {}
                Err(Error::Store(StoreError::NotFound { .. })) => vanished = true,
                Err(error) if error.is_about_one_object() || error.is_unreadable() => {}
                Err(error) => return Err(error),
            }
        }
        if !vanished {
            break;
        }
    }
    Ok(None)
}
