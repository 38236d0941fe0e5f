//! What a migration would do, and everything that prevents it, before the first byte is sent.

mod files;
mod moving;
mod places;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use holdfast_block::Clock;
use holdfast_engine::StoppedTpm;
use holdfast_host::domain_xml::{
    DiskChange, DiskPlace, Identity, Medium, PulledDisk, Rewrite, rewrite, with_moved_files, with_pulled_disks,
};
use holdfast_host::qemu::memory::{MemoryMethod, MemoryMode};
use holdfast_host::qemu::{QemuVersion, jobs};
use holdfast_host::qmp::MonitorError;
use holdfast_host::{
    CommandLine, ConfigurationLanguage, Description, InterruptedMigration, KeptStates, Machine, MachineHistory,
    MachineState, MachineSummary,
};

use crate::error::{Error, Result};
use crate::far::{BACKING, CheckRequest, FarAnswer, FarHost, FarRequest, MovingHypervisor, NVRAM, OverlayDisk};
use crate::image_file::ImageFile;
use moving::Moving;
use places::checked_disk;
pub use places::{MovingForm, PlannedDisk};

/// Whether a machine may move although its memory may arrive incomplete.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IncompleteMemory {
    /// It does not move.
    Refuse,
    /// It moves: for tests of this program.
    Accept,
}

/// Whether QEMU sends the memory of a machine that runs without losing anything.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LiveMemory {
    /// It does.
    Complete,
    /// It may lose what the guest writes meanwhile.
    MayBeIncomplete,
}

/// When the disks of a machine that runs are complete at the other host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiskArrival {
    /// Before it runs there: they are copied.
    BeforeStart,
    /// While it runs there: its hypervisor pulls them from this host.
    AfterStart {
        /// A random number for the names of sockets.
        run: u32,
    },
}

/// How long a hypervisor waits for a lost connection before it pauses a machine whose disks it pulls. libvirt before 9.2 does not
/// wait.
const RECONNECT_PATIENCE: Duration = Duration::from_secs(60);

/// The machine, and where it goes.
pub struct PlanRequest<'a> {
    /// Its hypervisor.
    pub hypervisor: &'a dyn MovingHypervisor,
    /// The machine.
    pub machine: &'a dyn Machine,
    /// The other host.
    pub far: &'a FarHost,
    /// The folder of the disks there; none for the default of its hypervisor.
    pub folder: Option<&'a Path>,
    /// Images there with similar content, by the targets of the disks in the machine.
    pub seeds: BTreeMap<String, PathBuf>,
    /// Whether it may move under a QEMU that may lose memory.
    pub incomplete_memory: IncompleteMemory,
    /// When its disks are complete there.
    pub arrival: DiskArrival,
    /// The clock for waits.
    pub clock: &'a dyn Clock,
}

/// What a migration does.
#[derive(Debug, Clone)]
pub struct MigrationPlan {
    /// The machine.
    pub machine: String,
    /// Its UUID.
    pub uuid: String,
    /// Running or shut off, if nothing prevents the migration.
    pub state: MachineState,
    /// The disks, in the order of the configuration. For a machine that is shut off, the variables of its firmware follow.
    pub disks: Vec<PlannedDisk>,
    /// How its hypervisor describes it.
    pub language: ConfigurationLanguage,
    /// The configuration with which it runs there, if it runs.
    pub configuration: String,
    /// The configuration for later starts.
    pub kept_configuration: String,
    /// The configuration for later starts here.
    pub own_configuration: String,
    /// Its snapshots and checkpoints, if it is shut off: its files move as they are then.
    pub history: MachineHistory,
    /// Images that nothing may write while files move.
    pub images: Vec<ImageFile>,
    /// Whether its memory arrives complete if it is sent while the machine runs.
    pub live_memory: LiveMemory,
    /// Whether it starts with its host.
    pub starts_with_host: bool,
    /// Files and devices there that are the disks of its former definition.
    pub former_files: Vec<PathBuf>,
    /// The socket of the hypervisor there.
    pub far_socket: PathBuf,
    /// What prevents the migration.
    pub obstacles: Vec<String>,
    /// What a user should know.
    pub notes: Vec<String>,
}

