//! Media of a machine: their chains and formats.

use holdfast_hardware::virtualbox::Medium;
use holdfast_image::Format;

/// The images of a disk, starting with the attached one; empty if the settings do not contain it.
pub(super) fn chain_of<'m>(media: &'m [Medium], uuid: &str) -> Vec<&'m Medium> {
    let find = |uuid: &str| media.iter().find(|medium| medium.uuid == uuid);
    let mut chain: Vec<&Medium> = find(uuid).into_iter().collect();
    while let Some(parent) = chain.last().and_then(|medium| find(medium.parent.as_deref()?)) {
        // Parents enclose their children in the text, so only a duplicate UUID can cause a cycle.
        if chain.iter().any(|medium| medium.uuid == parent.uuid) {
            break;
        }
        chain.push(parent);
    }
    chain
}

/// The format with this name in VirtualBox.
pub(super) fn format_of(name: &str) -> Option<Format> {
    let format = Format::from_name(&name.to_lowercase())?;
    let is_read = matches!(
        format,
        Format::Vdi | Format::Vmdk | Format::Vhd | Format::Vhdx | Format::Raw
    );
    is_read.then_some(format)
}
