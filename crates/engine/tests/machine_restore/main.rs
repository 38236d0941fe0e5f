//! The remains of a restore that fails at each of its steps, with a fake hypervisor.

#![allow(clippy::unwrap_used, reason = "all of it is test")]

mod fake;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use holdfast_block::{ManualClock, MemoryDevice};
use holdfast_engine::{
    AfterRestore, Error, FileWay, Interrupt, Job, MachineRestorePlan, MachineRestoreReport, MachineRestoreRequest,
    NewMachineIdentity, NewMachineOptions, NoProgress, Overwrite, Refusal, RestoreAs, SnapshotName, Started,
    plan_machine_restore, restore_machine,
};
use holdfast_host::HypervisorMut as _;
use holdfast_repo::key::{Cipher, Credential, KdfParameters, SystemRandomness};
use holdfast_repo::store::MemoryStore;
use holdfast_repo::{
    BackupProgress, BackupRequest, Environment, InitRequest, Parent, Repository, Source, SourceData, SystemProcesses,
};
use jiff::tz::TimeZone;

use fake::{Fake, Fault};

const DISK_LENGTH: usize = 1 << 20;
const TPM: &str = "<tpm model='tpm-crb'><backend type='emulator' version='2.0'/></tpm>";

/// A repository with a machine with two disks and firmware variables, and a folder to restore it to.
struct World {
    folder: tempfile::TempDir,
    repository: Repository,
    environment: Environment,
}

/// Progress without output.
#[derive(Default)]
struct Silent(AtomicBool);

impl BackupProgress for Silent {
    fn advance(&self, _bytes: u64) {}

    fn note(&self, _message: String) {}

    fn warn(&self, message: String) {
        panic!("{message}");
    }

    fn cancelled(&self) -> &AtomicBool {
        &self.0
    }
}

fn domain(folder: &Path) -> String {
    let disk = |target: &str, format: &str| {
        let path = folder.join(format!("web1-{target}"));
        let path = path.display();
        format!("<disk type='file'><driver type='{format}'/><source file='{path}'/><target dev='{target}'/></disk>")
    };
    format!(
        "<domain><name>web1</name><uuid>aaaaaaaa-bbbb-4ccc-8ddd-eeeeeeeeeeee</uuid>\
         <os><nvram>{}</nvram></os><devices>{}{}{TPM}</devices></domain>",
        folder.join("web1_VARS.fd").display(),
        disk("vda", "qcow2"),
        disk("vdb", "raw")
    )
}

