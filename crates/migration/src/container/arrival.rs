//! The side of the other host: how it receives a container.
//!
//! The files come into `.NAME.holdfast-move` beside the folder of the container, by the protocol of disks. The folder gets
//! its name when everything is there.

use std::ffi::OsString;
use std::io::{Read, Write};
use std::os::unix::fs::DirBuilderExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use holdfast_block::{Clock, FileDevice, IoMode, error_text, rename_durably, sync_folder_of, write_new_file};
use holdfast_engine::{ContainerPlace, DiskTransport, IdleContainer, Relocation};
use holdfast_host::nbd_device::check_nbd;
use holdfast_host::provider::Mounts;
use holdfast_host::run_shell_command;
use holdfast_image::{CONTAINER_FILE, ContainerLock, ContainerTree, DESCRIPTOR_FILE, TreeLayer, is_memory_folder};
use rustix::fs::{Access, AtFlags, CWD, RenameFlags, accessat, renameat_with};

use super::far::{
    ArrivalState, ContainerAnswer, ContainerCheck, ContainerDigest, ContainerRequest, ExpectedFile, MountTarget,
    SeedFile, TOKEN_FILE,
};
use crate::far::{HostRequests, RequestSubject};
use crate::request_link::serve_requests;

/// How the name of the folder ends that receives the files; it begins with a dot.
const STAGING_ENDING: &str = ".holdfast-move";
/// The lock of the container, which moves with it.
const LOCK_FILE: &str = "container.lock";
/// How the name of the folder of a former container ends.
const FORMER_ENDING: &str = "-former";
/// How long a command may take.
const COMMAND_TIME_MAX: Duration = Duration::from_secs(600);

/// What the other host needs to receive containers.
pub struct ArrivalTools<'a> {
    /// The clock for waits.
    pub clock: Arc<dyn Clock>,
    /// The folder for sockets and mount points.
    pub runtime: PathBuf,
    /// Name and version of the program.
    pub program: String,
    /// The folder for containers that come; none for the one where they were.
    pub folder: Option<PathBuf>,
    /// Gets the report of the migration as a JSON document, if the source sends it.
    pub report: &'a (dyn Fn(serde_json::Value) + Sync),
    /// Mounts a container.
    pub mount: &'a (dyn Fn(&ContainerPlace, &Path, DiskTransport) -> Result<(), String> + Sync),
}

/// Answers requests until `input` ends.
///
/// # Errors
/// A line is not a request, or an answer cannot be sent.
pub fn serve_arrivals(input: impl Read, output: impl Write, tools: &ArrivalTools<'_>) -> std::io::Result<()> {
    let mut arrival = Arrival { tools, lock: None };
    serve_requests(input, output, |request| {
        arrival
            .answer(request)
            .unwrap_or_else(|reason| ContainerAnswer::Refused { reason })
    })
}

impl HostRequests for ArrivalTools<'_> {
    fn serve(&self, subject: RequestSubject, stream: &UnixStream) -> std::io::Result<()> {
        match subject {
            RequestSubject::Container => serve_arrivals(stream, stream, self),
            RequestSubject::Machine => Err(subject.refusal()),
        }
    }
}

type Answered = Result<ContainerAnswer, String>;

struct Arrival<'a> {
    tools: &'a ArrivalTools<'a>,
    /// The lock of the folder that receives the files.
    lock: Option<ContainerLock>,
}

