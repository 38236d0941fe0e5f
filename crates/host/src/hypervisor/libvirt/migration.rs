//! Moving running machines by libvirt.
//!
//! The daemon of this host directs the migration (`PEER2PEER`): it resumes the machine here if anything fails. libvirt would
//! refuse to move a machine with disks on local files; `UNSAFE` says that the caller copies them.

use std::path::{Path, PathBuf};
use std::time::Duration;

use virt::domain::MigrateParameters;
use virt::sys;

use super::{Libvirt, history, is_code};
use crate::hypervisor::domain_xml::HostNeeds;
use crate::hypervisor::error::{Error, Result};
use crate::hypervisor::live_disks::LiveDisks as _;
use crate::hypervisor::migration::{
    Autostart, ConfigurationLanguage, GuestSpeed, InterruptedMigration, LiveMigration, MachineHistory,
    MigrationRequest, ProcessorFit,
};
use crate::system::processes::ProcessInfo;
use virt::error::ErrorNumber;

/// The usual sockets of a daemon, for an address without one.
const SOCKETS: [&str; 2] = ["/run/libvirt/libvirt-sock", "/run/libvirt/virtqemud-sock"];

impl LiveMigration for Libvirt {
    fn language(&self) -> ConfigurationLanguage {
        ConfigurationLanguage::DomainXml
    }

    fn needs(&self, configuration: &str) -> std::result::Result<HostNeeds, String> {
        HostNeeds::of(configuration)
    }

    /// libvirt refuses the migration with its reason.
    fn blockers(&self, _machine: &str) -> Result<Vec<String>> {
        Ok(Vec::new())
    }

    fn migratable_configuration(&self, machine: &str) -> Result<String> {
        self.find(machine)?.xml(sys::VIR_DOMAIN_XML_MIGRATABLE)
    }

    fn kept_configuration(&self, machine: &str) -> Result<String> {
        self.find(machine)?.xml(sys::VIR_DOMAIN_XML_INACTIVE)
    }

    fn migrate(&self, machine: &str, request: &MigrationRequest<'_>) -> Result<()> {
        let machine = self.find(machine)?;
        let parameters = MigrateParameters {
            uri: Some(format!("unix://{}", request.memory_socket.display())),
            dest_xml: Some(request.configuration.to_owned()),
            persist_xml: Some(request.kept_configuration.to_owned()),
            ..MigrateParameters::default()
        };
        let converges = match request.guest_speed {
            GuestSpeed::Kept => 0,
            GuestSpeed::SlowedIfNeeded => sys::VIR_MIGRATE_AUTO_CONVERGE,
        };
        let flags = converges
            | sys::VIR_MIGRATE_LIVE
            | sys::VIR_MIGRATE_PEER2PEER
            | sys::VIR_MIGRATE_UNSAFE
            | sys::VIR_MIGRATE_PERSIST_DEST
            | sys::VIR_MIGRATE_ABORT_ON_ERROR;
        let moved = machine
            .domain_at_work()
            .migrate_to_uri3(Some(request.destination), parameters, flags);
        moved.map_err(|error| machine.refused("migrate", &error))
    }

    fn receive(&self, _configuration: &str, _memory_socket: &Path) -> Result<()> {
        Err(Error::Refused {
            action: "receive",
            machine: self.title.clone(),
            reason: "libvirt receives it from the libvirt of the other host".to_owned(),
        })
    }

    fn is_process_of(&self, machine: &str, process: &ProcessInfo) -> bool {
        process.arguments.iter().any(|word| word == machine)
    }

    fn interrupted(&self, _machine: &str) -> Result<Option<InterruptedMigration>> {
        Ok(None)
    }

    fn take_back(&self, machine: &str) -> Result<()> {
        self.unpause(machine)
    }

    fn limit_downtime(&self, machine: &str, longest: Duration) -> Result<()> {
        let machine = self.find(machine)?;
        let milliseconds = u64::try_from(longest.as_millis()).unwrap_or(u64::MAX).max(1);
        let limited = machine.domain().migrate_set_max_downtime(milliseconds, 0);
        limited.map_err(|error| machine.refused("limit the downtime of", &error))
    }

    fn autostart(&self, machine: &str) -> Result<bool> {
        let machine = self.find(machine)?;
        let found = machine.domain().autostart();
        found.map_err(|error| machine.refused("describe", &error))
    }

    fn set_autostart(&self, machine: &str, starts: Autostart) -> Result<()> {
        let machine = self.find(machine)?;
        let set = machine.domain().set_autostart(starts == Autostart::On);
        set.map_err(|error| machine.refused("change the start of", &error))
    }

    fn history(&self, machine: &str) -> Result<MachineHistory> {
        let machine = self.find(machine)?;
        history::read(&machine.domain()).map_err(|error| machine.refused("list the snapshots of", &error))
    }

    fn replace_history(&self, machine: &str, history: &MachineHistory) -> Result<()> {
        let machine = self.find(machine)?;
        let replaced = history::replace(&machine.domain(), history);
        replaced.map_err(|error| machine.refused("store the snapshots of", &error))
    }

    fn processor_fit(&self, configuration: &str) -> ProcessorFit {
        match self.connection().compare_cpu(configuration, 0) {
            Ok(sys::VIR_CPU_COMPARE_IDENTICAL | sys::VIR_CPU_COMPARE_SUPERSET) => ProcessorFit::Fits,
            Ok(sys::VIR_CPU_COMPARE_INCOMPATIBLE) => ProcessorFit::Lacks,
            Err(error) if is_code(&error, ErrorNumber::CpuIncompatible) => ProcessorFit::Lacks,
            _ => ProcessorFit::Unknown,
        }
    }

    fn socket(&self) -> Option<PathBuf> {
        let uri = self.connection().uri().ok()?;
        if let Some((_, query)) = uri.split_once('?') {
            let named = query.split('&').find_map(|part| part.strip_prefix("socket="));
            if let Some(path) = named {
                return Some(path.into());
            }
        }
        let usual = SOCKETS.iter().map(PathBuf::from).find(|path| path.exists());
        usual.filter(|_| uri.starts_with("qemu:///system"))
    }
}
