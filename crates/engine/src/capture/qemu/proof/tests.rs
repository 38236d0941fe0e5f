use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use holdfast_block::DirtyBitmap;
use holdfast_host::qemu::{Bitmap, Layer};

use super::{MARK_BYTES, NextBitmap, Proof, witness_of};
use crate::capture::qemu::changes::ReadAll;
use crate::notes::{NOTE_BITMAP, NOTE_BITMAP_BASES, NOTE_BITMAP_PLACE, NOTE_BITMAP_WITNESS};

const SIZE_BYTES: u64 = 64 << 20;
const NAME: &str = "holdfast-0123abcd-00000001";

fn bitmap() -> Bitmap {
    Bitmap {
        name: NAME.to_owned(),
        granularity_bytes: 65_536,
        dirty_bytes: 0,
        is_recording: true,
        is_persistent: true,
        is_inconsistent: false,
        is_busy: false,
    }
}

fn layer(node: &str, file: &Path, bitmaps: Vec<Bitmap>) -> Layer {
    Layer {
        node: node.to_owned(),
        driver: "qcow2".to_owned(),
        image: file.display().to_string(),
        size_bytes: SIZE_BYTES,
        keeps_bitmaps: true,
        is_on_backing: true,
        bitmaps,
        stored_bitmaps: Vec::new(),
        process: Some("7:99".to_owned()),
        files: Some(vec![file.to_owned()]),
    }
}

/// An overlay, the image on which the bitmap began, and the base of that image.
struct Chain {
    _folder: tempfile::TempDir,
    layers: Vec<Layer>,
    notes: BTreeMap<String, String>,
}

impl Chain {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str| -> PathBuf {
            let path = folder.path().join(name);
            std::fs::File::create(&path).unwrap();
            path
        };
        let mut layers = vec![
            layer("top", &file("top"), vec![bitmap()]),
            layer("image", &file("image"), vec![bitmap()]),
            layer("base", &file("base"), Vec::new()),
        ];
        layers[2].is_on_backing = false;
        let notes = NextBitmap::new(NAME.to_owned(), Some(&layers[1..]), SIZE_BYTES, 7).notes();
        Self {
            _folder: folder,
            layers,
            notes,
        }
    }

    fn find(&self) -> Result<Proof, ReadAll> {
        Proof::find(Some(&self.layers), SIZE_BYTES, &self.notes, SIZE_BYTES)
    }

    /// The result for a changed chain.
    fn find_when(change: impl FnOnce(&mut Self)) -> Result<Proof, ReadAll> {
        let mut chain = Self::new();
        change(&mut chain);
        chain.find()
    }
}

#[test]
fn the_lowest_layer_with_the_bitmap_counts() {
    let proof = Chain::new().find().unwrap();
    assert_eq!((proof.below.as_deref(), proof.layer_count), (Some("image"), 1));
    assert_eq!(proof.witness, witness_of(SIZE_BYTES, 7));
    // An overlay without a bitmap gives the same result.
    let proof = Chain::find_when(|chain| chain.layers[0].bitmaps.clear()).unwrap();
    assert_eq!(proof.layer_count, 1);
    let proof = Chain::find_when(|chain| drop(chain.layers.remove(0))).unwrap();
    assert_eq!((proof.below, proof.layer_count), (None, 0));
}

#[test]
fn the_missing_part_of_a_proof_is_the_reason_to_read_everything() {
    let reason = |change: fn(&mut Chain)| Chain::find_when(change).unwrap_err();
    let of_image = |change: fn(&mut Bitmap)| {
        let mut chain = Chain::new();
        change(&mut chain.layers[1].bitmaps[0]);
        chain.find().unwrap_err()
    };
    assert_eq!(of_image(|bitmap| bitmap.is_inconsistent = true), ReadAll::Inconsistent);
    assert_eq!(of_image(|bitmap| bitmap.is_recording = false), ReadAll::NotRecording);
    assert_eq!(of_image(|bitmap| bitmap.is_busy = true), ReadAll::NotRecording);
    assert_eq!(
        reason(|chain| chain.layers.iter_mut().for_each(|layer| layer.bitmaps.clear())),
        ReadAll::BitmapGone
    );
    assert_eq!(
        reason(|chain| drop(chain.notes.remove(NOTE_BITMAP))),
        ReadAll::NoBitmapThen
    );
    assert_eq!(
        reason(|chain| drop(chain.notes.remove(NOTE_BITMAP_WITNESS))),
        ReadAll::NoWitnessThen
    );
    assert_eq!(
        reason(|chain| drop(chain.notes.remove(NOTE_BITMAP_BASES))),
        ReadAll::BasesUnknown
    );
    assert_eq!(reason(|chain| chain.layers[2].files = None), ReadAll::BasesUnknown);
    assert_eq!(reason(|chain| drop(chain.layers.remove(2))), ReadAll::BasesChanged);
    assert_eq!(
        reason(|chain| chain.layers[0].keeps_bitmaps = false),
        ReadAll::LayersUnknown
    );
    assert_eq!(
        reason(|chain| chain.layers[0].is_on_backing = false),
        ReadAll::LayersUnknown
    );
    let resized = reason(|chain| chain.layers[1].size_bytes = 1);
    assert!(
        matches!(resized, ReadAll::Resized { before_bytes: 1, .. }),
        "{resized:?}"
    );
    let chain = Chain::new();
    let found = Proof::find(None, SIZE_BYTES, &chain.notes, SIZE_BYTES);
    assert_eq!(found, Err(ReadAll::LayersUnknown));
    let found = Proof::find(Some(&chain.layers), SIZE_BYTES, &chain.notes, 1);
    assert!(
        matches!(found, Err(ReadAll::Resized { before_bytes: 1, .. })),
        "{found:?}"
    );
}

