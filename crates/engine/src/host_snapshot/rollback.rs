//! `rollback` and `clone`: return a machine to host snapshots of its disks, or make another machine from them.
//!
//! Everything but the disks comes from the [state store](crate::StateStore). Both together form a point in time like a
//! snapshot in a repository, and are restored by the same code: `restore::machine`. A rollback writes the differences
//! into the present images of the machine; no newer snapshot has to be destroyed, and it works for all kinds of disks.

mod contents;
mod notes;
mod point;
mod since;
mod temporary;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use holdfast_host::provider::{Dataset, DatasetState, HostSnapshotName, ProviderError, ProviderKind, ProviderResult};
use holdfast_host::{HypervisorMut, MachineState};
use holdfast_repo::Environment;

use super::states::StateStore;
use super::{HostSnapshotRequest, Providers, check_host_snapshots, take_host_snapshots};
use crate::files::block_target::Overwrite;
use crate::job::{Error, Job, MachineName, Result};
use crate::restore::machine::{
    AfterRestore, ConfigurationChoice, InPlaceOptions, MachineRestorePlan, MachineRestoreReport, NewMachineIdentity,
    NewMachineOptions, Planner, Presence, RestoreAs, plan_point, restore_point,
};
use contents::EarlierState;
pub use notes::OwnGuest;
use notes::{CloneNote, RollbackNote};
pub use point::{HostPoint, HostPointRequest, PointName, open_host_point};
pub use temporary::TemporarySnapshots;
pub(crate) use temporary::remove_unless_needed;

/// Parameters of a job on a point in time.
pub struct HostRestore<'a> {
    /// The providers of this host.
    pub providers: &'a Providers,
    /// Where the states of machines are stored.
    pub states: &'a StateStore,
    /// The hypervisor of the machine.
    pub hypervisor: &'a dyn HypervisorMut,
    /// The environment for the state store.
    pub environment: &'a Environment,
    /// A folder for the pipe through which a hypervisor receives memory.
    pub runtime: PathBuf,
}

/// How to roll back a machine.
pub struct RollbackOptions<'a> {
    /// What happens to its configuration.
    pub configuration: ConfigurationChoice,
    /// What to do afterwards.
    pub after: AfterRestore,
    /// Whether a running machine is switched off.
    pub powers_off: bool,
    /// The host snapshot of the present state, which is taken first; none if not requested. It is of the same machine.
    pub safety: Option<&'a HostSnapshotRequest<'a>>,
}

/// A machine that was rolled back.
pub struct RollbackReport {
    /// The plan that was executed.
    pub plan: MachineRestorePlan,
    /// The result of the restore.
    pub restore: MachineRestoreReport,
    /// The safety snapshot of the state before.
    pub safety: Vec<HostSnapshotName>,
}

