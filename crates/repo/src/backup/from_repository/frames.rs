//! Reads frames of another repository: each once, by several threads, returned in order, and verified.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread::Scope;

use crossbeam_channel::{Receiver, Sender, bounded, unbounded};

use crate::error::{Error, Result};
use crate::format::fingerprint::{BLOCK_LENGTH, BlockHash, FingerprintKeys, PRINT_LENGTH, print_of};
use crate::format::pack::{ChunkEntry, FrameContent};
use crate::id::{ChunkId, PackId};
use crate::packing::{BufferPool, FREE_FRAME_COUNT_MAX};
use crate::read::frame_check::{Depth, check_frame};
use crate::repository::packs::{FrameBuffers, Packs};

/// A frame, and the requested chunks of it.
pub(crate) struct FrameRequest {
    pub(crate) pack: PackId,
    pub(crate) frame: u32,
    /// Bytes to read for it.
    pub(crate) stored_bytes: u64,
    /// Bytes of the disk that depend on it.
    pub(crate) disk_bytes: u64,
    /// The requested chunks.
    pub(crate) chunks: Vec<WantedChunk>,
}

/// A chunk of a frame.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WantedChunk {
    /// Offset in the frame.
    pub(crate) start: u32,
    pub(crate) length: u32,
    /// Its id in the source repository; `None` if the directory of its pack is lost, and only the frames are known.
    pub(crate) id: Option<ChunkId>,
}

/// A frame that was read and verified.
pub(crate) struct FetchedFrame {
    pub(crate) wish: FrameRequest,
    /// The frame before compression.
    pub(crate) raw: Vec<u8>,
    /// The requested chunks with their ids in the target, and the prints of their blocks.
    pub(crate) named: Vec<(ChunkEntry, Vec<u8>)>,
}

/// Reads frames, with the keys of their repository.
#[derive(Clone)]
pub(crate) struct FrameFetcher<'a> {
    /// The packs of the source.
    pub(crate) packs: Arc<Packs>,
    /// The keys for verification.
    pub(crate) keys: FingerprintKeys,
    /// The fingerprint keys of the target, if they are different.
    pub(crate) target_keys: Option<FingerprintKeys>,
    /// Called before bytes are read, to limit the rate.
    pub(crate) pace: &'a (dyn Fn(u64) + Sync),
}

impl FrameFetcher<'_> {
    fn fetch(&self, wish: FrameRequest, mut raw: Vec<u8>, buffers: &mut FrameBuffers) -> Result<FetchedFrame> {
        (self.pace)(wish.stored_bytes);
        let FrameRequest { pack, frame, .. } = wish;
        let reader = self.packs.frame_reader(pack)?;
        let prints = self.packs.prints(pack, frame)?;
        self.packs.frame(pack, frame, buffers, &mut raw)?;
        check_frame(&self.keys, &reader, frame, &raw, &prints, Depth::Identities)?;
        let is_blocks = reader.frame(frame)?.content == FrameContent::Blocks;
        let named = wish.chunks.iter().map(|&WantedChunk { start, length, id }| {
            let range = start as usize..start as usize + length as usize;
            match (&self.target_keys, id) {
                (Some(keys), _) => named(keys, &raw[range], is_blocks),
                (None, None) => named(&self.keys, &raw[range], is_blocks),
                (None, Some(id)) if is_blocks => {
                    let print = |at: usize| at / BLOCK_LENGTH * PRINT_LENGTH;
                    let prints = prints[print(range.start)..print(range.end)].to_vec();
                    (ChunkEntry { id, length }, prints)
                }
                (None, Some(id)) => (ChunkEntry { id, length }, Vec::new()),
            }
        });
        Ok(FetchedFrame {
            named: named.collect(),
            wish,
            raw,
        })
    }
}

