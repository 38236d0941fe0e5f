//! Packs a root folder as an archive.

use std::io::{Read, Write};
use std::path::Path;

use holdfast_archive::{TreeEntry, TreeEntryKind, TreeTarWriter};

use super::loss::Account;
use super::walk::TreeWalker;
use super::{ContentCounts, ContentLoss, EntrySink, entry_error};
use crate::ContainerContentError;
use crate::job::{Job, Result, Unit};

const COPY_BYTES: usize = 1 << 20;

/// How a root folder is packed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PackRootOptions {
    /// How ranges without data are stored.
    pub holes: PackedHoles,
}

/// How ranges without data are stored.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum PackedHoles {
    /// As holes, in the sparse format 1.0 of GNU tar, which GNU tar, libarchive, Go and Holdfast read.
    #[default]
    Keep,
    /// As zeroes: for programs that read plain pax only.
    Fill,
}

/// What was packed.
#[derive(Debug, Default)]
pub struct PackReport {
    /// Files by kind, and bytes.
    pub counts: ContentCounts,
    /// What was not carried: the first of them.
    pub losses: Vec<ContentLoss>,
    /// The number of all files and attributes that were not carried.
    pub loss_count: u64,
    /// Length of the archive.
    pub archive_bytes: u64,
}

/// Writes everything in `root` that is on the same file system to `output`, as a tar archive in the pax format. The same
/// content gives the same bytes. A compressor can be the output.
///
/// # Errors
/// `root` cannot be read; writing; an interruption. Files that cannot be read are losses.
pub fn pack_root(root: &Path, output: &mut dyn Write, options: PackRootOptions, job: Job<'_>) -> Result<PackReport> {
    job.progress.phase("packing files", Unit::Bytes);
    let mut account = Account::new(job);
    let mut archive = TreeArchiveSink {
        writer: TreeTarWriter::new(output),
        options,
        buffer: Vec::new(),
    };
    TreeWalker::new(&mut archive, &mut account, None).walk(root)?;
    let archive_bytes = archive.writer.finish().map_err(ContainerContentError::Output)?;
    Ok(PackReport {
        counts: account.counts,
        losses: account.losses,
        loss_count: account.loss_count,
        archive_bytes,
    })
}

struct TreeArchiveSink<W> {
    writer: TreeTarWriter<W>,
    options: PackRootOptions,
    buffer: Vec<u8>,
}

impl<W: Write> TreeArchiveSink<W> {
    /// Writes `length` bytes of `data`, or zeroes.
    fn copy(&mut self, length: u64, path: &[u8], data: Option<&mut dyn Read>, account: &mut Account<'_>) -> Result<()> {
        let mut data = data;
        let mut left = length;
        while left > 0 {
            let count = usize::try_from(left).unwrap_or(COPY_BYTES).min(COPY_BYTES);
            self.buffer.resize(count.max(self.buffer.len()), 0);
            let piece = self.buffer.get_mut(..count).unwrap_or_default();
            match &mut data {
                Some(data) => data
                    .read_exact(piece)
                    .map_err(|error| entry_error("read", path, error))?,
                None => piece.fill(0),
            }
            self.writer.data(piece).map_err(ContainerContentError::Output)?;
            left -= count as u64;
            if data.is_some() {
                account.advance(count as u64)?;
            } else {
                account.job.interrupt.check()?;
            }
        }
        Ok(())
    }
}

impl<W: Write> EntrySink for TreeArchiveSink<W> {
    fn entry(&mut self, entry: &TreeEntry, data: &mut dyn Read, account: &mut Account<'_>) -> Result<()> {
        let counts = &mut account.counts;
        match entry.kind {
            TreeEntryKind::File => counts.file_count += 1,
            TreeEntryKind::Directory => counts.directory_count += 1,
            TreeEntryKind::SymbolicLink(_) => counts.link_count += 1,
            TreeEntryKind::HardLink(_) => counts.hard_link_count += 1,
            _ => counts.special_count += 1,
        }
        let is_filled = self.options.holes == PackedHoles::Fill && entry.size_bytes > 0;
        if !is_filled {
            self.writer.append(entry).map_err(ContainerContentError::Output)?;
            for extent in &entry.extents {
                self.copy(extent.end - extent.start, &entry.path, Some(&mut *data), account)?;
            }
            return Ok(());
        }
        let mut whole = entry.clone();
        whole.extents = std::iter::once(0..entry.size_bytes).collect();
        self.writer.append(&whole).map_err(ContainerContentError::Output)?;
        let mut at = 0;
        for extent in &entry.extents {
            self.copy(extent.start - at, &entry.path, None, account)?;
            self.copy(extent.end - extent.start, &entry.path, Some(&mut *data), account)?;
            at = extent.end;
        }
        self.copy(entry.size_bytes - at, &entry.path, None, account)
    }
}
