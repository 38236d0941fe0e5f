//! Where libvirt has the states of emulated TPMs.
//!
//! It says so only where a machine's owner has chosen the place himself. Otherwise there is a folder for each machine, called like
//! its UUID, in libvirt's own folder: fixed when libvirt was built for that of the system, below its user's configuration for that of a
//! session. Where the machine runs, its swtpm has the last word.

use std::path::{Path, PathBuf};

use super::change::is_local;
use crate::domain_xml::DomainTpm;
use crate::swtpm;
use crate::tpm::{Tpm, TpmPlace, TpmStore};

/// Where the libvirt of the system keeps them.
const SYSTEM_FOLDER: &str = "/var/lib/libvirt/swtpm";
/// Where the libvirt of a session does, below the folder for its user's configurations.
const SESSION_FOLDER: &str = "libvirt/qemu/swtpm";
/// What a session has in that folder when it has any machine.
const SESSION_MACHINES: &str = "libvirt/qemu";

/// What is known of the folder in which libvirt has one for each machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum States {
    /// This is it.
    In(PathBuf),
    /// It is on this host; where, the words tell why not.
    Somewhere(String),
    /// It is on another host.
    Elsewhere,
}

/// Whether a machine may have an swtpm at this moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Activity {
    On,
    Off,
}

impl States {
    /// Those of the libvirt at `uri`; `configuration` is the folder for configurations of the user that we are.
    pub(super) fn of(uri: &str, configuration: Option<&Path>) -> Self {
        if !is_local(uri) {
            return Self::Elsewhere;
        }
        let path = uri.split_once("://").and_then(|(_, rest)| rest.split_once('/'));
        let path = path.map(|(_, path)| path.split('?').next().unwrap_or_default());
        match (path, configuration) {
            (Some("system"), _) => Self::In(SYSTEM_FOLDER.into()),
            (Some("session"), Some(folder)) if folder.join(SESSION_MACHINES).is_dir() => {
                Self::In(folder.join(SESSION_FOLDER))
            }
            (Some("session"), Some(folder)) => Self::Somewhere(format!(
                "the folder of this libvirt is not known: {} has none of its machines",
                folder.display()
            )),
            _ => Self::Somewhere("the folder of this libvirt is not known".to_owned()),
        }
    }

    /// The TPM of the machine `uuid`.
    pub(super) fn tpm(&self, tpm: &DomainTpm, uuid: &str, activity: Activity) -> Tpm {
        Tpm {
            version: tpm.version,
            place: self.place(tpm, uuid, activity),
        }
    }

    fn place(&self, tpm: &DomainTpm, uuid: &str, activity: Activity) -> TpmPlace {
        if *self == Self::Elsewhere {
            return TpmPlace::Unknown("libvirt has its files on another host".to_owned());
        }
        if let Some((store, path)) = &tpm.source {
            return TpmPlace::of(*store, path, tpm.version);
        }
        if let Some(socket) = &tpm.socket {
            let found = swtpm::at_socket(socket).map(|(_, place)| place);
            return found.unwrap_or_else(|| {
                TpmPlace::Unknown(format!(
                    "another program than libvirt keeps it, at {}",
                    socket.display()
                ))
            });
        }
        let Some(version) = tpm.version else {
            return TpmPlace::Unknown("its configuration does not say which version it is of".to_owned());
        };
        let usual = match self {
            Self::In(folder) => Some(folder.join(uuid).join(version.folder())),
            Self::Somewhere(_) | Self::Elsewhere => None,
        };
        let is_there = usual.as_ref().is_some_and(|folder| folder.is_dir());
        if activity == Activity::On
            && !is_there
            && let Some((_, place)) = swtpm::of_machine(uuid)
        {
            return place;
        }
        match (usual, self) {
            (Some(folder), _) => TpmPlace::of(TpmStore::Folder, &folder, Some(version)),
            (None, Self::Somewhere(why)) => TpmPlace::Unknown(why.clone()),
            (None, _) => unreachable!("where the folder is known there is a usual place"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::{Activity, States};
    use crate::domain_xml::DomainTpm;
    use crate::tpm::{TpmPlace, TpmStore, TpmVersion};

    fn path(place: &TpmPlace) -> Option<&Path> {
        place.file().map(|file| file.path.as_path())
    }

    #[test]
    fn each_libvirt_has_a_folder_of_its_own() {
        let home = tempfile::tempdir().unwrap();
        let session = "qemu+unix:///session?socket=/a/system";
        let of = |uri: &str| States::of(uri, Some(home.path()));
        assert_eq!(of("qemu:///system"), States::In("/var/lib/libvirt/swtpm".into()));
        assert!(matches!(of(session), States::Somewhere(_)), "it has no machine");
        std::fs::create_dir_all(home.path().join("libvirt/qemu")).unwrap();
        assert_eq!(of(session), States::In(home.path().join("libvirt/qemu/swtpm")));
        assert!(matches!(States::of(session, None), States::Somewhere(_)));
        assert_eq!(of("qemu+ssh://other/system"), States::Elsewhere);
    }

    #[test]
    fn the_state_is_where_its_owner_wants_it_or_where_libvirt_has_it() {
        let uuid = "7219d2ac-133f-465f-897f-011cd0b714f1";
        let mut tpm = DomainTpm {
            version: Some(TpmVersion::V1),
            ..DomainTpm::default()
        };
        let states = States::In("/states".into());
        for activity in [Activity::On, Activity::Off] {
            let place = states.place(&tpm, uuid, activity);
            let expected = format!("/states/{uuid}/tpm1.2/tpm-00.permall");
            assert_eq!(path(&place), Some(Path::new(&expected)));
        }
        let somewhere = States::Somewhere("why".to_owned());
        assert_eq!(
            somewhere.place(&tpm, uuid, Activity::On),
            TpmPlace::Unknown("why".to_owned())
        );
        tpm.source = Some((TpmStore::Folder, "/own".into()));
        tpm.version = Some(TpmVersion::V2);
        assert_eq!(
            path(&somewhere.place(&tpm, uuid, Activity::Off)),
            Some(Path::new("/own/tpm2-00.permall"))
        );
        tpm.source = Some((TpmStore::Single, "/own".into()));
        assert_eq!(path(&states.place(&tpm, uuid, Activity::Off)), Some(Path::new("/own")));
        assert!(path(&States::Elsewhere.place(&tpm, uuid, Activity::Off)).is_none());
        let served = DomainTpm {
            socket: Some("/nobody/listens".into()),
            ..DomainTpm::default()
        };
        assert!(path(&states.place(&served, uuid, Activity::On)).is_none());
    }
}
