//! Exports: named devices, opened when a client requests one.

use std::fmt;
use std::sync::Arc;

use holdfast_block::DirtyBitmap;

use crate::nbd::wire::{ExportFlags, HeaderStyle, PAYLOAD_BYTES_MAX, STRING_BYTES_MAX};
use crate::registry::{RegisteredExport, Registry};
use crate::server::export_device::{Absent, ExportDevice};

/// Prefix of the metadata contexts that hold dirty bitmaps, as QEMU names them (docs/interop/nbd.rst).
pub(crate) const BITMAP_CONTEXT_PREFIX: &str = "qemu:dirty-bitmap:";
/// The metadata context for data and holes.
pub(crate) const ALLOCATION_CONTEXT: &str = "base:allocation";

/// Whether writing zeroes to the device is faster than writing data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ZeroSpeed {
    /// Unknown: requests for fast zeroes are refused.
    #[default]
    Unknown,
    /// Fast, for any range.
    Quick,
}

/// A device offered under a name.
#[derive(Clone)]
pub struct Export {
    name: String,
    description: String,
    device: ExportDevice,
    bitmaps: Vec<(String, Arc<DirtyBitmap>)>,
    absent: Absent,
    zero_speed: ZeroSpeed,
    /// The export of the process that its clients enter.
    registered: Option<Arc<RegisteredExport>>,
}

impl Export {
    /// An export with the name `name`; the empty name is the default export.
    pub fn new(name: impl Into<String>, device: ExportDevice) -> Self {
        Self {
            name: name.into(),
            description: String::new(),
            device,
            bitmaps: Vec::new(),
            absent: Absent::default(),
            zero_speed: ZeroSpeed::default(),
            registered: None,
        }
    }

    /// The export of a registry, under the same name.
    pub fn of(registered: &Arc<RegisteredExport>) -> Self {
        Self {
            registered: Some(Arc::clone(registered)),
            ..Self::new(registered.name(), registered.device())
                .with_description(registered.description())
                .with_absent(registered.absent())
        }
    }

    /// Sets the description.
    #[must_use]
    pub fn with_description(mut self, description: impl Into<String>) -> Self {
        self.description = description.into();
        self
    }

    /// Offers `bitmap` as the metadata context `qemu:dirty-bitmap:NAME`.
    ///
    /// The range after the end of the bitmap counts as dirty, so that a bitmap of another size never hides a change.
    #[must_use]
    pub fn with_bitmap(mut self, name: impl Into<String>, bitmap: Arc<DirtyBitmap>) -> Self {
        self.bitmaps.push((name.into(), bitmap));
        self
    }

    /// Sets the meaning of absent extents; data by default.
    #[must_use]
    pub fn with_absent(mut self, absent: Absent) -> Self {
        self.absent = absent;
        self
    }

    /// Sets whether writing zeroes is fast; unknown by default.
    #[must_use]
    pub fn with_zero_speed(mut self, speed: ZeroSpeed) -> Self {
        self.zero_speed = speed;
        self
    }

    /// The name that clients request.
    pub fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn registered(&self) -> Option<&Arc<RegisteredExport>> {
        self.registered.as_ref()
    }

    pub(crate) fn description(&self) -> &str {
        &self.description
    }

    pub(crate) fn device(&self) -> &ExportDevice {
        &self.device
    }

    pub(crate) fn absent(&self) -> Absent {
        self.absent
    }

    pub(crate) fn zero_speed(&self) -> ZeroSpeed {
        self.zero_speed
    }

    /// The transmission flags for clients that use `style`.
    pub(crate) fn flags(&self, style: HeaderStyle) -> ExportFlags {
        // All connections to an export use one device (an obligation of `Exports::open`), this server caches no data,
        // and `BlockDeviceMut::flush` covers every write that returned before it began, on any thread. So a flush on
        // one connection covers the acknowledged writes of all connections. A read-only device does not change.
        let mut flags = ExportFlags::HAS_FLAGS | ExportFlags::MULTI_CONN | ExportFlags::CACHE;
        flags |= match self.device {
            ExportDevice::ReadOnly(_) => ExportFlags::READ_ONLY,
            ExportDevice::Writable(_) => {
                ExportFlags::FLUSH
                    | ExportFlags::FUA
                    | ExportFlags::TRIM
                    | ExportFlags::WRITE_ZEROES
                    | ExportFlags::FAST_ZERO
            }
        };
        match style {
            HeaderStyle::Simple => flags,
            HeaderStyle::Structured => flags | ExportFlags::DONT_FRAGMENT,
            HeaderStyle::Extended => flags | ExportFlags::DONT_FRAGMENT | ExportFlags::BLOCK_STATUS_PAYLOAD,
        }
    }

