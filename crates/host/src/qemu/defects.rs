//! Known defects of QEMU that can harm a guest or its data, by version.
//!
//! This is the only module that decides by QEMU's version which operations are unsafe. Each entry has the affected
//! versions, the trigger, the alternative, and the source. Distributions fix some defects without a new version. Such
//! a QEMU is treated as if it had the defect, which costs speed and never safety.

use super::QemuVersion;

/// The consequence of a defect.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Danger {
    /// A copy-before-write filter fails the guest's write when the copy fails.
    FilterFailsGuest,
    /// QEMU aborts when a client of its NBD server disconnects from an export whose node is in an iothread.
    NbdClientOfIothread,
    /// QEMU aborts when a node is inserted above one in an iothread that has requests in flight.
    NodeOnBusyIothread,
    /// QEMU aborts when two requests for one range of a frozen disk overlap.
    OverlappingReads,
    /// The NBD server waits for a reader that disconnected, and QEMU's main loop waits for the server.
    ServerWaitsForReader,
    /// The memory of a machine with TCG is sent without some of the writes that the guest makes while it is sent.
    MemoryOfRunningTcg,
    /// A reset of an IDE or SATA controller overwrites the first sector of its disk.
    IdeResetWritesFirstSector,
    /// QEMU aborts when a device is set to the node that it already uses.
    SameNodeAgain,
}

/// A known defect of QEMU.
#[derive(Debug)]
pub struct Defect {
    /// The consequence.
    pub danger: Danger,
    /// The first affected version.
    since: QemuVersion,
    /// The first fixed version of each stable branch, in order. From the last one on, all versions are fixed. Empty if
    /// no version is known to be fixed.
    fixed: &'static [QemuVersion],
    /// What triggers the defect.
    pub trigger: &'static str,
    /// The alternative for an affected QEMU.
    pub instead: &'static str,
    /// Commits of QEMU, and the releases that contain them.
    pub source: &'static str,
}

const OLDEST: QemuVersion = QemuVersion::new(0, 0, 0);

/// All known defects.
pub const DEFECTS: [Defect; 8] = [
    Defect {
        danger: Danger::FilterFailsGuest,
        since: OLDEST,
        fixed: &[QemuVersion::new(7, 1, 0)],
        trigger: "the scratch file is full or slow while a copy-before-write filter is under a disk",
        instead: "no filter is used: the images are cloned, or the disks get overlays",
        source: "options on-cbw-error and cbw-timeout of the driver copy-before-write, \"since 7.1\" in qapi/block-core.json",
    },
    Defect {
        danger: Danger::NbdClientOfIothread,
        since: OLDEST,
        fixed: &[QemuVersion::new(8, 2, 3)],
        trigger: "a client of QEMU's NBD server disconnects from an export whose node is in an iothread",
        instead: "such a disk is not exported: a backup job of QEMU copies it in parts into a scratch file",
        source: "commit 3e7ef738c846 (\"nbd/server: CVE-2024-7409: Close stray clients at server-stop\") asserts that clients leave in the \
                 main loop, and is in 7.2.14 and later; this is true since commits f816310d0c32 and 7075d235114b, in 9.0.0 and 8.2.3. \
                 Versions before 7.2.14 count clients from several threads without a lock",
    },
    Defect {
        danger: Danger::NodeOnBusyIothread,
        since: OLDEST,
        fixed: &[QemuVersion::new(9, 0, 0)],
        trigger: "blockdev-add inserts a filter or a snapshot-access node above a node in an iothread that has requests in flight",
        instead: "such nodes are added while the machine is paused, when no request is in flight; none above drivers that QEMU always \
                  waits for",
        source: "seen with 7.2.22, at the first filter that is added with four writes in flight: \"qemu_mutex_unlock_impl: Operation not permitted\"; the \
                 lock of contexts is gone in 9.0 (\"block: remove AioContext locking\")",
    },
    Defect {
        danger: Danger::OverlappingReads,
        since: QemuVersion::new(7, 0, 0),
        fixed: &[QemuVersion::new(7, 2, 15), QemuVersion::new(9, 1, 1)],
        trigger: "two requests to a snapshot-access node (reads or block status queries) overlap",
        instead: "each frozen disk has one reader, which queries the block status only beyond its reads",
        source: "commit 6475155d5192 (\"block/reqlist: allow adding overlapping requests\"), in 9.1.1 and 7.2.15",
    },
    Defect {
        danger: Danger::ServerWaitsForReader,
        since: OLDEST,
        fixed: &[],
        trigger: "a reader disconnects while the NBD server has a full queue of answers for it, and nbd-server-stop is called",
        instead: "a reader that stops discards the pending answers, so that the queue has space",
        source: "seen with 7.2.22, in ten of 1850 backups that were made to fail; docs/design/0004-live-machines.md",
    },
    Defect {
        danger: Danger::MemoryOfRunningTcg,
        since: OLDEST,
        fixed: &[QemuVersion::new(9, 0, 0)],
        trigger: "the memory of a machine whose processors are emulated (TCG) is sent while it runs",
        instead: "the machine is stopped while its memory is sent",
        source: "commit 03bfc2188f06 (\"physmem: Fix migration dirty bitmap coherency with TCG memory access\"), in 9.0.0",
    },
    Defect {
        danger: Danger::IdeResetWritesFirstSector,
        since: OLDEST,
        fixed: &[
            QemuVersion::new(7, 2, 7),
            QemuVersion::new(8, 1, 3),
            QemuVersion::new(8, 2, 0),
        ],
        trigger: "a machine, or its IDE or SATA controller, is reset while a write is on its way; a guest resets a controller that does not \
                  answer in time",
        instead: "a filter never delays a write as long as a guest waits for its controller",
        source: "CVE-2023-5088: commit 7d7512019fc4 (\"hw/ide: reset: cancel async DMA operation before resetting state\"), in 8.2.0, 8.1.3 \
                 and 7.2.7",
    },
    Defect {
        danger: Danger::SameNodeAgain,
        since: OLDEST,
        fixed: &[],
        trigger: "qom-set sets a device to the node that it already has",
        instead: "the current node of a device is queried before another one is set",
        source: "seen with 7.2.22: \"bdrv_replace_child_noperm: Assertion `old_bs != new_bs' failed\"; blk_replace_bs compares nothing in \
                 later versions either",
    },
];

