//! The folders of libvirt for states of emulated TPMs and for firmware variables.
//!
//! libvirt reports the place of a TPM's state only if it is configured. Otherwise each machine has a folder that is
//! named by its UUID, in a folder of libvirt. For the system daemon, this is a path that is fixed at build time; for
//! a session daemon, a path below its user's configuration folder. For a running machine, the command line of its
//! swtpm takes precedence.
//!
//! For a machine with `<os firmware='efi'>`, libvirt before 9.2 reports the file of the variables only while the
//! machine runs. Its name is `NAME_VARS.fd` (`qemuDomainNVRAMPathFormat` in libvirt's `qemu_domain.c`).

use std::path::{Path, PathBuf};

use super::peer::is_local;
use crate::hypervisor::domain_xml::DomainTpm;
use crate::hypervisor::swtpm;
use crate::hypervisor::tpm::{Tpm, TpmPlace, TpmStore};
use crate::system::rights::Rights;

/// Folders of the system daemon: states of TPMs, and firmware variables.
const SYSTEM_FOLDERS: [&str; 2] = ["/var/lib/libvirt/swtpm", "/var/lib/libvirt/qemu/nvram"];
/// The folder of QEMU's logs of the system daemon. The logs of a session daemon are in its user's cache folder.
const SYSTEM_LOGS: &str = "/var/log/libvirt/qemu";
/// Folders of a session daemon, below its user's configuration folder.
const SESSION_FOLDERS: [&str; 2] = ["libvirt/qemu/swtpm", "libvirt/qemu/nvram"];
/// Suffixes of the files with firmware variables, by their format.
const VARIABLES: [&str; 2] = ["_VARS.fd", "_VARS.qcow2"];
/// A folder that a session daemon with at least one machine has.
const SESSION_MACHINES: &str = "libvirt/qemu";

/// The folders in which libvirt has files of each machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum TpmFolders {
    /// The folders are known.
    Known {
        /// The parent of the folders of TPMs.
        tpms: PathBuf,
        /// The folder of the files with firmware variables.
        variables: PathBuf,
    },
    /// The folders are on this host, but their path is unknown, for this reason.
    Unknown(String),
    /// The folders are on another host.
    OtherHost,
}

/// Whether a machine may have a running swtpm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Activity {
    On,
    Off,
}

/// The machine of a TPM.
pub(super) struct TpmOwner<'a> {
    pub(super) uuid: &'a str,
    pub(super) activity: Activity,
    /// The rights of the machine's libvirt.
    pub(super) libvirt: &'a Rights,
}

impl TpmFolders {
    /// The folders of the libvirt at `uri`. `configuration` is the configuration folder of this user.
    pub(super) fn of(uri: &str, configuration: Option<&Path>) -> Self {
        if !is_local(uri) {
            return Self::OtherHost;
        }
        let path = uri.split_once("://").and_then(|(_, rest)| rest.split_once('/'));
        let path = path.map(|(_, path)| path.split('?').next().unwrap_or_default());
        match (path, configuration) {
            (Some("system"), _) => Self::inside(SYSTEM_FOLDERS.map(PathBuf::from)),
            (Some("session"), Some(folder)) if folder.join(SESSION_MACHINES).is_dir() => {
                Self::inside(SESSION_FOLDERS.map(|inner| folder.join(inner)))
            }
            (Some("session"), Some(folder)) => Self::Unknown(format!(
                "the folder of this libvirt is unknown: {} has no machines",
                folder.display()
            )),
            _ => Self::Unknown("the folder of this libvirt is unknown".to_owned()),
        }
    }

    fn inside([tpms, variables]: [PathBuf; 2]) -> Self {
        Self::Known { tpms, variables }
    }

    /// The log of a machine's QEMU; none if the folder is unknown.
    pub(super) fn log(&self, name: &str) -> Option<PathBuf> {
        let Self::Known { tpms, .. } = self else { return None };
        let is_of_system = tpms == Path::new(SYSTEM_FOLDERS[0]);
        is_of_system.then(|| Path::new(SYSTEM_LOGS).join(format!("{name}.log")))
    }

    /// The file with a machine's firmware variables, if libvirt does not report it; none if the machine has not run
    /// yet.
    pub(super) fn variables(&self, name: &str) -> Option<PathBuf> {
        let Self::Known { variables, .. } = self else {
            return None;
        };
        let mut paths = VARIABLES.iter().map(|ending| variables.join(format!("{name}{ending}")));
        // A file that cannot be accessed is not treated as missing. The later read reports the reason.
        paths.find(|path| path.try_exists().unwrap_or(true))
    }

    pub(super) fn tpm(&self, tpm: &DomainTpm, machine: &TpmOwner<'_>) -> Tpm {
        Tpm {
            version: tpm.version,
            place: self.place(tpm, machine),
        }
    }

