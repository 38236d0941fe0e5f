//! The headers of an archive and of its extents. Numbers are big-endian, except the lengths of blobs.
//!
//! | Header | bytes | |
//! |---|---|---|
//! | 0 | 4 | `VMA\0` |
//! | 4 | 4 | version: 1 |
//! | 8 | 16 | UUID |
//! | 24 | 8 | time of creation, seconds since 1970 |
//! | 32 | 16 | MD5 of the header, these bytes zero |
//! | 48 | 4 | offset of the blobs |
//! | 52 | 4 | bytes of the blobs |
//! | 56 | 4 | bytes of the header with the blobs |
//! | 2044 | 256 × 4 | names of configurations, as places in the blobs; 0 for none |
//! | 3068 | 256 × 4 | texts of configurations, likewise |
//! | 4096 | 256 × 32 | devices: place of the name, 4 bytes unused, size in 8 bytes, 16 bytes unused; the first is no device |
//! | 12288 | | blobs: a byte unused, then each with its length in 2 bytes, little-endian; names end with a zero byte |
//!
//! | Extent | bytes | |
//! |---|---|---|
//! | 0 | 4 | `VMAE` |
//! | 6 | 2 | number of blocks behind the header |
//! | 8 | 16 | UUID of the archive |
//! | 24 | 16 | MD5 of the extent's header, these bytes zero |
//! | 40 | 59 × 8 | clusters: mask in 2 bytes, a byte unused, device in 1 byte (0 for none), number in 4 bytes |

#![deny(clippy::indexing_slicing)]
#![cfg_attr(not(test), deny(clippy::string_slice))]

use md5::{Digest as _, Md5};

use crate::reader::{Document, DocumentKind};
use crate::tar::corrupt;
use crate::{Error, Result};

/// The magic number of an archive.
pub(crate) const MAGIC: [u8; 4] = *b"VMA\0";
pub(super) const VERSION: u32 = 1;
pub(super) const VERSION_AT: usize = 4;
pub(super) const UUID_AT: usize = 8;
pub(super) const TIME_AT: usize = 24;
pub(super) const MD5_AT: usize = 32;
pub(super) const MD5_BYTES: usize = 16;
pub(super) const BLOBS_OFFSET_AT: usize = 48;
pub(super) const BLOBS_SIZE_AT: usize = 52;
pub(super) const HEADER_SIZE_AT: usize = 56;
pub(super) const CONFIG_NAMES_AT: usize = 2044;
pub(super) const CONFIG_COUNT_MAX: usize = 256;
pub(super) const CONFIGS_AT: usize = CONFIG_NAMES_AT + 4 * CONFIG_COUNT_MAX;
pub(super) const DEVICES_AT: usize = 4096;
pub(super) const DEVICE_BYTES: usize = 32;
pub(super) const DEVICE_COUNT: usize = 256;
/// Bytes of the header before the blobs.
pub(super) const HEADER_BYTES: usize = DEVICES_AT + DEVICE_COUNT * DEVICE_BYTES;
/// Proxmox writes at most 512 KiB.
pub(super) const HEADER_BYTES_MAX: usize = 8 << 20;
const _: () = assert!(CONFIGS_AT + 4 * CONFIG_COUNT_MAX + 4 == DEVICES_AT && HEADER_BYTES == 12288);

const EXTENT_MAGIC: [u8; 4] = *b"VMAE";
pub(super) const EXTENT_BYTES: usize = 512;
pub(super) const EXTENT_BLOCK_COUNT_AT: usize = 6;
pub(super) const EXTENT_MD5_AT: usize = 24;
const EXTENT_CLUSTERS_AT: usize = 40;
pub(super) const EXTENT_CLUSTER_COUNT: usize = 59;
const _: () = assert!(EXTENT_CLUSTERS_AT + 8 * EXTENT_CLUSTER_COUNT == EXTENT_BYTES);

/// The unit of a device that is stored or left out as a whole.
pub(super) const BLOCK_BYTES: u64 = 4096;
pub(super) const CLUSTER_BYTES: u64 = 16 * BLOCK_BYTES;
/// Limited by the 32-bit numbers of clusters.
pub(super) const DEVICE_BYTES_MAX: u64 = CLUSTER_BYTES << 32;
/// The name of the device with the machine's memory.
pub(super) const MEMORY_NAME: &str = "vmstate";
const PROXMOX_NAME: &str = "qemu-server.conf";

pub(super) struct VmaHeader {
    pub(super) uuid: [u8; 16],
    pub(super) documents: Vec<Document>,
    pub(super) devices: Vec<VmaDevice>,
}

