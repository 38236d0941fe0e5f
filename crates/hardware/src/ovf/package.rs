//! The files of an OVF package, and the disks in them.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use roxmltree::Node;

use crate::xml::{self, child, children, named};
use crate::{Error, Result, percent, plain_path};

pub(super) const FORM: &str = "OVF descriptor";
/// Limit of files and of disks in a package.
const FILE_COUNT_MAX: usize = 1024;

/// The files and disks of a package.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OvfPackage {
    /// All files, in the order of the descriptor and of the members of an OVA.
    pub files: Vec<OvfFile>,
    /// The disks in the order of their files, followed by the blank ones, which have no file.
    pub disks: Vec<OvfDisk>,
}

/// A file of a package.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OvfFile {
    /// The id by which the descriptor refers to it.
    pub id: String,
    /// The name as written: neither a URL, nor an absolute path, nor a path that leaves the folder of the descriptor.
    pub href: String,
    /// The size in bytes, or the total size of its chunks, if specified.
    pub size_bytes: Option<u64>,
    /// The compression of the whole file, if any: `gzip`.
    pub compression: Option<String>,
    /// If the file is split into chunks, the size in bytes of each except the last. Their names are `href` with
    /// `.000000000` and so on appended.
    pub chunk_bytes: Option<u64>,
}

/// A disk of a package.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OvfDisk {
    /// The id by which the machine's configuration refers to it: its `diskId`, or the id of a file without a disk
    /// element.
    pub key: String,
    /// The file; `None` for a blank disk.
    pub file: Option<OvfFile>,
    /// The size for the guest in bytes, if specified.
    pub capacity_bytes: Option<u64>,
    /// The unit of the capacity, which may be rounded up to it.
    pub capacity_unit_bytes: u64,
    /// The URI of the format; empty for a file without a disk element.
    pub format: String,
    /// Used bytes, if specified.
    pub populated_bytes: Option<u64>,
    /// The key of the parent of a difference image.
    pub parent_ref: Option<String>,
}

impl OvfPackage {
    /// Reads the files and disks of a descriptor with any number of machines.
    pub fn parse(text: &str) -> Result<Self> {
        let document = xml::parse(text, FORM)?;
        Self::of(envelope(&document)?)
    }

    pub(super) fn of(envelope: Node<'_, '_>) -> Result<Self> {
        let files = files(envelope)?;
        let by_id: BTreeMap<&str, usize> = (0..)
            .zip(&files)
            .map(|(number, file)| (file.id.as_str(), number))
            .collect();
        let mut disks: Vec<(usize, OvfDisk)> = Vec::new();
        let mut keys = BTreeSet::new();
        let nodes = section(envelope, "DiskSection");
        for node in nodes.into_iter().flat_map(|section| children(section, "Disk")) {
            let number = match named(node, "fileRef").filter(|id| !id.is_empty()) {
                Some(id) => Some(file_number(&by_id, id)?),
                None => None,
            };
            let disk = disk(node, number.and_then(|number| files.get(number)))?;
            if disks.len() == FILE_COUNT_MAX || !keys.insert(disk.key.clone()) {
                return Err(wrong(format!(
                    "the disk {:?} is there twice, or one too many",
                    disk.key
                )));
            }
            disks.push((number.unwrap_or(usize::MAX), disk));
        }
        for id in direct_files(envelope) {
            // A drive may refer to a file that was not exported.
            let Some(number) = by_id.get(id).copied() else { continue };
            if !keys.insert(id.to_owned()) {
                return Err(wrong(format!("{id:?} is a disk and a file")));
            }
            let file = files.get(number).cloned();
            let disk = OvfDisk {
                key: id.to_owned(),
                capacity_bytes: file.as_ref().and_then(|file| file.size_bytes),
                capacity_unit_bytes: 1,
                file,
                format: String::new(),
                populated_bytes: None,
                parent_ref: None,
            };
            disks.push((number, disk));
        }
        disks.sort_by_key(|(number, _)| *number);
        Ok(Self {
            disks: disks.into_iter().map(|(_, disk)| disk).collect(),
            files,
        })
    }
}

