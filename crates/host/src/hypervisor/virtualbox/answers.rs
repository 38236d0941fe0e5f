//! What `VBoxManage` answers, as values. Pure.
//!
//! Formats: VirtualBox, `src/VBox/Frontends/VBoxManage/VBoxManageInfo.cpp` and `VBoxManageList.cpp`, versions 4.0 to 7.1. A value stands
//! between quotes; of those in it, only some are marked by a backslash, depending on version and key. Line ends stand as they are.

use std::path::PathBuf;

use crate::MachineState;

/// Machines of one user, at most.
const MACHINE_COUNT_MAX: usize = 65_536;
/// What a machine is called whose settings cannot be read.
const INACCESSIBLE: &str = "<inaccessible>";

/// A machine in a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedMachine {
    /// Its name; none where VirtualBox cannot read its settings.
    pub name: Option<String>,
    /// Its UUID, in lower case.
    pub uuid: String,
}

/// What a machine is doing, in VirtualBox's own words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VirtualBoxState(String);

impl VirtualBoxState {
    /// By the word that stands for it.
    pub fn new(word: &str) -> Self {
        Self(word.to_owned())
    }

    /// The word for it: `poweroff`, `saved`, `running`...
    pub fn word(&self) -> &str {
        &self.0
    }

    /// What that is in everybody's words. What is not known is neither on nor off.
    pub fn state(&self) -> MachineState {
        match &self.0[..] {
            "poweroff" | "saved" | "aborted" | "aborted-saved" | "teleported" => MachineState::ShutOff,
            "running" => MachineState::Running,
            "paused" => MachineState::Paused,
            _ => MachineState::Between,
        }
    }

    /// Whether its memory is in a file, to go on from there.
    pub fn is_saved(&self) -> bool {
        matches!(&self.0[..], "saved" | "aborted-saved")
    }
}

/// A machine of VirtualBox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MachineInfo {
    /// Its UUID, in lower case.
    pub uuid: String,
    /// What it is doing.
    pub state: VirtualBoxState,
    /// The file with its settings.
    pub settings: PathBuf,
}

/// Reads what `list vms` says: `"name" {uuid}`. A name may have quotes and line ends in it.
pub(super) fn machines_of(text: &str) -> Result<Vec<ListedMachine>, String> {
    let mut machines = Vec::new();
    // What came of a name that goes on in the next line.
    let mut begun: Option<String> = None;
    for line in text.lines() {
        // Warnings of the program come before the list, and no machine's line begins like them.
        let (mut name, line) = match (begun.take(), line.strip_prefix('"')) {
            (Some(begun), _) => (begun, line),
            (None, Some(rest)) => (String::new(), rest),
            (None, None) => continue,
        };
        // The end of a name, with the UUID behind it, is on one line.
        let end = line.rsplit_once("\" {");
        let Some((rest, uuid)) = end.and_then(|(rest, end)| Some((rest, uuid_of(end.strip_suffix('}')?)?))) else {
            name.push_str(line);
            name.push('\n');
            begun = Some(name);
            continue;
        };
        name.push_str(rest);
        if machines.len() == MACHINE_COUNT_MAX {
            return Err(format!("there are more than {MACHINE_COUNT_MAX} machines"));
        }
        machines.push(ListedMachine {
            name: (name != INACCESSIBLE).then_some(name),
            uuid,
        });
    }
    Ok(machines)
}

/// Reads what `showvminfo --machinereadable` says. A key that comes twice with two values may be part of a name or a description: that is refused.
pub(super) fn info_of(text: &str) -> Result<MachineInfo, String> {
    let uuid = the_one(text, "UUID")?;
    Ok(MachineInfo {
        uuid: uuid_of(&uuid).ok_or_else(|| format!("{uuid:?} is no UUID"))?,
        state: VirtualBoxState(the_one(text, "VMState")?),
        settings: the_one(text, "CfgFile")?.into(),
    })
}

/// The one value that a key has.
fn the_one(text: &str, key: &str) -> Result<String, String> {
    let mut values = text.lines().filter_map(|line| {
        let value = line.strip_prefix(key)?.strip_prefix("=\"")?;
        Some(value.strip_suffix('"'))
    });
    let first = values
        .next()
        .ok_or_else(|| format!("VBoxManage does not say its {key}"))?
        .ok_or_else(|| format!("VBoxManage says its {key} over several lines"))?;
    if values.any(|other| other != Some(first)) {
        return Err(format!(
            "VBoxManage says its {key} twice, and not the same: its name or description has a line that looks like it"
        ));
    }
    Ok(without_marks(first))
}

/// A value without the backslashes before quotes and backslashes. Where a version sets none, a path has none of both.
fn without_marks(value: &str) -> String {
    let mut plain = String::with_capacity(value.len());
    let mut characters = value.chars().peekable();
    while let Some(character) = characters.next() {
        match (character, characters.peek()) {
            ('\\', Some('"' | '\\')) => plain.extend(characters.next()),
            _ => plain.push(character),
        }
    }
    plain
}

/// The UUID of the snapshot that was taken; versions before 5.0 do not tell it.
pub(super) fn snapshot_of(text: &str) -> Option<String> {
    let line = text
        .lines()
        .rev()
        .find_map(|line| line.strip_prefix("Snapshot taken. UUID: "))?;
    uuid_of(line.trim())
}

/// A UUID in lower case.
fn uuid_of(text: &str) -> Option<String> {
    let is_one = text.len() == 36
        && text.bytes().enumerate().all(|(at, byte)| match at {
            8 | 13 | 18 | 23 => byte == b'-',
            _ => byte.is_ascii_hexdigit(),
        });
    is_one.then(|| text.to_ascii_lowercase())
}

/// An error message of `VBoxManage`.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Complaint {
    /// In words.
    pub(super) message: String,
    /// What kind of failure it is: `VBOX_E_OBJECT_NOT_FOUND`.
    code: Option<String>,
}

impl Complaint {
    /// Reads `VBoxManage: error: MESSAGE`, and behind it `VBoxManage: error: Details: code CODE (0x...), component...`.
    pub(super) fn of(text: &str) -> Self {
        let words = text.lines().filter_map(|line| {
            let (program, words) = line.split_once(": error: ")?;
            program.starts_with("VBoxManage").then_some(words.trim())
        });
        let (mut message, mut code): (Vec<&str>, Option<String>) = (Vec::new(), None);
        for words in words {
            let coded = words
                .strip_prefix("Details: code ")
                .or_else(|| words.strip_prefix("Code "));
            if let Some(rest) = coded {
                code = code.or_else(|| rest.split_whitespace().next().map(str::to_owned));
            } else if !words.is_empty() && !words.starts_with("Context: ") {
                message.push(words);
            }
        }
        // Progress is told on the same stream; where nothing is marked as an error, its last line is the best there is.
        let last = text
            .lines()
            .rfind(|line| !line.trim().is_empty())
            .unwrap_or("it does not say why");
        Self {
            message: if message.is_empty() {
                last.trim().to_owned()
            } else {
                message.join(": ")
            },
            code,
        }
    }

    /// There is no such machine or snapshot.
    pub(super) fn is_not_found(&self) -> bool {
        self.code.as_deref() == Some("VBOX_E_OBJECT_NOT_FOUND")
    }

    /// The machine is locked, or in a state in which this cannot be done.
    pub(super) fn is_busy(&self) -> bool {
        matches!(
            self.code.as_deref(),
            Some("VBOX_E_INVALID_OBJECT_STATE" | "VBOX_E_OBJECT_IN_USE" | "VBOX_E_INVALID_VM_STATE")
        )
    }
}
