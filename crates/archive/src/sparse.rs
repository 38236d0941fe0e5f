//! Sparse temporary files: `$TMPDIR` is often in memory.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;

/// The size of holes: the block size of file systems.
const BLOCK_BYTES: usize = 4096;

/// Writes `bytes` except blocks of zeroes: the file must have no data at this offset yet. Returns the number of bytes
/// written.
pub(crate) fn write_sparse_at(file: &File, bytes: &[u8], offset: u64) -> io::Result<u64> {
    let mut written = 0;
    let mut run: Option<(usize, usize)> = None;
    let mut flush = |run: Option<(usize, usize)>| -> io::Result<()> {
        let Some((start, end)) = run else { return Ok(()) };
        let data = bytes.get(start..end).unwrap_or_default();
        written += data.len() as u64;
        file.write_all_at(data, offset + start as u64)
    };
    for (number, block) in bytes.chunks(BLOCK_BYTES).enumerate() {
        let start = number * BLOCK_BYTES;
        if block.iter().all(|byte| *byte == 0) {
            flush(run.take())?;
        } else {
            run = Some((run.map_or(start, |(start, _)| start), start + block.len()));
        }
    }
    flush(run)?;
    Ok(written)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt as _;

    use super::{BLOCK_BYTES, write_sparse_at};

    #[test]
    fn zeroes_are_not_written() {
        let file = tempfile::tempfile().unwrap();
        let mut bytes = vec![0; 10 * BLOCK_BYTES + 100];
        bytes[BLOCK_BYTES] = 1;
        bytes[2 * BLOCK_BYTES + 5] = 2;
        bytes[10 * BLOCK_BYTES + 7] = 3;
        let written = write_sparse_at(&file, &bytes, 1000).unwrap();
        assert_eq!(written, 2 * BLOCK_BYTES as u64 + 100);
        let mut found = vec![9; bytes.len()];
        file.read_exact_at(&mut found, 1000).unwrap();
        assert_eq!(found, bytes);
        assert_eq!(write_sparse_at(&file, &[0; 10_000], 1 << 30).unwrap(), 0);
        assert!(file.metadata().unwrap().len() < 1 << 20);
    }
}
