//! A disk that is served, and its properties.

use std::sync::Arc;

use super::config::{DiskProperties, GuestAccess, QUEUE_COUNT_MAX, VhostSectorSize};
use super::request::SERIAL_BYTES;
use crate::registry::RegisteredExport;
use crate::server::export_device::ExportDevice;

/// What becomes of writes that a server has accepted, when its process ends before the next flush.
///
/// A machine continues when it connects to the successor of its server. If writes are missing then, its file systems
/// would be damaged, so such a machine is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AcceptedWrites {
    /// They stay: a file has them.
    Stay,
    /// They are lost if the server is killed, and flushed when it ends in order.
    NeedFlush,
    /// All writes are discarded when the server ends.
    Discarded,
}

/// Options of an export.
#[derive(Debug, Clone)]
pub struct VhostUserExportOptions {
    /// The name in events.
    pub name: String,
    /// The serial number that the guest sees; at most 20 bytes of it.
    pub serial: String,
    /// The size of logical blocks.
    pub sector_size: VhostSectorSize,
    /// The largest number of queues that a front end can use, at most [`QUEUE_COUNT_MAX`].
    pub queue_count: u16,
    /// What becomes of accepted writes.
    pub accepted_writes: AcceptedWrites,
}

impl VhostUserExportOptions {
    /// Options with default values.
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            serial: String::new(),
            sector_size: VhostSectorSize::default(),
            queue_count: 64,
            accepted_writes: AcceptedWrites::NeedFlush,
        }
    }
}

/// A disk that is served.
#[derive(Clone)]
pub struct VhostUserExport {
    pub(super) device: ExportDevice,
    pub(super) name: String,
    pub(super) serial: [u8; SERIAL_BYTES],
    pub(super) disk: DiskProperties,
    pub(super) accepted_writes: AcceptedWrites,
    pub(super) registered: Option<Arc<RegisteredExport>>,
}

impl VhostUserExport {
    /// Describes a device. Bytes after its last complete sector are not visible to guests.
    pub fn new(device: ExportDevice, options: VhostUserExportOptions) -> Self {
        let sector_size = u64::from(options.sector_size.bytes());
        let reader = device.reader();
        let disk = DiskProperties {
            size_bytes: reader.size_bytes() / sector_size * sector_size,
            sector_size: options.sector_size,
            block_size_bytes: reader.block_size_bytes(),
            access: match device {
                ExportDevice::ReadOnly(_) => GuestAccess::ReadOnly,
                ExportDevice::Writable(_) => GuestAccess::Writable,
            },
            queue_count: options.queue_count.clamp(1, QUEUE_COUNT_MAX),
        };
        let mut serial = [0; SERIAL_BYTES];
        for (place, byte) in serial.iter_mut().zip(options.serial.bytes()) {
            *place = byte;
        }
        Self {
            device,
            name: options.name,
            serial,
            disk,
            accepted_writes: options.accepted_writes,
            registered: None,
        }
    }

    /// Describes an export of the registry, which its front ends enter.
    pub fn of(registered: &Arc<RegisteredExport>, options: VhostUserExportOptions) -> Self {
        Self {
            registered: Some(Arc::clone(registered)),
            ..Self::new(registered.device(), options)
        }
    }

    /// The size that guests see.
    pub fn size_bytes(&self) -> u64 {
        self.disk.size_bytes
    }
}
