//! The state of an instant restore that is needed to continue it: a file in the folder of its machine.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::Read as _;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use holdfast_block::{open_past_leases, replace_file, sync_folder_of};
use holdfast_host::domain_xml::{DiskPlace, Medium};
use rustix::fs::{FlockOperation, Mode, OFlags, flock, open};
use serde::{Deserialize, Serialize};

use crate::job::error::InstantError;
use crate::job::{Error, Job, Result};

const VERSION: u32 = 1;
const JOB: &str = "job.json";
const SOCKET: &str = "nbd";
const OVERLAYS: &str = "written";
/// An empty file: the machine may have run, and its writes are in the overlays.
const BEGUN: &str = "begun";
/// The maximum size of the job's file in bytes; most of it is the machine's configuration.
const JOB_BYTES_MAX: u64 = 16 << 20;

/// An instant restore. It contains no password.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InstantJob {
    /// The absolute path of the repository.
    pub repository: PathBuf,
    /// The snapshot's id.
    pub snapshot: String,
    /// The name that the snapshot is listed under.
    pub listed: String,
    /// The machine's name.
    pub machine: String,
    /// The machine's UUID.
    pub uuid: String,
    /// The machine's configuration after the restore.
    pub definition: String,
    /// Its disks.
    pub disks: Vec<InstantDisk>,
    /// The user and group as which QEMU connects to the server.
    pub user_of_machines: Option<(u32, u32)>,
    /// The files that were created for it outside its folder.
    pub(crate) made: Vec<MadeFile>,
    /// The number of the hold on the snapshot.
    pub hold: u32,
    /// The folder with all files of the job.
    #[serde(skip)]
    pub folder: PathBuf,
}

/// A file that was created, identified by more than its name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct MadeFile {
    pub(crate) path: PathBuf,
    /// The number of its device.
    device: u64,
    /// Its inode number.
    inode: u64,
}

impl MadeFile {
    pub(crate) fn at(path: &Path) -> Option<Self> {
        let found = path.symlink_metadata().ok()?;
        Some(Self {
            path: path.to_owned(),
            device: found.dev(),
            inode: found.ino(),
        })
    }

    /// The same file under its final name.
    pub(crate) fn called(self, name: &Path) -> Self {
        let path = name.to_owned();
        Self { path, ..self }
    }

    /// Whether the path still leads to this file.
    pub(crate) fn is_there(&self) -> bool {
        Self::at(&self.path).as_ref() == Some(self)
    }
}

/// A disk that is being filled.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InstantDisk {
    /// Its name, both in the machine and in the snapshot.
    pub name: String,
    /// The image or block device that is filled.
    pub target: PathBuf,
    /// The format of the target.
    pub format: String,
    /// Whether it is a block device.
    pub is_block_device: bool,
    /// Its size in bytes.
    pub size_bytes: u64,
}

impl InstantDisk {
    /// The place of the disk after the restore.
    pub(crate) fn place(&self) -> DiskPlace {
        DiskPlace {
            path: self.target.clone(),
            medium: if self.is_block_device {
                Medium::BlockDevice
            } else {
                Medium::File
            },
            format: self.format.clone(),
        }
    }
}

/// Why a folder is not trusted: its content is acted on with the rights of this process.
fn strange(folder: &Path) -> Option<&'static str> {
    match folder.symlink_metadata() {
        Err(_) => Some("its folder is not there"),
        Ok(found) if !found.is_dir() => Some("its folder is not a folder"),
        Ok(found) if !is_ours_alone(&found) => Some("others may write to its folder"),
        Ok(_) => None,
    }
}

fn is_ours_alone(found: &std::fs::Metadata) -> bool {
    found.uid() == rustix::process::geteuid().as_raw() && found.mode() & 0o022 == 0
}

/// The job's file, of any version.
#[derive(Serialize, Deserialize)]
struct VersionedJob {
    version: u32,
    job: serde_json::Value,
}

