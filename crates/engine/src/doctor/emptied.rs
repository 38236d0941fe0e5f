//! Overlays of backups that died after their machines had returned to the base images: no machine uses these files.

use std::path::{Path, PathBuf};

use holdfast_block::{BlockDevice as _, ExtentKind, for_each_extent, to_usize};
use holdfast_host::qemu::RunId;
use holdfast_image::{Format, OpenOptions, open};

use super::chains::{is_used, used_images};
use super::leftovers::changed_ms;
use super::seen::{FindingKind, Repair, SeenOverlay};
use super::{Action, DoctorRequest, Finding};
use crate::capture::qemu::{overlay_of, run_of_overlay};
use crate::restore::machine::is_same;

/// Bytes per comparison step.
const WINDOW_BYTES: u64 = 1 << 20;

/// Overlays of backups beside the images of machines that are in no machine's chain.
pub(super) fn emptied(images: &[&PathBuf], chains: &[(String, Vec<PathBuf>)]) -> Vec<SeenOverlay> {
    let is_used = |path: &Path| {
        chains
            .iter()
            .flat_map(|(_, chain)| chain)
            .any(|used| is_same(used, path))
    };
    let mut found = Vec::new();
    for image in images {
        let entries = image.parent().and_then(|folder| std::fs::read_dir(folder).ok());
        for entry in entries.into_iter().flatten().flatten() {
            let overlay = entry.path();
            let run = run_of_overlay(&overlay).filter(|run| overlay_of(image, *run) == overlay);
            if let Some(run) = run
                && !is_used(&overlay)
            {
                found.push(SeenOverlay {
                    run: RunId(run),
                    is_in_image: is_in_image(&overlay, image),
                    image: (*image).clone(),
                    since_ms: changed_ms(&overlay),
                    overlay,
                });
            }
        }
    }
    found.sort_by(|left, right| left.overlay.cmp(&right.overlay));
    found.dedup_by(|left, right| left.overlay == right.overlay);
    found
}

/// Whether the base image contains everything in the overlay; false if it cannot be read.
fn is_in_image(overlay: &Path, image: &Path) -> bool {
    let compared = || compare(overlay, image);
    compared().unwrap_or_default()
}

fn compare(overlay: &Path, image: &Path) -> Option<bool> {
    let options = |format| OpenOptions {
        format: Some(format),
        allow: vec![image.to_owned()],
        ..OpenOptions::default()
    };
    let above = open(overlay, &options(Format::Qcow2)).ok()?;
    let base = above.layers().get(1)?;
    if !is_same(&base.path, image) {
        return None;
    }
    let below = open(image, &options(base.format)).ok()?.device();
    let (alone, above) = (above.layer(0)?, above.device());
    if above.size_bytes() != below.size_bytes() {
        return Some(false);
    }
    let mut is_equal = true;
    let mut buffers = [vec![0; to_usize(WINDOW_BYTES)], vec![0; to_usize(WINDOW_BYTES)]];
    let looked = for_each_extent(&*alone, 0..alone.size_bytes(), |extent| {
        let mut offset = extent.offset;
        let end = extent.offset + extent.length;
        while extent.kind != ExtentKind::Absent && is_equal && offset < end {
            let length = to_usize(WINDOW_BYTES.min(end - offset));
            for (buffer, device) in buffers.iter_mut().zip([&above, &below]) {
                device.read_at(&mut buffer[..length], offset)?;
            }
            is_equal = buffers[0][..length] == buffers[1][..length];
            offset += length as u64;
        }
        Ok(())
    });
    looked.ok().map(|()| is_equal)
}

