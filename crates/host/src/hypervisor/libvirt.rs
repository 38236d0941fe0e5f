//! Machines under libvirt, through its own bindings.

mod change;
mod checkpoints;
mod copies;
mod files;
mod history;
mod library;
mod migration;
mod monitor;
mod overlays;
mod peer;
mod resources;
mod resume;
mod tpm;

use std::ops::Deref;
use std::path::Path;
use std::sync::{PoisonError, RwLock};
use std::time::Duration;

use virt::connect::Connect;
use virt::domain::{
    Domain, DomainShutoffReason, DomainShutoffReasonEnum, DomainState, DomainStateReason, DomainStateReasonEnum,
};
use virt::enumutil::Enum;
use virt::error::{Error as VirtError, ErrorNumber};
use virt::sys;

use crate::hypervisor::domain_xml::DomainXml;
use crate::hypervisor::error::{Error, Result};
use crate::hypervisor::exit_report::{MachineEnd, last_log_lines};
use crate::hypervisor::machine::{Description, MachineDisk, MachineState, MachineSummary};
use crate::hypervisor::traits::{Hypervisor, Machine};
use crate::qemu::qmp::Monitor;
use crate::system::rights::Rights;
use crate::system::waits::Wait;
use tpm::{Activity, TpmFolders, TpmOwner};

/// The name of libvirt in errors and notes about waits.
const LIBVIRT: &str = "libvirt";

/// A connection or a domain during a call. libvirt's library waits for the daemon without a timeout, and signals do
/// not interrupt it, so the wait is registered.
struct CallGuard<T> {
    handle: T,
    _wait: Wait,
}

impl<T> CallGuard<T> {
    fn new(handle: T) -> Self {
        Self {
            handle,
            _wait: Wait::for_answer(LIBVIRT),
        }
    }

    fn for_work(handle: T) -> Self {
        Self {
            handle,
            _wait: Wait::for_work(LIBVIRT),
        }
    }
}

impl<T> Deref for CallGuard<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.handle
    }
}

/// A connection to libvirt.
pub struct Libvirt {
    connection: RwLock<Connect>,
    uri: String,
    title: String,
    states: TpmFolders,
    rights: Rights,
}

impl Libvirt {
    /// Connects to `uri`: "qemu:///system", "qemu:///session", "qemu+ssh://host/system"...
    pub fn connect(uri: &str) -> Result<Self> {
        // By default the library prints every error itself.
        virt::error::clear_error_callback();
        let (connection, rights) = peer::open(uri)?;
        // The configured URI may be an alias.
        let whole_uri = connection.uri().unwrap_or_default();
        Ok(Self {
            connection: RwLock::new(connection),
            uri: uri.to_owned(),
            title: format!("libvirt at {uri}"),
            states: TpmFolders::of(&whole_uri, None),
            rights,
        })
    }

    /// Sets the configuration folder of this user. A session daemon stores the TPM states of its machines there, and
    /// does not report the path.
    #[must_use]
    pub fn with_configurations(self, folder: &Path) -> Self {
        let uri = self.connection().uri().unwrap_or_default();
        Self {
            states: TpmFolders::of(&uri, Some(folder)),
            ..self
        }
    }

    fn connection(&self) -> CallGuard<Connect> {
        CallGuard::new(self.connection.read().unwrap_or_else(PoisonError::into_inner).clone())
    }

    /// The connection, for calls that may take long.
    fn connection_at_work(&self) -> CallGuard<Connect> {
        CallGuard::for_work(self.connection.read().unwrap_or_else(PoisonError::into_inner).clone())
    }

    /// The version of the connected libvirt: major, minor, release.
    pub fn version(&self) -> Option<[u32; 3]> {
        let number = self.connection().lib_version().ok()?;
        Some([number / 1_000_000, number / 1000 % 1000, number % 1000])
    }

    fn lost(&self, source: VirtError) -> Error {
        Error::Unreachable {
            address: self.title.clone(),
            source: Box::new(source),
        }
    }
}

impl Hypervisor for Libvirt {
    fn title(&self) -> &str {
        &self.title
    }

    fn rights(&self) -> Rights {
        self.rights.clone()
    }