impl World {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let environment = Environment {
            randomness: Arc::new(SystemRandomness),
            processes: Arc::new(SystemProcesses),
            now_ms: Arc::new(|| 1),
        };
        let request = InitRequest {
            credential: Credential::Open,
            label: "test",
            parameters: KdfParameters::default(),
            cipher: Cipher::Aes256Gcm,
        };
        let repository = Repository::init(Arc::new(MemoryStore::new()), &request, environment.clone()).unwrap();
        let world = Self {
            folder,
            repository,
            environment,
        };
        world.back_up(1, &domain(world.folder.path()));
        world
    }

    fn back_up(&self, time_ms: i64, text: &str) {
        let disks = [1, 2].map(|byte| MemoryDevice::from_bytes(&vec![byte; DISK_LENGTH]));
        let (mut text, mut variables, mut state) = (text.as_bytes(), &b"variables"[..], &b"state"[..]);
        let source = |name: &str, data, format: &str| Source {
            name: name.to_owned(),
            data,
            notes: BTreeMap::from([
                (
                    "path".to_owned(),
                    self.folder.path().join(format!("web1-{name}")).display().to_string(),
                ),
                ("format".to_owned(), format.to_owned()),
                ("tpm-version".to_owned(), "2.0".to_owned()),
            ]),
        };
        let memory = Source {
            name: "memory".to_owned(),
            data: SourceData::Disk(&disks[0]),
            notes: BTreeMap::from([("kind".to_owned(), "memory".to_owned())]),
        };
        let request = BackupRequest {
            machine: "web1".to_owned(),
            time_ms,
            tags: Vec::new(),
            parent: Parent::None,
            host: String::new(),
            program: String::new(),
            notes: BTreeMap::new(),
            sources: vec![
                memory,
                source("vda", SourceData::Disk(&disks[0]), "qcow2"),
                source("vdb", SourceData::Disk(&disks[1]), "raw"),
                source("domain.xml", SourceData::Stream(&mut text), "raw"),
                source("nvram", SourceData::Stream(&mut variables), "raw"),
                source("tpm", SourceData::Stream(&mut state), "raw"),
            ],
            thread_count: 1,
        };
        self.repository.backup(request, &Silent::default()).unwrap();
    }

    fn with_job<T>(interrupt: &Interrupt, run: impl FnOnce(Job<'_>) -> T) -> T {
        let clock = ManualClock::new();
        run(Job {
            progress: &NoProgress,
            interrupt,
            clock: &clock,
            thread_count: 1,
        })
    }

    fn plan(&self, hypervisor: &Fake, identity: NewMachineIdentity) -> Result<MachineRestorePlan, Error> {
        let request = MachineRestoreRequest {
            name: "web1".parse::<SnapshotName>().unwrap(),
            restore_as: RestoreAs::NewMachine(NewMachineOptions {
                name: None,
                identity,
                storage: None,
                format: None,
                places: BTreeMap::new(),
                domain_type: None,
                overwrite: Overwrite::Refuse,
            }),
            after: AfterRestore::Start,
            runtime: std::env::temp_dir(),
            zone: TimeZone::UTC,
        };
        Self::with_job(&Interrupt::new(), |job| {
            plan_machine_restore(&self.repository, hypervisor, &request, &self.environment, job)
        })
    }

    fn execute(&self, hypervisor: &Fake, plan: &MachineRestorePlan) -> Result<MachineRestoreReport, Error> {
        Self::with_job(&Interrupt::new(), |job| {
            restore_machine(&self.repository, hypervisor, plan, &self.environment, job)
        })
    }

    /// All files and empty folders.
    fn files(&self) -> Vec<PathBuf> {
        let mut files = Vec::new();
        let mut folders = vec![self.folder.path().to_owned()];
        while let Some(folder) = folders.pop() {
            let entries = std::fs::read_dir(&folder).unwrap();
            let entries: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
            if entries.is_empty() && folder != self.folder.path() {
                files.push(folder);
            }
            let (below, here): (Vec<_>, Vec<_>) = entries.into_iter().partition(|path| path.is_dir());
            folders.extend(below);
            files.extend(here);
        }
        files.sort();
        files
    }
}

#[test]
fn a_restore_executes_its_plan() {
    let (world, fake) = (World::new(), Fake::new(Fault::Nothing));
    let plan = world.plan(&fake, NewMachineIdentity::New).unwrap();
    assert!(
        world.files().is_empty() && fake.names().is_empty(),
        "a plan changes nothing"
    );
    assert!(plan.files.iter().all(|file| file.way == FileWay::NewFile));
    // The memory is not listed as a disk.
    assert!(
        plan.warnings.is_empty() && plan.notes.iter().any(|note| note.contains("memory")),
        "{plan:?}"
    );
    let report = world.execute(&fake, &plan).unwrap();
    assert_eq!((report.started, report.disks.len()), (Started::Yes, 2));
    assert_eq!(fake.names(), ["web1-restored"]);
    let mut planned: Vec<PathBuf> = plan.files.iter().map(|file| file.to.clone()).collect();
    planned.sort();
    assert_eq!(world.files(), planned);
    assert_eq!(std::fs::read(&plan.files[2].to).unwrap(), b"variables");
    assert_eq!(std::fs::read(&plan.files[3].to).unwrap(), b"state");
    // The same plan is refused when the machine exists.
    assert!(world.execute(&fake, &plan).is_err());
    assert_eq!(world.files(), planned);
}