impl HostRestore<'_> {
    fn planner<'p>(&'p self, point: &'p HostPoint) -> Planner<'p> {
        Planner {
            repository: self.states.repository(),
            contents: &point.contents,
            hypervisor: self.hypervisor,
            environment: self.environment,
        }
    }

    /// Plans a rollback. The machine is shut off, or will be switched off first.
    pub fn plan_rollback(
        &self,
        point: &HostPoint,
        wish: &RollbackOptions<'_>,
        job: Job<'_>,
    ) -> Result<MachineRestorePlan> {
        let presence = if wish.powers_off {
            Presence::SwitchedOffFirst
        } else {
            Presence::ShutOff
        };
        self.plan_with(point, wish, presence, job)
    }

    fn plan_with(
        &self,
        point: &HostPoint,
        wish: &RollbackOptions<'_>,
        presence: Presence,
        job: Job<'_>,
    ) -> Result<MachineRestorePlan> {
        let in_place = RestoreAs::InPlace(InPlaceOptions {
            machine: Some(point.uuid.clone()),
            configuration: wish.configuration,
            presence,
        });
        let plan = plan_point(
            &self.planner(point),
            point.manifest.clone(),
            &in_place,
            wish.after,
            &self.runtime,
            job,
        )?;
        Ok(point.with_warnings(plan))
    }

    /// Rolls a machine back.
    ///
    /// # Errors
    /// Before anything is written, or later with a warning that says what was written. The safety snapshot is kept. A
    /// machine that has to be switched off is switched off only after all checks.
    pub fn roll_back(&self, point: &HostPoint, wish: &RollbackOptions<'_>, job: Job<'_>) -> Result<RollbackReport> {
        if wish.powers_off {
            self.plan_rollback(point, wish, job)?;
            wish.safety.map_or(Ok(()), check_host_snapshots)?;
            self.power_off(&point.uuid)?;
        }
        // Detects changes since the plan.
        let plan = self.plan_with(point, wish, Presence::ShutOff, job)?;
        let safety = match wish.safety {
            Some(request) => take_host_snapshots(request, &mut || (), job)?.snapshots,
            None => Vec::new(),
        };
        let mut note = RollbackNote::new(self, point, &plan, &safety)?;
        let since = EarlierState {
            point: &point.contents,
            providers: self.providers,
            safety: &safety,
            run: point.run,
        };
        let planner = Planner {
            contents: &since,
            ..self.planner(point)
        };
        let restored = restore_point(&planner, &plan, &mut note, job).inspect_err(|_| {
            if let Some(first) = safety.first() {
                let message = format!("what was there before is in the host snapshot {}", first.name);
                job.progress.warning(&message);
            }
        });
        let restore = restored?;
        self.has_ended(&point.uuid, job);
        Ok(RollbackReport { plan, restore, safety })
    }

    /// Removes the note of the work.
    fn has_ended(&self, uuid: &str, job: Job<'_>) {
        if let Err(error) = self.states.forget_unfinished(uuid) {
            let message = format!("it is done, and still noted as unfinished: {error}; holdfast doctor reports it");
            job.progress.warning(&message);
        }
    }

    fn power_off(&self, uuid: &str) -> Result<()> {
        let machine = self.hypervisor.machine(uuid)?;
        if machine.describe()?.summary.state != MachineState::ShutOff {
            self.hypervisor.power_off(uuid)?;
        }
        Ok(())
    }
}

/// Parameters of a clone.
#[derive(Debug, Clone)]
pub struct CloneOptions {
    /// Its name.
    pub name: MachineName,
    /// The folder for its images; beside the originals if none. On ZFS its files are in clones of the datasets.
    pub storage: Option<PathBuf>,
    /// What to do afterwards.
    pub after: AfterRestore,
}

/// A dataset that is cloned for a new machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedClone {
    /// The snapshot to clone.
    pub snapshot: HostSnapshotName,
    /// The new dataset.
    pub to: Dataset,
    /// The folder of its files, or its device.
    pub folder: PathBuf,
}

/// Plan of a clone.
pub struct ClonePlan {
    /// Datasets that are cloned first.
    pub clones: Vec<PlannedClone>,
    /// The machine.
    pub restore: MachineRestorePlan,
}