impl InstantJob {
    /// Reads the job in a folder.
    pub fn read(folder: &Path) -> Result<Self> {
        let path = folder.join(JOB);
        let wrong = |reason: String| {
            Error::from(InstantError::Job {
                path: path.clone(),
                reason,
            })
        };
        if let Some(reason) = strange(folder) {
            return Err(wrong(reason.to_owned()));
        }
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let opened = open_past_leases(flags, |flags| open(&path, flags, Mode::empty()))
            .map_err(|errno| wrong(errno.to_string()))?;
        let file = File::from(opened);
        let metadata = file.metadata().map_err(|error| wrong(error.to_string()))?;
        if !metadata.is_file() || !is_ours_alone(&metadata) {
            return Err(wrong("others may have written it".to_owned()));
        }
        let length = metadata.len();
        if length > JOB_BYTES_MAX {
            return Err(wrong(format!("it has {length} bytes")));
        }
        let mut bytes = Vec::new();
        let read = file.take(JOB_BYTES_MAX).read_to_end(&mut bytes);
        read.map_err(|error| wrong(error.to_string()))?;
        let found: VersionedJob = serde_json::from_slice(&bytes).map_err(|error| wrong(error.to_string()))?;
        if found.version != VERSION {
            return Err(wrong(format!("version {} is not known here", found.version)));
        }
        let job: Self = serde_json::from_value(found.job).map_err(|error| wrong(error.to_string()))?;
        Ok(Self {
            folder: folder.to_owned(),
            ..job
        })
    }

    /// Writes the new job's file, durably.
    pub(crate) fn write(&self) -> Result<()> {
        let path = self.folder.join(JOB);
        let write = || -> std::io::Result<()> {
            let job = serde_json::to_value(self)?;
            let bytes = serde_json::to_vec_pretty(&VersionedJob { version: VERSION, job })?;
            // Only the owner may read it: the configuration may hold passwords of displays.
            replace_file(&path, &self.folder.join("job.json.partial"), &bytes, None)?;
            sync_folder_of(&self.folder)
        };
        write().map_err(|source| Error::File {
            action: "write",
            path: path.clone(),
            source,
        })
    }

    /// The server's socket.
    pub(crate) fn socket(&self) -> PathBuf {
        self.folder.join(SOCKET)
    }

    /// The folder with the guest's writes; private to this user.
    pub(crate) fn overlays(&self) -> PathBuf {
        self.folder.join(OVERLAYS)
    }

    /// The export name of a disk.
    pub(crate) fn export(&self, disk: &InstantDisk) -> String {
        format!("{}/{}", self.listed, disk.name)
    }

    /// Warns how its disks can be filled if this process does not fill them.
    pub(crate) fn warn_of_resume(&self, job: Job<'_>) {
        let machine = &self.machine;
        job.progress.warning(&format!(
            "{machine} may be running from the snapshot; holdfast resume {machine} continues to fill its disks"
        ));
    }

    /// The folders in which its images are created.
    pub(crate) fn made_files_folders(&self) -> BTreeSet<PathBuf> {
        let images = self.disks.iter().filter(|disk| !disk.is_block_device);
        images
            .filter_map(|disk| disk.target.parent())
            .map(Path::to_owned)
            .collect()
    }

    /// Notes durably that the machine may run from now on.
    pub(crate) fn begin(&self) -> Result<()> {
        let path = self.folder.join(BEGUN);
        if self.has_begun() {
            return Ok(());
        }
        let noted = File::create_new(&path).and_then(|_| sync_folder_of(&path));
        noted.map_err(|source| Error::File {
            action: "write",
            path,
            source,
        })
    }

    /// Whether the machine may have run.
    pub(crate) fn has_begun(&self) -> bool {
        // If this cannot be determined, assume that the machine has run.
        !matches!(self.folder.join(BEGUN).try_exists(), Ok(false))
    }