#[test]
fn created_files_are_removed_if_the_machine_cannot_be_defined() {
    for fault in [Fault::Refuses, Fault::AnswerLost] {
        let (world, fake) = (World::new(), Fake::new(fault));
        let plan = world.plan(&fake, NewMachineIdentity::Keep).unwrap();
        let precious = world.folder.path().join("precious");
        std::fs::File::create(&precious).unwrap();
        assert!(matches!(world.execute(&fake, &plan), Err(Error::Host(_))), "{fault:?}");
        assert_eq!(world.files(), [precious], "{fault:?}");
        assert!(fake.names().is_empty(), "{fault:?}");
    }
}

/// It is unknown whether the machine was defined and needs the files.
#[test]
fn files_stay_when_the_connection_is_lost_with_the_answer() {
    let (world, fake) = (World::new(), Fake::new(Fault::ConnectionLost));
    let plan = world.plan(&fake, NewMachineIdentity::New).unwrap();
    assert!(world.execute(&fake, &plan).is_err());
    assert_eq!(world.files().len(), 4);
    assert_eq!(fake.names(), ["web1-restored"]);
}

#[test]
fn a_machine_that_does_not_start_stays() {
    let (world, fake) = (World::new(), Fake::new(Fault::NoStart));
    let plan = world.plan(&fake, NewMachineIdentity::New).unwrap();
    let report = world.execute(&fake, &plan).unwrap();
    assert!(matches!(report.started, Started::Failed(reason) if reason.contains("injected fault")));
    assert_eq!((world.files().len(), fake.names().len()), (4, 1));
}

/// A machine with the same identity and a file at a target are created between plan and restore.
#[test]
fn files_and_machines_created_after_the_plan_are_kept() {
    let (world, fake) = (World::new(), Fake::new(Fault::Nothing));
    let plan = world.plan(&fake, NewMachineIdentity::Keep).unwrap();
    let text = domain(world.folder.path());
    fake.define(&text).unwrap();
    let refused = world.execute(&fake, &plan);
    assert!(matches!(refused, Err(Error::MachineRestore(Refusal::Changed { .. }))));
    assert!(world.files().is_empty());
    assert_eq!(*fake.machines.lock().unwrap().values().next().unwrap(), text);

    fake.undefine("aaaaaaaa-bbbb-4ccc-8ddd-eeeeeeeeeeee").unwrap();
    let existing = plan.files[1].to.clone();
    std::fs::File::create(&existing).unwrap();
    assert!(matches!(world.execute(&fake, &plan), Err(Error::TargetExists { path }) if path == existing));
    assert_eq!((world.files(), existing.metadata().unwrap().len()), (vec![existing], 0));
    assert!(fake.names().is_empty());
}

#[test]
fn an_interrupted_restore_leaves_nothing() {
    let (world, fake) = (World::new(), Fake::new(Fault::Nothing));
    let plan = world.plan(&fake, NewMachineIdentity::New).unwrap();
    let interrupt = Interrupt::new();
    interrupt.request();
    let stopped = World::with_job(&interrupt, |job| {
        restore_machine(&world.repository, &fake, &plan, &world.environment, job)
    });
    assert!(matches!(stopped, Err(Error::Interrupted(_))));
    assert!(world.files().is_empty() && fake.names().is_empty());
}

/// An attacker may write a snapshot whose names contain paths.
#[test]
fn names_in_a_snapshot_do_not_leave_the_target_folder() {
    let (world, fake) = (World::new(), Fake::new(Fault::Nothing));
    let text = domain(world.folder.path());
    world.back_up(2, &text.replace("<name>web1<", "<name>../../../etc/web1<"));
    for identity in [NewMachineIdentity::New, NewMachineIdentity::Keep] {
        let refused = world.plan(&fake, identity);
        assert!(
            matches!(
                refused,
                Err(Error::Name(_) | Error::MachineRestore(Refusal::Configuration { .. }))
            ),
            "{refused:?}"
        );
    }
    world.back_up(3, "<domain>");
    assert!(world.plan(&fake, NewMachineIdentity::New).is_err());
    assert!(world.files().is_empty());
}

