//! The methods for reading a machine's disks, and the choice among them.

use std::path::Path;

use holdfast_host::qemu::{Danger, QemuVersion};

use crate::job::{Error, Result};

/// How the disks of a machine were read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Method {
    /// From a copy-before-write filter in the running QEMU.
    Filter,
    /// From clones of its images that share their blocks, if the file system supports that.
    Reflink,
    /// From its images, while the machine wrote to overlays, which were committed afterwards.
    Overlay,
    /// From its images, while it was paused.
    Pause,
    /// From host snapshots of its disks.
    Snapshot,
    /// From its images: it was shut off.
    Images,
}

impl Method {
    /// The methods that a user can request.
    pub const WAYS: [Self; 5] = [Self::Filter, Self::Reflink, Self::Overlay, Self::Pause, Self::Snapshot];

    /// The keyword in machine-readable output.
    pub fn word(self) -> &'static str {
        match self {
            Self::Filter => "filter",
            Self::Reflink => "reflink",
            Self::Overlay => "overlay",
            Self::Pause => "pause",
            Self::Snapshot => "snapshot",
            Self::Images => "images",
        }
    }
}

/// The methods that a machine with a QEMU supports.
#[derive(Debug, Clone)]
pub(super) struct Offer {
    pub(super) machine: String,
    pub(super) qemu: QemuVersion,
    /// Why filters cannot be used, apart from QEMU's version; none if they can.
    pub(super) no_filter: Option<String>,
    /// Why its images cannot be cloned; none if they can.
    pub(super) no_reflink: Option<String>,
    /// Why overlays cannot be used; none if they can.
    pub(super) no_overlay: Option<String>,
    /// Why host snapshots are not possible; none if they are, or were not requested.
    pub(super) no_snapshot: Option<String>,
    pub(super) with_memory: bool,
}

/// The method that is used, and the reason.
///
/// # Errors
/// [`Error::NoMethod`]: the requested method is not possible; or no method leaves the machine running.
pub(super) fn choose(wish: Option<Method>, offer: &Offer) -> Result<(Method, String)> {
    let refused = |reason: String| Error::NoMethod {
        machine: offer.machine.clone(),
        reason,
    };
    if let Some(method) = wish {
        let obstacle = match method {
            _ if offer.with_memory && method != Method::Filter => {
                Some("memory is taken together with the filter only".to_owned())
            }
            Method::Filter => no_filter(offer),
            Method::Reflink => offer.no_reflink.clone(),
            Method::Overlay => offer.no_overlay.clone(),
            Method::Snapshot => offer.no_snapshot.clone(),
            Method::Pause | Method::Images => None,
        };
        return match obstacle {
            Some(reason) => Err(refused(format!("{}: {reason}", method.word()))),
            None => Ok((method, "asked for".to_owned())),
        };
    }
    let Some(no_filter) = no_filter(offer) else {
        return Ok((
            Method::Filter,
            "nothing is left to merge, and a full disk cannot harm the guest".to_owned(),
        ));
    };
    match (offer.with_memory, &offer.no_reflink, &offer.no_overlay) {
        (true, ..) => Err(refused(format!(
            "memory is taken together with the filter only; {no_filter}"
        ))),
        (false, None, _) => Ok((Method::Reflink, format!("{no_filter}; its images can be cloned"))),
        (false, Some(no_reflink), None) => Ok((Method::Overlay, format!("{no_filter}; {no_reflink}"))),
        (false, Some(no_reflink), Some(no_overlay)) => Err(refused(format!("{no_filter}; {no_reflink}; {no_overlay}"))),
    }
}

fn no_filter(offer: &Offer) -> Option<String> {
    let qemu = offer.qemu;
    let reason = || format!("QEMU {qemu} has no filter that never harms the guest: that came with 7.1");
    let too_old = qemu.defect(Danger::FilterFailsGuest).map(|_| reason());
    too_old.or_else(|| offer.no_filter.clone())
}

/// The part of an overlay's name between the name of its image and the number of its run.
const OVERLAY: &str = ".holdfast-";

/// The path of a run's overlay of an image: beside the image, with its name as prefix.
pub(crate) fn overlay_of(image: &Path, run: u32) -> std::path::PathBuf {
    let name = image.file_name().unwrap_or_default().to_string_lossy();
    image.with_file_name(format!("{name}{OVERLAY}{run:08x}"))
}

/// The run that created an overlay, by the file's name.
pub(crate) fn run_of_overlay(file: &Path) -> Option<u32> {
    let name = file.file_name()?.to_string_lossy();
    let (_, digits) = name.rsplit_once(OVERLAY)?;
    let is_number = digits.len() == 8 && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    is_number.then(|| u32::from_str_radix(digits, 16).ok())?
}

#[cfg(test)]
mod tests {
    use holdfast_host::qemu::QemuVersion;

    use super::{Method, Offer, choose, overlay_of, run_of_overlay};

    fn offer(minor: u64, no_reflink: Option<&str>, no_overlay: Option<&str>) -> Offer {
        Offer {
            machine: "web1".to_owned(),
            qemu: QemuVersion::new(7, minor, 0),
            no_filter: None,
            no_reflink: no_reflink.map(str::to_owned),
            no_overlay: no_overlay.map(str::to_owned),
            no_snapshot: no_reflink.map(str::to_owned),
            with_memory: false,
        }
    }

    #[test]
    fn the_best_way_is_taken_and_none_that_stops_the_machine_for_long() {
        let chosen = |offer: &Offer| choose(None, offer).map(|(method, _)| method).ok();
        let (no, yes) = (Some("no"), None);
        assert_eq!(chosen(&offer(1, no, no)), Some(Method::Filter));
        assert_eq!(chosen(&offer(0, yes, yes)), Some(Method::Reflink));
        assert_eq!(chosen(&offer(0, no, yes)), Some(Method::Overlay));
        let unsafe_here = Offer {
            no_filter: Some("throttle".to_owned()),
            ..offer(2, no, yes)
        };
        assert_eq!(chosen(&unsafe_here), Some(Method::Overlay));
        assert!(choose(Some(Method::Filter), &unsafe_here).is_err());
        let refused = choose(None, &offer(0, Some("ext4"), Some("bare")))
            .unwrap_err()
            .to_string();
        assert!(
            ["7.0", "ext4", "bare"].iter().all(|reason| refused.contains(reason)),
            "{refused}"
        );
        let memory = Offer {
            with_memory: true,
            ..offer(0, yes, yes)
        };
        assert!(choose(None, &memory).is_err());
    }

    #[test]
    fn what_is_asked_for_is_taken_or_refused() {
        for way in Method::WAYS {
            assert_eq!(choose(Some(way), &offer(2, None, None)).unwrap().0, way);
            let none = choose(Some(way), &offer(0, Some("no"), Some("no")));
            assert_eq!(none.is_ok(), way == Method::Pause, "{way:?}");
            let memory = Offer {
                with_memory: true,
                ..offer(2, None, None)
            };
            assert_eq!(choose(Some(way), &memory).is_ok(), way == Method::Filter);
        }
    }

    #[test]
    fn overlays_of_holdfast_are_known_by_their_names() {
        let overlay = overlay_of("/i/web1.qcow2".as_ref(), 0xab);
        assert_eq!(overlay, std::path::Path::new("/i/web1.qcow2.holdfast-000000ab"));
        assert_eq!(run_of_overlay(&overlay), Some(0xab));
        assert!(
            run_of_overlay("/i/web1.holdfast-1".as_ref()).is_none() && run_of_overlay("/i/web1".as_ref()).is_none()
        );
    }
}
