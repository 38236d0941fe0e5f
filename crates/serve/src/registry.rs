//! The exports of a process: devices by name, offered over any number of protocols, added and removed while clients
//! use them.
//!
//! ```text
//! Registry ─► RegisteredExport ─► CountedDevice ─► the device
//!                 └─ clients            └─ counts requests; refuses them after the removal
//! ```
//! Every protocol opens an export here, and enters its clients. So all protocols read and write one device, its counters
//! are independent of the protocol, and a removal finds all clients.

mod clients;
mod counters;
mod device;
mod ending;
mod exports;
mod settlement;

pub use clients::{ClientEntry, ClientHandle, ClientProtocol, ClientSession};
pub use counters::{CacheUse, Traffic};
pub use device::CountedDevice;
pub(crate) use ending::ClientEnding;
pub use exports::{CacheProbe, ExportOptions, RegisteredExport, Registry, RegistryError, Removal, RemovalReport};