impl Arrival<'_> {
    fn answer(&mut self, request: ContainerRequest) -> Answered {
        match request {
            ContainerRequest::Describe {} => Ok(ContainerAnswer::Described {
                program: self.tools.program.clone(),
                folder: self.tools.folder.clone(),
            }),
            ContainerRequest::Report { document } => {
                (self.tools.report)(document);
                Ok(ContainerAnswer::Done {})
            }
            ContainerRequest::Check(check) => Ok(self.check(&check)),
            ContainerRequest::Prepare { folder, id, token } => self.prepare(&folder, &id, &token),
            ContainerRequest::MakeFolder { folder, name } => make_folder(&staging_of(&folder)?, &name),
            ContainerRequest::Store { folder, name, text } => store(&staging_of(&folder)?, &name, &text),
            ContainerRequest::Digest { folder, name } => digest(&staging_of(&folder)?.join(checked_name(&name)?)),
            ContainerRequest::Complete { folder, id, files } => self.complete(&folder, &id, &files),
            ContainerRequest::Revert { folder, id, former } => self.revert(&folder, &id, former.as_deref()),
            ContainerRequest::State { folder, id } => Ok(ContainerAnswer::State {
                state: self.state(&folder, &id)?,
            }),
            ContainerRequest::Mount { folder, mount } => {
                let place = self.place(&folder)?;
                (self.tools.mount)(&place, &mount.point, mount.transport)?;
                Ok(ContainerAnswer::Done {})
            }
            ContainerRequest::Run { command } => self.run(&command),
            ContainerRequest::DeleteFormer { folder, id } => self.delete_former(&folder, &id),
        }
    }

    fn place(&self, folder: &Path) -> Result<ContainerPlace, String> {
        ContainerPlace::find(folder, &self.tools.runtime).map_err(|error| error_text(&error))
    }

    /// What is in the place of the container.
    fn state(&self, folder: &Path, id: &str) -> Result<ArrivalState, String> {
        if folder.symlink_metadata().is_err() {
            return Ok(ArrivalState::Absent);
        }
        if !is_of(folder, id) {
            return Err(format!("{} exists there, and is not this container", folder.display()));
        }
        let place = self.place(folder)?;
        let mark = Relocation::of(&place).map_err(|error| error_text(&error))?;
        if ContainerLock::is_held(folder).map_err(|error| error_text(&error))? {
            return Ok(ArrivalState::InUse);
        }
        Ok(match mark {
            None => ArrivalState::Complete,
            Some(_) => ArrivalState::Former,
        })
    }

    fn check(&self, check: &ContainerCheck) -> ContainerAnswer {
        let (mut obstacles, mut notes) = (Vec::new(), Vec::new());
        let folder = &check.folder;
        match self.state(folder, &check.id) {
            Ok(ArrivalState::Absent) => {}
            Ok(ArrivalState::Former | ArrivalState::Complete) => notes.push(format!(
                "the container was at {} before: only the differences are sent",
                folder.display()
            )),
            Ok(ArrivalState::InUse) => obstacles.push(format!("{} is in use there", folder.display())),
            Err(reason) => obstacles.push(reason),
        }
        let parent = folder.parent().unwrap_or(Path::new("/"));
        if accessat(CWD, parent, Access::WRITE_OK | Access::EXEC_OK, AtFlags::EACCESS).is_err() || !parent.is_dir() {
            obstacles.push(format!(
                "{} is not a folder there that can be written",
                parent.display()
            ));
        }
        obstacles.extend(no_space(check, parent));
        if let Some(mount) = &check.mount {
            obstacles.extend(cannot_mount(mount));
        }
        ContainerAnswer::Checked { obstacles, notes }
    }

    fn prepare(&mut self, folder: &Path, id: &str, token: &str) -> Answered {
        let staging = staging_of(folder)?;
        // Another request of this sender; the lock of the folder is its own.
        self.lock = None;
        match std::fs::DirBuilder::new().mode(0o700).create(&staging) {
            Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => return Err(failed(&staging)(error)),
            _ => {}
        }
        let lock = ContainerLock::take(&staging).map_err(|error| error_text(&error))?;
        self.lock = Some(lock);
        write_new_file(&staging.join(TOKEN_FILE), token.as_bytes(), None).map_err(failed(&staging))?;
        let mut seeds = former_files(folder, id);
        // What an earlier attempt has received is newer than what was there before.
        for file in files_of(&staging)? {
            seeds.retain(|seed| seed.name != file.name);
            seeds.push(file);
        }
        Ok(ContainerAnswer::Prepared { staging, seeds })
    }

    fn complete(&mut self, folder: &Path, id: &str, files: &[ExpectedFile]) -> Answered {
        let staging = staging_of(folder)?;
        if self.lock.is_none() {
            return Err("no files were received".to_owned());
        }
        for file in files {
            let found = staging.join(checked_name(&file.name)?).metadata();
            let found = found.map_err(failed(&staging.join(&file.name)))?.len();
            if found != file.bytes {
                return Err(format!("{} has {found} bytes instead of {}", file.name, file.bytes));
            }
        }
        remove_others(&staging, files)?;
        if !is_of(&staging, id) {
            return Err(format!("{} is not this container", staging.display()));
        }
        // Its lock is held until the folder has its name: a sender that has lost this connection waits for that.
        self.lock = None;
        let place = self.place(&staging)?;
        let idle = IdleContainer::lock(&place).map_err(|error| error_text(&error))?;
        sync_folders(&staging).map_err(failed(&staging))?;
        let former = if folder.symlink_metadata().is_ok() {
            match self.state(folder, id)? {
                ArrivalState::InUse => return Err(format!("{} is in use", folder.display())),
                _ => Some(set_aside(folder)?),
            }
        } else {
            None
        };
        rename_new(&staging, folder).inspect_err(|_| {
            if let Some(former) = &former {
                rename_new(former, folder).ok();
            }
        })?;
        drop(idle);
        Ok(ContainerAnswer::Completed { former })
    }

    fn revert(&mut self, folder: &Path, id: &str, former: Option<&Path>) -> Answered {
        match self.state(folder, id)? {
            ArrivalState::Complete => {}
            state => return Err(format!("{} {state} there", folder.display())),
        }
        let place = self.place(folder)?;
        let idle = IdleContainer::lock(&place).map_err(|error| error_text(&error))?;
        rename_new(folder, &staging_of(folder)?)?;
        drop(idle);
        if let Some(former) = former {
            rename_new(former, folder)?;
        }
        Ok(ContainerAnswer::Done {})
    }

    fn run(&self, command: &str) -> Answered {
        run_shell_command(command, COMMAND_TIME_MAX, &*self.tools.clock)
            .map_err(|reason| format!("{command}: {reason}"))?;
        Ok(ContainerAnswer::Done {})
    }

    fn delete_former(&self, folder: &Path, id: &str) -> Answered {
        if self.state(folder, id)? != ArrivalState::Former {
            return Err(format!("{} is kept: it may be in use", folder.display()));
        }
        let place = self.place(folder)?;
        let idle = IdleContainer::lock(&place).map_err(|error| error_text(&error))?;
        // A deletion that is interrupted leaves no container that looks complete.
        let removed = std::fs::remove_file(folder.join(CONTAINER_FILE)).and_then(|()| std::fs::remove_dir_all(folder));
        removed.map_err(failed(folder))?;
        drop(idle);
        Ok(ContainerAnswer::Done {})
    }
}

