//! One qcow2 file as a device, with or without what is below it.

use std::ops::Range;
use std::sync::Arc;

use holdfast_block::{BlockDevice, Error as BlockError, ExtentKind, ExtentList, Result as BlockResult, to_usize};

use super::codec::Decoder;
use super::entry::{Compressed, DataPlace};
use super::header::{Header, TableAt, corrupt};
use super::lru::Lru;
use super::mapping::{KnownLength, Mapping, MappingParts, RunKind};
use crate::Result;
use crate::file::ImageFile;

/// Memory for L2 tables of one layer. With 64 KiB clusters a table of that size describes 512 MiB of disk.
pub(crate) const L2_CACHE_BYTES: u64 = 8 << 20;
/// Memory for decompressed clusters of one layer, for readers that ask for less than a cluster.
const CLUSTER_CACHE_BYTES: u64 = 4 << 20;

/// The files and tables of one state of one qcow2 image.
pub(crate) struct Layer {
    pub(crate) image: Arc<str>,
    pub(crate) header: Header,
    pub(crate) size_bytes: u64,
    pub(crate) file: Arc<dyn ImageFile>,
    pub(crate) data: Arc<dyn ImageFile>,
    pub(crate) mapping: Mapping,
    pub(crate) backing: Option<Arc<dyn BlockDevice>>,
    data_length: KnownLength,
    decoder: Decoder,
    clusters: Lru<Vec<u8>>,
}

impl Layer {
    /// A layer over an opened file and its opened data file (if it has one).
    pub(crate) fn new(
        image: Arc<str>,
        header: Header,
        file: Arc<dyn ImageFile>,
        data_file: Option<Arc<dyn ImageFile>>,
        backing: Option<Arc<dyn BlockDevice>>,
    ) -> Result<Self> {
        let (l1, size_bytes) = (header.l1, header.size_bytes);
        Self::with_l1(image, header, l1, size_bytes, file, data_file, backing)
    }

    /// The state of the disk that the L1 table `l1` describes: a snapshot's.
    pub(crate) fn with_l1(
        image: Arc<str>,
        header: Header,
        l1: TableAt,
        size_bytes: u64,
        file: Arc<dyn ImageFile>,
        data_file: Option<Arc<dyn ImageFile>>,
        backing: Option<Arc<dyn BlockDevice>>,
    ) -> Result<Self> {
        let place = if header.has_data_file() {
            DataPlace::External
        } else {
            DataPlace::Inside
        };
        let mapping = Mapping::load(MappingParts {
            image: Arc::clone(&image),
            file: Arc::clone(&file),
            geometry: header.geometry,
            place,
            version: header.version,
            l1,
            cache_bytes: L2_CACHE_BYTES,
        })?;
        Ok(Self {
            image,
            size_bytes,
            data: data_file.unwrap_or_else(|| Arc::clone(&file)),
            file,
            mapping,
            backing,
            data_length: KnownLength::default(),
            decoder: Decoder::new(header.compression),
            clusters: Lru::new(CLUSTER_CACHE_BYTES),
            header,
        })
    }

    /// The layer's own bytes; absent ones come from below with [`Below::Backing`].
    pub(crate) fn read(&self, buffer: &mut [u8], offset: u64, below: Below) -> Result<()> {
        let mut rest = buffer;
        let mut at = offset;
        while !rest.is_empty() {
            let run = self.mapping.run(at, rest.len() as u64)?;
            let (piece, tail) = rest.split_at_mut(to_usize(run.length));
            match run.kind {
                RunKind::Zero => piece.fill(0),
                RunKind::Absent => match below {
                    Below::Backing => self.read_backing(piece, at)?,
                    Below::Nothing => piece.fill(0),
                },
                RunKind::Data { host } => self.read_data(piece, host)?,
                RunKind::Compressed(compressed) => {
                    self.read_compressed(piece, self.header.geometry.offset_in_cluster(at), compressed)?;
                }
            }
            at += run.length;
            rest = tail;
        }
        Ok(())
    }

    /// What lies below this layer; zero past the end of the backing file, which may be shorter.
    pub(crate) fn read_backing(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        let Some(backing) = &self.backing else {
            buffer.fill(0);
            return Ok(());
        };
        let held = backing.size_bytes().saturating_sub(offset).min(buffer.len() as u64);
        let (inside, outside) = buffer.split_at_mut(to_usize(held));
        if !inside.is_empty() {
            backing.read_at(inside, offset)?;
        }
        outside.fill(0);
        Ok(())
    }

    fn read_data(&self, buffer: &mut [u8], host: u64) -> Result<()> {
        // A cluster may be cut off by the end of the file, its rest being zero; one that begins there is lost data.
        let geometry = self.header.geometry;
        let last = geometry.offset_of(geometry.cluster_of(host + buffer.len() as u64 - 1));
        if self.mapping.place == DataPlace::Inside && !self.data_length.contains(&*self.data, last)? {
            return Err(corrupt(&self.image, "data cluster", last, "past the end of the file"));
        }
        Ok(self.data.read_at(buffer, host)?)
    }

    fn read_compressed(&self, buffer: &mut [u8], within: u64, compressed: Compressed) -> Result<()> {
        let cluster_bytes = to_usize(self.header.geometry.cluster_bytes());
        if buffer.len() == cluster_bytes {
            return self.decompress(buffer, compressed);
        }
        let cluster = if let Some(cluster) = self.clusters.get(compressed.offset) {
            cluster
        } else {
            let mut cluster = vec![0; cluster_bytes];
            self.decompress(&mut cluster, compressed)?;
            let cluster = Arc::new(cluster);
            self.clusters
                .insert(compressed.offset, Arc::clone(&cluster), cluster_bytes as u64);
            cluster
        };
        let within = to_usize(within);
        buffer.copy_from_slice(&cluster[within..within + buffer.len()]);
        Ok(())
    }

