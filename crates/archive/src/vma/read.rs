//! Reading a VMA.

#![deny(clippy::indexing_slicing)]
#![cfg_attr(not(test), deny(clippy::string_slice))]

use std::io::{ErrorKind, Read};

use super::clusters::Clusters;
use super::format::{
    self, BLOCK_BYTES, CLUSTER_BYTES, ClusterInfo, EXTENT_BYTES, HEADER_BYTES, MEMORY_NAME, VmaHeader, parse_extent,
};
use crate::reader::{ArchiveDisk, ArchiveReader, DiskContent, Document, Piece};
use crate::tar::{corrupt, read_error};
use crate::{Error, Result};

/// Reads a VMA from a decompressed stream.
///
/// Its pieces are not in order: [`crate::Ordered`] sorts them.
pub struct VmaReader<R> {
    stream: R,
    /// Bytes read.
    at: u64,
    uuid: [u8; 16],
    documents: Vec<Document>,
    disks: Vec<ArchiveDisk>,
    left_out: Vec<String>,
    /// The roles of devices, by their numbers.
    devices: [DeviceRole; format::DEVICE_COUNT],
    /// The clusters of each disk that were read.
    clusters: Vec<Clusters>,
    /// Clusters of the extent that were not read yet.
    infos: std::vec::IntoIter<ClusterInfo>,
    /// The cluster that was read.
    cluster: Option<Cluster>,
    /// Its stored blocks.
    blocks: Vec<u8>,
    /// The disk whose last cluster this is.
    ending: Option<usize>,
    is_finished: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum DeviceRole {
    None,
    Disk(usize),
    /// Not read: the memory of the machine.
    LeftOut,
}

/// The part of a cluster that was not returned yet.
#[derive(Debug, Clone, Copy)]
struct Cluster {
    disk: usize,
    /// Its offset in the disk.
    offset: u64,
    /// Its stored blocks.
    mask: u16,
    /// The offset of the first of them in the buffer.
    place: usize,
}

impl<R: Read> VmaReader<R> {
    /// Reads the header.
    ///
    /// # Errors
    /// The stream is not a VMA, or its header is damaged.
    pub fn open(stream: R) -> Result<Self> {
        let mut reader = Self {
            stream,
            at: 0,
            uuid: [0; 16],
            documents: Vec::new(),
            disks: Vec::new(),
            left_out: Vec::new(),
            devices: [DeviceRole::None; format::DEVICE_COUNT],
            clusters: Vec::new(),
            infos: Vec::new().into_iter(),
            cluster: None,
            blocks: Vec::new(),
            ending: None,
            is_finished: false,
        };
        let mut header = vec![0; HEADER_BYTES];
        reader.fill(&mut header, "the header")?;
        let size = format::header_bytes(&header)?;
        header.resize(size, 0);
        if size > HEADER_BYTES {
            reader.fill(header.get_mut(HEADER_BYTES..).unwrap_or_default(), "the header")?;
        }
        let header = VmaHeader::parse(&header)?;
        for device in header.devices {
            let number = usize::from(device.number);
            let place = reader.devices.get_mut(number);
            let place = place.expect("there is a device for each number of one byte");
            if device.name == MEMORY_NAME {
                *place = DeviceRole::LeftOut;
                reader.left_out.push(device.name);
            } else {
                *place = DeviceRole::Disk(reader.disks.len());
                reader.clusters.push(Clusters::new(device.size_bytes));
                reader.disks.push(ArchiveDisk {
                    key: device.name,
                    size_bytes: device.size_bytes,
                    content: DiskContent::Stored,
                });
            }
        }
        (reader.uuid, reader.documents) = (header.uuid, header.documents);
        Ok(reader)
    }

    /// Reads the header of the next extent; false at the end of the archive.
    fn read_extent(&mut self) -> Result<bool> {
        let (offset, mut header) = (self.at, [0; EXTENT_BYTES]);
        if !self.fill_or_end(&mut header, "the header of an extent")? {
            return Ok(false);
        }
        let infos = parse_extent(&header, &self.uuid, offset)?;
        for info in &infos {
            self.check(*info, offset)?;
        }
        self.infos = infos.into_iter();
        Ok(true)
    }

    /// The role of a cluster's device.
    fn device(&self, info: ClusterInfo) -> DeviceRole {
        self.devices
            .get(usize::from(info.device))
            .copied()
            .unwrap_or(DeviceRole::None)
    }

    /// Checks that a cluster is within its device; the last one may extend beyond its end.
    fn check(&self, info: ClusterInfo, extent_offset: u64) -> Result<()> {
        let disk = match self.device(info) {
            DeviceRole::LeftOut => return Ok(()),
            DeviceRole::Disk(disk) => self.disks.get(disk),
            DeviceRole::None => None,
        };
        let Some(disk) = disk else {
            let detail = format!(
                "it has a cluster of the device {}, which the header does not have",
                info.device
            );
            return Err(corrupt("extent", extent_offset, detail));
        };
        let left = disk.size_bytes.saturating_sub(info.offset());
        // Proxmox also accepts a full mask for the partial cluster at the end of a device.
        let stored_end = match info.mask {
            u16::MAX => 1,
            mask => u64::from(u16::BITS - mask.leading_zeros()).saturating_sub(1) * BLOCK_BYTES + 1,
        };
        if left < stored_end {
            let detail = format!("the cluster {} reaches beyond the end of {}", info.cluster, disk.key);
            return Err(corrupt("extent", extent_offset, detail));
        }
        Ok(())
    }