    /// Whether a process holds a lock in the folder. Nothing is changed.
    pub(crate) fn is_locked(&self, name: &str) -> Result<bool> {
        let path = self.folder.join(name);
        let failed = |source| Error::File {
            action: "look at the lock",
            path: path.clone(),
            source,
        };
        let file = match File::open(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(false),
            other => other.map_err(failed)?,
        };
        match flock(&file, FlockOperation::NonBlockingLockShared) {
            Ok(()) => Ok(false),
            Err(rustix::io::Errno::WOULDBLOCK) => Ok(true),
            Err(errno) => Err(failed(errno.into())),
        }
    }

    /// Locks a file of the folder; none if another process holds the lock.
    pub(crate) fn lock(&self, name: &str) -> Result<Option<File>> {
        let path = self.folder.join(name);
        let failed = |source| Error::File {
            action: "lock",
            path: path.clone(),
            source,
        };
        let opened = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .read(true)
            .mode(0o600)
            .open(&path);
        let file = opened.map_err(failed)?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(file)),
            Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
            Err(errno) => Err(failed(errno.into())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{InstantDisk, InstantJob, JOB, MadeFile};
    use crate::job::Error;

    #[test]
    fn a_job_is_read_as_it_was_written_and_no_other_version_is() {
        let folder = tempfile::tempdir().unwrap();
        let job = InstantJob {
            repository: "/r".into(),
            snapshot: "00".to_owned(),
            listed: "web1".to_owned(),
            machine: "web1-restored".to_owned(),
            uuid: "u".to_owned(),
            definition: "<domain/>".to_owned(),
            disks: vec![InstantDisk {
                name: "vda".to_owned(),
                target: "/i".into(),
                format: "raw".to_owned(),
                is_block_device: true,
                size_bytes: 5,
            }],
            user_of_machines: Some((1, 2)),
            made: vec![MadeFile {
                path: "/i".into(),
                device: 1,
                inode: 2,
            }],
            hold: 7,
            folder: folder.path().into(),
        };
        job.write().unwrap();
        assert_eq!(InstantJob::read(folder.path()).unwrap(), job);
        let path = folder.path().join(JOB);
        let text = std::fs::read_to_string(&path).unwrap();
        for wrong in [
            text.replace("\"version\": 1", "\"version\": 2"),
            text[..text.len() / 2].to_owned(),
        ] {
            std::io::Write::write_all(&mut std::fs::File::create(&path).unwrap(), wrong.as_bytes()).unwrap();
            let error = InstantJob::read(folder.path()).unwrap_err();
            assert!(
                matches!(error, Error::Instant(crate::InstantError::Job { .. })),
                "{error}"
            );
        }
    }

    #[test]
    fn what_others_may_have_written_is_not_believed() {
        use std::os::unix::fs::PermissionsExt as _;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(JOB);
        let refused = |what: &str| {
            let error = InstantJob::read(folder.path()).unwrap_err().to_string();
            assert!(error.contains(what), "{error}");
        };
        std::fs::File::create(&path).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o622)).unwrap();
        refused("others may have written it");
        std::fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink("/etc/hostname", &path).unwrap();
        refused("symbolic links");
        std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
        refused("others may write to its folder");
    }

    #[test]
    fn one_at_a_time_has_a_lock() {
        let folder = tempfile::tempdir().unwrap();
        let job = InstantJob {
            repository: "/".into(),
            snapshot: String::new(),
            listed: String::new(),
            machine: String::new(),
            uuid: String::new(),
            definition: String::new(),
            disks: Vec::new(),
            user_of_machines: None,
            made: Vec::new(),
            hold: 7,
            folder: folder.path().into(),
        };
        let first = job.lock("a").unwrap();
        assert!(first.is_some() && job.lock("a").unwrap().is_none());
        assert!(job.is_locked("a").unwrap());
        drop(first);
        assert!(!job.is_locked("a").unwrap() && !job.is_locked("b").unwrap());
        assert!(job.lock("a").unwrap().is_some());
    }
}
