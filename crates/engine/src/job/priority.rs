//! How work in bulk gives way to the machines that run on this host.
//!
//! A backup that reads, hashes and compresses on all processors at the priority of a guest makes the guest wait tens of milliseconds for its
//! turn, longer than the point in time itself takes. At a lower priority it gets the same processors whenever a guest does not need them.

use rustix::process::{getpriority_process, setpriority_process};

/// Of -20 to 19, where 0 is usual: a thread with this gets a tenth of a processor that one with 0 wants whole.
const BULK_NICE: i32 = 10;

/// The calling thread, and the threads that it starts, have a lower priority until this is dropped.
///
/// A process without `CAP_SYS_NICE` and with a low limit of niceness cannot go back: its thread stays as it is.
#[must_use = "the priority is low only as long as this lives"]
pub(crate) struct BulkPriority {
    nice_before: Option<i32>,
}

impl BulkPriority {
    pub(crate) fn begin() -> Self {
        // Linux takes "this process" for the calling thread here.
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

/// Gives the calling thread, and all that it starts from now on, the priority of work in bulk. For commands that do nothing else.
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
