//! Parsers of the output of `VBoxManage`. Pure.
//!
//! Formats: VirtualBox, `src/VBox/Frontends/VBoxManage/VBoxManageInfo.cpp` and `VBoxManageList.cpp`, versions 4.0 to
//! 7.1. A value is between quotes. Quotes inside it are escaped by a backslash or not, depending on version and key.
//! Line ends are not escaped.

use std::path::PathBuf;

use crate::MachineState;

/// Limit on the machines of one user.
const MACHINE_COUNT_MAX: usize = 65_536;
/// The name of a machine whose settings cannot be read.
const INACCESSIBLE: &str = "<inaccessible>";

/// A machine in a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedMachine {
    /// The name; none if VirtualBox cannot read the settings.
    pub name: Option<String>,
    /// The UUID, in lower case.
    pub uuid: String,
}

/// The state of a machine, by VirtualBox's keyword.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VirtualBoxState(String);

impl VirtualBoxState {
    /// Makes a state from its keyword.
    pub fn new(word: &str) -> Self {
        Self(word.to_owned())
    }

    /// The keyword: `poweroff`, `saved`, `running`...
    pub fn word(&self) -> &str {
        &self.0
    }

    /// The state in the terms of all hypervisors. An unknown state counts as [`MachineState::Between`].
    pub fn state(&self) -> MachineState {
        match &self.0[..] {
            "poweroff" | "saved" | "aborted" | "aborted-saved" | "teleported" => MachineState::ShutOff,
            "running" => MachineState::Running,
            "paused" => MachineState::Paused,
            _ => MachineState::Between,
        }
    }

    /// Whether the memory is saved in a file.
    pub fn is_saved(&self) -> bool {
        matches!(&self.0[..], "saved" | "aborted-saved")
    }
}

/// A machine of VirtualBox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MachineInfo {
    /// The UUID, in lower case.
    pub uuid: String,
    /// The state.
    pub state: VirtualBoxState,
    /// The file with the settings.
    pub settings: PathBuf,
}

/// Parses the output of `list vms`: `"name" {uuid}`. A name may contain quotes and line ends.
pub(super) fn machines_of(text: &str) -> Result<Vec<ListedMachine>, String> {
    let mut machines = Vec::new();
    // The beginning of a name that continues on the next line.
    let mut begun: Option<String> = None;
    for line in text.lines() {
        // Warnings precede the list, and do not begin like a line of a machine.
        let (mut name, line) = match (begun.take(), line.strip_prefix('"')) {
            (Some(begun), _) => (begun, line),
            (None, Some(rest)) => (String::new(), rest),
            (None, None) => continue,
        };
        // The end of a name and the UUID are on one line.
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

/// Parses the output of `showvminfo --machinereadable`. A key with two different values may be part of a name or a
/// description, so it is refused.
pub(super) fn info_of(text: &str) -> Result<MachineInfo, String> {
    let uuid = only_value(text, "UUID")?;
    Ok(MachineInfo {
        uuid: uuid_of(&uuid).ok_or_else(|| format!("{uuid:?} is not a UUID"))?,
        state: VirtualBoxState(only_value(text, "VMState")?),
        settings: only_value(text, "CfgFile")?.into(),
    })
}

/// The only value of a key.
fn only_value(text: &str, key: &str) -> Result<String, String> {
    let mut values = text.lines().filter_map(|line| {
        let value = line.strip_prefix(key)?.strip_prefix("=\"")?;
        Some(value.strip_suffix('"'))
    });
    let first = values
        .next()
        .ok_or_else(|| format!("VBoxManage does not print {key}"))?
        .ok_or_else(|| format!("VBoxManage prints {key} in several lines"))?;
    if values.any(|other| other != Some(first)) {
        return Err(format!(
            "VBoxManage prints different values of {key}: the name or description of the machine has a line that looks like one"
        ));
    }
    Ok(unescape(first))
}

/// Removes the backslashes before quotes and backslashes. In a version that does not escape, a path contains neither.
fn unescape(value: &str) -> String {
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

/// The UUID of a new snapshot. Versions before 5.0 do not print it.
pub(super) fn snapshot_of(text: &str) -> Option<String> {
    let line = text
        .lines()
        .rev()
        .find_map(|line| line.strip_prefix("Snapshot taken. UUID: "))?;
    uuid_of(line.trim())
}

/// Parses a UUID, and returns it in lower case.
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
pub(super) struct ErrorMessage {
    pub(super) message: String,
    /// The error code: `VBOX_E_OBJECT_NOT_FOUND`.
    code: Option<String>,
}

impl ErrorMessage {
    /// Parses `VBoxManage: error: MESSAGE`, followed by `VBoxManage: error: Details: code CODE (0x...), component...`.
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
        // Progress is printed on the same stream. If no line is marked as an error, the last line is used.
        let last = text
            .lines()
            .rfind(|line| !line.trim().is_empty())
            .unwrap_or("VBoxManage gives no reason");
        Self {
            message: if message.is_empty() {
                last.trim().to_owned()
            } else {
                message.join(": ")
            },
            code,
        }
    }

    /// Whether the machine or snapshot does not exist.
    pub(super) fn is_not_found(&self) -> bool {
        self.code.as_deref() == Some("VBOX_E_OBJECT_NOT_FOUND")
    }

    /// Whether the machine is locked, or its state does not permit the action.
    pub(super) fn is_busy(&self) -> bool {
        matches!(
            self.code.as_deref(),
            Some("VBOX_E_INVALID_OBJECT_STATE" | "VBOX_E_OBJECT_IN_USE" | "VBOX_E_INVALID_VM_STATE")
        )
    }
}
