//! VirtualBox: the settings of a machine, a `.vbox` file.
//!
//! Source: VirtualBox, `src/VBox/Main/xml/Settings.cpp`, settings versions 1.12 to 1.20. What has its default is not written there: a card
//! without a type is an Am79C973, a clock shows local time, and a machine starts from floppy, DVD and disk in this order.
//!
//! The key of a disk is the UUID of its image; [`media`] says where the images are. An image that was written since a snapshot is a
//! difference to its parent. [`settings()`] has what no other hypervisor has: snapshots, the file of a machine that was saved, the variables of
//! its firmware. [`restored()`] is the settings as they were, with other images. [`registry()`] reads which machines a user has.

mod media;
mod read;
mod registry;
mod restored;
mod settings;
mod write;

pub use media::{Medium, MediumKind, media};
pub(crate) use read::read_ovf_extension;
pub use read::{UNKNOWN_CONTROLLER, read, read_at};
pub use registry::{RegisteredMachine, Registry, registry};
pub use restored::{RestoredIdentity, RestoredOptions, restored};
pub use settings::{Settings, Snapshot, settings};
pub use write::{Image, NetworkAttachment, VirtualBoxOptions, write};

#[cfg(test)]
mod tests;
