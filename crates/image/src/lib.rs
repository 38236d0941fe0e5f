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

mod block_options;
mod blocks;
mod bytes;
mod chain;
mod changes;
mod coming;
mod create;
mod crew;
mod error;
mod file;
mod fill;
mod format;
mod gate;
#[cfg(feature = "hostile")]
#[doc(hidden)]
pub mod hostile;
mod identity;
mod image;
mod image_mut;
mod info;
mod layered;
mod lru;
mod map;
mod new_identity;
mod piece;
mod ploop;
mod qcow2;
mod raw;
mod repair;
mod report;
mod resize;
mod run;
mod vdi;
mod vhd;
mod vhdx;
mod vmdk;
mod windows_path;

pub use block_options::BlockOptions;
pub use changes::changed_on_disk;
pub use create::{
    BackingFile, CreateOptions, DataFile, DataFileKind, Preallocation, Qcow2Options, create, create_bulk,
};
pub use error::{Error, Result};
pub use fill::{Continue, FillOptions, FillReport, Storage, TargetContent, fill, fill_above, fill_device};
pub use format::Format;
pub use gate::{Gate, plain_name};
pub use identity::ImageId;
pub use image::{
    Backing, CheckedLayer, Image, OpenOptions, check, check_in_passing, cut_off_files, detect, detect_to_rely_on, open,
};
pub use image_mut::{ImageMut, open_mut};
pub use info::{
    BlockInfo, DeltaInfo, Feature, FormatSource, ImageKind, LayerInfo, Note, ParentInfo, Qcow2Info, USUAL_SECTOR_BYTES,
};
pub use map::{MapContent, MapEntry};
pub use new_identity::{ChildrenBeside, IdentityChange, NewIdentity, children_beside, dependents_beside, set_identity};
pub use ploop::descriptor::{Delta, DeltaKind, DiskDescriptor};
pub use qcow2::bitmap::{BitmapState, PersistentBitmap, Recording};
pub use qcow2::bulk::BulkWriter;
pub use qcow2::codec::{ClusterCompressor, Compression};
pub use qcow2::snapshot::InternalSnapshot;
pub use repair::{Repair, RepairAction, RepairIntent, RepairMode, plan_repair};
pub use report::{CheckReport, Problem, ProblemKind, Severity};
pub use resize::{Resized, Shrink, resize};
pub use vhd::stream::{VhdBlock, VhdStream};
pub use vmdk::stream::{StreamGrain, StreamOptions, StreamReader, StreamWritten, write_stream_optimized};
