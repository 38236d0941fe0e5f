//! Options that several image verbs share: files that an image may open, and properties of a new image.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use holdfast_engine::Overwrite;
use holdfast_image::{
    BackingFile, BlockOptions, Compression, DataFile, DataFileKind, Format, Image, ImageId, ImageKind, OpenOptions,
    Preallocation, Qcow2Options, plain_name,
};

use crate::args::parse_format;
use crate::context::Context;
use crate::errors::Error;
use crate::units;

/// Which other files an image may open.
#[derive(Debug, Clone, Default, clap::Args)]
pub(super) struct GateArgs {
    /// Allow a backing file in another folder; may be repeated
    #[arg(long = "allow-file", visible_alias = "allow", value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Allow backing files in this folder; may be repeated
    #[arg(long = "allow-dir", value_name = "FOLDER")]
    folders: Vec<PathBuf>,
}

impl GateArgs {
    /// These options as words of a command line, with absolute paths.
    pub(super) fn words(&self) -> Result<Vec<OsString>, Error> {
        let mut words = Vec::new();
        for (option, paths) in [("--allow-file", &self.files), ("--allow-dir", &self.folders)] {
            for path in paths {
                let absolute = std::path::absolute(path).map_err(|source| Error::File {
                    action: "look at",
                    path: path.clone(),
                    source,
                })?;
                words.extend([option.into(), absolute.into()]);
            }
        }
        Ok(words)
    }

    /// How to open an image of `format`; without a format, its content decides.
    pub(super) fn open_options(&self, format: Option<Format>) -> Result<OpenOptions, Error> {
        if self.files.iter().any(|path| path.is_dir()) {
            return Err(Error::usage(
                "--allow-file names a folder",
                "allow all that is in it with --allow-dir",
            ));
        }
        if self.folders.iter().any(|path| path.is_file()) {
            return Err(Error::usage("--allow-dir names a file", "allow it with --allow-file"));
        }
        Ok(OpenOptions {
            format,
            allow: self.files.iter().chain(&self.folders).cloned().collect(),
            ..OpenOptions::default()
        })
    }
}

/// What a new image is to be.
#[expect(clippy::struct_excessive_bools, reason = "switches of a command line")]
#[derive(Debug, Clone, clap::Args)]
pub(super) struct NewImageArgs {
    /// Replace an existing file when the new one is complete; overwrite a block device
    #[arg(long)]
    force: bool,
    /// Size of a cluster of a qcow2 image, 512 bytes to 2 MiB [default: 64K]
    #[arg(long, value_name = "SIZE", value_parser = units::parse_bytes)]
    cluster_size: Option<u64>,
    /// Version of the qcow2 format: 1.1, or 0.10 for programs older than 2011 [default: 1.1]
    #[arg(long, value_name = "VERSION", value_parser = parse_compat)]
    compat: Option<u32>,
    /// How clusters of a qcow2 image are compressed, now or later: zlib, or zstd which is faster and smaller [default: zlib]
    #[arg(long, value_name = "TYPE", value_parser = parse_compression)]
    compression: Option<Compression>,
    /// Divide clusters into 32 parts, so that small writes to an overlay copy less
    #[arg(long)]
    extended_l2: bool,
    /// Let other programs write refcounts late; this one never does
    #[arg(long)]
    lazy_refcounts: bool,
    /// Bits of a refcount of a qcow2 image [default: 16]
    #[arg(long, value_name = "BITS")]
    refcount_bits: Option<u32>,
    /// The image that the new one is based on, as the new one is to name it: a relative name starts at its folder
    #[arg(short, long, value_name = "IMAGE")]
    backing: Option<String>,
    /// Format of that image [default: detected]
    #[arg(long, value_name = "FORMAT", value_parser = parse_format, requires = "backing")]
    backing_format: Option<Format>,
    /// A file of its own for the data, which must not exist yet; a relative name starts at the new image's folder
    #[arg(long, value_name = "FILE")]
    data_file: Option<String>,
    /// Keep the data file usable by itself, as a raw image
    #[arg(long, requires = "data_file")]
    data_file_raw: bool,
    /// Store all blocks of a VDI, VHD or VHDX from the start; where the file system has holes, they take no room until they are written
    #[arg(long)]
    fixed: bool,
    /// Identity of a VDI, VHD, VHDX or VMDK [default: a new one]
    #[arg(long, value_name = "UUID", value_parser = parse_id)]
    uuid: Option<ImageId>,
}

impl NewImageArgs {
    /// How to treat an existing file.
    pub(super) fn overwrite(&self) -> Overwrite {
        if self.force {
            Overwrite::Replace
        } else {
            Overwrite::Refuse
        }
    }

