//! Restores the state of a TPM.
//!
//! Its file is a new one that replaces an existing one; swtpm is not involved. When the machine starts, libvirt gives
//! the folder and its content to the user of swtpm, and creates a new state only if the folder is missing. So the
//! folders are created with the modes that libvirt uses: every user may pass through the machine's folder, and only the
//! user of swtpm may list the folder in it.
//!
//! A machine that resumes from its memory receives its TPM's state in QEMU's stream, which is of the same point in
//! time.

use std::fs::File;
use std::io::{ErrorKind, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _, fchown};
use std::path::{Path, PathBuf};

use holdfast_block::{FileLock, LockOutcome, lock_file, rename_durably};
use holdfast_host::domain_xml::{DomainTpm, DomainXml, Identity};
use holdfast_host::{Rights, TpmFile, TpmPlace, TpmStore};
use holdfast_image::Format;
use holdfast_repo::{DiskRecord, Manifest};
use rustix::fs::{Access, OFlags, access};

use super::draft::{Draft, Planner, unfit};
use super::neighbours::Neighbours;
use super::planned_file::nearest_folder;
use super::planned_file::{FileContent, FileWay, PlannedFile};
use super::stored;
use crate::job::error::Refusal;
use crate::job::{Error, Result};
use crate::notes::{NOTE_TPM_STORE, NOTE_TPM_VERSION, STREAM_TPM};

/// The mode of a folder that every user may pass through.
const PASSED_THROUGH: u32 = 0o711;
/// The mode of a folder for the user of swtpm only.
const OWN: u32 = 0o700;
/// The mode of the file, which contains secrets.
const FILE_MODE: u32 = 0o600;

/// Plans the TPM state of a machine with this configuration; warns about what is not restored.
///
/// An existing file is replaced only if it belongs to the machine: it is in the hypervisor's own folder for the
/// machine, or at the path `own` of the machine's current configuration. At a path that only the snapshot names there
/// may be any file.
pub(super) fn plan(
    planner: &Planner<'_>,
    snapshot: &Manifest,
    neighbours: &Neighbours,
    configuration: &str,
    own: Option<&Path>,
    draft: &mut Draft,
) -> Result<()> {
    let xml = DomainXml::parse(configuration).map_err(|detail| unfit(&draft.machine.name, detail))?;
    let (record, tpm) = match (stored::tpm(snapshot), xml.tpm) {
        (None, None) => return Ok(()),
        (None, Some(_)) => {
            draft.warnings.push(
                "the snapshot has no state of its TPM: what is sealed in it (BitLocker's key) needs its recovery key"
                    .to_owned(),
            );
            return Ok(());
        }
        (Some(_), None) => {
            let what = "the machine has no emulated TPM, so the state of that in the snapshot is not restored";
            draft.warnings.push(what.to_owned());
            return Ok(());
        }
        (Some(record), Some(tpm)) => (record, tpm),
    };
    if let Some((_, path)) = &tpm.source
        && let Some(machine) = neighbours.user_of(path)
    {
        return Err(Refusal::InUse {
            path: path.clone(),
            machine: machine.to_owned(),
        }
        .into());
    }
    match place(planner, record, &tpm, configuration) {
        Ok(file) => {
            let is_own = tpm.source.as_ref().is_none_or(|(_, path)| Some(path.as_path()) == own);
            if !is_own && file.path.symlink_metadata().is_ok() {
                return Err(Refusal::PathTaken { path: file.path }.into());
            }
            let file = planned(record, file, draft)?;
            draft.files.push(file);
            report_restored(&tpm, draft);
        }
        Err(why) => draft.warnings.push(format!(
            "the state of its TPM is not restored: {why}; holdfast restore {}@{}:{STREAM_TPM} FILE gives it to a file",
            snapshot.machine, snapshot.id
        )),
    }
    Ok(())
}

/// The path of the state, or why it cannot be restored, as text.
fn place(
    planner: &Planner<'_>,
    record: &DiskRecord,
    tpm: &DomainTpm,
    configuration: &str,
) -> std::result::Result<TpmFile, String> {
    let note = |name: &str| record.notes.get(name).map(String::as_str);
    if let (Some(then), Some(now)) = (note(NOTE_TPM_VERSION), tpm.version)
        && then != now.number()
    {
        return Err(format!(
            "it is of a TPM {then}, and the machine has one of version {now}"
        ));
    }
    let file = match planner.hypervisor.tpm_place(configuration) {
        Some(TpmPlace::At(file)) => file,
        Some(TpmPlace::Unknown(why)) => return Err(why),
        None => return Err("its place is not known".to_owned()),
    };
    let then = note(NOTE_TPM_STORE).unwrap_or(TpmStore::Folder.word());
    if then != file.store.word() {
        return Err("the one is kept in a folder, and the other in a single file".to_owned());
    }
    let folder = nearest_folder(&file.path);
    if access(folder, Access::WRITE_OK | Access::EXEC_OK).is_err() {
        return Err(format!("we may not write to {}", folder.display()));
    }
    Ok(file)
}

