//! `import` and `export`: machines in archives of other hypervisors, from and to a repository or a folder.
//!
//! An archive is read once, from start to end, and may be a pipe. So its disks are devices that are read in order
//! ([`disks`]): backups, conversions and archive writers read them like any other device, and nothing is stored in
//! between.

mod check;
mod export;
mod import;
mod order;

pub use check::{
    CheckedArchive, CheckedDisk, MAY_BE_CUT, check_archive, check_packed, check_stream, open_packed, read_packed,
};
pub use export::{
    ExportFormat, ExportFrom, ExportPlan, ExportReport, ExportRequest, ExportTarget, ExportToPool, ExportedToPool,
    PlannedExportDisk, PoolReturn, VirtualBoxIdentity, XvaExport, export, export_to_pool, plan_export,
    plan_export_to_pool,
};
pub use import::{ImportFolder, ImportReport, ImportRepository, Imported, ImportedDisk, Importing, open_import};
pub use order::wants_stored_images;
