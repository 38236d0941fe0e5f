//! Clones an image quickly: the file system shares its blocks, or the clone is an overlay on the image.

use std::ffi::OsStr;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;

use holdfast_block::BlockDevice as _;
use holdfast_host::changed_blocks::sharing_of;
use holdfast_host::{Tools, is_written_by_others};
use holdfast_image::{
    Backing, BackingFile, BlockOptions, CreateOptions, Format, Image, ImageId, ImageKind, LayerInfo, NewIdentity, Note,
    OpenOptions, Qcow2Options, Storage, UnnamedChildren, create, open, plain_name, set_identity,
};
use holdfast_repo::Environment;
use rustix::fs::{Mode, OFlags};

use super::convert::{ConvertRequest, ConvertSource, VerifyImage, convert_and};
use super::guest_identity::{GuestIdentity, renew_guest};
use crate::files::atomic_file::{Existing, NewFile};
use crate::files::block_target::Overwrite;
use crate::job::error::CloneError;
use crate::job::{Error, Job, Result};

/// Which image to clone, and how.
pub struct CloneImageRequest<'a> {
    /// The image.
    pub source: PathBuf,
    /// How to open it.
    pub open: OpenOptions,
    /// How the clone gets its content.
    pub way: CloneWay,
    /// Time of creation, in seconds since 1970, for formats that store it (VHD).
    pub created_s: u64,
    /// The new identity for the guest, and the programs that can set it.
    pub guest: Option<(GuestIdentity, &'a dyn Tools)>,
}

/// How a clone gets its content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CloneWay {
    /// Blocks shared by the file system; if that is impossible, an overlay.
    Quick,
    /// An overlay on the image, which must not be written to from then on.
    Overlay,
    /// A full copy.
    Copy,
}

/// Kind of a clone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CloneKind {
    /// A file that shares its blocks with the image until one of them is written to.
    Shared,
    /// An overlay that needs the image.
    Overlay,
    /// A full copy.
    Copied,
}

/// A finished clone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageClone {
    /// Its path.
    pub path: PathBuf,
    /// Its kind.
    pub kind: CloneKind,
    /// Its format.
    pub format: Format,
    /// Size of the disk.
    pub size_bytes: u64,
    /// Its identity, if its format has one.
    pub id: Option<ImageId>,
    /// Bytes that it uses alone, if known.
    pub own_bytes: Option<u64>,
    /// Bytes that it shares with other files, if known.
    pub shared_bytes: Option<u64>,
    /// How long it took.
    pub duration: Duration,
}

/// An open image that can be cloned any number of times.
pub struct ImageCloner<'a> {
    request: &'a CloneImageRequest<'a>,
    environment: &'a Environment,
    image: Image,
    /// Its folder, with symbolic links resolved.
    folder: PathBuf,
}

impl<'a> ImageCloner<'a> {
    /// Opens the image.
    ///
    /// # Errors
    /// A machine may write to the image or to one of its backing images.
    pub fn open(request: &'a CloneImageRequest<'a>, environment: &'a Environment) -> Result<Self> {
        let image = open(&request.source, &request.open)?;
        // The clone records the format of its backing image, so the format must be known.
        require_known_format(&image)?;
        for layer in image.layers() {
            if let Some(path) = layer.files().into_iter().find(|path| is_written_by_others(path)) {
                return Err(CloneError::Written { path }.into());
            }
        }
        let folder = folder_of(&request.source)?;
        Ok(Self {
            request,
            environment,
            image,
            folder,
        })
    }

    /// Warns if its format was not given, but detected from its content.
    pub fn warn_of_format(&self, job: Job<'_>) {
        let is_guess = |note: &&Note| matches!(note, Note::FormatGuessed { .. });
        for note in self.image.notes().iter().filter(is_guess) {
            job.progress.warning(&note.to_string());
        }
    }

    /// Size of its disk.
    pub fn size_bytes(&self) -> u64 {
        self.image.size_bytes()
    }

    /// Makes a clone at `target`, which must not exist; the clone is complete and durable when this returns, or does not exist.
    pub fn clone_to(&self, target: &Path, job: Job<'_>) -> Result<ImageClone> {
        let start = job.clock.now();
        job.interrupt.check()?;
        let kind = match self.request.way {
            CloneWay::Copy => {
                self.copy(target, job)?;
                CloneKind::Copied
            }
            CloneWay::Overlay => self.overlay(target, job)?,
            CloneWay::Quick => match self.reason_not_to_share(target)? {
                None if self.share(target, job)? => CloneKind::Shared,
                _ => self.overlay(target, job)?,
            },
        };
        self.report(target, kind, job, start)
    }

