//! Opens images for reading.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use holdfast_block::{BlockDevice, DirtyBitmap, ExtentList, Result as BlockResult};

use crate::chain::deltas::{DeltaTree, open_named};
use crate::chain::options::{Backing, OpenOptions};
use crate::chain::{ChainLayer, Content, OpenedFile, detect_format, open_chain, stack};
use crate::file::Access;
use crate::formats::qcow2::check::is_truncated;
use crate::formats::qcow2::features::INCOMPATIBLE_DIRTY;
use crate::formats::qcow2::header::Qcow2Header;
use crate::formats::qcow2::layer::Qcow2Layer;
use crate::formats::qcow2::{bitmap, refcount, snapshot};
use crate::formats::{ploop, vdi, vhd, vhdx, vmdk};
use crate::model::info::{LayerInfo, Note};
use crate::model::layered::WithBacking;
use crate::operations::map::{MapEntry, map_at};
use crate::{CheckReport, Error, Format, Result};

/// Detects the format of the file at `path` by content and name; raw if no known format matches. A folder with a
/// Parallels descriptor is a Parallels disk.
///
/// The guest of a raw disk may have written the detected content. To read the file, leave [`OpenOptions::format`]
/// empty instead of passing the result: an image whose format is known from its content only may not open other
/// files.
///
/// # Errors
/// [`Error::NameContradicts`] if the extension stands for another format.
pub fn detect(path: &Path) -> Result<Format> {
    let (path, file) = open_named(path, None, Access::Read)?;
    Ok(detect_format::guess(&file, &path)?.format)
}

/// Like [`detect`], for a format that will be stored or relied on: fails with [`Error::GuessedFormat`] if the image
/// refers to other files and its format is known from its content only.
pub fn detect_to_rely_on(path: &Path) -> Result<Format> {
    let options = OpenOptions::default();
    Ok(open(path, &options)?.layers()[0].format)
}

/// Opens an image with its backing files for reading.
pub fn open(path: &Path, options: &OpenOptions) -> Result<Image> {
    open_as(path, options, Access::Read)
}

/// Opens an image like [`open`], and keeps programs away that would write it, such as the QEMU of its machine, until it is
/// dropped.
///
/// # Errors
/// [`Error::Locked`] if another program writes it, or if it is a block device that is mounted or a part of another one.
pub fn open_at_rest(path: &Path, options: &OpenOptions) -> Result<Image> {
    open_as(path, options, Access::ReadAtRest)
}

fn open_as(path: &Path, options: &OpenOptions, access: Access) -> Result<Image> {
    let chain = open_chain(path, options, access)?;
    let infos = chain.files.iter().map(|opened| opened.info.clone()).collect();
    Ok(Image {
        layers: stack(chain.files, None)?,
        infos,
        notes: chain.notes,
        tree: chain.tree,
    })
}

/// Checks the consistency of an image's metadata; reads no data and changes nothing.
pub fn check(path: &Path, options: &OpenOptions) -> Result<CheckReport> {
    let alone = OpenOptions {
        backing: Backing::Ignore,
        ..options.clone()
    };
    let mut chain = open_chain(path, &alone, Access::Read)?;
    if chain.tree.is_none() {
        return check_file(chain.files.swap_remove(0));
    }
    // A folder stands for the whole disk, with all deltas of its top. Plain deltas have no metadata.
    let mut report = CheckReport::default();
    let layers = layers_of(path, options)?;
    let (plain, tables): (Vec<OpenedFile>, Vec<OpenedFile>) =
        layers.into_iter().partition(|file| file.info.format == Format::Raw);
    if let (Some(plain), true) = (plain.into_iter().next(), tables.is_empty()) {
        return check_file(plain);
    }
    for file in tables {
        let name = file.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        report.absorb(check_file(file)?, &name);
    }
    Ok(report)
}

/// Opens the image and its backing files, top first.
fn layers_of(path: &Path, options: &OpenOptions) -> Result<Vec<OpenedFile>> {
    let whole = OpenOptions {
        backing: Backing::Follow,
        ..options.clone()
    };
    Ok(open_chain(path, &whole, Access::Read)?.files)
}

/// Returns which files of an image and its backing files are truncated, top first: they end before the end of the data
/// that their tables refer to, so data may be lost.
pub fn cut_off_files(path: &Path, options: &OpenOptions) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for file in open_chain(path, options, Access::Read)?.files {
        let (path, info) = (file.path.clone(), file.info.clone());
        let is_cut_off = match &file.content {
            Content::Qcow2(qcow2) => is_qcow2_cut_off(&file, &qcow2.header)?,
            _ => is_cut_off_by(&info, &report_of(file)?),
        };
        if is_cut_off {
            found.push(path);
        }
    }
    Ok(found)
}

/// Fails if the file cannot be opened for writing, or another process has it open.
pub(crate) fn refuse_unwritable(path: &Path, options: &OpenOptions) -> Result<()> {
    let (found, file) = open_named(path, options.format, Access::Write)?;
    if options.format.is_none() {
        detect_format::guess(&file, &found)?.to_write(&found)?;
    }
    Ok(())
}

