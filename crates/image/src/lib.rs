//! Disk image formats as block devices.
mod bytes;
mod chain;
mod error;
mod file;
mod format;
mod gate;
mod image;
mod info;
mod map;
mod qcow2;
mod raw;
mod report;

pub use error::{Error, Result};
pub use format::Format;
pub use gate::Gate;
pub use image::{Backing, Image, OpenOptions, check, detect, open};
pub use info::{Feature, FormatSource, LayerInfo, Note, Qcow2Info};
pub use map::{MapContent, MapEntry};
pub use qcow2::bitmap::{BitmapState, PersistentBitmap, Recording};
pub use qcow2::codec::{ClusterCompressor, Compression};
pub use qcow2::snapshot::InternalSnapshot;
pub use report::{CheckReport, Problem, ProblemKind, Severity};