fn failed(path: &Path) -> impl Fn(std::io::Error) -> String {
    move |error| format!("{}: {error}", path.display())
}

/// The folder that receives the files of the container in `folder`.
fn staging_of(folder: &Path) -> Result<PathBuf, String> {
    let name = folder.file_name().filter(|_| folder.is_absolute());
    let name = name.ok_or_else(|| format!("{} is not an absolute path of a folder", folder.display()))?;
    let mut staging = OsString::from(".");
    staging.push(name);
    staging.push(STAGING_ENDING);
    Ok(folder.with_file_name(staging))
}

/// A name of a file of a container, without a way out of its folder.
fn checked_name(name: &str) -> Result<&Path, String> {
    let path = Path::new(name);
    let is_plain =
        |part: &Component<'_>| matches!(part, Component::Normal(part) if !part.as_encoded_bytes().starts_with(b"."));
    let parts: Vec<Component<'_>> = path.components().collect();
    let is_in_memory = || name.split('/').next().is_some_and(is_memory_folder);
    if parts.iter().all(is_plain) && (parts.len() == 1 || ((2..=3).contains(&parts.len()) && is_in_memory())) {
        return Ok(path);
    }
    Err(format!("{name:?} is not a file of a container"))
}

/// Only the owner may read the memory of processes.
fn make_folder(staging: &Path, name: &str) -> Answered {
    let path = staging.join(checked_name(name)?);
    match std::fs::DirBuilder::new().mode(0o700).create(&path) {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => Err(failed(&path)(error)),
        _ => Ok(ContainerAnswer::Done {}),
    }
}