/// The id of a chunk under `keys`, and the prints of its blocks.
fn named(keys: &FingerprintKeys, bytes: &[u8], is_blocks: bool) -> (ChunkEntry, Vec<u8>) {
    let length = u32::try_from(bytes.len()).expect("a chunk is at most half a mebibyte");
    if !is_blocks {
        let id = keys.chunk_of_stream(bytes);
        return (ChunkEntry { id, length }, Vec::new());
    }
    let mut hashes: Vec<BlockHash> = Vec::new();
    keys.hash_blocks(bytes, &mut hashes);
    let id = keys.chunk_of_blocks(&hashes);
    let prints = hashes.iter().flat_map(print_of).copied().collect();
    (ChunkEntry { id, length }, prints)
}

type Fetch = (usize, Result<FetchedFrame>);

/// The queue of frames that are being read.
pub(crate) struct FrameQueue<'a> {
    mode: FetchMode<'a>,
    pool: BufferPool,
}

enum FetchMode<'a> {
    Inline(Box<(FrameFetcher<'a>, FrameBuffers)>),
    Threads {
        requests: Sender<(usize, FrameRequest)>,
        fetched: Receiver<Fetch>,
        /// Maximum number of frames that are read ahead.
        look_ahead: usize,
    },
}

impl<'a> FrameQueue<'a> {
    /// A queue with `thread_count` readers in `scope`; without readers, the caller reads.
    pub(crate) fn new<'scope>(
        scope: &'scope Scope<'scope, 'a>,
        fetcher: FrameFetcher<'a>,
        thread_count: usize,
    ) -> Self {
        let pool = BufferPool::keeping(FREE_FRAME_COUNT_MAX);
        if thread_count == 0 {
            return Self {
                mode: FetchMode::Inline(Box::new((fetcher, FrameBuffers::new()))),
                pool,
            };
        }
        let look_ahead = thread_count + 1;
        let (requests, wish_queue) = bounded::<(usize, FrameRequest)>(look_ahead);
        let (send, fetched) = unbounded();
        for _ in 0..thread_count {
            let (wish_queue, send, pool) = (wish_queue.clone(), send.clone(), pool.clone());
            let fetcher = fetcher.clone();
            scope.spawn(move || {
                let mut buffers = FrameBuffers::new();
                for (number, wish) in wish_queue {
                    let frame = fetcher.fetch(wish, pool.take(), &mut buffers);
                    if send.send((number, frame)).is_err() {
                        return;
                    }
                }
            });
        }
        Self {
            mode: FetchMode::Threads {
                requests,
                fetched,
                look_ahead,
            },
            pool,
        }
    }

    /// Reads frames, and calls `take` with each in the order of the requests. The first error of either ends the work;
    /// frames in flight are dropped.
    pub(crate) fn fetch_all(
        &mut self,
        requests: Vec<FrameRequest>,
        take: &mut dyn FnMut(&FetchedFrame) -> Result<()>,
    ) -> Result<()> {
        let pool = &self.pool;
        let mut taken = |frame: FetchedFrame| -> Result<()> {
            take(&frame)?;
            pool.give(frame.raw);
            Ok(())
        };
        match &mut self.mode {
            FetchMode::Inline(inline) => {
                let (fetcher, buffers) = &mut **inline;
                requests
                    .into_iter()
                    .try_for_each(|wish| taken(fetcher.fetch(wish, pool.take(), buffers)?))
            }
            FetchMode::Threads {
                requests: send,
                fetched,
                look_ahead,
            } => {
                let mut early: BTreeMap<usize, Result<FetchedFrame>> = BTreeMap::new();
                let mut waiting = requests.into_iter().enumerate();
                let count = waiting.len();
                let (mut sent, mut next) = (0, 0);
                let result = (|| {
                    while next < count {
                        while sent < next + *look_ahead
                            && let Some(wish) = waiting.next()
                        {
                            send.send(wish).map_err(|_| Error::Cancelled)?;
                            sent += 1;
                        }
                        let (number, frame) = fetched.recv().map_err(|_| Error::Cancelled)?;
                        early.insert(number, frame);
                        while let Some(frame) = early.remove(&next) {
                            next += 1;
                            taken(frame?)?;
                        }
                    }
                    Ok(())
                })();
                // After an error, frames in flight must not be returned for later requests.
                let mut left = sent - next - early.len();
                while result.is_err() && left > 0 && fetched.recv().is_ok() {
                    left -= 1;
                }
                result
            }
        }
    }
}
