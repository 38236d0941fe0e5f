//! Emulated TPMs: where swtpm keeps their state, and in which file.
//!
//! swtpm has up to three kinds of state. Only the permanent one is of a machine that is switched off: keys, counters and everything
//! else that the guest put into the TPM's memory, also what `TPM2_Shutdown` leaves for the next start. It is one file, which swtpm
//! replaces as a whole (a file of another name, then a rename) before it answers the command that changed it. The other two belong to a
//! machine that is on (`volatilestate`), or asleep with a TPM 1.2 (`savestate`): QEMU has swtpm forget the first when a machine starts, a
//! TPM that is started anew forgets the second, and both are in QEMU's own stream of a machine's memory. `.lock` is only locked.
//!
//! Source: swtpm 0.7.1 and 0.10, `src/swtpm/swtpm_nvstore*.c`; libvirt 9.0, `src/qemu/qemu_tpm.c`.

use std::fmt;
use std::path::{Path, PathBuf};

use crate::system::rights::Rights;

/// An emulated TPM of a machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tpm {
    /// Which one it is, where that is known.
    pub version: Option<TpmVersion>,
    /// Where its state is.
    pub place: TpmPlace,
}

/// Which specification a TPM follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TpmVersion {
    /// 1.2
    V1,
    /// 2.0
    V2,
}

/// Where the state of a TPM is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TpmPlace {
    /// In a file of this host, which need not be there yet: swtpm makes it when the machine starts.
    At(TpmFile),
    /// Unknown, for the reason in the text.
    Unknown(String),
}

/// A file with the state of a TPM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TpmFile {
    /// The file.
    pub path: PathBuf,
    /// How swtpm keeps it.
    pub store: TpmStore,
    /// The rights of the swtpm that has named it; the machine's where its configuration did.
    pub rights: Rights,
}

/// How swtpm keeps the state of a TPM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TpmStore {
    /// In a folder of the machine's own: a file for each kind of state.
    Folder,
    /// All kinds in a single file, which is changed in place.
    Single,
}

impl TpmVersion {
    /// From its number in a configuration.
    pub fn from_number(number: &str) -> Option<Self> {
        match number {
            "1.2" => Some(Self::V1),
            "2.0" => Some(Self::V2),
            _ => None,
        }
    }

    /// Its number.
    pub fn number(self) -> &'static str {
        match self {
            Self::V1 => "1.2",
            Self::V2 => "2.0",
        }
    }

    /// What libvirt calls the folder of such a state, below one that is called like the machine's UUID.
    #[cfg(any(feature = "libvirt", test))]
    pub(crate) fn folder(self) -> &'static str {
        match self {
            Self::V1 => "tpm1.2",
            Self::V2 => "tpm2",
        }
    }

    /// What swtpm calls the file of the permanent state in its folder.
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
    /// A word for notes of snapshots.
    pub fn word(self) -> &'static str {
        match self {
            Self::Folder => "folder",
            Self::Single => "single",
        }
    }
}

impl TpmPlace {
    /// The state of a TPM that is kept at `path` so.
    pub(crate) fn of(store: TpmStore, path: &Path, version: Option<TpmVersion>) -> Self {
        let path = match (store, version) {
            (TpmStore::Single, _) => path.to_owned(),
            (TpmStore::Folder, Some(version)) => path.join(version.file()),
            (TpmStore::Folder, None) => return Self::Unknown("nothing says which version it is of".to_owned()),
        };
        Self::At(TpmFile {
            path,
            store,
            rights: Rights::Own,
        })
    }

    /// The same, named by a program with these rights.
    pub(crate) fn with_rights(self, rights: Rights) -> Self {
        match self {
            Self::At(file) => Self::At(TpmFile { rights, ..file }),
            unknown @ Self::Unknown(_) => unknown,
        }
    }

    /// The file, where it is known.
    pub fn file(&self) -> Option<&TpmFile> {
        match self {
            Self::At(file) => Some(file),
            Self::Unknown(_) => None,
        }
    }
}

impl TpmFile {
    /// What swtpm locks as long as it runs (`fcntl`, the whole file, for writing); none for a single file, which only later
    /// versions lock, and only when told to.
    pub fn lock(&self) -> Option<PathBuf> {
        match self.store {
            TpmStore::Folder => Some(self.path.with_file_name(".lock")),
            TpmStore::Single => None,
        }
    }
}
