//! Edits the text by ranges: everything else stays byte for byte.

use std::ops::Range;

use super::{DiskDescriptor, FILE_NAME};
use crate::Result;

impl DiskDescriptor {
    /// Replaces ranges of the text, which must not overlap; the result is parsed and validated.
    pub(super) fn edited(&self, mut edits: Vec<(Range<usize>, String)>) -> Result<Self> {
        edits.sort_by_key(|(place, _)| (place.start, place.end));
        let (mut text, mut done) = (String::with_capacity(self.text.len()), 0);
        for (place, new) in edits {
            assert!(place.start >= done, "changes of one text do not overlap");
            text.push_str(self.text.get(done..place.start).expect("places come from this text"));
            text.push_str(&new);
            done = place.end;
        }
        text.push_str(self.text.get(done..).expect("places come from this text"));
        Self::parse(text.as_bytes(), FILE_NAME)
    }
}