pub(super) struct VmaDevice {
    /// The number by which clusters refer to it.
    pub(super) number: u8,
    pub(super) name: String,
    pub(super) size_bytes: u64,
}

/// The length of a whole header, by its first [`HEADER_BYTES`].
pub(super) fn header_bytes(start: &[u8]) -> Result<usize> {
    let magic: [u8; 4] = array(start, 0);
    if magic != MAGIC {
        return Err(corrupt(
            "header",
            0,
            format!("a VMA begins with \"VMA\\0\", and this with {magic:?}"),
        ));
    }
    let version = be_u32(start, VERSION_AT);
    if version != VERSION {
        return Err(Error::Unsupported {
            feature: format!("version {version} of the VMA format"),
            detail: format!("version {VERSION} is known"),
        });
    }
    let size = to_usize(be_u32(start, HEADER_SIZE_AT));
    if !(HEADER_BYTES..=HEADER_BYTES_MAX).contains(&size) {
        let detail = format!("it claims to have {size} bytes; {HEADER_BYTES} to {HEADER_BYTES_MAX} make sense");
        return Err(corrupt("header", at(HEADER_SIZE_AT), detail));
    }
    Ok(size)
}

impl VmaHeader {
    /// Parses a whole header, whose length is [`header_bytes`].
    pub(super) fn parse(bytes: &[u8]) -> Result<Self> {
        check_md5(bytes, MD5_AT, "header", 0)?;
        let blobs = Blobs::new(bytes)?;
        let mut devices: Vec<VmaDevice> = Vec::new();
        for number in 1..=u8::MAX {
            let place = DEVICES_AT + usize::from(number) * DEVICE_BYTES;
            let (name, size_bytes) = (be_u32(bytes, place), u64::from_be_bytes(array(bytes, place + 8)));
            // Proxmox ignores devices without a name or a size, too.
            if name == 0 || size_bytes == 0 {
                continue;
            }
            let name = blobs.name(name, place)?;
            if size_bytes > DEVICE_BYTES_MAX {
                let detail = format!("{name} claims to have {size_bytes} bytes; the format allows {DEVICE_BYTES_MAX}");
                return Err(corrupt("device", at(place), detail));
            }
            if devices.iter().any(|device| device.name == name) {
                return Err(corrupt("device", at(place), format!("{name} is there twice")));
            }
            devices.push(VmaDevice {
                number,
                name,
                size_bytes,
            });
        }
        let mut documents = Vec::new();
        for place in (0..CONFIG_COUNT_MAX).map(|number| CONFIG_NAMES_AT + 4 * number) {
            let (name, content) = (
                be_u32(bytes, place),
                be_u32(bytes, place + CONFIGS_AT - CONFIG_NAMES_AT),
            );
            if name == 0 || content == 0 {
                continue;
            }
            let name = blobs.name(name, place)?;
            documents.push(Document {
                kind: if name == PROXMOX_NAME {
                    DocumentKind::Proxmox
                } else {
                    DocumentKind::Other
                },
                name,
                content: blobs.get(content, place)?.to_vec(),
            });
        }
        Ok(Self {
            uuid: array(bytes, UUID_AT),
            documents,
            devices,
        })
    }
}

/// Names and texts after a header.
struct Blobs<'a>(&'a [u8]);

impl<'a> Blobs<'a> {
    fn new(header: &'a [u8]) -> Result<Self> {
        let start = to_usize(be_u32(header, BLOBS_OFFSET_AT));
        let end = start.checked_add(to_usize(be_u32(header, BLOBS_SIZE_AT)));
        let blobs = end.and_then(|end| header.get(start..end));
        let blobs = blobs.filter(|_| start >= HEADER_BYTES).ok_or_else(|| {
            let detail = format!("they are at {start} to {end:?} of {} bytes", header.len());
            corrupt("place of the blobs", at(BLOBS_OFFSET_AT), detail)
        })?;
        Ok(Self(blobs))
    }

    /// The blob at `place`; `named_at` is the offset of that number in the header, for errors.
    fn get(&self, place: u32, named_at: usize) -> Result<&'a [u8]> {
        let rest = self.0.get(to_usize(place)..);
        let blob = rest.and_then(|rest| {
            let (length, rest) = rest.split_first_chunk()?;
            rest.get(..usize::from(u16::from_le_bytes(*length)))
        });
        blob.ok_or_else(|| {
            let detail = format!("it is at {place} of {} bytes, or reaches beyond them", self.0.len());
            corrupt("place of a blob", at(named_at), detail)
        })
    }

    fn name(&self, place: u32, named_at: usize) -> Result<String> {
        let blob = self.get(place, named_at)?;
        let name = blob.strip_suffix(b"\0").and_then(|name| std::str::from_utf8(name).ok());
        let name = name.filter(|name| is_name(name));
        name.map(ToOwned::to_owned)
            .ok_or_else(|| corrupt("name", at(named_at), "it is no name with a zero byte at its end"))
    }
}

