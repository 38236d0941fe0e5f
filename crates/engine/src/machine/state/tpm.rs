//! The state of an emulated TPM at the point in time.
//!
//! It is read from swtpm's file without asking swtpm: a paused machine sends no more requests, and the results of all
//! earlier ones are in the file. swtpm replaces the file with a new one. If it is configured to keep a backup
//! (`--tpmstate ...,backup`, swtpm 0.11), or to use a single file, it writes into the file itself. So the content is
//! accepted only if it is complete: it has the length in its header, or two reads returned the same.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::PathBuf;
use std::time::Duration;

use holdfast_block::{Clock, error_text};
use holdfast_host::{Description, Links, Machine, MachineState, Rights, TpmFile, TpmPlace, TpmStore};

use crate::job::Progress;
use crate::notes::{NOTE_PATH, NOTE_TPM_STORE, NOTE_TPM_VERSION};

/// The maximum size of a state in bytes. The state of a TPM 2.0 has some ten KiB; its guest can fill 128 KiB.
const STATE_BYTES_MAX: u64 = 16 << 20;
/// The header of a file in a folder: version and minimum version (1 byte each), its own size and flags (2 each), size
/// of the whole file in bytes (4); big-endian. Source: `blobheader` in swtpm's `swtpm_nvstore.c`.
const HEADER_BYTES: usize = 10;
/// How often a file that is being written is read again, and the interval: the machine is paused meanwhile.
const ATTEMPT_COUNT: u32 = 20;
const ATTEMPT_INTERVAL: Duration = Duration::from_millis(2);

/// The result of reading a TPM's state.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) enum TpmFound {
    /// The machine has no emulated TPM.
    #[default]
    NoTpm,
    /// The state.
    State(TpmState),
    /// There is no state yet, for example because the machine never ran; the reason as text.
    NotYet(String),
    /// The state could not be read; the reason as text.
    NotKept(String),
}

/// The state of a TPM, as swtpm stores it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TpmState {
    pub(crate) bytes: Vec<u8>,
    pub(crate) notes: BTreeMap<String, String>,
}

impl TpmFound {
    /// Returns the state; warns if it is missing.
    pub(crate) fn or_warn(self, progress: &dyn Progress) -> Option<TpmState> {
        match self {
            Self::State(state) => return Some(state),
            Self::NoTpm => {}
            Self::NotYet(what) => progress.note(&what),
            Self::NotKept(what) => progress.warning(&what),
        }
        None
    }
}

/// The state of the TPM of a machine that is shut off.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoppedTpm {
    /// How swtpm stores it.
    pub store: TpmStore,
    /// The content of its file.
    pub bytes: Vec<u8>,
}

impl StoppedTpm {
    /// Reads the state of a machine; none if the machine has no TPM, or one that was never used.
    ///
    /// # Errors
    /// As text: why the state cannot be read.
    pub fn read(machine: &dyn Machine, clock: &dyn Clock) -> Result<Option<Self>, String> {
        let description = machine.describe().map_err(|error| error_text(&error))?;
        match read(&description, &machine.rights(), clock) {
            TpmFound::NoTpm | TpmFound::NotYet(_) => Ok(None),
            TpmFound::NotKept(reason) => Err(reason),
            TpmFound::State(state) => {
                let place = description.tpm.map(|tpm| tpm.place);
                let store = place.as_ref().and_then(TpmPlace::file).map(|file| file.store);
                Ok(store.map(|store| Self {
                    store,
                    bytes: state.bytes,
                }))
            }
        }
    }
}

/// Why the state could not be read.
enum Missing {
    NoFile,
    Unfit(String),
}