fn planned(record: &DiskRecord, file: TpmFile, draft: &mut Draft) -> Result<PlannedFile> {
    let way = match file.path.symlink_metadata() {
        Ok(_) if draft.machine.is_new => {
            draft.warnings.push(format!(
                "{} is there already, left by a machine of this UUID, and is replaced",
                file.path.display()
            ));
            FileWay::Replace
        }
        Ok(_) => FileWay::Replace,
        Err(error) if error.kind() == ErrorKind::NotFound => FileWay::NewFile,
        Err(source) => {
            return Err(Error::File {
                action: "look at",
                path: file.path,
                source,
            });
        }
    };
    Ok(PlannedFile {
        content: FileContent::TpmState(file.store),
        from: stored::path_of(record),
        to: file.path,
        format: Format::Raw,
        way,
        kept_at: None,
        size_bytes: record.size_bytes,
        data_bytes: record.size_bytes,
    })
}

/// Adds notes about a restored TPM to the draft.
fn report_restored(tpm: &DomainTpm, draft: &mut Draft) {
    if let Some(secret) = &tpm.secret {
        draft.notes.push(format!(
            "the state of its TPM is encrypted with libvirt's secret {secret}, which is not in the snapshot"
        ));
    }
    if let Identity::New(_) = draft.identity {
        draft.notes.push(
            "its TPM has the keys of the machine that it was made from: a service that identifies machines by these keys cannot distinguish the two"
                .to_owned(),
        );
    }
}

/// Folders that were created. Dropping this removes them with all content, unless they were kept.
#[derive(Debug, Default)]
pub(super) struct MadeFolders(Option<PathBuf>);

impl MadeFolders {
    /// Creates the missing folders of the file `path`, durably.
    pub(super) fn make(path: &Path) -> Result<Self> {
        let nearest = nearest_folder(path);
        let below: Vec<&Path> = path
            .ancestors()
            .skip(1)
            .take_while(|folder| *folder != nearest)
            .collect();
        let mut made = Self::default();
        for folder in below.iter().rev() {
            let mode = if *folder == below[0] { OWN } else { PASSED_THROUGH };
            made.make_one(folder, mode).map_err(|source| Error::File {
                action: "make the folder",
                path: (*folder).to_owned(),
                source,
            })?;
        }
        Ok(made)
    }

    fn make_one(&mut self, folder: &Path, mode: u32) -> std::io::Result<()> {
        std::fs::DirBuilder::new().mode(mode).create(folder)?;
        self.0.get_or_insert_with(|| folder.to_owned());
        // The umask of this process does not apply here.
        std::fs::set_permissions(folder, std::fs::Permissions::from_mode(mode))?;
        File::open(folder.parent().unwrap_or(folder))?.sync_all()
    }

    pub(super) fn keep(&mut self) {
        self.0 = None;
    }
}

impl Drop for MadeFolders {
    fn drop(&mut self) {
        if let Some(folder) = &self.0 {
            // This runs after another error, which is more useful than one about the cleanup.
            drop(std::fs::remove_dir_all(folder));
        }
    }
}

/// Prevents an swtpm from starting to use an existing state; none if there is nothing to lock.
///
/// # Errors
/// An swtpm is using the state.
pub(super) fn lock(path: &Path, store: TpmStore) -> Result<Option<FileLock>> {
    let file = TpmFile {
        path: path.to_owned(),
        store,
        rights: Rights::Own,
    };
    let Some(lock) = file.lock() else { return Ok(None) };
    let failed = |path: PathBuf| {
        move |source| Error::File {
            action: "lock",
            path,
            source,
        }
    };
    let no_link = i32::try_from(OFlags::NOFOLLOW.bits()).expect("flags of open(2) are an int");
    let opened = match File::options().write(true).custom_flags(no_link).open(&lock) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        other => other.map_err(failed(lock.clone()))?,
    };
    match lock_file(&opened).map_err(failed(lock.clone()))? {
        LockOutcome::Locked(lock) => Ok(Some(lock)),
        LockOutcome::HeldElsewhere => Err(Refusal::TpmInUse { path: path.to_owned() }.into()),
        LockOutcome::Unsupported => Err(failed(lock)(ErrorKind::Unsupported.into())),
    }
}