/// Builds a header with these configurations and devices with their sizes; devices are numbered from 1.
///
/// # Errors
/// [`Error::InvalidOption`]: a configuration exceeds the limits of the format.
pub(super) fn write_header(
    uuid: &[u8; 16],
    time: u64,
    config: &[(String, Vec<u8>)],
    devices: &[(&str, u64)],
) -> Result<Vec<u8>> {
    if config.len() > CONFIG_COUNT_MAX {
        let detail = format!("there are {}; at most {CONFIG_COUNT_MAX} have a place", config.len());
        return Err(refuse(detail));
    }
    let mut header = vec![0; HEADER_BYTES];
    let mut blobs = NewBlobs(vec![0]);
    for (number, (name, content)) in config.iter().enumerate() {
        let place = CONFIG_NAMES_AT + 4 * number;
        put(&mut header, place, &blobs.add_name(name)?);
        put(
            &mut header,
            place + CONFIGS_AT - CONFIG_NAMES_AT,
            &blobs.add(name, content)?,
        );
    }
    for ((name, size_bytes), number) in devices.iter().zip(1..DEVICE_COUNT) {
        let place = DEVICES_AT + number * DEVICE_BYTES;
        put(&mut header, place, &blobs.add_name(name)?);
        put(&mut header, place + 8, &size_bytes.to_be_bytes());
    }
    let mut blobs = blobs.0;
    let blobs_bytes = blobs.len();
    blobs.resize(blobs_bytes.next_multiple_of(EXTENT_BYTES), 0);
    let size = HEADER_BYTES + blobs.len();
    if size > HEADER_BYTES_MAX {
        return Err(refuse(format!(
            "the header has {size} bytes; at most {HEADER_BYTES_MAX} make sense"
        )));
    }
    put(&mut header, 0, &MAGIC);
    put(&mut header, VERSION_AT, &VERSION.to_be_bytes());
    put(&mut header, UUID_AT, uuid);
    put(&mut header, TIME_AT, &time.to_be_bytes());
    for (place, number) in [
        (BLOBS_OFFSET_AT, HEADER_BYTES),
        (BLOBS_SIZE_AT, blobs_bytes),
        (HEADER_SIZE_AT, size),
    ] {
        put(
            &mut header,
            place,
            &u32::try_from(number).unwrap_or(u32::MAX).to_be_bytes(),
        );
    }
    header.extend(blobs);
    let md5 = md5_without(&header, MD5_AT);
    put(&mut header, MD5_AT, &md5);
    Ok(header)
}

/// Names and texts to write after a header. Offset 0 means none, so the first byte is unused.
struct NewBlobs(Vec<u8>);

impl NewBlobs {
    /// Appends a text, called `name` in errors; returns its encoded offset.
    fn add(&mut self, name: &str, content: &[u8]) -> Result<[u8; 4]> {
        let place = u32::try_from(self.0.len()).ok();
        let Some((place, length)) = place.zip(u16::try_from(content.len()).ok()) else {
            let detail = format!(
                "{name:?} has {} bytes; at most {} have a place",
                content.len(),
                u16::MAX
            );
            return Err(refuse(detail));
        };
        self.0.extend(length.to_le_bytes());
        self.0.extend(content);
        Ok(place.to_be_bytes())
    }

    fn add_name(&mut self, name: &str) -> Result<[u8; 4]> {
        if !is_name(name) {
            return Err(refuse(format!("{name:?} is no name")));
        }
        self.add(name, &[name.as_bytes(), b"\0"].concat())
    }
}

/// Whether `name` is a plain file name: configurations are extracted to files of these names.
fn is_name(name: &str) -> bool {
    !name.is_empty() && !name.chars().any(|char| char.is_control() || char == '/')
}

