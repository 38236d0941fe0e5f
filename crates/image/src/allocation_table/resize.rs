//! Steps of a resize that all formats with allocation tables share.

use std::sync::Arc;

use holdfast_block::BlockDeviceMut as _;

use crate::allocation_table::writer::TableMut;
use crate::allocation_table::{AllocationTable, TableLayer};
use crate::file::ImageFile;
use crate::{CheckReport, Error, ProblemKind, Result, Severity};

/// Fails if the image is inconsistent: moving its tables would add to the damage.
pub(crate) fn require_sound(report: &CheckReport, image: &str) -> Result<()> {
    // An interrupted resize leaves redundant footers that differ; repeating it corrects that.
    let is_damage = |kind: &ProblemKind| !matches!(kind, ProblemKind::Structure { .. });
    let mut problems = report.problems.iter();
    match problems.find(|problem| problem.severity == Severity::Corruption && is_damage(&problem.kind)) {
        None => Ok(()),
        Some(problem) => Err(Error::NotResizable {
            image: image.to_owned(),
            detail: format!("it is damaged: {}", problem.kind),
        }),
    }
}

/// Zeroes `range` of the disk, durably. The image must have no parent.
pub(crate) fn zero_tables(
    file: &Arc<dyn ImageFile>,
    image: &str,
    tables: Box<dyn AllocationTable>,
    range: std::ops::Range<u64>,
) -> Result<()> {
    let layer = TableLayer::new(image.into(), Arc::clone(file), tables, None);
    let device = TableMut::new(layer);
    device.write_zeroes(range)?;
    Ok(device.flush()?)
}

/// The error for differencing images: they must have the size of their parent.
pub(crate) fn refuse_differencing(image: &str) -> Error {
    Error::NotResizable {
        image: image.to_owned(),
        detail: "it has a parent, and hypervisors require that both have the same size; convert it to an image without a parent first"
            .to_owned(),
    }
}
