//! A machine in a model of QEMU, a repository, and the backups and the doctor that use both.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicI64, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use holdfast_block::{BlockDevice as _, ManualClock, to_usize};
use holdfast_engine::{
    CaptureOptions, Continuation, DoctorReport, DoctorRequest, EmptiedOverlays, ExaminedMachine, Execution, Hooks,
    Interrupt, Job, JournalPlace, Limits, MachineBackupReport, MachineName, MachineReadRequest, MachineReading,
    NoProgress, ParentChoice, Providers, Quiesce, SnapshotOptions, back_up_machine, doctor,
};
use holdfast_host::{Answer, BareQemu, DiskChoice, ToolError, Tools};
use holdfast_image::{CreateOptions, Format};
use holdfast_qemu_model::{ModelDisk, ModelFormat, ModelMachine, QemuModel};
use holdfast_repo::key::{Cipher, Credential, KdfParameters, SystemRandomness};
use holdfast_repo::store::MemoryStore;
use holdfast_repo::{
    Environment, InitRequest, Liveness, ProcessIdentity, Processes, Repository, SnapshotId, SystemProcesses,
};
use jiff::Timestamp;
use jiff::tz::TimeZone;

use crate::scenario::Scenario;

pub(crate) const DISK_BYTES: u64 = 512 << 10;
const START_MS: i64 = 1_700_000_000_000;
const PROGRAM: &str = "no-process-is-called-so";

fn job<'a>(interrupt: &'a Interrupt, clock: &'a ManualClock) -> Job<'a> {
    Job {
        progress: &NoProgress,
        interrupt,
        clock,
        thread_count: 1,
    }
}

/// A host without programs.
struct NoTools;

impl Tools for NoTools {
    fn ask(&self, program: &str, _arguments: &[&str]) -> Result<Answer, ToolError> {
        Err(ToolError::NotFound {
            program: program.to_owned(),
        })
    }
}

/// Counts each backup as a process of its own, which is alive until the backup ends.
#[derive(Default)]
struct BackupProcesses(Mutex<BTreeSet<u32>>);

impl BackupProcesses {
    fn identity(run: u32) -> ProcessIdentity {
        ProcessIdentity {
            process: run,
            ..SystemProcesses.this()
        }
    }
}

impl Processes for BackupProcesses {
    fn this(&self) -> ProcessIdentity {
        SystemProcesses.this()
    }

    fn liveness(&self, process: &ProcessIdentity) -> Liveness {
        if self.0.lock().unwrap().contains(&process.process) {
            Liveness::Alive
        } else {
            Liveness::Dead
        }
    }
}

pub(crate) struct Lab {
    scenario: Scenario,
    pub(crate) model: QemuModel,
    repository: Mutex<Arc<Repository>>,
    processes: BackupProcesses,
    runs: AtomicU32,
    now_ms: Arc<AtomicI64>,
    folder: tempfile::TempDir,
}

pub(crate) type BackupResult = holdfast_engine::Result<MachineBackupReport<MachineReading>>;

