//! How bulk work yields to the machines that run on this host.
//!
//! A backup that reads, hashes and compresses on all processors at the priority of a guest delays the guest by tens of
//! milliseconds, which is longer than the pause at the point in time. At a lower priority the backup uses the same
//! processors whenever no guest needs them.

use rustix::process::{getpriority_process, setpriority_process};

/// Niceness, from -20 to 19, default 0: a thread with 10 gets about a tenth of a processor that a thread with 0 competes for.
const BULK_NICE: i32 = 10;

/// Lowers the priority of the calling thread, and of the threads that it starts, until this is dropped.
///
/// A process without `CAP_SYS_NICE` and with a low niceness limit cannot raise its priority again: its thread keeps the
/// priority that it has.
#[must_use = "the priority is low only as long as this lives"]
pub(crate) struct BulkPriority {
    nice_before: Option<i32>,
}

impl BulkPriority {
    pub(crate) fn begin() -> Self {
        // On Linux "this process" means the calling thread here.
        let nice_before = getpriority_process(None).ok().filter(|nice| *nice < BULK_NICE);
        let nice_before = nice_before.filter(|_| setpriority_process(None, BULK_NICE).is_ok());
        Self { nice_before }
    }
}

impl Drop for BulkPriority {
    fn drop(&mut self) {
        if let Some(nice) = self.nice_before {
            setpriority_process(None, nice).ok();
        }
    }
}

/// Lowers the priority of the calling thread, and of all threads that it starts from now on. For commands that only do bulk work.
pub fn lower_priority() {
    std::mem::forget(BulkPriority::begin());
}

#[cfg(test)]
mod tests {
    use rustix::process::getpriority_process;

    use super::{BULK_NICE, BulkPriority};

    #[test]
    fn threads_that_are_started_meanwhile_have_a_low_priority_and_others_do_not() {
        let nice = || getpriority_process(None).unwrap();
        let before = nice();
        let bulk = BulkPriority::begin();
        let expected = before.max(BULK_NICE);
        assert_eq!(nice(), expected);
        assert_eq!(
            std::thread::spawn(move || getpriority_process(None).unwrap())
                .join()
                .unwrap(),
            expected
        );
        drop(bulk);
        assert!(nice() == before || !rustix::process::geteuid().is_root());
    }
}
