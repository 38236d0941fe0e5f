//! The machines that the words of a command line select, and the connections to them.

pub mod datasets;
pub mod guests;
mod libvirt;
pub(crate) mod no_image;
pub mod pools;
pub mod runs;
pub mod states;
pub mod virtualbox;

use std::cell::OnceCell;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use holdfast_engine::SourceName;
use holdfast_host::xapi::XenAddress;
use holdfast_host::{BackupMark, BareQemu, Hypervisor as _, Libvirt, Machine};
use holdfast_image::CONTAINER_FILE;

use crate::context::Context;
use crate::errors::Error;
use crate::machines::pools::job_error;
use crate::process::environment;

pub use holdfast_policy::Glob;

pub use libvirt::{connect_libvirt, libvirt_address};

/// Prefix of the path of a QEMU monitor.
const QMP: &str = "qmp:";
const LIBVIRT: &str = "libvirt:";
const TAG: &str = "tag:";
/// Prefix of a VirtualBox machine.
const VBOX: &str = "vbox:";
/// Prefix of the folder of a container.
const CONTAINER: &str = "container:";

/// A word that selects machines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MachineWord {
    /// A machine of libvirt: `web1`, `libvirt:web1`; or all matching machines if it is a pattern and no machine has
    /// this name.
    Libvirt(String),
    /// The machines of libvirt with this tag in their metadata: `tag:db`.
    Tag(String),
    /// The QEMU process with a monitor socket: `qmp:/run/web1.qmp`.
    Qmp(PathBuf),
    /// A machine of VirtualBox by its name, its UUID or the path of its settings; all matching machines if it is a
    /// pattern; all machines if it is empty: see [`crate::machines::virtualbox`].
    VirtualBox(String),
    /// Machines of a pool of XenServer or XCP-ng: see [`crate::machines::pools`].
    Pool(XenAddress),
    /// The container in a folder: `container:/srv/web1`; without the prefix if it has a `container.json`.
    Container(PathBuf),
}

impl MachineWord {
    /// Parses words that can only mean machines.
    ///
    /// # Errors
    /// A word means an image.
    pub fn parse_all(words: &[OsString]) -> Result<Vec<Self>, Error> {
        let word = |word: &OsString| {
            if let Some(text) = word.to_str().filter(|text| XenAddress::has_scheme(text)) {
                text.parse::<XenAddress>().map_err(job_error)?;
            }
            Self::parse(word).ok_or_else(|| {
                Error::usage(
                    format!("{} means an image", word.display()),
                    "name machines; libvirt:NAME is one in any case",
                )
            })
        };
        words.iter().map(word).collect()
    }

    /// The meaning of a word on the command line; `None` if it means an image.
    ///
    /// Without a scheme, these words are images: a word with a `/`, `-`, NAME=IMAGE, the name of an existing file, and
    /// a name with the extension of an image format.
    pub fn parse(word: &OsStr) -> Option<Self> {
        if let Some(path) = word.as_bytes().strip_prefix(QMP.as_bytes()) {
            return Some(Self::Qmp(OsStr::from_bytes(path).into()));
        }
        if let Some(path) = word.as_bytes().strip_prefix(CONTAINER.as_bytes()) {
            return Some(Self::Container(OsStr::from_bytes(path).into()));
        }
        // A folder with a descriptor alone may be the disk of a machine: it is an image.
        if Path::new(word).join(CONTAINER_FILE).is_file() {
            return Some(Self::Container(word.into()));
        }
        let text = word.to_str()?;
        if let Some(name) = text.strip_prefix(LIBVIRT) {
            return Some(Self::Libvirt(name.to_owned()));
        }
        if let Some(tag) = text.strip_prefix(TAG) {
            return Some(Self::Tag(tag.to_owned()));
        }
        if let Some(name) = text.strip_prefix(VBOX) {
            return Some(Self::VirtualBox(name.to_owned()));
        }
        if XenAddress::has_scheme(text) {
            // An invalid address is reported later, when it is used.
            return text.parse().ok().map(Self::Pool);
        }
        let is_called_like_one = SourceName::is_called_like_an_image(word);
        let is_image = text == "-" || text.contains(['/', '=']) || is_called_like_one || Path::new(text).exists();
        (!is_image).then(|| Self::Libvirt(text.to_owned()))
    }

