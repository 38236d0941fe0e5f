//! INQUIRY: standard data, and the pages of vital product data (SPC-4 sections 6.6 and 7.8, SBC-3 section 6.6).

use super::cdb::Cdb;
use super::reply::truncated;
use super::sense::{Failure, Sense};
use super::unit::{LogicalUnit, TRANSFER_BYTES_MAX};

/// Vendor and product, padded to the length of their fields.
const VENDOR: &[u8; 8] = b"HOLDFAST";
const PRODUCT: &[u8; 16] = b"VIRTUAL DISK    ";
const REVISION: &[u8; 4] = b"0001";

const SUPPORTED_PAGES: u8 = 0x00;
const SERIAL_NUMBER: u8 = 0x80;
const IDENTIFICATION: u8 = 0x83;
const BLOCK_LIMITS: u8 = 0xb0;
const CHARACTERISTICS: u8 = 0xb1;
const PROVISIONING: u8 = 0xb2;
/// In ascending order, as the standard wants it.
const PAGES: [u8; 6] = [
    SUPPORTED_PAGES,
    SERIAL_NUMBER,
    IDENTIFICATION,
    BLOCK_LIMITS,
    CHARACTERISTICS,
    PROVISIONING,
];

/// Longest range of WRITE SAME: it is written as data if it is not zero.
pub(super) const WRITE_SAME_BYTES_MAX: u64 = TRANSFER_BYTES_MAX;
/// Blocks that COMPARE AND WRITE can compare: its field has one byte.
const COMPARE_BLOCK_COUNT_MAX: u8 = 255;
/// Ranges of one UNMAP.
pub(super) const UNMAP_DESCRIPTOR_COUNT_MAX: u32 = 1024;
/// Longest serial number in the identification page.
const SERIAL_BYTES_MAX: usize = 64;

/// The names of a unit's place: they become part of its identification.
#[derive(Debug, Clone, Copy)]
pub(crate) struct UnitPlace<'a> {
    pub(crate) target_name: &'a str,
    pub(crate) portal_group: u16,
}

/// INQUIRY to a logical unit, or to a number without one.
pub(super) fn inquiry(unit: Option<&LogicalUnit>, place: UnitPlace<'_>, cdb: &Cdb) -> Result<Vec<u8>, Failure> {
    let has_page = cdb.byte(1) & 1 != 0;
    let page = cdb.byte(2);
    if cdb.byte(1) & !1 != 0 || (!has_page && page != 0) {
        return Err(Sense::INVALID_FIELD_IN_CDB.into());
    }
    let data = match (has_page, unit) {
        (false, _) => standard(unit.is_some()),
        (true, None) => return Err(Sense::UNIT_NOT_SUPPORTED.into()),
        (true, Some(unit)) => vital_product_data(unit, place, page)?,
    };
    Ok(truncated(data, usize::from(cdb.u16(3))))
}

fn standard(is_there: bool) -> Vec<u8> {
    // "The device server is not capable of supporting a peripheral device on this logical unit."
    let peripheral = if is_there { 0x00 } else { 0x7f };
    // SPC-4; response data format 2 with hierarchical LUNs; command queuing.
    let mut data = vec![peripheral, 0, 0x06, 0x12, 91, 0, 0, 0x02];
    data.extend(VENDOR);
    data.extend(PRODUCT);
    data.extend(REVISION);
    data.resize(58, 0);
    // Version descriptors: SAM-5, iSCSI, SPC-4, SBC-3.
    for version in [0x00a0_u16, 0x0960, 0x0460, 0x04c0] {
        data.extend(version.to_be_bytes());
    }
    data.resize(96, 0);
    data
}

fn vital_product_data(unit: &LogicalUnit, place: UnitPlace<'_>, page: u8) -> Result<Vec<u8>, Failure> {
    let body = match page {
        SUPPORTED_PAGES => PAGES.to_vec(),
        SERIAL_NUMBER => unit.options.serial.as_bytes().to_vec(),
        IDENTIFICATION => identification(unit, place),
        BLOCK_LIMITS => block_limits(unit),
        CHARACTERISTICS => {
            let mut body = vec![0; 60];
            // "Non-rotating medium": nothing is gained by sorting requests.
            if let Some(rotation) = body.first_chunk_mut() {
                *rotation = 1_u16.to_be_bytes();
            }
            body
        }
        PROVISIONING => provisioning(unit),
        _ => return Err(Sense::INVALID_FIELD_IN_CDB.into()),
    };
    let length = u16::try_from(body.len()).unwrap_or(u16::MAX);
    let mut data = vec![0, page];
    data.extend(length.to_be_bytes());
    data.extend(body);
    Ok(data)
}

