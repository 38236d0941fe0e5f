//! Programs that run with fewer rights than this process.
//!
//! Capabilities belong to threads, and a process inherits those of the thread that starts it. So a separate thread
//! drops the capabilities that the program does not need, starts the program, and ends.

use std::io;

use rustix::io::Errno;
use rustix::thread::{CapabilitySet, capability_is_in_bounding_set, remove_capability_from_bounding_set};

/// Capabilities for receiving a btrfs stream: subvolumes, files of any owner, their modes, and chroot. Not included
/// are, among others, the capabilities to create devices, to set file capabilities, and to access other processes.
pub(super) const FOR_RECEIVING: CapabilitySet = CapabilitySet::SYS_ADMIN
    .union(CapabilitySet::CHOWN)
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::DAC_READ_SEARCH)
    .union(CapabilitySet::FOWNER)
    .union(CapabilitySet::FSETID)
    .union(CapabilitySet::SYS_CHROOT);

/// Starts processes that have at most the capabilities `kept`. For a user other than root, there are no capabilities
/// to drop.
pub(super) fn start_with<T: Send>(kept: CapabilitySet, start: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("confined".to_owned());
        let started = thread.spawn_scoped(scope, || {
            give_up_all_but(kept)?;
            start()
        })?;
        started.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

fn give_up_all_but(kept: CapabilitySet) -> io::Result<()> {
    for number in 0..u64::BITS {
        let one = CapabilitySet::from_bits_retain(1 << number);
        if kept.contains(one) {
            continue;
        }
        match capability_is_in_bounding_set(one) {
            Ok(true) => {}
            Ok(false) => continue,
            // No capability has this number or a higher one.
            Err(Errno::INVAL) => break,
            Err(error) => return Err(error.into()),
        }
        match remove_capability_from_bounding_set(one) {
            // A service with few capabilities may lack the right to drop others.
            Ok(()) | Err(Errno::PERM) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use rustix::thread::{CapabilitySet, capability_is_in_bounding_set};

    use super::{FOR_RECEIVING, start_with};

    #[test]
    fn the_program_is_confined_and_this_process_is_not() {
        let before = capability_is_in_bounding_set(CapabilitySet::MKNOD).unwrap();
        let held = start_with(FOR_RECEIVING, || {
            let tools = std::fs::read_to_string("/proc/thread-self/status")?;
            let line = tools.lines().find_map(|line| line.strip_prefix("CapBnd:"));
            Ok(u64::from_str_radix(line.unwrap_or_default().trim(), 16).unwrap_or(u64::MAX))
        });
        let held = CapabilitySet::from_bits_retain(held.unwrap());
        if rustix::process::geteuid().is_root() {
            assert!(FOR_RECEIVING.contains(held), "{held:?}");
        }
        assert_eq!(capability_is_in_bounding_set(CapabilitySet::MKNOD).unwrap(), before);
    }
}
