//! Opens the chain of an image: every file passes the gate, every header is checked, loops are refused, and the length
//! is bounded.

pub(crate) mod deltas;
pub(crate) mod detect_format;
pub(crate) mod gate;
pub(crate) mod options;
mod parents;
pub(crate) mod vmdk;

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use holdfast_block::BlockDevice;

use crate::allocation_table::{AllocationTable, TableLayer};
use crate::chain::detect_format::FormatGuess;
use crate::chain::gate::Gatekeeper;
use crate::chain::options::{Backing, OpenOptions};
use crate::file::{Access, HostFile, ImageFile};
use crate::formats::ploop::tables::PloopTables;
use crate::formats::qcow2::describe::describe;
use crate::formats::qcow2::features::{EXTENSION_BACKING_FORMAT, EXTENSION_DATA_FILE};
use crate::formats::qcow2::header::{Qcow2Header, load_header};
use crate::formats::qcow2::layer::Qcow2Layer;
use crate::formats::raw::RawImage;
use crate::formats::vdi::tables::VdiTables;
use crate::formats::vhdx::tables::VhdxTables;
use crate::formats::vmdk::disk::Vmdk;
use crate::formats::vmdk::tables::VmdkTables;
use crate::formats::{ploop, vdi, vhd, vhdx};
use crate::model::info::{FormatSource, LayerInfo, Note, notes_of};
use crate::model::layered::{Layered, WithBacking, WithoutBacking};
use crate::{Error, Format, Result};
use deltas::{DeltaTree, open_named};

/// Longer than any real chain; each layer costs memory and a recursion level in every read.
pub(crate) const LAYER_COUNT_MAX: usize = 64;

/// A file of the chain with its parsed header, not yet a device.
pub(crate) struct OpenedFile {
    pub(crate) path: PathBuf,
    pub(crate) file: Arc<dyn ImageFile>,
    pub(crate) info: LayerInfo,
    pub(crate) content: Content,
}

/// The parsed header, by format.
pub(crate) enum Content {
    Raw,
    Qcow2(OpenedQcow2),
    Vdi(vdi::header::VdiHeader),
    Vhd(vhd::header::VhdHeader),
    Vhdx(Box<vhdx::opened::OpenedVhdx>),
    Ploop(ploop::header::PloopHeader),
    Vmdk(Vmdk),
}

/// The parsed header and the opened data file of a qcow2.
pub(crate) struct OpenedQcow2 {
    pub(crate) header: Qcow2Header,
    pub(crate) data_file: Option<Arc<dyn ImageFile>>,
}

pub(crate) struct ChainLayer {
    /// The layer with its backing files.
    pub(crate) device: Arc<dyn BlockDevice>,
    /// The layer alone.
    pub(crate) alone: Arc<dyn BlockDevice>,
    /// Its mapping, if the format has tables.
    pub(crate) layered: Option<Arc<dyn Layered>>,
    /// The qcow2 layer, for its snapshots and bitmaps.
    pub(crate) qcow2: Option<Arc<Qcow2Layer>>,
}

/// One layer with its backing device.
pub(crate) enum OpenLayer {
    Raw(RawImage),
    Qcow2(Box<Qcow2Layer>),
    Tables(TableLayer),
}

impl OpenedFile {
    /// Makes a layer with the device `backing`.
    pub(crate) fn layer(self, backing: Option<Arc<dyn BlockDevice>>) -> Result<OpenLayer> {
        let image: Arc<str> = self.path.display().to_string().into();
        let tables: Box<dyn AllocationTable> = match self.content {
            Content::Raw => return Ok(OpenLayer::Raw(RawImage::new(self.file)?)),
            Content::Qcow2(qcow2) => {
                let layer = Qcow2Layer::new(image, qcow2.header, self.file, qcow2.data_file, backing)?;
                return Ok(OpenLayer::Qcow2(Box::new(layer)));
            }
            Content::Vdi(header) => Box::new(VdiTables::new(Arc::clone(&image), header, Arc::clone(&self.file))),
            Content::Vhd(header) => vhd::tables::of(Arc::clone(&image), header, Arc::clone(&self.file)),
            Content::Vmdk(vmdk) => {
                let file: Arc<dyn ImageFile> = Arc::clone(&vmdk.opened.files) as Arc<dyn ImageFile>;
                let tables = Box::new(VmdkTables::new(Arc::clone(&image), vmdk.opened)?);
                return Ok(OpenLayer::Tables(TableLayer::new(image, file, tables, backing)));
            }
            Content::Ploop(header) => Box::new(PloopTables::new(Arc::clone(&image), header, Arc::clone(&self.file))),
            Content::Vhdx(opened) => {
                // With the changes of its log applied.
                let file = Arc::clone(&opened.file);
                let tables = Box::new(VhdxTables::new(Arc::clone(&image), *opened));
                return Ok(OpenLayer::Tables(TableLayer::new(image, file, tables, backing)));
            }
        };
        Ok(OpenLayer::Tables(TableLayer::new(image, self.file, tables, backing)))
    }
}