impl Lab {
    pub(crate) fn new(scenario: &Scenario) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let image = |name: &str, format: Format, size_bytes: u64| -> PathBuf {
            holdfast_image::create(&path(name), &CreateOptions::new(format, size_bytes)).unwrap();
            path(name)
        };
        let formats = [(ModelFormat::Qcow2, Format::Qcow2), (ModelFormat::Raw, Format::Raw)];
        // When the machine is paused, images are read directly.
        let skipped = usize::from(scenario.method.is_some());
        let disks = formats.into_iter().skip(skipped).take(scenario.disk_count);
        let disks = disks.enumerate().map(|(number, (format, of_image))| ModelDisk {
            format,
            image: image(&format!("disk{number}"), of_image, DISK_BYTES),
            size_bytes: DISK_BYTES,
            iothread: scenario.has_iothread.then(|| "/objects/io0".to_owned()),
        });
        let machine = ModelMachine {
            version: [7, 2, 22],
            disks: disks.collect(),
            nvram: scenario.has_nvram.then(|| image("nvram", Format::Raw, 4096)),
        };
        let now_ms = Arc::new(AtomicI64::new(START_MS));
        Self {
            scenario: scenario.clone(),
            model: QemuModel::start(&path("qmp"), &machine).unwrap(),
            repository: Mutex::new(new_repository(&now_ms)),
            processes: BackupProcesses::default(),
            runs: AtomicU32::new(1),
            now_ms,
            folder,
        }
    }

    /// Deletes all files. Backups whose command hangs for ever keep a reference to this.
    pub(crate) fn delete_folder(&self) {
        std::fs::remove_dir_all(self.folder.path()).unwrap();
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Numbers of runs have gaps, because the numbers of bitmaps of disks are counted from them.
    fn new_run(&self) -> u32 {
        self.runs.fetch_add(1 << 8, Ordering::Relaxed)
    }

    fn address(&self) -> String {
        format!("qmp:{}", self.path("qmp").display())
    }

    pub(crate) fn repository(&self) -> Arc<Repository> {
        Arc::clone(&self.repository.lock().unwrap())
    }

    /// The time of the next snapshot.
    pub(crate) fn next_time_ms(&self) -> i64 {
        self.now_ms.load(Ordering::Relaxed)
    }

    pub(crate) fn snapshots_since(&self, time_ms: i64) -> Vec<SnapshotId> {
        let (snapshots, _) = self.repository().snapshots().unwrap();
        let since = snapshots.iter().filter(|snapshot| snapshot.time_ms >= time_ms);
        since.map(|snapshot| snapshot.id).collect()
    }

    /// Replaces the repository, so that the next backup is the first.
    pub(crate) fn replace_repository(&self) {
        *self.repository.lock().unwrap() = new_repository(&self.now_ms);
    }

    pub(crate) fn disk_count(&self) -> usize {
        self.scenario
            .disk_count
            .min(2 - usize::from(self.scenario.method.is_some()))
    }

    pub(crate) fn guest_bytes(&self) -> Vec<Vec<u8>> {
        (0..self.disk_count())
            .map(|disk| self.model.guest_bytes(disk).unwrap())
            .collect()
    }

    /// Backs the machine up, with a `deadline` for each answer of its monitor.
    pub(crate) fn back_up(&self, deadline: Duration) -> BackupResult {
        let run = self.new_run();
        let process = BackupProcesses::identity(run);
        self.processes.0.lock().unwrap().insert(run);
        let result = self.back_up_as(run, process, deadline);
        self.processes.0.lock().unwrap().remove(&run);
        result
    }

    /// Treats every running backup as killed: as the kernel would, it releases the locks.
    pub(crate) fn kill_running_backups(&self) {
        self.processes.0.lock().unwrap().clear();
        for lock in self.files().iter().filter(|path| is_lock(path)) {
            std::fs::remove_file(lock).unwrap();
        }
    }

    fn back_up_as(&self, run: u32, process: ProcessIdentity, deadline: Duration) -> BackupResult {
        let clock = Arc::new(ManualClock::new());
        let qemu = BareQemu::connect_with_deadline(&self.path("qmp"), deadline, clock.clone());
        let qemu = qemu.map_err(holdfast_engine::Error::from)?;
        let machine = qemu.only_machine();
        let tools: Arc<dyn Tools> = Arc::new(NoTools);
        let providers = Providers::new(&tools, self.path("views"), clock.clone());
        let interrupt = Interrupt::new();
        let job = job(&interrupt, &clock);
        let now = || Timestamp::from_millisecond(self.now_ms.fetch_add(1, Ordering::Relaxed)).unwrap();
        let request = MachineReadRequest {
            machine: &*machine,
            capture: CaptureOptions {
                name: MachineName::new("web1").unwrap(),
                choice: DiskChoice::default(),
                allowed: Vec::new(),
                now: &now,
                host: "host".to_owned(),
                program: PROGRAM.to_owned(),
                journal: Some(JournalPlace {
                    folder: self.path("state/runs"),
                    way: ["--connect".to_owned(), self.address()].to_vec(),
                    process,
                }),
                patience: Duration::ZERO,
                hooks: Hooks::none(),
                run,
            },
            overlays: None,
            method: self.scenario.method,
            providers: &providers,
            scratch: self.folder.path().to_owned(),
            runtime: self.folder.path().to_owned(),
            write_deadline: Duration::from_secs(2),
            quiesce: Quiesce::Try,
            memory: None,
            watchdog: None,
            limits: Limits::default(),
            processes: &self.processes,
        };
        let options = SnapshotOptions {
            parent: ParentChoice::Newest,
            continuation: Continuation::default(),
            tags: Vec::new(),
            host: "host".to_owned(),
            program: PROGRAM.to_owned(),
            zone: TimeZone::UTC,
        };
        back_up_machine(&self.repository(), request, options, job)
    }

    /// Runs the equivalent of `holdfast doctor --fix`.
    pub(crate) fn run_doctor_fix(&self) -> DoctorReport {
        let clock = Arc::new(ManualClock::new());
        let qemu = BareQemu::connect(&self.path("qmp"), clock.clone()).unwrap();
        let machine = qemu.only_machine();
        let interrupt = Interrupt::new();
        let job = job(&interrupt, &clock);
        let repository = self.repository();
        let request = DoctorRequest {
            subjects: vec![ExaminedMachine {
                machine: &*machine,
                address: self.address(),
                way: Vec::new(),
            }],
            virtualbox: Vec::new(),
            pools: Vec::new(),
            containers: Vec::new(),
            forgotten_repositories: Vec::new(),
            unreachable: Vec::new(),
            address: self.address(),
            neighbours: Some(&qemu),
            overlays: None,
            everything: true,
            journal: Some(self.path("state/runs")),
            places: None,
            pulls: None,
            processes: &self.processes,
            process: SystemProcesses.this(),
            program: PROGRAM,
            runtime: self.folder.path().to_owned(),
            scratch: self.folder.path().to_owned(),
            repository: Some(&repository),
            now_ms: &|| self.now_ms.load(Ordering::Relaxed),
            new_run: &|| self.new_run(),
            emptied: EmptiedOverlays::Keep,
            storage: None,
        };
        doctor(&request, Execution::Execute, job).unwrap()
    }

    /// The disks of a snapshot.
    pub(crate) fn stored(&self, snapshot: SnapshotId) -> Vec<Vec<u8>> {
        let repository = self.repository();
        let names = (0..self.disk_count()).map(|disk| format!("disk{disk}"));
        let disks = names.map(|name| {
            let disk = repository.open_disk(snapshot, Some(&name)).unwrap();
            let mut bytes = vec![0; to_usize(disk.size_bytes())];
            disk.read_at(&mut bytes, 0).unwrap();
            bytes
        });
        disks.collect()
    }

    /// All files and folders, to find the leftovers of backups.
    pub(crate) fn files(&self) -> Vec<PathBuf> {
        walk(self.folder.path())
    }
}

fn new_repository(now_ms: &Arc<AtomicI64>) -> Arc<Repository> {
    let now_ms = Arc::clone(now_ms);
    let environment = Environment {
        randomness: Arc::new(SystemRandomness),
        processes: Arc::new(SystemProcesses),
        now_ms: Arc::new(move || now_ms.fetch_add(1, Ordering::Relaxed)),
    };
    let request = InitRequest {
        credential: Credential::Open,
        label: "test",
        parameters: KdfParameters::default(),
        cipher: Cipher::Aes256Gcm,
    };
    Arc::new(Repository::init(Arc::new(MemoryStore::new()), &request, environment).unwrap())
}

/// Whether this is a lock file, which is not removed.
pub(crate) fn is_lock(path: &Path) -> bool {
    path.extension().is_some_and(|end| end == "backup" || end == "instant")
}

fn walk(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() {
            found.extend(walk(&path));
        }
        found.push(path);
    }
    found.sort();
    found
}