impl OvfFile {
    /// Possible names of the file, the likeliest first: the normalized `href`, unchanged and with its URI escapes
    /// decoded.
    pub fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = name_below(&self.href).into_iter().map(Cow::into_owned).collect();
        let meant = unescaped(&self.href).and_then(|name| name_below(&name).map(Cow::into_owned));
        names.extend(meant.filter(|name| !names.contains(name)));
        names
    }
}

/// The root element, if it is that of a descriptor.
pub(super) fn envelope<'a, 'input>(document: &'a roxmltree::Document<'input>) -> Result<Node<'a, 'input>> {
    let envelope = document.root_element();
    if envelope.tag_name().name() == "Envelope" {
        Ok(envelope)
    } else {
        Err(wrong(format!("the root element is {:?}", envelope.tag_name().name())))
    }
}

/// The first section of that name; before version 1.0 and in oVirt, the name is an attribute.
pub(super) fn section<'a, 'input>(node: Node<'a, 'input>, name: &str) -> Option<Node<'a, 'input>> {
    sections(node, name).next()
}

/// The sections of that name.
pub(super) fn sections<'a, 'input>(node: Node<'a, 'input>, name: &str) -> impl Iterator<Item = Node<'a, 'input>> {
    node.children().filter(move |section| match section.tag_name().name() {
        "Section" | "Content" => named(*section, "type").is_some_and(|kind| {
            let kind = kind.rsplit(':').next().unwrap_or_default();
            kind.strip_suffix("_Type") == Some(name)
        }),
        other => other == name,
    })
}

pub(super) fn wrong(detail: impl Into<String>) -> Error {
    Error::Malformed {
        form: FORM,
        detail: detail.into(),
    }
}

/// Bytes per `unit`: "byte * 2^30" as in DSP0243, and the words of earlier versions.
pub(super) fn unit_bytes(unit: &str) -> Option<u64> {
    let unit: String = unit
        .chars()
        .filter(|character| !character.is_whitespace())
        .map(|character| character.to_ascii_lowercase())
        .collect();
    let factor = match unit.as_str() {
        "" | "byte" | "bytes" => return Some(1),
        "kb" | "kilobytes" => return Some(1 << 10),
        "mb" | "megabytes" => return Some(1 << 20),
        "gb" | "gigabytes" => return Some(1 << 30),
        "tb" | "terabytes" => return Some(1 << 40),
        other => other.strip_prefix("bytes*").or(other.strip_prefix("byte*"))?,
    };
    match factor.split_once('^') {
        Some((base, exponent)) => base.parse::<u64>().ok()?.checked_pow(exponent.parse().ok()?),
        None => factor.parse().ok(),
    }
}

/// Splits a reference to a resource: `ovf:/disk/vmdisk1`, `/file/file3`.
pub(super) fn resource(text: &str) -> (Option<&str>, &str) {
    let text = text.trim();
    let path = text.strip_prefix("ovf:").unwrap_or(text).trim_start_matches('/');
    match path.split_once('/') {
        Some((kind @ ("disk" | "file"), id)) => (Some(kind), id),
        _ => (None, path),
    }
}

/// The ids of files that drives refer to directly, without a disk element.
fn direct_files<'a>(envelope: Node<'a, '_>) -> BTreeSet<&'a str> {
    let resources = envelope
        .descendants()
        .filter(|node| node.tag_name().name() == "HostResource");
    let texts = resources.filter_map(|node| node.text());
    texts
        .map(resource)
        .filter_map(|(kind, id)| (kind == Some("file")).then_some(id))
        .collect()
}

/// The number of a file by its id; oVirt puts the folder on its storage before the id.
fn file_number(by_id: &BTreeMap<&str, usize>, id: &str) -> Result<usize> {
    let last = id.rsplit('/').next().unwrap_or_default();
    let number = by_id.get(id).or_else(|| by_id.get(last)).copied();
    number.ok_or_else(|| wrong(format!("a disk is in the file {id:?}, which is not there")))
}

