//! Creates images.

use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::chain::gate::plain_name;
use crate::chain::vmdk::identities_of;
use crate::file::{Access, HostFile, ImageFile, UnwrittenFile, directory_of};
use crate::formats::qcow2::header::load_header;
use crate::formats::qcow2::layer::Qcow2Layer;
use crate::formats::qcow2::layout::{new_header, write_empty};
use crate::formats::qcow2::writer::Qcow2Mut;
use crate::formats::{ploop, vdi, vhd, vhdx, vmdk};
use crate::model::bytes::round_up;
use crate::model::create_options::{CreateOptions, DataFileKind, Preallocation, Qcow2Options};
use crate::{BulkWriter, DiskDescriptor, Error, Format, ImageId, ImageKind, Result, USUAL_SECTOR_BYTES};

/// File name of the first delta of a disk, as in ploop and Virtuozzo.
const ROOT_DELTA: &str = "root.hds";

/// Creates an empty image at `path`, which must not exist yet; durable when this returns.
///
/// A Parallels disk becomes a folder if its name ends in `.hdd`, with `DiskDescriptor.xml` and the root delta
/// `root.hds`, as in ploop and Virtuozzo; otherwise it is a single delta. The folder is readable by its owner only.
/// Its [`id`](BlockOptions::id) is that of the disk: the delta has the GUID that every top has.
pub fn create(path: &Path, options: &CreateOptions) -> Result<()> {
    create_with(path, options, Creation::Files)?;
    HostFile::sync_directory(path)
}

/// Checks that an image with these options can be created, without creating it. An existing file at `path` is
/// ignored.
///
/// # Errors
/// Those of [`create`].
pub fn plan_create(path: &Path, options: &CreateOptions) -> Result<()> {
    create_with(path, options, Creation::Nothing)
}

/// Whether the files of a new image are created.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Creation {
    /// The files are created.
    Files,
    /// Nothing is created; writes are discarded.
    Nothing,
}

impl Creation {
    /// A file that must not exist yet.
    fn create_new(self, path: &Path) -> Result<Arc<dyn ImageFile>> {
        Ok(match self {
            Self::Files => Arc::new(HostFile::create_new(path)?),
            Self::Nothing => Arc::new(UnwrittenFile::default()),
        })
    }
}

fn create_with(path: &Path, options: &CreateOptions, creation: Creation) -> Result<()> {
    if options.blocks.kind == ImageKind::Stream {
        return Err(Error::InvalidOption {
            option: "kind",
            detail: "a stream cannot be created empty, only written from a disk".to_owned(),
        });
    }
    match options.format {
        Format::Raw => {
            let file = creation.create_new(path)?;
            file.set_length(options.size_bytes)?;
            file.sync()?;
        }
        Format::Qcow2 => create_qcow2(path, options, creation)?,
        Format::Vdi => create_vdi(path, options, creation)?,
        Format::Vhd => create_vhd(path, options, creation)?,
        Format::Vhdx => create_vhdx(path, options, creation)?,
        Format::Parallels if is_folder_name(options.name.as_deref().map_or(path, Path::new)) => {
            create_parallels_folder(path, options, creation)?;
        }
        Format::Parallels => create_ploop(path, options, creation)?,
        Format::Vmdk => create_vmdk(path, options, creation)?,
        other => {
            return Err(Error::InvalidOption {
                option: "format",
                detail: format!("{other} images cannot be created"),
            });
        }
    }
    Ok(())
}

/// A child must have the size of its parent: hypervisors accept nothing else.
fn check_size(size_bytes: u64, parent_bytes: Option<u64>) -> Result<()> {
    match parent_bytes {
        Some(parent_bytes) if parent_bytes != size_bytes => Err(Error::InvalidOption {
            option: "size",
            detail: format!("it has {size_bytes} bytes, but the parent has {parent_bytes}"),
        }),
        _ => Ok(()),
    }
}

