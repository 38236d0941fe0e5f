//! Which ranges of a device hold data.

use std::ops::Range;

/// The content of a range of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ExtentKind {
    /// Bytes that must be read; they may be zero.
    Data,
    /// Reads as zero, explicitly: a hole in a file, a zero cluster.
    Zero,
    /// Not stored in this layer: reads as the lower layer, or as zero if there is none.
    Absent,
}

/// A contiguous range of one kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Extent {
    /// Offset of the first byte.
    pub offset: u64,
    /// Length in bytes, never 0.
    pub length: u64,
    /// The content of the range.
    pub kind: ExtentKind,
}

impl Extent {
    /// First byte after the range.
    pub fn end(&self) -> u64 {
        self.offset + self.length
    }
}

/// An ordered list of extents without gaps, of bounded length.
///
/// The list begins at the start of the query and covers it up to [`ExtentList::end`]. If `extent_count_max` extents
/// were not sufficient, this is before the end of the query, and the caller continues there. Adjacent extents differ in
/// kind ([`ExtentList::push`] merges them), so a device without holes returns one extent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExtentList {
    start: u64,
    end: u64,
    extent_count_max: usize,
    extents: Vec<Extent>,
}

impl ExtentList {
    /// An empty list that starts at `start` and has space for `extent_count_max` (at least 1) extents.
    pub fn new(start: u64, extent_count_max: usize) -> Self {
        Self {
            start,
            end: start,
            extent_count_max: extent_count_max.max(1),
            extents: Vec::new(),
        }
    }

    /// Appends `length` bytes of `kind` at [`ExtentList::end`]; returns false if the list is full and nothing was
    /// appended.
    ///
    /// A `length` of 0 is accepted and changes nothing.
    pub fn push(&mut self, length: u64, kind: ExtentKind) -> bool {
        if length == 0 {
            return true;
        }
        let full = self.is_full();
        match self.extents.last_mut() {
            Some(last) if last.kind == kind => last.length += length,
            _ if full => return false,
            _ => self.extents.push(Extent {
                offset: self.end,
                length,
                kind,
            }),
        }
        self.end += length;
        true
    }

    /// Offset of the first byte covered.
    pub fn start(&self) -> u64 {
        self.start
    }

    /// Offset of the first byte after the list.
    pub fn end(&self) -> u64 {
        self.end
    }

    /// Whether the list is full: an extent of another kind than the last one cannot be added.
    pub fn is_full(&self) -> bool {
        self.extents.len() == self.extent_count_max
    }

    /// The extents, in order.
    pub fn as_slice(&self) -> &[Extent] {
        &self.extents
    }

    /// Iterates over the extents, in order.
    pub fn iter(&self) -> std::slice::Iter<'_, Extent> {
        self.extents.iter()
    }

    /// The extents, restricted to `range`.
    pub fn within(&self, range: Range<u64>) -> impl Iterator<Item = Extent> + '_ {
        self.extents.iter().filter_map(move |extent| {
            let offset = extent.offset.max(range.start);
            let end = extent.end().min(range.end);
            (offset < end).then(|| Extent {
                offset,
                length: end - offset,
                kind: extent.kind,
            })
        })
    }
}

impl IntoIterator for ExtentList {
    type Item = Extent;
    type IntoIter = std::vec::IntoIter<Extent>;

    fn into_iter(self) -> Self::IntoIter {
        self.extents.into_iter()
    }
}

impl<'a> IntoIterator for &'a ExtentList {
    type Item = &'a Extent;
    type IntoIter = std::slice::Iter<'a, Extent>;

    fn into_iter(self) -> Self::IntoIter {
        self.extents.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::{Extent, ExtentKind, ExtentList};

    #[test]
    fn neighbours_of_one_kind_merge_and_the_bound_holds() {
        let mut list = ExtentList::new(10, 2);
        assert!(list.push(5, ExtentKind::Data));
        assert!(list.push(5, ExtentKind::Data));
        assert!(list.push(1, ExtentKind::Zero));
        assert!(!list.push(1, ExtentKind::Data));
        assert!(list.push(1, ExtentKind::Zero));
        assert_eq!(list.end(), 22);
        assert_eq!(
            list.within(19..21).collect::<Vec<_>>(),
            [
                Extent {
                    offset: 19,
                    length: 1,
                    kind: ExtentKind::Data
                },
                Extent {
                    offset: 20,
                    length: 1,
                    kind: ExtentKind::Zero
                }
            ]
        );
    }
}