#[test]
fn a_base_that_was_written_or_replaced_proves_nothing() {
    let written = Chain::find_when(|chain| {
        let base = &chain.layers[2].files.as_ref().unwrap()[0];
        std::fs::File::create(base)
            .unwrap()
            .write_all(b"something else")
            .unwrap();
    });
    assert_eq!(written, Err(ReadAll::BasesChanged));
    let replaced = Chain::find_when(|chain| {
        let base = chain.layers[2].files.as_ref().unwrap()[0].clone();
        std::fs::copy(&base, base.with_extension("new")).unwrap();
        std::fs::rename(base.with_extension("new"), base).unwrap();
    });
    assert_eq!(replaced, Err(ReadAll::BasesChanged));
}

#[test]
fn a_bitmap_in_another_image_of_another_qemu_proves_nothing() {
    let other_process = |chain: &mut Chain| {
        let others = chain.layers.iter_mut();
        others.for_each(|layer| layer.process = Some("7:100".to_owned()));
    };
    let other_image = |chain: &mut Chain| {
        let copy = chain.layers[1].files.as_ref().unwrap()[0].with_extension("copy");
        std::fs::File::create(&copy).unwrap();
        chain.layers[1].files = Some(vec![copy]);
    };
    // A power cycle, or changes of images by libvirt while the machine is running.
    assert!(Chain::find_when(other_process).is_ok());
    assert!(Chain::find_when(other_image).is_ok());
    let both = |chain: &mut Chain| {
        other_process(chain);
        other_image(chain);
    };
    assert_eq!(Chain::find_when(both), Err(ReadAll::Moved));
    let unknown = |chain: &mut Chain| {
        chain.layers.iter_mut().for_each(|layer| layer.process = None);
        other_image(chain);
    };
    assert_eq!(Chain::find_when(unknown), Err(ReadAll::Moved));
    // A copy of the image together with its bitmaps.
    let copied = Chain::find_when(|chain| {
        both(chain);
        chain.layers[1].stored_bitmaps = vec![NAME.to_owned()];
    });
    assert!(copied.is_ok());
    let without = Chain::find_when(|chain| drop(chain.notes.remove(NOTE_BITMAP_PLACE)));
    assert_eq!(without, Err(ReadAll::NoWitnessThen));
}

#[test]
fn a_filter_above_a_base_does_not_change_the_base() {
    let filtered = Chain::find_when(|chain| {
        let mut filter = layer("filter", Path::new("/nonexistent"), Vec::new());
        filter.files = Some(Vec::new());
        chain.layers.insert(2, filter);
    });
    assert_eq!(filtered.map(|proof| proof.layer_count), Ok(1));
}

#[test]
fn invalid_notes_prove_nothing() {
    let many = vec!["0"; 65].join(" ");
    for note in ["", " ", "x", "0 ", "-1", "18446744073709551616", &many] {
        let found = Chain::find_when(|chain| drop(chain.notes.insert(NOTE_BITMAP_WITNESS.to_owned(), note.to_owned())));
        assert_eq!(found, Err(ReadAll::NoWitnessThen), "{note}");
    }
}

#[test]
fn a_bitmap_without_all_marks_is_not_witnessed() {
    let proof = Chain::new().find().unwrap();
    let mut changed = DirtyBitmap::new(SIZE_BYTES, 65_536).unwrap();
    for offset in &proof.witness {
        assert!(!proof.is_witnessed(&changed));
        changed.set(*offset..offset + 1);
    }
    assert!(proof.is_witnessed(&changed));
    let outside = Proof {
        witness: vec![SIZE_BYTES, u64::MAX],
        ..proof
    };
    assert!(!outside.is_witnessed(&changed));
}

#[test]
fn the_last_block_of_a_disk_has_a_mark() {
    for size_bytes in [MARK_BYTES, 3 * MARK_BYTES, SIZE_BYTES, SIZE_BYTES + 4096, 1 << 44] {
        let marks = witness_of(size_bytes, 1);
        assert!(marks.len() <= 16 && marks.iter().all(|mark| mark + MARK_BYTES <= size_bytes));
        assert!(
            marks.contains(&((size_bytes / MARK_BYTES - 1) * MARK_BYTES)),
            "{marks:?}"
        );
    }
    assert_eq!(witness_of(512, 1), [0]);
    assert_ne!(witness_of(SIZE_BYTES, 1), witness_of(SIZE_BYTES, 2));
}

#[test]
fn a_proof_does_not_hold_for_other_layers() {
    let chain = Chain::new();
    let proof = chain.find().unwrap();
    assert!(proof.still_holds(Some(&chain.layers)));
    assert!(!proof.still_holds(Some(&chain.layers[1..])) && !proof.still_holds(None));
    let mut other = chain.layers.clone();
    other[2].node = "another".to_owned();
    assert!(!proof.still_holds(Some(&other)));
}
