//! What a machine consists of, and how each hypervisor writes it down.
//!
//! Pure: text in, values out, and back. A [`Machine`] has the features that all hypervisors share. A feature that it
//! cannot represent, or that the target hypervisor lacks, is listed as [`Untranslated`] and never lost silently.
//! Settings without effect on the guest are not listed: bus addresses, displays, the action after a crash.

mod adapt;
mod bus_address;
mod device_names;
mod encoding;
mod error;
#[cfg(feature = "hostile")]
#[doc(hidden)]
pub mod hostile;
mod identity;
pub mod libvirt;
mod machine;
pub mod ovf;
mod percent;
mod plain_path;
mod platform;
pub mod proxmox;
pub mod virtualbox;
pub mod xen;
pub mod xml;
mod xml_characters;

pub use adapt::adapt;
pub use encoding::xml_text;
pub use error::{Error, Result};
pub use machine::{
    Bus, CardModel, Clock, Disk, DiskKind, Firmware, Machine, NetworkCard, Topology, Translated, Untranslated,
};
pub use plain_path::plain_path;
pub use platform::Platform;
