//! `container.json`, byte for byte: `docs/format/container.md`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{ContainerTree, Listing, SnapshotEntry, TreeLayer};
use crate::error::corrupt;
use crate::{Format, ImageId, Result};

const KIND: &str = "holdfast container";
const VERSION: u32 = 1;
/// Limits of the lists, so that a damaged or hostile file cannot use unbounded time.
const ENTRY_COUNT_MAX: usize = 4096;

/// The content of a valid file.
pub(super) struct Document {
    pub(super) id: ImageId,
    pub(super) layers: Vec<TreeLayer>,
    pub(super) top: Option<ImageId>,
    pub(super) snapshots: BTreeMap<ImageId, SnapshotEntry>,
    pub(super) properties: BTreeMap<String, String>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct StoredContainer {
    kind: String,
    version: u32,
    id: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    top: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    layers: Vec<StoredLayer>,
    #[serde(default)]
    snapshots: Vec<StoredSnapshot>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    properties: BTreeMap<String, String>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct StoredLayer {
    id: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    parent: Option<String>,
    file: String,
    format: String,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct StoredSnapshot {
    layer: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    created_s: Option<u64>,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    comment: String,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    hidden: bool,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    properties: BTreeMap<String, String>,
}

/// The text of the file.
pub(super) fn encode(tree: &ContainerTree) -> Vec<u8> {
    let is_listed = tree.listing == Listing::Container;
    let stored = StoredContainer {
        kind: KIND.to_owned(),
        version: VERSION,
        id: tree.id.to_string(),
        top: is_listed.then(|| tree.top.to_string()),
        layers: if is_listed {
            tree.layers.iter().map(stored_layer).collect()
        } else {
            Vec::new()
        },
        snapshots: tree
            .snapshots
            .iter()
            .map(|(id, entry)| stored_snapshot(*id, entry))
            .collect(),
        properties: tree.properties.clone(),
    };
    let mut text = serde_json::to_vec_pretty(&stored).expect("strings and numbers are valid JSON");
    text.push(b'\n');
    text
}

fn stored_layer(layer: &TreeLayer) -> StoredLayer {
    StoredLayer {
        id: layer.id.to_string(),
        parent: layer.parent.map(|parent| parent.to_string()),
        file: layer.file.clone(),
        format: layer.format.name().to_owned(),
    }
}

fn stored_snapshot(id: ImageId, entry: &SnapshotEntry) -> StoredSnapshot {
    StoredSnapshot {
        layer: id.to_string(),
        name: entry.name.clone(),
        created_s: entry.created_s,
        comment: entry.comment.clone(),
        hidden: entry.is_hidden,
        properties: entry.properties.clone(),
    }
}

/// Parses the text of the file; errors call it `name`.
pub(super) fn decode(bytes: &[u8], name: &str) -> Result<Document> {
    let wrong = |detail: String| corrupt(name, "container", 0, detail);
    let stored: StoredContainer =
        serde_json::from_slice(bytes).map_err(|error| wrong(format!("it is not valid: {error}")))?;
    if stored.kind != KIND {
        return Err(wrong(format!("its kind is {:?}", stored.kind)));
    }
    if stored.version != VERSION {
        return Err(wrong(format!(
            "its version is {}; this program reads version {VERSION}",
            stored.version
        )));
    }
    if stored.layers.len().max(stored.snapshots.len()) > ENTRY_COUNT_MAX {
        return Err(wrong(format!(
            "it lists more than {ENTRY_COUNT_MAX} layers or snapshots"
        )));
    }
    let id = |text: &str| {
        text.parse::<ImageId>()
            .map_err(|_| wrong(format!("{text:?} is not a UUID")))
    };
    let mut layers = Vec::new();
    for layer in &stored.layers {
        let format = [Format::Raw, Format::Qcow2, Format::Parallels]
            .into_iter()
            .find(|format| format.name() == layer.format)
            .ok_or_else(|| wrong(format!("{:?} is not a format of a layer", layer.format)))?;
        layers.push(TreeLayer {
            id: id(&layer.id)?,
            parent: layer.parent.as_deref().map(id).transpose()?,
            file: layer.file.clone(),
            format,
        });
    }
    let mut snapshots = BTreeMap::new();
    for snapshot in stored.snapshots {
        snapshots.insert(
            id(&snapshot.layer)?,
            SnapshotEntry {
                name: snapshot.name,
                created_s: snapshot.created_s,
                comment: snapshot.comment,
                is_hidden: snapshot.hidden,
                properties: snapshot.properties,
            },
        );
    }
    Ok(Document {
        id: id(&stored.id)?,
        layers,
        top: stored.top.as_deref().map(id).transpose()?,
        snapshots,
        properties: stored.properties,
    })
}