    /// Whether a word has a scheme that marks it as machines.
    pub fn is_explicit(word: &str) -> bool {
        XenAddress::has_scheme(word)
            || [QMP, LIBVIRT, TAG, VBOX, CONTAINER]
                .iter()
                .any(|scheme| word.starts_with(scheme))
    }

    /// Whether it may select several machines, which requires a query to the hypervisor.
    pub fn may_be_several(&self) -> bool {
        match self {
            Self::Libvirt(text) => Glob::is_one(text),
            Self::Tag(_) => true,
            Self::Qmp(_) | Self::Container(_) => false,
            Self::VirtualBox(text) => text.is_empty() || (Glob::is_one(text) && !text.contains('/')),
            Self::Pool(address) => address
                .item
                .as_ref()
                .is_none_or(|item| Glob::is_one(item) || item.starts_with(TAG)),
        }
    }

    /// Splits words into those about VirtualBox, about pools, about containers, and the others.
    pub fn by_hypervisor(words: Vec<Self>) -> WordsByHypervisor {
        let mut words_by = WordsByHypervisor::default();
        for word in words {
            match word {
                Self::VirtualBox(text) => words_by.of_virtualbox.push(text),
                Self::Pool(address) => words_by.of_pools.push(address),
                Self::Container(folder) => words_by.containers.push(folder),
                other => words_by.others.push(other),
            }
        }
        words_by
    }
}

/// Words by hypervisor.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct WordsByHypervisor {
    /// Machines of VirtualBox.
    pub of_virtualbox: Vec<String>,
    /// Machines of pools of XenServer and XCP-ng.
    pub of_pools: Vec<XenAddress>,
    /// The folders of containers.
    pub containers: Vec<PathBuf>,
    /// Machines of libvirt and of QEMU processes.
    pub others: Vec<MachineWord>,
}

/// The requested machines.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct MachineSelection {
    /// The words that select machines.
    pub words: Vec<MachineWord>,
    /// Whether all machines of libvirt are requested.
    pub everything: Everything,
    /// Machines to exclude from patterns, tags and "all".
    pub excluded: Vec<Glob>,
}

/// Whether all machines are requested.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Everything {
    /// All of libvirt.
    Wanted,
    /// Only those that words select.
    #[default]
    NotWanted,
}

/// Selected machines.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Choice {
    /// Machines to use, in this order.
    pub chosen: Vec<Chosen>,
    /// Matching machines that are excluded: the name and the reason.
    pub left_out: Vec<(String, &'static str)>,
}

/// A selected machine, which may not exist.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chosen {
    /// Its name in messages.
    pub said: String,
    place: Place,
}

/// The location of a machine.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Place {
    /// In libvirt, under this name.
    Libvirt(String),
    /// With this monitor socket.
    Qmp(PathBuf),
}

/// An existing machine.
pub struct Found {
    /// The machine.
    pub machine: Box<dyn Machine>,
    /// Its hypervisor: "libvirt" or "qemu".
    pub hypervisor: &'static str,
    /// The hypervisor's address: "qemu:///system", "qmp:/run/web1.qmp".
    pub address: OsString,
    /// The arguments with which another process finds it: `--connect`, its address...
    pub way: Vec<OsString>,
}

/// The hypervisors of a command; each connection is opened when it is first needed.
pub struct Hypervisors<'a> {
    context: &'a Context,
    uri: String,
    /// Whether the user has given the address.
    is_given: bool,
    libvirt: OnceCell<Libvirt>,
}

impl<'a> Hypervisors<'a> {
    /// The reachable hypervisors; `connect` is the user's address of libvirt.
    pub fn new(connect: Option<&str>, context: &'a Context) -> Self {
        let uri = libvirt_address(connect, context);
        Self {
            context,
            uri,
            is_given: connect.is_some() || context.variable(environment::LIBVIRT_URI).is_some(),
            libvirt: OnceCell::new(),
        }
    }

    /// The address of libvirt.
    pub fn uri(&self) -> &str {
        &self.uri
    }

    /// Whether libvirt is on another host, which may ask for a password.
    pub fn is_remote(&self) -> bool {
        self.uri.split_once(':').is_some_and(|(scheme, _)| scheme.contains('+'))
    }

