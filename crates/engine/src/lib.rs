//! The jobs of Holdfast as stories.
//!
//! One file per verb that a user knows, each to be read from top to bottom: [`init()`], [keys](add_key), [`backup()`],
//! [`restore()`], [`list()`], [`show`], [`diff()`], [`prune()`], [`forget()`],
//! [`gc()`], [`copy()`], [templates](prepare_push), [`stats`], [`verify()`], [`scrub`], [`repair()`], [`replicate()`] and [`doctor()`], and for images
//! [`convert()`], [`compare()`] and [`create_image()`]. A job takes everything it needs (the repository, paths, times, randomness) as
//! parameters and answers with a report.
//!
//! What every job shares: the [`Job`] with who listens ([`Progress`]) and who may stop it ([`Interrupt`]), and how people
//! name what is in a repository ([`MachineName`], [`DiskName`], [`SnapshotName`] and [`resolve`]).

mod backup;
mod block_target;
mod calendar;
mod causes;
mod clone_error;
mod clone_image;
mod compare;
mod contents;
mod contradictions;
mod convert;
mod copy;
mod create_image;
mod daemon;
mod diff;
mod differences;
mod doctor;
mod error;
mod exchange;
mod forget;
mod gc;
mod guest_identity;
mod hooks;
mod host_restore;
mod host_snapshot;
#[cfg(feature = "hostile")]
#[doc(hidden)]
pub mod hostile;
mod init;
mod instant_restore;
mod interrupt;
mod job;
mod keys;
mod list;
mod machine_backup;
mod machine_lock;
mod machine_restore;
mod machine_state;
mod meter;
mod monitor;
mod name;
mod namesake;
mod new_file;
mod new_image;
mod note_file;
mod notes;
mod overlay_commit;
mod place_note;
mod policy_run;
mod progress;
mod prune;
mod quiesce;
mod repair;
mod replicate;
mod repository;
mod resolve;
mod restore;
mod restore_stream;
mod run_journal;
mod sector_size;
mod serve;
mod sighting;
mod snapshot_name;
mod source;
mod stages;
mod stored_memory;
mod stream_device;
mod template;
mod verify;
mod watchdog;
mod xen_backup;

