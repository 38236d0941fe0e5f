//! A hypervisor that stores configurations, and fails as its fault says.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::Duration;

use holdfast_host::domain_xml::DomainXml;
use holdfast_host::qmp::Monitor;
use holdfast_host::{
    Description, DiskSource, Error as HostError, Hypervisor, HypervisorMut, KeptStates, Machine, MachineDisk,
    MachineState, MachineSummary, Result as HostResult, Resumption, Rights, TpmFile, TpmPlace, TpmStore,
};

/// A failure of the hypervisor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    Nothing,
    /// The definition is refused.
    Refuses,
    /// The machine is defined, and the answer is lost.
    AnswerLost,
    /// The machine is defined, the answer is lost, and so is the connection.
    ConnectionLost,
    /// The machine does not start.
    NoStart,
}

/// A hypervisor that stores configurations.
pub(super) struct Fake {
    pub(super) fault: Fault,
    /// Configurations by UUID.
    pub(super) machines: Mutex<BTreeMap<String, String>>,
    pub(super) is_gone: Mutex<bool>,
}

struct FakeMachine {
    summary: MachineSummary,
    text: String,
}

impl Fake {
    pub(super) fn new(fault: Fault) -> Self {
        Self {
            fault,
            machines: Mutex::default(),
            is_gone: Mutex::new(false),
        }
    }

    pub(super) fn names(&self) -> Vec<String> {
        let machines = self.machines.lock().unwrap();
        machines
            .values()
            .map(|text| DomainXml::parse(text).unwrap().name.unwrap())
            .collect()
    }

    fn lost() -> HostError {
        HostError::Unreachable {
            address: "fake".to_owned(),
            source: "the connection is gone".into(),
        }
    }

    fn refused(action: &'static str) -> HostError {
        HostError::Refused {
            action,
            machine: "fake".to_owned(),
            reason: "injected fault".to_owned(),
        }
    }
}

fn summary(uuid: &str, text: &str) -> MachineSummary {
    MachineSummary {
        name: DomainXml::parse(text).unwrap().name.unwrap(),
        uuid: uuid.to_owned(),
        state: MachineState::ShutOff,
    }
}

impl Hypervisor for Fake {
    fn title(&self) -> &'static str {
        "fake"
    }

    fn machines(&self) -> HostResult<Vec<MachineSummary>> {
        let machines = self.machines.lock().unwrap();
        Ok(machines.iter().map(|(uuid, text)| summary(uuid, text)).collect())
    }

    fn machine(&self, name: &str) -> HostResult<Box<dyn Machine>> {
        if *self.is_gone.lock().unwrap() {
            return Err(Self::lost());
        }
        let machines = self.machines.lock().unwrap();
        let mut found = machines.iter().map(|(uuid, text)| FakeMachine {
            summary: summary(uuid, text),
            text: text.clone(),
        });
        match found.find(|machine| machine.summary.name == name || machine.summary.uuid == name) {
            Some(machine) => Ok(Box::new(machine)),
            None => Err(HostError::NoSuchMachine {
                hypervisor: "fake".to_owned(),
                name: name.to_owned(),
            }),
        }
    }
}

impl HypervisorMut for Fake {
    fn is_of_this_host(&self) -> bool {
        true
    }

    fn check(&self, _configuration: &str) -> HostResult<Option<String>> {
        Ok(None)
    }

    fn kept_states(&self, _machine: &str) -> HostResult<KeptStates> {
        Ok(KeptStates::default())
    }

    /// A folder named by the UUID, as libvirt has it, beside the first disk.
    fn tpm_place(&self, configuration: &str) -> Option<TpmPlace> {
        let xml = DomainXml::parse(configuration).unwrap();
        let Some((store, path)) = xml.tpm?.source else {
            let DiskSource::File(disk) = &xml.disks[0].source else {
                unreachable!("its disks are files");
            };
            let folder = disk.parent().unwrap().join("swtpm").join(xml.uuid.unwrap());
            return Some(TpmPlace::At(TpmFile {
                path: folder.join("tpm2/tpm2-00.permall"),
                store: TpmStore::Folder,
                rights: Rights::Own,
            }));
        };
        let path = match store {
            TpmStore::Folder => path.join("tpm2-00.permall"),
            TpmStore::Single => path,
        };
        Some(TpmPlace::At(TpmFile {
            path,
            store,
            rights: Rights::Own,
        }))
    }

    fn define(&self, configuration: &str) -> HostResult<()> {
        if self.fault == Fault::Refuses {
            return Err(Self::refused("define"));
        }
        let uuid = DomainXml::parse(configuration).unwrap().uuid.unwrap();
        self.machines.lock().unwrap().insert(uuid, configuration.to_owned());
        match self.fault {
            Fault::AnswerLost => Err(Self::lost()),
            Fault::ConnectionLost => {
                *self.is_gone.lock().unwrap() = true;
                Err(Self::lost())
            }
            _ => Ok(()),
        }
    }

    fn power_off(&self, _machine: &str) -> HostResult<()> {
        Err(Self::refused("switch off"))
    }

    fn undefine(&self, machine: &str) -> HostResult<()> {
        self.machines.lock().unwrap().remove(machine).unwrap();
        Ok(())
    }

    fn start(&self, _machine: &str) -> HostResult<()> {
        match self.fault {
            Fault::NoStart => Err(Self::refused("start")),
            _ => Ok(()),
        }
    }

    fn resume(&self, _resumption: &Resumption<'_>) -> HostResult<()> {
        unreachable!("its snapshots have no memory")
    }
}

impl Machine for FakeMachine {
    fn name(&self) -> &str {
        &self.summary.name
    }

    fn describe(&self) -> HostResult<Description> {
        let xml = DomainXml::parse(&self.text).unwrap();
        Ok(Description {
            summary: self.summary.clone(),
            disks: xml.disks,
            nvram: None,
            tpm: None,
            has_agent_channel: false,
            mark: xml.mark,
        })
    }

    fn size_of(&self, _disk: &MachineDisk) -> Option<u64> {
        None
    }

    fn configuration(&self) -> HostResult<Vec<(String, Vec<u8>)>> {
        Ok(vec![("domain.xml".to_owned(), self.text.clone().into_bytes())])
    }

    fn monitor(&self) -> &dyn Monitor {
        unreachable!("a machine that is shut off has none")
    }

    fn ask_agent(&self, _command: &str, _deadline: Duration) -> HostResult<String> {
        Err(Fake::refused("ask"))
    }
}