/// Fails if the image is truncated: a write past its end would replace missing data with zeroes.
pub(crate) fn refuse_cut_off(path: &Path, options: &OpenOptions) -> Result<()> {
    let alone = OpenOptions {
        backing: Backing::Ignore,
        ..options.clone()
    };
    match cut_off_files(path, &alone)?.first() {
        None => Ok(()),
        Some(path) => Err(Error::CutOff {
            image: path.display().to_string(),
        }),
    }
}

/// Whether the report of a file says that its tables refer to offsets past its end.
fn is_cut_off_by(info: &LayerInfo, report: &CheckReport) -> bool {
    report.corruption_count > 0 && report.image_end > info.file_bytes
}

fn is_qcow2_cut_off(file: &OpenedFile, header: &Qcow2Header) -> Result<bool> {
    let (name, file) = (file.path.display().to_string(), &*file.file);
    if refcount::is_cut_off(file, header, &name)? {
        return Ok(true);
    }
    // Unreadable refcounts give no information about the end.
    let end = match refcount::last_used_end(file, header, &name) {
        Err(error) if error.is_corrupt() => u64::MAX,
        end => end?,
    };
    Ok(end > file.length_bytes()? && is_truncated(file, header, &name)?)
}

/// Checks a file; an error that prevents the check is reported as a problem.
fn report_of(file: OpenedFile) -> Result<CheckReport> {
    if matches!(file.content, Content::Raw) {
        return Ok(CheckReport::default());
    }
    match check_file(file) {
        Err(error) if error.is_corrupt() => Ok(CheckReport::of_damage(&error)),
        other => other,
    }
}

/// The result of a quick check of one layer.
#[derive(Debug, Clone)]
pub struct CheckedLayer {
    /// The file.
    pub path: PathBuf,
    /// The report; none if the tables are too large for a quick check.
    pub report: Option<CheckReport>,
    /// Whether it was not closed cleanly and has lazy refcounts: these may be wrong, its data is not.
    pub has_old_refcounts: bool,
    /// Whether the file ends before the end of the data that its tables refer to.
    pub is_cut_off: bool,
}

/// Limit of clusters for the quick check of a layer: it takes some seconds and some hundred MiB of memory.
const PASSING_CLUSTER_COUNT_MAX: u64 = 1 << 24;

/// Checks an image and its backing files before they are read, top first; layers without metadata are left out. An
/// error that prevents the check but not reading is reported as a problem.
pub fn quick_check(path: &Path, options: &OpenOptions) -> Result<Vec<CheckedLayer>> {
    let layers = layers_of(path, options)?;
    let tables = layers.into_iter().filter(|file| file.info.format != Format::Raw);
    let checked = tables.map(|file| {
        let has_old_refcounts = match &file.content {
            Content::Qcow2(qcow2) => qcow2.header.incompatible & INCOMPATIBLE_DIRTY != 0,
            _ => false,
        };
        let (path, info) = (file.path.clone(), file.info.clone());
        let is_qcow2_cut_off = match &file.content {
            Content::Qcow2(qcow2) => is_qcow2_cut_off(&file, &qcow2.header)?,
            _ => false,
        };
        let is_small = cluster_count(&info) <= PASSING_CLUSTER_COUNT_MAX;
        let report = is_small.then(|| report_of(file)).transpose()?;
        let is_cut_off_too = report.as_ref().is_some_and(|report| is_cut_off_by(&info, report));
        Ok(CheckedLayer {
            path,
            has_old_refcounts,
            is_cut_off: is_qcow2_cut_off || info.format != Format::Qcow2 && is_cut_off_too,
            report,
        })
    });
    checked.collect()
}

/// The maximum number of clusters that the tables of a file map.
fn cluster_count(info: &LayerInfo) -> u64 {
    match (&info.qcow2, &info.blocks) {
        // A table without valid entries is not counted.
        (Some(qcow2), _) => info.size_bytes.min(info.file_bytes) / qcow2.cluster_bytes,
        (None, Some(blocks)) => info.size_bytes / blocks.block_bytes.max(1),
        (None, None) => 0,
    }
}

fn check_file(opened: OpenedFile) -> Result<CheckReport> {
    let shown = opened.path.display().to_string();
    match opened.content {
        Content::Qcow2(qcow2) => {
            let data = qcow2.data_file.as_deref();
            crate::formats::qcow2::check::check(&opened.file, &qcow2.header, &shown, data)
        }
        Content::Vdi(header) => vdi::check::check(&*opened.file, &header),
        Content::Vhd(header) => vhd::check::check(&*opened.file, &header),
        Content::Vhdx(opened) => vhdx::check::check(&opened),
        Content::Vmdk(vmdk) => vmdk::check::check(&vmdk.opened),
        Content::Ploop(header) => ploop::check::check(&*opened.file, &header),
        Content::Raw => Err(Error::UnsupportedFormat {
            image: shown,
            format: opened.info.format.name(),
            detail: "it has no metadata to check",
        }),
    }
}

/// An image that is open for reading: a device with the content that the guest sees.
pub struct Image {
    layers: Vec<ChainLayer>,
    infos: Vec<LayerInfo>,
    notes: Vec<Note>,
    tree: Option<DeltaTree>,
}