/// Designators of the unit, of its port and of its target.
fn identification(unit: &LogicalUnit, place: UnitPlace<'_>) -> Vec<u8> {
    const BINARY: u8 = 0x01;
    // The protocol identifier of iSCSI is valid for ports and targets.
    const ISCSI_BINARY: u8 = 0x51;
    const ISCSI_TEXT: u8 = 0x53;
    let serial = unit.options.serial.as_bytes();
    let serial = serial.get(..serial.len().min(SERIAL_BYTES_MAX)).unwrap_or(serial);
    let mut body = Vec::new();
    // Code set, association and type, and the identifier.
    let mut designator = |set: u8, kind: u8, identifier: &[u8]| {
        body.extend([set, kind, 0, u8::try_from(identifier.len()).unwrap_or(u8::MAX)]);
        body.extend(identifier);
    };
    designator(BINARY, 0x03, &naa(serial));
    designator(0x02, 0x01, &[VENDOR, serial].concat());
    designator(ISCSI_BINARY, 0x94, &[0, 0, 0, 1]);
    designator(ISCSI_BINARY, 0x95, &[0, 0, 0, 1]);
    let port = format!("{},t,0x{:04x}", place.target_name, place.portal_group);
    designator(ISCSI_TEXT, 0x98, &name_string(&port));
    designator(ISCSI_TEXT, 0xa8, &name_string(place.target_name));
    body
}

/// A locally assigned identifier: 60 bits of a hash of the serial number.
fn naa(serial: &[u8]) -> [u8; 8] {
    let digest = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, serial);
    let mut id = digest.as_ref().first_chunk().copied().unwrap_or([0; 8]);
    id[0] = 0x30 | id[0] & 0x0f;
    id
}

/// A SCSI name string: ends with zeros, to a multiple of four bytes.
fn name_string(name: &str) -> Vec<u8> {
    let mut name = name.as_bytes().to_vec();
    name.push(0);
    name.resize(name.len().next_multiple_of(4), 0);
    name
}

fn block_limits(unit: &LogicalUnit) -> Vec<u8> {
    let blocks = |bytes: u64| u32::try_from(bytes / unit.block_bytes()).unwrap_or(u32::MAX);
    let preferred = u64::from(unit.device.reader().block_size_bytes()).clamp(4096, TRANSFER_BYTES_MAX);
    let is_thin = !unit.is_read_only();
    // WRITE SAME needs a number of blocks: without one it could take any time.
    let mut body = vec![1, COMPARE_BLOCK_COUNT_MAX];
    let granularity = u64::from(unit.physical_block_bytes()) / unit.block_bytes();
    body.extend(u16::try_from(granularity).unwrap_or(1).to_be_bytes());
    body.extend(blocks(TRANSFER_BYTES_MAX).to_be_bytes());
    body.extend(blocks((1 << 20).max(preferred)).to_be_bytes());
    body.extend(0_u32.to_be_bytes());
    body.extend(if is_thin { u32::MAX } else { 0 }.to_be_bytes());
    body.extend(if is_thin { UNMAP_DESCRIPTOR_COUNT_MAX } else { 0 }.to_be_bytes());
    body.extend(blocks(preferred).to_be_bytes());
    // The alignment is valid: 0.
    body.extend(0x8000_0000_u32.to_be_bytes());
    body.extend(u64::from(blocks(WRITE_SAME_BYTES_MAX)).to_be_bytes());
    body.resize(60, 0);
    body
}

fn provisioning(unit: &LogicalUnit) -> Vec<u8> {
    // UNMAP, and WRITE SAME (16) and (10) with their UNMAP bit; unmapped blocks read as zero. The unit is thin.
    if unit.is_read_only() {
        vec![0, 0, 0, 0]
    } else {
        vec![0, 0xe4, 2, 0]
    }
}
