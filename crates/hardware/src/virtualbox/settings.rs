//! Settings that only VirtualBox has: snapshots, saved states, and the file with firmware variables.

use roxmltree::Node;

use super::media::{FORM, machine, wrong};
use crate::xml::{self, attribute, child};
use crate::{Result, identity};

/// The default snapshot folder, relative to the folder of the settings.
const SNAPSHOT_FOLDER: &str = "Snapshots";
/// Limit of snapshots of a machine.
const SNAPSHOT_COUNT_MAX: usize = 4096;

/// The settings of a machine besides its hardware. Paths are absolute or relative to the folder of the settings; they
/// are not validated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// The name of the machine.
    pub name: String,
    /// The UUID, in lower case.
    pub uuid: String,
    /// The folder for snapshots.
    pub snapshot_folder: String,
    /// The file with the saved state, if the machine has one.
    pub state_file: Option<String>,
    /// The file with the firmware variables.
    pub nvram: Option<String>,
    /// Snapshots, parents before their children.
    pub snapshots: Vec<Snapshot>,
}

/// A snapshot of a machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    /// The UUID, in lower case.
    pub uuid: String,
    /// The name, which need not be unique.
    pub name: String,
    /// The file with the saved state, if the machine was running.
    pub state_file: Option<String>,
    /// The file with the firmware variables.
    pub nvram: Option<String>,
}

/// Reads the settings of a machine besides its hardware.
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

/// The elements of all snapshots of a machine.
pub(super) fn snapshots_of<'a, 'input>(machine: Node<'a, 'input>) -> impl Iterator<Item = Node<'a, 'input>> {
    let first = child(machine, "Snapshot");
    let nodes = first.into_iter().flat_map(|first| first.descendants());
    nodes.filter(|node| node.is_element() && node.tag_name().name() == "Snapshot")
}

/// A non-empty attribute.
fn non_empty_attribute(node: Node<'_, '_>, name: &str) -> Option<String> {
    node.attribute(name)
        .filter(|value| !value.is_empty())
        .map(str::to_owned)
}

/// The file name is in the firmware element since version 1.20, and in the BIOS element before.
fn nvram(hardware: Node<'_, '_>) -> Option<String> {
    ["Firmware", "BIOS"].into_iter().find_map(|name| {
        let outer = child(hardware, name)?;
        attribute(outer, "NVRAM", "path")
            .filter(|path| !path.is_empty())
            .map(str::to_owned)
    })
}
