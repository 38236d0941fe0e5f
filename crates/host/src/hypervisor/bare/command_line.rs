//! The command line of a QEMU, as the configuration of its machine: read from the process, changed for another host, and
//! started there.

mod checks;
mod disks;
mod needs;
mod pairs;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use self::pairs::OptionPairs;
use crate::hypervisor::domain_xml::HostNeeds;
use crate::qemu::QemuVersion;
use crate::system::processes::{Process, UserIdentity};
use crate::system::ssh::shell_line;

/// Options without a value.
const SWITCHES: [&str; 28] = [
    "-S",
    "-daemonize",
    "-enable-fips",
    "-enable-kvm",
    "-full-screen",
    "-mem-prealloc",
    "-no-acpi",
    "-no-fd-bootchk",
    "-no-hpet",
    "-no-kvm",
    "-no-quit",
    "-no-reboot",
    "-no-shutdown",
    "-no-user-config",
    "-nodefaults",
    "-nodefconfig",
    "-nographic",
    "-old-param",
    "-only-migratable",
    "-portrait",
    "-preconfig",
    "-semihosting",
    "-singlestep",
    "-snapshot",
    "-usb",
    "-win2k-hack",
    "-xen-attach",
    "-xen-domid-restrict",
];
/// How a machine came to run here. It arrives in another way there.
const START_OPTIONS: [&str; 3] = ["-S", "-incoming", "-loadvm"];
/// It arrives in this way.
pub(super) const RECEIVING: [&str; 3] = ["-S", "-incoming", "defer"];
/// Words of values that name open files of the process that started QEMU.
const OPEN_FILES: [&str; 4] = ["fd", "fds", "vhostfd", "vhostfds"];

/// The command line of a QEMU, and what else belongs to it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CommandLine {
    /// The program.
    pub(super) program: PathBuf,
    /// Its arguments, without the program.
    pub(super) arguments: Vec<String>,
    /// The folder of relative paths.
    pub(super) folder: PathBuf,
    /// The user and group of the process; none for root, or if QEMU itself changes the user.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) user: Option<(u32, u32)>,
    /// The type of the machine, with its version.
    pub(super) machine_type: String,
    /// The version of QEMU.
    pub(super) version: QemuVersion,
    /// Files and devices that must exist: the option that names them, and the path.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) files: Vec<(String, PathBuf)>,
    /// Files and sockets that QEMU creates.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) made_files: Vec<PathBuf>,
    /// The disks that have come. They belong to the user.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) disks: Vec<PathBuf>,
    /// The file with the firmware's variables, and its size. Their content comes with the memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) variables: Option<(PathBuf, u64)>,
}

/// What QEMU says about itself.
pub(super) struct QemuFacts {
    /// "pc-q35-7.2", whatever the command line says.
    pub(super) machine_type: String,
    pub(super) version: QemuVersion,
    pub(super) has_kvm: bool,
    pub(super) variables: Option<PathBuf>,
    /// Its user, who has chosen the command line; none for root and the user of this process.
    pub(super) user: Option<UserIdentity>,
    /// Whether root has started it.
    pub(super) is_started_by_root: bool,
}

/// An option, and the place of its value among the arguments.
struct ArgumentPlace<'a> {
    /// None for a word without an option, which names a disk.
    name: Option<&'a str>,
    value: Option<usize>,
}

impl CommandLine {
    /// The command line of a process; none if it cannot be inspected.
    pub(super) fn of_process(process: &Process, facts: QemuFacts) -> Option<Self> {
        let mut words = process.command_line()?;
        let first = PathBuf::from(words.remove(0));
        let program = if first.is_absolute() {
            first
        } else {
            without_deleted(&process.program()?)
        };
        let mut line = Self {
            program,
            arguments: words,
            folder: process.resolve(Path::new("")),
            user: None,
            machine_type: facts.machine_type,
            version: facts.version,
            files: Vec::new(),
            made_files: Vec::new(),
            disks: Vec::new(),
            variables: None,
        };
        let changes_user = line
            .arguments
            .iter()
            .any(|word| matches!(&word[..], "-runas" | "-run-with"));
        // Any user can start a program with this option; it is of effect for root only.
        let user = facts.user.filter(|_| !(facts.is_started_by_root && changes_user));
        line.user = user.map(|user| (user.user, user.group));
        line.find_files();
        if facts.has_kvm {
            line.files.push(("KVM".to_owned(), "/dev/kvm".into()));
        }
        if let Some(path) = facts.variables {
            let size_bytes = path.metadata().ok()?.len();
            line.files.retain(|(_, file)| *file != path);
            line.variables = Some((path, size_bytes));
        }
        Some(line)
    }

