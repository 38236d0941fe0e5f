//! Changes identities in the "disk data base" lines of a descriptor.
//!
//! VirtualBox uses `ddb.uuid.image`, and `ddb.uuid.parent` in children. VMware uses `ddb.uuid` in its own notation,
//! and its children identify their parents by the CID only, like those of most programs.

use std::sync::Arc;

use holdfast_block::to_usize;

use super::descriptor::{IMAGE, IMAGE_OF_VMWARE, PARENT, of_vmware};
use super::disk::{DescriptorPlace, Vmdk};
use super::extent::SparseExtent;
use super::tables::{VmdkExtentKind, has_overlap};
use crate::file::ImageFile;
use crate::model::identity::ImageId;
use crate::{Error, Result};

/// Sets the UUID, durably; also the file name of the extent, if `name` is given.
pub(crate) fn set(vmdk: &Vmdk, image: &str, id: ImageId, name: Option<&str>) -> Result<()> {
    rewrite(vmdk, image, |text| {
        let text = match (name, own_extent(vmdk)) {
            (Some(name), Some(_)) => with_own_name(text, name),
            _ => text.to_vec(),
        };
        let mut changed = with_entry(&text, IMAGE_OF_VMWARE, &of_vmware(id));
        if let Some(own) = with_entry(changed.as_deref().unwrap_or(&text), IMAGE, &id.to_string()) {
            changed = Some(own);
        }
        changed.unwrap_or_else(|| with_new_entry(&text, IMAGE, &id.to_string()))
    })
}

/// Sets the parent UUID of a child, durably, if the child stores one.
pub(crate) fn set_parent(vmdk: &Vmdk, image: &str, id: ImageId) -> Result<()> {
    rewrite(vmdk, image, |text| {
        with_entry(text, PARENT, &id.to_string()).unwrap_or_else(|| text.to_vec())
    })
}

/// Changes the text, writing as little of the file as necessary.
fn rewrite(vmdk: &Vmdk, image: &str, change: impl FnOnce(&[u8]) -> Vec<u8>) -> Result<()> {
    let not_writable = |detail: &str| Error::NotWritable {
        image: image.to_owned(),
        detail: detail.to_owned(),
    };
    let file: &Arc<dyn ImageFile> = vmdk.opened.files.at(0)?;
    let room = match &vmdk.text {
        DescriptorPlace::Inside(room) => room.clone(),
        DescriptorPlace::WholeFile => 0..file.length_bytes()?,
    };
    let mut bytes = vec![0; to_usize(room.end - room.start)];
    file.read_at(&mut bytes, room.start)?;
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    let mut new = change(bytes.get(..end).unwrap_or(&bytes));
    if matches!(vmdk.text, DescriptorPlace::Inside(_)) {
        if own_extent(vmdk).is_some_and(|extent| extent.metadata(&**file).is_ok_and(|ranges| has_overlap(&ranges))) {
            return Err(not_writable(
                "two of its tables overlap; run holdfast image check for details",
            ));
        }
        if new.len() > bytes.len() {
            return Err(not_writable(
                "its descriptor has no space left for an identity; convert the image first",
            ));
        }
        new.resize(bytes.len(), 0);
    }
    let start = new.iter().zip(&bytes).take_while(|(new, old)| new == old).count();
    if new.len() == bytes.len() {
        let tail = new.iter().zip(&bytes).skip(start).rev();
        let same = tail.take_while(|(new, old)| new == old).count();
        new.truncate(new.len() - same);
    } else {
        file.set_length(new.len() as u64)?;
    }
    file.write_at(new.get(start..).unwrap_or_default(), room.start + start as u64)?;
    Ok(file.sync()?)
}

/// The extent with the embedded descriptor.
fn own_extent(vmdk: &Vmdk) -> Option<&SparseExtent> {
    vmdk.opened.parts.iter().find_map(|part| match &part.kind {
        VmdkExtentKind::Sparse { window: 0, extent } => Some(extent),
        _ => None,
    })
}