impl ChainLayer {
    fn of_tables(layer: Arc<dyn Layered>, qcow2: Option<Arc<Qcow2Layer>>) -> Self {
        Self {
            device: Arc::new(WithBacking(Arc::clone(&layer))),
            alone: Arc::new(WithoutBacking(Arc::clone(&layer))),
            layered: Some(layer),
            qcow2,
        }
    }
}

/// The files of a chain, top first.
pub(crate) struct OpenedChain {
    pub(crate) files: Vec<OpenedFile>,
    pub(crate) notes: Vec<Note>,
    /// The descriptor, if the chain is that of a Parallels or ploop disk.
    pub(crate) tree: Option<DeltaTree>,
}

/// Opens the file at `path` with `access`, and the files it refers to for reading.
pub(crate) fn open_chain(path: &Path, options: &OpenOptions, access: Access) -> Result<OpenedChain> {
    let (path, file) = open_named(path, options.format, access)?;
    let path = &*path;
    let mut opener = Opener {
        keeper: Gatekeeper::new(&options.gate, &options.allow, path)?.relocating(&options.relocate),
        seen: HashSet::new(),
        notes: Vec::new(),
    };
    let source = match options.format {
        Some(_) => FormatSource::Caller,
        None => FormatSource::Content,
    };
    opener.register(&file, path, path)?;
    if options.format.is_none() {
        opener.guess(&file, path, access)?;
    }
    if let Some(tree) = opener.tree_of(&file, path, options)? {
        return Ok(OpenedChain {
            files: opener.open_deltas(&tree, source, access)?,
            notes: opener.notes,
            tree: Some(tree),
        });
    }
    let mut files = Vec::new();
    let data_file = options.data_file.as_deref();
    let content = detect_format::of_file(&file)?;
    let parsed = opener.parse_file(file, path, options.format, source, data_file, access);
    let mut opened = parsed.map_err(|error| format_mismatch(error, path, options.format, content))?;
    loop {
        let next = match options.backing {
            Backing::Follow => opener.backing_of(&opened)?,
            Backing::Ignore => None,
        };
        opener.notes.extend(notes_of(&opened.info));
        files.push(opened);
        let Some(next) = next else {
            break;
        };
        if files.len() == LAYER_COUNT_MAX {
            return Err(Error::ChainTooLong {
                image: path.display().to_string(),
                layer_count_max: LAYER_COUNT_MAX,
            });
        }
        opened = next;
    }
    Ok(OpenedChain {
        files,
        notes: opener.notes,
        tree: None,
    })
}

/// A mismatch between the requested format and the content is not damage.
fn format_mismatch(error: Error, path: &Path, said: Option<Format>, content: Format) -> Error {
    match said {
        Some(said) if error.is_corrupt() && said != content && content != Format::Raw => Error::OtherFormat {
            image: path.display().to_string(),
            said: said.name(),
            found: content.name(),
        },
        _ => error,
    }
}

/// Opens one file without its backing file, but with its data file.
pub(crate) fn open_single(path: &Path, options: &OpenOptions, access: Access) -> Result<OpenedFile> {
    let options = OpenOptions {
        backing: Backing::Ignore,
        ..options.clone()
    };
    let mut chain = open_chain(path, &options, access)?;
    Ok(chain.files.swap_remove(0))
}

/// Opens for reading the external data file of the qcow2 `file`, which was opened at `path`; none if the image
/// contains its data, or if its header is damaged.
pub(crate) fn open_data_of(file: &HostFile, path: &Path, options: &OpenOptions) -> Result<Option<Arc<dyn ImageFile>>> {
    let header = match load_header(file, &path.display().to_string()) {
        Err(error) if error.is_corrupt() => return Ok(None),
        header => header?,
    };
    let mut opener = Opener {
        keeper: Gatekeeper::new(&options.gate, &options.allow, path)?.relocating(&options.relocate),
        seen: HashSet::new(),
        notes: Vec::new(),
    };
    opener.register(file, path, path)?;
    opener.open_data_file(path, &header, options.data_file.as_deref(), Access::Read)
}