    /// # Errors
    /// The text is not from [`text`](Self::text).
    pub fn parse(text: &str) -> Result<Self, String> {
        serde_json::from_str(text).map_err(|error| format!("the description of the machine: {error}"))
    }

    /// The command line as text.
    pub fn text(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }

    /// With which the machine is started at another host, where it waits for its memory. Its disks, by their images here, are
    /// raw files there.
    ///
    /// # Errors
    /// Why it cannot be started there, for users.
    pub fn moved(&self, disks: &BTreeMap<PathBuf, PathBuf>) -> Result<Self, String> {
        let mut line = self.clone();
        for (from, to) in disks {
            line.move_disk(from, to)?;
            line.files.retain(|(_, file)| file != from);
            line.disks.push(to.clone());
        }
        line.remove_options(&START_OPTIONS);
        line.set_machine_type();
        Ok(line)
    }

    /// What prevents the machine from being started elsewhere.
    pub fn obstacles(&self) -> Vec<String> {
        let mut obstacles = Vec::new();
        for argument in self.options() {
            let name = argument.name.unwrap_or_default();
            if name == "-snapshot" {
                obstacles.push("it was started with -snapshot: what it writes is in files without a name".to_owned());
            }
            let value = argument.value.map(|value| OptionPairs::parse(&self.arguments[value]));
            let has_open_file = value.is_some_and(|pairs| OPEN_FILES.iter().any(|word| pairs.get(word).is_some()));
            if has_open_file || name == "-add-fd" {
                obstacles.push(format!(
                    "its QEMU got open files from the process that started it ({name})"
                ));
            }
        }
        obstacles.dedup();
        obstacles
    }

    /// What the host must have.
    pub fn needs(&self) -> HostNeeds {
        HostNeeds {
            files: self.files.clone(),
            made_files: self.made_files.clone(),
            ..HostNeeds::default()
        }
    }

    /// What a user should know before the machine is started elsewhere.
    pub fn notes(&self) -> Vec<String> {
        let mut notes = vec![format!(
            "there, it is started by {} {}",
            self.shell_line(),
            RECEIVING.join(" ")
        )];
        let options = self.options();
        let processor = options.iter().find(|argument| argument.name == Some("-cpu"));
        let value = processor.and_then(|argument| argument.value);
        let model = value.map(|value| OptionPairs::parse(&self.arguments[value]));
        if model.is_some_and(|model| matches!(model.texts().first(), Some(&"host" | &"max"))) {
            notes.push("its processor is that of this host, and must be the same there".to_owned());
        }
        notes
    }

    /// The command line for a shell.
    fn shell_line(&self) -> String {
        let program = self.program.display().to_string();
        let words = std::iter::once(&program[..]).chain(self.arguments.iter().map(String::as_str));
        shell_line(words)
    }

    /// The options in order.
    fn options(&self) -> Vec<ArgumentPlace<'_>> {
        let mut places = Vec::new();
        let mut index = 0;
        while let Some(word) = self.arguments.get(index) {
            // QEMU accepts two dashes as well.
            let name = word.strip_prefix('-').filter(|rest| !rest.is_empty());
            let place = match name {
                None => ArgumentPlace {
                    name: None,
                    value: Some(index),
                },
                Some(rest) => {
                    let name = if rest.starts_with('-') { rest } else { word };
                    let has_value = !SWITCHES.contains(&name);
                    index += usize::from(has_value);
                    ArgumentPlace {
                        name: Some(name),
                        value: has_value.then_some(index).filter(|value| *value < self.arguments.len()),
                    }
                }
            };
            places.push(place);
            index += 1;
        }
        places
    }

    fn remove_options(&mut self, names: &[&str]) {
        let mut kept = Vec::new();
        let mut removed = Vec::new();
        let mut index = 0;
        for argument in self.options() {
            let end = argument.value.unwrap_or(index) + 1;
            let is_removed = argument.name.is_some_and(|name| names.contains(&name));
            if is_removed { &mut removed } else { &mut kept }.extend(index..end);
            index = end;
        }
        self.arguments = kept.into_iter().map(|index| self.arguments[index].clone()).collect();
    }

    /// Another version of QEMU may have another default.
    fn set_machine_type(&mut self) {
        let value = self.options().iter().find_map(|argument| {
            let is_it = matches!(argument.name, Some("-machine" | "-M"));
            argument.value.filter(|_| is_it)
        });
        let Some(value) = value else {
            self.arguments
                .extend(["-machine".to_owned(), self.machine_type.clone()]);
            return;
        };
        let mut pairs = OptionPairs::parse(&self.arguments[value]);
        if pairs.get("type").is_some() {
            pairs.set("type", &self.machine_type);
        } else if !pairs.set_first_word(&self.machine_type) {
            pairs.push_front("type", &self.machine_type);
        }
        self.arguments[value] = pairs.text();
    }

    /// A machine in the folder `/vm`.
    #[cfg(test)]
    pub(super) fn of_words(words: &[&str]) -> Self {
        Self {
            program: "/usr/bin/qemu-system-x86_64".into(),
            arguments: words.iter().map(|word| (*word).to_owned()).collect(),
            folder: "/vm".into(),
            user: None,
            machine_type: "pc-q35-7.2".to_owned(),
            version: QemuVersion::new(2, 0, 0),
            files: Vec::new(),
            made_files: Vec::new(),
            disks: Vec::new(),
            variables: None,
        }
    }
}