fn store(staging: &Path, name: &str, text: &str) -> Answered {
    let path = staging.join(checked_name(name)?);
    write_new_file(&path, text.as_bytes(), None).map_err(failed(&path))?;
    Ok(ContainerAnswer::Done {})
}

fn digest(path: &Path) -> Answered {
    let file = FileDevice::open(path, IoMode::Buffered).map_err(|error| error_text(&error))?;
    let digest = ContainerDigest::of(&file).map_err(|error| error_text(&error))?;
    Ok(ContainerAnswer::Digest(digest))
}

/// Whether the container with this id is in `folder`.
fn is_of(folder: &Path, id: &str) -> bool {
    ContainerTree::open(folder).is_ok_and(|tree| tree.id().to_string() == id)
}

/// The files of a former container, by the names that similar files have now.
fn former_files(folder: &Path, id: &str) -> Vec<SeedFile> {
    let former = ContainerTree::open(folder)
        .ok()
        .filter(|tree| tree.id().to_string() == id);
    let Some(tree) = former else { return Vec::new() };
    let seeds = tree.layers().iter().filter_map(|layer| {
        let path = folder.join(&merged_into(&tree, layer).file);
        Some(SeedFile {
            name: layer.file.clone(),
            bytes: path.metadata().ok()?.len(),
            path,
        })
    });
    seeds.collect()
}

/// The layer whose file has the content of `layer` when the deleted snapshots below it were merged: the lowest of these.
fn merged_into<'a>(tree: &'a ContainerTree, layer: &'a TreeLayer) -> &'a TreeLayer {
    let below = tree.chain_of(layer.id).into_iter().skip(1);
    below
        .take_while(|below| tree.is_hidden(below.id))
        .last()
        .unwrap_or(layer)
}

/// The files that an earlier attempt has received, without those of the folder.
fn files_of(folder: &Path) -> Result<Vec<SeedFile>, String> {
    let entries = std::fs::read_dir(folder).map_err(failed(folder))?;
    let mut files = Vec::new();
    for entry in entries {
        let path = entry.map_err(failed(folder))?.path();
        // A receiver deletes its journal at its end.
        let Ok(found) = path.symlink_metadata() else { continue };
        let name = path.file_name().and_then(|name| name.to_str()).map(str::to_owned);
        let is_seed = |name: &String| checked_name(name).is_ok() && !is_of_folder(name);
        if let Some(name) = name.filter(|name| found.is_file() && found.len() > 0 && is_seed(name)) {
            let bytes = found.len();
            files.push(SeedFile { name, path, bytes });
        }
    }
    Ok(files)
}

/// Whether a file belongs to the folder, and not to the disk.
fn is_of_folder(name: &str) -> bool {
    [CONTAINER_FILE, DESCRIPTOR_FILE, LOCK_FILE, TOKEN_FILE].contains(&name)
}

/// Deletes what does not belong to the container: an earlier attempt may have received it.
fn remove_others(staging: &Path, files: &[ExpectedFile]) -> Result<(), String> {
    for entry in std::fs::read_dir(staging).map_err(failed(staging))? {
        let path = entry.map_err(failed(staging))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let is_listed = |file: &ExpectedFile| file.name == name || file.name.starts_with(&format!("{name}/"));
        if name == LOCK_FILE || name == CONTAINER_FILE || name == DESCRIPTOR_FILE || files.iter().any(is_listed) {
            continue;
        }
        let removed = if path.is_dir() {
            std::fs::remove_dir_all(&path)
        } else {
            std::fs::remove_file(&path)
        };
        match removed {
            // A receiver deletes its journal at its end.
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(failed(&path)(error)),
            _ => {}
        }
    }
    Ok(())
}

/// Makes all names below a folder durable.
fn sync_folders(folder: &Path) -> std::io::Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            sync_folders(&entry.path())?;
        }
    }
    std::fs::File::open(folder)?.sync_all()
}