    fn machines(&self) -> Result<Vec<MachineSummary>> {
        let domains = self
            .connection()
            .list_all_domains(0)
            .map_err(|error| self.lost(error))?;
        let mut machines = Vec::new();
        for domain in &domains {
            match summary(domain) {
                Ok(machine) => machines.push(machine),
                // A transient machine may disappear between the two calls.
                Err(error) if is_code(&error, ErrorNumber::NoDomain) => {}
                Err(error) => return Err(self.lost(error)),
            }
        }
        machines.sort_by(|left, right| left.name.cmp(&right.name));
        Ok(machines)
    }

    fn machine(&self, name: &str) -> Result<Box<dyn Machine>> {
        Ok(Box::new(self.find(name)?))
    }
}

impl Libvirt {
    /// Finds a machine by name or UUID.
    fn find(&self, name: &str) -> Result<LibvirtMachine> {
        let mut found = lookup(&self.connection(), name);
        if found
            .as_ref()
            .is_err_and(|error| !is_code(error, ErrorNumber::NoDomain))
        {
            // The daemon may have been restarted since the last call.
            let connection = peer::open_again(&self.uri, &self.rights)?;
            let _wait = Wait::for_answer(LIBVIRT);
            found = lookup(&connection, name);
            *self.connection.write().unwrap_or_else(PoisonError::into_inner) = connection;
        }
        let domain = found.map_err(|error| {
            if is_code(&error, ErrorNumber::NoDomain) {
                Error::NoSuchMachine {
                    hypervisor: self.title.clone(),
                    name: name.to_owned(),
                }
            } else {
                self.lost(error)
            }
        })?;
        let name = domain.name().map_err(|error| self.lost(error))?;
        Ok(LibvirtMachine {
            domain: RwLock::new(domain),
            name,
            uri: self.uri.clone(),
            states: self.states.clone(),
            rights: self.rights.clone(),
        })
    }
}

fn lookup(connection: &Connect, name: &str) -> std::result::Result<Domain, VirtError> {
    connection
        .lookup_domain_by_name(name)
        .or_else(|error| connection.lookup_domain_by_uuid_string(name).map_err(|_| error))
}

/// A machine of libvirt.
pub(crate) struct LibvirtMachine {
    domain: RwLock<Domain>,
    name: String,
    uri: String,
    states: TpmFolders,
    rights: Rights,
}

impl LibvirtMachine {
    fn domain(&self) -> CallGuard<Domain> {
        CallGuard::new(self.domain.read().unwrap_or_else(PoisonError::into_inner).clone())
    }

    /// The domain, for calls that may take long.
    fn domain_at_work(&self) -> CallGuard<Domain> {
        CallGuard::for_work(self.domain.read().unwrap_or_else(PoisonError::into_inner).clone())
    }

    /// Finds the machine again through a new connection, after the old one was lost.
    fn reconnect(&self) -> std::result::Result<(), Box<dyn std::error::Error + Send + Sync>> {
        let domain = self.domain();
        match domain.is_active() {
            Err(error) if !is_code(&error, ErrorNumber::NoDomain) => {}
            other => return Ok(other.map(drop)?),
        }
        // The library returns the UUID without a call to the daemon.
        let uuid = domain.uuid_string()?;
        let connection = peer::open_again(&self.uri, &self.rights)?;
        let _wait = Wait::for_answer(LIBVIRT);
        let found = connection.lookup_domain_by_uuid_string(&uuid)?;
        *self.domain.write().unwrap_or_else(PoisonError::into_inner) = found;
        Ok(())
    }

    fn refused(&self, action: &'static str, error: &VirtError) -> Error {
        let machine = self.name.clone();
        if is_code(error, ErrorNumber::OperationTimeout) {
            return Error::Busy {
                machine,
                holder: error.message().to_owned(),
            };
        }
        Error::Refused {
            action,
            machine,
            reason: error.message().to_owned(),
        }
    }

    fn xml(&self, flags: sys::virDomainXMLFlags) -> Result<String> {
        let text = self.domain().xml_desc(sys::VIR_DOMAIN_XML_SECURE | flags);
        text.map_err(|error| self.refused("describe", &error))
    }
}

impl Machine for LibvirtMachine {
    fn name(&self) -> &str {
        &self.name
    }

    fn rights(&self) -> Rights {
        self.rights.clone()
    }

