//! Parses the footer and, except for fixed images, the sparse header.

use holdfast_block::to_usize;

use super::footer::{FOOTER_BYTES, FOOTER_BYTES_SHORT, Footer, FooterBytes};
use super::sparse::SparseHeader;
use crate::Result;
use crate::error::corrupt;
use crate::file::ImageFile;
use crate::model::info::{BlockInfo, ImageKind, ParentInfo, USUAL_SECTOR_BYTES};

/// Footer and sparse header of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct VhdHeader {
    pub(crate) footer: Footer,
    /// None for fixed images.
    pub(crate) sparse: Option<SparseHeader>,
    /// The stored footer, with fields of other programs.
    pub(crate) footer_bytes: Box<FooterBytes>,
    /// Whether the footer at the end is valid; otherwise its copy is used.
    pub(crate) has_footer_at_end: bool,
    /// Whether the footer at the end has 511 bytes.
    pub(crate) is_footer_short: bool,
}

impl VhdHeader {
    /// Reads the headers of `file`; errors call it `image`.
    pub(crate) fn load(file: &dyn ImageFile, image: &str) -> Result<Self> {
        let file_bytes = file.length_bytes()?;
        if file_bytes < FOOTER_BYTES_SHORT {
            return Err(corrupt(
                image,
                "footer",
                0,
                format!("the file has {file_bytes} bytes, too few for one"),
            ));
        }
        let footer_at = |at: u64| {
            let mut bytes = [0; to_usize(FOOTER_BYTES)];
            file.read_at(&mut bytes, at)?;
            Footer::parse(&bytes, at, image).map(|footer| (footer, Box::new(bytes)))
        };
        let mut at_end = footer_at(file_bytes.saturating_sub(FOOTER_BYTES));
        let mut is_footer_short = false;
        if at_end.is_err()
            && let Ok(short) = footer_at(file_bytes - FOOTER_BYTES_SHORT)
        {
            (at_end, is_footer_short) = (Ok(short), true);
        }
        let has_footer_at_end = at_end.is_ok();
        let (footer, footer_bytes) = match at_end {
            Ok(found) => found,
            // A program was killed while the image grew; only growing images have a copy.
            Err(error) => match footer_at(0) {
                Ok(copy) if copy.0.kind != ImageKind::Fixed => copy,
                _ => return Err(error),
            },
        };
        let disk_bytes = footer.disk_bytes();
        if footer.kind == ImageKind::Fixed && disk_bytes > start_of_footer(file_bytes, is_footer_short) {
            return Err(corrupt(
                image,
                "footer",
                48,
                format!("the disk has {disk_bytes} bytes, and the file {file_bytes}"),
            ));
        }
        let sparse = match footer.kind {
            ImageKind::Fixed => None,
            _ => Some(SparseHeader::load(file, file_bytes, &footer, image)?),
        };
        Ok(Self {
            footer,
            sparse,
            footer_bytes,
            has_footer_at_end,
            is_footer_short,
        })
    }

    /// Where the footer at the end begins; `file_bytes` if there is none.
    pub(crate) fn footer_start(&self, file_bytes: u64) -> u64 {
        if self.has_footer_at_end {
            start_of_footer(file_bytes, self.is_footer_short)
        } else {
            file_bytes
        }
    }

    pub(crate) fn describe(&self) -> BlockInfo {
        let sparse = self.sparse.as_ref();
        BlockInfo {
            kind: self.footer.kind,
            block_bytes: sparse.map_or(self.footer.disk_bytes(), |sparse| sparse.block_bytes),
            sector_bytes: USUAL_SECTOR_BYTES,
            id: Some(self.footer.id),
            modification: None,
            parent: sparse
                .filter(|_| self.footer.kind == ImageKind::Differencing)
                .map(|sparse| ParentInfo {
                    id: Some(sparse.parent),
                    modification: None,
                    names: sparse.parent_names.clone(),
                }),
            creator: Some(String::from_utf8_lossy(&self.footer.creator).trim_end().to_owned()),
        }
    }
}

fn start_of_footer(file_bytes: u64, is_short: bool) -> u64 {
    file_bytes.saturating_sub(if is_short { FOOTER_BYTES_SHORT } else { FOOTER_BYTES })
}
