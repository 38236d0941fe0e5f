//! Creates a new, empty image.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use holdfast_block::BlockDevice as _;
use holdfast_image::{Backing, BlockOptions, CreateOptions, Format, OpenOptions, Qcow2Options};
use holdfast_repo::Environment;

use super::convert::refuse_to_replace_source;
use super::new_image::NewImage;
use crate::files::block_target::Overwrite;
use crate::job::{Error, Result};

/// The image to create.
#[derive(Debug, Clone)]
pub struct CreateImageRequest {
    /// Its path.
    pub path: PathBuf,
    /// Its format; any that can be written.
    pub format: Format,
    /// Size of the disk; that of the backing file if none.
    pub size_bytes: Option<u64>,
    /// Options for qcow2.
    pub qcow2: Qcow2Options,
    /// Options for the other formats except raw.
    pub blocks: BlockOptions,
    /// What to do if the file exists.
    pub overwrite: Overwrite,
    /// Options to open the backing file, which must exist and may determine the size.
    pub backing: OpenOptions,
}

/// The created image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CreateImageReport {
    /// Its path.
    pub path: PathBuf,
    /// Its format.
    pub format: Format,
    /// Size of the disk.
    pub size_bytes: u64,
}

/// Creates an empty image; it is durable when this returns.
pub fn create_image(request: &CreateImageRequest, environment: &Environment) -> Result<CreateImageReport> {
    let options = create_options(request)?;
    let (image, ()) = NewImage::begin(
        &request.path,
        request.overwrite,
        &options,
        environment,
        |partial, options| Ok(holdfast_image::create(partial, options)?),
    )
    .map_err(|error| error.on(&request.path))?;
    image.finish()?;
    Ok(report(request, &options))
}

/// Plans the creation: everything is checked, and nothing is created.
pub fn plan_image(request: &CreateImageRequest) -> Result<CreateImageReport> {
    let options = create_options(request)?;
    NewImage::check(&request.path, request.overwrite, &options).map_err(|error| error.on(&request.path))?;
    Ok(report(request, &options))
}

fn report(request: &CreateImageRequest, options: &CreateOptions) -> CreateImageReport {
    CreateImageReport {
        path: request.path.clone(),
        format: request.format,
        size_bytes: options.size_bytes,
    }
}

/// The options with a size. Opens the backing file.
fn create_options(request: &CreateImageRequest) -> Result<CreateOptions> {
    let size_bytes = match (request.size_bytes, &request.qcow2.backing, &request.blocks.parent) {
        (Some(size_bytes), _, _) => size_bytes,
        (None, _, Some(parent)) => {
            let options = OpenOptions {
                format: Some(request.format),
                backing: Backing::Ignore,
                ..request.backing.clone()
            };
            holdfast_image::open(parent, &options)?.size_bytes()
        }
        (None, Some(backing), None) => {
            let path = request.path.with_file_name("").join(&backing.name);
            let options = OpenOptions {
                format: Some(backing.format),
                ..request.backing.clone()
            };
            holdfast_image::open(&path, &options)?.size_bytes()
        }
        (None, None, None) => return Err(Error::NoSize),
    };
    if request.overwrite == Overwrite::Replace {
        refuse_to_replace_base(request)?;
    }
    Ok(CreateOptions {
        format: request.format,
        size_bytes,
        qcow2: request.qcow2.clone(),
        blocks: request.blocks.clone(),
        name: request.path.file_name().map(OsStr::to_owned),
    }
    .of_whole_sectors())
}

/// Refuses a backing file that the new image would replace, or that is based on the replaced file.
fn refuse_to_replace_base(request: &CreateImageRequest) -> Result<()> {
    let base = match (&request.qcow2.backing, &request.blocks.parent) {
        (_, Some(parent)) => (parent.clone(), Some(request.format)),
        (Some(backing), None) => (
            request.path.with_file_name("").join(&backing.name),
            Some(backing.format),
        ),
        (None, None) => return Ok(()),
    };
    // If its chain cannot be opened completely, it is not based on this file.
    let options = OpenOptions {
        format: base.1,
        ..request.backing.clone()
    };
    match holdfast_image::open(&base.0, &options) {
        Ok(image) => refuse_to_replace_source(&image, &request.path),
        Err(_) if is_same_file(&base.0, &request.path) => Err(Error::TargetIsSource {
            path: request.path.clone(),
        }),
        Err(error) if request.path.exists() => Err(error.into()),
        Err(_) => Ok(()),
    }
}

fn is_same_file(left: &Path, right: &Path) -> bool {
    matches!((left.canonicalize(), right.canonicalize()), (Ok(left), Ok(right)) if left == right)
}
