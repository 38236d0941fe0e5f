//! The value of an attribute: in its record, in runs of clusters, or compressed in runs of clusters.

use holdfast_block::{BlockDevice, to_usize};

use super::attribute::Attribute;
use super::{Geometry, compression};
use crate::fields::Fields;
use crate::{Error, FilePiece, Result};

const FLAG_COMPRESSION_MASK: u16 = 0x00ff;
const FLAG_COMPRESSED: u16 = 0x0001;
const FLAG_ENCRYPTED: u16 = 0x4000;
/// Compression units have 16 clusters of at most 4 KiB.
const UNIT_BYTES_MAX: u64 = 1 << 20;
const RUN_COUNT_MAX: usize = 1 << 21;

/// Consecutive clusters of a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ClusterRun {
    /// First cluster of the value.
    start: u64,
    count: u64,
    /// First cluster of the volume; none for a hole.
    stored: Option<u64>,
}

#[derive(Debug)]
enum StreamContent {
    Resident(Vec<u8>),
    Runs(Vec<ClusterRun>),
}

/// A decompressed unit.
#[derive(Debug)]
struct DecompressedUnit {
    number: u64,
    bytes: Vec<u8>,
}

/// The value of an attribute.
#[derive(Debug)]
pub(super) struct AttributeStream {
    geometry: Geometry,
    content: StreamContent,
    size_bytes: u64,
    /// Bytes behind this offset were never written, and read as zero.
    initialized_bytes: u64,
    flags: u16,
    /// Bytes that are compressed together; 0 if the value is not compressed.
    unit_bytes: u64,
    last: Option<DecompressedUnit>,
}

impl AttributeStream {
    /// The value that `parts` describe, which are ordered by their clusters.
    ///
    /// # Errors
    /// [`Error::Damaged`] if there is no part, or if the parts do not cover the value.
    pub(super) fn new(parts: &[Attribute], geometry: Geometry) -> Result<Self> {
        let stream = Self::of_prefix(parts, geometry)?;
        if let StreamContent::Runs(runs) = &stream.content {
            let covered = runs.last().map_or(0, |run| run.start + run.count);
            if covered.saturating_mul(geometry.cluster_bytes) < stream.size_bytes {
                return Err(Error::damaged("NTFS attribute", "its clusters end before its value"));
            }
        }
        Ok(stream)
    }

    /// As [`new`](Self::new), for the first parts of a value.
    pub(super) fn of_prefix(parts: &[Attribute], geometry: Geometry) -> Result<Self> {
        let first = parts
            .first()
            .ok_or_else(|| Error::damaged("NTFS attribute", "it is missing"))?;
        let fields = first.fields();
        let flags = fields.u16(0xc)?;
        if first.is_resident()? {
            let value = first.resident_value()?.to_vec();
            return Ok(Self {
                geometry,
                size_bytes: value.len() as u64,
                initialized_bytes: value.len() as u64,
                content: StreamContent::Resident(value),
                flags,
                unit_bytes: 0,
                last: None,
            });
        }
        let mut runs = Vec::new();
        for part in parts {
            if part.is_resident()? {
                return Err(fields.damaged("it is stored twice"));
            }
            add_runs(part, geometry, &mut runs)?;
        }
        let is_compressed = flags & FLAG_COMPRESSION_MASK != 0;
        let unit_shift = u32::from(fields.u16(0x22)?);
        let unit_bytes = if is_compressed && unit_shift > 0 {
            let bytes = geometry.cluster_bytes.checked_shl(unit_shift).unwrap_or(0);
            if unit_shift > 16 || !(1..=UNIT_BYTES_MAX).contains(&bytes) {
                return Err(fields.damaged(format!("compression units of 2^{unit_shift} clusters")));
            }
            bytes
        } else {
            0
        };
        let size_bytes = fields.u64(0x30)?;
        Ok(Self {
            geometry,
            content: StreamContent::Runs(runs),
            size_bytes,
            initialized_bytes: fields.u64(0x38)?.min(size_bytes),
            flags,
            unit_bytes,
            last: None,
        })
    }

