//! Gives up the rights of this process, for good: for a process that parses what is not trusted.

use std::collections::BTreeMap;
use std::io;

use rustix::process::{Resource, Rlimit, setrlimit};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, apply_filter_all_threads};

/// Most memory of a confined process, in bytes of address space.
const MEMORY_BYTES_MAX: u64 = 2 << 30;

/// The system calls of a process that only reads and writes what is open, computes and ends.
const CALLS: &[libc::c_long] = &[
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_close,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_brk,
    libc::SYS_mmap,
    libc::SYS_mremap,
    libc::SYS_munmap,
    libc::SYS_mprotect,
    libc::SYS_madvise,
    libc::SYS_futex,
    libc::SYS_sched_yield,
    libc::SYS_getrandom,
    libc::SYS_clock_gettime,
    libc::SYS_rt_sigreturn,
    libc::SYS_rt_sigprocmask,
    libc::SYS_sigaltstack,
    libc::SYS_restart_syscall,
];

/// Limits the memory of this process, and forbids all its threads all system calls but those for reading and writing open
/// files, memory, and the end of the process. A forbidden call fails with "operation not permitted".
///
/// # Errors
/// The kernel has no seccomp, or forbids it; the limits hold.
pub fn confine() -> io::Result<()> {
    let limit = |resource, bytes| {
        let limit = Rlimit {
            current: Some(bytes),
            maximum: Some(bytes),
        };
        setrlimit(resource, limit)
    };
    limit(Resource::As, MEMORY_BYTES_MAX)?;
    limit(Resource::Core, 0)?;
    limit(Resource::Fsize, 0)?;
    let failed = |error: &dyn std::error::Error| io::Error::other(error.to_string());
    let rules = CALLS.iter().map(|call| (*call, Vec::new())).collect::<BTreeMap<_, _>>();
    let architecture = std::env::consts::ARCH
        .try_into()
        .map_err(|error: seccompiler::BackendError| failed(&error))?;
    let permission_denied = SeccompAction::Errno(libc::EPERM.cast_unsigned());
    let filter = SeccompFilter::new(rules, permission_denied, SeccompAction::Allow, architecture);
    let program: BpfProgram = filter
        .and_then(TryInto::try_into)
        .map_err(|error: seccompiler::BackendError| failed(&error))?;
    apply_filter_all_threads(&program).map_err(|error| failed(&error))
}
