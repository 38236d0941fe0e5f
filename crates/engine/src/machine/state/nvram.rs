//! The firmware variables at the point in time.

use std::io::Read as _;

use holdfast_host::{Description, FileKind, Links, Rights};

use crate::job::{Error, Result};

/// The maximum size of a file with firmware variables in bytes.
const NVRAM_BYTES_MAX: u64 = 64 << 20;

/// The firmware variables of a machine, if it has any, read with the rights of the user who controls the path.
pub(crate) fn read(description: &Description, rights: &Rights) -> Result<Option<Vec<u8>>> {
    let Some(path) = &description.nvram else {
        return Ok(None);
    };
    let failed = |source| Error::File {
        action: "read",
        path: path.clone(),
        source,
    };
    let file = match rights.open(path, FileKind::RegularOrBlockDevice, Links::Follow) {
        // A machine that never ran has no variables yet.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        other => other.map_err(failed)?,
    };
    let mut bytes = Vec::new();
    file.take(NVRAM_BYTES_MAX).read_to_end(&mut bytes).map_err(failed)?;
    Ok(Some(bytes))
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::os::unix::fs::PermissionsExt;
    use std::path::Path;

    use holdfast_host::{BackupMark, Description, MachineState, MachineSummary, Rights, UserIdentity};
    use rustix::fs::{CWD, FileType, Mode, mknodat};
    use rustix::process::geteuid;

    use super::read;

    fn machine(nvram: &Path) -> Description {
        Description {
            summary: MachineSummary {
                name: "web1".to_owned(),
                uuid: "u".to_owned(),
                state: MachineState::ShutOff,
            },
            disks: Vec::new(),
            nvram: Some(nvram.to_owned()),
            tpm: None,
            has_agent_channel: false,
            mark: BackupMark::default(),
        }
    }

    /// The hypervisor's owner may name a pipe, which must not block the backup, or a file that only root can read,
    /// which must not be stored.
    #[test]
    fn only_a_file_that_the_owner_of_the_machine_can_read_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("vars");
        assert_eq!(read(&machine(&path), &Rights::Own).unwrap(), None);
        std::fs::File::create(&path).unwrap().write_all(b"secret").unwrap();
        assert_eq!(read(&machine(&path), &Rights::Own).unwrap().unwrap(), b"secret");
        let fifo = folder.path().join("fifo");
        mknodat(CWD, &fifo, FileType::Fifo, Mode::RWXU, 0).unwrap();
        assert!(read(&machine(&fifo), &Rights::Own).is_err());
        if !geteuid().is_root() {
            return;
        }
        std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o755)).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
        let other_user = Rights::of(UserIdentity {
            user: 65_534,
            group: 65_534,
            groups: Vec::new(),
        });
        assert!(read(&machine(&path), &other_user).is_err());
    }
}
