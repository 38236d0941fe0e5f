//! What only VirtualBox has: snapshots, the file of a machine that was saved, and where the variables of its firmware are.

use roxmltree::Node;

use super::media::{FORM, machine, wrong};
use crate::xml::{self, attribute, child};
use crate::{Result, identity};

/// Where snapshots are put that say nothing else, below the folder of the settings.
const SNAPSHOT_FOLDER: &str = "Snapshots";
/// Snapshots that a machine has at most.
const SNAPSHOT_COUNT_MAX: usize = 4096;

/// What the settings of a machine say beside its hardware. Paths are whole, or relative to the folder of the settings; it is not checked where they
/// lead.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// Its name.
    pub name: String,
    /// Its UUID, in lower case.
    pub uuid: String,
    /// The folder of what snapshots need.
    pub snapshot_folder: String,
    /// The file with its memory, where it was saved.
    pub state_file: Option<String>,
    /// The file with the variables of its firmware.
    pub nvram: Option<String>,
    /// Its snapshots, parents before their children.
    pub snapshots: Vec<Snapshot>,
}

/// A snapshot that VirtualBox has of a machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    /// Its UUID, in lower case.
    pub uuid: String,
    /// Its name; several may have the same.
    pub name: String,
    /// The file with the machine's memory, where it ran.
    pub state_file: Option<String>,
    /// The file with the variables of its firmware.
    pub nvram: Option<String>,
}

/// Reads what the settings of a machine say beside its hardware.
pub fn settings(text: &str) -> Result<Settings> {
    let document = xml::parse(text, FORM)?;
    let machine = machine(&document)?;
    let mut snapshots = Vec::new();
    for node in snapshots_of(machine) {
        if snapshots.len() == SNAPSHOT_COUNT_MAX {
            return Err(wrong(format!("it has more than {SNAPSHOT_COUNT_MAX} snapshots")));
        }
        let text = node.attribute("uuid").unwrap_or_default();
        snapshots.push(Snapshot {
            uuid: identity::uuid(text).ok_or_else(|| wrong(format!("{text:?} is no UUID of a snapshot")))?,
            name: node.attribute("name").unwrap_or_default().to_owned(),
            state_file: non_empty_attribute(node, "stateFile"),
            nvram: child(node, "Hardware").and_then(nvram),
        });
    }
    let uuid = machine.attribute("uuid").unwrap_or_default();
    Ok(Settings {
        name: machine.attribute("name").unwrap_or_default().to_owned(),
        uuid: identity::uuid(uuid).ok_or_else(|| wrong(format!("{uuid:?} is no UUID of a machine")))?,
        snapshot_folder: non_empty_attribute(machine, "snapshotFolder").unwrap_or_else(|| SNAPSHOT_FOLDER.to_owned()),
        state_file: non_empty_attribute(machine, "stateFile"),
        nvram: child(machine, "Hardware").and_then(nvram),
        snapshots,
    })
}

/// The elements of all snapshots of a machine, or of a snapshot's children.
pub(super) fn snapshots_of<'a, 'input>(machine: Node<'a, 'input>) -> impl Iterator<Item = Node<'a, 'input>> {
    let first = child(machine, "Snapshot");
    let nodes = first.into_iter().flat_map(|first| first.descendants());
    nodes.filter(|node| node.is_element() && node.tag_name().name() == "Snapshot")
}

/// An attribute that says something.
fn non_empty_attribute(node: Node<'_, '_>, name: &str) -> Option<String> {
    node.attribute(name)
        .filter(|value| !value.is_empty())
        .map(str::to_owned)
}

/// Since version 1.20 it stands in an element of the firmware, before in that of the BIOS.
fn nvram(hardware: Node<'_, '_>) -> Option<String> {
    ["Firmware", "BIOS"].into_iter().find_map(|name| {
        let outer = child(hardware, name)?;
        attribute(outer, "NVRAM", "path")
            .filter(|path| !path.is_empty())
            .map(str::to_owned)
    })
}