    /// Preferred alignment of requests: a power of two, at least a page.
    pub(crate) fn preferred_block_bytes(&self) -> u32 {
        const PAGE_BYTES: u32 = 4096;
        self.device
            .reader()
            .block_size_bytes()
            .clamp(PAGE_BYTES, PAYLOAD_BYTES_MAX)
    }

    /// Numbers and names of all metadata contexts.
    pub(crate) fn contexts(&self) -> impl Iterator<Item = (u32, String)> + '_ {
        let bitmaps = self.bitmaps.iter();
        let names = std::iter::once(ALLOCATION_CONTEXT.to_owned())
            .chain(bitmaps.map(|(name, _)| format!("{BITMAP_CONTEXT_PREFIX}{name}")));
        (0..).zip(names).filter(|(_, name)| name.len() <= STRING_BYTES_MAX)
    }

    /// The bitmap of metadata context `number`; [`None`] for the allocation, which has number 0.
    pub(crate) fn bitmap(&self, number: u32) -> Option<&DirtyBitmap> {
        let index = usize::try_from(number).ok()?.checked_sub(1)?;
        self.bitmaps.get(index).map(|(_, bitmap)| &**bitmap)
    }
}

impl fmt::Debug for Export {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Export")
            .field("name", &self.name)
            .field("size_bytes", &self.device.reader().size_bytes())
            .field("writable", &self.device.writer().is_some())
            .finish_non_exhaustive()
    }
}

/// An export in the list for clients.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExportEntry {
    /// The name that clients request.
    pub name: String,
    /// The description; may be empty.
    pub description: String,
}

/// The exports of a server. Called by many threads at once.
///
/// While an export is in use, implementers must return the same device for its name to all clients, or devices that
/// share every write: the server promises its clients that a flush on one connection covers the others.
pub trait Exports: Send + Sync {
    /// The list for clients.
    fn list(&self) -> Vec<ExportEntry>;

    /// Opens the export with the name `name`; [`None`] if it does not exist.
    ///
    /// This may be slow: only the requesting client waits for it.
    fn open(&self, name: &str) -> holdfast_block::Result<Option<Arc<Export>>>;
}

/// Exports that are open from the start; the first is also the default export.
#[derive(Debug, Default)]
pub struct FixedExports {
    exports: Vec<Arc<Export>>,
}

impl FixedExports {
    /// Offers `exports`, in this order.
    pub fn new(exports: impl IntoIterator<Item = Export>) -> Self {
        Self {
            exports: exports.into_iter().map(Arc::new).collect(),
        }
    }
}

impl Exports for FixedExports {
    fn list(&self) -> Vec<ExportEntry> {
        let entry = |export: &Arc<Export>| ExportEntry {
            name: export.name.clone(),
            description: export.description.clone(),
        };
        self.exports.iter().map(entry).collect()
    }

    fn open(&self, name: &str) -> holdfast_block::Result<Option<Arc<Export>>> {
        let named = self.exports.iter().find(|export| export.name == name);
        let default = || self.exports.first().filter(|_| name.is_empty());
        Ok(named.or_else(default).cloned())
    }
}

/// The exports change while the server runs; the oldest one is also the default export.
impl Exports for Registry {
    fn list(&self) -> Vec<ExportEntry> {
        let exports = self.exports().into_iter().filter(|export| !export.is_removed());
        let entry = |export: Arc<RegisteredExport>| ExportEntry {
            name: export.name().to_owned(),
            description: export.description().to_owned(),
        };
        exports.map(entry).collect()
    }

    fn open(&self, name: &str) -> holdfast_block::Result<Option<Arc<Export>>> {
        let found = if name.is_empty() {
            self.exports().into_iter().find(|export| !export.is_removed())
        } else {
            self.find(name).filter(|export| !export.is_removed())
        };
        Ok(found.map(|export| Arc::new(Export::of(&export))))
    }
}