    fn describe(&self) -> Result<Description> {
        let summary = summary(&self.domain()).map_err(|error| {
            if is_code(&error, ErrorNumber::NoDomain) {
                return Error::NoSuchMachine {
                    hypervisor: format!("libvirt at {}", self.uri),
                    name: self.name.clone(),
                };
            }
            self.refused("describe", &error)
        })?;
        let text = self.xml(0)?;
        let domain = DomainXml::parse(&text).map_err(|detail| Error::Configuration {
            machine: self.name.clone(),
            detail,
        })?;
        let activity = match summary.state {
            MachineState::ShutOff => Activity::Off,
            MachineState::Running | MachineState::Paused | MachineState::Between => Activity::On,
        };
        let tpm = domain.tpm.as_ref();
        let owner = TpmOwner {
            uuid: &summary.uuid,
            activity,
            libvirt: &self.rights,
        };
        let tpm = tpm.map(|tpm| self.states.tpm(tpm, &owner));
        let variables = || self.states.variables(&summary.name);
        let variables = domain.has_variables.then(variables).flatten();
        Ok(Description {
            tpm,
            summary,
            disks: domain.disks,
            nvram: domain.nvram.map(Into::into).or(variables),
            has_agent_channel: domain.has_agent_channel,
            mark: domain.mark,
        })
    }

    fn size_of(&self, disk: &MachineDisk) -> Option<u64> {
        let size_bytes = self.domain().block_info(&disk.target, 0).ok()?.capacity;
        (size_bytes > 0).then_some(size_bytes)
    }

    fn ended(&self) -> Option<MachineEnd> {
        let words = || self.states.log(&self.name).and_then(|log| last_log_lines(&log));
        let crashed = || {
            Some(MachineEnd::Crashed {
                last_log_lines: words(),
            })
        };
        match self.domain().state() {
            Ok((Enum::Known(DomainState::Crashed), _)) => crashed(),
            Ok((Enum::Known(DomainState::Shutoff), reason)) if is_crash(&reason) => crashed(),
            Ok((Enum::Known(DomainState::Shutoff), _)) => Some(MachineEnd::SwitchedOff),
            Err(error) if is_code(&error, ErrorNumber::NoDomain) => Some(MachineEnd::Gone),
            _ => None,
        }
    }

    fn configuration(&self) -> Result<Vec<(String, Vec<u8>)>> {
        let kept = self.xml(sys::VIR_DOMAIN_XML_INACTIVE)?;
        let mut files = vec![("domain.xml".to_owned(), kept.into_bytes())];
        if self
            .domain()
            .is_active()
            .map_err(|error| self.refused("describe", &error))?
        {
            files.push(("domain-live.xml".to_owned(), self.xml(0)?.into_bytes()));
            // The configuration as a migration target gets it: the saved memory is compatible only with this one.
            let migratable = self.xml(sys::VIR_DOMAIN_XML_MIGRATABLE)?;
            files.push(("domain-migratable.xml".to_owned(), migratable.into_bytes()));
        }
        Ok(files)
    }

    fn monitor(&self) -> &dyn Monitor {
        self
    }

    fn ask_agent(&self, command: &str, deadline: Duration) -> Result<String> {
        // libvirt counts whole seconds, and 0 means no wait.
        let seconds = i32::try_from(deadline.as_secs().max(1)).unwrap_or(i32::MAX);
        let answer = self.domain_at_work().qemu_agent_command(command, seconds, 0);
        answer.map_err(|error| self.refused("ask the guest agent of", &error))
    }
}

fn summary(domain: &Domain) -> std::result::Result<MachineSummary, VirtError> {
    let (state, _) = domain.state()?;
    Ok(MachineSummary {
        name: domain.name()?,
        uuid: domain.uuid_string()?,
        state: match state {
            Enum::Known(DomainState::Running | DomainState::Blocked) => MachineState::Running,
            Enum::Known(DomainState::Paused) => MachineState::Paused,
            Enum::Known(DomainState::Shutoff) => MachineState::ShutOff,
            _ => MachineState::Between,
        },
    })
}

/// Whether libvirt reports that QEMU crashed.
fn is_crash(reason: &DomainStateReasonEnum) -> bool {
    let known = |reason: &DomainShutoffReasonEnum| {
        matches!(
            reason,
            Enum::Known(DomainShutoffReason::Crashed | DomainShutoffReason::Failed)
        )
    };
    matches!(reason, Enum::Known(DomainStateReason::Shutoff(reason)) if known(reason))
}

fn is_code(error: &VirtError, code: ErrorNumber) -> bool {
    matches!(error.code(), Enum::Known(found) if found == code)
}