fn refuse(detail: String) -> Error {
    Error::InvalidOption {
        option: "configuration of a VMA",
        detail,
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ClusterInfo {
    pub(super) device: u8,
    pub(super) cluster: u32,
    /// The stored blocks, the first in the lowest bit.
    pub(super) mask: u16,
}

impl ClusterInfo {
    /// Its offset in its device.
    pub(super) fn offset(self) -> u64 {
        u64::from(self.cluster) * CLUSTER_BYTES
    }

    /// Number of its stored bytes.
    pub(super) fn stored_bytes(self) -> usize {
        holdfast_block::to_usize(u64::from(self.mask.count_ones()) * BLOCK_BYTES)
    }
}

/// Reads the header of an extent that begins at `offset`.
pub(super) fn parse_extent(bytes: &[u8; EXTENT_BYTES], uuid: &[u8; 16], offset: u64) -> Result<Vec<ClusterInfo>> {
    let magic: [u8; 4] = array(bytes, 0);
    if magic != EXTENT_MAGIC {
        let detail = format!("an extent begins with \"VMAE\", and this with {magic:?}");
        return Err(corrupt("extent", offset, detail));
    }
    check_md5(bytes, EXTENT_MD5_AT, "extent", offset)?;
    if array::<16>(bytes, UUID_AT) != *uuid {
        return Err(corrupt(
            "extent",
            offset,
            "it is of another archive: its UUID is not that of the header",
        ));
    }
    let infos = (0..EXTENT_CLUSTER_COUNT).map(|number| {
        let [mask_high, mask_low, _, device, cluster @ ..] = array::<8>(bytes, EXTENT_CLUSTERS_AT + 8 * number);
        ClusterInfo {
            device,
            cluster: u32::from_be_bytes(cluster),
            mask: u16::from_be_bytes([mask_high, mask_low]),
        }
    });
    let infos: Vec<ClusterInfo> = infos.filter(|info| info.device != 0).collect();
    let expected: u32 = infos.iter().map(|info| info.mask.count_ones()).sum();
    let block_count = u16::from_be_bytes(array(bytes, EXTENT_BLOCK_COUNT_AT));
    if u32::from(block_count) != expected {
        let detail = format!("it has {block_count} blocks, and its clusters have {expected}");
        return Err(corrupt("extent", offset, detail));
    }
    Ok(infos)
}

/// Builds the header of an extent with these clusters, at most [`EXTENT_CLUSTER_COUNT`].
pub(super) fn write_extent(uuid: &[u8; 16], infos: &[ClusterInfo]) -> [u8; EXTENT_BYTES] {
    let mut header = [0; EXTENT_BYTES];
    put(&mut header, 0, &EXTENT_MAGIC);
    let block_count: u32 = infos.iter().map(|info| info.mask.count_ones()).sum();
    put(
        &mut header,
        EXTENT_BLOCK_COUNT_AT,
        &u16::try_from(block_count).unwrap_or(u16::MAX).to_be_bytes(),
    );
    put(&mut header, UUID_AT, uuid);
    for (place, info) in header.split_at_mut(EXTENT_CLUSTERS_AT).1.chunks_exact_mut(8).zip(infos) {
        put(place, 0, &info.mask.to_be_bytes());
        put(place, 3, &[info.device]);
        put(place, 4, &info.cluster.to_be_bytes());
    }
    let md5 = md5_without(&header, EXTENT_MD5_AT);
    put(&mut header, EXTENT_MD5_AT, &md5);
    header
}

fn check_md5(bytes: &[u8], md5_at: usize, what: &'static str, offset: u64) -> Result<()> {
    if md5_without(bytes, md5_at) == array::<MD5_BYTES>(bytes, md5_at) {
        Ok(())
    } else {
        Err(corrupt(what, offset, "its MD5 is not the one that it carries"))
    }
}

/// MD5 of `bytes`, with the bytes at `md5_at` as zeroes.
pub(super) fn md5_without(bytes: &[u8], md5_at: usize) -> [u8; MD5_BYTES] {
    let mut md5 = Md5::new();
    md5.update(bytes.get(..md5_at).unwrap_or_default());
    md5.update([0; MD5_BYTES]);
    md5.update(bytes.get(md5_at + MD5_BYTES..).unwrap_or_default());
    md5.finalize().into()
}

fn be_u32(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(array(bytes, at))
}

/// The bytes at an offset before the blobs, which every header has.
fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let found = bytes.get(at..).and_then(|rest| rest.first_chunk());
    *found.expect("headers are read as a whole")
}

/// Writes bytes at an offset of a new header.
#[expect(clippy::indexing_slicing, reason = "the places are constants of the format")]
pub(super) fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    bytes[at..at + value.len()].copy_from_slice(value);
}

/// An offset in the header as an offset in the archive.
fn at(place: usize) -> u64 {
    place as u64
}

fn to_usize(number: u32) -> usize {
    holdfast_block::to_usize(number.into())
}
