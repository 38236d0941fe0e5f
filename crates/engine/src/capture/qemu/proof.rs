//! Proves that a bitmap of QEMU names all changes of a disk since the previous snapshot.
//!
//! A bitmap records writes through one node. So it is looked for in all layers of the disk, and what it proves depends
//! on where it is found:
//!
//! - Its name is unique to one disk of one run, because the images of two disks can be exchanged.
//! - It has a witness: places that the run marked in it after reading the disk. A bitmap of the same name that was
//!   started later, as libvirt does in each overlay, lacks these marks, and so does one that was cleared. Merging
//!   bitmaps keeps them.
//! - If several layers have the bitmap, the lowest counts. What was written to the layers above it is where these
//!   layers have their own clusters.
//! - The files below that layer must be the ones that were below the disk's node at the time, and unwritten.
//! - It is where it was started: in the same image, or in the same process of QEMU, where libvirt merges it when it
//!   changes the layers. Or it is stored in its image, as in a copy made by `qemu-img`. A migration transfers bitmaps
//!   by the names of nodes, also from a node that the disk no longer uses, to an image whose writes they did not
//!   record.
//!
//! If one of these conditions is not met, everything is read.

use crate::notes::{NOTE_BITMAP, NOTE_BITMAP_BASES, NOTE_BITMAP_PLACE, NOTE_BITMAP_WITNESS};
use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::MetadataExt as _;

use holdfast_block::{DirtyBitmap, SeededRandom};
use holdfast_host::qemu::{Bitmap, Layer};
use holdfast_host::stamp_of;

use super::changes::ReadAll;

/// The note of an unknown place.
const UNKNOWN: &str = "-";
/// The note of an image without base images.
const NO_BASES: &str = "none";

/// The size of a mark in bytes: the largest default granularity of a QEMU bitmap.
pub(super) const MARK_BYTES: u64 = 64 << 10;
/// Marks at random places.
const RANDOM_COUNT: u64 = 8;
/// Marks near the end, each twice as far from it as the one before: an image that was shrunk meanwhile has lost them.
const END_COUNT: u32 = 8;
/// The maximum number of marks of one bitmap, in any version.
const MARK_COUNT_MAX: usize = 64;

/// A bitmap that can be trusted if it has its witness.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Proof {
    pub(super) bitmap: String,
    /// The node that has it, if that is below the disk's own node.
    pub(super) below: Option<String>,
    /// The number of layers above that node.
    pub(super) layer_count: u64,
    /// The offsets of the marks.
    pub(super) witness: Vec<u64>,
    /// All nodes of the disk.
    nodes: Vec<String>,
}

impl Proof {
    /// Finds the bitmap by the notes of the disk in the previous snapshot, and the disk's size at that time.
    pub(super) fn find(
        layers: Option<&[Layer]>,
        size_bytes: u64,
        notes: &BTreeMap<String, String>,
        before_bytes: u64,
    ) -> Result<Self, ReadAll> {
        let name = notes.get(NOTE_BITMAP).ok_or(ReadAll::NoBitmapThen)?;
        let layers = layers.ok_or(ReadAll::LayersUnknown)?;
        let of = |layer: &Layer| layer.bitmaps.iter().find(|bitmap| bitmap.name == *name).cloned();
        let mut holders = layers.iter().enumerate().rev();
        let found = holders.find_map(|(at, layer)| Some((at, of(layer)?)));
        let (at, bitmap) = found.ok_or(ReadAll::BitmapGone)?;
        check_state(&bitmap)?;
        if before_bytes != size_bytes {
            return Err(ReadAll::Resized {
                before_bytes,
                now_bytes: size_bytes,
            });
        }
        check_layers(&layers[..=at], size_bytes)?;
        let witness = notes.get(NOTE_BITMAP_WITNESS).and_then(|then| marks_in(then));
        let witness = witness.ok_or(ReadAll::NoWitnessThen)?;
        let bases_then = notes.get(NOTE_BITMAP_BASES).ok_or(ReadAll::BasesUnknown)?;
        let bases_now = bases_of(&layers[at + 1..]).ok_or(ReadAll::BasesUnknown)?;
        if *bases_then != bases_now {
            return Err(ReadAll::BasesChanged);
        }
        let place = notes.get(NOTE_BITMAP_PLACE).ok_or(ReadAll::NoWitnessThen)?;
        if !is_at_place(&layers[at], name, place) {
            return Err(ReadAll::Moved);
        }
        Ok(Self {
            bitmap: name.clone(),
            below: (at > 0).then(|| layers[at].node.clone()),
            layer_count: at as u64,
            witness,
            nodes: nodes_of(layers),
        })
    }

    /// Whether a bitmap has all marks of the witness.
    pub(super) fn is_witnessed(&self, changed: &DirtyBitmap) -> bool {
        self.witness
            .iter()
            .all(|offset| changed.is_dirty(*offset..offset.saturating_add(1)))
    }

    /// Whether the disk still has these layers.
    pub(super) fn still_holds(&self, layers: Option<&[Layer]>) -> bool {
        layers.is_some_and(|layers| nodes_of(layers) == self.nodes)
    }
}