impl MigrationPlan {
    /// Whether its disks are pulled when it runs there.
    pub fn is_pulled(&self) -> bool {
        self.disks
            .iter()
            .any(|disk| matches!(disk.form, MovingForm::Overlay { .. }))
    }

    /// How the disks are pulled; none if they are copied.
    pub(crate) fn pulled(&self) -> Vec<PulledDisk> {
        self.disks.iter().filter_map(PlannedDisk::pulled).collect()
    }

    /// The images for disks that are pulled.
    pub(crate) fn overlays(&self) -> Vec<OverlayDisk> {
        let overlays = self.disks.iter().filter_map(|disk| {
            let pulled = disk.pulled()?;
            Some(OverlayDisk {
                path: pulled.path,
                size_bytes: disk.size_bytes,
                socket: pulled.socket,
                export: pulled.export,
            })
        });
        overlays.collect()
    }

    /// # Errors
    /// Something prevents the migration.
    pub fn require_no_obstacles(&self) -> Result<()> {
        if self.obstacles.is_empty() {
            return Ok(());
        }
        Err(Error::Obstacles {
            machine: self.machine.clone(),
            obstacles: self.obstacles.clone(),
        })
    }
}

/// What a plan has found.
#[derive(Debug, Default)]
struct Findings {
    /// What prevents the migration.
    obstacles: Vec<String>,
    /// What a user should know.
    notes: Vec<String>,
}

impl Findings {
    /// Adds what follows from the time at which the disks are complete.
    fn add_arrival(&mut self, request: &PlanRequest<'_>, state: MachineState) {
        match (request.arrival, state) {
            (DiskArrival::BeforeStart, _) => {}
            _ if request.hypervisor.language() == ConfigurationLanguage::CommandLine => self
                .obstacles
                .push("--post-copy is for machines of libvirt".to_owned()),
            (DiskArrival::AfterStart { .. }, MachineState::Running) => self.notes.push(
                "it runs there before its disks are complete: until then, it needs this host, the connection, and the disks here as \
                 they are; if one of them is lost, what it has done since is lost with it"
                    .to_owned(),
            ),
            (DiskArrival::AfterStart { .. }, state) => self
                .obstacles
                .push(format!("it is {state}, and --post-copy is for a machine that runs")),
        }
    }

    /// Adds what the other host finds.
    fn add_check(
        &mut self,
        far: &FarHost,
        description: &Description,
        configurations: &Configurations,
        disks: &[PlannedDisk],
    ) -> Result<()> {
        let check = CheckRequest {
            name: description.summary.name.clone(),
            uuid: description.summary.uuid.clone(),
            configuration: configurations.running.clone(),
            disks: disks.iter().map(checked_disk).collect(),
        };
        let FarAnswer::Checked { obstacles, notes } = far.ask(&FarRequest::Check(check))? else {
            return Err(far.other_version());
        };
        self.obstacles.extend(obstacles);
        self.notes.extend(notes);
        Ok(())
    }
}

