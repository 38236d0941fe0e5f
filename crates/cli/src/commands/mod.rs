//! The verbs. Each group has a folder, and each verb a file with its arguments, its examples, and the code that calls
//! the engine and builds the report.

mod backups;
mod help;
mod host_snapshots;
mod images;
mod moving;
mod overview;
mod repository;
mod service;
mod tree;
mod verb;

use self::backups::BackupVerb;
use self::help::HelpVerb;
use self::host_snapshots::HostSnapshotVerb;
use self::images::ImageFileVerb;
use self::moving::MovingVerb;
use self::repository::RepositoryVerb;
use self::service::ServiceVerb;
use self::verb::{VerbSet as _, groups};

pub use overview::short_screen;
pub use service::unknown_line;
pub use tree::{Arguments, COMMAND_LINE, verb_paths};

groups! {
    "Backups" => Backups(BackupVerb),
    "Repository" => Repository(RepositoryVerb),
    "Host snapshots" => HostSnapshots(HostSnapshotVerb),
    "Images, archives and templates" => Images(ImageFileVerb),
    "Live copy" => Moving(MovingVerb),
    "Jobs and monitoring" => Service(ServiceVerb),
    "Help and diagnosis" => Help(HelpVerb),
}
