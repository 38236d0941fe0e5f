//! `import` and `export`: machines in archives of other hypervisors, from and to a repository or a folder.
//!
//! An archive comes once, from its start to its end, and may be a pipe. So its disks are devices that are read in order
//! ([`disks`]): a backup, a conversion and a writer of archives read them as they read any other, and no byte of them is stored in between.

mod check;
pub(crate) mod disks;
mod error;
mod export;
mod import;
pub(crate) mod machine;
pub(crate) mod new_folder;
mod order;
mod sectors;
pub(crate) mod store;
mod virtualbox;

pub use check::{
    CheckedArchive, CheckedDisk, MAY_BE_CUT, check_archive, check_packed, check_stream, open_packed, read_packed,
};
pub use error::ExchangeError;
pub use export::{
    ExportFormat, ExportFrom, ExportReport, ExportRequest, ExportTarget, ExportToPool, ExportedToPool, PoolReturn,
    VirtualBoxIdentity, XvaExport, export, export_to_pool,
};
pub use import::{ImportFolder, ImportReport, ImportRepository, Imported, ImportedDisk, Importing, open_import};
pub(crate) use new_folder::{NewFolder, write_file};
pub use order::wants_stored_images;
pub(crate) use virtualbox::LeftSnapshot;
pub use virtualbox::{
    InaccessibleMachine, VirtualBox, VirtualBoxBackup, VirtualBoxError, VirtualBoxMachine, VirtualBoxMemory,
    VirtualBoxReport, VirtualBoxWay, back_up_virtualbox,
};
