//! A host on which a QEMU without a management layer runs, or will run: machines move to it and away from it.
//!
//! The monitor is at the same path on every host of the machine, as its command line says. It serves one client at a time,
//! so the connection is shared.

use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use holdfast_block::{Clock, error_text};
use serde_json::{Value, json};

use super::command_line::{CommandLine, QemuFacts};
use super::receiving::ReceivedMachine;
use super::sending;
use super::{BareConnection, BareMachine, BareQemu};
use crate::hypervisor::domain_xml::{DiskPlace, HostNeeds};
use crate::hypervisor::error::{Error, Result};
use crate::hypervisor::live_disks::{CopyState, ExecutionState, LiveDisks};
use crate::hypervisor::machine::MachineSummary;
use crate::hypervisor::migration::{
    Autostart, ConfigurationLanguage, InterruptedMigration, LiveMigration, MachineHistory, MigrationRequest,
    ProcessorFit,
};
use crate::hypervisor::tpm::TpmPlace;
use crate::hypervisor::traits::{Hypervisor, HypervisorMut, KeptStates, Machine, Resumption};
use crate::qemu::QemuVersion;
use crate::qemu::memory::{cancel_held_migration, forget_destination, is_held, noted_destination};
use crate::qemu::qmp::MonitorError;
use crate::qemu::qom::{property, text};
use crate::system::processes::{Process, ProcessInfo};
use crate::system::rights::Rights;

/// How long QEMU may take to end.
const END_PATIENCE: Duration = Duration::from_secs(10);
const END_INTERVAL: Duration = Duration::from_millis(2);

/// A host whose only machine is the QEMU at this monitor.
pub struct BareHost {
    title: String,
    /// The path of the monitor.
    path: PathBuf,
    clock: Arc<dyn Clock>,
    /// The connection to its QEMU.
    connection: Mutex<Option<Arc<BareConnection>>>,
    /// The machine that comes, until it runs.
    received: Mutex<Option<ReceivedMachine>>,
    /// The limit of the downtime that QEMU had before a migration.
    former_downtime: Mutex<Option<Value>>,
}

impl BareHost {
    /// The host of the QEMU whose monitor is, or will be, at `path`.
    pub fn new(path: &Path, clock: Arc<dyn Clock>) -> Self {
        Self {
            title: format!("QEMU at {}", path.display()),
            path: path.to_owned(),
            clock,
            connection: Mutex::default(),
            received: Mutex::default(),
            former_downtime: Mutex::default(),
        }
    }

    fn locked(&self) -> MutexGuard<'_, Option<Arc<BareConnection>>> {
        self.connection.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn received(&self) -> MutexGuard<'_, Option<ReceivedMachine>> {
        self.received.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The connection to the QEMU, which is made if there is none.
    ///
    /// # Errors
    /// None listens: [`Error::NoSuchMachine`].
    fn connected(&self) -> Result<Arc<BareConnection>> {
        let mut connection = self.locked();
        if let Some(known) = connection.as_ref() {
            let has_ended = known.process.as_ref().is_some_and(Process::has_ended);
            if !has_ended {
                return Ok(Arc::clone(known));
            }
            *connection = None;
        }
        let made = BareQemu::connect(&self.path, Arc::clone(&self.clock)).map_err(|error| match error {
            Error::Unreachable { source, .. } if is_without_listener(&*source) => self.without_machine(),
            other => other,
        })?;
        Ok(Arc::clone(connection.insert(made.machine)))
    }

    fn without_machine(&self) -> Error {
        Error::NoSuchMachine {
            hypervisor: self.title.clone(),
            name: self.path.display().to_string(),
        }
    }

    fn refused(&self, action: &'static str, reason: impl Into<String>) -> Error {
        Error::Refused {
            action,
            machine: self.path.display().to_string(),
            reason: reason.into(),
        }
    }

    fn without_libvirt(&self, action: &'static str) -> Error {
        self.refused(action, "it has no libvirt")
    }

