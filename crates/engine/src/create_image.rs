//! A new, empty image.

use std::ffi::OsStr;
use std::path::PathBuf;

use holdfast_block::BlockDevice as _;
use holdfast_image::{Backing, BlockOptions, CreateOptions, Format, OpenOptions, Qcow2Options};
use holdfast_repo::Surroundings;

use crate::error::{Error, Result};
use crate::new_image::{NewImage, Overwrite};

/// Which image to make.
#[derive(Debug, Clone)]
pub struct CreateImageRequest {
    /// Where.
    pub path: PathBuf,
    /// Any that can be made.
    pub format: Format,
    /// Size of the disk; that of the backing file where it is not given.
    pub size_bytes: Option<u64>,
    /// What only qcow2 has.
    pub qcow2: Qcow2Options,
    /// What the other formats but raw have.
    pub blocks: BlockOptions,
    /// What to do about a file that is there already.
    pub overwrite: Overwrite,
    /// How to open the backing file, whose size and existence count.
    pub backing: OpenOptions,
}

/// The image that was made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CreateImageReport {
    /// Where.
    pub path: PathBuf,
    /// Its format.
    pub format: Format,
    /// Size of the disk.
    pub size_bytes: u64,
}

/// Makes an empty image; it is durable when this returns.
pub fn create_image(request: &CreateImageRequest, surroundings: &Surroundings) -> Result<CreateImageReport> {
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
    let options = CreateOptions {
        format: request.format,
        size_bytes,
        qcow2: request.qcow2.clone(),
        blocks: request.blocks.clone(),
        name: request.path.file_name().map(OsStr::to_owned),
    }
    .of_whole_sectors();
    let (image, ()) = NewImage::begin(
        &request.path,
        request.overwrite,
        &options,
        surroundings,
        |partial, options| Ok(holdfast_image::create(partial, options)?),
    )
    .map_err(|error| error.on(&request.path))?;
    image.finish()?;
    Ok(CreateImageReport {
        path: request.path.clone(),
        format: request.format,
        size_bytes: options.size_bytes,
    })
}
