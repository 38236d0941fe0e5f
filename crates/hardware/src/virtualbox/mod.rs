//! VirtualBox: the settings of a machine, a `.vbox` file.
//!
//! Source: VirtualBox, `src/VBox/Main/xml/Settings.cpp`, settings versions 1.12 to 1.20. Defaults are not written: a
//! card without a type is an Am79C973, the clock shows local time, and a machine boots from floppy, DVD and disk in
//! this order.
//!
//! The key of a disk is the UUID of its image; [`media`] lists the images. An image that was written since a snapshot
//! is a difference to its parent. [`settings()`] reads the settings that only VirtualBox has: snapshots, saved states,
//! firmware variables. [`restored()`] writes the original settings with other images. [`registry()`] reads the list of
//! a user's machines.

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
