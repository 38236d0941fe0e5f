//! What a disk is, and how devices stack.
//!
//! Everything with bytes is a [`BlockDevice`]: a run of bytes of fixed size that answers reads at any offset and tells
//! which of its ranges hold data ([`Extent`]). A device that can change is a [`BlockDeviceMut`] as well. Read-only is a
//! type, not a flag: a function that takes `&dyn BlockDevice` cannot write.
//!
//! Layers (each one file) are devices made of devices; backends are devices made of memory, files and block devices.

mod device;
mod error;
mod extent;
mod memory;

pub use device::{BlockDevice, BlockDeviceMut, for_each_extent};
pub use error::{Error, Result};
pub use extent::{Extent, ExtentKind, ExtentList};
pub use memory::MemoryDevice;
