//! Adds, replaces and removes deltas.

use std::ops::Range;

use roxmltree::{Document, Node};

use super::{DiskDescriptor, FILE_NAME};
use crate::error::corrupt;
use crate::formats::ploop::SECTOR_BYTES;
use crate::{ImageId, Result};

/// A new delta.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NewDelta<'a> {
    pub(crate) id: ImageId,
    pub(crate) parent: ImageId,
    pub(crate) file: &'a str,
}

impl DiskDescriptor {
    /// Freezes the top as the snapshot `snapshot`, and adds the file `file` as the new top above it.
    pub(crate) fn with_snapshot(&self, snapshot: ImageId, file: &str) -> Result<Self> {
        let top = self.top();
        let renamed = self.with_renamed(top, snapshot)?;
        renamed.with_delta(NewDelta {
            id: top,
            parent: snapshot,
            file,
        })
    }

    /// Gives a delta another id, also where it is a parent; the id of the top stays.
    fn with_renamed(&self, old: ImageId, new: ImageId) -> Result<Self> {
        let top_place = self.with_document(|document| {
            let top = find(document.root_element(), &["Snapshots", "TopGUID"]);
            Ok(top.map(|node| node.range()))
        })?;
        let is_top = |place: &Range<usize>| {
            top_place
                .as_ref()
                .is_some_and(|top| top.start <= place.start && place.end <= top.end)
        };
        let mut edits = Vec::new();
        for (id, place) in &self.ids {
            if *id == old && !is_top(place) {
                edits.push((place.clone(), self.spelled(place, new)));
            }
        }
        // The top has no delta until the new one is added, so the text is not validated in between.
        Ok(Self {
            text: self.edited_text(edits),
            ..self.clone()
        })
    }

    /// Adds a delta.
    pub(crate) fn with_delta(&self, delta: NewDelta<'_>) -> Result<Self> {
        let NewDelta { id, parent, file } = delta;
        let edits = self.with_document(|document| {
            let root = document.root_element();
            let storage = needed(root, &["StorageData", "Storage"])?;
            let image = format!(
                "<Image>\n                <GUID>{{{id}}}</GUID>\n                <Type>Compressed</Type>\n                <File>{}</File>\n            </Image>",
                escaped(file)
            );
            let shot = format!(
                "<Shot>\n            <GUID>{{{id}}}</GUID>\n            <ParentGUID>{{{parent}}}</ParentGUID>\n        </Shot>"
            );
            let mut edits = vec![insertion(&self.text, storage, "Image", &image)?];
            if let Some(snapshots) = find(root, &["Snapshots"]) {
                edits.push(insertion(&self.text, snapshots, "Shot", &shot)?);
            } else {
                // The only delta of a disk without a list of snapshots is the parent.
                let (end, root_id) = (closing_tag(&self.text, root)?, ImageId::NIL);
                let list = format!(
                    "    <Snapshots>\n        <Shot>\n            <GUID>{{{parent}}}</GUID>\n            <ParentGUID>{{{root_id}}}</ParentGUID>\n        </Shot>\n        {shot}\n    </Snapshots>\n"
                );
                edits.push((end..end, list));
            }
            Ok(edits)
        })?;
        Self::parse(self.edited_text(edits).as_bytes(), FILE_NAME)
    }

    /// Removes the delta `lower`, whose only child `upper` gets its file and its parent.
    pub(crate) fn with_merged(&self, lower: ImageId, upper: ImageId) -> Result<Self> {
        let (Some(lower_delta), Some(_)) = (self.delta(lower), self.delta(upper)) else {
            return Err(missing(lower));
        };
        let parent = lower_delta.parent.unwrap_or(ImageId::NIL);
        let edits = self.with_document(|document| {
            let root = document.root_element();
            let (image, upper_image) = (image_of(root, lower)?, image_of(root, upper)?);
            let mut edits = vec![
                (with_indent(&self.text, image.range()), String::new()),
                (
                    content_of(needed(upper_image, &["File"])?)?,
                    self.text_at(content_of(needed(image, &["File"])?)?),
                ),
                (
                    content_of(needed(upper_image, &["Type"])?)?,
                    self.text_at(content_of(needed(image, &["Type"])?)?),
                ),
            ];
            if let Some(shot) = shot_of(root, lower) {
                edits.push((with_indent(&self.text, shot.range()), String::new()));
            }
            if let Some(shot) = shot_of(root, upper) {
                edits.push((content_of(needed(shot, &["ParentGUID"])?)?, format!("{{{parent}}}")));
            }
            Ok(edits)
        })?;
        Self::parse(self.edited_text(edits).as_bytes(), FILE_NAME)
    }

    /// Removes a delta without children.
    pub(crate) fn without_delta(&self, id: ImageId) -> Result<Self> {
        let text = self.text_without(id)?;
        Self::parse(text.as_bytes(), FILE_NAME)
    }

    /// Replaces the top, which must have no children, by the file `file` above the delta `base`.
    pub(crate) fn with_top_over(&self, base: ImageId, file: &str) -> Result<Self> {
        let top = self.top();
        let without = Self {
            text: self.text_without(top)?,
            ..self.clone()
        };
        without.with_delta(NewDelta {
            id: top,
            parent: base,
            file,
        })
    }

