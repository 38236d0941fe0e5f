//! The format of a machine's disk: from the configuration, never from the content, which the guest writes.

use std::path::Path;

use holdfast_host::MachineDisk;
use holdfast_image::Format;

use crate::job::Result;

/// The format of `disk`, whose image is at `path`; raw if the configuration names none, as for libvirt.
///
/// # Errors
/// The format is not supported.
pub(super) fn format_of(disk: &MachineDisk, path: &Path) -> Result<Format> {
    let Some(name) = disk.format.as_deref() else {
        return Ok(Format::Raw);
    };
    let format = Format::from_name(name).ok_or_else(|| holdfast_image::Error::UnsupportedFeature {
        image: path.display().to_string(),
        feature: format!("the format {name:?}"),
        detail: "convert the disk to qcow2 or raw first".to_owned(),
    })?;
    Ok(format)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use holdfast_host::{DiskKind, DiskSource, MachineDisk};
    use holdfast_image::Format;

    use super::format_of;

    #[test]
    fn a_format_that_is_not_said_is_raw_and_one_that_is_not_known_is_refused() {
        let format = |name: Option<&str>| {
            let disk = MachineDisk {
                target: "vda".to_owned(),
                kind: DiskKind::Disk,
                source: DiskSource::File("/images/vda".into()),
                format: name.map(str::to_owned),
                is_read_only: false,
                is_shared: false,
                alias: None,
            };
            format_of(&disk, Path::new("/images/vda"))
        };
        assert_eq!(format(None).unwrap(), Format::Raw);
        assert_eq!(format(Some("qcow2")).unwrap(), Format::Qcow2);
        assert!(format(Some("bochs")).is_err());
    }
}
