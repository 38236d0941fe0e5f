//! Streams that are read into memory as a whole.

use holdfast_block::{BlockDevice as _, to_usize};
use holdfast_repo::{DiskRecord, Repository};

use crate::job::Result;
use crate::job::error::Refusal;
use crate::notes::STREAM_MEMORY_STATE;

/// Bytes of a stream that is read into memory, at most: configurations, firmware variables, the state of a TPM.
const STREAM_BYTES_MAX: u64 = 64 << 20;
/// The same of the devices beside a memory's pages: what a backup takes of their state, with what belongs to it.
const MEMORY_STATE_BYTES_MAX: u64 = 576 << 20;

/// A small stream, whole; every byte of it is checked.
pub(crate) fn bytes_of(repository: &Repository, record: &DiskRecord) -> Result<Vec<u8>> {
    let size_bytes_max = if record.name == STREAM_MEMORY_STATE {
        MEMORY_STATE_BYTES_MAX
    } else {
        STREAM_BYTES_MAX
    };
    if record.size_bytes > size_bytes_max {
        return Err(Refusal::TooLarge {
            name: record.name.clone(),
            size_bytes: record.size_bytes,
            size_bytes_max,
        }
        .into());
    }
    let device = repository.device_checking_prints(record);
    let mut bytes = vec![0; to_usize(record.size_bytes)];
    device.read_at(&mut bytes, 0)?;
    Ok(bytes)
}
