//! The jobs of Holdfast. A job gets everything it needs (the repository, paths, times, randomness) as parameters and returns a report.
//!
//! The folders are in dependency order: each uses only those above it in this list. `cargo xtask tidy` checks that.
//!
//! - `notes`: keys of notes and names of streams in snapshots
//! - `job`: what every job gets, and the errors of all jobs ([`Job`], [`Progress`], [`Interrupt`], [`Error`])
//! - `files`: files that appear complete or not at all, block devices as targets, streams in order
//! - `image`: verbs about images ([`convert()`], [`compare()`], [`create_image()`], [`ImageCloner`])
//! - `repository`: verbs about a repository ([`init()`], [`list()`], [`prune()`], [`gc()`], [`copy()`], [`verify()`],
//!   [`repair()`]), and names of snapshots ([`SnapshotName`], [`resolve`])
//! - `machine`: locks, journals, hooks, freezing and the watchdog of machines, and their state beside disks
//! - `restore`: from a snapshot to files, a machine, a machine that runs at once, or a server ([`restore()`], [`plan_machine_restore`], [`restore_instantly`], [`serve`], [`mount()`])
//! - `guest_files`: files inside the guests' file systems, from a snapshot ([`open_guest_volumes`])
//! - `host_snapshot`: snapshots of file systems, their policy, rollback, monitoring ([`take_host_snapshots`], [`run_policy`], [`HostRestore`], [`monitor()`])
//! - `container`: containers with their file systems and snapshots ([`create_container`], [`ContainerMount`], [`take_snapshot`])
//! - `capture`: from images or a machine to a snapshot: images, libvirt and QEMU, XenServer, VirtualBox ([`backup()`], [`back_up_machine`], [`back_up_xen`], [`back_up_virtualbox`])
//! - `exchange`: archives of machines ([`open_import`], [`export`])
//! - `container_content`: what fills the root folder of a container, and what packs one ([`fill_root`], [`pack_root`], [`copy_root`])
//! - `container_restore`: a container, or its files, from a snapshot ([`StoredContainer`])
//! - `template`: signed images and machines, shared by name ([`prepare_push`], [`pull_template`])
//! - `replicate`: host snapshots to another pool or host ([`replicate()`])
//! - `doctor`: leftovers of killed processes ([`doctor()`])

mod capture;
mod container;
mod container_content;
mod container_restore;
mod doctor;
mod exchange;
mod files;
mod guest_files;
mod host_snapshot;
#[cfg(feature = "hostile")]
#[doc(hidden)]
pub mod hostile;
mod image;
mod job;
mod machine;
mod notes;
mod repository;
mod restore;
mod template;

