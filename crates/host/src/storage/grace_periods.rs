//! Short grace periods of RCU while a file system is frozen.
//!
//! To freeze a file system, the kernel waits for three grace periods, and writers wait during two of them. On a busy
//! host they take 40 ms together. While `rcu_expedited` in `/sys/kernel` is not 0, they take less than 1 ms, and each
//! interrupts all processors.
//!
//! The switch is set for the time of the freeze only, to a value that others do not use. Who has it set holds a shared
//! lock on its file, and the last one resets it. So a value without a lock is that of a process that was killed: the
//! next freeze resets it, and so does [`reset_abandoned`].
//!
//! Every user can lock the file. So no lock is waited for, and a lock of another user can only keep grace periods long,
//! or keep them short.
//!
//! Sources: `kernel/ksysfs.c`, `percpu_down_write` of `kernel/locking/percpu-rwsem.c`, `freeze_super` of `fs/super.c`.

use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};

/// The switch of the kernel.
pub const SWITCH: &str = "/sys/kernel/rcu_expedited";
/// "hold" in ASCII.
const OWN_VALUE: u32 = 0x686f_6c64;
const OFF: u32 = 0;

/// Grace periods are short until this is dropped.
#[derive(Debug)]
pub(super) struct ShortGracePeriods {
    path: PathBuf,
    lock: File,
}

impl ShortGracePeriods {
    /// Makes grace periods short. Returns `None` if the switch is set or locked by others, or cannot be set: a freeze
    /// works without it.
    pub(super) fn begin(path: &Path) -> Option<Self> {
        let lock = File::open(path).ok()?;
        flock(&lock, FlockOperation::NonBlockingLockShared).ok()?;
        match value(path)? {
            // The value of another freeze, or of one that was killed.
            OWN_VALUE => {}
            OFF => set(path, OWN_VALUE).ok()?,
            _ => return None,
        }
        Some(Self {
            path: path.to_owned(),
            lock,
        })
    }
}

impl Drop for ShortGracePeriods {
    fn drop(&mut self) {
        // Another freeze that has a lock resets it at its end.
        if is_own_alone(&self.path, &self.lock) {
            set(&self.path, OFF).ok();
        }
    }
}

/// Whether the switch has the value of a freeze that was killed.
pub fn is_abandoned(path: &Path) -> bool {
    File::open(path).is_ok_and(|lock| is_own_alone(path, &lock))
}

/// Resets the switch if a freeze that was killed has left it set. Returns whether it was.
///
/// # Errors
/// The user is not root.
pub fn reset_abandoned(path: &Path) -> std::io::Result<bool> {
    let lock = File::open(path)?;
    let is_abandoned = is_own_alone(path, &lock);
    if is_abandoned {
        set(path, OFF)?;
    }
    Ok(is_abandoned)
}

/// Whether the switch has the value of a freeze, and no other process has a lock. The exclusive lock remains.
fn is_own_alone(path: &Path, lock: &File) -> bool {
    flock(lock, FlockOperation::NonBlockingLockExclusive).is_ok() && value(path) == Some(OWN_VALUE)
}

fn value(path: &Path) -> Option<u32> {
    std::fs::read_to_string(path).ok()?.trim_end().parse().ok()
}

fn set(path: &Path, value: u32) -> std::io::Result<()> {
    let mut switch = File::options().write(true).truncate(true).open(path)?;
    switch.write_all(format!("{value}\n").as_bytes())
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::path::PathBuf;

    use rustix::fs::{FlockOperation, flock};

    use super::{OWN_VALUE, ShortGracePeriods, is_abandoned, reset_abandoned, set, value};

    /// A file in place of the switch.
    fn switch(value: u32) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rcu_expedited");
        File::create(&path).unwrap();
        set(&path, value).unwrap();
        (folder, path)
    }

    #[test]
    fn the_last_of_several_freezes_resets_the_switch() {
        let (_folder, path) = switch(0);
        let first = ShortGracePeriods::begin(&path).unwrap();
        assert_eq!(value(&path), Some(OWN_VALUE));
        let second = ShortGracePeriods::begin(&path).unwrap();
        drop(first);
        assert_eq!(value(&path), Some(OWN_VALUE));
        assert!(!is_abandoned(&path));
        assert!(!reset_abandoned(&path).unwrap());
        drop(second);
        assert_eq!(value(&path), Some(0));
    }

    #[test]
    fn a_value_of_others_stays() {
        let (_folder, path) = switch(1);
        assert!(ShortGracePeriods::begin(&path).is_none());
        assert!(!is_abandoned(&path));
        assert!(!reset_abandoned(&path).unwrap());
        assert_eq!(value(&path), Some(1));
    }

    #[test]
    fn a_value_that_others_set_during_a_freeze_stays() {
        let (_folder, path) = switch(0);
        let periods = ShortGracePeriods::begin(&path).unwrap();
        set(&path, 1).unwrap();
        drop(periods);
        assert_eq!(value(&path), Some(1));
    }

    #[test]
    fn the_next_freeze_resets_what_a_killed_one_has_left() {
        let (_folder, path) = switch(OWN_VALUE);
        assert!(is_abandoned(&path));
        drop(ShortGracePeriods::begin(&path).unwrap());
        assert_eq!(value(&path), Some(0));
        assert!(!is_abandoned(&path));
    }

    #[test]
    fn what_a_killed_freeze_has_left_is_reset_on_request() {
        let (_folder, path) = switch(OWN_VALUE);
        assert!(reset_abandoned(&path).unwrap());
        assert_eq!(value(&path), Some(0));
    }

    #[test]
    fn a_lock_of_another_user_does_not_block_a_freeze() {
        let (_folder, path) = switch(0);
        let other = File::open(&path).unwrap();
        flock(&other, FlockOperation::LockExclusive).unwrap();
        assert!(ShortGracePeriods::begin(&path).is_none());
        assert!(!reset_abandoned(&path).unwrap());
        assert_eq!(value(&path), Some(0));
    }

    #[test]
    fn a_system_without_the_switch_freezes_without_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("missing");
        assert!(ShortGracePeriods::begin(&path).is_none());
        assert!(!is_abandoned(&path));
    }
}