/// A bitmap that starts at a point in time, with what later proves that it did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct NextBitmap {
    pub(super) name: String,
    pub(super) witness: Vec<u64>,
    bases: Option<String>,
    place: String,
}

impl NextBitmap {
    /// The bitmap `name` of a disk of these layers.
    pub(super) fn new(name: String, layers: Option<&[Layer]>, size_bytes: u64, seed: u64) -> Self {
        Self {
            name,
            witness: witness_of(size_bytes, seed),
            bases: layers.and_then(|layers| bases_of(layers.get(1..)?)),
            place: place_of(layers.and_then(<[Layer]>::first)),
        }
    }

    pub(super) fn notes(&self) -> BTreeMap<String, String> {
        let witness: Vec<String> = self.witness.iter().map(u64::to_string).collect();
        let mut notes = BTreeMap::from([(NOTE_BITMAP.to_owned(), self.name.clone())]);
        notes.insert(NOTE_BITMAP_WITNESS.to_owned(), witness.join(" "));
        notes.insert(NOTE_BITMAP_PLACE.to_owned(), self.place.clone());
        notes.extend(self.bases.clone().map(|bases| (NOTE_BITMAP_BASES.to_owned(), bases)));
        notes
    }
}

/// The marks in a note.
fn marks_in(note: &str) -> Option<Vec<u64>> {
    let marks = note.split(' ').map(|offset| offset.parse().ok());
    let marks = marks.take(MARK_COUNT_MAX + 1).collect::<Option<Vec<u64>>>()?;
    (marks.len() <= MARK_COUNT_MAX).then_some(marks)
}

fn check_state(bitmap: &Bitmap) -> Result<(), ReadAll> {
    if bitmap.is_inconsistent {
        return Err(ReadAll::Inconsistent);
    }
    if !bitmap.is_recording || bitmap.is_busy {
        return Err(ReadAll::NotRecording);
    }
    Ok(())
}

/// Checks that the clusters of each layer but the last show all writes to it.
fn check_layers(layers: &[Layer], size_bytes: u64) -> Result<(), ReadAll> {
    let Some((_, above)) = layers.split_last() else {
        return Ok(());
    };
    if above.iter().any(|layer| !layer.keeps_bitmaps || !layer.is_on_backing) {
        return Err(ReadAll::LayersUnknown);
    }
    match layers.iter().find(|layer| layer.size_bytes != size_bytes) {
        // Only bitmaps of one size can be merged.
        Some(other) if !above.is_empty() => Err(ReadAll::Resized {
            before_bytes: other.size_bytes,
            now_bytes: size_bytes,
        }),
        _ => Ok(()),
    }
}

/// The place of a layer's bitmap.
fn place_of(layer: Option<&Layer>) -> String {
    let known = |word: Option<String>| word.unwrap_or_else(|| UNKNOWN.to_owned());
    let process = layer.and_then(|layer| layer.process.clone());
    format!("{} {}", known(process), known(layer.and_then(image_of)))
}

/// What identifies the image of a layer on this host.
fn image_of(layer: &Layer) -> Option<String> {
    let [file] = &layer.files.as_ref()?[..] else {
        return None;
    };
    let found = file.metadata().ok()?;
    if found.is_file() {
        return Some(format!("{}:{}", found.dev(), found.ino()));
    }
    stamp_of(file)
}

/// Whether a bitmap is where it was started, or came from there with everything it had recorded.
fn is_at_place(layer: &Layer, name: &str, place: &str) -> bool {
    let here = place_of(Some(layer));
    let mut words = place.split(' ').zip(here.split(' '));
    words.any(|(then, now)| then == now && now != UNKNOWN) || layer.stored_bitmaps.iter().any(|stored| stored == name)
}

fn nodes_of(layers: &[Layer]) -> Vec<String> {
    layers.iter().map(|layer| layer.node.clone()).collect()
}

/// The base images of an image; none if they are not known.
fn bases_of(layers: &[Layer]) -> Option<String> {
    let mut words = Vec::new();
    for layer in layers {
        let files = layer.files.as_ref()?;
        let stamps = files.iter().map(|file| stamp_of(file)).collect::<Option<Vec<_>>>()?;
        // A filter has no files.
        if !stamps.is_empty() {
            words.push(stamps.join(","));
        }
    }
    Some(if words.is_empty() {
        NO_BASES.to_owned()
    } else {
        words.join(" ")
    })
}

/// The places where a disk's bitmap gets marks.
fn witness_of(size_bytes: u64, seed: u64) -> Vec<u64> {
    let count = size_bytes / MARK_BYTES;
    if count == 0 {
        return vec![0];
    }
    let mut random = SeededRandom::new(seed);
    let from_end = (0..END_COUNT).filter_map(|power| count.checked_sub(1 << power));
    let anywhere = (0..RANDOM_COUNT).map(|_| random.below(count));
    let marks: BTreeSet<u64> = from_end.chain(anywhere).collect();
    marks.into_iter().map(|mark| mark * MARK_BYTES).collect()
}

#[cfg(test)]
mod tests;