/// Replaces the value of `key`; none if it is missing. Bytes, not characters: the text may have any code page.
fn with_entry(text: &[u8], key: &str, value: &str) -> Option<Vec<u8>> {
    let mut new = Vec::with_capacity(text.len() + value.len());
    let mut is_found = false;
    for line in text.split_inclusive(|byte| *byte == b'\n') {
        let equals = line.iter().position(|byte| *byte == b'=').unwrap_or(0);
        let (name, _) = line.split_at(equals);
        if !name.trim_ascii().eq_ignore_ascii_case(key.as_bytes()) {
            new.extend_from_slice(line);
            continue;
        }
        is_found = true;
        let line_end = line.trim_ascii_end().len();
        new.extend_from_slice(name);
        new.extend_from_slice(format!("= \"{value}\"").as_bytes());
        new.extend_from_slice(line.get(line_end..).unwrap_or_default());
    }
    is_found.then_some(new)
}

/// Replaces the file name of the first sparse extent, which is the file that contains the text.
fn with_own_name(text: &[u8], name: &str) -> Vec<u8> {
    let mut new = Vec::with_capacity(text.len() + name.len());
    let mut is_done = false;
    for line in text.split_inclusive(|byte| *byte == b'\n') {
        let start = line.iter().position(|byte| *byte == b'"');
        let end = line.iter().rposition(|byte| *byte == b'"');
        let is_extent = line.trim_ascii_start().starts_with(b"RW ") && line.windows(8).any(|word| word == b" SPARSE ");
        match start.zip(end) {
            Some((start, end)) if start < end && is_extent && !is_done => {
                is_done = true;
                new.extend(line.iter().take(start + 1));
                new.extend_from_slice(name.as_bytes());
                new.extend(line.iter().skip(end));
            }
            _ => new.extend_from_slice(line),
        }
    }
    new
}

/// Adds a line.
fn with_new_entry(text: &[u8], key: &str, value: &str) -> Vec<u8> {
    let mut new = text.to_vec();
    if !new.is_empty() && !new.ends_with(b"\n") {
        new.push(b'\n');
    }
    new.extend_from_slice(format!("{key}=\"{value}\"\n").as_bytes());
    new
}

#[cfg(test)]
mod tests {
    use super::{with_entry, with_new_entry, with_own_name};
    use crate::formats::vmdk::descriptor::{IMAGE, IMAGE_OF_VMWARE, of_vmware, parse_id};

    #[test]
    fn both_uuid_notations_round_trip() {
        let text = "60 00 C2 9e 7d 51 4f 1a-8d 3c 00 01 02 03 04 05";
        let id = parse_id(text).unwrap();
        assert_eq!(id.to_string(), "6000c29e-7d51-4f1a-8d3c-000102030405");
        assert_eq!(of_vmware(id), text.to_lowercase());
        assert_eq!(parse_id(&id.to_string()), Some(id));
        for wrong in ["", "60 00", "60 00 C2 9e 7d 51 4f 1a-8d 3c 00 01 02 03 04 0g"] {
            assert_eq!(parse_id(wrong), None, "{wrong}");
        }
    }

    /// Line ends, white space before the equals sign, and bytes of other code pages stay.
    #[test]
    fn value_is_replaced_in_its_line() {
        let text = b"# caf\xe9\r\nddb.uuid = \"60 00\"\r\nddb.uuid.image=\"1\"";
        let new = with_entry(text, IMAGE_OF_VMWARE, "x y").unwrap();
        assert_eq!(new, b"# caf\xe9\r\nddb.uuid = \"x y\"\r\nddb.uuid.image=\"1\"");
        assert_eq!(with_entry(b"CID=1\n", IMAGE, "2"), None);
        let extents = b"RW 1 ZERO\nRW 8 SPARSE \"a\"\r\nRW 8 SPARSE \"b\"\n";
        let renamed = b"RW 1 ZERO\nRW 8 SPARSE \"long.vmdk\"\r\nRW 8 SPARSE \"b\"\n";
        assert_eq!(with_own_name(extents, "long.vmdk"), renamed);
        assert_eq!(with_new_entry(b"CID=1", IMAGE, "2"), b"CID=1\nddb.uuid.image=\"2\"\n");
    }
}
