//! What a repository needs besides its store: randomness, time, and the state of processes.

use std::sync::Arc;

use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};

use crate::error::Result;
use crate::key::Randomness;

/// Identifies a process on a host, so that its liveness can be checked later.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct ProcessIdentity {
    /// The host's name, for messages.
    pub host: String,
    /// An id that changes with each boot and differs between hosts.
    pub boot: String,
    /// The PID namespace: containers on one host have different ones.
    pub namespace: String,
    /// Process number.
    pub process: u32,
    /// Start time of the process in clock ticks of the host, since process numbers are reused.
    pub started: u64,
}

/// Whether a process is still running.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Liveness {
    /// It is running.
    Alive,
    /// It has certainly ended.
    Dead,
    /// Its state cannot be determined: it is on another host or in another container.
    Unknown,
}

/// Access to the processes that are visible from this one.
pub trait Processes: Send + Sync {
    /// The identity of this process.
    fn this(&self) -> ProcessIdentity;

    /// Whether `process` is still running.
    fn liveness(&self, process: &ProcessIdentity) -> Liveness;
}

/// The processes of this host, from `/proc`.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemProcesses;

/// Field 22 of `/proc/PID/stat`: the start time in ticks since boot (proc_pid_stat(5)).
fn started(process: &str) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The second field, the program's name in parentheses, may contain anything, including parentheses.
    let (_, fields) = stat.rsplit_once(')')?;
    fields.split_whitespace().nth(19)?.parse().ok()
}

/// Whether a process with this number exists, of any user; `/proc` may hide the processes of other users.
fn exists(process: u32) -> bool {
    let Some(id) = i32::try_from(process).ok().and_then(Pid::from_raw) else {
        return false;
    };
    // Only this error means that it does not exist; a permission error means that it does.
    !matches!(test_kill_process(id), Err(Errno::SRCH))
}

/// The liveness of a process that started at tick `recorded`, given whether a process with its number exists now, and
/// when that started if known.
fn liveness_of(recorded: u64, exists: bool, found: Option<u64>) -> Liveness {
    match (exists, found) {
        (_, Some(found)) if found == recorded => Liveness::Alive,
        (_, Some(_)) | (false, None) => Liveness::Dead,
        // It is hidden. It may be the same process or another one with its number.
        (true, None) => Liveness::Unknown,
    }
}

impl Processes for SystemProcesses {
    fn this(&self) -> ProcessIdentity {
        let text = |path: &str| std::fs::read_to_string(path).unwrap_or_default().trim().to_owned();
        let namespace = std::fs::read_link("/proc/self/ns/pid").unwrap_or_default();
        ProcessIdentity {
            host: text("/proc/sys/kernel/hostname"),
            boot: text("/proc/sys/kernel/random/boot_id"),
            namespace: namespace.to_string_lossy().into_owned(),
            process: std::process::id(),
            started: started("self").unwrap_or_default(),
        }
    }

    fn liveness(&self, process: &ProcessIdentity) -> Liveness {
        let this = self.this();
        if this.boot.is_empty() || process.boot.is_empty() {
            return Liveness::Unknown;
        }
        // A different boot id is another host, or this host before a restart; host names are not unique enough.
        if process.boot != this.boot || process.namespace != this.namespace {
            return Liveness::Unknown;
        }
        liveness_of(
            process.started,
            exists(process.process),
            started(&process.process.to_string()),
        )
    }
}

/// What a repository needs besides its store.
#[derive(Clone)]
pub struct Environment {
    /// The source of identities and salts.
    pub randomness: Arc<dyn Randomness>,
    /// Detects whether other processes are alive.
    pub processes: Arc<dyn Processes>,
    /// The time, in milliseconds since 1970-01-01 UTC.
    pub now_ms: Arc<dyn Fn() -> i64 + Send + Sync>,
}

impl Environment {
    /// Random bytes.
    pub(crate) fn draw<const N: usize>(&self) -> Result<[u8; N]> {
        let mut bytes = [0; N];
        self.randomness.fill(&mut bytes)?;
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::{Liveness, Processes, SystemProcesses, exists, liveness_of};

    /// With `hidepid=2` the processes of other users are not in `/proc`; their backups must not be considered dead.
    #[test]
    fn a_process_that_is_hidden_is_not_dead() {
        assert!(exists(std::process::id()) && exists(1));
        // The largest process number is 2^22 (PID_MAX_LIMIT of the kernel).
        assert!(!exists(1 << 22) && !exists(0) && !exists(u32::MAX));
        assert_eq!(liveness_of(7, true, Some(7)), Liveness::Alive);
        assert_eq!(
            liveness_of(7, true, Some(8)),
            Liveness::Dead,
            "its number was used again"
        );
        assert_eq!(liveness_of(7, false, None), Liveness::Dead);
        assert_eq!(liveness_of(7, true, None), Liveness::Unknown);
    }

    #[test]
    fn our_process_is_alive_and_an_earlier_one_with_its_pid_is_not() {
        let this = SystemProcesses.this();
        assert_eq!(SystemProcesses.liveness(&this), Liveness::Alive);
        let mut other = this.clone();
        other.started += 1;
        assert_eq!(SystemProcesses.liveness(&other), Liveness::Dead);
        other.namespace.push('x');
        assert_eq!(SystemProcesses.liveness(&other), Liveness::Unknown);
        other.boot.push('x');
        assert_eq!(SystemProcesses.liveness(&other), Liveness::Unknown);
    }
}