fn create_vhd(path: &Path, options: &CreateOptions, creation: Creation) -> Result<()> {
    let blocks = &options.blocks;
    let size_bytes = round_up(options.size_bytes, 512);
    let parent = blocks.parent(|file, name| vhd::header::VhdHeader::load(&file, name))?;
    check_size(size_bytes, parent.as_ref().map(|parent| parent.footer.disk_bytes()))?;
    let id = blocks.id(parent.as_ref().map(|parent| parent.footer.id))?;
    let parent = match (parent, &blocks.parent) {
        (Some(header), Some(parent)) => Some((header.footer.id, header.footer.timestamp, name_from(path, parent)?)),
        _ => None,
    };
    let new = vhd::create::NewVhd {
        size_bytes,
        block_bytes: vhd::create::BLOCK_BYTES,
        kind: blocks.kind,
        id,
        created_s: blocks.created_s,
        parent,
    };
    vhd::create::write_empty(&*creation.create_new(path)?, &new)
}

fn create_vhdx(path: &Path, options: &CreateOptions, creation: Creation) -> Result<()> {
    let blocks = &options.blocks;
    let size_bytes = round_up(options.size_bytes, 512);
    refuse_empty(size_bytes, "VHDX")?;
    if !matches!(blocks.sector_bytes, 512 | 4096) || !size_bytes.is_multiple_of(blocks.sector_bytes) {
        return Err(Error::InvalidOption {
            option: "sector size",
            detail: format!(
                "a VHDX of {size_bytes} bytes cannot have sectors of {} bytes",
                blocks.sector_bytes
            ),
        });
    }
    let load = |file: HostFile, name: &str| vhdx::opened::OpenedVhdx::load(Arc::new(file), Access::Read, name);
    let parent = blocks.parent(load)?;
    check_size(size_bytes, parent.as_ref().map(|parent| parent.metadata.disk_bytes))?;
    let id = blocks.id(parent.as_ref().map(|parent| parent.metadata.id))?;
    let of_parent = parent.as_ref().map(|parent| parent.metadata.sector_bytes);
    let sector_bytes = of_parent.unwrap_or(blocks.sector_bytes);
    let parent = match (parent, &blocks.parent) {
        (Some(opened), Some(parent)) => Some(vhdx::metadata::VhdxParent {
            linkage: opened.header.data_write,
            names: vec![name_from(path, parent)?],
        }),
        _ => None,
    };
    let new = vhdx::create::NewVhdx {
        size_bytes,
        block_bytes: vhdx::create::block_bytes_for(size_bytes),
        sector_bytes,
        kind: blocks.kind,
        id,
        parent,
    };
    vhdx::create::write_empty(&*creation.create_new(path)?, &new)
}

fn create_vmdk(path: &Path, options: &CreateOptions, creation: Creation) -> Result<()> {
    let blocks = &options.blocks;
    if blocks.kind == ImageKind::Fixed {
        return Err(Error::InvalidOption {
            option: "format",
            detail: "a VMDK is always created sparse, in one file".to_owned(),
        });
    }
    let size_bytes = round_up(options.size_bytes, 512);
    refuse_empty(size_bytes, "VMDK")?;
    let parent = blocks.parent(|file, name| identities_of(&file, name))?;
    check_size(size_bytes, parent.map(|parent| parent.disk_bytes))?;
    let id = blocks.id(parent.and_then(|parent| parent.id))?;
    let parent = match (parent, &blocks.parent) {
        (Some(found), Some(parent)) => Some(vmdk::descriptor::VmdkParent {
            content_id: found.content_id,
            id: found.id,
            name: plain_name(&name_from(path, parent)?).into_owned(),
        }),
        _ => None,
    };
    let name = options.name.as_deref().or(path.file_name()).unwrap_or_default();
    let name = name.to_string_lossy().into_owned();
    let new = vmdk::create::NewVmdk {
        size_bytes,
        grain_bytes: vmdk::create::GRAIN_BYTES,
        name,
        id,
        parent,
    };
    vmdk::create::write_empty(&*creation.create_new(path)?, &new)
}