impl Image {
    /// The whole chain as one device, which may outlive the image.
    pub fn device(&self) -> Arc<dyn BlockDevice> {
        Arc::clone(&self.layers[0].device)
    }

    /// Sector size that the guest sees.
    pub fn sector_bytes(&self) -> u64 {
        let blocks = self.infos.first().and_then(|info| info.blocks.as_ref());
        blocks.map_or(crate::USUAL_SECTOR_BYTES, |blocks| blocks.sector_bytes)
    }

    /// The files of the chain, the image itself first.
    pub fn layers(&self) -> &[LayerInfo] {
        &self.infos
    }

    /// Notable facts about the chain.
    pub fn notes(&self) -> &[Note] {
        &self.notes
    }

    /// Layer `depth` alone (0 is the image itself): ranges that it does not store are absent, and read as zero.
    pub fn layer(&self, depth: usize) -> Option<Arc<dyn BlockDevice>> {
        self.layers.get(depth).map(|layer| Arc::clone(&layer.alone))
    }

    pub(crate) fn chain(&self) -> &[ChainLayer] {
        &self.layers
    }

    /// Maps `offset` of the disk to a layer and the offset in its file.
    ///
    /// The entry begins at `offset` and has at most `length_bytes_max` bytes.
    pub fn map_at(&self, offset: u64, length_bytes_max: u64) -> Result<MapEntry> {
        map_at(&self.layers, offset, length_bytes_max)
    }

    /// The disk as of the snapshot with this id or name: an internal snapshot of qcow2, or a delta of a Parallels or
    /// ploop disk, which is named by its GUID. Deltas that the top does not need are opened now, through the same
    /// gate.
    pub fn snapshot(&self, id_or_name: &str) -> Result<Arc<dyn BlockDevice>> {
        if let Some(tree) = &self.tree {
            return tree.snapshot(id_or_name, &self.layers, &self.infos);
        }
        let layer = self.qcow2("snapshot", id_or_name)?;
        let (snapshots, _) = snapshot::load(&*layer.file, &layer.header, &layer.image)?;
        let found = snapshot::find(&snapshots, id_or_name, &layer.image)?;
        let data_file = layer.header.has_data_file().then(|| Arc::clone(&layer.data));
        let snapshot = Qcow2Layer::with_l1(
            Arc::clone(&layer.image),
            layer.header.clone(),
            found.l1,
            found.disk_bytes,
            Arc::clone(&layer.file),
            data_file,
            layer.backing.clone(),
        )?;
        Ok(Arc::new(WithBacking(Arc::new(snapshot))))
    }

    /// The persistent bitmap `name` of the top image: the ranges written since its checkpoint.
    ///
    /// Fails for a bitmap that misses writes, like [`for_each_dirty`](Self::for_each_dirty).
    pub fn dirty_bitmap(&self, name: &str) -> Result<DirtyBitmap> {
        let layer = self.qcow2("bitmap", name)?;
        let bitmaps = bitmap::load(&*layer.file, &layer.header, &layer.image)?;
        let found = bitmap::find(&bitmaps, name, &layer.image)?;
        let mut dirty = DirtyBitmap::new(layer.size_bytes, found.granularity_bytes)?;
        self.for_each_dirty(name, |range| dirty.set(range))?;
        Ok(dirty)
    }

    /// Calls `visit` for every range that the persistent bitmap `name` of the top image marks as written, in order.
    ///
    /// Fails for a bitmap that misses writes; see its [`state`](crate::PersistentBitmap::state).
    pub fn for_each_dirty(&self, name: &str, mut visit: impl FnMut(Range<u64>)) -> Result<()> {
        let layer = self.qcow2("bitmap", name)?;
        let bitmaps = bitmap::load(&*layer.file, &layer.header, &layer.image)?;
        let found = bitmap::find(&bitmaps, name, &layer.image)?;
        if found.state != crate::BitmapState::Valid {
            return Err(Error::UnsupportedFeature {
                image: layer.image.to_string(),
                feature: format!("the bitmap {name}"),
                detail: "it misses writes; read the whole disk, and create a new bitmap".to_owned(),
            });
        }
        bitmap::for_each_dirty(&*layer.file, &layer.header, found, &layer.image, &mut visit)
    }

    fn qcow2(&self, what: &'static str, name: &str) -> Result<&Arc<Qcow2Layer>> {
        self.layers[0].qcow2.as_ref().ok_or_else(|| Error::NotFound {
            image: self.infos[0].path.display().to_string(),
            what,
            name: name.to_owned(),
        })
    }
}

impl BlockDevice for Image {
    fn size_bytes(&self) -> u64 {
        self.layers[0].device.size_bytes()
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> BlockResult<()> {
        self.layers[0].device.read_at(buffer, offset)
    }

    fn extents(&self, range: Range<u64>, extent_count_max: usize) -> BlockResult<ExtentList> {
        self.layers[0].device.extents(range, extent_count_max)
    }

    fn block_size_bytes(&self) -> u32 {
        self.layers[0].device.block_size_bytes()
    }
}
