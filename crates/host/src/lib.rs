//! The outside world that owns disks: hypervisors, their machines, and the agents in them.

pub mod agent;
mod allocator;
mod bare;
pub mod changed_blocks;
pub mod domain_xml;
mod ended;
mod error;
mod file_system;
#[cfg(feature = "hostile")]
#[doc(hidden)]
pub mod hostile;
mod hypervisor;
mod identity;
#[cfg(feature = "libvirt")]
mod libvirt;
mod live_disks;
mod living;
mod machine;
mod obeyed;
mod other_process;
mod overlays;
mod process;
pub mod provider;
pub mod qemu;
pub mod qmp;
mod rights;
mod ssh;
mod ssh_signature;
mod stamp;
mod standard_streams;
mod swtpm;
mod tpm;
pub mod virtualbox;
mod waits;
pub mod xapi;

pub use allocator::map_large_buffers;
pub use bare::{BareQemu, WITHOUT_UUID};
pub use ended::Ended;
pub use error::{Error, Result};
pub use hypervisor::{Hypervisor, HypervisorMut, KeptStates, MEMORY_PIPE, Machine, Resumption};
pub use identity::{MacAddress, Uuid};
#[cfg(feature = "libvirt")]
pub use libvirt::Libvirt;
pub use live_disks::{CopyState, Life, LiveDisks};
pub use living::{
    Living, Writers, is_locked_by_others, is_written_by_others, living, open_below, parent_of, words_of_process,
    writers_of_device, writers_of_files,
};
pub use machine::{
    Decision, Description, DiskChoice, DiskKind, DiskSource, MachineDisk, MachineState, MachineSummary, Mark,
};
pub use obeyed::{why_not_obeyed, why_not_ours_alone};
pub use overlays::{CommitProgress, Overlays};
pub use process::{
    Answer, Call, Called, Companion, Ending, LocalTools, Order, Piped, PipedEnd, Programs, ToolError, Tools, Worked,
    Worker, command,
};
pub use rights::{FileKind, Links, Rights, UserIdentity};
pub use ssh::{Ssh, SshAddress, shell_line};
pub use ssh_signature::{
    AllowedSigners, PassphraseFrom, SSH_SIGNATURE_BYTES_MAX, Signed, SshSignatureError, SshSignatures, Verdict,
};
pub use stamp::stamp_of;
pub use standard_streams::StandardStream;
pub use tpm::{Tpm, TpmFile, TpmPlace, TpmStore, TpmVersion};
pub use waits::{LOCK_HOLDER, NotedWait, Wait, WaitKind, waits_under_way};