/// Other programs do not open an empty disk.
fn refuse_empty(size_bytes: u64, what: &str) -> Result<()> {
    if size_bytes > 0 {
        return Ok(());
    }
    Err(Error::InvalidOption {
        option: "size",
        detail: format!("a {what} cannot be empty"),
    })
}

/// Leaves nothing behind after an error.
fn create_parallels_folder(path: &Path, options: &CreateOptions, creation: Creation) -> Result<()> {
    let size_bytes = round_up(options.size_bytes, 512);
    refuse_empty(size_bytes, "disk of Parallels")?;
    let mut delta = options.clone();
    let id = delta.blocks.id.take().map_or_else(ImageId::random, Ok)?;
    let descriptor = DiskDescriptor::of_new(size_bytes, ploop::create::CLUSTER_BYTES, ROOT_DELTA, id)?;
    if creation == Creation::Nothing {
        return create_ploop(&path.join(ROOT_DELTA), &delta, creation);
    }
    DirBuilder::new()
        .mode(0o700)
        .create(path)
        .map_err(|source| Error::io("create", path, source))?;
    let root = path.join(ROOT_DELTA);
    // The descriptor comes last: it makes the folder a disk, so the files it refers to must exist.
    let made = create_ploop(&root, &delta, creation).and_then(|()| descriptor.store(path));
    if made.is_err() {
        // Remove only files of this call; a folder with other files remains.
        std::fs::remove_file(&root).ok();
        std::fs::remove_dir(path).ok();
    }
    made?;
    HostFile::sync_directory(path)
}

/// Whether a Parallels disk with this name is a folder.
fn is_folder_name(path: &Path) -> bool {
    path.extension()
        .is_some_and(|extension| extension.eq_ignore_ascii_case("hdd"))
}

fn create_ploop(path: &Path, options: &CreateOptions, creation: Creation) -> Result<()> {
    let blocks = &options.blocks;
    if blocks.kind != ImageKind::Dynamic || blocks.id.is_some() || blocks.parent.is_some() {
        return Err(Error::InvalidOption {
            option: "format",
            detail: "a single Parallels delta is neither fixed nor has an identity: that is in its descriptor"
                .to_owned(),
        });
    }
    let size_bytes = round_up(options.size_bytes, 512);
    let file = creation.create_new(path)?;
    ploop::create::write_empty(&*file, size_bytes, ploop::create::CLUSTER_BYTES)
}

/// The name by which the image at `path` refers to `other`: the file name if both are in one folder, else the absolute
/// path.
fn name_from(path: &Path, other: &Path) -> Result<String> {
    let canonical = |path: &Path| path.canonicalize().map_err(|source| Error::io("open", path, source));
    let (folder, other) = (canonical(&directory_of(path))?, canonical(other)?);
    let name = other.strip_prefix(&folder).unwrap_or(&other);
    name.to_str().map(str::to_owned).ok_or_else(|| Error::InvalidOption {
        option: "parent",
        detail: "its path is not UTF-8, so the image cannot store it".to_owned(),
    })
}

