//! The state of an emulated TPM, which belongs to the instant.
//!
//! It is read from swtpm's file, and swtpm is not asked: a machine that is paused has nothing more to say to it, and what it has
//! answered is in the file. swtpm puts a new file into the place of the old one; configured to keep a backup of it (`--tpmstate ...,backup`,
//! swtpm 0.11), or to have a single file, it writes into the file itself. So the bytes are believed only when they are whole: as long as
//! their header says, or twice the same.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::PathBuf;
use std::time::Duration;

use holdfast_block::Clock;
use holdfast_host::{Description, Links, MachineState, Rights, TpmFile, TpmPlace, TpmStore};

use crate::job::Progress;
use crate::notes::{NOTE_PATH, NOTE_TPM_STORE, NOTE_TPM_VERSION};

/// Bytes of a state, at most. That of a TPM 2.0 is some ten KiB, of which its guest can fill 128.
const STATE_BYTES_MAX: u64 = 16 << 20;
/// The header of a file in a folder: version and least version (1 byte each), its own size and flags (2 each), bytes of the whole
/// file (4); big-endian. Source: `blobheader` in swtpm's `swtpm_nvstore.c`.
const HEADER_BYTES: usize = 10;
/// How often a file is read that is just being written, and how long is waited in between: the machine is paused meanwhile.
const ATTEMPT_COUNT: u32 = 20;
const ATTEMPT_INTERVAL: Duration = Duration::from_millis(2);

/// What was found of a TPM's state.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) enum TpmFound {
    /// The machine has no emulated TPM.
    #[default]
    NoTpm,
    /// This.
    State(TpmState),
    /// Nothing yet, in words: a machine that never ran has none.
    NotYet(String),
    /// Nothing that could be kept, and why.
    NotKept(String),
}

/// The state of a TPM, as swtpm keeps it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TpmState {
    pub(crate) bytes: Vec<u8>,
    pub(crate) notes: BTreeMap<String, String>,
}

impl TpmFound {
    /// The state; warns where it was not found.
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

/// Why there are no bytes.
enum Missing {
    NoFile,
    Unfit(String),
}

/// The state of a machine's TPM, while the machine is paused.
///
/// Where the machine is another user's, that user's rights count. Otherwise they are those of the swtpm that has named the file.
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
            // It has another name for a moment where swtpm keeps a backup of it.
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

/// Whether a file of a folder is as long as it says of itself.
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

    /// A file as swtpm writes it.
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

    /// What is not the whole state is none: a snapshot must not bring back half of one.
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

    /// An swtpm that keeps a backup writes into the file itself: its clock is that of a writer here.
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