    pub(super) fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// An error if the bytes are not those that the guest reads.
    pub(super) fn refuse_unreadable(&self) -> Result<()> {
        if self.flags & FLAG_ENCRYPTED != 0 {
            return Err(Error::unsupported("encryption of NTFS (EFS)"));
        }
        if !matches!(self.flags & FLAG_COMPRESSION_MASK, 0 | FLAG_COMPRESSED) {
            return Err(Error::unsupported("this kind of compression of NTFS"));
        }
        Ok(())
    }

    /// The next bytes at `offset`, decompressed.
    pub(super) fn piece(&mut self, device: &dyn BlockDevice, offset: u64, length_max: usize) -> Result<FilePiece> {
        if self.unit_bytes == 0 || offset >= self.initialized_bytes {
            return self.plain_piece(device, offset, length_max);
        }
        let number = offset / self.unit_bytes;
        if self.last.as_ref().is_none_or(|last| last.number != number) {
            let Some(bytes) = self.unit(device, number)? else {
                let end = ((number + 1) * self.unit_bytes).min(self.size_bytes);
                return Ok(FilePiece::Hole(end - offset));
            };
            self.last = Some(DecompressedUnit { number, bytes });
        }
        let start = offset % self.unit_bytes;
        let left = (self.initialized_bytes - offset).min(length_max as u64);
        let bytes = self.last.as_ref().and_then(|last| {
            let end = (start + left).min(last.bytes.len() as u64);
            last.bytes.get(to_usize(start)..to_usize(end))
        });
        match bytes {
            Some(bytes) if !bytes.is_empty() => Ok(FilePiece::Data(bytes.to_vec())),
            _ => Err(Error::damaged("NTFS compression", "a unit is too short")),
        }
    }

    /// As [`piece`](Self::piece), of the stored bytes.
    pub(super) fn plain_piece(&self, device: &dyn BlockDevice, offset: u64, length_max: usize) -> Result<FilePiece> {
        if offset >= self.size_bytes || length_max == 0 {
            return Ok(FilePiece::End);
        }
        if offset >= self.initialized_bytes {
            return Ok(FilePiece::Hole(self.size_bytes - offset));
        }
        let left = self.initialized_bytes - offset;
        let runs = match &self.content {
            StreamContent::Resident(value) => {
                let end = offset.saturating_add(length_max as u64).min(value.len() as u64);
                let bytes = value.get(to_usize(offset)..to_usize(end)).unwrap_or_default();
                return Ok(FilePiece::Data(bytes.to_vec()));
            }
            StreamContent::Runs(runs) => runs,
        };
        let cluster_bytes = self.geometry.cluster_bytes;
        let Some(run) = run_at(runs, offset / cluster_bytes) else {
            return Err(Error::damaged("NTFS attribute", "its clusters end before its value"));
        };
        let inside = offset - run.start * cluster_bytes;
        let length = (run.count * cluster_bytes - inside).min(left);
        match run.stored {
            None => Ok(FilePiece::Hole(length)),
            Some(stored) => {
                let mut bytes = vec![0; to_usize(length.min(length_max as u64))];
                device.read_at(&mut bytes, stored * cluster_bytes + inside)?;
                Ok(FilePiece::Data(bytes))
            }
        }
    }

    /// Exactly `length` bytes at `offset`; holes are zeroes.
    pub(super) fn bytes(&self, device: &dyn BlockDevice, offset: u64, length: usize) -> Result<Vec<u8>> {
        let mut bytes = Vec::with_capacity(length);
        while bytes.len() < length {
            match self.plain_piece(device, offset + bytes.len() as u64, length - bytes.len())? {
                FilePiece::Data(piece) => bytes.extend(piece),
                FilePiece::Hole(count) => {
                    let count = count.min((length - bytes.len()) as u64);
                    bytes.resize(bytes.len() + to_usize(count), 0);
                }
                FilePiece::End => return Err(Error::damaged("NTFS attribute", "it ends too early")),
            }
        }
        Ok(bytes)
    }

