//! Emulated TPMs: the place of swtpm's state.
//!
//! swtpm has up to three kinds of state. A machine that is shut off has only the permanent state: keys, counters and
//! everything else that the guest stored in the TPM, including what `TPM2_Shutdown` writes for the next start. This
//! state is one file. swtpm replaces it atomically (it writes a new file, then renames it) before it answers the
//! command that changed the state. The other two kinds exist for a machine that is running (`volatilestate`), or is
//! suspended with a TPM 1.2 (`savestate`). QEMU makes swtpm discard the first when a machine starts, a restarted TPM
//! discards the second, and both are part of QEMU's stream of a machine's memory. `.lock` is only a lock file.
//!
//! Source: swtpm 0.7.1 and 0.10, `src/swtpm/swtpm_nvstore*.c`; libvirt 9.0, `src/qemu/qemu_tpm.c`.

use std::fmt;
use std::path::{Path, PathBuf};

use crate::system::rights::Rights;

/// An emulated TPM of a machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tpm {
    /// The version, if known.
    pub version: Option<TpmVersion>,
    /// The location of the state.
    pub place: TpmPlace,
}

/// The version of the TPM specification.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TpmVersion {
    /// 1.2
    V1,
    /// 2.0
    V2,
}

/// The location of the state of a TPM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TpmPlace {
    /// A file of this host. It may not exist yet: swtpm creates it when the machine starts.
    At(TpmFile),
    /// Unknown, with the reason.
    Unknown(String),
}

/// A file with the state of a TPM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TpmFile {
    /// The file.
    pub path: PathBuf,
    /// The storage layout.
    pub store: TpmStore,
    /// The rights of the swtpm that reported the path, or of the machine if it is configured.
    pub rights: Rights,
}

/// How swtpm stores the state of a TPM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TpmStore {
    /// In a folder of the machine, with a file for each kind of state.
    Folder,
    /// All kinds in a single file, which is modified in place.
    Single,
}

impl TpmVersion {
    /// Parses the version number of a configuration.
    pub fn from_number(number: &str) -> Option<Self> {
        match number {
            "1.2" => Some(Self::V1),
            "2.0" => Some(Self::V2),
            _ => None,
        }
    }

    /// The version number.
    pub fn number(self) -> &'static str {
        match self {
            Self::V1 => "1.2",
            Self::V2 => "2.0",
        }
    }

    /// The name of libvirt's folder for this state, inside the folder that is named by the machine's UUID.
    #[cfg(any(feature = "libvirt", test))]
    pub(crate) fn folder(self) -> &'static str {
        match self {
            Self::V1 => "tpm1.2",
            Self::V2 => "tpm2",
        }
    }

    /// The file name of the permanent state in its folder.
    fn file(self) -> &'static str {
        match self {
            Self::V1 => "tpm-00.permall",
            Self::V2 => "tpm2-00.permall",
        }
    }
}

impl fmt::Display for TpmVersion {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.number())
    }
}

impl TpmStore {
    /// A keyword for notes of snapshots.
    pub fn word(self) -> &'static str {
        match self {
            Self::Folder => "folder",
            Self::Single => "single",
        }
    }
}

impl TpmPlace {
    /// The location of a state that is stored at `path`.
    pub(crate) fn of(store: TpmStore, path: &Path, version: Option<TpmVersion>) -> Self {
        let path = match (store, version) {
            (TpmStore::Single, _) => path.to_owned(),
            (TpmStore::Folder, Some(version)) => path.join(version.file()),
            (TpmStore::Folder, None) => return Self::Unknown("its version is unknown".to_owned()),
        };
        Self::At(TpmFile {
            path,
            store,
            rights: Rights::Own,
        })
    }

    /// Sets the rights of the program that reported the path.
    pub(crate) fn with_rights(self, rights: Rights) -> Self {
        match self {
            Self::At(file) => Self::At(TpmFile { rights, ..file }),
            unknown @ Self::Unknown(_) => unknown,
        }
    }

    /// The file, if known.
    pub fn file(&self) -> Option<&TpmFile> {
        match self {
            Self::At(file) => Some(file),
            Self::Unknown(_) => None,
        }
    }
}

impl TpmFile {
    /// The file that swtpm locks while it runs (`fcntl`, the whole file, for writing). None for a single file: only
    /// later versions lock it, and only if an option requests this.
    pub fn lock(&self) -> Option<PathBuf> {
        match self.store {
            TpmStore::Folder => Some(self.path.with_file_name(".lock")),
            TpmStore::Single => None,
        }
    }
}
