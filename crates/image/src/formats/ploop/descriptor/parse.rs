//! Parses and validates a descriptor.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use roxmltree::{Document, Node, ParsingOptions};

use super::{DELTA_COUNT_MAX, DiskDescriptor, SECTOR_BYTES, TEXT_BYTES_MAX};
use crate::error::corrupt;
use crate::model::info::{Delta, DeltaKind};
use crate::{Error, ImageId, Result};

/// A disk with a thousand deltas has thirty thousand nodes.
const NODE_COUNT_MAX: u32 = 1 << 16;
/// Limit of equals signs, and so of attributes; a descriptor has one. The XML library takes time proportional to their
/// square.
const ATTRIBUTE_COUNT_MAX: usize = 1024;

/// Parses a descriptor; errors call it `image`.
pub(super) fn parse(text: &[u8], image: &str) -> Result<DiskDescriptor> {
    if text.len() as u64 > TEXT_BYTES_MAX {
        return Err(corrupt(image, "descriptor", 0, format!("it has {} bytes", text.len())));
    }
    let text = std::str::from_utf8(text).map_err(|error| {
        let at = error.valid_up_to() as u64;
        corrupt(image, "descriptor", at, "it is not UTF-8 text")
    })?;
    if text.bytes().filter(|byte| *byte == b'=').count() > ATTRIBUTE_COUNT_MAX {
        return Err(corrupt(image, "descriptor", 0, "it has too many attributes"));
    }
    let options = ParsingOptions {
        nodes_limit: NODE_COUNT_MAX,
        ..ParsingOptions::default()
    };
    let document = Document::parse_with_options(text, options).map_err(|error| {
        corrupt(
            image,
            "descriptor",
            0,
            format!("it is not valid XML: {}", shown(&error.to_string())),
        )
    })?;
    let reader = DescriptorReader {
        image,
        text,
        ids: Vec::new(),
    };
    reader.read(document.root_element())
}

struct DescriptorReader<'a> {
    image: &'a str,
    text: &'a str,
    ids: Vec<(ImageId, Range<usize>)>,
}