pub use capture::container::{
    ContainerBackupRequest, ContainerChange, ContainerReading, back_up_container, is_kept_for_backup,
    plan_container_backup,
};
pub use capture::foreign_machine::Domain;
pub use capture::images::{BackupRequest, backup, plan_backup};
pub use capture::plan::{BackupPlan, PlannedMethod, PlannedRead};
pub use capture::qemu::{
    Compared, Limits, Load, MachineReadRequest, MachineReading, Method, ReadAll, back_up_machine, plan_machine_backup,
};
pub use capture::snapshot::{BackupReport, ParentChoice, SnapshotOptions};
pub use capture::virtualbox::{
    InaccessibleMachine, VirtualBox, VirtualBoxBackup, VirtualBoxMachine, VirtualBoxMemory, VirtualBoxMethod,
    VirtualBoxReading, back_up_virtualbox, plan_virtualbox_backup,
};
pub use capture::xen::{
    XenBackupRequest, XenChange, XenDiskReport, XenReading, XenTransfer, back_up_xen, plan_xen_backup,
};
pub use capture::{CaptureOptions, MachineBackupReport};
pub use container::{
    CloneContainerReport, CloneContainerRequest, Consistency, ContainerDocument, ContainerHold, ContainerMount,
    ContainerMountRequest, ContainerMounter, ContainerPlace, ContainerState, ContainerTraffic, ContainerWorkerRequest,
    CreateContainerReport, CreateContainerRequest, DiskTransport, FileSystemKind, FreezerLauncher, Growth,
    HoldContainerRequest, IdleContainer, MountedDisk, MountedSnapshot, RelocatedUse, Relocation, ResumeChoice,
    ResumePlan, RootFiller, RuntimeRequest, ServeUntil, SnapshotDeletion, SnapshotRequest, SnapshotServeRequest,
    SnapshotState, TakenMemory, TakenSnapshot, UnmountedContainer, check_clone, check_create, check_resume,
    clone_container, container_state, create_container, delete_snapshots, fold_layers, grow_container,
    is_left_by_killed_process, is_mounted_from_container, mount_snapshot, plan_container_switch, plan_resume,
    preview_resume, restore_memory, return_to_memory, serve_container, serve_freezer, switch_container,
    take_memory_snapshot, take_snapshot, trim_container, unmount_container, unmount_snapshot, wait_for_unmount,
};
pub use container_content::{
    ContentCounts, ContentLoss, ContentSource, FillReport, ImageChoice, ImageConfiguration, ImagePlatform, PackReport,
    PackRootOptions, PackedHoles, TarInput, check_source, copy_root, fill_root, is_image_archive, pack_root,
};
pub use container_restore::{ContainerFiles, ContainerTarget, StoredContainer};
pub use doctor::{
    Action, DoctorReport, DoctorRequest, DoctorStorage, EmptiedOverlays, ExaminedMachine, ExaminedPool, Finding,
    FindingKind, FindingState, Outcome, Repair, doctor,
};
pub use exchange::{
    CheckedArchive, CheckedDisk, ExportFormat, ExportFrom, ExportPlan, ExportReport, ExportRequest, ExportTarget,
    ExportToPool, ExportedToPool, ImportFolder, ImportReport, ImportRepository, Imported, ImportedDisk, Importing,
    MAY_BE_CUT, PlannedExportDisk, PoolReturn, VirtualBoxIdentity, XvaExport, check_archive, check_packed,
    check_stream, export, export_to_pool, open_import, open_packed, plan_export, plan_export_to_pool, read_packed,
    wants_stored_images,
};
pub use files::block_target::{LockedDevice, Overwrite, is_block_device as is_device, open_block_target};
pub use files::state_file::write_note;
pub use guest_files::{
    ApplianceOptions, GuestAddress, GuestAddressError, GuestVolume, GuestVolumes, LocatedFiles, ReaderChoice,
    ReaderKind, ReaderLauncher, ReaderOptions, RestoredFiles, TargetConflicts, TreeRestoreRequest, UnreadableFile,
    WalkDepth, WalkReport, WalkedFile, open_guest_volumes, read_guest_file, restore_tree, walk_files,
};
pub use host_snapshot::monitor::{
    DatasetFigures, MonitorReport, MonitorRequest, PoolFigures, TypeFigures, check_capacity, check_health,
    check_snapshots, monitor,
};
pub use host_snapshot::policy::{
    Guests, PolicyRunReport, PolicyRunRequest, RemovedByPolicy, TakenSnapshotSet, run_policy,
};
pub use host_snapshot::record::SetId;
pub use host_snapshot::rollback::{
    CloneOptions, ClonePlan, HostPoint, HostPointRequest, HostRestore, OwnGuest, PlannedClone, PointName,
    RollbackOptions, RollbackReport, TemporarySnapshots, open_host_point,
};
pub use host_snapshot::states::{
    KeptDisk, KeptState, StateStore, SweepReport, Unfinished, UnfinishedFile, UnfinishedKind, sweep_states,
};
pub use host_snapshot::{
    GuestReport, GuestRequest, HostPruneReport, HostPruneRequest, HostPruneTarget, HostRemovalReport,
    HostRemovalRequest, HostSnapshotList, HostSnapshotRecord, HostSnapshotReport, HostSnapshotRequest,
    HostSnapshotState, MachinePlaces, NamedSnapshotSet, PlannedRemoval, Providers, PrunedSeries, SetCompleteness,
    SnapshotSizes, Subject, list_host_snapshots, machines_in, name_of_instant, places_of, prune_host_snapshots,
    remove_host_snapshots, series_name, take_host_snapshots,
};
pub use image::clone::{CloneImageRequest, CloneKind, CloneWay, ImageClone, ImageCloner};
pub use image::compare::{CompareReport, DIFFERENT_RANGE_COUNT_MAX, compare};
pub use image::convert::{
    ConvertPlan, ConvertReport, ConvertRequest, ConvertSource, StreamForm, VerifyImage, convert, convert_to_stream,
    plan_convert,
};
pub use image::create::{CreateImageReport, CreateImageRequest, create_image, plan_image};
pub use image::guest_identity::{GuestIdentity, SYSPREP};
pub use image::source::{DiskOrigin, SourceName};
pub use job::error::{
    CloneError, ContainerContentError, ContainerError, ExchangeError, Exchanged, GuestFilesError, InstantError,
    MemoryProblem, NameTaken, Refusal, ResolveError, ScratchOverrun, ServerFailure, ServingError, SnapshotChoiceError,
    TemplateError, VirtualBoxError, XenBackupError,
};
pub use job::{
    Bottleneck, DiskName, Error, Interrupt, Interrupted, Job, MachineName, NameError, NoProgress, Progress, Result,
    Unit, lower_priority,
};
pub use machine::hooks::{HookEvent, HookFailure, Hooks, VARIABLES as HOOK_VARIABLES};
pub use machine::place_note::{PlaceJournal, PlaceNote};
pub use machine::pull_record::{PullNote, PullRecord, RecordedDisk};
pub use machine::quiesce::{Quiesce, Quiesced};
pub use machine::run_journal::{JournalPlace, Phase, RunRecord, forget_run, note_path, noted_runs};
pub use machine::state::memory::MemoryOptions;
pub use machine::state::scratch::{
    MIGRATION_SOCKETS, RETURN_SOCKET, RuntimeFolder, disk_socket, is_disk_socket, is_memory_socket, memory_socket,
    plain_memory_socket, return_socket,
};
pub use machine::state::tpm::StoppedTpm;
pub use machine::tracked::{TrackRequest, TrackedDisk, TrackedMachine};
pub use machine::watchdog::{WatchdogTools, has_watchdog, watch_over};
pub use notes::{NOTE_CONSISTENCY, NOTE_FORMAT, NOTE_METHOD, NOTE_ORIGIN, NOTE_PATH};
pub use repository::calendar::SKEW_MS;
pub use repository::calendar::time_of;
pub use repository::copy::{
    CopiedSnapshot, CopyOutcome, CopyReport, CopyRequest, CopySelection, CopyStatus, MachineCopyStatus, RemovedThere,
    copy, copy_status, is_same_place,
};
pub use repository::diff::{DiffReport, DiffRequest, DiskDiff, diff};
pub use repository::forget::{Execution, ForgetReport, ProtectionChange, change_protection, forget};
pub use repository::gc::{AcceptedName, GcOutcome, accept_loss, gc, stats};
pub use repository::init::{InitReport, InitRequest, NewProtection, init, plan_init};
pub use repository::keys::{
    RotateReport, add_key, check_password, list_keys, paper_key, plan_key_removal, plan_rotation, remove_key,
    rotate_key,
};
pub use repository::list::{ListReport, ListRequest, ShowReport, disk_count, list, show};
pub use repository::name_conflict::{Continuation, MachineIdentity, MachinesByName};
pub use repository::open::{Location, Protection, Unlock, find_snapshot, open, protection};
pub use repository::prune::{Gaps, MachinePlan, PruneReport, PruneRequest, prune};
pub use repository::repair::{RepairOutcome, repair};
pub use repository::resolve::{Candidate, resolve};
pub use repository::sighting::check_sighting;
pub use repository::snapshot_name::{SnapshotMoment, SnapshotName, SnapshotReference};
pub use repository::verify::{VerifyImageAgainst, VerifyRequest, scrub, verify};
pub use restore::files::{
    OpenedDisk, RestoreMode, RestoreReport, RestoreRequest, RestoreTarget, RestoredDisk, open_snapshot_disk, restore,
};
pub use restore::instant::{
    FillOptions, FillRate, InstantDisk, InstantJob, InstantReport, InstantRestore, ServerLauncher, UnreadableJobs,
    instant_jobs, release_snapshot, restore_instantly, resume_instantly, revive_instantly, serve_instantly,
};
pub use restore::machine::{
    AfterRestore, ConfigurationChoice, Definition, FileContent, FileWay, InPlaceOptions, MachineRestorePlan,
    MachineRestoreReport, MachineRestoreRequest, NewMachineIdentity, NewMachineOptions, PlannedFile, PlannedFolder,
    PlannedMachine, PlannedResumption, Presence, RestoreAs, Resumed, SpaceNeeded, Started, chain_of,
    plan_machine_restore, restore_machine, store_tpm_state,
};
pub use restore::mount::{
    ImageMount, ImageWorkerRequest, MountContent, MountPlace, MountRequest, MountedContent, MountedImage,
    WorkerLauncher, WritableImageMount, mount, serve_writable_image,
};
pub use restore::serve::control::{
    AddedExport, AddedExports, AddedWrites, CacheStatus, ClientStatus, ControlAnswer, ControlError, ControlErrorKind,
    ControlRequest, DiskSocket, ExportStatus, ServerStatus, TrafficStatus,
};
pub use restore::serve::control_server::{ControlPlace, ask_server, control_sockets};
pub use restore::serve::doors::ServeAddress;
pub use restore::serve::images::ServedImage;
pub use restore::serve::iscsi::{IscsiOptions, UnitRules};
pub use restore::serve::vhost_user::{SocketPlace, VhostUserOptions};
pub use restore::serve::{ClientWrites, NbdOptions, ServeRequest, ServeSource, SourceChoice, serve};
pub use template::{
    Digest as TemplateDigest, KeepIdentity, ListedHistory, ListedTemplate, Piece as TemplatePiece,
    PieceKind as TemplatePieceKind, Publication, Published, PullReport, PullRequest, PullTarget, PulledDisk,
    PushRequest, PushSource, RemovalSelection, Replace, SignedBy, Statement as TemplateStatement, TEMPLATE_NAMESPACE,
    TemplateContainer, TemplateContainerRequest, TemplateGuest, TemplateHistory, TemplateLabel, TemplateListing,
    TemplateName, TemplatePlan, TemplateReference, TemplateRemoval, TemplateTag, TemplateVersion, Trust, Unsealed,
    Unsigned, Vouching, create_container_from_template, list_templates, plan_push, plan_tag, prepare_push, prepare_tag,
    pull_template, remove_templates, show_template,
};