    fn command_line(&self) -> Result<CommandLine> {
        let qemu = self.connected()?;
        let failed = |error| qemu.failed(error);
        let kind = property(&*qemu.monitor, "/machine", "type").map_err(failed)?;
        let kind = kind.as_str().unwrap_or_default();
        let facts = QemuFacts {
            machine_type: kind.strip_suffix("-machine").unwrap_or(kind).to_owned(),
            version: QemuVersion::query(&*qemu.monitor).map_err(failed)?,
            has_kvm: qemu.query("query-kvm")?["enabled"] == true,
            variables: qemu.blocks()?.nvram,
            user: match &qemu.rights {
                Rights::Own => None,
                Rights::Of(identity) => Some(identity.clone()),
            },
            is_started_by_root: qemu.is_started_by_root,
        };
        let process = qemu.process.as_ref();
        let line = process.and_then(|process| CommandLine::of_process(process, facts));
        line.ok_or_else(|| {
            self.refused(
                "describe",
                "the command line of its QEMU is not visible: holdfast must run as root",
            )
        })
    }

    fn former_downtime(&self) -> MutexGuard<'_, Option<Value>> {
        self.former_downtime.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A failure does not harm the machine.
    fn restore_downtime(&self, qemu: &BareConnection) {
        if let Some(former) = self.former_downtime().take() {
            qemu.ask("migrate-set-parameters", json!({ "downtime-limit": former }))
                .ok();
        }
    }

    /// Ends the QEMU, and waits for its end.
    fn quit(&self) -> Result<()> {
        let qemu = match self.connected() {
            Ok(qemu) => qemu,
            Err(Error::NoSuchMachine { .. }) => return Ok(()),
            Err(error) => return Err(error),
        };
        match qemu.query("quit") {
            Ok(_)
            | Err(Error::Monitor {
                source: MonitorError::Gone { .. },
                ..
            }) => {}
            Err(error) => return Err(error),
        }
        let until = self.clock.now() + END_PATIENCE;
        while qemu.process.as_ref().is_some_and(|process| !process.has_ended()) {
            if self.clock.now() >= until {
                return Err(self.refused("end", "its QEMU does not end"));
            }
            self.clock.sleep(END_INTERVAL);
        }
        *self.locked() = None;
        Ok(())
    }
}

impl Drop for BareHost {
    /// A machine that has not started here runs at the source, or is started there again.
    fn drop(&mut self) {
        let is_unused = self.received().take().is_some();
        if is_unused {
            self.quit().ok();
        }
    }
}

/// Whether a QEMU has no machine yet: an interrupted migration has left it, and the next one replaces it.
fn waits_for_memory(qemu: &BareConnection) -> Result<bool> {
    Ok(qemu.query("query-status")?["status"] == "inmigrate")
}

