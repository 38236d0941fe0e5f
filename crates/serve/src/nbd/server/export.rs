//! What a server offers: named devices, opened when a client asks for one.

use std::fmt;
use std::sync::Arc;

use holdfast_block::{BlockDevice, BlockDeviceMut, DirtyBitmap};

use crate::nbd::wire::{ExportFlags, HeaderStyle, PAYLOAD_BYTES_MAX, STRING_BYTES_MAX};

/// Prefix of the metadata contexts that hold dirty bitmaps, as QEMU names them (docs/interop/nbd.rst).
pub(crate) const BITMAP_CONTEXT_PREFIX: &str = "qemu:dirty-bitmap:";
/// The metadata context that tells data from holes.
pub(crate) const ALLOCATION_CONTEXT: &str = "base:allocation";

/// The device behind an export: what it is decides what clients may do.
#[derive(Clone)]
pub enum ExportDevice {
    /// Clients can read.
    ReadOnly(Arc<dyn BlockDevice>),
    /// Clients can read and write.
    Writable(Arc<dyn BlockDeviceMut>),
}

impl ExportDevice {
    pub(crate) fn reader(&self) -> &dyn BlockDevice {
        match self {
            Self::ReadOnly(device) => &**device,
            Self::Writable(device) => &**device,
        }
    }

    pub(crate) fn writer(&self) -> Option<&dyn BlockDeviceMut> {
        match self {
            Self::ReadOnly(_) => None,
            Self::Writable(device) => Some(&**device),
        }
    }
}

/// What [`ExtentKind::Absent`](holdfast_block::ExtentKind::Absent) means for the device of an export.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Absent {
    /// A layer below may have bytes there: clients are told that it is data.
    #[default]
    MayHoldData,
    /// There is no layer below: it is a hole that reads as zero.
    ReadsAsZero,
}

/// Whether writing zeroes to the device of an export is quicker than writing as many bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ZeroSpeed {
    /// Not known: clients that want zeroes only if they are quick are refused.
    #[default]
    Unknown,
    /// It is, for any range.
    Quick,
}

/// A device that is offered under a name.
#[derive(Clone)]
pub struct Export {
    name: String,
    description: String,
    device: ExportDevice,
    bitmaps: Vec<(String, Arc<DirtyBitmap>)>,
    absent: Absent,
    zero_speed: ZeroSpeed,
}

impl Export {
    /// An export called `name`; the empty name is the one that a client gets who asks for none.
    pub fn new(name: impl Into<String>, device: ExportDevice) -> Self {
        Self {
            name: name.into(),
            description: String::new(),
            device,
            bitmaps: Vec::new(),
            absent: Absent::default(),
            zero_speed: ZeroSpeed::default(),
        }
    }

    /// Says what the export is, for a person.
    #[must_use]
    pub fn with_description(mut self, description: impl Into<String>) -> Self {
        self.description = description.into();
        self
    }

    /// Offers `bitmap` as the metadata context `qemu:dirty-bitmap:NAME`.
    ///
    /// What lies past the end of the bitmap counts as dirty, so that a bitmap of another size never hides a change.
    #[must_use]
    pub fn with_bitmap(mut self, name: impl Into<String>, bitmap: Arc<DirtyBitmap>) -> Self {
        self.bitmaps.push((name.into(), bitmap));
        self
    }

    /// Says what absent extents mean; without it they are taken for data.
    #[must_use]
    pub fn with_absent(mut self, absent: Absent) -> Self {
        self.absent = absent;
        self
    }

    /// Says whether writing zeroes is quick; without it that is not known.
    #[must_use]
    pub fn with_zero_speed(mut self, speed: ZeroSpeed) -> Self {
        self.zero_speed = speed;
        self
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
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

    /// What clients are told that the export can do, when they speak `style`.
    pub(crate) fn flags(&self, style: HeaderStyle) -> ExportFlags {
        // All connections to an export work on one device (an obligation of `Exports::open`), this server keeps no bytes of
        // its own, and `BlockDeviceMut::flush` covers every write that returned before it began, whichever thread wrote:
        // so a flush on one connection covers what was acknowledged on all. Nothing changes a read-only device.
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

    /// Bytes that requests had best be multiples of: a power of two, at least a page.
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

    /// The bitmap behind metadata context `number`; [`None`] for the allocation, which is number 0.
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

/// An export as it stands in a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExportEntry {
    /// The name to ask for.
    pub name: String,
    /// What it is, for a person; may be empty.
    pub description: String,
}

/// What a server has to offer. It is asked by many threads at once.
///
/// Implementers must give the same device, or one that shares every write with it, to all who open one name while anyone
/// still uses it: the server promises its clients that a flush on one connection covers the others.
pub trait Exports: Send + Sync {
    /// What a client who asks for a list gets to see.
    fn list(&self) -> Vec<ExportEntry>;

    /// Opens the export called `name`; [`None`] where there is no such.
    ///
    /// It may take its time: only the client who asks waits for it.
    fn open(&self, name: &str) -> holdfast_block::Result<Option<Arc<Export>>>;
}

/// Exports that are open from the start; the first is also the one that a client gets who asks for none.
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