    /// Replaces the size of the disk.
    pub(crate) fn with_size(&self, disk_bytes: u64) -> Result<Self> {
        let sectors = disk_bytes / SECTOR_BYTES;
        let edits = self.with_document(|document| {
            let root = document.root_element();
            let size = needed(root, &["Disk_Parameters", "Disk_size"])?;
            let mut edits = vec![(content_of(size)?, sectors.to_string())];
            if let Some(end) = find(root, &["StorageData", "Storage", "End"]) {
                edits.push((content_of(end)?, sectors.to_string()));
            }
            Ok(edits)
        })?;
        Self::parse(self.edited_text(edits).as_bytes(), FILE_NAME)
    }

    fn text_without(&self, id: ImageId) -> Result<String> {
        let edits = self.with_document(|document| {
            let root = document.root_element();
            let mut edits = vec![(with_indent(&self.text, image_of(root, id)?.range()), String::new())];
            if let Some(shot) = shot_of(root, id) {
                edits.push((with_indent(&self.text, shot.range()), String::new()));
            }
            Ok(edits)
        })?;
        Ok(self.edited_text(edits))
    }

    fn with_document<T>(&self, work: impl FnOnce(&Document<'_>) -> Result<T>) -> Result<T> {
        let document = Document::parse(&self.text)
            .map_err(|error| corrupt(FILE_NAME, "descriptor", 0, format!("it is not valid XML: {error}")))?;
        work(&document)
    }

    fn text_at(&self, place: Range<usize>) -> String {
        self.text.get(place).unwrap_or_default().to_owned()
    }
}

fn missing(id: ImageId) -> crate::Error {
    corrupt(FILE_NAME, "descriptor", 0, format!("{{{id}}} has no image"))
}

fn find<'n, 'i>(node: Node<'n, 'i>, path: &[&str]) -> Option<Node<'n, 'i>> {
    path.iter().try_fold(node, |node, name| {
        node.children().find(|child| child.has_tag_name(*name))
    })
}

fn needed<'n, 'i>(node: Node<'n, 'i>, path: &[&str]) -> Result<Node<'n, 'i>> {
    find(node, path).ok_or_else(|| {
        let what = path.join("/");
        corrupt(
            FILE_NAME,
            "descriptor",
            node.range().start as u64,
            format!("{what} is missing"),
        )
    })
}

fn has_id(node: Node<'_, '_>, id: ImageId) -> bool {
    let text = find(node, &["GUID"]).and_then(|node| node.text());
    text.and_then(|text| text.trim().parse::<ImageId>().ok()) == Some(id)
}

fn image_of<'n, 'i>(root: Node<'n, 'i>, id: ImageId) -> Result<Node<'n, 'i>> {
    let storage = needed(root, &["StorageData", "Storage"])?;
    let mut images = storage.children().filter(|node| node.has_tag_name("Image"));
    images.find(|node| has_id(*node, id)).ok_or_else(|| missing(id))
}

fn shot_of<'n, 'i>(root: Node<'n, 'i>, id: ImageId) -> Option<Node<'n, 'i>> {
    let snapshots = find(root, &["Snapshots"])?;
    let mut shots = snapshots.children().filter(|node| node.has_tag_name("Shot"));
    shots.find(|node| has_id(*node, id))
}

/// The place of the text in an element with text only.
fn content_of(node: Node<'_, '_>) -> Result<Range<usize>> {
    match node.first_child().filter(Node::is_text) {
        Some(text) => Ok(text.range()),
        None => Err(corrupt(
            FILE_NAME,
            "descriptor",
            node.range().start as u64,
            format!("{} is empty", node.tag_name().name()),
        )),
    }
}

/// An insertion of `element` after the last child `name` of `parent`, indented like it.
fn insertion(text: &str, parent: Node<'_, '_>, name: &str, element: &str) -> Result<(Range<usize>, String)> {
    let last = parent.children().rfind(|node| node.has_tag_name(name));
    let Some(last) = last else {
        let end = closing_tag(text, parent)?;
        return Ok((end..end, element.to_owned()));
    };
    let place = last.range();
    let indent = with_indent(text, place.clone()).start..place.start;
    let indent = text.get(indent).unwrap_or_default();
    Ok((place.end..place.end, format!("{indent}{element}")))
}

/// Where the closing tag of `node` begins.
fn closing_tag(text: &str, node: Node<'_, '_>) -> Result<usize> {
    let place = node.range();
    let inside = text.get(place.clone()).unwrap_or_default();
    match inside.rfind("</") {
        Some(at) => Ok(place.start + at),
        None => Err(corrupt(
            FILE_NAME,
            "descriptor",
            place.start as u64,
            format!("{} is empty", node.tag_name().name()),
        )),
    }
}

/// A place with the white space before it.
fn with_indent(text: &str, place: Range<usize>) -> Range<usize> {
    let before = text.get(..place.start).unwrap_or_default();
    before.trim_end().len()..place.end
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