/// Writes a state durably under its temporary name, with the owner and the mode of the file it will replace; if there
/// is none, only the owner of its folder can read it.
pub(super) fn write(partial: &Path, bytes: &[u8], path: &Path) -> std::io::Result<()> {
    let mut file = File::options()
        .write(true)
        .create_new(true)
        .mode(FILE_MODE)
        .open(partial)?;
    file.write_all(bytes)?;
    // Symbolic links are not followed: the folder belongs to another user.
    let before = path.symlink_metadata().ok().filter(std::fs::Metadata::is_file);
    let mode = before.as_ref().map_or(FILE_MODE, |before| before.mode() & 0o777);
    let owner = match before {
        Some(before) => before,
        None => partial.parent().unwrap_or(Path::new(".")).metadata()?,
    };
    let is_others = (owner.uid(), owner.gid()) != {
        let own = file.metadata()?;
        (own.uid(), own.gid())
    };
    if is_others {
        fchown(&file, Some(owner.uid()), Some(owner.gid()))?;
    }
    file.set_permissions(std::fs::Permissions::from_mode(mode))?;
    file.sync_all()
}

/// Ends the name of a state that is not complete yet.
const PARTIAL_ENDING: &str = ".holdfast-new";

/// Stores the state of the TPM of a machine that is shut off, durably. An existing state is replaced.
///
/// # Errors
/// An swtpm uses the present state, or the new one cannot be written.
pub fn store_tpm_state(file: &TpmFile, bytes: &[u8]) -> Result<()> {
    let path = &file.path;
    let failed = |source| Error::File {
        action: "write",
        path: path.clone(),
        source,
    };
    let mut folders = MadeFolders::make(path)?;
    let _lock = lock(path, file.store)?;
    let mut partial = path.clone().into_os_string();
    partial.push(PARTIAL_ENDING);
    let partial = PathBuf::from(partial);
    match std::fs::remove_file(&partial) {
        Err(source) if source.kind() != ErrorKind::NotFound => return Err(failed(source)),
        _ => {}
    }
    let stored = write(&partial, bytes, path).and_then(|()| rename_durably(&partial, path));
    stored.map_err(failed)?;
    folders.keep();
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::PermissionsExt as _;
    use std::path::Path;

    use holdfast_host::{Rights, TpmFile, TpmStore};

    use super::{MadeFolders, lock, nearest_folder, store_tpm_state, write};

    fn mode(path: &Path) -> u32 {
        path.metadata().unwrap().permissions().mode() & 0o777
    }

    #[test]
    fn folders_are_made_as_libvirt_makes_them_and_go_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("swtpm/uuid/tpm2/tpm2-00.permall");
        assert_eq!(nearest_folder(&path), folder.path());
        let made = MadeFolders::make(&path).unwrap();
        let below = |name: &str| folder.path().join(name);
        assert_eq!(
            ["swtpm", "swtpm/uuid", "swtpm/uuid/tpm2"].map(|name| mode(&below(name))),
            [0o711, 0o711, 0o700]
        );
        let mut none = MadeFolders::make(&path).unwrap();
        none.keep();
        write(&path, b"state", &path).unwrap();
        drop(made);
        assert!(!below("swtpm").exists() && folder.path().exists());
        let mut made = MadeFolders::make(&path).unwrap();
        made.keep();
        drop(made);
        assert!(below("swtpm/uuid/tpm2").exists());
    }

    #[test]
    fn a_stored_state_replaces_the_present_one() {
        let folder = tempfile::tempdir().unwrap();
        let file = TpmFile {
            path: folder.path().join("uuid/tpm2/tpm2-00.permall"),
            store: TpmStore::Folder,
            rights: Rights::Own,
        };
        store_tpm_state(&file, b"first").unwrap();
        // What a killed process has left.
        File::create(file.path.with_extension("permall.holdfast-new")).unwrap();
        store_tpm_state(&file, b"second").unwrap();
        assert_eq!(std::fs::read(&file.path).unwrap(), b"second");
        assert_eq!(file.path.parent().unwrap().read_dir().unwrap().count(), 1);
    }

    #[test]
    fn a_state_has_the_mode_of_the_one_before_or_is_for_its_owner_alone() {
        let folder = tempfile::tempdir().unwrap();
        let (partial, path) = (folder.path().join("partial"), folder.path().join("tpm2-00.permall"));
        let secret = folder.path().join("secret");
        File::create(&secret).unwrap();
        std::fs::set_permissions(&secret, std::fs::Permissions::from_mode(0o644)).unwrap();
        std::os::unix::fs::symlink(&secret, &path).unwrap();
        write(&partial, b"new", &path).unwrap();
        assert_eq!(mode(&partial), 0o600, "not that of what a link leads to");
        std::fs::rename(&partial, &path).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o640)).unwrap();
        write(&partial, b"newer", &path).unwrap();
        assert_eq!(mode(&partial), 0o640);
    }

    /// Locks with `fcntl` for writing, as swtpm does. Locks of one process do not conflict with one another, so another
    /// process takes it.
    #[test]
    fn a_state_that_an_swtpm_works_with_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tpm2-00.permall");
        assert!(lock(&path, TpmStore::Folder).unwrap().is_none());
        File::create(folder.path().join(".lock")).unwrap();
        assert!(lock(&path, TpmStore::Folder).unwrap().is_some());
        assert!(lock(&path, TpmStore::Single).unwrap().is_none());
    }
}