/// Whether no process listens at a socket.
fn is_without_listener(error: &(dyn std::error::Error + Send + Sync + 'static)) -> bool {
    let Some(MonitorError::Gone {
        source: Some(source), ..
    }) = error.downcast_ref::<MonitorError>()
    else {
        return false;
    };
    matches!(
        source.kind(),
        std::io::ErrorKind::NotFound | std::io::ErrorKind::ConnectionRefused
    )
}

impl Hypervisor for BareHost {
    fn title(&self) -> &str {
        &self.title
    }

    fn machines(&self) -> Result<Vec<MachineSummary>> {
        match self.connected() {
            Ok(qemu) if waits_for_memory(&qemu)? => Ok(Vec::new()),
            Ok(qemu) => Ok(vec![qemu.summary()?]),
            Err(Error::NoSuchMachine { .. }) => Ok(Vec::new()),
            Err(error) => Err(error),
        }
    }

    /// The only machine, whatever its name: a machine without a UUID is named by its host.
    fn machine(&self, _name: &str) -> Result<Box<dyn Machine>> {
        let qemu = self.connected()?;
        if waits_for_memory(&qemu)? {
            return Err(self.without_machine());
        }
        Ok(Box::new(BareMachine(qemu)))
    }
}

impl HypervisorMut for BareHost {
    fn is_of_this_host(&self) -> bool {
        true
    }

    fn check(&self, configuration: &str) -> Result<Option<String>> {
        let is_free = match self.connected() {
            Ok(qemu) => waits_for_memory(&qemu)?,
            Err(Error::NoSuchMachine { .. }) => true,
            Err(error) => return Err(error),
        };
        if !is_free {
            return Ok(Some(format!(
                "a QEMU runs there, whose monitor is {}",
                self.path.display()
            )));
        }
        let line = CommandLine::parse(configuration).map_err(|reason| self.refused("start", reason))?;
        let missing = line.missing_here(&*self.clock);
        Ok((!missing.is_empty()).then(|| missing.join("; ")))
    }

    fn kept_states(&self, _machine: &str) -> Result<KeptStates> {
        Ok(KeptStates::default())
    }

    fn tpm_place(&self, _configuration: &str) -> Option<TpmPlace> {
        None
    }

    fn define(&self, _configuration: &str) -> Result<()> {
        Err(self.without_libvirt("define"))
    }

    fn undefine(&self, _machine: &str) -> Result<()> {
        Err(self.without_libvirt("undefine"))
    }

    fn power_off(&self, _machine: &str) -> Result<()> {
        self.received().take();
        self.quit()
    }

    fn start(&self, _machine: &str) -> Result<()> {
        Err(self.without_libvirt("start"))
    }

    fn resume(&self, _resumption: &Resumption<'_>) -> Result<()> {
        Err(self.without_libvirt("start"))
    }
}

impl LiveDisks for BareHost {
    fn execution_state(&self, _machine: &str) -> Result<ExecutionState> {
        let status = self.connected()?.query("query-status")?;
        Ok(match text(&status, "status").unwrap_or_default().as_str() {
            "running" => ExecutionState::Running,
            "io-error" => ExecutionState::StoppedByDisk,
            _ => ExecutionState::Paused,
        })
    }

    fn unpause(&self, _machine: &str) -> Result<()> {
        let qemu = self.connected()?;
        // It may run from now on, whatever the answer is.
        self.received().take();
        qemu.query("cont").map(drop)
    }

    fn begin_copy(&self, _machine: &str, _disk: &str, _to: &DiskPlace, _rate: NonZeroU64) -> Result<()> {
        Err(self.without_libvirt("copy a disk of"))
    }

    fn set_copy_rate(&self, _machine: &str, _disk: &str, _rate: NonZeroU64) -> Result<()> {
        Err(self.without_libvirt("copy a disk of"))
    }

    fn copy(&self, _machine: &str, _disk: &str, _to: &DiskPlace) -> Result<Option<CopyState>> {
        Ok(None)
    }

    fn finish_copy(&self, _machine: &str, _disk: &str) -> Result<()> {
        Err(self.without_libvirt("copy a disk of"))
    }

    fn begin_pull(&self, _machine: &str, _disk: &str) -> Result<()> {
        Err(self.without_libvirt("pull a disk of"))
    }

    fn pull(&self, _machine: &str, _disk: &str) -> Result<Option<CopyState>> {
        Ok(None)
    }

    fn current_configuration(&self, _machine: &str) -> Result<String> {
        Ok(self.command_line()?.text())
    }

    fn user_of_machines(&self) -> Result<Option<(u32, u32)>> {
        Ok(None)
    }
}

impl LiveMigration for BareHost {
    fn language(&self) -> ConfigurationLanguage {
        ConfigurationLanguage::CommandLine
    }

    fn migratable_configuration(&self, machine: &str) -> Result<String> {
        self.current_configuration(machine)
    }

    fn kept_configuration(&self, machine: &str) -> Result<String> {
        self.current_configuration(machine)
    }

    fn needs(&self, configuration: &str) -> std::result::Result<HostNeeds, String> {
        Ok(CommandLine::parse(configuration)?.needs())
    }

    fn blockers(&self, _machine: &str) -> Result<Vec<String>> {
        let mut blockers = self.command_line()?.obstacles();
        let status = self.connected()?.query("query-migrate")?;
        let reasons = status["blocked-reasons"].as_array().into_iter().flatten();
        blockers.extend(reasons.filter_map(Value::as_str).map(str::to_owned));
        Ok(blockers)
    }

    fn migrate(&self, _machine: &str, request: &MigrationRequest<'_>) -> Result<()> {
        let qemu = self.connected()?;
        sending::migrate(&qemu, request).inspect_err(|_| self.restore_downtime(&qemu))?;
        // The machine runs there. Its images here are kept, and nothing uses them any more.
        self.quit()
    }

    fn receive(&self, configuration: &str, memory_socket: &Path) -> Result<()> {
        let refused = |reason| self.refused("receive", reason);
        let line = CommandLine::parse(configuration).map_err(refused)?;
        self.received().take();
        match self.connected() {
            Ok(qemu) if waits_for_memory(&qemu)? => self.quit()?,
            Ok(_) => return Err(refused("its QEMU runs there".to_owned())),
            Err(Error::NoSuchMachine { .. }) => {}
            Err(error) => return Err(error),
        }
        let received = ReceivedMachine::start(&line, memory_socket, &*self.clock, &|| match self.connected() {
            Ok(qemu) => Ok(Some(qemu)),
            Err(Error::NoSuchMachine { .. }) => Ok(None),
            Err(error) => Err(error_text(&error)),
        });
        *self.received() = Some(received.map_err(refused)?);
        Ok(())
    }

    fn is_process_of(&self, _machine: &str, process: &ProcessInfo) -> bool {
        let qemu = self.locked().clone();
        let own = qemu.and_then(|qemu| qemu.process.as_ref()?.number());
        own == Some(process.pid)
    }

    fn interrupted(&self, _machine: &str) -> Result<Option<InterruptedMigration>> {
        let qemu = self.connected()?;
        let failed = |error| qemu.failed(error);
        if is_held(&*qemu.monitor).map_err(failed)? {
            return Ok(Some(InterruptedMigration::Held));
        }
        let status = qemu.query("query-status")?;
        if status["status"] != "postmigrate" {
            return Ok(None);
        }
        let noted = noted_destination(&*qemu.monitor).map_err(failed)?;
        Ok(noted.map(|destination| InterruptedMigration::Sent { destination }))
    }

    fn take_back(&self, _machine: &str) -> Result<()> {
        let qemu = self.connected()?;
        let failed = |error| qemu.failed(error);
        if is_held(&*qemu.monitor).map_err(failed)? {
            return cancel_held_migration(&*qemu.monitor, &*self.clock).map_err(failed);
        }
        qemu.query("cont")?;
        forget_destination(&*qemu.monitor);
        Ok(())
    }

    fn limit_downtime(&self, _machine: &str, longest: Duration) -> Result<()> {
        let milliseconds = u64::try_from(longest.as_millis()).unwrap_or(u64::MAX).max(1);
        let qemu = self.connected()?;
        let found = qemu.query("query-migrate-parameters")?["downtime-limit"].clone();
        self.former_downtime().get_or_insert(found);
        qemu.ask("migrate-set-parameters", json!({ "downtime-limit": milliseconds }))
            .map(drop)
    }

    fn autostart(&self, _machine: &str) -> Result<bool> {
        Ok(false)
    }

    fn set_autostart(&self, _machine: &str, starts: Autostart) -> Result<()> {
        match starts {
            Autostart::Off => Ok(()),
            Autostart::On => Err(self.without_libvirt("change the start of")),
        }
    }

    fn history(&self, _machine: &str) -> Result<MachineHistory> {
        Ok(MachineHistory::default())
    }

    fn replace_history(&self, _machine: &str, history: &MachineHistory) -> Result<()> {
        if history.is_empty() {
            return Ok(());
        }
        Err(self.without_libvirt("store the snapshots of"))
    }

    fn processor_fit(&self, _configuration: &str) -> ProcessorFit {
        ProcessorFit::Unknown
    }

    fn socket(&self) -> Option<PathBuf> {
        None
    }
}
