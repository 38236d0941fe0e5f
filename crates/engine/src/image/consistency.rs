//! Images with inconsistent metadata are read with a warning.
//!
//! A damaged table entry may point to other data of the same image. Reads then succeed but return wrong data, and only
//! a check of the metadata detects that.

use std::path::{Path, PathBuf};

use holdfast_host::is_written_by_others;
use holdfast_image::{CheckedLayer, OpenOptions, Problem, ProblemKind, Severity, quick_check};

use crate::job::{Progress, Result};

/// Warns of inconsistent metadata in the image at `path`, opened with `options`, and in its backing images; `files` are
/// all files of the chain.
pub(crate) fn warn_of_inconsistencies(
    path: &Path,
    options: &OpenOptions,
    files: &[PathBuf],
    progress: &dyn Progress,
) -> Result<()> {
    // An image that is being written looks inconsistent.
    if files.iter().any(|path| is_written_by_others(path)) {
        return Ok(());
    }
    for layer in quick_check(path, options)? {
        if layer.is_cut_off {
            let image = layer.path.display().to_string();
            return Err(holdfast_image::Error::CutOff { image }.into());
        }
        let Some(report) = &layer.report else {
            progress.note(&format!(
                "{} has so many clusters that it is not checked before it is read: holdfast image check does that",
                layer.path.display()
            ));
            continue;
        };
        if let Some(first) = report.problems.iter().find(|problem| is_reported(problem, &layer)) {
            progress.warning(&format!(
                "{} is inconsistent, and what is read of it may be wrong: {} (holdfast image check lists all)",
                layer.path.display(),
                first.kind
            ));
        }
    }
    Ok(())
}

fn is_reported(problem: &Problem, layer: &CheckedLayer) -> bool {
    match problem.kind {
        ProblemKind::Copies { .. } => true,
        // Refcounts are expected to be wrong until the image is repaired.
        ProblemKind::Refcount { .. } | ProblemKind::CopiedFlag { .. } if layer.has_old_refcounts => false,
        // Leaked clusters are harmless.
        _ => problem.severity == Severity::Corruption,
    }
}