    /// The options of a qcow2 image at `target`.
    pub(super) fn qcow2(&self, target: &Path, preallocation: Preallocation) -> Result<Qcow2Options, Error> {
        let backing = match &self.backing {
            None => None,
            Some(name) => {
                let path = target.with_file_name("").join(name);
                let format = match self.backing_format {
                    Some(format) => format,
                    None => holdfast_image::detect_to_rely_on(&path).map_err(holdfast_engine::Error::from)?,
                };
                let name = plain_name(name).into_owned();
                Some(BackingFile { name, format })
            }
        };
        let kind = if self.data_file_raw {
            DataFileKind::Raw
        } else {
            DataFileKind::Plain
        };
        let usual = Qcow2Options::default();
        Ok(Qcow2Options {
            cluster_bytes: self.cluster_size.unwrap_or(usual.cluster_bytes),
            version: self.compat.unwrap_or(usual.version),
            compression: self.compression.unwrap_or(usual.compression),
            extended_l2: self.extended_l2,
            lazy_refcounts: self.lazy_refcounts,
            refcount_bits: self.refcount_bits.unwrap_or(usual.refcount_bits),
            backing,
            data_file: self.data_file.as_deref().map(|name| DataFile {
                name: plain_name(name).into_owned(),
                kind,
                made_at: None,
            }),
            preallocation,
        })
    }

    /// The options of a VDI, VHD, VHDX or VMDK image, which differs from `parent` if there is one.
    pub(super) fn blocks(&self, parent: Option<PathBuf>) -> BlockOptions {
        BlockOptions {
            kind: match (self.fixed, &parent) {
                (_, Some(_)) => ImageKind::Differencing,
                (true, None) => ImageKind::Fixed,
                (false, None) => ImageKind::Dynamic,
            },
            id: self.uuid,
            created_s: u64::try_from(crate::process::time::now().as_second()).unwrap_or_default(),
            parent,
            ..BlockOptions::default()
        }
    }

    /// Returns an error if options apply to raw and qcow2 only, but the image is of another `format`; `more` are the
    /// options of the verb itself.
    pub(super) fn check_blocks(&self, format: Format, more: &[(&'static str, bool)]) -> Result<(), Error> {
        if !matches!(format, Format::Raw | Format::Qcow2) {
            return Ok(());
        }
        let own = [("--fixed", self.fixed), ("--uuid", self.uuid.is_some())];
        match more.iter().chain(&own).find(|(_, is_given)| *is_given) {
            None => Ok(()),
            Some((option, _)) => Err(Error::usage(
                format!("{option} is for images of VirtualBox, Microsoft and VMware, and the new image is {format}"),
                format!("leave {option} out, or make such an image: by its name, or by its format"),
            )),
        }
    }

    /// Whether the data goes into a separate data file.
    pub(super) fn has_data_file(&self) -> bool {
        self.data_file.is_some()
    }

    /// Returns an error for options that `format` does not support, instead of ignoring them; `more` are the options of
    /// the verb itself.
    pub(super) fn check(&self, format: Format, more: &[(&'static str, bool)]) -> Result<(), Error> {
        if format == Format::Qcow2 {
            return Ok(());
        }
        let own = [
            ("--cluster-size", self.cluster_size.is_some()),
            ("--compat", self.compat.is_some()),
            ("--compression", self.compression.is_some()),
            ("--extended-l2", self.extended_l2),
            ("--lazy-refcounts", self.lazy_refcounts),
            ("--refcount-bits", self.refcount_bits.is_some()),
            ("--backing", self.backing.is_some()),
            ("--data-file", self.data_file.is_some()),
        ];
        match more.iter().chain(&own).find(|(_, is_given)| *is_given) {
            None => Ok(()),
            Some((option, _)) => Err(Error::usage(
                format!("{option} is for qcow2 images, and the new image is {format}"),
                format!("leave {option} out, or make a qcow2 image: by its name, or by its format"),
            )),
        }
    }
}

/// The default format of a new file at `path`, by its extension. Block devices and standard output are raw.
pub(super) fn format_of_name(path: &Path) -> Result<Format, Error> {
    if path.as_os_str() == "-" || holdfast_engine::is_device(path) {
        return Ok(Format::Raw);
    }
    Ok(Format::of_new_file(path).map_err(holdfast_engine::Error::from)?)
}

/// Opens the image and prints its warnings. A truncated file is an error.
pub(super) fn open_whole(path: &Path, options: &OpenOptions, context: &Context) -> Result<Image, Error> {
    let image = open_and_warn(path, options, context)?;
    let cut_off = holdfast_image::cut_off_files(path, options).map_err(holdfast_engine::Error::from)?;
    match cut_off.first() {
        None => Ok(image),
        Some(path) => {
            let image = path.display().to_string();
            Err(holdfast_engine::Error::from(holdfast_image::Error::CutOff { image }).into())
        }
    }
}

/// Opens the image, and prints its warnings.
pub(super) fn open_and_warn(path: &Path, options: &OpenOptions, context: &Context) -> Result<Image, Error> {
    let image = holdfast_image::open(path, options).map_err(holdfast_engine::Error::from)?;
    for note in image.notes() {
        context.console().warning(&note.to_string());
    }
    Ok(image)
}

pub(super) fn parse_id(text: &str) -> Result<ImageId, String> {
    text.parse().map_err(|error: holdfast_image::Error| error.to_string())
}

fn parse_compat(text: &str) -> Result<u32, String> {
    match text {
        "0.10" | "v2" => Ok(2),
        "1.1" | "v3" => Ok(3),
        _ => Err("the versions are 0.10 and 1.1".to_owned()),
    }
}

fn parse_compression(text: &str) -> Result<Compression, String> {
    match text {
        "zlib" => Ok(Compression::Zlib),
        "zstd" => Ok(Compression::Zstd),
        _ => Err("the types are zlib and zstd".to_owned()),
    }
}
