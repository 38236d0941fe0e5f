//! The registry of a user's machines: `VirtualBox.xml`.

use super::media::{Medium, listed};
use crate::xml::{self, attribute, child, children};
use crate::{Error, Result, identity};

const FORM: &str = "configuration of VirtualBox";
/// Limit of machines of a user.
const MACHINE_COUNT_MAX: usize = 65_536;

/// A user's machines.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Registry {
    /// Machines, in the order of the file.
    pub machines: Vec<RegisteredMachine>,
    /// The folder for new machines, if configured.
    pub machine_folder: Option<String>,
    /// The shared list of images of machines with old settings; newer settings list the images themselves.
    pub media: Vec<Medium>,
}

/// A registered machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RegisteredMachine {
    /// The UUID, in lower case.
    pub uuid: String,
    /// The settings file: a path, absolute or relative to the folder of the registry.
    pub settings: String,
}

/// Reads `VirtualBox.xml`.
pub fn registry(text: &str) -> Result<Registry> {
    let malformed = |detail: String| Error::Malformed { form: FORM, detail };
    let document = xml::parse(text, FORM)?;
    let root = document.root_element();
    let Some(global) = child(root, "Global").filter(|_| root.tag_name().name() == "VirtualBox") else {
        return Err(malformed("it has nothing that holds for all machines".to_owned()));
    };
    let mut machines = Vec::new();
    let entries = child(global, "MachineRegistry");
    for entry in entries.iter().flat_map(|node| children(*node, "MachineEntry")) {
        if machines.len() == MACHINE_COUNT_MAX {
            return Err(malformed(format!("it has more than {MACHINE_COUNT_MAX} machines")));
        }
        let text = entry.attribute("uuid").unwrap_or_default();
        machines.push(RegisteredMachine {
            uuid: identity::uuid(text).ok_or_else(|| malformed(format!("{text:?} is no UUID of a machine")))?,
            settings: entry.attribute("src").unwrap_or_default().to_owned(),
        });
    }
    let folder = attribute(global, "SystemProperties", "defaultMachineFolder");
    Ok(Registry {
        machines,
        machine_folder: folder.filter(|folder| !folder.is_empty()).map(str::to_owned),
        media: listed(global)?,
    })
}
