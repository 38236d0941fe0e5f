//! Descriptors of Parallels disks: parses and opens them, and changes their identity.

use holdfast_block::hostile::Outcome;

use super::{PART_COUNT_MAX, UnnamedFile, options};
use crate::{Backing, DiskDescriptor, Format, ImageId, open};

/// The descriptor of a Parallels or ploop disk, with a closed gate for its files.
pub fn disk_descriptor(bytes: &[u8]) -> Outcome {
    let file = UnnamedFile::new(bytes);
    let opened = open(&file.path, &options(Some(Format::Parallels), Backing::Follow));
    let Ok(descriptor) = DiskDescriptor::parse(bytes, "image") else {
        return Outcome::Refused;
    };
    assert!(opened.is_err(), "the gate let another file in");
    assert_eq!(descriptor.as_text().as_bytes(), bytes, "reading has changed the text");
    let chains = |descriptor: &DiskDescriptor| -> Vec<Vec<String>> {
        let ends = descriptor
            .deltas()
            .iter()
            .rev()
            .take(PART_COUNT_MAX)
            .map(|delta| delta.id);
        let chain = |id| -> Vec<String> { descriptor.chain_of(id).iter().map(|delta| delta.file.clone()).collect() };
        ends.chain([descriptor.top()]).map(chain).collect()
    };
    let before = chains(&descriptor);
    for chain in &before {
        assert!(
            !chain.is_empty() && chain.len() <= descriptor.deltas().len(),
            "a chain has no end, or no start"
        );
    }
    let mut count = 0_u64;
    let renewed = descriptor.renewed(|| {
        count += 1;
        let mut id = [0xc5; 16];
        id[..8].copy_from_slice(&count.to_be_bytes());
        Ok(ImageId(id))
    });
    let renewed = renewed.expect("another identity is no reason to refuse a disk");
    assert_eq!(chains(&renewed), before, "another identity makes another disk");
    assert_eq!(renewed.as_text().len(), bytes.len(), "identities are of one length");
    Outcome::Decoded
}