fn files(envelope: Node<'_, '_>) -> Result<Vec<OvfFile>> {
    let mut files: Vec<OvfFile> = Vec::new();
    let mut ids = BTreeSet::new();
    for node in children(envelope, "References").flat_map(|references| children(references, "File")) {
        let id = named(node, "id").unwrap_or_default();
        let href = named(node, "href").unwrap_or_default();
        if id.is_empty() || !ids.insert(id) || files.len() == FILE_COUNT_MAX {
            return Err(wrong(format!(
                "the file {id:?} is there twice, has no id, or is one too many"
            )));
        }
        if name_below(href).is_none() || unescaped(href).is_some_and(|name| name_below(&name).is_none()) {
            return Err(wrong(format!(
                "the file {id:?} is at {href:?}, which is not below the descriptor"
            )));
        }
        let compression = named(node, "compression").filter(|text| !matches!(*text, "" | "identity"));
        files.push(OvfFile {
            id: id.to_owned(),
            href: href.to_owned(),
            size_bytes: number(node, "size")?,
            compression: compression.map(str::to_owned),
            chunk_bytes: number(node, "chunkSize")?.filter(|bytes| *bytes > 0),
        });
    }
    Ok(files)
}

fn disk(node: Node<'_, '_>, file: Option<&OvfFile>) -> Result<OvfDisk> {
    let key = named(node, "diskId").unwrap_or_default();
    if key.is_empty() {
        return Err(wrong("a disk has no id"));
    }
    let unit = named(node, "capacityAllocationUnits").unwrap_or_default();
    let unit = unit_bytes(unit).ok_or_else(|| wrong(format!("the disk {key:?} is counted in {unit:?}")))?;
    // `${size}` is a property that the user enters before deployment.
    let is_asked_for = named(node, "capacity").is_some_and(|text| text.trim_start().starts_with("${"));
    let capacity = if is_asked_for { None } else { number(node, "capacity")? };
    let (count, unit) = match (capacity, number(node, "size")?) {
        // oVirt's attribute, in GiB.
        (None, Some(count)) => (Some(count), 1 << 30),
        (capacity, _) => (capacity, unit),
    };
    let capacity_bytes = count.map(|count| times(count, unit, key)).transpose()?;
    Ok(OvfDisk {
        key: key.to_owned(),
        file: file.cloned(),
        capacity_bytes,
        capacity_unit_bytes: unit,
        // Some tools omit it: the format is then detected by the first bytes.
        format: named(node, "format")
            .filter(|uri| !uri.is_empty())
            .unwrap_or("unspecified")
            .to_owned(),
        populated_bytes: number(node, "populatedSize")?,
        parent_ref: named(node, "parentRef")
            .filter(|parent| !parent.is_empty())
            .map(str::to_owned),
    })
}

/// Multiplies within the range of signed numbers, which sizes of devices have elsewhere.
fn times(count: u64, unit: u64, key: &str) -> Result<u64> {
    count
        .checked_mul(unit)
        .filter(|bytes| i64::try_from(*bytes).is_ok())
        .ok_or_else(|| wrong(format!("the disk {key:?} has {count} times {unit} bytes")))
}

fn number(node: Node<'_, '_>, name: &str) -> Result<Option<u64>> {
    match named(node, name).map(str::trim).filter(|text| !text.is_empty()) {
        Some(text) => text
            .parse()
            .ok()
            .filter(|number| i64::try_from(*number).is_ok())
            .map(Some)
            .ok_or_else(|| wrong(format!("{name} is {text:?}"))),
        None => Ok(None),
    }
}

/// Normalizes the name of a file; `None` for URLs and names outside the folder.
fn name_below(name: &str) -> Option<Cow<'_, str>> {
    let is_url = name.contains("://") || name.starts_with("file:");
    if is_url || name.contains(['\\', '\0']) {
        return None;
    }
    plain_path(name)
}

/// A URI with its escapes decoded; `None` if it has none, or if they are not UTF-8.
fn unescaped(uri: &str) -> Option<String> {
    if !uri.contains('%') {
        return None;
    }
    percent::decoded(uri)
}

/// The text of the first element of that name below `node`, or an empty text.
pub(super) fn text_of<'a>(node: Node<'a, '_>, name: &str) -> &'a str {
    child(node, name)
        .and_then(|child| child.text())
        .unwrap_or_default()
        .trim()
}