    /// Reads the blocks of a cluster.
    fn read_cluster(&mut self, info: ClusterInfo) -> Result<()> {
        let offset = self.at;
        if info.mask != 0 {
            let mut blocks = std::mem::take(&mut self.blocks);
            blocks.resize(info.stored_bytes(), 0);
            self.fill(&mut blocks, "a cluster")?;
            self.blocks = blocks;
        }
        let DeviceRole::Disk(disk) = self.device(info) else {
            return Ok(());
        };
        let known = self.clusters.get_mut(disk).zip(self.disks.get(disk));
        let (clusters, described) = known.expect("each device that is a disk has clusters");
        if !clusters.insert(info.cluster) {
            let detail = format!("the cluster {} of {} comes twice", info.cluster, described.key);
            return Err(corrupt("cluster", offset, detail));
        }
        self.cluster = Some(Cluster {
            disk,
            offset: info.offset(),
            mask: info.mask,
            place: 0,
        });
        self.ending = (clusters.missing_count() == 0).then_some(disk);
        Ok(())
    }

    /// Checks that all clusters of all disks were read.
    fn check_whole(&self) -> Result<()> {
        let mut missing = self.disks.iter().zip(&self.clusters);
        match missing.find(|(_, clusters)| clusters.missing_count() > 0) {
            None => Ok(()),
            Some((disk, clusters)) => {
                let detail = format!(
                    "{} of its {} clusters are missing from {}: the archive was cut off, or its backup did not end",
                    clusters.missing_count(),
                    disk.size_bytes.div_ceil(CLUSTER_BYTES),
                    disk.key
                );
                Err(corrupt("disk", self.at, detail))
            }
        }
    }

    /// Fills `buffer` from the stream.
    fn fill(&mut self, buffer: &mut [u8], what: &'static str) -> Result<()> {
        if self.fill_or_end(buffer, what)? {
            return Ok(());
        }
        Err(Error::CutOff { what, offset: self.at })
    }

    /// Fills `buffer`, which is not empty, from the stream; false at its end.
    fn fill_or_end(&mut self, buffer: &mut [u8], what: &'static str) -> Result<bool> {
        let mut filled = 0;
        while filled < buffer.len() {
            match self.stream.read(buffer.get_mut(filled..).unwrap_or_default()) {
                Ok(0) if filled == 0 => return Ok(false),
                Ok(0) => return Err(Error::CutOff { what, offset: self.at }),
                Ok(count) => {
                    filled += count;
                    self.at += count as u64;
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(source) => return Err(read_error(source, what, self.at)),
            }
        }
        Ok(true)
    }
}

impl Cluster {
    /// The next run of adjacent blocks: its offset in the disk, and its range in the buffer.
    fn next(&mut self, size_bytes: u64) -> Option<(u64, std::ops::Range<usize>)> {
        let skipped = self.mask.trailing_zeros();
        let rest = self.mask.checked_shr(skipped)?;
        let count = rest.trailing_ones();
        let (offset, length) = (
            self.offset + u64::from(skipped) * BLOCK_BYTES,
            u64::from(count) * BLOCK_BYTES,
        );
        let place = self.place;
        self.place += holdfast_block::to_usize(length);
        self.mask &= u16::MAX.checked_shl(skipped + count).unwrap_or(0);
        // Blocks are stored whole: discard the bytes beyond the end of the disk.
        let length = length.min(size_bytes.saturating_sub(offset));
        Some((offset, place..place + holdfast_block::to_usize(length)))
    }
}

impl<R: Read + Send> ArchiveReader for VmaReader<R> {
    fn documents(&self) -> &[Document] {
        &self.documents
    }

    fn disks(&self) -> &[ArchiveDisk] {
        &self.disks
    }

    fn left_out(&self) -> &[String] {
        &self.left_out
    }

    fn unverified(&self) -> Vec<String> {
        vec!["a VMA has no checksums of the data of its disks: changes of it cannot be detected".to_owned()]
    }

    fn next(&mut self) -> Result<Option<Piece<'_>>> {
        while !self.is_finished {
            if let Some(cluster) = &mut self.cluster {
                let disk = cluster.disk;
                match cluster.next(self.disks.get(disk).map_or(0, |disk| disk.size_bytes)) {
                    None => self.cluster = None,
                    Some((offset, place)) => {
                        return Ok(Some(Piece::Data {
                            disk,
                            offset,
                            bytes: self.blocks.get(place).unwrap_or_default(),
                        }));
                    }
                }
            } else if let Some(disk) = self.ending.take() {
                return Ok(Some(Piece::End { disk }));
            } else if let Some(info) = self.infos.next() {
                self.read_cluster(info)?;
            } else if !self.read_extent()? {
                self.check_whole()?;
                self.is_finished = true;
            }
        }
        Ok(None)
    }

    fn is_in_order(&self) -> bool {
        false
    }
}