/// Reads the state of a machine's TPM, while the machine is paused.
///
/// If the machine belongs to another user, the file is read with that user's rights, otherwise with those of the user
/// of the swtpm that named the file.
pub(crate) fn read(description: &Description, rights: &Rights, clock: &dyn Clock) -> TpmFound {
    let Some(tpm) = &description.tpm else {
        return TpmFound::NoTpm;
    };
    let file = match &tpm.place {
        TpmPlace::At(file) => file,
        TpmPlace::Unknown(why) => return TpmFound::NotKept(format!("the state of its TPM is not kept: {why}")),
    };
    let path = file.path.display();
    let rights = match rights.other_user() {
        Some(_) => rights,
        None => &file.rights,
    };
    match read_whole(file, rights, clock) {
        Ok(bytes) => {
            let mut notes = BTreeMap::from([
                (NOTE_PATH.to_owned(), path.to_string()),
                (NOTE_TPM_STORE.to_owned(), file.store.word().to_owned()),
            ]);
            notes.extend(
                tpm.version
                    .map(|version| (NOTE_TPM_VERSION.to_owned(), version.to_string())),
            );
            TpmFound::State(TpmState { bytes, notes })
        }
        Err(Missing::NoFile) if description.summary.state == MachineState::ShutOff => TpmFound::NotYet(format!(
            "its TPM has no state, as that of a machine that never ran: there is no {path}"
        )),
        Err(Missing::NoFile) => TpmFound::NotKept(format!(
            "the state of its TPM is not kept: there is no {path}, where it should be"
        )),
        Err(Missing::Unfit(why)) => TpmFound::NotKept(format!("the state of its TPM is not kept: {path}: {why}")),
    }
}

fn read_whole(file: &TpmFile, rights: &Rights, clock: &dyn Clock) -> Result<Vec<u8>, Missing> {
    let mut before = None;
    for attempt in 0..ATTEMPT_COUNT {
        if attempt > 0 {
            clock.sleep(ATTEMPT_INTERVAL);
        }
        match read_once(file, rights) {
            Ok(bytes) if file.store == TpmStore::Folder && is_whole(&bytes) => return Ok(bytes),
            Ok(bytes) if file.store == TpmStore::Single && before.as_ref() == Some(&bytes) => return Ok(bytes),
            Ok(bytes) => before = Some(bytes),
            // swtpm renames the file for a moment if it keeps a backup.
            Err(Missing::NoFile) if backup_of(file).exists() => {}
            Err(error) => return Err(error),
        }
    }
    Err(Missing::Unfit("it is no whole state of a TPM".to_owned()))
}

fn backup_of(file: &TpmFile) -> PathBuf {
    let mut name = file.path.clone().into_os_string();
    name.push(".bak");
    name.into()
}

/// The folder belongs to the user of swtpm: links out of it are not followed, and a pipe or socket is not opened.
fn read_once(file: &TpmFile, rights: &Rights) -> Result<Vec<u8>, Missing> {
    let read = rights.read(&file.path, STATE_BYTES_MAX, Links::Refuse);
    read.map_err(|error| match error.kind() {
        ErrorKind::NotFound => Missing::NoFile,
        _ => Missing::Unfit(error.to_string()),
    })
}

/// Whether a file of a folder has the length in its header.
pub(crate) fn is_whole(bytes: &[u8]) -> bool {
    let Some(header) = bytes.first_chunk::<HEADER_BYTES>() else {
        return false;
    };
    let [_, _, _, _, _, _, length @ ..] = *header;
    u64::from(u32::from_be_bytes(length)) == bytes.len() as u64
}

#[cfg(test)]
mod tests {
    use crate::notes::{NOTE_PATH, NOTE_TPM_STORE, NOTE_TPM_VERSION};
    use std::path::Path;

    use holdfast_block::{Clock, ManualClock};
    use holdfast_host::{
        BackupMark, Description, MachineState, MachineSummary, Rights, Tpm, TpmFile, TpmPlace, TpmStore, TpmVersion,
    };

    use super::{STATE_BYTES_MAX, TpmFound, is_whole, read};

    fn machine(state: MachineState, path: &Path, store: TpmStore) -> Description {
        Description {
            summary: MachineSummary {
                name: "web1".to_owned(),
                uuid: "u".to_owned(),
                state,
            },
            disks: Vec::new(),
            nvram: None,
            tpm: Some(Tpm {
                version: Some(TpmVersion::V2),
                place: TpmPlace::At(TpmFile {
                    path: path.to_owned(),
                    store,
                    rights: Rights::Own,
                }),
            }),
            has_agent_channel: false,
            mark: BackupMark::default(),
        }
    }