fn create_vdi(path: &Path, options: &CreateOptions, creation: Creation) -> Result<()> {
    let parent = options
        .blocks
        .parent(|file, name| vdi::header::VdiHeader::load(&file, name))?;
    check_size(options.size_bytes, parent.as_ref().map(|parent| parent.disk_bytes))?;
    let new = vdi::create::NewVdi {
        size_bytes: options.size_bytes,
        block_bytes: vdi::create::BLOCK_BYTES,
        // A child has the sector size of its parent; without one, VirtualBox uses the default.
        sector_bytes: parent.as_ref().map_or(USUAL_SECTOR_BYTES, |parent| parent.sector_bytes),
        kind: match options.blocks.kind {
            ImageKind::Fixed => vdi::header::VdiKind::Fixed,
            _ if parent.is_some() => vdi::header::VdiKind::Differencing,
            _ => vdi::header::VdiKind::Dynamic,
        },
        id: options.blocks.id(parent.as_ref().map(|parent| parent.id))?,
        parent: parent.as_ref().map_or(ImageId::NIL, |parent| parent.id),
        parent_modification: parent.as_ref().map_or(ImageId::NIL, |parent| parent.modification),
    };
    vdi::create::write_empty(&*creation.create_new(path)?, &new)
}

fn create_qcow2(path: &Path, options: &CreateOptions, creation: Creation) -> Result<()> {
    let header = new_header(options)?;
    check_backing(path, &options.qcow2)?;
    let file = creation.create_new(path)?;
    if creation == Creation::Nothing {
        return write_empty(&*file, header);
    }
    let data_file = create_data_file(path, options)?;
    write_empty(&*file, header)?;
    let is_raw = options
        .qcow2
        .data_file
        .as_ref()
        .is_some_and(|data| data.kind == DataFileKind::Raw);
    // A raw data file is readable without the image only if every entry points into it.
    if is_raw || options.qcow2.preallocation == Preallocation::Metadata {
        let image = path.display().to_string();
        let header = load_header(&*file, &image)?;
        Qcow2Mut::new(Qcow2Layer::new(image.into(), header, file, data_file, None)?)?.preallocate()?;
    }
    Ok(())
}

/// Creates an image at `path`, which must not exist yet, for filling once from start to end.
///
/// Until [`BulkWriter::finish`] the file is no valid image, so that a crash cannot leave half a disk that looks
/// complete.
pub fn create_bulk(path: &Path, options: &CreateOptions) -> Result<BulkWriter> {
    if options.format != Format::Qcow2 {
        let detail = format!("{} images cannot be written in bulk", options.format);
        return Err(Error::InvalidOption {
            option: "format",
            detail,
        });
    }
    let header = new_header(options)?;
    check_backing(path, &options.qcow2)?;
    if options.qcow2.preallocation != Preallocation::Off {
        let detail = "an image that is written in bulk cannot be preallocated".to_owned();
        return Err(Error::InvalidOption {
            option: "preallocation",
            detail,
        });
    }
    let file: Arc<dyn ImageFile> = Arc::new(HostFile::create_new(path)?.written_once());
    let data_file = create_data_file(path, options)?;
    BulkWriter::new(file, data_file, header, Some(path.to_owned()))
}

/// The name of a backing file that is an export of an NBD server at a Unix socket, as QEMU reads it.
const NBD_SOCKET_SCHEME: &str = "nbd+unix://";

/// The backing file must exist: a mistyped name found later would read as zeroes. The server of an export may be started later:
/// QEMU refuses an image without it.
fn check_backing(path: &Path, options: &Qcow2Options) -> Result<()> {
    let backing = options.backing.as_ref();
    if let Some(backing) = backing.filter(|backing| !backing.name.starts_with(NBD_SOCKET_SCHEME)) {
        HostFile::open(&resolve(path, &backing.name), Access::Read)?;
    }
    Ok(())
}

fn create_data_file(path: &Path, options: &CreateOptions) -> Result<Option<Arc<dyn ImageFile>>> {
    let Some(data) = &options.qcow2.data_file else {
        return Ok(None);
    };
    let place = data.made_at.clone().unwrap_or_else(|| resolve(path, &data.name));
    let file = HostFile::create_new(&place)?;
    file.set_length(options.size_bytes)?;
    file.sync()?;
    HostFile::sync_directory(&place)?;
    Ok(Some(Arc::new(file.written_once())))
}

fn resolve(image: &Path, name: &str) -> PathBuf {
    directory_of(image).join(name)
}