impl HostRestore<'_> {
    /// Plans a clone of a machine.
    pub fn plan_clone(&self, point: &mut HostPoint, wish: &CloneOptions, job: Job<'_>) -> Result<ClonePlan> {
        let clones = self.clones(point, wish)?;
        point.contents.clone_datasets(&clones);
        let new = RestoreAs::NewMachine(NewMachineOptions {
            name: Some(wish.name.clone()),
            identity: NewMachineIdentity::New,
            storage: wish.storage.clone(),
            format: None,
            places: BTreeMap::new(),
            domain_type: None,
            overwrite: Overwrite::Refuse,
        });
        let plan = plan_point(
            &self.planner(point),
            point.manifest.clone(),
            &new,
            wish.after,
            &self.runtime,
            job,
        )?;
        Ok(ClonePlan {
            clones,
            restore: point.with_warnings(plan),
        })
    }

    /// Makes the clone, and gives its guest a new identity if requested, before it starts. After an error the cloned
    /// datasets are removed.
    pub fn make_clone(
        &self,
        point: &HostPoint,
        plan: &ClonePlan,
        guest: Option<&OwnGuest<'_>>,
        job: Job<'_>,
    ) -> Result<MachineRestoreReport> {
        let mut note = CloneNote::begin(self, point, plan, guest, job)?;
        let mut made = Vec::new();
        let restored = self
            .clone_datasets(plan, &mut made)
            .and_then(|()| restore_point(&self.planner(point), &plan.restore, &mut note, job));
        for clone in made {
            let ended = match &restored {
                Ok(_) => self.finish_clone(clone),
                Err(_) => self.destroy_clone(clone),
            };
            if let Err(error) = ended {
                let way_out = match clone.to.provider {
                    ProviderKind::Lvm => "lvremove takes it away",
                    _ => "holdfast doctor sees to it",
                };
                job.progress.warning(&format!("{}: {error}; {way_out}", clone.to));
            }
        }
        self.has_ended(&plan.restore.machine.uuid, job);
        restored
    }

    fn clone_dataset(&self, clone: &PlannedClone, machine: &str) -> ProviderResult<DatasetState> {
        match clone.to.provider {
            ProviderKind::Lvm => self
                .providers
                .of_dataset(&clone.to)
                .clone_to(&clone.snapshot, &clone.to.name),
            _ => self
                .providers
                .zfs()
                .clone_for_machine(&clone.snapshot, &clone.to.name, machine),
        }
    }

    /// An LVM clone does not depend on its original, and is an ordinary volume from the start.
    fn finish_clone(&self, clone: &PlannedClone) -> ProviderResult<()> {
        match clone.to.provider {
            ProviderKind::Lvm => Ok(()),
            _ => self.providers.zfs().finish_clone(&clone.to.name),
        }
    }

    fn destroy_clone(&self, clone: &PlannedClone) -> ProviderResult<()> {
        match clone.to.provider {
            ProviderKind::Lvm => self.providers.lvm().destroy_clone(&clone.to.name, &clone.snapshot),
            _ => self.providers.zfs().destroy_clone(&clone.to.name, &clone.snapshot),
        }
    }

    fn clone_datasets<'p>(&self, plan: &'p ClonePlan, made: &mut Vec<&'p PlannedClone>) -> Result<()> {
        for clone in &plan.clones {
            let state = self.clone_dataset(clone, &plan.restore.machine.name)?;
            made.push(clone);
            if state.folder.as_deref().is_some_and(|folder| folder != clone.folder) {
                return Err(Error::from(ProviderError::Refused {
                    action: "mount",
                    what: clone.to.to_string(),
                    reason: format!("it was to be at {}, and is elsewhere", clone.folder.display()),
                }));
            }
        }
        Ok(())
    }

    /// The ZFS and LVM datasets that have to be cloned: their blocks cannot be shared with files elsewhere.
    fn clones(&self, point: &HostPoint, wish: &CloneOptions) -> Result<Vec<PlannedClone>> {
        let mut clones: Vec<PlannedClone> = Vec::new();
        let cloned = point
            .snapshots
            .iter()
            .filter(|name| !name.dataset.provider.has_folders() && wish.storage.is_none());
        for snapshot in cloned {
            let provider = snapshot.dataset.provider;
            let state = self.providers.of(provider).dataset(&snapshot.dataset.name)?;
            let (parent, own) = snapshot
                .dataset
                .name
                .rsplit_once('/')
                .unwrap_or((&snapshot.dataset.name, "disks"));
            let is_only = point.snapshots.len() == 1;
            let name = if is_only {
                format!("{parent}/{}", wish.name)
            } else {
                format!("{parent}/{}-{own}", wish.name)
            };
            let last = name.rsplit('/').next().unwrap_or_default();
            let folder = match &state.folder {
                _ if state.is_volume => volume_device(provider, &name),
                // The path of its clone is unknown.
                None => {
                    return Err(Error::from(ProviderError::Refused {
                        action: "clone",
                        what: snapshot.to_string(),
                        reason: "its dataset is not mounted; mount it, or use --storage FOLDER".to_owned(),
                    }));
                }
                Some(folder) if parent == snapshot.dataset.name => folder.join(last),
                Some(folder) => folder.with_file_name(last),
            };
            clones.push(PlannedClone {
                snapshot: snapshot.clone(),
                to: Dataset { provider, name },
                folder,
            });
        }
        Ok(clones)
    }
}

/// Path of the device of a volume.
fn volume_device(provider: ProviderKind, name: &str) -> PathBuf {
    let folder = match provider {
        ProviderKind::Lvm => "/dev",
        _ => "/dev/zvol",
    };
    Path::new(folder).join(name)
}