/// Plans a migration. Nothing is changed.
pub fn plan(request: &PlanRequest<'_>) -> Result<MigrationPlan> {
    let description = request.machine.describe()?;
    let summary = &description.summary;
    let FarAnswer::Described {
        socket, image_folder, ..
    } = request.far.ask(&FarRequest::Describe {})?
    else {
        return Err(request.far.other_version());
    };
    let mut findings = Findings::default();
    if !matches!(summary.state, MachineState::Running | MachineState::ShutOff) {
        findings.obstacles.push(state_obstacle(request, summary)?);
        return Ok(empty_plan(&description, findings.obstacles));
    }
    let runs = summary.state == MachineState::Running;
    findings.add_arrival(request, summary.state);
    let language = request.hypervisor.language();
    if language == ConfigurationLanguage::DomainXml && runs && socket.is_none() {
        findings
            .obstacles
            .push("its hypervisor there has no local socket".to_owned());
    }
    let folder = request.folder.map(Path::to_owned).or(image_folder);
    let Some(folder) = folder else {
        findings
            .obstacles
            .push("its hypervisor there has no default folder for images: name one, ssh://HOST/FOLDER".to_owned());
        return Ok(empty_plan(&description, findings.obstacles));
    };
    let moving = Moving::find(request, &description, &folder, &mut findings)?;
    let configurations = Configurations::read(request, &description, &moving)?;
    findings
        .obstacles
        .extend(obstacles_here(request, &description, &configurations)?);
    let lossy_version = if runs { lossy_version(request.machine)? } else { None };
    if let (Some(version), IncompleteMemory::Refuse) = (lossy_version, request.incomplete_memory) {
        findings.obstacles.push(format!(
            "its processor is emulated, and QEMU {version} may then lose writes to memory that it is sending; QEMU 9.0 does not"
        ));
    }
    if language == ConfigurationLanguage::CommandLine {
        let line = CommandLine::parse(&configurations.running).map_err(|detail| unreadable(&description, detail))?;
        findings.notes.extend(line.notes());
    }
    findings.add_check(request.far, &description, &configurations, &moving.disks)?;
    // The variables of the firmware of a running machine keep their place.
    let former = moving.former.into_iter();
    let former = former.filter(|disk| disk.disk != BACKING && (!runs || disk.disk != NVRAM));
    Ok(MigrationPlan {
        machine: summary.name.clone(),
        uuid: summary.uuid.clone(),
        state: summary.state,
        language,
        disks: moving.disks,
        configuration: configurations.running,
        kept_configuration: configurations.kept,
        own_configuration: configurations.own,
        history: moving.history,
        images: moving.images,
        live_memory: lossy_version.map_or(LiveMemory::Complete, |_| LiveMemory::MayBeIncomplete),
        starts_with_host: request.hypervisor.autostart(&summary.uuid)?,
        former_files: former.map(|disk| disk.path).collect(),
        far_socket: socket.unwrap_or_default(),
        obstacles: findings.obstacles,
        notes: findings.notes,
    })
}

/// Why a machine that neither runs nor is shut off cannot be moved.
fn state_obstacle(request: &PlanRequest<'_>, summary: &MachineSummary) -> Result<String> {
    Ok(match request.hypervisor.interrupted(&summary.uuid)? {
        Some(InterruptedMigration::Held) => {
            "its migration was interrupted, and it is still stopped: any migration resumes it first".to_owned()
        }
        Some(InterruptedMigration::Sent { destination }) => format!(
            "its migration to {destination} was interrupted, and it may run there: the same command as then completes it"
        ),
        None if summary.state == MachineState::Between => {
            "it is starting, stopping, crashed, suspended, or stopped by a migration: wait until it runs, resume it, or shut it off"
                .to_owned()
        }
        None => format!("it is {}: resume it, or shut it off", summary.state),
    })
}

fn unreadable(description: &Description, detail: String) -> Error {
    Error::from(holdfast_host::Error::Configuration {
        machine: description.summary.name.clone(),
        detail,
    })
}

/// The configurations, with the disks at their new places except for `own`.
struct Configurations {
    /// With which it runs; the kept one, if it is shut off.
    running: String,
    /// For later starts.
    kept: String,
    /// For later starts here.
    own: String,
}

impl Configurations {
    fn read(request: &PlanRequest<'_>, description: &Description, moving: &Moving) -> Result<Self> {
        let summary = &description.summary;
        let moved = |text: &str| {
            let moved = if request.hypervisor.language() == ConfigurationLanguage::CommandLine {
                moved_command_line(text, &moving.disks)
            } else if moving.files.is_empty() {
                moved_configuration(text, &moving.disks)
            } else {
                moved_configuration(text, &[]).and_then(|text| with_moved_files(&text, &moving.files))
            };
            moved.map_err(|detail| unreadable(description, detail))
        };
        let own = request.hypervisor.kept_configuration(&summary.uuid)?;
        let kept = moved(&own)?;
        let running = match summary.state {
            MachineState::Running => moved(&request.hypervisor.migratable_configuration(&summary.uuid)?)?,
            _ => kept.clone(),
        };
        Ok(Self { running, kept, own })
    }
}