/// Stacks the files into devices, on top of `below` if there is one. `files` and the result begin with the top.
pub(crate) fn stack(files: Vec<OpenedFile>, mut below: Option<Arc<dyn BlockDevice>>) -> Result<Vec<ChainLayer>> {
    let mut layers: Vec<ChainLayer> = Vec::new();
    for opened in files.into_iter().rev() {
        let layer = match opened.layer(below)? {
            OpenLayer::Raw(raw) => {
                let device: Arc<dyn BlockDevice> = Arc::new(raw);
                ChainLayer {
                    alone: Arc::clone(&device),
                    device,
                    layered: None,
                    qcow2: None,
                }
            }
            OpenLayer::Qcow2(layer) => {
                let layer: Arc<Qcow2Layer> = Arc::from(layer);
                ChainLayer::of_tables(Arc::clone(&layer) as Arc<dyn Layered>, Some(layer))
            }
            OpenLayer::Tables(layer) => ChainLayer::of_tables(Arc::new(layer), None),
        };
        below = Some(Arc::clone(&layer.device));
        layers.push(layer);
    }
    layers.reverse();
    Ok(layers)
}

struct Opener {
    keeper: Gatekeeper,
    seen: HashSet<(u64, u64)>,
    notes: Vec<Note>,
}

impl Opener {
    /// Whether a file is part of the chain already. It must not be opened again: closing any descriptor of it releases
    /// this process's lock.
    fn is_known(&self, path: &Path) -> bool {
        use std::os::unix::fs::MetadataExt as _;
        let metadata = std::fs::metadata(path);
        metadata.is_ok_and(|metadata| self.seen.contains(&(metadata.dev(), metadata.ino())))
    }

    /// Registers a file; fails if it is part of the chain already, under any name.
    fn register(&mut self, file: &HostFile, path: &Path, through: &Path) -> Result<()> {
        if self.seen.insert(file.identity()?) {
            Ok(())
        } else {
            Err(Error::ChainLoop {
                image: path.display().to_string(),
                through: through.display().to_string(),
            })
        }
    }

    /// Detects the format of a file.
    fn guess(&mut self, file: &HostFile, path: &Path, access: Access) -> Result<Format> {
        let guess = detect_format::guess(file, path)?;
        if access.is_write() {
            guess.to_write(path)?;
        }
        if guess.is_by_content_alone {
            self.keeper.restrict_to_named(path, guess.format.name());
        }
        let image = path.to_owned();
        let note = match guess {
            FormatGuess {
                doubt: Some(looks_like),
                format,
                ..
            } => Some(Note::CalledRaw {
                image,
                format,
                looks_like,
            }),
            FormatGuess {
                is_by_content_alone: true,
                format,
                ..
            } => Some(Note::FormatGuessed { image, format }),
            _ => None,
        };
        if let Some(note) = note.filter(|note| !self.notes.contains(note)) {
            self.notes.push(note);
        }
        Ok(guess.format)
    }

    fn parse_file(
        &mut self,
        file: HostFile,
        path: &Path,
        format: Option<Format>,
        format_source: FormatSource,
        data_file: Option<&Path>,
        access: Access,
    ) -> Result<OpenedFile> {
        let name = path.display().to_string();
        let format = match format {
            Some(format) => format,
            None => self.guess(&file, path, access)?,
        };
        let file: Arc<dyn ImageFile> = Arc::new(file);
        format.require_supported(&name)?;
        let content = self.content_of(&file, path, format, access, data_file)?;
        let file_bytes = file.length_bytes()?;
        let info = LayerInfo {
            path: path.to_owned(),
            format,
            format_source,
            size_bytes: match &content {
                Content::Raw => file_bytes,
                Content::Qcow2(qcow2) => qcow2.header.size_bytes,
                Content::Vdi(header) => header.disk_bytes,
                Content::Vhd(header) => header.footer.disk_bytes(),
                Content::Vhdx(opened) => opened.metadata.disk_bytes,
                Content::Ploop(header) => header.disk_bytes,
                Content::Vmdk(vmdk) => vmdk.disk_bytes(),
            },
            file_bytes: match &content {
                Content::Vmdk(vmdk) => vmdk.opened.files.sum_bytes()?,
                _ => file_bytes,
            },
            allocated_bytes: match &content {
                Content::Vmdk(vmdk) => vmdk.opened.files.allocated_bytes()?,
                _ => file.allocated_bytes()?,
            },
            delta: None,
            extent_files: match &content {
                Content::Vmdk(vmdk) => vmdk.extent_files.clone(),
                _ => Vec::new(),
            },
            qcow2: match &content {
                Content::Qcow2(qcow2) => Some(describe(&*file, &qcow2.header, &name)?),
                _ => None,
            },
            blocks: match &content {
                Content::Vdi(header) => Some(header.describe()),
                Content::Vhd(header) => Some(header.describe()),
                Content::Vhdx(opened) => Some(opened.describe()),
                Content::Ploop(header) => Some(header.describe()),
                Content::Vmdk(vmdk) => Some(vmdk.describe()),
                _ => None,
            },
        };
        Ok(OpenedFile {
            path: path.to_owned(),
            file,
            info,
            content,
        })
    }