impl Defect {
    fn affects(&self, version: QemuVersion) -> bool {
        let is_fixed_in_branch = self
            .fixed
            .iter()
            .any(|fixed| version.is_of_branch(*fixed) && version >= *fixed);
        let is_later = self.fixed.last().is_some_and(|last| version >= *last);
        version >= self.since && !is_fixed_in_branch && !is_later
    }
}

impl QemuVersion {
    /// The defect with this consequence; none if this version does not have it.
    pub fn defect(self, danger: Danger) -> Option<&'static Defect> {
        DEFECTS
            .iter()
            .find(|defect| defect.danger == danger && defect.affects(self))
    }
}

#[cfg(test)]
mod tests {
    use super::{DEFECTS, Danger};
    use crate::qemu::QemuVersion;

    #[test]
    fn a_version_has_the_defects_of_its_branch() {
        let has = |danger, major, minor, micro| QemuVersion::new(major, minor, micro).defect(danger).is_some();
        let filter = |major, minor| has(Danger::FilterFailsGuest, major, minor, 9);
        assert!(filter(6, 2) && filter(7, 0) && !filter(7, 1) && !filter(10, 0));
        let client = |major, minor, micro| has(Danger::NbdClientOfIothread, major, minor, micro);
        assert!(client(4, 2, 1) && client(7, 2, 0) && client(7, 2, 22) && client(8, 1, 5) && client(8, 2, 2));
        assert!(!client(8, 2, 3) && !client(9, 0, 0) && !client(10, 0, 13));
        let reads = |major, minor, micro| has(Danger::OverlappingReads, major, minor, micro);
        assert!(
            reads(7, 2, 14)
                && !reads(7, 2, 15)
                && reads(8, 2, 0)
                && reads(9, 1, 0)
                && !reads(9, 1, 1)
                && !reads(9, 2, 0)
                && !reads(6, 2, 0)
        );
        let memory = |major, minor| has(Danger::MemoryOfRunningTcg, major, minor, 50);
        assert!(memory(7, 2) && memory(8, 2) && !memory(9, 0));
        let reset = |major, minor, micro| has(Danger::IdeResetWritesFirstSector, major, minor, micro);
        assert!(reset(6, 2, 0) && reset(7, 2, 6) && reset(8, 0, 5) && reset(8, 1, 2));
        assert!(!reset(7, 2, 7) && !reset(8, 1, 3) && !reset(8, 2, 0) && !reset(10, 0, 13));
    }

    #[test]
    fn each_danger_has_one_entry_with_its_source() {
        for (number, defect) in DEFECTS.iter().enumerate() {
            assert!(DEFECTS[..number].iter().all(|other| other.danger != defect.danger));
            assert!(defect.fixed.is_sorted());
            let texts = [defect.trigger, defect.instead, defect.source];
            assert!(texts.iter().all(|text| !text.is_empty()), "{:?}", defect.danger);
        }
    }
}