/// The finding about an overlay of a dead run.
pub(super) fn diagnose(seen: &SeenOverlay) -> Finding {
    let (overlay, image) = (seen.overlay.display(), seen.image.display());
    let (what, remedy) = if seen.is_in_image {
        let repair = Repair::DeleteEmptied {
            overlay: seen.overlay.clone(),
            image: seen.image.clone(),
        };
        (
            format!("{overlay} is an overlay that no machine has, and {image} holds everything that is in it"),
            Action::Repair(repair, "delete it".to_owned()),
        )
    } else {
        (
            format!("{overlay} is an overlay that no machine has, and what is in it differs from {image}"),
            Action::Advice(format!(
                "if its machine went back to {image} by itself, the overlay is useless; if it was set back by hand, what it wrote \
                 meanwhile is only in the overlay: holdfast image compare shows the difference"
            )),
        )
    };
    Finding {
        machine: None,
        kind: FindingKind::Leftover,
        what,
        since_ms: seen.since_ms,
        is_danger: false,
        remedy,
    }
}

/// The finding about an overlay whose run may still be alive.
pub(super) fn of_unknown_owner(seen: &SeenOverlay, advice: String) -> Finding {
    Finding {
        machine: None,
        kind: FindingKind::Leftover,
        what: format!(
            "{} is an overlay of run {} that no machine has, and it is not known whether the process of the run is alive",
            seen.overlay.display(),
            seen.run
        ),
        since_ms: seen.since_ms,
        is_danger: false,
        remedy: Action::Advice(advice),
    }
}

/// Deletes an overlay that no machine uses, if its whole content is in the base image.
pub(super) fn delete(request: &DoctorRequest<'_>, overlay: &Path, image: &Path) -> Result<String, String> {
    if is_used(&used_images(request)?, overlay) || !is_in_image(overlay, image) {
        return Err("it has changed since it was found".to_owned());
    }
    std::fs::remove_file(overlay)
        .map(|()| format!("deleted {}", overlay.display()))
        .map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use holdfast_block::{BlockDeviceMut as _, FileDeviceMut, IoMode};
    use holdfast_image::{BackingFile, CreateOptions, Format, OpenOptions, create, open_mut};

    use super::{emptied, is_in_image};

    #[test]
    fn an_overlay_is_of_no_use_when_its_image_holds_all_of_it_and_no_machine_has_it() {
        let folder = tempfile::tempdir().unwrap();
        let [image, overlay] = ["web1.raw", "web1.raw.holdfast-0000000a"].map(|name| folder.path().join(name));
        let base = FileDeviceMut::create_new(&image, 1 << 20, IoMode::Buffered).unwrap();
        let mut options = CreateOptions::qcow2(1 << 20);
        options.qcow2.backing = Some(BackingFile {
            name: image.display().to_string(),
            format: Format::Raw,
        });
        create(&overlay, &options).unwrap();
        let as_qcow2 = OpenOptions {
            format: Some(Format::Qcow2),
            ..OpenOptions::default()
        };
        let above = open_mut(&overlay, &as_qcow2).unwrap();
        for (bytes, offset) in [([7; 4096], 65_536), ([0; 4096], 3 * 65_536)] {
            above.write_at(&bytes, offset).unwrap();
        }
        above.flush().unwrap();
        drop(above);
        assert!(!is_in_image(&overlay, &image));
        base.write_at(&[7; 4096], 65_536).unwrap();
        base.flush().unwrap();
        assert!(is_in_image(&overlay, &image));
        // Blocks that the overlay does not hold may differ.
        base.write_at(&[9; 4096], 8 * 65_536).unwrap();
        assert!(is_in_image(&overlay, &image));
        base.write_at(&[9; 4096], 3 * 65_536).unwrap();
        assert!(!is_in_image(&overlay, &image));

        let chain = |files: Vec<_>| [("web1".to_owned(), files)];
        let found = emptied(&[&image], &chain(vec![image.clone()]));
        assert_eq!((found.len(), found[0].run.0, found[0].is_in_image), (1, 10, false));
        assert!(emptied(&[&image], &chain(vec![overlay.clone(), image.clone()])).is_empty());
        std::fs::rename(&overlay, folder.path().join("db.holdfast-0000000a")).unwrap();
        assert!(emptied(&[&image], &chain(vec![image.clone()])).is_empty());
    }
}
