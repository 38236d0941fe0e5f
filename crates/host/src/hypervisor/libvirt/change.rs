//! Defining, undefining, starting and stopping machines.

use std::path::PathBuf;

use virt::error::ErrorNumber;
use virt::sys;

use super::peer::is_local;
use super::tpm::{Activity, TpmOwner};
use super::{Libvirt, checkpoints, is_code};
use crate::hypervisor::domain_xml::{DomainXml, HostNeeds};
use crate::hypervisor::error::{Error, Result};
use crate::hypervisor::tpm::TpmPlace;
use crate::hypervisor::traits::{HypervisorMut, KeptStates, Resumption};
use crate::system::identity::Uuid;

/// libvirt's name for the format of QEMU's command line.
const COMMAND_LINE: &str = "qemu-argv";
/// Error codes of libvirt for a configuration that it can never accept, independent of the current state of the host.
const NEVER: [ErrorNumber; 4] = [
    ErrorNumber::ConfigUnsupported,
    ErrorNumber::XmlError,
    ErrorNumber::XmlDetail,
    ErrorNumber::InvalidArg,
];

impl HypervisorMut for Libvirt {
    fn is_of_this_host(&self) -> bool {
        self.connection().uri().is_ok_and(|uri| is_local(&uri))
    }

    /// libvirt has no call for such a check. The call that converts a configuration to QEMU's command line reads and
    /// checks the configuration as for a start, and opens no image.
    fn check(&self, configuration: &str) -> Result<Option<String>> {
        match self.connection().domain_xml_to_native(COMMAND_LINE, configuration, 0) {
            Ok(_) => Ok(self.missing_secret(configuration)),
            // A hypervisor of libvirt other than QEMU.
            Err(error) if is_code(&error, ErrorNumber::NoSupport) => Ok(None),
            Err(error) if NEVER.into_iter().any(|code| is_code(&error, code)) => Err(Error::Refused {
                action: "define",
                machine: name_in(configuration),
                reason: error.message().to_owned(),
            }),
            Err(error) => Ok(Some(error.message().to_owned())),
        }
    }

    fn missing_resources(&self, needs: &HostNeeds) -> Vec<String> {
        self.find_missing(needs)
    }

    fn image_folder(&self) -> Option<PathBuf> {
        self.default_folder()
    }

    fn kept_states(&self, machine: &str) -> Result<KeptStates> {
        let machine = self.find(machine)?;
        let refused = |error| machine.refused("list the snapshots of", &error);
        let counted = checkpoints::count(&machine.domain());
        Ok(KeptStates {
            snapshot_count: machine.domain().num_snapshots(0).map_err(refused)?,
            checkpoint_count: match counted {
                Err(error) if is_code(&error, ErrorNumber::NoSupport) => 0,
                other => other.map_err(refused)?,
            },
            has_saved_memory: machine.domain().has_managed_save(0).map_err(refused)?,
            is_transient: !machine.domain().is_persistent().map_err(refused)?,
        })
    }

    fn tpm_place(&self, configuration: &str) -> Option<TpmPlace> {
        let domain = DomainXml::parse(configuration).ok()?;
        let tpm = domain.tpm?;
        // The UUID becomes a part of a path.
        Some(match domain.uuid.as_deref().and_then(Uuid::parse) {
            Some(uuid) => {
                let owner = TpmOwner {
                    uuid: &uuid.to_string(),
                    activity: Activity::Off,
                    libvirt: &self.rights,
                };
                self.states.tpm(&tpm, &owner).place
            }
            None => TpmPlace::Unknown("the configuration has no UUID".to_owned()),
        })
    }

    fn define(&self, configuration: &str) -> Result<()> {
        let defined = self.connection().define_domain_xml(configuration);
        defined.map(drop).map_err(|error| Error::Refused {
            action: "define",
            machine: name_in(configuration),
            reason: error.message().to_owned(),
        })
    }

    fn undefine(&self, machine: &str) -> Result<()> {
        let machine = self.find(machine)?;
        let keep_all = sys::VIR_DOMAIN_UNDEFINE_KEEP_NVRAM | sys::VIR_DOMAIN_UNDEFINE_KEEP_TPM;
        let domain = machine.domain();
        let undefined = match domain.undefine_flags(keep_all) {
            // libvirt can keep TPM states only since 8.9.
            Err(error) if is_code(&error, ErrorNumber::InvalidArg) => {
                domain.undefine_flags(sys::VIR_DOMAIN_UNDEFINE_KEEP_NVRAM)
            }
            other => other,
        };
        undefined.map_err(|error| machine.refused("undefine", &error))
    }

    fn power_off(&self, machine: &str) -> Result<()> {
        let machine = self.find(machine)?;
        machine
            .domain_at_work()
            .destroy()
            .map_err(|error| machine.refused("switch off", &error))
    }

    fn start(&self, machine: &str) -> Result<()> {
        let machine = self.find(machine)?;
        machine
            .domain_at_work()
            .create()
            .map_err(|error| machine.refused("start", &error))
    }

    fn wants_memory_in_file(&self) -> bool {
        self.reads_memory_twice()
    }

    fn resume(&self, resumption: &Resumption<'_>) -> Result<()> {
        self.start_from_memory(resumption)
    }
}

impl Libvirt {
    /// A TPM with an encrypted state starts only if libvirt has its secret.
    fn missing_secret(&self, configuration: &str) -> Option<String> {
        let secret = DomainXml::parse(configuration).ok()?.tpm?.secret?;
        let found = self.connection().lookup_secret_by_uuid_string(&secret);
        let is_missing = found.is_err_and(|error| is_code(&error, ErrorNumber::NoSecret));
        is_missing.then(|| format!("libvirt has no secret {secret}, with which the state of its TPM is encrypted"))
    }
}

pub(super) fn name_in(configuration: &str) -> String {
    let parsed = DomainXml::parse(configuration);
    parsed.ok().and_then(|domain| domain.name).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use crate::hypervisor::libvirt::peer::is_local;

    #[test]
    fn an_address_says_whether_files_are_local() {
        for uri in ["qemu:///system", "qemu+unix:///session?socket=/a://b/c"] {
            assert!(is_local(uri), "{uri}");
        }
        for uri in ["qemu+ssh://root@host/system", "qemu+tls://host:1/system", "nonsense"] {
            assert!(!is_local(uri), "{uri}");
        }
    }
}