/// Renames a folder durably; nothing is replaced.
fn rename_new(from: &Path, to: &Path) -> Result<(), String> {
    let renamed = match renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        // Some file systems do not know the flag. A folder that is not empty is not replaced in any case.
        Err(rustix::io::Errno::INVAL) => rename_durably(from, to),
        renamed => renamed.map_err(std::io::Error::from).and_then(|()| sync_folder_of(to)),
    };
    renamed.map_err(failed(to))
}

/// Renames a former container; returns its new path.
fn set_aside(folder: &Path) -> Result<PathBuf, String> {
    let name = folder.file_name().unwrap_or_default();
    let free = (1..u32::MAX).map(|number| {
        let mut name = name.to_owned();
        name.push(FORMER_ENDING);
        if number > 1 {
            name.push(format!("-{number}"));
        }
        folder.with_file_name(name)
    });
    let mut free = free.filter(|path| path.symlink_metadata().is_err());
    let path = free.next().ok_or("there is no free name for the former container")?;
    rename_new(folder, &path).map(|()| path)
}

fn no_space(check: &ContainerCheck, parent: &Path) -> Option<String> {
    let staged = staging_of(&check.folder).ok()?;
    let staged_bytes: u64 = std::fs::read_dir(staged).map_or(0, |entries| {
        use std::os::unix::fs::MetadataExt as _;
        let found = entries.filter_map(|entry| entry.ok()?.metadata().ok());
        found.map(|found| found.blocks().saturating_mul(512)).sum()
    });
    let room = rustix::fs::statvfs(parent).ok()?;
    let available = room.f_bavail.saturating_mul(room.f_frsize);
    let needed = check.expected_bytes.saturating_sub(staged_bytes);
    (available < needed).then(|| {
        format!(
            "{} has {available} bytes of space there; the container takes {needed}",
            parent.display()
        )
    })
}

/// What prevents a container from being mounted there.
fn cannot_mount(mount: &MountTarget) -> Vec<String> {
    let mut obstacles = Vec::new();
    let point = &mount.point;
    match std::fs::read_dir(point).map(|mut entries| entries.next().is_none()) {
        Ok(true) => {}
        Ok(false) => obstacles.push(format!("{} is not empty there", point.display())),
        Err(error) => obstacles.push(format!("{} cannot be a mount point there: {error}", point.display())),
    }
    if Mounts::read().is_ok_and(|mounts| mounts.point_of(point) == Some(point)) {
        obstacles.push(format!("a file system is mounted on {} there", point.display()));
    }
    if !rustix::process::geteuid().is_root() {
        obstacles.push("only root can mount a container there".to_owned());
    }
    match mount.transport {
        DiskTransport::Nbd => obstacles.extend(
            check_nbd()
                .err()
                .map(|error| format!("NBD cannot be used there: {error}")),
        ),
        DiskTransport::Fuse => {
            let needed = ["/dev/fuse", "/dev/loop-control"];
            let missing = needed.iter().filter(|path| !Path::new(path).exists());
            obstacles.extend(missing.map(|path| format!("{path} does not exist there")));
        }
    }
    obstacles
}

#[cfg(test)]
mod tests {
    use super::{checked_name, staging_of};

    #[test]
    fn names_of_files_do_not_lead_out_of_the_folder() {
        let memory = "memory-10a5e1b6-6f0b-4b39-8e25-6a2a3f0d7c11";
        for name in [
            "layer-1.qcow2",
            "root.hds",
            &format!("{memory}/images/pages-1.img"),
            &format!("{memory}/config.json"),
        ] {
            checked_name(name).unwrap();
        }
        for name in [
            "",
            ".",
            "..",
            "/etc/passwd",
            "../a",
            ".hidden",
            "a/b",
            &format!("{memory}/../../a"),
            "memory-x/a",
        ] {
            checked_name(name).unwrap_err();
        }
        assert_eq!(
            staging_of("/srv/web1".as_ref()).unwrap().to_str(),
            Some("/srv/.web1.holdfast-move")
        );
        staging_of("web1".as_ref()).unwrap_err();
        staging_of("/".as_ref()).unwrap_err();
    }
}