    /// Kind and format of a clone at `target`. Nothing is created.
    ///
    /// # Errors
    /// No clone can be made there.
    pub fn plan(&self, target: &Path) -> Result<(CloneKind, Format)> {
        let format = self.top().format;
        Ok(match self.request.way {
            CloneWay::Copy => (CloneKind::Copied, format),
            CloneWay::Quick if self.reason_not_to_share(target)?.is_none() && self.can_share(target) => {
                (CloneKind::Shared, format)
            }
            CloneWay::Quick | CloneWay::Overlay => (CloneKind::Overlay, self.overlay_options(target)?.format),
        })
    }

    /// Whether the file system can clone the file: tried with an unnamed file.
    fn can_share(&self, target: &Path) -> bool {
        let nameless = || {
            let folder = folder_of(target).ok()?;
            let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
            let to = rustix::fs::open(&folder, flags, Mode::RUSR | Mode::WUSR).ok()?;
            let from = File::open(&self.request.source).ok()?;
            rustix::fs::ioctl_ficlone(&to, &from).ok()
        };
        nameless().is_some()
    }

    fn top(&self) -> &LayerInfo {
        &self.image.layers()[0]
    }

    /// Why a clone of the one file by the file system would not be the whole image.
    fn reason_not_to_share(&self, target: &Path) -> Result<Option<&'static str>> {
        let top = self.top();
        let names_others =
            self.image.layers().len() > 1 || top.qcow2.as_ref().is_some_and(|qcow2| qcow2.data_file.is_some());
        Ok(if !top.extent_files.is_empty() {
            Some("it has several files")
        } else if top.qcow2.as_ref().is_some_and(|qcow2| qcow2.data_file.is_some()) {
            Some("its data is in another file")
        } else if names_others && folder_of(target)? != self.folder {
            Some("it names others by where it lies")
        } else {
            None
        })
    }

    /// Clones the file by the file system; returns whether that was possible.
    fn share(&self, target: &Path, job: Job<'_>) -> Result<bool> {
        let file = NewFile::begin(target, Existing::Keep, self.environment)?;
        file.report_cleared(job.progress);
        let failed = |action| {
            move |source| Error::File {
                action,
                path: target.to_owned(),
                source,
            }
        };
        let from = File::open(&self.request.source).map_err(failed("clone"))?;
        if !from.metadata().map_err(failed("clone"))?.is_file() {
            return Ok(false);
        }
        let to = file.create_private().map_err(failed("create"))?;
        if rustix::fs::ioctl_ficlone(&to, &from).is_err() {
            return Ok(false);
        }
        let mode = from.metadata().map_err(failed("clone"))?.permissions();
        to.set_permissions(mode).map_err(failed("clone"))?;
        drop(to);
        let has_identity = self
            .top()
            .blocks
            .as_ref()
            .is_some_and(|_| self.top().format != Format::Parallels);
        if has_identity {
            let wish = NewIdentity {
                id: ImageId::random()?,
                children: Vec::new(),
                unnamed_children: UnnamedChildren::Leave,
                name: target.file_name().and_then(OsStr::to_str).map(str::to_owned),
            };
            set_identity(file.partial(), &self.reopen(), &wish)?;
        }
        self.renew(target, file.partial(), self.top().format)?;
        let synced = File::open(file.partial()).and_then(|file| file.sync_all());
        synced.map_err(failed("sync"))?;
        file.finish()?;
        Ok(true)
    }

    /// Options to open a file that is known to be this image.
    fn reopen(&self) -> OpenOptions {
        OpenOptions {
            format: Some(self.top().format),
            ..self.request.open.clone()
        }
    }

    /// Makes an overlay on this image.
    fn overlay(&self, target: &Path, job: Job<'_>) -> Result<CloneKind> {
        let options = self.overlay_options(target)?;
        let file = NewFile::begin(target, Existing::Keep, self.environment)?;
        file.report_cleared(job.progress);
        create(file.partial(), &options)?;
        self.renew(target, file.partial(), options.format)?;
        file.finish()?;
        Ok(CloneKind::Overlay)
    }

    fn overlay_options(&self, target: &Path) -> Result<CreateOptions> {
        let no = |reason: &str| -> Error {
            let (path, reason) = (self.request.source.clone(), reason.to_owned());
            CloneError::NoClone { path, reason }.into()
        };
        let size_bytes = self.image.size_bytes();
        let source = self.request.source.canonicalize();
        let source = source.map_err(|source| Error::File {
            action: "look at",
            path: self.request.source.clone(),
            source,
        })?;
        let is_beside = folder_of(target)? == self.folder;
        match self.top().format {
            Format::Raw | Format::Qcow2 => {
                let says_raw = target
                    .extension()
                    .and_then(OsStr::to_str)
                    .is_some_and(|name| matches!(name, "raw" | "img"));
                if says_raw {
                    return Err(no(
                        "the file system cannot share its bytes, and what differs from it is a qcow2 image, not a raw one",
                    ));
                }
                let name = if is_beside {
                    source.file_name().map(Path::new)
                } else {
                    Some(&*source)
                };
                let name = name
                    .and_then(Path::to_str)
                    .ok_or_else(|| no("its path is not valid UTF-8"))?;
                Ok(CreateOptions {
                    qcow2: Qcow2Options {
                        backing: Some(BackingFile {
                            name: plain_name(name).into_owned(),
                            format: self.top().format,
                        }),
                        ..Qcow2Options::default()
                    },
                    ..CreateOptions::qcow2(size_bytes).of_whole_sectors()
                })
            }
            Format::Vdi if !is_beside => Err(no("one that differs from a VDI has to lie beside it")),
            format @ (Format::Vdi | Format::Vhd | Format::Vhdx | Format::Vmdk) => Ok(CreateOptions {
                blocks: BlockOptions {
                    kind: ImageKind::Differencing,
                    created_s: self.request.created_s,
                    parent: Some(source),
                    ..BlockOptions::default()
                },
                ..CreateOptions::new(format, size_bytes).with_final_path(target)
            }),
            format => Err(no(&format!("no single {format} image differs from another one"))),
        }
    }

    fn copy(&self, target: &Path, job: Job<'_>) -> Result<()> {
        let top = self.top();
        let request = ConvertRequest {
            open: self.request.open.clone(),
            target: target.to_owned(),
            format: top.format,
            qcow2: Qcow2Options::default(),
            blocks: BlockOptions {
                kind: match top.blocks.as_ref().map(|blocks| blocks.kind) {
                    Some(ImageKind::Fixed) if top.format != Format::Vmdk => ImageKind::Fixed,
                    _ => ImageKind::Dynamic,
                },
                created_s: self.request.created_s,
                ..BlockOptions::default()
            },
            storage: Storage::Plain,
            overwrite: Overwrite::Refuse,
            verify: VerifyImage::No,
        };
        let source = ConvertSource::Image {
            path: self.request.source.clone(),
            snapshot: None,
        };
        let change = |path: &Path| self.renew(target, path, top.format);
        convert_and(source, &request, &change, self.environment, job).map(drop)
    }

    /// Gives the guest a new identity, in the clone for `target` that is now at `path`.
    fn renew(&self, target: &Path, path: &Path, format: Format) -> Result<()> {
        match &self.request.guest {
            Some((identity, tools)) => renew_guest(target, &[(path, format)], identity, *tools),
            None => Ok(()),
        }
    }

    fn report(&self, target: &Path, kind: CloneKind, job: Job<'_>, start: Duration) -> Result<ImageClone> {
        let alone = OpenOptions {
            format: Some(match kind {
                CloneKind::Overlay => self.overlay_options(target)?.format,
                CloneKind::Shared | CloneKind::Copied => self.top().format,
            }),
            backing: Backing::Ignore,
            ..self.request.open.clone()
        };
        let image = open(target, &alone)?;
        let top = &image.layers()[0];
        // A Parallels disk is a folder.
        let file = File::open(target).ok().filter(|_| target.is_file());
        let sharing = file.and_then(|file| sharing_of(&file).ok());
        let own_bytes = match sharing {
            Some(sharing) => Some(sharing.mapped_bytes - sharing.shared_bytes),
            None => image.layers().iter().map(|layer| layer.allocated_bytes).sum(),
        };
        let shared_bytes = match kind {
            CloneKind::Overlay => self.image.layers().iter().map(|layer| layer.allocated_bytes).sum(),
            CloneKind::Shared | CloneKind::Copied => sharing.map(|sharing| sharing.shared_bytes),
        };
        Ok(ImageClone {
            path: target.to_owned(),
            kind,
            format: top.format,
            size_bytes: image.size_bytes(),
            id: top.blocks.as_ref().and_then(|blocks| blocks.id),
            own_bytes,
            shared_bytes,
            duration: job.clock.now().saturating_sub(start),
        })
    }
}

/// Refuses an image whose name says raw but whose content looks different, unless its format was given.
fn require_known_format(image: &Image) -> Result<()> {
    let doubt = image.notes().iter().find_map(|note| match note {
        Note::CalledRaw { image, looks_like, .. } => Some((image, looks_like)),
        _ => None,
    });
    match doubt {
        None => Ok(()),
        Some((image, looks_like)) => Err(holdfast_image::Error::NameContradicts {
            image: image.display().to_string(),
            called: Format::Raw.name(),
            format: looks_like.name(),
        }
        .into()),
    }
}

/// The folder of a file that may not exist yet, with symbolic links resolved.
fn folder_of(path: &Path) -> Result<PathBuf> {
    let folder = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    folder.canonicalize().map_err(|source| Error::File {
        action: "look at",
        path: folder.to_owned(),
        source,
    })
}