pub use backup::{BackupReport, BackupRequest, ParentChoice, backup};
pub use block_target::{Overwrite, is_block_device as is_device};
pub use calendar::SKEW_MS;
pub use clone_error::CloneError;
pub use clone_image::{CloneImageRequest, CloneKind, CloneWay, ImageClone, ImageCloner};
pub use compare::{CompareReport, DIFFERENT_RANGE_COUNT_MAX, compare};
pub use convert::{ConvertReport, ConvertRequest, ConvertSource, StreamForm, VerifyImage, convert, convert_to_stream};
pub use copy::{
    CopiedSnapshot, CopyOutcome, CopyReport, CopyRequest, CopySelection, CopyStatus, MachineCopyStatus, RemovedThere,
    copy, copy_status, is_same_place,
};
pub use create_image::{CreateImageReport, CreateImageRequest, create_image};
pub use daemon::{
    Asked, DaemonEvent, DaemonReport, DaemonRequest, DaemonWorld, JobJournal, JobRecord, JournalEntry, Ledger, Message,
    Notice, NoticeEntry, Outcome as RunOutcome, Pulse, RunEntry, Severity, Speaker as DaemonSpeaker, daemon, deliver,
};
pub use diff::{DiffReport, DiffRequest, DiskDiff, diff};
pub use doctor::{
    DoctorReport, DoctorRequest, DoctorStorage, EmptiedOverlays, Finding, FindingKind, Mend, Outcome, Patient,
    PatientPool, Remedy, Treatment, doctor,
};
pub use error::{Error, Exchanged, GivenUp, NameTaken, ResolveError, Result, SnapshotChoiceError};
pub use exchange::machine::Domain;
pub use exchange::{
    CheckedArchive, CheckedDisk, ExchangeError, ExportFormat, ExportFrom, ExportReport, ExportRequest, ExportTarget,
    ExportToPool, ExportedToPool, ImportFolder, ImportReport, ImportRepository, Imported, ImportedDisk, Importing,
    InaccessibleMachine, MAY_BE_CUT, PoolReturn, VirtualBox, VirtualBoxBackup, VirtualBoxError, VirtualBoxIdentity,
    VirtualBoxMachine, VirtualBoxMemory, VirtualBoxReport, VirtualBoxWay, XvaExport, back_up_virtualbox, check_archive,
    check_packed, check_stream, export, export_to_pool, open_import, open_packed, read_packed, wants_stored_images,
};
pub use forget::{Execution, ForgetReport, ProtectionChange, change_protection, forget};
pub use gc::{AcceptedName, GcOutcome, accept_loss, gc, stats};
pub use guest_identity::{GuestIdentity, SYSPREP};
pub use hooks::{HookEvent, HookFailure, Hooks, VARIABLES as HOOK_VARIABLES};
pub use host_restore::{
    ClonePlan, CloneWish, HostPoint, HostPointRequest, HostRestore, OwnGuest, PassingSnapshots, PlannedClone,
    PointName, RollbackReport, RollbackWish, open_host_point,
};
pub use host_snapshot::{
    GuestReport, GuestRequest, HostPruneReport, HostPruneRequest, HostPruneTarget, HostRemovalReport,
    HostRemovalRequest, HostSnapshotList, HostSnapshotRecord, HostSnapshotReport, HostSnapshotRequest,
    HostSnapshotState, MachinePlaces, MemoryWish, NamedCut, PlannedRemoval, Providers, PrunedSeries, Subject,
    Wholeness, list_host_snapshots, machines_in, name_of_instant, places_of, prune_host_snapshots,
    remove_host_snapshots, series_name, take_host_snapshots,
};
pub use init::{InitReport, InitRequest, NewProtection, init};
pub use instant_restore::{
    FillOptions, FillRate, InstantDisk, InstantJob, InstantReport, InstantRestore, Launch, UnreadableJobs,
    instant_jobs, release_snapshot, restore_instantly, resume_instantly, revive_instantly, serve_instantly,
};
pub use interrupt::{Interrupt, Interrupted};
pub use job::Job;
pub use keys::{RotateReport, add_key, check_passphrase, list_keys, paper_key, remove_key, rotate_key};
pub use list::{ListReport, ListRequest, ShowReport, disk_count, list, show};
pub use machine_backup::{
    Compared, Limits, Load, MachineBackupReport, MachineReadRequest, MachineReading, Method, ReadAll, SnapshotWish,
    back_up_machine,
};
pub use machine_restore::{
    AfterRestore, ConfigurationChoice, Content, Definition, FileWay, InPlaceWish, MachineRestorePlan,
    MachineRestoreReport, MachineRestoreRequest, NewMachineIdentity, NewMachineWish, PlannedFile, PlannedFolder,
    PlannedMachine, PlannedResumption, Presence, Refusal, RestoreAs, Resumed, Room, Started, plan_machine_restore,
    restore_machine,
};
pub use machine_state::{
    KeptDisk, KeptState, SetId, StateStore, SweepReport, Unfinished, UnfinishedFile, UnfinishedKind, sweep_states,
};
pub use monitor::{
    DatasetFigures, MonitorReport, MonitorRequest, PoolFigures, TypeFigures, check_capacity, check_health,
    check_snapshots, monitor,
};
pub use name::{DiskName, MachineName, NameError};
pub use namesake::{Continuation, MachineIdentity, MachinesByName};
pub use notes::{NOTE_CONSISTENCY, NOTE_FORMAT, NOTE_METHOD, NOTE_ORIGIN, NOTE_PATH};
pub use place_note::{PlaceJournal, PlaceNote};
pub use policy_run::{Guests, PolicyRunReport, PolicyRunRequest, RemovedByPolicy, TakenCut, run_policy};
pub use progress::{Bottleneck, NoProgress, Progress, Unit};
pub use prune::{Gaps, MachinePlan, PruneReport, PruneRequest, prune};
pub use quiesce::{Quiesce, Quiesced};
pub use repair::{RepairOutcome, repair};
pub use replicate::{
    PEER_PROTOCOL, PackChoice, PeerServer, PeerSide, Place, RawChoice, ReplicaOutcome, ReplicateReport,
    ReplicateRequest, ReplicatedDataset, ReplicatedStream, replicate, serve_peer,
};
pub use repository::{Location, Protection, Unlock, find_snapshot, open, protection, time_of};
pub use resolve::{Candidate, resolve};
pub use restore::{RestoreMode, RestoreReport, RestoreRequest, RestoredDisk, Target, restore};
pub use run_journal::{JournalPlace, Phase, RunRecord, forget_run, note_path, noted_runs};
pub use serve::{ServeDoor, ServeRequest, Served, Writes, serve};
pub use sighting::check_sighting;
pub use snapshot_name::{Moment, SnapshotName, SnapshotReference};
pub use source::{Origin, SourceName};
pub use template::{
    Digest as TemplateDigest, Guest as TemplateGuest, KeepIdentity, ListedHistory, ListedTemplate,
    Piece as TemplatePiece, PieceKind as TemplatePieceKind, Publication, Published, PullReport, PullRequest,
    PullTarget, PulledDisk, PushRequest, PushSource, RemovalSelection, Replace, SignedBy,
    Statement as TemplateStatement, TEMPLATE_NAMESPACE, TemplateError, TemplateHistory, TemplateLabel, TemplateListing,
    TemplateName, TemplateReference, TemplateRemoval, TemplateTag, TemplateVersion, Trust, Unsealed, Unsigned,
    list_templates, prepare_push, prepare_tag, pull_template, remove_templates, show_template,
};
pub use verify::{Against, VerifyRequest, scrub, verify};
pub use watchdog::{Means as WatchdogMeans, watch_over};
pub use xen_backup::{
    XenBackupError, XenBackupReport, XenBackupRequest, XenChange, XenDiskReport, XenWay, back_up_xen,
};
