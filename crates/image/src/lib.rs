//! Disk image formats as block devices.
//!
//! [`open`] gives an image with everything that it is based on as one [`BlockDevice`](holdfast_block::BlockDevice), and
//! [`open_mut`] as a [`BlockDeviceMut`](holdfast_block::BlockDeviceMut). [`create`] makes an empty image; [`create_bulk`] and
//! [`fill`] make one from another disk, quickly. [`resize`] gives an image another size. [`check`] holds an image's metadata against itself,
//! and [`plan_repair`] mends what it finds.
//! [`write_stream_optimized`] and [`StreamReader`] write and read a VMDK that goes through a pipe.
//!
//! An image may name other files of the host. Which of them are opened is decided by a [`Gate`], and by default only files
//! beside the image are.
//!
//! ```no_run
//! use std::path::Path;
//! use holdfast_block::BlockDevice as _;
//! use holdfast_image::{OpenOptions, open};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let image = open(Path::new("disk.qcow2"), &OpenOptions::default())?;
//! for note in image.notes() {
//!     println!("{note}");
//! }
//! let mut sector = [0; 512];
//! image.read_at(&mut sector, 0)?;
//! # Ok(())
//! # }
//! ```
//!
//! Images are hostile until proven otherwise: every offset and size in them is checked against the file before
//! anything is read or allocated, and every table, chain and cache has a bound.

mod allocation_table;
mod chain;
mod error;
mod file;
mod formats;
#[cfg(feature = "hostile")]
#[doc(hidden)]
pub mod hostile;
mod model;
mod operations;
mod pipeline;

pub use chain::gate::{Gate, plain_name};
pub use chain::options::{Backing, OpenOptions};
pub use error::{Error, Result};
pub use formats::ploop::descriptor::DiskDescriptor;
pub use formats::qcow2::bulk::BulkWriter;
pub use formats::qcow2::codec::ClusterCompressor;
pub use formats::vhd::stream::{VhdBlock, VhdStream};
pub use formats::vmdk::stream::{StreamGrain, StreamOptions, StreamReader, StreamReport, write_stream_optimized};
pub use model::block_options::BlockOptions;
pub use model::create_options::{BackingFile, CreateOptions, DataFile, DataFileKind, Preallocation, Qcow2Options};
pub use model::format::Format;
pub use model::identity::ImageId;
pub use model::info::{
    BlockInfo, Delta, DeltaInfo, DeltaKind, FormatSource, ImageKind, LayerInfo, Note, ParentInfo, USUAL_SECTOR_BYTES,
};
pub use model::qcow2_info::{
    BitmapState, Compression, Feature, InternalSnapshot, PersistentBitmap, Qcow2Info, Recording,
};
pub use model::repair_action::{RepairAction, RepairMode};
pub use model::report::{CheckReport, Problem, ProblemKind, Severity};
pub use operations::changes::changed_on_disk;
pub use operations::create::{create, create_bulk};
pub use operations::fill::{FillOptions, FillReport, Storage, TargetContent, fill, fill_above, fill_device};
pub use operations::image::{CheckedLayer, Image, check, cut_off_files, detect, detect_to_rely_on, open, quick_check};
pub use operations::image_mut::{ImageMut, open_mut};
pub use operations::map::{MapContent, MapEntry};
pub use operations::new_identity::{
    ChildrenBeside, IdentityChange, NewIdentity, children_beside, dependents_beside, set_identity,
};
pub use operations::repair::{Repair, RepairIntent, plan_repair};
pub use operations::resize::{ResizeReport, Shrink, resize};
pub use pipeline::copy_pipeline::Continue;