impl DescriptorReader<'_> {
    fn read(mut self, root: Node<'_, '_>) -> Result<DiskDescriptor> {
        if !root.has_tag_name("Parallels_disk_image") {
            return Err(self.wrong(root, format!("its root element is {:?}", shown(root.tag_name().name()))));
        }
        match root.attribute("Version") {
            // ploop writes no version.
            None | Some("1.0") => {}
            Some(version) => return Err(self.wrong(root, format!("the version is {:?}", shown(version)))),
        }
        let parameters = self.needed(root, "Disk_Parameters")?;
        let disk_bytes = self.disk_bytes(parameters)?;
        self.refuse_unsupported_parameters(parameters)?;
        let id = match self.child(parameters, "UID")? {
            // The identity is optional: an invalid one is ignored.
            Some(node) => self.id(node).ok().filter(|id| !id.is_nil()),
            None => None,
        };
        let storage = self.storage(self.needed(root, "StorageData")?, disk_bytes)?;
        let images = self.images(storage)?;
        let (top, shots) = match self.child(root, "Snapshots")? {
            Some(snapshots) => (self.top(snapshots)?, self.shots(snapshots)?),
            None => (None, Vec::new()),
        };
        let deltas = self.deltas(images, shots, root)?;
        let top = self.choose_top(top, &deltas, root)?;
        Ok(DiskDescriptor {
            text: self.text.to_owned(),
            disk_bytes,
            id,
            top,
            deltas,
            ids: self.ids,
        })
    }

    fn wrong(&self, node: Node<'_, '_>, detail: impl Into<String>) -> Error {
        corrupt(self.image, "descriptor", node.range().start as u64, detail)
    }

    fn unsupported(&self, feature: &str, detail: &str) -> Error {
        Error::UnsupportedFeature {
            image: self.image.to_owned(),
            feature: feature.to_owned(),
            detail: detail.to_owned(),
        }
    }

    /// The child element with this name; an error if there are several.
    fn child<'n, 'i>(&self, node: Node<'n, 'i>, name: &str) -> Result<Option<Node<'n, 'i>>> {
        let mut found = elements(node, name);
        match (found.next(), found.next()) {
            (_, Some(second)) => Err(self.wrong(second, format!("{name} occurs twice"))),
            (first, None) => Ok(first),
        }
    }

    fn needed<'n, 'i>(&self, node: Node<'n, 'i>, name: &str) -> Result<Node<'n, 'i>> {
        self.child(node, name)?
            .ok_or_else(|| self.wrong(node, format!("{} has no {name}", node.tag_name().name())))
    }

    /// The text of an element that contains only text and comments.
    fn text_of(&self, node: Node<'_, '_>) -> Result<String> {
        match node.children().find(Node::is_element) {
            None => Ok(node
                .children()
                .filter(Node::is_text)
                .filter_map(|text| text.text())
                .collect()),
            Some(inner) => Err(self.wrong(inner, format!("{} contains elements", node.tag_name().name()))),
        }
    }

    fn number(&self, node: Node<'_, '_>) -> Result<u64> {
        let text = self.text_of(node)?;
        let digits = text.trim();
        let number = digits.parse().ok().filter(|_| !digits.starts_with('+'));
        number.ok_or_else(|| self.wrong(node, format!("{} is {:?}", node.tag_name().name(), shown(digits))))
    }

    /// Parses the GUID in an element and records its range.
    fn id(&mut self, node: Node<'_, '_>) -> Result<ImageId> {
        let found = self.text_of(node)?;
        let found = found.trim();
        let Ok(id) = found.parse::<ImageId>() else {
            return Err(self.wrong(node, format!("{} is {:?}", node.tag_name().name(), shown(found))));
        };
        // Only a GUID in one plain piece of text can be replaced.
        let place = node.first_child().filter(Node::is_text).and_then(|text| {
            let start = text.range().start + self.text.get(text.range())?.find(found)?;
            Some(start..start + found.len())
        });
        match place {
            Some(place) => {
                self.ids.push((id, place));
                Ok(id)
            }
            None => Err(self.wrong(node, "a GUID contains character references")),
        }
    }

    fn disk_bytes(&self, parameters: Node<'_, '_>) -> Result<u64> {
        let node = self.needed(parameters, "Disk_size")?;
        let sectors = self.number(node)?;
        sectors
            .checked_mul(SECTOR_BYTES)
            .filter(|bytes| *bytes > 0 && i64::try_from(*bytes).is_ok())
            .ok_or_else(|| self.wrong(node, format!("the disk has {sectors} sectors")))
    }

    fn refuse_unsupported_parameters(&self, parameters: Node<'_, '_>) -> Result<()> {
        if let Some(padding) = self.child(parameters, "Padding")?
            && self.number(padding)? != 0
        {
            return Err(self.unsupported(
                "padding",
                "its layout is undocumented; convert the disk with Parallels first",
            ));
        }
        let Some(encryption) = self.child(parameters, "Encryption")? else {
            return Ok(());
        };
        let is_named = |name: &str| -> Result<bool> {
            Ok(match self.child(encryption, name)? {
                Some(node) => !matches!(
                    self.text_of(node)?.trim(),
                    "" | "{00000000-0000-0000-0000-000000000000}"
                ),
                None => false,
            })
        };
        if is_named("Engine")? || is_named("KeyId")? {
            return Err(self.unsupported("encryption", "decrypt the disk where its key is stored first"));
        }
        Ok(())
    }

    /// The only storage element; a split disk has several.
    fn storage<'n, 'i>(&self, data: Node<'n, 'i>, disk_bytes: u64) -> Result<Node<'n, 'i>> {
        if elements(data, "Volume").next().is_some() {
            return Err(self.unsupported("deltas of another disk", "mount the disk, and copy its files"));
        }
        let part_count = elements(data, "Storage").count();
        if part_count > 1 {
            return Err(self.unsupported(
                &format!("{part_count} parts of the disk, each with files of its own"),
                "merge them first (prl_disk_tool convert --merge)",
            ));
        }
        let storage = self.needed(data, "Storage")?;
        for (name, expected) in [("Start", 0), ("End", disk_bytes / SECTOR_BYTES)] {
            if let Some(node) = self.child(storage, name)?
                && self.number(node)? != expected
            {
                let detail = format!("{name} is {}, but must be {expected}", self.number(node)?);
                return Err(self.wrong(node, detail));
            }
        }
        Ok(storage)
    }

    /// The deltas of a storage element; their parents are listed elsewhere.
    fn images<'n, 'i>(&mut self, storage: Node<'n, 'i>) -> Result<Vec<(Delta, Node<'n, 'i>)>> {
        let mut seen = HashSet::new();
        let mut images = Vec::new();
        for node in elements(storage, "Image") {
            let id = self.id(self.needed(node, "GUID")?)?;
            if id.is_nil() || !seen.insert(id) {
                let detail = if id.is_nil() {
                    "the nil UUID"
                } else {
                    "used by two images"
                };
                return Err(self.wrong(node, format!("the GUID {{{id}}} is {detail}")));
            }
            let kind = self.needed(node, "Type")?;
            let kind = match self.text_of(kind)?.trim() {
                "Compressed" => DeltaKind::Expanding,
                "Plain" => DeltaKind::Plain,
                other => return Err(self.wrong(kind, format!("the type of {{{id}}} is {:?}", shown(other)))),
            };
            let file = self.text_of(self.needed(node, "File")?)?;
            if images.len() == DELTA_COUNT_MAX {
                return Err(self.wrong(node, format!("the disk has more than {DELTA_COUNT_MAX} images")));
            }
            let parent = None;
            images.push((Delta { id, parent, kind, file }, node));
        }
        Ok(images)
    }

    /// The deltas and their parents in the list of snapshots.
    fn shots<'n, 'i>(&mut self, snapshots: Node<'n, 'i>) -> Result<Vec<(ImageId, Option<ImageId>, Node<'n, 'i>)>> {
        let mut shots = Vec::new();
        for node in elements(snapshots, "Shot") {
            let id = self.id(self.needed(node, "GUID")?)?;
            let parent = self.id(self.needed(node, "ParentGUID")?)?;
            shots.push((id, Some(parent).filter(|parent| !parent.is_nil()), node));
        }
        Ok(shots)
    }

    fn top(&mut self, snapshots: Node<'_, '_>) -> Result<Option<ImageId>> {
        match self.child(snapshots, "TopGUID")? {
            Some(node) => self.id(node).map(Some),
            None => Ok(None),
        }
    }

    /// Combines images and snapshots to a tree, in the order of the images.
    fn deltas(
        &self,
        images: Vec<(Delta, Node<'_, '_>)>,
        shots: Vec<(ImageId, Option<ImageId>, Node<'_, '_>)>,
        root: Node<'_, '_>,
    ) -> Result<Vec<Delta>> {
        let known: HashSet<ImageId> = images.iter().map(|(delta, _)| delta.id).collect();
        let mut parents = HashMap::new();
        for (id, parent, node) in shots {
            if parents.insert(id, parent).is_some() {
                return Err(self.wrong(node, format!("the snapshot {{{id}}} occurs twice")));
            }
            if !known.contains(&id) {
                return Err(self.wrong(node, format!("the snapshot {{{id}}} has no image")));
            }
            if let Some(parent) = parent.filter(|parent| !known.contains(parent)) {
                return Err(self.wrong(node, format!("the parent of {{{id}}}, {{{parent}}}, has no image")));
            }
        }
        // A disk that never had a snapshot may have no list.
        if let ([(only, _)], true) = (&images[..], parents.is_empty()) {
            parents.insert(only.id, None);
        }
        let mut deltas = Vec::new();
        let mut found_root: Option<ImageId> = None;
        for (mut delta, node) in images {
            let id = delta.id;
            match parents.get(&id) {
                None => return Err(self.wrong(node, format!("the parent of {{{id}}} is missing"))),
                Some(Some(_)) if delta.kind == DeltaKind::Plain => {
                    return Err(self.wrong(node, format!("{{{id}}} is a plain image, but has a parent")));
                }
                Some(None) => match found_root.replace(id) {
                    None => {}
                    Some(first) => return Err(self.wrong(node, format!("{{{first}}} and {{{id}}} are both roots"))),
                },
                Some(parent) => delta.parent = *parent,
            }
            deltas.push(delta);
        }
        if deltas.is_empty() {
            return Err(self.wrong(root, "it lists no image"));
        }
        match own_ancestor(&deltas, &parents) {
            None => Ok(deltas),
            Some(id) => Err(self.wrong(root, format!("{{{id}}} is its own ancestor"))),
        }
    }

    fn choose_top(&self, named: Option<ImageId>, deltas: &[Delta], root: Node<'_, '_>) -> Result<ImageId> {
        let has = |id: ImageId| deltas.iter().any(|delta| delta.id == id);
        let top = match (named, deltas) {
            (Some(id), _) => id,
            (None, _) if has(DiskDescriptor::TOP) => DiskDescriptor::TOP,
            (None, [only]) => only.id,
            (None, _) => return Err(self.wrong(root, "the top image is missing")),
        };
        if top == DiskDescriptor::BACKUP {
            return Err(self.wrong(root, format!("the top, {{{top}}}, is the delta of a backup")));
        }
        if !has(top) {
            return Err(self.wrong(root, format!("the top, {{{top}}}, has no image")));
        }
        Ok(top)
    }
}

/// A delta that is its own ancestor, if there is one: every delta must descend from the only root.
fn own_ancestor(deltas: &[Delta], parents: &HashMap<ImageId, Option<ImageId>>) -> Option<ImageId> {
    let mut is_sound = HashSet::new();
    for delta in deltas {
        let mut path = HashSet::new();
        let mut at = Some(delta.id);
        while let Some(id) = at.filter(|id| !is_sound.contains(id)) {
            if !path.insert(id) {
                return Some(id);
            }
            at = parents.get(&id).copied().flatten();
        }
        is_sound.extend(path);
    }
    None
}

/// The beginning of a text, for messages.
fn shown(text: &str) -> &str {
    const LENGTH_MAX: usize = 120;
    let end = text.char_indices().nth(LENGTH_MAX).map_or(text.len(), |(end, _)| end);
    text.get(..end).unwrap_or(text)
}

/// The child elements with this name.
fn elements<'n, 'i: 'n>(node: Node<'n, 'i>, name: &str) -> impl Iterator<Item = Node<'n, 'i>> {
    node.children().filter(move |child| child.has_tag_name(name))
}
