//! Finds machines: those that VirtualBox lists for its user, and those given by their settings.

use std::path::{Path, PathBuf};

use holdfast_hardware::virtualbox::{Medium, Registry, registry};
use holdfast_host::virtualbox::VBoxManage;

use super::machine::VirtualBox;
use super::machine::{VirtualBoxMachine, read_text, said_by};
use super::of;
use crate::job::error::VirtualBoxError;
use crate::job::{Error, Result};

/// The file with VirtualBox's list of machines.
const REGISTRY: &str = "VirtualBox.xml";
/// The folder of a user without a configured one.
const HOME_UNKNOWN: &str = "/nonexistent";
/// The ending of settings.
const EXTENSION: &str = "vbox";

/// A listed machine that cannot be read.
#[derive(Debug)]
pub struct InaccessibleMachine {
    /// Its UUID.
    pub uuid: String,
    /// Where its settings should be.
    pub settings: PathBuf,
    /// Why it cannot be read.
    pub error: Error,
}

impl VirtualBox {
    /// `home` is the folder of the user's VirtualBox configuration, and `manager` is VirtualBox's command-line program,
    /// if installed.
    pub fn new(home: Option<PathBuf>, manager: Option<VBoxManage>) -> Self {
        Self { home, manager }
    }

    /// VirtualBox's command-line program.
    pub fn manager(&self) -> Option<&VBoxManage> {
        self.manager.as_ref()
    }

    /// The file with the list of the user's machines.
    pub fn registry_file(&self) -> PathBuf {
        self.home.as_deref().unwrap_or(Path::new(HOME_UNKNOWN)).join(REGISTRY)
    }

    /// The user's machines by name, and those that cannot be read.
    ///
    /// # Errors
    /// The user has never used VirtualBox.
    pub fn machines(&self) -> Result<(Vec<VirtualBoxMachine<'_>>, Vec<InaccessibleMachine>)> {
        let path = self.registry_file();
        if !path.exists() {
            return Err(of(VirtualBoxError::NoRegistry { registry: path }));
        }
        let (mut machines, mut inaccessible) = (Vec::new(), Vec::new());
        for entry in self.registry()?.machines {
            let settings = path.with_file_name("").join(&entry.settings);
            match VirtualBoxMachine::open(self, &settings) {
                Ok(machine) => machines.push(machine),
                Err(error) => inaccessible.push(InaccessibleMachine {
                    uuid: entry.uuid,
                    settings,
                    error,
                }),
            }
        }
        machines.sort_by(|left, right| left.name().cmp(right.name()));
        Ok((machines, inaccessible))
    }

    /// Finds a machine by the path of its settings, its UUID, or its name.
    ///
    /// # Errors
    /// None or several match, or the settings cannot be read.
    pub fn find(&self, word: &str) -> Result<VirtualBoxMachine<'_>> {
        let path = Path::new(word);
        if path.extension().is_some_and(|extension| extension == EXTENSION) && (word.contains('/') || path.is_file()) {
            return VirtualBoxMachine::open(self, path);
        }
        let (machines, inaccessible) = self.machines()?;
        let uuid = word.trim_start_matches('{').trim_end_matches('}').to_ascii_lowercase();
        if let Some(machine) = inaccessible.into_iter().find(|machine| machine.uuid == uuid) {
            return Err(machine.error);
        }
        // A UUID takes precedence over a machine whose name is that UUID.
        let is_uuid = machines.iter().any(|machine| machine.uuid() == uuid);
        let is_meant = |machine: &VirtualBoxMachine<'_>| {
            if is_uuid {
                machine.uuid() == uuid
            } else {
                machine.name() == word
            }
        };
        let mut meant: Vec<VirtualBoxMachine<'_>> = machines.into_iter().filter(is_meant).collect();
        match meant.len() {
            0 => Err(Error::from(holdfast_host::Error::NoSuchMachine {
                hypervisor: format!("VirtualBox ({})", self.registry_file().display()),
                name: word.to_owned(),
            })),
            1 => Ok(meant.remove(0)),
            _ => Err(of(VirtualBoxError::Ambiguous {
                name: word.to_owned(),
                uuids: meant.iter().map(VirtualBoxMachine::said).collect(),
            })),
        }
    }

    /// The user's registry; empty if the file does not exist.
    fn registry(&self) -> Result<Registry> {
        let path = self.registry_file();
        if !path.exists() {
            return Ok(Registry::default());
        }
        registry(&read_text(&path)?).map_err(said_by(&path))
    }

    /// Images that machines of old versions share, with absolute paths.
    pub(super) fn common_media(&self) -> Result<Vec<Medium>> {
        let mut media = self.registry()?.media;
        for medium in &mut media {
            let path = self.registry_file().with_file_name("").join(&medium.location);
            medium.location = path.display().to_string();
        }
        Ok(media)
    }
}
