//! Reads any leaf of a map, by position.

use std::sync::Arc;

use super::page::{decode_inner, decode_leaf};
use super::{FANOUT, LEAF_BYTES, PageRef, Piece, Unit, height, leaf_count};
use crate::error::{Error, Result};
use crate::format::pack::pack_name;

/// The source of a map's pages.
pub(crate) trait PageCache: Send + Sync {
    /// The bytes of a page.
    fn page(&self, page: PageRef) -> Result<Vec<u8>>;
}

/// A map that is open for reading.
pub(crate) struct MapReader<'a> {
    pages: &'a dyn PageCache,
    root: Option<PageRef>,
    size_bytes: u64,
    unit: Unit,
    /// The inner pages above the last requested leaf, from the root down: the next leaf usually shares them.
    path: Vec<(PageRef, Arc<[Option<PageRef>]>)>,
}

impl<'a> MapReader<'a> {
    pub(crate) fn new(pages: &'a dyn PageCache, root: Option<PageRef>, size_bytes: u64, unit: Unit) -> Self {
        Self {
            pages,
            root,
            size_bytes,
            unit,
            path: Vec::new(),
        }
    }

    pub(crate) fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    pub(crate) fn unit(&self) -> Unit {
        self.unit
    }

    pub(crate) fn leaf_count(&self) -> u64 {
        leaf_count(self.size_bytes)
    }

    /// Number of bytes that leaf `number` describes.
    pub(crate) fn leaf_span(&self, number: u64) -> u64 {
        (self.size_bytes - number * LEAF_BYTES).min(LEAF_BYTES)
    }

    /// The page of leaf `number`; `None` if the leaf is zero.
    pub(crate) fn leaf_ref(&mut self, number: u64) -> Result<Option<PageRef>> {
        assert!(number < self.leaf_count(), "the leaf is inside the map");
        self.page_ref(0, number)
    }

    /// The pieces of leaf `number`; `None` if the leaf is zero.
    pub(crate) fn leaf(&mut self, number: u64) -> Result<Option<Vec<Piece>>> {
        let Some(page) = self.leaf_ref(number)? else {
            return Ok(None);
        };
        self.decode_leaf(page, number).map(Some)
    }

    /// The pieces of the leaf in `page`.
    pub(crate) fn decode_leaf(&self, page: PageRef, number: u64) -> Result<Vec<Piece>> {
        let bytes = self.pages.page(page)?;
        decode_leaf(&bytes, self.unit, self.leaf_span(number)).map_err(|malformed| {
            Error::malformed(
                &pack_name(page.location.pack),
                page.location.offset.into(),
                "page of a disk map",
                malformed,
            )
        })
    }

    /// The number of the first leaf from `number` on that has a page; `None` if the rest of the map is zero.
    ///
    /// Regions without pages are skipped a subtree at a time.
    pub(crate) fn next_leaf(&mut self, mut number: u64) -> Result<Option<u64>> {
        'search: while number < self.leaf_count() {
            for level in (1..=height(self.size_bytes)).rev() {
                let span = FANOUT.pow(level);
                if self.page_ref(level, number / span)?.is_none() {
                    number = (number / span + 1).saturating_mul(span);
                    continue 'search;
                }
            }
            if self.page_ref(0, number)?.is_some() {
                return Ok(Some(number));
            }
            number += 1;
        }
        Ok(None)
    }

    /// The reference of page `number` of `level` (0: leaves); `None` if it is zero.
    pub(crate) fn page_ref(&mut self, level: u32, number: u64) -> Result<Option<PageRef>> {
        let top = height(self.size_bytes);
        let mut page = self.root;
        for parent_level in (level + 1..=top).rev() {
            let Some(parent) = page else { return Ok(None) };
            let below = FANOUT.pow(parent_level - 1 - level);
            let child_number = number / below;
            let children = self.children(
                parent,
                parent_level,
                child_number / FANOUT,
                (top - parent_level) as usize,
            )?;
            page = children[holdfast_block::to_usize(child_number % FANOUT)];
        }
        Ok(page)
    }

    /// The children of inner page `number` of `level`, `depth` levels below the root.
    pub(crate) fn children(
        &mut self,
        page: PageRef,
        level: u32,
        number: u64,
        depth: usize,
    ) -> Result<Arc<[Option<PageRef>]>> {
        if let Some((known, children)) = self.path.get(depth)
            && *known == page
        {
            return Ok(Arc::clone(children));
        }
        let below = leaf_count(self.size_bytes).div_ceil(FANOUT.pow(level - 1));
        let child_count = (below - number * FANOUT).min(FANOUT);
        let bytes = self.pages.page(page)?;
        let children: Arc<[_]> = decode_inner(&bytes, child_count)
            .map_err(|malformed| {
                let offset = page.location.offset.into();
                Error::malformed(
                    &pack_name(page.location.pack),
                    offset,
                    "inner page of a disk map",
                    malformed,
                )
            })?
            .into();
        self.path.truncate(depth);
        if self.path.len() == depth {
            self.path.push((page, Arc::clone(&children)));
        }
        Ok(children)
    }
}
