//! Metadata of a qcow2 image.

/// Details of a qcow2.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Qcow2Info {
    /// 2 or 3 (`compat` 0.10 or 1.1).
    pub version: u32,
    /// Size of a cluster.
    pub cluster_bytes: u64,
    /// Width of a refcount in bits.
    pub refcount_bits: u32,
    /// Compression of clusters.
    pub compression: Compression,
    /// The feature bits that are set.
    pub features: Vec<Feature>,
    /// The backing file, as stored.
    pub backing_file: Option<String>,
    /// The format of the backing file, as stored.
    pub backing_format: Option<String>,
    /// The external data file, as stored.
    pub data_file: Option<String>,
    /// Internal snapshots.
    pub snapshots: Vec<InternalSnapshot>,
    /// Persistent bitmaps.
    pub bitmaps: Vec<PersistentBitmap>,
}

impl Qcow2Info {
    /// Whether the feature bit is set.
    pub fn has(&self, feature: Feature) -> bool {
        self.features.contains(&feature)
    }
}

/// A feature bit of qcow2.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Feature {
    /// Refcounts may be wrong: a program with lazy refcounts did not close the image.
    Dirty,
    /// A program found damage and set this bit to keep others from writing.
    Corrupt,
    /// The data is in an external file.
    ExternalDataFile,
    /// The compression is not zlib.
    CompressionType,
    /// L2 entries describe subclusters.
    ExtendedL2,
    /// Programs may postpone refcount updates while the image is open.
    LazyRefcounts,
    /// The bitmaps in the image are up to date.
    Bitmaps,
    /// The external data file is a raw image of the disk.
    RawDataFile,
}

impl Feature {
    /// The name in output.
    pub fn name(self) -> &'static str {
        match self {
            Self::Dirty => "dirty",
            Self::Corrupt => "corrupt",
            Self::ExternalDataFile => "external data file",
            Self::CompressionType => "compression type",
            Self::ExtendedL2 => "extended L2 entries",
            Self::LazyRefcounts => "lazy refcounts",
            Self::Bitmaps => "bitmaps",
            Self::RawDataFile => "raw external data",
        }
    }
}

/// Compression of clusters; one image uses one kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Compression {
    /// Deflate, which every qcow2 reader supports.
    #[default]
    Zlib,
    /// Zstandard: faster and smaller; QEMU supports it since version 5.1.
    Zstd,
}

impl Compression {
    /// The name, as in QEMU.
    pub fn name(self) -> &'static str {
        match self {
            Self::Zlib => "zlib",
            Self::Zstd => "zstd",
        }
    }
}

/// A snapshot inside a qcow2 image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InternalSnapshot {
    /// The id, unique in the image; usually a number.
    pub id: String,
    /// The name, given by the user.
    pub name: String,
    /// When it was taken, in seconds since 1970.
    pub created_seconds: u32,
    /// Nanoseconds after `created_seconds`.
    pub created_nanoseconds: u32,
    /// Run time of the machine in nanoseconds.
    pub machine_time_ns: u64,
    /// Bytes of machine state (memory) that it contains.
    pub machine_state_bytes: u64,
    /// Size of the disk at that time.
    pub disk_bytes: u64,
    pub(crate) l1: TableLocation,
}

/// A dirty bitmap stored in a qcow2 image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PersistentBitmap {
    /// Its name, unique in the image.
    pub name: String,
    /// Bytes of disk per bit.
    pub granularity_bytes: u64,
    /// Whether it is complete.
    pub state: BitmapState,
    /// Whether it records new writes while a machine has the image open.
    pub recording: Recording,
    pub(crate) table: TableLocation,
}

/// Whether a bitmap is complete.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BitmapState {
    /// It has every write since it was created.
    Valid,
    /// A program opened it and did not close it: it misses writes.
    InUse,
    /// A program without support for bitmaps wrote to the image: it misses writes.
    Stale,
}

/// Whether a bitmap records new writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Recording {
    /// It records new writes.
    Enabled,
    /// It is not changed by new writes.
    Disabled,
}

/// A table of pointers whose location was checked to be inside the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TableLocation {
    pub(crate) offset: u64,
    pub(crate) entries: u64,
}
