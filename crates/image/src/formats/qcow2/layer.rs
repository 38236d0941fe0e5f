//! One qcow2 file as a device, with or without its backing file.

use std::sync::Arc;

use holdfast_block::{BlockDevice, ExtentKind, ExtentList, to_usize};

use super::codec::Decoder;
use super::entry::DataLocation;
use super::header::Qcow2Header;
use super::mapping::{Mapping, MappingParts};
use crate::Result;
use crate::error::corrupt;
use crate::file::ImageFile;
use crate::model::layered::{Layered, push_file};
use crate::model::mapped_extent::{Compressed, KnownLength, MappedExtent};
use crate::model::qcow2_info::TableLocation;
use crate::model::shared_cache::SharedCache;

/// Memory for L2 tables of one layer. With clusters of 64 KiB that maps 64 GiB of disk.
pub(crate) const L2_CACHE_BYTES: u64 = 8 << 20;
/// Memory for decompressed clusters of one layer, for reads smaller than a cluster.
const CLUSTER_CACHE_BYTES: u64 = 4 << 20;

/// The files and tables of one disk state of a qcow2 image.
pub(crate) struct Qcow2Layer {
    pub(crate) image: Arc<str>,
    pub(crate) header: Qcow2Header,
    pub(crate) size_bytes: u64,
    pub(crate) file: Arc<dyn ImageFile>,
    pub(crate) data: Arc<dyn ImageFile>,
    pub(crate) mapping: Mapping,
    pub(crate) backing: Option<Arc<dyn BlockDevice>>,
    data_length: KnownLength,
    decoder: Decoder,
    clusters: SharedCache<Vec<u8>>,
}

impl Qcow2Layer {
    /// The active state of an opened file and its data file (if it has one).
    pub(crate) fn new(
        image: Arc<str>,
        header: Qcow2Header,
        file: Arc<dyn ImageFile>,
        data_file: Option<Arc<dyn ImageFile>>,
        backing: Option<Arc<dyn BlockDevice>>,
    ) -> Result<Self> {
        let (l1, size_bytes) = (header.l1, header.size_bytes);
        Self::with_l1(image, header, l1, size_bytes, file, data_file, backing)
    }

    /// The disk state of the L1 table `l1`, which is that of a snapshot.
    pub(crate) fn with_l1(
        image: Arc<str>,
        header: Qcow2Header,
        l1: TableLocation,
        size_bytes: u64,
        file: Arc<dyn ImageFile>,
        data_file: Option<Arc<dyn ImageFile>>,
        backing: Option<Arc<dyn BlockDevice>>,
    ) -> Result<Self> {
        let place = if header.has_data_file() {
            DataLocation::External
        } else {
            DataLocation::Inside
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
            clusters: SharedCache::new(CLUSTER_CACHE_BYTES),
            header,
        })
    }

    /// Limits the memory for cached tables and decompressed clusters.
    pub(crate) fn with_cache_bytes(mut self, cache_bytes: u64) -> Self {
        let cluster_cache_bytes = CLUSTER_CACHE_BYTES.min(cache_bytes / 4);
        self.mapping
            .limit_cache(L2_CACHE_BYTES.min(cache_bytes - cluster_cache_bytes));
        self.clusters = SharedCache::new(cluster_cache_bytes);
        self
    }

    fn decompress(&self, cluster: &mut [u8], compressed: Compressed) -> Result<()> {
        let damaged = |detail: String| corrupt(&self.image, "compressed cluster", compressed.offset, detail);
        let end = compressed.offset + compressed.length_bytes;
        let held = self.data_length.held(&*self.data, compressed.offset, end)?;
        if held == 0 {
            return Err(damaged("past the end of the file".to_owned()));
        }
        // An entry counts whole sectors, and the file may end before the end of the last one. Only existing bytes are
        // decoded: zeroes in place of missing ones could decode to wrong data.
        let mut input = vec![0; to_usize(held)];
        self.file.read_at(&mut input, compressed.offset)?;
        self.decoder.decompress(&input, cluster).map_err(|detail| {
            damaged(if held < compressed.length_bytes {
                format!("{detail}; the end of the file truncates it")
            } else {
                detail
            })
        })
    }

    /// Drops the cached cluster at `offset`, whose space was freed.
    pub(crate) fn evict_compressed(&self, offset: u64) {
        self.clusters.remove(offset);
    }
}

impl Layered for Qcow2Layer {
    fn disk_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn unit_bytes(&self) -> u64 {
        self.header.geometry.subcluster_bytes()
    }

    fn run(&self, offset: u64, length_max: u64) -> Result<MappedExtent> {
        self.mapping.run(offset, length_max)
    }

    fn read_data(&self, buffer: &mut [u8], host: u64) -> Result<()> {
        // A cluster (or subcluster) is written in full, up to the end of the disk: missing bytes mean that the file
        // is truncated.
        self.check_there(host, buffer.len() as u64)?;
        Ok(self.data.read_at(buffer, host)?)
    }

    fn check_there(&self, host: u64, length: u64) -> Result<()> {
        let last = host.saturating_add(length) - 1;
        if !self.data_length.contains(&*self.data, last)? {
            return Err(corrupt(&self.image, "data cluster", last, "past the end of the file"));
        }
        Ok(())
    }

    fn read_compressed(&self, buffer: &mut [u8], offset: u64, compressed: Compressed) -> Result<()> {
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
        let within = to_usize(self.header.geometry.offset_in_cluster(offset));
        buffer.copy_from_slice(&cluster[within..within + buffer.len()]);
        Ok(())
    }

    /// Uses the holes of an external data file, whose clusters are never freed.
    fn push_data(&self, list: &mut ExtentList, host: u64, length: u64) -> Result<bool> {
        match self.mapping.place {
            DataLocation::Inside => Ok(list.push(length, ExtentKind::Data)),
            DataLocation::External => push_file(&*self.data, list, host, length),
        }
    }

    fn backing(&self) -> Option<&dyn BlockDevice> {
        self.backing.as_deref()
    }
}
