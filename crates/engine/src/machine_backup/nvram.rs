//! The firmware's variables, which belong to the instant.

use std::io::Read as _;

use holdfast_host::Description;

use crate::error::{Error, Result};

/// Bytes of a file with firmware variables, at most.
const NVRAM_BYTES_MAX: u64 = 64 << 20;

/// The variables of a machine's firmware, where it has any.
pub(super) fn read(description: &Description) -> Result<Option<Vec<u8>>> {
    let Some(path) = &description.nvram else {
        return Ok(None);
    };
    let failed = |source| Error::File {
        action: "read",
        path: path.clone(),
        source,
    };
    let file = match std::fs::File::open(path) {
        // A machine that never ran has none yet.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        other => other.map_err(failed)?,
    };
    let mut bytes = Vec::new();
    file.take(NVRAM_BYTES_MAX).read_to_end(&mut bytes).map_err(failed)?;
    Ok(Some(bytes))
}
