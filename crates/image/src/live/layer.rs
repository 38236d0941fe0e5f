//! Opens and creates the layers of a container.

use std::ops::Range;
use std::sync::Arc;

use holdfast_block::{BlockDevice, ExtentList, Result as BlockResult, to_usize};

use super::folder::ChainFolder;
use super::reader::{LayerReader, LayerWriter, ReadPiece};
use super::stack::Seam;
use super::tree::TreeLayer;
use crate::allocation_table::TableLayer;
use crate::allocation_table::writer::TableMut;
use crate::file::{Access, ImageFile};
use crate::formats::ploop::header::PloopHeader;
use crate::formats::ploop::tables::PloopTables;
use crate::formats::qcow2::header::load_header;
use crate::formats::qcow2::layer::Qcow2Layer;
use crate::formats::qcow2::layout::{new_header, write_empty};
use crate::formats::qcow2::writer::Qcow2Mut;
use crate::formats::raw::{RawImage, RawImageMut};
use crate::formats::{ploop, qcow2};
use crate::model::create_options::{BackingFile, CreateOptions, Qcow2Options};
use crate::model::layered::{BackingUse, Layered};
use crate::model::mapped_extent::MappedKind;
use crate::{Error, Format, Result};

/// Memory for the tables of all readers of a chain.
const READER_CACHE_BYTES: u64 = 64 << 20;

/// A layer with tables, which is not written.
struct TablesReader<L>(L);

impl<L: Layered> LayerReader for TablesReader<L> {
    fn layer_bytes(&self) -> u64 {
        self.0.disk_bytes()
    }

    fn read_present(&self, buffer: &mut [u8], offset: u64) -> BlockResult<ReadPiece> {
        Ok(read_present(&self.0, buffer, offset)?)
    }

    fn extents_alone(&self, range: Range<u64>, extent_count_max: usize) -> BlockResult<ExtentList> {
        Ok(self.0.list_extents(range, extent_count_max, BackingUse::Nothing)?)
    }
}

/// Reads the start of a range from one layer.
fn read_present(layer: &dyn Layered, buffer: &mut [u8], offset: u64) -> Result<ReadPiece> {
    let run = layer.run(offset, buffer.len() as u64)?;
    let length = to_usize(run.length);
    let piece = &mut buffer[..length];
    match run.kind {
        MappedKind::Absent => {}
        MappedKind::Zero => piece.fill(0),
        MappedKind::Data { host } => layer.read_data(piece, host)?,
        MappedKind::Compressed(compressed) => layer.read_compressed(piece, offset, compressed)?,
    }
    Ok(ReadPiece {
        length,
        is_present: run.kind != MappedKind::Absent,
    })
}

impl LayerReader for TableMut {
    fn layer_bytes(&self) -> u64 {
        self.size_bytes()
    }

    fn read_present(&self, buffer: &mut [u8], offset: u64) -> BlockResult<ReadPiece> {
        Ok(self.with_layer(|layer| read_present(layer, buffer, offset))?)
    }

    fn extents_alone(&self, range: Range<u64>, extent_count_max: usize) -> BlockResult<ExtentList> {
        Ok(self.with_layer(|layer| layer.list_extents(range, extent_count_max, BackingUse::Nothing))?)
    }
}

impl LayerReader for Qcow2Mut {
    fn layer_bytes(&self) -> u64 {
        self.size_bytes()
    }

    fn read_present(&self, buffer: &mut [u8], offset: u64) -> BlockResult<ReadPiece> {
        Ok(self.with_layer(|layer| read_present(layer, buffer, offset))?)
    }

    fn extents_alone(&self, range: Range<u64>, extent_count_max: usize) -> BlockResult<ExtentList> {
        Ok(self.with_layer(|layer| layer.list_extents(range, extent_count_max, BackingUse::Nothing))?)
    }
}

macro_rules! raw_layer_reader {
    ($($layer:ty),*) => {$(
        /// A raw layer has everything.
        impl LayerReader for $layer {
            fn layer_bytes(&self) -> u64 {
                self.size_bytes()
            }

            fn read_present(&self, buffer: &mut [u8], offset: u64) -> BlockResult<ReadPiece> {
                self.read_at(buffer, offset)?;
                Ok(ReadPiece { length: buffer.len(), is_present: true })
            }

            fn extents_alone(&self, range: Range<u64>, extent_count_max: usize) -> BlockResult<ExtentList> {
                self.extents(range, extent_count_max)
            }
        }
    )*};
}

raw_layer_reader!(RawImage, RawImageMut);

/// Memory for the tables of one reader in a chain of `depth` layers.
pub(crate) fn reader_cache_bytes(depth: usize) -> u64 {
    READER_CACHE_BYTES / (depth.max(8).next_power_of_two() as u64)
}

/// Makes a reader of `file`, whose tables take at most `cache_bytes` of memory.
pub(crate) fn reader_of(
    file: Arc<dyn ImageFile>,
    format: Format,
    image: &str,
    cache_bytes: u64,
) -> Result<Arc<dyn LayerReader>> {
    Ok(match format {
        Format::Raw => Arc::new(RawImage::new(file)?),
        Format::Qcow2 => {
            let layer = qcow2_layer(file, image, None)?;
            Arc::new(TablesReader(layer.with_cache_bytes(cache_bytes)))
        }
        Format::Parallels => {
            let header = PloopHeader::load(&*file, image)?;
            let tables = PloopTables::new(image.into(), header, Arc::clone(&file)).with_cache_bytes(cache_bytes);
            Arc::new(TablesReader(TableLayer::new(
                image.into(),
                file,
                Box::new(tables),
                None,
            )))
        }
        other => return Err(unsupported(other, image)),
    })
}