    /// A file in swtpm's format.
    fn state(length: u32) -> Vec<u8> {
        let mut bytes = vec![2, 1, 0, 10, 0, 0];
        bytes.extend(length.to_be_bytes());
        bytes.resize(usize::try_from(length).unwrap(), 7);
        bytes
    }

    fn write(path: &Path, bytes: &[u8]) {
        std::io::Write::write_all(&mut std::fs::File::create(path).unwrap(), bytes).unwrap();
    }

    fn why(found: TpmFound) -> String {
        match found {
            TpmFound::NotKept(why) => why,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_whole_state_is_kept_with_what_is_known_of_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tpm2-00.permall");
        for store in [TpmStore::Folder, TpmStore::Single] {
            write(&path, &state(6000));
            let TpmFound::State(found) = read(
                &machine(MachineState::Running, &path, store),
                &Rights::Own,
                &ManualClock::new(),
            ) else {
                panic!("it is there");
            };
            assert_eq!(found.bytes, state(6000));
            assert_eq!(found.notes[NOTE_PATH], path.display().to_string());
            assert_eq!(found.notes[NOTE_TPM_VERSION], "2.0");
            assert_eq!(found.notes[NOTE_TPM_STORE], store.word());
        }
    }

    /// An incomplete state is not stored: a snapshot must not restore half of one.
    #[test]
    fn what_is_no_whole_state_is_not_kept_and_nothing_is_waited_for_forever() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tpm2-00.permall");
        let found = || {
            read(
                &machine(MachineState::Paused, &path, TpmStore::Folder),
                &Rights::Own,
                &ManualClock::new(),
            )
        };
        assert!(why(found()).contains("there is no"), "{:?}", found());
        let off = machine(MachineState::ShutOff, &path, TpmStore::Folder);
        assert!(matches!(
            read(&off, &Rights::Own, &ManualClock::new()),
            TpmFound::NotYet(_)
        ));
        for length in [0, 9, 5999] {
            write(&path, &state(6000)[..length]);
            assert!(why(found()).contains("no whole state"), "{length}");
        }
        write(&path, &vec![0; usize::try_from(STATE_BYTES_MAX).unwrap() + 1]);
        assert!(why(found()).contains("more than"));
        std::fs::remove_file(&path).unwrap();
        let secret = folder.path().join("secret");
        write(&secret, &state(100));
        std::os::unix::fs::symlink(&secret, &path).unwrap();
        assert!(why(found()).contains("symbolic link"));
        std::fs::remove_file(&path).unwrap();
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &path,
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RWXU,
            0,
        )
        .unwrap();
        assert!(why(found()).contains("not a regular file"));
        let mut without = machine(MachineState::Running, &path, TpmStore::Folder);
        without.tpm.as_mut().unwrap().place = TpmPlace::Unknown("because".to_owned());
        assert!(why(read(&without, &Rights::Own, &ManualClock::new())).ends_with("not kept: because"));
    }

    /// An swtpm that keeps a backup writes into the file itself: here the clock simulates such a writer.
    #[test]
    fn a_state_that_is_just_being_written_is_waited_for() {
        struct Writer<'p>(&'p Path, std::sync::Mutex<u32>);
        impl Clock for Writer<'_> {
            fn now(&self) -> std::time::Duration {
                std::time::Duration::ZERO
            }

            fn sleep(&self, _duration: std::time::Duration) {
                let mut step = self.1.lock().unwrap();
                *step += 1;
                write(self.0, &state(6000)[..usize::try_from(*step * 1500).unwrap()]);
            }
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tpm2-00.permall");
        write(&folder.path().join("tpm2-00.permall.bak"), &state(5000));
        let clock = Writer(&path, std::sync::Mutex::new(0));
        let TpmFound::State(found) = read(
            &machine(MachineState::Running, &path, TpmStore::Folder),
            &Rights::Own,
            &clock,
        ) else {
            panic!("it comes");
        };
        assert!(is_whole(&found.bytes) && found.bytes == state(6000));
        assert_eq!(*clock.1.lock().unwrap(), 4);
    }
}
