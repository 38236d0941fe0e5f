//! Which machines the words of a command line mean, and the way to them.

use std::cell::OnceCell;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use holdfast_engine::SourceName;
use holdfast_host::{BareQemu, Hypervisor as _, Libvirt, Machine};

use crate::context::Context;
use crate::environment;
use crate::errors::Error;

/// Where libvirt is, where nobody says.
const LIBVIRT_DEFAULT: &str = "qemu:///system";
/// What stands before the path of a QEMU's own monitor.
const QMP: &str = "qmp:";
const LIBVIRT: &str = "libvirt:";

/// A word that means machines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MachineWord {
    /// A machine of libvirt: `web1`, `libvirt:web1`.
    Libvirt(String),
    /// The QEMU behind a monitor socket: `qmp:/run/web1.qmp`.
    Qmp(PathBuf),
}

impl MachineWord {
    /// What a word on the command line means; none where it means an image.
    ///
    /// Without a scheme before it, a word with a `/`, `-`, NAME=IMAGE, one that a file is called by, and one that ends like the
    /// name of an image, are images.
    pub fn parse(word: &OsStr) -> Option<Self> {
        if let Some(path) = word.as_bytes().strip_prefix(QMP.as_bytes()) {
            return Some(Self::Qmp(OsStr::from_bytes(path).into()));
        }
        let text = word.to_str()?;
        if let Some(name) = text.strip_prefix(LIBVIRT) {
            return Some(Self::Libvirt(name.to_owned()));
        }
        let is_called_like_one = SourceName::is_called_like_an_image(word);
        let is_image = text == "-" || text.contains(['/', '=']) || is_called_like_one || Path::new(text).exists();
        (!is_image).then(|| Self::Libvirt(text.to_owned()))
    }
}

/// A machine that was chosen, and may not be there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chosen {
    /// What it is called where it is spoken of.
    pub said: String,
    place: Place,
}

/// Where a machine is.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Place {
    /// At libvirt, under this name.
    Libvirt(String),
    /// Behind this monitor socket.
    Qmp(PathBuf),
}

/// A machine that is there.
pub struct Found {
    /// The machine.
    pub machine: Box<dyn Machine>,
    /// The words by which another process finds it: `--connect`, its address...
    pub way: Vec<OsString>,
}

/// The hypervisors of a command; a connection is made when it is needed first.
pub struct Hypervisors<'a> {
    context: &'a Context,
    uri: String,
    libvirt: OnceCell<Libvirt>,
}

impl<'a> Hypervisors<'a> {
    /// Those that are reached from here; `connect` is where a person says that libvirt is.
    pub fn new(connect: Option<&str>, context: &'a Context) -> Self {
        let uri = match (connect, context.variable(environment::LIBVIRT_URI)) {
            (Some(uri), _) => uri.to_owned(),
            (None, Some(uri)) => uri.to_string_lossy().into_owned(),
            (None, None) => LIBVIRT_DEFAULT.to_owned(),
        };
        Self {
            context,
            uri,
            libvirt: OnceCell::new(),
        }
    }

    fn libvirt(&self) -> Result<&Libvirt, Error> {
        if let Some(libvirt) = self.libvirt.get() {
            return Ok(libvirt);
        }
        let libvirt = Libvirt::connect(&self.uri).map_err(holdfast_engine::Error::from)?;
        Ok(self.libvirt.get_or_init(|| libvirt))
    }

    /// The machines that words mean, in their order.
    pub fn choose(&self, words: &[MachineWord]) -> Result<Vec<Chosen>, Error> {
        let mut chosen = Vec::new();
        for word in words {
            chosen.push(match word {
                MachineWord::Libvirt(name) => Chosen {
                    said: name.clone(),
                    place: Place::Libvirt(name.clone()),
                },
                MachineWord::Qmp(path) => Chosen {
                    said: format!("{QMP}{}", path.display()),
                    place: Place::Qmp(path.clone()),
                },
            });
        }
        if chosen.iter().any(|chosen| matches!(chosen.place, Place::Libvirt(_))) {
            self.libvirt()?;
        }
        Ok(chosen)
    }

    /// The machine that was chosen.
    pub fn find(&self, chosen: &Chosen) -> Result<Found, Error> {
        let found = match &chosen.place {
            Place::Libvirt(name) => self.libvirt()?.machine(name).map(|machine| Found {
                way: way(self.uri.as_ref(), machine.name()),
                machine,
            }),
            Place::Qmp(path) => BareQemu::connect(path, Arc::clone(self.context.clock())).map(|qemu| {
                let machine = qemu.only_machine();
                let mut address = OsString::from(QMP);
                address.push(std::path::absolute(path).unwrap_or_else(|_| path.clone()));
                let mut way = way(&address, machine.name());
                way.extend(
                    qemu.agent_socket()
                        .into_iter()
                        .flat_map(|path| ["--agent".into(), path.into()]),
                );
                Found { machine, way }
            }),
        };
        Ok(found.map_err(holdfast_engine::Error::from)?)
    }
}

fn way(address: &OsStr, machine: &str) -> Vec<OsString> {
    [
        "--connect".into(),
        address.to_owned(),
        "--machine".into(),
        machine.into(),
    ]
    .into()
}

/// The path in an address, where it is the one of a QEMU's own monitor.
pub fn monitor_path(address: &OsStr) -> Option<&Path> {
    let path = address.as_bytes().strip_prefix(QMP.as_bytes())?;
    Some(Path::new(OsStr::from_bytes(path)))
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;

    use super::{MachineWord, monitor_path};

    #[test]
    fn words_mean_machines_or_images() {
        let word = |text: &str| MachineWord::parse(OsStr::new(text));
        let libvirt = |name: &str| Some(MachineWord::Libvirt(name.to_owned()));
        assert_eq!(word("web1"), libvirt("web1"));
        assert_eq!(word("libvirt:a/b=c.qcow2"), libvirt("a/b=c.qcow2"));
        assert_eq!(
            word("qmp:/run/web1.qmp"),
            Some(MachineWord::Qmp("/run/web1.qmp".into()))
        );
        for image in ["-", "./web1", "/dev/vg/web1", "web1.qcow2", "vda=web1"] {
            assert_eq!(word(image), None, "{image}");
        }
    }

    #[test]
    fn the_address_of_a_monitor_is_told_from_libvirts() {
        let path = |address: &str| monitor_path(OsStr::new(address)).map(std::path::Path::to_owned);
        assert_eq!(path("qmp:/run/web1.qmp"), Some("/run/web1.qmp".into()));
        assert_eq!(path("qemu:///system"), None);
    }
}