    /// Whether no libvirt is expected on this host: no address is given, no daemon listens, and no machine is defined.
    pub fn is_without_libvirt(&self) -> bool {
        !self.is_given && libvirt::is_absent()
    }

    /// The connection to libvirt.
    pub fn libvirt(&self) -> Result<&Libvirt, Error> {
        if let Some(libvirt) = self.libvirt.get() {
            return Ok(libvirt);
        }
        let libvirt = connect_libvirt(&self.uri, self.context)?;
        Ok(self.libvirt.get_or_init(|| libvirt))
    }

    /// The machines of a selection, each once, in the order of its words.
    ///
    /// # Errors
    /// A pattern or a tag matches no machine; no machine is selected.
    pub fn choose(&self, wish: &MachineSelection) -> Result<Choice, Error> {
        refuse_others(&wish.words)?;
        let is_surveyed = wish.everything == Everything::Wanted || wish.words.iter().any(MachineWord::may_be_several);
        let machines = if is_surveyed { self.survey()? } else { Vec::new() };
        let choice = choose(wish, &machines, &self.uri)?;
        if choice
            .chosen
            .iter()
            .any(|chosen| matches!(chosen.place, Place::Libvirt(_)))
        {
            // An unreachable hypervisor is an error before the first machine.
            self.libvirt()?;
        }
        Ok(choice)
    }

    /// The machines that words select, sorted by name, including those excluded by their metadata; all of libvirt if
    /// there are no words.
    pub fn all_of(&self, words: Vec<MachineWord>) -> Result<Vec<Chosen>, Error> {
        let mut all = if words.is_empty() {
            let machines = self.libvirt()?.machines().map_err(holdfast_engine::Error::from)?;
            machines.iter().map(|machine| Chosen::libvirt(&machine.name)).collect()
        } else {
            let wish = MachineSelection {
                words,
                ..MachineSelection::default()
            };
            let Choice { mut chosen, left_out } = self.choose(&wish)?;
            chosen.extend(left_out.iter().map(|(name, _)| Chosen::libvirt(name)));
            chosen
        };
        all.sort_by(|left, right| left.said.cmp(&right.said));
        Ok(all)
    }

    /// All machines of libvirt, and the backup marks in their metadata.
    fn survey(&self) -> Result<Vec<(String, BackupMark)>, Error> {
        let libvirt = self.libvirt()?;
        let mut machines = Vec::new();
        for summary in libvirt.machines().map_err(holdfast_engine::Error::from)? {
            let description = libvirt.machine(&summary.name).and_then(|machine| machine.describe());
            match description {
                Ok(description) => machines.push((summary.name, description.mark)),
                // The machine ended meanwhile.
                Err(holdfast_host::Error::NoSuchMachine { .. }) => {}
                Err(error) => return Err(holdfast_engine::Error::from(error).into()),
            }
        }
        Ok(machines)
    }

    /// Finds a selected machine.
    pub fn find(&self, chosen: &Chosen) -> Result<Found, Error> {
        let found = match &chosen.place {
            Place::Libvirt(name) => self.libvirt()?.machine(name).map(|machine| Found {
                hypervisor: "libvirt",
                address: self.uri.clone().into(),
                way: way(self.uri.as_ref(), machine.name()),
                machine,
            }),
            Place::Qmp(path) => BareQemu::connect(path, Arc::clone(self.context.clock())).map(|qemu| {
                let machine = qemu.only_machine();
                let address = monitor_address(path);
                let mut way = way(&address, machine.name());
                way.extend(
                    qemu.agent_socket()
                        .into_iter()
                        .flat_map(|path| ["--agent".into(), path.into()]),
                );
                Found {
                    machine,
                    hypervisor: "qemu",
                    address,
                    way,
                }
            }),
        };
        Ok(found.map_err(holdfast_engine::Error::from)?)
    }
}

