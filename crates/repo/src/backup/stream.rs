//! Converts a stream into a map, with content-defined chunks at any byte.
//!
//! The cut points are those of FastCDC (Xia et al., USENIX ATC 2016 and the 2020 revision, in the crate `fastcdc`),
//! seeded by the repository's key, so that chunk lengths reveal nothing about the content. They are part of the format.

use std::io::Read;

use fastcdc::v2020::{FastCDC, Normalization};

use super::Session;
use super::parent::ParentMap;
use crate::error::{Error, Result};
use crate::format::chunker::CHUNK_BYTES_MAX;
use crate::format::fingerprint::is_zero;
use crate::format::manifest::DiskStatistics;
use crate::format::map::{MapWriter, PageRef, Piece, PieceContent, Unit};
use crate::format::pack::ChunkEntry;

const CHUNK_BYTES_MIN: usize = 16 << 10;
const CHUNK_BYTES_AVERAGE: usize = 64 << 10;
const CHUNK_LENGTH_MAX: usize = holdfast_block::to_usize(CHUNK_BYTES_MAX);

/// The result of backing up a stream.
pub(crate) struct StreamResult {
    pub(crate) root: Option<PageRef>,
    pub(crate) size_bytes: u64,
    pub(crate) statistics: DiskStatistics,
}

/// Backs up the whole of `stream`.
pub(crate) fn back_up_stream(
    session: &mut Session<'_>,
    name: &str,
    stream: &mut dyn Read,
    parent: Option<ParentMap>,
) -> Result<StreamResult> {
    let packs = std::sync::Arc::clone(&session.packs);
    let mut shared_pages = parent.map(|parent| parent.reader(&packs, Unit::Byte));
    let mut map = MapWriter::new(Unit::Byte);
    let mut statistics = DiskStatistics::default();
    let mut buffer = StreamBuffer::new(session.keys.cut_seed());
    while let Some(chunk) = buffer.next_chunk(name, stream)? {
        session.check_cancelled()?;
        let length = chunk.len() as u64;
        statistics.read_bytes += length;
        let content = if is_zero(chunk) {
            statistics.zero_bytes += length;
            PieceContent::Zero
        } else {
            let id = session.keys.chunk_of_stream(chunk);
            let length = u32::try_from(length).expect("a chunk is at most half a mebibyte");
            session.stream.push(chunk, &[], &mut session.output)?;
            PieceContent::Data(session.store_stream_chunk(ChunkEntry { id, length }, &mut statistics)?)
        };
        map.push(Piece { length, content }, &mut shared_pages, &mut session.page_sink())?;
        session.advance(length);
    }
    let size_bytes = map.position();
    let root = map.finish(&mut shared_pages, &mut session.page_sink())?;
    Ok(StreamResult {
        root,
        size_bytes,
        statistics,
    })
}

/// A buffer that reads ahead far enough to find the end of a chunk.
struct StreamBuffer {
    bytes: Vec<u8>,
    start: usize,
    seed: u64,
    ended: bool,
}

impl StreamBuffer {
    fn new(seed: u64) -> Self {
        Self {
            bytes: Vec::new(),
            start: 0,
            seed,
            ended: false,
        }
    }

    /// The next chunk; `None` at the end of the stream.
    fn next_chunk(&mut self, name: &str, stream: &mut dyn Read) -> Result<Option<&[u8]>> {
        if !self.ended && self.bytes.len() - self.start < CHUNK_LENGTH_MAX {
            self.fill(name, stream)?;
        }
        let waiting = &self.bytes[self.start..];
        if waiting.is_empty() {
            return Ok(None);
        }
        let level = Normalization::Level1;
        let cutter = FastCDC::with_level_and_seed(
            waiting,
            CHUNK_BYTES_MIN,
            CHUNK_BYTES_AVERAGE,
            CHUNK_LENGTH_MAX,
            level,
            self.seed,
        );
        let (_, end) = cutter.cut(0, waiting.len());
        let chunk = self.start..self.start + end;
        self.start = chunk.end;
        Ok(Some(&self.bytes[chunk]))
    }

    fn fill(&mut self, name: &str, stream: &mut dyn Read) -> Result<()> {
        const READ_LENGTH: usize = 4 * CHUNK_LENGTH_MAX;
        self.bytes.drain(..self.start);
        self.start = 0;
        let wanted = READ_LENGTH - self.bytes.len();
        let read = stream
            .take(wanted as u64)
            .read_to_end(&mut self.bytes)
            .map_err(|source| Error::Stream {
                name: name.to_owned(),
                source,
            })?;
        self.ended = read < wanted;
        Ok(())
    }
}