    fn place(&self, tpm: &DomainTpm, machine: &TpmOwner<'_>) -> TpmPlace {
        let &TpmOwner {
            uuid,
            activity,
            libvirt,
        } = machine;
        if *self == Self::OtherHost {
            return TpmPlace::Unknown("libvirt has its files on another host".to_owned());
        }
        if let Some((store, path)) = &tpm.source {
            return TpmPlace::of(*store, path, tpm.version);
        }
        if let Some(socket) = &tpm.socket {
            let found = swtpm::at_socket(socket).map(|(_, place)| place);
            return found.unwrap_or_else(|| {
                TpmPlace::Unknown(format!("an external program stores it, at {}", socket.display()))
            });
        }
        let Some(version) = tpm.version else {
            return TpmPlace::Unknown("its configuration does not contain its version".to_owned());
        };
        let usual = match self {
            Self::Known { tpms, .. } => Some(tpms.join(uuid).join(version.folder())),
            Self::Unknown(_) | Self::OtherHost => None,
        };
        let exists = usual.as_ref().is_some_and(|folder| folder.is_dir());
        if activity == Activity::On
            && !exists
            && let Some((_, place)) = swtpm::of_machine(uuid, libvirt)
        {
            return place;
        }
        match (usual, self) {
            (Some(folder), _) => TpmPlace::of(TpmStore::Folder, &folder, Some(version)),
            (None, Self::Unknown(why)) => TpmPlace::Unknown(why.clone()),
            (None, _) => unreachable!("where the folder is known there is a usual place"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    use super::{Activity, TpmFolders, TpmOwner};
    use crate::hypervisor::domain_xml::DomainTpm;
    use crate::hypervisor::tpm::{TpmPlace, TpmStore, TpmVersion};
    use crate::system::rights::Rights;

    fn path(place: &TpmPlace) -> Option<&Path> {
        place.file().map(|file| file.path.as_path())
    }

    #[test]
    fn system_and_session_have_different_folders() {
        let home = tempfile::tempdir().unwrap();
        let session = "qemu+unix:///session?socket=/a/system";
        let of = |uri: &str| TpmFolders::of(uri, Some(home.path()));
        let inside = |tpms: PathBuf, variables: PathBuf| TpmFolders::Known { tpms, variables };
        let system = inside("/var/lib/libvirt/swtpm".into(), "/var/lib/libvirt/qemu/nvram".into());
        assert_eq!(of("qemu:///system"), system);
        assert!(matches!(of(session), TpmFolders::Unknown(_)), "it has no machine");
        std::fs::create_dir_all(home.path().join("libvirt/qemu")).unwrap();
        let folder = home.path().join("libvirt/qemu");
        assert_eq!(of(session), inside(folder.join("swtpm"), folder.join("nvram")));
        assert!(matches!(TpmFolders::of(session, None), TpmFolders::Unknown(_)));
        assert_eq!(of("qemu+ssh://other/system"), TpmFolders::OtherHost);
    }

    #[test]
    fn variables_are_named_after_their_machine() {
        let folder = tempfile::tempdir().unwrap();
        let states = TpmFolders::Known {
            tpms: PathBuf::new(),
            variables: folder.path().to_owned(),
        };
        assert_eq!(states.variables("web1"), None);
        for name in ["web1_VARS.qcow2", "web1_VARS.fd"] {
            std::fs::File::create(folder.path().join(name)).unwrap();
            assert_eq!(states.variables("web1"), Some(folder.path().join(name)));
        }
        assert_eq!(TpmFolders::OtherHost.variables("web1"), None);
    }

    #[test]
    fn a_configured_place_precedes_the_default_folder() {
        let uuid = "7219d2ac-133f-465f-897f-011cd0b714f1";
        let machine = |activity| TpmOwner {
            uuid,
            activity,
            libvirt: &Rights::Own,
        };
        let mut tpm = DomainTpm {
            version: Some(TpmVersion::V1),
            ..DomainTpm::default()
        };
        let states = TpmFolders::Known {
            tpms: "/states".into(),
            variables: "/variables".into(),
        };
        for activity in [Activity::On, Activity::Off] {
            let place = states.place(&tpm, &machine(activity));
            let expected = format!("/states/{uuid}/tpm1.2/tpm-00.permall");
            assert_eq!(path(&place), Some(Path::new(&expected)));
        }
        let unknown = TpmFolders::Unknown("why".to_owned());
        assert_eq!(
            unknown.place(&tpm, &machine(Activity::On)),
            TpmPlace::Unknown("why".to_owned())
        );
        tpm.source = Some((TpmStore::Folder, "/own".into()));
        tpm.version = Some(TpmVersion::V2);
        assert_eq!(
            path(&unknown.place(&tpm, &machine(Activity::Off))),
            Some(Path::new("/own/tpm2-00.permall"))
        );
        tpm.source = Some((TpmStore::Single, "/own".into()));
        assert_eq!(
            path(&states.place(&tpm, &machine(Activity::Off))),
            Some(Path::new("/own"))
        );
        assert!(path(&TpmFolders::OtherHost.place(&tpm, &machine(Activity::Off))).is_none());
        let served = DomainTpm {
            socket: Some("/no/server".into()),
            ..DomainTpm::default()
        };
        assert!(path(&states.place(&served, &machine(Activity::On))).is_none());
    }
}
