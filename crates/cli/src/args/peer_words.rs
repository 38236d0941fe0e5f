//! Commands of other programs, and the corresponding Holdfast commands.

/// Commands of restic, Borg, Proxmox Backup Server, ZFS, sanoid and virsh, and what to type instead.
const PEER_WORDS: &[(&str, &str)] = &[
    ("snapshots", "use 'holdfast list'"),
    ("backups", "use 'holdfast list'"),
    (
        "ls",
        "use 'holdfast list', or 'holdfast show' for the disks of a snapshot",
    ),
    (
        "check",
        "use 'holdfast verify' for snapshots, or 'holdfast scrub' for the whole repository",
    ),
    ("dump", "use 'holdfast restore SNAPSHOT:DISK -'"),
    ("extract", "use 'holdfast restore'"),
    (
        "cat",
        "use 'holdfast show', or 'holdfast restore SNAPSHOT:DISK -' for the bytes of a disk",
    ),
    (
        "find",
        "use 'holdfast list MACHINE'; 'holdfast serve nbd' opens a disk to look for files",
    ),
    (
        "create",
        "use 'holdfast backup' for a snapshot, or 'holdfast init' for a repository",
    ),
    (
        "delete",
        "use 'holdfast forget', or 'holdfast host remove' for host snapshots",
    ),
    (
        "remove",
        "use 'holdfast forget', or 'holdfast host remove' for host snapshots",
    ),
    (
        "rm",
        "use 'holdfast forget', or 'holdfast host remove' for host snapshots",
    ),
    (
        "destroy",
        "use 'holdfast forget', or 'holdfast host remove' for host snapshots",
    ),
    (
        "unlock",
        "no command is needed: the lock of a process that has ended does not count",
    ),
    (
        "break-lock",
        "no command is needed: the lock of a process that has ended does not count",
    ),
    ("compact", "use 'holdfast gc'"),
    ("garbage-collection", "use 'holdfast gc'"),
    ("expire", "use 'holdfast prune'"),
    ("rebuild-index", "use 'holdfast repair'"),
    ("recover", "use 'holdfast repair'"),
    ("passwd", "use 'holdfast key rotate'"),
    ("password", "use 'holdfast key rotate'"),
    (
        "tag",
        "use 'holdfast backup --tag'; 'holdfast template tag' is about templates",
    ),
    (
        "info",
        "use 'holdfast show', 'holdfast stats' for the repository, or 'holdfast image info' for an image",
    ),
    ("status", "use 'holdfast jobs', or 'holdfast stats' for the repository"),
    ("history", "use 'holdfast runs'"),
    ("log", "use 'holdfast runs'"),
    (
        "schedule",
        "use 'holdfast daemon', or 'holdfast jobs' to see when jobs run",
    ),
    ("vms", "use 'holdfast machines'"),
    ("domains", "use 'holdfast machines'"),
    ("datasets", "use 'holdfast host datasets'"),
    ("hold", "use 'holdfast host hold'"),
    ("release", "use 'holdfast host release'"),
    ("revert", "use 'holdfast rollback'"),
    ("send", "use 'holdfast replicate'"),
    (
        "sync",
        "use 'holdfast replicate' for host snapshots, or 'holdfast copy' for a repository",
    ),
    ("syncoid", "use 'holdfast replicate'"),
    ("sanoid", "use 'holdfast cron'"),
    ("umount", "use 'holdfast unmount'"),
    ("convert", "use 'holdfast image convert'"),
    ("resize", "use 'holdfast image resize'"),
    ("compare", "use 'holdfast image compare'"),
    ("map", "use 'holdfast image map'"),
    ("push", "use 'holdfast template push', or 'holdfast copy' for snapshots"),
    ("pull", "use 'holdfast template pull', or 'holdfast copy' for snapshots"),
    ("nbd", "use 'holdfast serve nbd'"),
];

/// The Holdfast command that corresponds to a command of another program.
pub(super) fn instead_of(word: &str) -> Option<&'static str> {
    let (_, instead) = PEER_WORDS.iter().find(|(peer, _)| *peer == word)?;
    Some(instead)
}

#[cfg(test)]
mod tests {
    use super::PEER_WORDS;
    use crate::commands::COMMAND_LINE;

    #[test]
    fn words_of_others_lead_to_verbs_that_are_there() {
        for (word, instead) in PEER_WORDS {
            assert!(COMMAND_LINE.verb(word).is_none(), "{word} is a verb");
            for line in instead.split('\'').skip(1).step_by(2) {
                let path: Vec<&str> = line
                    .split(' ')
                    .skip(1)
                    .take_while(|word| word.chars().all(|letter| letter.is_ascii_lowercase()))
                    .collect();
                assert!(COMMAND_LINE.verb(&path.join(" ")).is_some(), "{word}: {line}");
            }
        }
    }
}