/// A path that only the snapshot names may belong to anything.
#[test]
fn the_state_of_a_tpm_replaces_only_that_of_its_machine() {
    let (world, fake) = (World::new(), Fake::new(Fault::Nothing));
    let precious = world.folder.path().join("precious");
    std::fs::File::create(&precious).unwrap();
    let source = format!(
        "<tpm><backend type='emulator' version='2.0'><source type='file' path='{}'/></backend></tpm>",
        precious.display()
    );
    world.back_up(2, &domain(world.folder.path()).replace(TPM, &source));
    // The state is in a folder in the snapshot, and in a single file in this configuration.
    let plan = world.plan(&fake, NewMachineIdentity::New).unwrap();
    assert!(
        plan.warnings.iter().any(|warning| warning.contains("single file")),
        "{plan:?}"
    );
    assert!(
        plan.definition.unwrap().text.contains("path='"),
        "the configuration has a path"
    );
    let folder = world.folder.path().join("folder");
    std::fs::create_dir(&folder).unwrap();
    std::fs::rename(&precious, folder.join("tpm2-00.permall")).unwrap();
    let source = source
        .replace("type='file'", "type='dir'")
        .replace("precious", "folder");
    world.back_up(3, &domain(world.folder.path()).replace(TPM, &source));
    let refused = world.plan(&fake, NewMachineIdentity::Keep);
    assert!(
        matches!(&refused, Err(Error::MachineRestore(Refusal::PathTaken { path })) if path.starts_with(&folder)),
        "{refused:?}"
    );
    let plan = world.plan(&fake, NewMachineIdentity::New).unwrap();
    let text = &plan.definition.as_ref().unwrap().text;
    assert!(plan.warnings.is_empty() && !text.contains("/folder'"), "{plan:?}");
    world.execute(&fake, &plan).unwrap();
    assert_eq!(std::fs::read(&plan.files[3].to).unwrap(), b"state");
    assert!(
        plan.files[3].to.ends_with("web1-restored-tpm/tpm2-00.permall"),
        "{plan:?}"
    );
}

#[test]
fn a_tpm_state_that_is_not_restored_is_reported() {
    let (world, fake) = (World::new(), Fake::new(Fault::Nothing));
    let text = domain(world.folder.path());
    world.back_up(2, &text.replace("version='2.0'", "version='1.2'"));
    let warnings = |identity| world.plan(&fake, identity).unwrap().warnings.join("\n");
    assert!(warnings(NewMachineIdentity::New).contains("a TPM 2.0, and the machine has one of version 1.2"));
    world.back_up(3, &text.replace(TPM, ""));
    assert!(warnings(NewMachineIdentity::Keep).contains("has no emulated TPM"));
    world.back_up(4, &text);
    assert_eq!(warnings(NewMachineIdentity::New), "");
    let notes = world.plan(&fake, NewMachineIdentity::New).unwrap().notes.join("\n");
    assert!(notes.contains("has the keys of the machine"), "{notes}");
    // A state that another machine left at the path that the hypervisor derives from the UUID.
    let plan = world.plan(&fake, NewMachineIdentity::Keep).unwrap();
    let existing = &plan.files[3].to;
    std::fs::create_dir_all(existing.parent().unwrap()).unwrap();
    std::fs::File::create(existing).unwrap();
    let plan = world.plan(&fake, NewMachineIdentity::Keep).unwrap();
    assert_eq!(plan.files[3].way, FileWay::Replace);
    assert!(plan.warnings[0].contains("left by a machine of this UUID"), "{plan:?}");
}
