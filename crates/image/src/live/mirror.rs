//! Merges the top into the layer below it while the top is written.
//!
//! A copy goes through the disk in ascending order. A write behind its position is repeated on the lower layer; one
//! ahead of it is copied later. So each byte is copied once, and the copy ends however much is written meanwhile. Until
//! the end the top hides what is written to the lower layer.

use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use holdfast_block::{BlockDeviceMut, Error as BlockError, ExtentKind, Result as BlockResult};

use super::reader::{LayerReader, LayerWriter};

/// The lower layer of a merge, and the position of the copy.
pub(super) struct Mirror {
    lower: Arc<dyn LayerWriter>,
    state: Mutex<MirrorState>,
    changed: Condvar,
}

#[derive(Default)]
struct MirrorState {
    /// Everything before it was copied.
    position: u64,
    /// What the copy is examining or copying.
    copying: Range<u64>,
    /// Writes in progress.
    writing: Vec<Range<u64>>,
    /// The first error of a write to the lower layer. It ends the merge; the write itself has succeeded.
    failure: Option<BlockError>,
}

impl Mirror {
    pub(super) fn new(lower: Arc<dyn LayerWriter>) -> Self {
        Self {
            lower,
            state: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    pub(super) fn lower(&self) -> &Arc<dyn LayerWriter> {
        &self.lower
    }

    fn lock(&self) -> MutexGuard<'_, MirrorState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Executes a change of `range` on `top`, and on the lower layer behind the position of the copy.
    pub(super) fn change(
        &self,
        range: Range<u64>,
        top: &dyn LayerWriter,
        apply: impl Fn(&dyn BlockDeviceMut) -> BlockResult<()>,
    ) -> BlockResult<()> {
        self.exclusively(range.clone(), |is_copied| {
            apply(top)?;
            if is_copied {
                self.note(apply(&*self.lower));
            }
            Ok(())
        })
    }

    /// Trims `range` of `top`. What a layer does with a trim depends on its units, so the result is copied.
    pub(super) fn trim(&self, range: Range<u64>, top: &dyn LayerWriter) -> BlockResult<()> {
        self.exclusively(range.clone(), |is_copied| {
            top.trim(range.clone())?;
            if is_copied {
                self.note(copy_range(top, &*self.lower, range.clone()));
            }
            Ok(())
        })
    }

    /// Runs `work` while no other write overlaps `range` and the copy does not touch it. `work` gets whether the copy
    /// has been there.
    fn exclusively(&self, range: Range<u64>, work: impl FnOnce(bool) -> BlockResult<()>) -> BlockResult<()> {
        let mut state = self.lock();
        while overlap(&state.copying, &range) || state.writing.iter().any(|other| overlap(other, &range)) {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let is_copied = range.start < state.position;
        state.writing.push(range.clone());
        drop(state);
        let result = work(is_copied);
        let mut state = self.lock();
        if let Some(at) = state.writing.iter().position(|other| *other == range) {
            state.writing.swap_remove(at);
        }
        drop(state);
        self.changed.notify_all();
        result
    }

    fn note(&self, result: BlockResult<()>) {
        if let Err(error) = result {
            self.lock().failure.get_or_insert(error);
        }
    }

    /// Fails if a write to the lower layer has failed.
    pub(super) fn check(&self) -> BlockResult<()> {
        self.lock().failure.take().map_or(Ok(()), Err)
    }

    /// Copies the next piece of at most `length_max` bytes, and returns the new position.
    pub(super) fn copy_next(&self, top: &dyn LayerWriter, length_max: u64) -> BlockResult<u64> {
        let size_bytes = top.layer_bytes();
        let position = self.lock().position;
        // While the length of the next absent range is not known, any write may fall into it.
        self.claim(position..size_bytes);
        let copied = (|| {
            let list = top.extents_alone(position..size_bytes, 1)?;
            let Some(first) = list.iter().next() else {
                return Ok(size_bytes);
            };
            if first.kind == ExtentKind::Absent {
                return Ok(first.offset + first.length);
            }
            let end = position + first.length.min(length_max);
            self.lock().copying = position..end;
            self.changed.notify_all();
            copy_range(top, &*self.lower, position..end)?;
            Ok(end)
        })();
        let mut state = self.lock();
        state.copying = 0..0;
        if let Ok(end) = &copied {
            state.position = *end;
        }
        drop(state);
        self.changed.notify_all();
        copied
    }

    /// Waits for the writes in `range`, and keeps further ones away.
    fn claim(&self, range: Range<u64>) {
        let mut state = self.lock();
        state.copying = range.clone();
        while state.writing.iter().any(|other| overlap(other, &range)) {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

fn overlap(one: &Range<u64>, other: &Range<u64>) -> bool {
    one.start < other.end && other.start < one.end
}

/// Copies what `upper` has of `range` into `lower`.
pub(super) fn copy_range(upper: &dyn LayerReader, lower: &dyn LayerWriter, range: Range<u64>) -> BlockResult<()> {
    const PIECE_BYTES: u64 = 1 << 20;
    const EXTENT_COUNT_MAX: usize = 256;
    let range = range.start..range.end.min(upper.layer_bytes());
    let mut at = range.start;
    while at < range.end {
        let list = upper.extents_alone(at..range.end, EXTENT_COUNT_MAX)?;
        at = list.end();
        for extent in list {
            match extent.kind {
                ExtentKind::Absent => {}
                ExtentKind::Zero => lower.write_zeroes(extent.offset..extent.offset + extent.length)?,
                ExtentKind::Data => {
                    let end = extent.offset + extent.length;
                    let mut from = extent.offset;
                    while from < end {
                        let mut piece = vec![0; holdfast_block::to_usize((end - from).min(PIECE_BYTES))];
                        let read = upper.read_present(&mut piece, from)?;
                        lower.write_at(&piece[..read.length], from)?;
                        from += read.length as u64;
                    }
                }
            }
        }
    }
    Ok(())
}