/// Returns an error for machines of VirtualBox and XenServer, since the operation needs a connection to QEMU.
fn refuse_others(words: &[MachineWord]) -> Result<(), Error> {
    let whose = words.iter().find_map(|word| match word {
        MachineWord::VirtualBox(_) => Some("VirtualBox"),
        MachineWord::Pool(_) => Some("XenServer"),
        MachineWord::Container(_) => Some("containers"),
        _ => None,
    });
    match whose {
        Some("containers") => Err(Error::usage(
            "this is not done with containers",
            "holdfast container lists what is done with them; holdfast backup backs them up",
        )),
        Some(whose) => Err(Error::usage(
            format!("this is not done with machines of {whose}"),
            "holdfast machines, backup and export are about them, too",
        )),
        None => Ok(()),
    }
}

/// The result of a selection, given the machines of the libvirt at `uri`.
fn choose(wish: &MachineSelection, machines: &[(String, BackupMark)], uri: &str) -> Result<Choice, Error> {
    let mut choice = Choice::default();
    if wish.everything == Everything::Wanted {
        choice.add_matching("--all", wish, machines, uri, |_, _| true)?;
    }
    for word in &wish.words {
        match word {
            MachineWord::Qmp(path) => choice.add(Chosen {
                said: format!("{QMP}{}", path.display()),
                place: Place::Qmp(path.clone()),
            }),
            MachineWord::Libvirt(text) if Glob::is_one(text) && machines.iter().all(|(name, _)| name != text) => {
                let glob = Glob::parse(text)
                    .map_err(|detail| Error::usage(detail, "'web*' matches all machines whose names begin with web"))?;
                choice.add_matching(text, wish, machines, uri, |name, _| glob.matches(name))?;
            }
            MachineWord::Libvirt(name) => choice.add(Chosen::libvirt(name)),
            MachineWord::VirtualBox(_) | MachineWord::Pool(_) | MachineWord::Container(_) => {}
            MachineWord::Tag(tag) => {
                let said = format!("{TAG}{tag}");
                choice.add_matching(&said, wish, machines, uri, |_, mark| mark.tags.contains(tag))?;
            }
        }
    }
    // One word may exclude a machine that another word selects.
    let chosen = &choice.chosen;
    choice
        .left_out
        .retain(|(name, _)| chosen.iter().all(|chosen| chosen.said != *name));
    Ok(choice)
}

impl Chosen {
    fn libvirt(name: &str) -> Self {
        Self {
            said: name.to_owned(),
            place: Place::Libvirt(name.to_owned()),
        }
    }
}

impl Choice {
    fn add(&mut self, chosen: Chosen) {
        if !self.chosen.contains(&chosen) {
            self.chosen.push(chosen);
        }
    }

    /// Adds the machines that `matches` accepts, unless they are excluded, also by their metadata.
    fn add_matching(
        &mut self,
        said: &str,
        wish: &MachineSelection,
        machines: &[(String, BackupMark)],
        uri: &str,
        matches: impl Fn(&str, &BackupMark) -> bool,
    ) -> Result<(), Error> {
        let mut is_empty = true;
        for (name, mark) in machines.iter().filter(|(name, mark)| matches(name, mark)) {
            is_empty = false;
            let reason = if wish.excluded.iter().any(|glob| glob.matches(name)) {
                "it is excluded"
            } else if mark.is_left_out {
                "its own configuration leaves it out"
            } else {
                self.add(Chosen::libvirt(name));
                continue;
            };
            let left_out = (name.clone(), reason);
            if !self.left_out.contains(&left_out) {
                self.left_out.push(left_out);
            }
        }
        if is_empty {
            return Err(Error::NoMachines {
                said: said.to_owned(),
                uri: uri.to_owned(),
            });
        }
        Ok(())
    }
}

/// The arguments with which another process finds a machine.
pub fn way(address: &OsStr, machine: &str) -> Vec<OsString> {
    [
        "--connect".into(),
        address.to_owned(),
        "--machine".into(),
        machine.into(),
    ]
    .into()
}

/// The address of the QEMU with its monitor at a path.
pub fn monitor_address(path: &Path) -> OsString {
    let mut address = OsString::from(QMP);
    address.push(std::path::absolute(path).unwrap_or_else(|_| path.to_owned()));
    address
}