/// The path of a program that was replaced since it was started.
fn without_deleted(path: &Path) -> PathBuf {
    let text = path.to_string_lossy();
    text.strip_suffix(" (deleted)")
        .map_or_else(|| path.to_owned(), PathBuf::from)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::path::PathBuf;

    use super::CommandLine;

    fn moved(words: &[&str]) -> Vec<String> {
        CommandLine::of_words(words).moved(&BTreeMap::new()).unwrap().arguments
    }

    #[test]
    fn a_moved_machine_has_its_own_type_and_another_start() {
        let typed = ["-machine", "pc-q35-7.2"];
        assert_eq!(moved(&[]), typed);
        assert_eq!(
            moved(&["-S", "-m", "1G", "-incoming", "defer"]),
            [&["-m", "1G"], &typed[..]].concat()
        );
        assert_eq!(moved(&["--incoming", "tcp:0:1", "-loadvm", "a"]), typed);
        assert_eq!(moved(&["-M", "q35,accel=kvm"]), ["-M", "pc-q35-7.2,accel=kvm"]);
        assert_eq!(
            moved(&["-machine", "accel=tcg,type=q35"]),
            ["-machine", "accel=tcg,type=pc-q35-7.2"]
        );
        assert_eq!(
            moved(&["-machine", "accel=tcg"]),
            ["-machine", "type=pc-q35-7.2,accel=tcg"]
        );
    }

    #[test]
    fn a_text_is_read_as_it_was_written() {
        let mut line = CommandLine::of_words(&["-name", "web1"]);
        line.user = Some((1000, 100));
        line.files.push(("-bios".to_owned(), "/usr/share/bios".into()));
        line.variables = Some(("/vm/vars".into(), 540_672));
        assert_eq!(CommandLine::parse(&line.text()).unwrap(), line);
        CommandLine::parse("<domain/>").unwrap_err();
    }

    #[test]
    fn disks_of_a_moved_machine_are_not_needed_at_their_old_place() {
        let mut line = CommandLine::of_words(&["-drive", "file=a.raw,format=raw"]);
        line.files = ["/vm/a.raw", "/vm/b"]
            .map(|path| ("-drive".to_owned(), path.into()))
            .into();
        let disks = BTreeMap::from([(PathBuf::from("/vm/a.raw"), PathBuf::from("/srv/a.raw"))]);
        let moved = line.moved(&disks).unwrap();
        assert_eq!(moved.needs().files, [("-drive".to_owned(), PathBuf::from("/vm/b"))]);
        assert_eq!(moved.disks, [PathBuf::from("/srv/a.raw")]);
        assert_eq!(moved.arguments[1], "file=/srv/a.raw,format=raw");
    }

    #[test]
    fn machines_with_what_cannot_move_are_refused() {
        let obstacles = |words: &[&str]| CommandLine::of_words(words).obstacles();
        assert_eq!(obstacles(&["-netdev", "tap,id=n,ifname=tap0", "-name", "fd"]), [""; 0]);
        assert!(obstacles(&["-netdev", "tap,id=n,fd=3"])[0].contains("-netdev"));
        assert!(obstacles(&["-add-fd", "fd=3,set=1"])[0].contains("-add-fd"));
        assert!(obstacles(&["-snapshot", "a.raw"])[0].contains("-snapshot"));
    }

    #[test]
    fn a_command_line_can_be_shown() {
        let line = CommandLine::of_words(&["-name", "a b"]);
        assert_eq!(line.shell_line(), "/usr/bin/qemu-system-x86_64 -name 'a b'");
        assert_eq!(
            line.notes(),
            ["there, it is started by /usr/bin/qemu-system-x86_64 -name 'a b' -S -incoming defer"]
        );
        for (processor, count) in [("host,-vmx", 2), ("max", 2), ("Skylake-Server", 1)] {
            assert_eq!(
                CommandLine::of_words(&["-cpu", processor]).notes().len(),
                count,
                "{processor}"
            );
        }
    }
}
