//! Access to the outside world that owns disks: hypervisors, their machines, the agents in them, and the storage of
//! the host.

#[cfg(feature = "hostile")]
#[doc(hidden)]
pub mod hostile;
mod hypervisor;
pub mod qemu;
mod storage;
mod system;

pub use hypervisor::{agent, domain_xml, virtualbox, xapi};
pub use qemu::qmp;
pub use storage::{changed_blocks, freeze, fuse_mount, grace_periods, loop_device, nbd_device, provider};

pub use hypervisor::bare::{BareHost, BareQemu, CommandLine, WITHOUT_UUID};
pub use hypervisor::error::{Error, Result};
pub use hypervisor::exit_report::MachineEnd;
#[cfg(feature = "libvirt")]
pub use hypervisor::libvirt::Libvirt;
pub use hypervisor::live_disks::{CopyState, ExecutionState, LiveDisks};
pub use hypervisor::machine::{
    BackupMark, Decision, Description, DiskChoice, DiskKind, DiskSource, MachineDisk, MachineState, MachineSummary,
};
pub use hypervisor::migration::{
    Autostart, ConfigurationLanguage, GuestSpeed, InterruptedMigration, LiveMigration, MachineHistory,
    MigrationRequest, ProcessorFit, ReceiverStart, ReceivingHost, SnapshotDescription, Switchover,
};
pub use hypervisor::overlays::{CommitProgress, Overlays};
pub use hypervisor::tpm::{Tpm, TpmFile, TpmPlace, TpmStore, TpmVersion};
pub use hypervisor::traits::{Hypervisor, HypervisorMut, KeptStates, MEMORY_PIPE, Machine, Resumption};
pub use storage::retries::retry_while_in_use;
pub use system::allocator::{keep_request_buffers, map_large_buffers};
pub use system::file_stamp::stamp_of;
pub use system::identity::{MacAddress, Uuid};
pub use system::process::{
    Answer, Call, CallOutput, ConfinedReader, HandedProcess, LineProcess, LocalTools, PROGRAM_PATH, Piped, PipedEnd,
    ProcessOutcome, StreamTools, ToolError, Tools, Worker, WorkerOutput, WorkerRequest, command, run_shell_command,
};
pub use system::processes::UserIdentity;
pub use system::processes::{
    ProcessInfo, Writers, command_line_of, is_locked_by_others, is_written_by_others, open_below, parent_of,
    processes_named, users_of_file, writers_of_device, writers_of_files,
};
pub use system::rights::{FileKind, Links, Rights};
pub use system::sandbox::confine;
pub use system::ssh::{Ssh, SshAddress, shell_line};
pub use system::ssh_signature::{
    AllowedSigners, PassphraseFrom, SSH_SIGNATURE_BYTES_MAX, Signed, SshSignatureError, SshSignatures, Verdict,
};
pub use system::standard_streams::StandardStream;
pub use system::trusted_files::{why_not_private, why_untrusted};
pub use system::waits::{LOCK_HOLDER, NotedWait, Wait, WaitKind, waits_under_way};
