//! Reads small streams into memory as a whole.

use holdfast_block::{BlockDevice as _, to_usize};
use holdfast_repo::{DiskRecord, Repository};

use crate::job::Result;
use crate::job::error::Refusal;
use crate::notes::STREAM_MEMORY_STATE;

/// The maximum size of a stream that is read into memory: configurations, firmware variables, TPM state.
const STREAM_BYTES_MAX: u64 = 64 << 20;
/// The same for the device state beside the memory pages: what a backup accepts, with overhead.
const MEMORY_STATE_BYTES_MAX: u64 = 576 << 20;

/// Reads a small stream; its whole content is verified.
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