/// What prevents the machine from leaving this host.
fn obstacles_here(
    request: &PlanRequest<'_>,
    description: &Description,
    configurations: &Configurations,
) -> Result<Vec<String>> {
    let kept = request.hypervisor.kept_states(&description.summary.uuid)?;
    let mut obstacles = kept_obstacles(kept, description.summary.state);
    if description.summary.state == MachineState::Running {
        let found = jobs(request.machine.monitor()).map_err(|source| monitor_failed(request.machine, source))?;
        let active = found.iter().filter(|job| job.status != "concluded");
        obstacles.extend(active.map(|job| {
            format!(
                "its QEMU has the {} job {}: wait for its end, or end it",
                job.kind, job.id
            )
        }));
    }
    if description.summary.state == MachineState::ShutOff {
        obstacles.extend(StoppedTpm::read(request.machine, request.clock).err());
    }
    if description.summary.state == MachineState::Running {
        obstacles.extend(request.hypervisor.blockers(&description.summary.uuid)?);
    }
    let needs = request.hypervisor.needs(&configurations.running).unwrap_or_default();
    let passed = needs.pci_devices.iter();
    obstacles.extend(passed.map(|address| format!("the PCI device {address} is passed through, and stays here")));
    Ok(obstacles)
}

fn moved_command_line(text: &str, disks: &[PlannedDisk]) -> std::result::Result<String, String> {
    let places = disks.iter().map(|disk| (disk.image.path.clone(), disk.path.clone()));
    Ok(CommandLine::parse(text)?.moved(&places.collect())?.text())
}

/// A configuration of the machine, with its disks at their new places.
fn moved_configuration(text: &str, disks: &[PlannedDisk]) -> std::result::Result<String, String> {
    let change = |disk: &PlannedDisk| {
        let place = DiskPlace {
            path: disk.path.clone(),
            medium: Medium::File,
            format: disk.format().to_owned(),
        };
        (disk.target.clone(), DiskChange::Place(place))
    };
    let pulled = disks.iter().filter_map(PlannedDisk::pulled);
    let (variables, disks): (Vec<_>, Vec<_>) = disks.iter().partition(|disk| disk.target == NVRAM);
    let wish = Rewrite {
        disks: disks.into_iter().map(change).collect::<BTreeMap<_, _>>(),
        nvram: variables.first().map(|disk| disk.path.clone()),
        ..Rewrite::moved(Identity::Keep)
    };
    let text = rewrite(text, &wish)?.text;
    let pulled: Vec<PulledDisk> = pulled.collect();
    with_pulled_disks(&text, &pulled, RECONNECT_PATIENCE)
}

fn empty_plan(description: &Description, obstacles: Vec<String>) -> MigrationPlan {
    MigrationPlan {
        machine: description.summary.name.clone(),
        uuid: description.summary.uuid.clone(),
        state: description.summary.state,
        language: ConfigurationLanguage::DomainXml,
        disks: Vec::new(),
        configuration: String::new(),
        kept_configuration: String::new(),
        own_configuration: String::new(),
        history: MachineHistory::default(),
        images: Vec::new(),
        live_memory: LiveMemory::Complete,
        starts_with_host: false,
        former_files: Vec::new(),
        far_socket: PathBuf::new(),
        obstacles,
        notes: Vec::new(),
    }
}

fn kept_obstacles(states: KeptStates, state: MachineState) -> Vec<String> {
    let mut obstacles = Vec::new();
    let runs = state == MachineState::Running;
    for (count, what) in [
        (states.snapshot_count, "snapshots"),
        (states.checkpoint_count, "checkpoints"),
    ] {
        if runs && count > 0 {
            obstacles.push(format!(
                "its hypervisor has {what} of it, which are in the images here: shut it off, then it moves with them; or delete \
                 them"
            ));
        }
    }
    if states.has_saved_memory {
        obstacles.push(
            "its memory was saved, and stays here: start it, or delete the memory with virsh managedsave-remove"
                .to_owned(),
        );
    }
    if states.is_transient {
        obstacles.push("its definition is removed when it stops, so it could not return: define it".to_owned());
    }
    obstacles
}

fn monitor_failed(machine: &dyn Machine, source: MonitorError) -> Error {
    Error::from(holdfast_host::Error::Monitor {
        machine: machine.name().to_owned(),
        source,
    })
}

/// The version of its QEMU, if that may lose memory that it sends while the machine runs.
fn lossy_version(machine: &dyn Machine) -> Result<Option<QemuVersion>> {
    let mode = MemoryMethod::Auto.mode(machine.monitor());
    let mode = mode.map_err(|source| monitor_failed(machine, source))?;
    Ok(match mode {
        (MemoryMode::Stopped, version) => version,
        (MemoryMode::Live, _) => None,
    })
}
