//! Opens images for writing.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use holdfast_block::{BlockDevice, BlockDeviceMut, ExtentList, Result as BlockResult};

use crate::allocation_table::writer::TableMut;
use crate::chain::options::Locking;
use crate::chain::{OpenLayer, OpenedFile, open_chain, stack};
use crate::file::Access;
use crate::formats::qcow2::writer::Qcow2Mut;
use crate::formats::raw::RawImageMut;
use crate::model::info::{LayerInfo, Note};
use crate::{Error, OpenOptions, Result};

/// Opens an image for writing, and its backing files for reading.
///
/// Fails if another process has it open, or if it is truncated, marked as corrupt, or may have wrong refcounts.
pub fn open_mut(path: &Path, options: &OpenOptions) -> Result<ImageMut> {
    let access = match options.locking {
        Locking::Lock => Access::Write,
        Locking::HeldElsewhere => Access::WriteUnlocked,
    };
    let mut chain = open_chain(path, options, access)?;
    if let Some(tree) = &chain.tree {
        tree.check_writable()?;
    }
    let infos: Vec<_> = chain.files.iter().map(|opened| opened.info.clone()).collect();
    let top = chain.files.remove(0);
    let below = stack(chain.files, None)?;
    let backing = below.first().map(|layer| Arc::clone(&layer.device));
    let device: Box<dyn BlockDeviceMut> = match top.layer(backing)? {
        OpenLayer::Raw(raw) => Box::new(RawImageMut(raw)),
        OpenLayer::Qcow2(layer) => Box::new(Qcow2Mut::new(*layer)?),
        OpenLayer::Tables(layer) => {
            if layer.tables.is_cut_off()? {
                let image = layer.image.to_string();
                return Err(Error::CutOff { image });
            }
            Box::new(TableMut::new(layer))
        }
    };
    Ok(ImageMut {
        device,
        infos,
        notes: chain.notes,
    })
}

/// A lock of an image, as [`open_mut`] takes it, for the processes that a process starts: they open the image with
/// [`Locking::HeldElsewhere`]. No other program can use the image between two of them. They inherit the lock, so it also
/// lasts as long as one of them runs if this process is killed.
pub struct ImageLock {
    _image: OpenedFile,
}

impl ImageLock {
    /// Locks an image.
    ///
    /// # Errors
    /// Those of [`open_mut`].
    pub fn take(path: &Path, options: &OpenOptions) -> Result<Self> {
        let mut chain = open_chain(path, options, Access::WriteWithChildren)?;
        Ok(Self {
            _image: chain.files.remove(0),
        })
    }
}

/// An image that is open for writing.
///
/// Dropping it discards writes since the last [`flush`](BlockDeviceMut::flush), as a power failure would; the image
/// stays consistent.
pub struct ImageMut {
    device: Box<dyn BlockDeviceMut>,
    infos: Vec<LayerInfo>,
    notes: Vec<Note>,
}

impl ImageMut {
    /// The files of the chain when it was opened, the image itself first.
    pub fn layers(&self) -> &[LayerInfo] {
        &self.infos
    }

    /// Notable facts about the chain.
    pub fn notes(&self) -> &[Note] {
        &self.notes
    }
}

impl BlockDevice for ImageMut {
    fn size_bytes(&self) -> u64 {
        self.device.size_bytes()
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> BlockResult<()> {
        self.device.read_at(buffer, offset)
    }

    fn extents(&self, range: Range<u64>, extent_count_max: usize) -> BlockResult<ExtentList> {
        self.device.extents(range, extent_count_max)
    }

    fn block_size_bytes(&self) -> u32 {
        self.device.block_size_bytes()
    }
}

impl BlockDeviceMut for ImageMut {
    fn write_at(&self, data: &[u8], offset: u64) -> BlockResult<()> {
        self.device.write_at(data, offset)
    }

    fn write_zeroes(&self, range: Range<u64>) -> BlockResult<()> {
        self.device.write_zeroes(range)
    }

    fn trim(&self, range: Range<u64>) -> BlockResult<()> {
        self.device.trim(range)
    }

    fn flush(&self) -> BlockResult<()> {
        self.device.flush()
    }
}