/// The path in an address, if it is that of a QEMU monitor.
pub fn monitor_path(address: &OsStr) -> Option<&Path> {
    let path = address.as_bytes().strip_prefix(QMP.as_bytes())?;
    Some(Path::new(OsStr::from_bytes(path)))
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;

    use holdfast_host::BackupMark;

    use super::{Choice, Everything, Glob, MachineSelection, MachineWord, choose, monitor_path};
    use crate::errors::Error;

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
        let of_virtualbox = |name: &str| Some(MachineWord::VirtualBox(name.to_owned()));
        for (text, several) in [("web 1", false), ("/a/*/b.vbox", false), ("web*", true), ("", true)] {
            let word = word(&format!("vbox:{text}"));
            assert_eq!(word, of_virtualbox(text));
            assert_eq!(word.unwrap().may_be_several(), several, "{text}");
        }
        for image in ["-", "./web1", "/dev/vg/web1", "web1.qcow2", "vda=web1"] {
            assert_eq!(word(image), None, "{image}");
        }
    }

    fn machines() -> Vec<(String, BackupMark)> {
        let machine = |name: &str, is_left_out, tags: &[&str]| {
            let mark = BackupMark {
                is_left_out,
                tags: tags.iter().map(|tag| (*tag).to_owned()).collect(),
                ..BackupMark::default()
            };
            (name.to_owned(), mark)
        };
        vec![
            machine("db1", false, &["db", "prod"]),
            machine("db2", true, &["db"]),
            machine("web1", false, &["prod"]),
            machine("web[1]", false, &[]),
        ]
    }

    fn chosen(words: &[&str], everything: Everything, excluded: &[&str]) -> Result<Choice, Error> {
        let wish = MachineSelection {
            words: words
                .iter()
                .filter_map(|word| MachineWord::parse(OsStr::new(word)))
                .collect(),
            everything,
            excluded: excluded.iter().map(|text| Glob::parse(text).unwrap()).collect(),
        };
        choose(&wish, &machines(), "qemu:///system")
    }

    fn names(words: &[&str], everything: Everything, excluded: &[&str]) -> Vec<String> {
        let choice = chosen(words, everything, excluded).unwrap();
        choice.chosen.into_iter().map(|chosen| chosen.said).collect()
    }

    #[test]
    fn patterns_and_tags_mean_what_their_owners_do_not_leave_out() {
        use Everything::{NotWanted, Wanted};
        assert_eq!(names(&["db*"], NotWanted, &[]), ["db1"]);
        assert_eq!(names(&["tag:prod", "web1"], NotWanted, &[]), ["db1", "web1"]);
        assert_eq!(names(&[], Wanted, &["web*"]), ["db1"]);
        // A machine named in full is always included.
        assert_eq!(names(&["db2"], NotWanted, &[]), ["db2"]);
        assert_eq!(names(&["db2", "qmp:/a"], Wanted, &["w*"]), ["db1", "db2", "qmp:/a"]);
        assert_eq!(names(&["web[1]"], NotWanted, &[]), ["web[1]"]);
        assert_eq!(names(&["web[0-9]"], NotWanted, &[]), ["web1"]);

        let choice = chosen(&["*"], NotWanted, &["db1"]).unwrap();
        let left_out: Vec<_> = choice.left_out.iter().map(|(name, _)| &name[..]).collect();
        assert_eq!(left_out, ["db1", "db2"]);
        assert_eq!(chosen(&["*", "db2"], NotWanted, &["db1"]).unwrap().left_out.len(), 1);
    }

    #[test]
    fn a_pattern_that_matches_nothing_is_an_error() {
        for word in ["x*", "tag:x"] {
            let error = chosen(&[word, "web1"], Everything::NotWanted, &[]).unwrap_err();
            assert!(
                matches!(&error, Error::NoMachines { said, .. } if said == word),
                "{error}"
            );
        }
        let none = choose(
            &MachineSelection {
                everything: Everything::Wanted,
                ..MachineSelection::default()
            },
            &[],
            "qemu:///system",
        );
        assert!(matches!(none, Err(Error::NoMachines { .. })));
    }

    #[test]
    fn the_address_of_a_monitor_is_told_from_libvirts() {
        let path = |address: &str| monitor_path(OsStr::new(address)).map(std::path::Path::to_owned);
        assert_eq!(path("qmp:/run/web1.qmp"), Some("/run/web1.qmp".into()));
        assert_eq!(path("qemu:///system"), None);
    }
}
