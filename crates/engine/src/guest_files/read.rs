//! The bytes of one file to a stream.

use std::io::Write;

use holdfast_block::to_usize;
use holdfast_guest_files::{FilePiece, PIECE_BYTES_MAX};

use super::LocatedFiles;
use crate::job::error::GuestFilesError;
use crate::job::{Error, Job, Result, Unit};

static ZEROES: [u8; 64 << 10] = [0; 64 << 10];

/// Writes a regular file to `stream`; returns its length in bytes.
pub fn read_guest_file(files: &mut LocatedFiles, stream: &mut dyn Write, job: Job<'_>) -> Result<u64> {
    let failed = |volume: &str, path: &[Vec<u8>], source| GuestFilesError::Read {
        volume: volume.to_owned(),
        path: String::from_utf8_lossy(&super::walk::joined(path)).into_owned(),
        source,
    };
    let write = |stream: &mut dyn Write, bytes: &[u8]| {
        stream.write_all(bytes).map_err(|source| Error::File {
            action: "write",
            path: "/dev/stdout".into(),
            source,
        })
    };
    job.progress.phase("reading", Unit::Bytes);
    job.progress.total(files.found.metadata.size_bytes);
    let mut offset = 0;
    loop {
        job.interrupt.check()?;
        let piece = files.file_system.read_file(files.found.node, offset, PIECE_BYTES_MAX);
        let piece = piece.map_err(|error| failed(&files.volume, &files.found.names, error))?;
        let length = match piece {
            FilePiece::End => break,
            FilePiece::Data(bytes) => {
                write(stream, &bytes)?;
                bytes.len() as u64
            }
            FilePiece::Hole(length) => {
                let length = length.min(ZEROES.len() as u64);
                write(stream, &ZEROES[..to_usize(length)])?;
                length
            }
        };
        offset += length;
        job.progress.advance(length);
    }
    stream.flush().map_err(|source| Error::File {
        action: "write",
        path: "/dev/stdout".into(),
        source,
    })?;
    Ok(offset)
}
