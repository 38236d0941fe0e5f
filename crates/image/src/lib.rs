//! Disk image formats as block devices.
//!
//! [`open`] opens an image with its backing files as one [`BlockDevice`](holdfast_block::BlockDevice), and
//! [`open_mut`] as a [`BlockDeviceMut`](holdfast_block::BlockDeviceMut). [`create`] creates an empty image;
//! [`create_bulk`] and [`fill`] create one from another disk, quickly. [`resize`] changes the size of an image.
//! [`check`] checks the consistency of its metadata, and [`plan_repair`] repairs it. [`write_stream_optimized`] and
//! [`StreamReader`] write and read a VMDK as a sequential stream.
//!
//! An image may refer to other files of the host. A [`Gate`] decides which of them are opened; by default only files
//! in the folder of the image.
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
//! Images are untrusted input: every offset and size in them is checked against the file before anything is read or
//! allocated, and every table, chain and cache is bounded.

mod allocation_table;
mod chain;
mod error;
mod file;
mod formats;
#[cfg(feature = "hostile")]
#[doc(hidden)]
pub mod hostile;
mod live;
mod model;
mod operations;
mod pipeline;

pub use chain::gate::{Gate, plain_name};
pub use chain::options::{Backing, Locking, OpenOptions};
pub use error::{Error, Result};
pub use formats::ploop::descriptor::DiskDescriptor;
pub use formats::qcow2::bulk::BulkWriter;
pub use formats::qcow2::codec::ClusterCompressor;
pub use formats::vhd::stream::{VhdBlock, VhdStream};
pub use formats::vmdk::stream::{StreamGrain, StreamOptions, StreamReader, StreamReport, write_stream_optimized};
pub use live::{
    CONTAINER_FILE, ChainStatus, Changes, Collapse, ContainerDuplicate, ContainerLock, ContainerTree, CurrentState,
    DESCRIPTOR_FILE, DuplicateReport, LayerStatus, LiveChain, LiveOptions, MEMORY_PARTIAL_SUFFIX, MEMORY_PROPERTY,
    MergeObserver, MergeProgress, NewContainer, NewSnapshot, PinnedLayer, PinnedLayers, PointInTime, PreparedSnapshot,
    SnapshotEntry, SwitchPlan, TreeLayer, check_new_container, create_container, duplicate_container, is_container,
    is_memory_folder, new_memory_folder, plan_switch, switch,
};
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
pub use operations::create::{create, create_bulk, plan_create};
pub use operations::fill::{FillOptions, FillReport, Storage, TargetContent, fill, fill_above, fill_device};
pub use operations::image::{
    CheckedLayer, Image, check, cut_off_files, detect, detect_to_rely_on, open, open_at_rest, quick_check,
};
pub use operations::image_mut::{ImageLock, ImageMut, open_mut};
pub use operations::map::{MapContent, MapEntry};
pub use operations::new_identity::{
    IdentityChange, NewIdentity, UnnamedChildren, children_in_folder, dependents_in_folder, plan_identity, set_identity,
};
pub use operations::renamed_backing::RenamedBacking;
pub use operations::repair::{Repair, RepairIntent, plan_repair};
pub use operations::resize::{LostData, ResizePlan, ResizeReport, Shrink, plan_resize, resize};
pub use pipeline::copy_pipeline::Continue;