    /// The bytes of a compression unit; none if it is a hole. A unit whose clusters are all stored is not compressed; one
    /// that begins with stored clusters is.
    fn unit(&self, device: &dyn BlockDevice, number: u64) -> Result<Option<Vec<u8>>> {
        let StreamContent::Runs(runs) = &self.content else {
            return Ok(None);
        };
        let cluster_bytes = self.geometry.cluster_bytes;
        let cluster_count = self.unit_bytes / cluster_bytes;
        let first = number * cluster_count;
        let mut stored = Vec::new();
        let mut has_hole = false;
        let mut cluster = first;
        while cluster < first + cluster_count {
            // The last unit may lack its last clusters.
            let Some(run) = run_at(runs, cluster) else {
                has_hole = true;
                break;
            };
            let count = (run.start + run.count).min(first + cluster_count) - cluster;
            match run.stored {
                None => has_hole = true,
                Some(_) if has_hole => {
                    return Err(Error::damaged("NTFS compression", "a unit has a hole before its data"));
                }
                Some(start) => {
                    let mut bytes = vec![0; to_usize(count * cluster_bytes)];
                    device.read_at(&mut bytes, (start + cluster - run.start) * cluster_bytes)?;
                    stored.extend(bytes);
                }
            }
            cluster += count;
        }
        if stored.is_empty() {
            return Ok(None);
        }
        if !has_hole {
            return Ok(Some(stored));
        }
        compression::decompress(&stored, to_usize(self.unit_bytes)).map(Some)
    }
}

fn run_at(runs: &[ClusterRun], cluster: u64) -> Option<&ClusterRun> {
    let number = runs.partition_point(|run| run.start + run.count <= cluster);
    runs.get(number).filter(|run| run.start <= cluster)
}

/// Decodes the runs of a part. Each run begins with the widths of its two numbers: the count of clusters, and the
/// distance to the start of the run before it, which is missing for a hole.
fn add_runs(part: &Attribute, geometry: Geometry, runs: &mut Vec<ClusterRun>) -> Result<()> {
    let fields = part.fields();
    let (first, last) = (fields.u64(0x10)?, fields.u64(0x18)?);
    let expected = runs.last().map_or(0, |run| run.start + run.count);
    if first != expected {
        return Err(fields.damaged(format!("its clusters from {expected} to {first} are missing")));
    }
    let volume_clusters = geometry.volume_bytes / geometry.cluster_bytes;
    let mut at = usize::from(fields.u16(0x20)?);
    let mut start = first;
    let mut stored = 0i64;
    loop {
        let widths = fields.u8(at)?;
        if widths == 0 {
            break;
        }
        let (count_width, distance_width) = (usize::from(widths & 0xf), usize::from(widths >> 4));
        if count_width == 0 || count_width > 8 || distance_width > 8 {
            return Err(fields.damaged("a run is invalid"));
        }
        let count = signed(fields, at + 1, count_width)?;
        let distance = signed(fields, at + 1 + count_width, distance_width)?;
        at += 1 + count_width + distance_width;
        let count = u64::try_from(count).unwrap_or(0);
        let end = start.checked_add(count).filter(|end| *end <= 1 << 48);
        let Some(end) = end.filter(|_| count > 0) else {
            return Err(fields.damaged("the length of a run is invalid"));
        };
        let place = if distance_width == 0 {
            None
        } else {
            stored = stored.wrapping_add(distance);
            let first = u64::try_from(stored).unwrap_or(u64::MAX);
            if first.checked_add(count).is_none_or(|end| end > volume_clusters) {
                return Err(fields.damaged(format!("clusters {first} and following do not exist")));
            }
            Some(first)
        };
        if runs.len() >= RUN_COUNT_MAX {
            return Err(Error::TooLarge {
                what: "the number of fragments of an NTFS file".into(),
                limit: RUN_COUNT_MAX as u64,
            });
        }
        runs.push(ClusterRun {
            start,
            count,
            stored: place,
        });
        start = end;
    }
    // An empty value has a last cluster of -1.
    if start != last.wrapping_add(1) {
        return Err(fields.damaged(format!("its clusters end at {start}, not at {last}")));
    }
    Ok(())
}

/// A number of `width` bytes with a sign.
fn signed(fields: Fields<'_>, at: usize, width: usize) -> Result<i64> {
    let bytes = fields.bytes(at, width)?;
    let fill = if bytes.last().is_some_and(|byte| byte & 0x80 != 0) {
        0xff
    } else {
        0
    };
    let mut number = [fill; 8];
    number.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
    Ok(i64::from_le_bytes(number))
}