    fn decompress(&self, cluster: &mut [u8], compressed: Compressed) -> Result<()> {
        let damaged = |detail: String| corrupt(&self.image, "compressed cluster", compressed.offset, detail);
        if !self.data_length.contains(&*self.data, compressed.offset)? {
            return Err(damaged("past the end of the file".to_owned()));
        }
        let mut input = vec![0; to_usize(compressed.length_bytes)];
        self.file.read_at(&mut input, compressed.offset)?;
        self.decoder.decompress(&input, cluster).map_err(damaged)
    }

    /// Forgets the decompressed cluster at `offset`, whose place was given back.
    pub(crate) fn forget_compressed(&self, offset: u64) {
        self.clusters.remove(offset);
    }

    /// Extents of `range`; absent ones are resolved through the backing file with [`Below::Backing`].
    pub(crate) fn list_extents(&self, range: Range<u64>, extent_count_max: usize, below: Below) -> Result<ExtentList> {
        let mut list = ExtentList::new(range.start, extent_count_max);
        while list.end() < range.end {
            let at = list.end();
            let run = self.mapping.run(at, range.end - at)?;
            let is_complete = match (run.kind, below) {
                (RunKind::Zero, _) => list.push(run.length, ExtentKind::Zero),
                (RunKind::Compressed(_), _) => list.push(run.length, ExtentKind::Data),
                (RunKind::Data { host }, _) => self.push_data(&mut list, host, run.length)?,
                (RunKind::Absent, Below::Nothing) => list.push(run.length, ExtentKind::Absent),
                (RunKind::Absent, Below::Backing) => self.push_backing(&mut list, run.length)?,
            };
            if !is_complete {
                break;
            }
        }
        Ok(list)
    }

    /// Appends `length` bytes of data; an external data file is asked for its holes, since its clusters never go away.
    fn push_data(&self, list: &mut ExtentList, host: u64, length: u64) -> Result<bool> {
        if self.mapping.place == DataPlace::Inside {
            return Ok(list.push(length, ExtentKind::Data));
        }
        let file_bytes = self.data.length_bytes()?;
        let held = file_bytes.saturating_sub(host).min(length);
        let goal = list.end() + held;
        let shift = list.end();
        while list.end() < goal {
            let start = host + (list.end() - shift);
            let found = self.data.extents(start..host + held, SUB_EXTENT_COUNT_MAX)?;
            for extent in found {
                if !list.push(extent.length, extent.kind) {
                    return Ok(false);
                }
            }
        }
        Ok(list.push(length - held, ExtentKind::Zero))
    }

    /// Appends `length` bytes as the backing file describes them.
    fn push_backing(&self, list: &mut ExtentList, length: u64) -> Result<bool> {
        let end = list.end() + length;
        let held_end = self.backing.as_ref().map_or(0, BlockDevice::size_bytes).min(end);
        if let Some(backing) = &self.backing {
            while list.end() < held_end {
                for extent in backing.extents(list.end()..held_end, SUB_EXTENT_COUNT_MAX)? {
                    let kind = match extent.kind {
                        ExtentKind::Data => ExtentKind::Data,
                        ExtentKind::Zero | ExtentKind::Absent => ExtentKind::Zero,
                    };
                    if !list.push(extent.length, kind) {
                        return Ok(false);
                    }
                }
            }
        }
        Ok(list.push(end - list.end(), ExtentKind::Zero))
    }
}

const SUB_EXTENT_COUNT_MAX: usize = 256;

/// What an absent range is taken from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Below {
    /// The backing file, or zero where there is none: the layer is the top of a chain.
    Backing,
    /// Nothing: the layer is looked at alone.
    Nothing,
}

impl BlockDevice for Layer {
    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> BlockResult<()> {
        self.check_bounds(offset, buffer.len() as u64)?;
        self.read(buffer, offset, Below::Backing).map_err(BlockError::from)
    }

    fn extents(&self, range: Range<u64>, extent_count_max: usize) -> BlockResult<ExtentList> {
        self.check_bounds(range.start, range.end.saturating_sub(range.start))?;
        self.list_extents(range, extent_count_max, Below::Backing)
            .map_err(BlockError::from)
    }

    fn block_size_bytes(&self) -> u32 {
        u32::try_from(self.header.geometry.subcluster_bytes()).unwrap_or(u32::MAX)
    }
}

/// A layer without what is below it: absent ranges say so, and read as zero.
pub(crate) struct Alone(pub(crate) Arc<Layer>);

impl BlockDevice for Alone {
    fn size_bytes(&self) -> u64 {
        self.0.size_bytes
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> BlockResult<()> {
        self.check_bounds(offset, buffer.len() as u64)?;
        self.0.read(buffer, offset, Below::Nothing).map_err(BlockError::from)
    }

    fn extents(&self, range: Range<u64>, extent_count_max: usize) -> BlockResult<ExtentList> {
        self.check_bounds(range.start, range.end.saturating_sub(range.start))?;
        self.0
            .list_extents(range, extent_count_max, Below::Nothing)
            .map_err(BlockError::from)
    }

    fn block_size_bytes(&self) -> u32 {
        self.0.block_size_bytes()
    }
}