/// Makes a writer of `file` above `seam`.
pub(crate) fn writer_of(
    file: Arc<dyn ImageFile>,
    format: Format,
    image: &str,
    seam: &Arc<Seam>,
) -> Result<Arc<dyn LayerWriter>> {
    let backing: Arc<dyn BlockDevice> = Arc::clone(seam) as Arc<dyn BlockDevice>;
    Ok(match format {
        Format::Raw => Arc::new(RawImageMut(RawImage::new(file)?)),
        Format::Qcow2 => Arc::new(Qcow2Mut::new(qcow2_layer(file, image, Some(backing))?)?),
        Format::Parallels => {
            let header = PloopHeader::load(&*file, image)?;
            let tables = PloopTables::new(image.into(), header, Arc::clone(&file));
            let layer = TableLayer::new(image.into(), file, Box::new(tables), Some(backing));
            if layer.tables.is_cut_off()? {
                return Err(Error::CutOff {
                    image: image.to_owned(),
                });
            }
            Arc::new(TableMut::new(layer))
        }
        other => return Err(unsupported(other, image)),
    })
}

fn qcow2_layer(file: Arc<dyn ImageFile>, image: &str, backing: Option<Arc<dyn BlockDevice>>) -> Result<Qcow2Layer> {
    let header = load_header(&*file, image)?;
    if header.has_data_file() {
        return Err(Error::UnsupportedFeature {
            image: image.to_owned(),
            feature: "an external data file".to_owned(),
            detail: "convert the image first (holdfast image convert)".to_owned(),
        });
    }
    Qcow2Layer::new(image.into(), header, file, None, backing)
}

fn unsupported(format: Format, image: &str) -> Error {
    Error::UnsupportedFormat {
        image: image.to_owned(),
        format: format.name(),
        detail: "the layers of a container are raw, qcow2 or Parallels; convert it first",
    }
}

/// The layer on which a new one is based.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BaseLayer<'a> {
    pub(crate) file: &'a str,
    pub(crate) format: Format,
}

/// Creates an empty layer of `size_bytes`, durably except for its name.
pub(crate) fn create_layer(
    folder: &dyn ChainFolder,
    name: &str,
    format: Format,
    size_bytes: u64,
    base: Option<BaseLayer<'_>>,
) -> Result<Arc<dyn ImageFile>> {
    let header = match format {
        Format::Qcow2 => Some(new_header(&layer_options(size_bytes, base))?),
        Format::Parallels => None,
        other => return Err(unsupported(other, name)),
    };
    let file = folder.create(name)?;
    let written = match header {
        Some(header) => write_empty(&*file, header),
        None => ploop::create::write_empty(&*file, size_bytes, ploop::create::CLUSTER_BYTES),
    };
    written.map_err(|error| error.in_file("write", &folder.path(name)))?;
    Ok(file)
}

fn layer_options(size_bytes: u64, base: Option<BaseLayer<'_>>) -> CreateOptions {
    CreateOptions {
        qcow2: Qcow2Options {
            extended_l2: true,
            backing: base.map(|base| BackingFile {
                name: base.file.to_owned(),
                format: base.format,
            }),
            ..Qcow2Options::default()
        },
        ..CreateOptions::qcow2(size_bytes)
    }
}

/// Checks that a layer of `format` can have `size_bytes`; nothing is created.
pub(crate) fn check_layer(format: Format, size_bytes: u64) -> Result<()> {
    match format {
        Format::Qcow2 => new_header(&layer_options(size_bytes, None)).map(drop),
        Format::Parallels => ploop::create::new_header(size_bytes, ploop::create::CLUSTER_BYTES).map(drop),
        other => Err(unsupported(other, "a new layer")),
    }
}

/// Grows the layer in `file`, which is above `seam` and not in use, to `size_bytes`, durably.
pub(crate) fn grow_layer(
    file: &Arc<dyn ImageFile>,
    layer: &TreeLayer,
    image: &str,
    seam: &Arc<Seam>,
    size_bytes: u64,
) -> Result<()> {
    let backing: Arc<dyn BlockDevice> = Arc::clone(seam) as Arc<dyn BlockDevice>;
    match layer.format {
        Format::Raw => {
            file.set_length(size_bytes)?;
            Ok(file.sync()?)
        }
        Format::Qcow2 => qcow2::resize::resize(file, image, Some(&backing), size_bytes),
        Format::Parallels => ploop::resize::resize(file, image, size_bytes),
        other => Err(unsupported(other, image)),
    }
}

/// Opens a layer for reading.
pub(crate) fn open_reader(
    folder: &dyn ChainFolder,
    layer: &TreeLayer,
    cache_bytes: u64,
) -> Result<Arc<dyn LayerReader>> {
    let file = folder.open(&layer.file, Access::Read)?;
    let image = folder.path(&layer.file).display().to_string();
    reader_of(file, layer.format, &image, cache_bytes)
}
