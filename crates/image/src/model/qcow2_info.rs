//! What a qcow2 image says of itself.

/// What only qcow2 has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Qcow2Info {
    /// 2 or 3 (`compat` 0.10 or 1.1).
    pub version: u32,
    /// Size of a cluster.
    pub cluster_bytes: u64,
    /// Width of a refcount in bits.
    pub refcount_bits: u32,
    /// How compressed clusters are compressed.
    pub compression: Compression,
    /// Features that are set.
    pub features: Vec<Feature>,
    /// The backing file, as it is named.
    pub backing_file: Option<String>,
    /// The format of the backing file, as it is named.
    pub backing_format: Option<String>,
    /// The external data file, as it is named.
    pub data_file: Option<String>,
    /// Snapshots inside the file.
    pub snapshots: Vec<InternalSnapshot>,
    /// Persistent bitmaps.
    pub bitmaps: Vec<PersistentBitmap>,
}

impl Qcow2Info {
    /// Whether `feature` is set.
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
    /// A program found damage, and marked the image so that no program writes to it.
    Corrupt,
    /// The data is in another file.
    ExternalDataFile,
    /// The compression is not zlib.
    CompressionType,
    /// L2 entries describe subclusters.
    ExtendedL2,
    /// Programs may leave refcounts behind while the image is open.
    LazyRefcounts,
    /// The bitmaps in the image are up to date.
    Bitmaps,
    /// The external data file is a raw image of the disk.
    RawDataFile,
}

impl Feature {
    /// A short name.
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

/// How clusters of an image are compressed; one image knows one way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Compression {
    /// Deflate: every reader of qcow2 knows it.
    #[default]
    Zlib,
    /// Zstandard: faster and smaller; QEMU reads it since version 5.1.
    Zstd,
}

impl Compression {
    /// The name, as QEMU has it.
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
    /// Unique in the image; usually a number.
    pub id: String,
    /// Given by the user.
    pub name: String,
    /// When it was taken, in seconds since 1970.
    pub created_seconds: u32,
    /// Nanoseconds to add.
    pub created_nanoseconds: u32,
    /// How long the machine had run, in nanoseconds.
    pub machine_time_ns: u64,
    /// Bytes of machine state (memory) stored with it.
    pub machine_state_bytes: u64,
    /// Size of the disk at that time.
    pub disk_bytes: u64,
    pub(crate) l1: TableLocation,
}

/// A dirty bitmap stored in a qcow2 image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PersistentBitmap {
    /// Its name.
    pub name: String,
    /// Bytes of disk per bit.
    pub granularity_bytes: u64,
    /// Whether its contents can be relied on.
    pub state: BitmapState,
    /// Whether it records new writes when a machine has the image open.
    pub recording: Recording,
    pub(crate) table: TableLocation,
}

/// Whether a bitmap's contents can be relied on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BitmapState {
    /// It holds every write since it was made.
    Valid,
    /// A program that had it open did not close it: it misses writes.
    InUse,
    /// A program that does not know bitmaps wrote to the image: it misses writes.
    Stale,
}

/// Whether a bitmap records new writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Recording {
    /// It does.
    Enabled,
    /// It keeps what it has.
    Disabled,
}

/// A table of pointers: a place in the file that was checked to lie within it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TableLocation {
    pub(crate) offset: u64,
    pub(crate) entries: u64,
}
