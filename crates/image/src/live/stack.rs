//! The layers below the top, and the place where the top refers to them.

use std::ops::Range;
use std::sync::{Arc, PoisonError, RwLock};

use holdfast_block::{BlockDevice, ExtentKind, ExtentList, Result, to_usize};

use super::reader::LayerReader;

/// Extents of one layer that are examined at once.
const SUB_EXTENT_COUNT_MAX: usize = 256;

/// Layers that are read as one device, without recursion.
#[derive(Default)]
pub(crate) struct LayerStack {
    /// The highest first.
    layers: Vec<Arc<dyn LayerReader>>,
}

impl LayerStack {
    pub(crate) fn new(layers: Vec<Arc<dyn LayerReader>>) -> Self {
        Self { layers }
    }

    /// The same layers with another one at `depth`.
    pub(crate) fn with_layer(&self, depth: usize, layer: Arc<dyn LayerReader>) -> Self {
        let mut layers = self.layers.clone();
        layers[depth] = layer;
        Self { layers }
    }

    /// The layers from `depth` on.
    pub(crate) fn below(&self, depth: usize) -> Self {
        Self {
            layers: self.layers.get(depth..).unwrap_or_default().to_vec(),
        }
    }

    pub(crate) fn layers(&self) -> &[Arc<dyn LayerReader>] {
        &self.layers
    }

    /// Reads the start of `buffer`; returns the number of bytes, at least 1.
    fn read_piece(&self, buffer: &mut [u8], offset: u64) -> Result<usize> {
        let mut length = buffer.len();
        for layer in &self.layers {
            // Past its end a layer hides what is below it.
            let held = layer.layer_bytes().saturating_sub(offset);
            if held == 0 {
                break;
            }
            length = length.min(to_usize(held));
            let piece = layer.read_present(&mut buffer[..length], offset)?;
            length = piece.length;
            if piece.is_present {
                return Ok(length);
            }
        }
        buffer[..length].fill(0);
        Ok(length)
    }

    /// Appends extents of `range` as seen from layer `depth` on; false if the list is full.
    fn push_extents(&self, list: &mut ExtentList, range: Range<u64>, depth: usize) -> Result<bool> {
        let rest = |list: &ExtentList| range.end - list.end();
        let Some(layer) = self.layers.get(depth) else {
            return Ok(list.push(rest(list), ExtentKind::Absent));
        };
        let held_end = layer.layer_bytes().min(range.end);
        while list.end() < held_end {
            for extent in layer.extents_alone(list.end()..held_end, SUB_EXTENT_COUNT_MAX)? {
                let is_complete = match extent.kind {
                    ExtentKind::Absent => self.push_extents(list, list.end()..list.end() + extent.length, depth + 1)?,
                    kind => list.push(extent.length, kind),
                };
                if !is_complete {
                    return Ok(false);
                }
            }
        }
        Ok(list.push(rest(list), ExtentKind::Zero))
    }
}

impl BlockDevice for LayerStack {
    fn size_bytes(&self) -> u64 {
        self.layers.first().map_or(0, |layer| layer.layer_bytes())
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        self.check_bounds(offset, buffer.len() as u64)?;
        let mut done = 0;
        while done < buffer.len() {
            done += self.read_piece(&mut buffer[done..], offset + done as u64)?;
        }
        Ok(())
    }

    fn extents(&self, range: Range<u64>, extent_count_max: usize) -> Result<ExtentList> {
        self.check_bounds(range.start, range.end.saturating_sub(range.start))?;
        let mut list = ExtentList::new(range.start, extent_count_max);
        if !range.is_empty() {
            self.push_extents(&mut list, range, 0)?;
        }
        Ok(list)
    }

    fn block_size_bytes(&self) -> u32 {
        4096
    }
}

/// The layers below a top, which can be exchanged while it is in use.
#[derive(Default)]
pub(crate) struct Seam(RwLock<Arc<LayerStack>>);

impl Seam {
    pub(crate) fn new(stack: Arc<LayerStack>) -> Self {
        Self(RwLock::new(stack))
    }

    pub(crate) fn stack(&self) -> Arc<LayerStack> {
        Arc::clone(&self.0.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Exchanges the layers. The new ones must have the same content.
    pub(crate) fn replace(&self, stack: Arc<LayerStack>) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = stack;
    }
}

impl BlockDevice for Seam {
    fn size_bytes(&self) -> u64 {
        self.stack().size_bytes()
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        self.stack().read_at(buffer, offset)
    }

    fn extents(&self, range: Range<u64>, extent_count_max: usize) -> Result<ExtentList> {
        self.stack().extents(range, extent_count_max)
    }

    fn block_size_bytes(&self) -> u32 {
        4096
    }
}
