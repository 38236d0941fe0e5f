//! OVA: a tape archive with a descriptor in the Open Virtualization Format, and the images that it names.
//!
//! Source: DMTF DSP0243 1.1, "Open Virtualization Format Specification", section 5: the descriptor comes first, the manifest with the digests of
//! all other files second or last, the images in the order of the descriptor.

mod described;
pub(crate) mod disk;
mod manifest;
mod read;
mod write;

pub(crate) use disk::ImageReading;
pub use read::OvaReader;
pub use write::{OvaDisk, OvaOutput, OvaWriteOptions, OvaWritten, write_ova};

#[cfg(test)]
mod odd_tests;
#[cfg(test)]
mod tests;
