//! The memory in a snapshot, in the form that QEMU reads.

use std::io::{BufWriter, Write};
use std::path::Path;

use holdfast_block::BlockDevice;
use holdfast_host::qemu::memory::{AssembleError, MemoryState, assemble};
use holdfast_repo::{Environment, Manifest, Repository};

use super::dry_run::CountedBytes;
use super::small_stream::bytes_of;
use super::target::RestoredDisk;
use crate::files::atomic_file::{Existing, NewFile};
use crate::job::{Error, Job, Result};
use crate::notes::{STREAM_MEMORY, STREAM_MEMORY_STATE, is_memory};

/// The file name of the memory beside disks that were restored to a folder.
pub(crate) const MEMORY_STREAM: &str = "memory.qemu";
const BUFFER_BYTES: usize = 1 << 20;

/// The memory pages and the device state of a machine.
pub(crate) struct StoredMemory<'r> {
    state: MemoryState,
    pages: Box<dyn BlockDevice + 'r>,
}

impl<'r> StoredMemory<'r> {
    /// The memory of a snapshot; none if the snapshot has no memory, or only its pages.
    pub(crate) fn open(repository: &'r Repository, snapshot: &Manifest) -> Result<Option<Self>> {
        let record = |name| snapshot.disks.iter().find(|record| record.name == name);
        let (Some(pages), Some(state)) = (
            record(STREAM_MEMORY).filter(|pages| is_memory(pages)),
            record(STREAM_MEMORY_STATE),
        ) else {
            return Ok(None);
        };
        let state = MemoryState::decode(&bytes_of(repository, state)?).map_err(|source| Error::MemoryState {
            machine: snapshot.machine.clone(),
            source,
        })?;
        Ok(Some(Self {
            state,
            pages: Box::new(repository.device_checking_prints(pages)),
        }))
    }

    /// Writes the stream that QEMU reads with `-incoming`.
    pub(crate) fn write(&self, output: &mut dyn Write) -> std::io::Result<()> {
        assemble(&self.state, &*self.pages, output).map_err(|error| match error {
            AssembleError::Output(source) => source,
            other => std::io::Error::other(other),
        })
    }

    /// Writes the stream to a file, which gets its final name when it is complete and durable.
    pub(crate) fn to_file(
        &self,
        path: &Path,
        existing: Existing,
        environment: &Environment,
        job: Job<'_>,
    ) -> Result<RestoredDisk> {
        let new = NewFile::begin(path, existing, environment)?;
        new.report_cleared(job.progress);
        let write = || -> std::io::Result<u64> {
            // Memory may contain secrets: only the owner may read the file.
            let file = new.create_private()?;
            let mut output = BufWriter::with_capacity(BUFFER_BYTES, &file);
            self.write(&mut output)?;
            output.flush()?;
            drop(output);
            file.sync_all()?;
            Ok(file.metadata()?.len())
        };
        let written_bytes = write().map_err(|source| Error::File {
            action: "write",
            path: path.to_owned(),
            source,
        })?;
        new.finish()?;
        Ok(self.restored(path, written_bytes, job))
    }

    /// Counts what [`StoredMemory::to_file`] would write.
    pub(crate) fn to_nothing(&self, path: &Path, job: Job<'_>) -> Result<RestoredDisk> {
        let mut written = CountedBytes::default();
        self.write(&mut written).map_err(|source| Error::File {
            action: "write",
            path: path.to_owned(),
            source,
        })?;
        Ok(self.restored(path, written.0, job))
    }

    fn restored(&self, path: &Path, written_bytes: u64, job: Job<'_>) -> RestoredDisk {
        job.progress.advance(self.state.size_bytes());
        RestoredDisk {
            name: STREAM_MEMORY.to_owned(),
            target: Some(path.to_owned()),
            size_bytes: self.state.size_bytes(),
            written_bytes,
            equal_bytes: 0,
            zero_bytes: 0,
        }
    }
}