    /// Parses the header of a file.
    fn content_of(
        &mut self,
        file: &Arc<dyn ImageFile>,
        path: &Path,
        format: Format,
        access: Access,
        data_file: Option<&Path>,
    ) -> Result<Content> {
        let name = path.display().to_string();
        Ok(match format {
            Format::Qcow2 => {
                let header = load_header(&**file, &name)?;
                let data_file = self.open_data_file(path, &header, data_file, access)?;
                Content::Qcow2(OpenedQcow2 { header, data_file })
            }
            Format::Vdi => Content::Vdi(vdi::header::VdiHeader::load(&**file, &name)?),
            Format::Vhd => Content::Vhd(vhd::header::VhdHeader::load(&**file, &name)?),
            Format::Vmdk => Content::Vmdk(self.open_vmdk(Arc::clone(file), path, access)?),
            Format::Parallels => Content::Ploop(ploop::header::PloopHeader::load(&**file, &name)?),
            Format::Vhdx => {
                let opened = vhdx::opened::OpenedVhdx::load(Arc::clone(file), access, &name)?;
                if opened.has_log {
                    self.notes.push(Note::LogReplayed { image: path.to_owned() });
                }
                Content::Vhdx(Box::new(opened))
            }
            _ => Content::Raw,
        })
    }

    fn open_data_file(
        &mut self,
        image: &Path,
        header: &Qcow2Header,
        given: Option<&Path>,
        access: Access,
    ) -> Result<Option<Arc<dyn ImageFile>>> {
        if !header.has_data_file() {
            return Ok(None);
        }
        let shown = image.display().to_string();
        let (file, path) = match (given, header.extension_text(EXTENSION_DATA_FILE, &shown)?) {
            (Some(path), _) => (HostFile::open(path, access)?, path.to_owned()),
            (None, Some(name)) => {
                let path = self.keeper.admit(image, &name)?;
                (HostFile::open_canonical(&path, access)?, path)
            }
            (None, None) => {
                return Err(Error::UnsupportedFeature {
                    image: shown,
                    feature: "an external data file without a name".to_owned(),
                    detail: "name the data file when opening the image".to_owned(),
                });
            }
        };
        self.register(&file, &path, image)?;
        Ok(Some(Arc::new(file)))
    }

    fn backing_of(&mut self, overlay: &OpenedFile) -> Result<Option<OpenedFile>> {
        match &overlay.content {
            Content::Raw | Content::Ploop(_) => Ok(None),
            Content::Qcow2(qcow2) => self.backing_of_qcow2(overlay, qcow2),
            Content::Vdi(header) => self.parent_of_vdi(overlay, header),
            Content::Vhd(header) => self.parent_of_vhd(overlay, header),
            Content::Vhdx(opened) => self.parent_of_vhdx(overlay, opened),
            Content::Vmdk(vmdk) => self.parent_of_vmdk(overlay, vmdk),
        }
    }

    fn backing_of_qcow2(&mut self, overlay: &OpenedFile, qcow2: &OpenedQcow2) -> Result<Option<OpenedFile>> {
        let Some(name) = &qcow2.header.backing_name else {
            return Ok(None);
        };
        let shown = overlay.path.display().to_string();
        let named = qcow2.header.extension_text(EXTENSION_BACKING_FORMAT, &shown)?;
        let format = match named {
            None => None,
            Some(named) => Some(Format::from_name(&named).ok_or_else(|| Error::UnsupportedFeature {
                image: shown,
                feature: format!("the backing format {named:?}"),
                detail: "convert the backing file to qcow2 or raw first".to_owned(),
            })?),
        };
        let missing = |error| match error {
            Error::Io { action, path, source } => Error::Backing {
                image: overlay.path.display().to_string(),
                action,
                path,
                source,
            },
            other => other,
        };
        let path = self.keeper.admit(&overlay.path, name).map_err(missing)?;
        let file = HostFile::open_canonical(&path, Access::Read).map_err(missing)?;
        self.register(&file, &path, &overlay.path)?;
        let source = if format.is_some() {
            FormatSource::Overlay
        } else {
            FormatSource::Content
        };
        let opened = self.parse_file(file, &path, format, source, None, Access::Read)?;
        if source == FormatSource::Content {
            self.notes.push(Note::BackingFormatGuessed {
                image: path,
                format: opened.info.format,
            });
        }
        Ok(Some(opened))
    }
}
