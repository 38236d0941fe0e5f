//! The parts of a point in time besides the disks, which become streams of the snapshot.

use std::collections::BTreeMap;

use holdfast_block::{BlockDevice, Clock};
use holdfast_host::qemu::memory::Memory;
use holdfast_host::{Description, Rights};

use super::tpm::{TpmFound, TpmState};
use super::{nvram, tpm};
use crate::job::{Progress, Result};
use crate::notes::{NOTE_KIND, STREAM_MEMORY, STREAM_MEMORY_STATE, STREAM_NVRAM, STREAM_TPM};
use holdfast_repo::{Source, SourceData};

/// The parts of a point in time besides the disks.
pub(crate) struct SavedState<'a> {
    nvram: Option<Vec<u8>>,
    tpm: Option<TpmState>,
    pub(crate) memory: Option<&'a Memory>,
}

/// The files that are read while the machine is paused.
#[derive(Default)]
pub(crate) struct FirmwareState {
    nvram: Option<Vec<u8>>,
    tpm: TpmFound,
}

impl FirmwareState {
    /// Reads them with the rights of the user who controls their paths.
    pub(crate) fn read(description: &Description, rights: &Rights, clock: &dyn Clock) -> Result<Self> {
        Ok(Self {
            nvram: nvram::read(description, rights)?,
            tpm: tpm::read(description, rights, clock),
        })
    }

    /// Adds the memory of the same point in time; warns about missing parts.
    pub(crate) fn rest<'m>(self, memory: Option<&'m Memory>, progress: &dyn Progress) -> SavedState<'m> {
        SavedState {
            nvram: self.nvram,
            tpm: self.tpm.or_warn(progress),
            memory,
        }
    }
}

/// A small stream that is stored as a whole.
pub(crate) struct Stream {
    pub(crate) name: String,
    pub(crate) bytes: Vec<u8>,
    pub(crate) notes: BTreeMap<String, String>,
}

impl Stream {
    fn new(name: &str, bytes: Vec<u8>) -> Self {
        Self {
            name: name.to_owned(),
            bytes,
            notes: BTreeMap::new(),
        }
    }
}

impl SavedState<'_> {
    /// All streams; those of the machine's configuration come first.
    pub(crate) fn streams(self, configuration: &[(String, Vec<u8>)]) -> Vec<Stream> {
        let configuration = configuration.iter();
        let mut streams: Vec<Stream> = configuration
            .map(|(name, bytes)| Stream::new(name, bytes.clone()))
            .collect();
        streams.extend(self.nvram.map(|bytes| Stream::new(STREAM_NVRAM, bytes)));
        streams.extend(self.tpm.map(|state| Stream {
            notes: state.notes,
            ..Stream::new(STREAM_TPM, state.bytes)
        }));
        streams.extend(
            self.memory
                .map(|(state, _)| Stream::new(STREAM_MEMORY_STATE, state.encode())),
        );
        streams
    }
}

/// Memory and streams in the form that the repository stores.
pub(crate) fn sources_of<'s, D: BlockDevice>(
    memory: Option<&'s D>,
    streams: &'s [Stream],
    readers: &'s mut [&[u8]],
) -> impl Iterator<Item = Source<'s>> {
    let memory = memory.map(|pages| Source {
        name: STREAM_MEMORY.to_owned(),
        data: SourceData::Disk(pages),
        notes: [(NOTE_KIND.to_owned(), STREAM_MEMORY.to_owned())].into(),
    });
    let streams = streams.iter().zip(readers).map(|(stream, bytes)| Source {
        name: stream.name.clone(),
        data: SourceData::Stream(bytes),
        notes: stream.notes.clone(),
    });
    memory.into_iter().chain(streams)
}
