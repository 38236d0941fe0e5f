//! Edits the text by ranges: everything else stays byte for byte.

use std::ops::Range;

use super::{DiskDescriptor, FILE_NAME};
use crate::{ImageId, Result};

impl DiskDescriptor {
    /// Replaces ranges of the text, which must not overlap; the result is parsed and validated.
    pub(super) fn edited(&self, edits: Vec<(Range<usize>, String)>) -> Result<Self> {
        Self::parse(self.edited_text(edits).as_bytes(), FILE_NAME)
    }

    /// The text with ranges of it replaced, which must not overlap.
    pub(super) fn edited_text(&self, mut edits: Vec<(Range<usize>, String)>) -> String {
        edits.sort_by_key(|(place, _)| (place.start, place.end));
        let (mut text, mut done) = (String::with_capacity(self.text.len()), 0);
        for (place, new) in edits {
            assert!(place.start >= done, "changes of one text do not overlap");
            text.push_str(self.text.get(done..place.start).expect("places come from this text"));
            text.push_str(&new);
            done = place.end;
        }
        text.push_str(self.text.get(done..).expect("places come from this text"));
        text
    }

    /// An id as it is spelled at `place`: with or without braces.
    pub(super) fn spelled(&self, place: &Range<usize>, id: ImageId) -> String {
        let is_in_braces = self.text.get(place.clone()).is_some_and(|text| text.starts_with('{'));
        if is_in_braces {
            format!("{{{id}}}")
        } else {
            id.to_string()
        }
    }
}
