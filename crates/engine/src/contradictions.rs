//! Images whose metadata contradicts itself are read with a warning.
//!
//! An entry of a table that was damaged may lead to other bytes of the same image: they can be read, and nothing but a check knows that they are not those of
//! the disk.

use std::path::{Path, PathBuf};

use holdfast_host::is_written_by_others;
use holdfast_image::{OpenOptions, Problem, ProblemKind, Severity, check_layers};

use crate::Progress;
use crate::error::Result;

/// Warns of what contradicts itself in the image at `path`, opened with `options`, and in all that it is based on; `files` are all that is read.
pub(crate) fn tell_of_contradictions(
    path: &Path,
    options: &OpenOptions,
    files: &[PathBuf],
    progress: &dyn Progress,
) -> Result<()> {
    // What is written meanwhile contradicts itself while it is looked at.
    if files.iter().any(|path| is_written_by_others(path)) {
        return Ok(());
    }
    for (path, report) in check_layers(path, options)? {
        // Room that is taken for nothing harms nobody.
        let is_told = |problem: &&Problem| {
            problem.severity == Severity::Corruption || matches!(problem.kind, ProblemKind::Copies { .. })
        };
        if let Some(first) = report.problems.iter().find(is_told) {
            progress.warning(&format!(
                "{} contradicts itself, and what is read of it may be wrong: {} (holdfast image check tells all)",
                path.display(),
                first.kind
            ));
        }
    }
    Ok(())
}
