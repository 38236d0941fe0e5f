//! The target of the kernel (LIO) on the same cases as ours: this finds errors of our target and wrong cases. It must be
//! loaded: `make test-kernel`.

#![allow(clippy::print_stdout, reason = "it prints what it leaves out")]

use std::fs::File;
use std::io::Write as _;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::command_cases::{Expect, command_cases};
use crate::initiator::{Data, GOOD, Initiator};
use crate::login_cases::LOGIN_CASES;
use crate::targets::{DATA_END, FRIEND, PRIVATE, Portal, SIZE, TARGET, pattern};
use crate::transport_cases::large_transfers_are_the_same_at;

/// The configuration of LIO is a tree of folders.
const CONFIGURATION: &str = "/sys/kernel/config/target";
/// The serial numbers of the units, which are their names in the configuration, too.
const UNITS: [&str; 3] = ["first", "second", "large"];
/// The initiator for which the second unit is read-only.
const INITIATOR: &str = "iqn.2026-01.org.example:initiator";

/// LIO does not answer some commands.
const PATIENCE: Duration = Duration::from_secs(2);
const ATTENTION_COUNT_MAX: usize = 5;

/// The kernel has one configuration.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// LIO with the targets of [`start`](crate::targets::start). They are removed on drop.
struct Lio {
    address: SocketAddr,
    folder: tempfile::TempDir,
    _turn: MutexGuard<'static, ()>,
}

fn write(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    File::create(path)?.write_all(bytes)
}

fn set(path: &Path, value: &str) {
    write(path, value.as_bytes()).unwrap_or_else(|error| panic!("{value} in {}: {error}", path.display()));
}

fn make(path: &Path) {
    std::fs::create_dir(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
}

fn store(name: &str) -> PathBuf {
    Path::new(CONFIGURATION).join("core/fileio_0").join(name)
}

fn group(target: &str) -> PathBuf {
    Path::new(CONFIGURATION).join("iscsi").join(target).join("tpgt_1")
}

/// The initiators that a target admits.
#[derive(Debug, Clone, Copy)]
enum Admission {
    Everyone,
    /// Only [`FRIEND`].
    Friend,
}

impl Lio {
    /// `None`, with the reason printed, if the kernel has no LIO.
    fn start() -> Option<Self> {
        if !Path::new(CONFIGURATION).exists() {
            println!("skipped: no LIO in this kernel: make test-kernel");
            return None;
        }
        let turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        clear();
        let free = TcpListener::bind("127.0.0.1:0").unwrap();
        let lio = Self {
            address: free.local_addr().unwrap(),
            folder: tempfile::tempdir().unwrap(),
            _turn: turn,
        };
        drop(free);
        for folder in ["core/fileio_0", "iscsi"] {
            std::fs::create_dir_all(Path::new(CONFIGURATION).join(folder)).unwrap();
        }
        for name in UNITS {
            lio.add_store(name);
        }
        lio.add_target(TARGET, &UNITS, Admission::Everyone);
        lio.add_target(PRIVATE, &UNITS[1..2], Admission::Friend);
        Some(lio)
    }

    fn add_store(&self, name: &str) {
        let file = self.folder.path().join(name);
        let mut data: Vec<u8> = (0..DATA_END).map(pattern).collect();
        data.resize(SIZE, 0);
        write(&file, &data).unwrap();
        let store = store(name);
        make(&store);
        let control = format!("fd_dev_name={},fd_dev_size={SIZE},fd_buffered_io=1", file.display());
        set(&store.join("control"), &control);
        set(&store.join("enable"), "1");
        set(&store.join("wwn/vpd_unit_serial"), name);
        for (attribute, value) in [("emulate_tpu", "1"), ("emulate_tpws", "1")] {
            set(&store.join("attrib").join(attribute), value);
        }
        if name == "large" {
            set(&store.join("attrib/block_size"), "4096");
        }
    }

    fn add_target(&self, name: &str, units: &[&str], admission: Admission) {
        let group = group(name);
        make(group.parent().unwrap());
        make(&group);
        make(&group.join("np").join(self.address.to_string()));
        let (initiator, generates_entries) = match admission {
            Admission::Everyone => (INITIATOR, "1"),
            Admission::Friend => (FRIEND, "0"),
        };
        let access = group.join("acls").join(initiator);
        make(&access);
        for (number, unit) in units.iter().enumerate() {
            let lun = format!("lun_{number}");
            make(&group.join("lun").join(&lun));
            symlink(store(unit), group.join("lun").join(&lun).join("unit")).unwrap();
            make(&access.join(&lun));
            symlink(group.join("lun").join(&lun), access.join(&lun).join("unit")).unwrap();
            if *unit == "second" {
                set(&access.join(&lun).join("write_protect"), "1");
            }
        }
        for (attribute, value) in [
            ("authentication", "0"),
            ("generate_node_acls", generates_entries),
            ("demo_mode_write_protect", "0"),
        ] {
            set(&group.join("attrib").join(attribute), value);
        }
        set(&group.join("enable"), "1");
    }

    /// An initiator that is logged in, and has seen the unit attentions.
    fn ready(&self) -> Initiator {
        let mut initiator = Initiator::connect(self);
        initiator.set_patience(PATIENCE);
        // LIO sends empty data without end to an initiator that does not declare the length of its segments.
        let keys = [
            "HeaderDigest=None",
            "ImmediateData=Yes",
            "InitialR2T=No",
            "MaxRecvDataSegmentLength=65536",
        ];
        initiator.log_in(TARGET, &keys);
        for lun in 0..3 {
            let mut states = (0..ATTENTION_COUNT_MAX).map(|_| initiator.command(lun, &[0; 6], Data::None).status);
            assert!(states.any(|status| status == GOOD));
        }
        initiator
    }
}

impl Portal for Lio {
    fn connect(&self) -> UnixStream {
        let stream = TcpStream::connect(self.address).unwrap();
        stream.set_nodelay(true).unwrap();
        // The calls of an initiator are those of any stream socket.
        UnixStream::from(OwnedFd::from(stream))
    }
}

impl Drop for Lio {
    fn drop(&mut self) {
        clear();
    }
}

/// Removes the targets, also those of a process that was killed. What it had not made yet is absent.
fn clear() {
    let remove = |path: PathBuf| std::fs::remove_dir(path).ok();
    let unlink = |path: PathBuf| std::fs::remove_file(path).ok();
    for (target, units, initiator) in [(TARGET, 3, INITIATOR), (PRIVATE, 1, FRIEND)] {
        let group = group(target);
        write(&group.join("enable"), b"0").ok();
        let access = group.join("acls").join(initiator);
        for number in 0..units {
            let lun = format!("lun_{number}");
            unlink(access.join(&lun).join("unit"));
            remove(access.join(&lun));
        }
        remove(access);
        for number in 0..units {
            let lun = group.join("lun").join(format!("lun_{number}"));
            unlink(lun.join("unit"));
            remove(lun);
        }
        let portals = std::fs::read_dir(group.join("np")).into_iter().flatten().flatten();
        for portal in portals {
            remove(portal.path());
        }
        remove(group.clone());
        remove(group.parent().unwrap().to_owned());
    }
    for name in UNITS {
        remove(store(name));
    }
    remove(Path::new(CONFIGURATION).join("core/fileio_0"));
}

/// How LIO of Linux 6.1 answers otherwise.
#[derive(Debug, Clone, Copy)]
enum Difference {
    Answer(Expect),
    /// None in time, or the connection ends.
    Silence,
}

use Difference::{Answer, Silence};
use Expect::{Done, Length, Sense, Starts};

const UNKNOWN: Difference = Answer(Sense(5, 0x2000));
const INVALID_FIELD: Difference = Answer(Sense(5, 0x2400));

/// Commands that LIO answers otherwise.
#[rustfmt::skip]
const COMMAND_DIFFERENCES: &[(&str, Difference)] = &[
    // A command that has no data, from an initiator that is ready to receive some, gets no answer.
    ("READ (10) of no block", Silence),
    ("READ (10) of no block at the end", Silence),
    ("WRITE (10) of no block", Silence),
    ("COMPARE AND WRITE of nothing", Silence),
    ("SYNCHRONIZE CACHE (10)", Silence),
    ("SYNCHRONIZE CACHE (16) of a read-only unit", Silence),
    ("TEST UNIT READY", Silence),
    ("EXTENDED COPY", Silence),
    // Commands that LIO does not have.
    ("PRE-FETCH (10)", UNKNOWN),
    ("PRE-FETCH (10) past the end", UNKNOWN),
    ("PRE-FETCH (16) to the end", UNKNOWN),
    ("VERIFY (12)", UNKNOWN),
    ("ORWRITE", UNKNOWN),
    ("PREVENT ALLOW MEDIUM REMOVAL", UNKNOWN),
    ("REPORT SUPPORTED OPERATION CODES", UNKNOWN),
    ("one operation code", UNKNOWN),
    ("one operation code that is unknown", UNKNOWN),
    ("one operation code that needs an action", UNKNOWN),
    ("one service action", UNKNOWN),
    ("REPORT SUPPORTED TASK MANAGEMENT FUNCTIONS", UNKNOWN),
    ("GET LBA STATUS of data", INVALID_FIELD),
    ("GET LBA STATUS of a hole", INVALID_FIELD),
    ("GET LBA STATUS past the end", INVALID_FIELD),
    // VERIFY compares nothing, and takes the direction of the data from the initiator.
    ("VERIFY (10) of the medium", Answer(Length(51_200))),
    ("VERIFY (10) with other data", Answer(Done)),
    ("VERIFY (10) with one block", INVALID_FIELD),
    ("VERIFY (10) with a reserved check", Answer(Length(512))),
    ("WRITE AND VERIFY (16) with a reserved check", Answer(Done)),
    ("WRITE (10) without data", Answer(Length(512))),
    // The same fault under another name.
    ("WRITE (16) of too many blocks", Answer(Sense(5, 0x2100))),
    ("COMPARE AND WRITE of half the data", Answer(Sense(5, 0x0e03))),
    ("WRITE SAME (16) to a read-only unit", INVALID_FIELD),
    // Less than ours.
    ("WRITE SAME (16) without data", INVALID_FIELD),
    ("MODE SELECT (6)", Answer(Sense(5, 0x2600))),
    ("START STOP UNIT", INVALID_FIELD),
    ("READ CAPACITY (16)", Answer(Starts(&[0, 0, 0, 0, 0, 0, 0x1f, 0xff, 0, 0, 2, 0, 0, 0, 0x80]))),
    // Its own names, lengths and limits.
    ("INQUIRY", Answer(Starts(b"\0\0\x06\x02\x5b\xb8\0\x02LIO-ORG "))),
    ("INQUIRY of page 00", Answer(Starts(&[0, 0, 0, 8, 0, 0x80, 0x83, 0x86, 0xb0, 0xb1, 0xb2, 0xb3]))),
    ("INQUIRY of page 80", Answer(Starts(b"\0\x80\0\x06first\0"))),
    ("INQUIRY of page 83", Answer(Starts(&[0, 0x83, 0, 0x95, 1, 3, 0, 0x10]))),
    ("INQUIRY of page B0", Answer(Starts(&[0, 0xb0, 0, 60, 1, 1, 0, 1]))),
    ("INQUIRY of page B1", Answer(Starts(&[0, 0xb1, 0, 60, 0, 0]))),
    ("INQUIRY of page B2", Answer(Starts(&[0, 0xb2, 0, 4, 0, 0xe0, 0, 0]))),
    ("INQUIRY of page B2 of a read-only unit", Answer(Starts(&[0, 0xb2, 0, 4, 0, 0xe0, 0, 0]))),
    ("MODE SENSE (6)", Answer(Starts(&[0x43, 0, 0x10, 8]))),
    ("REPORT LUNS", Answer(Starts(&[0, 0, 0, 24, 0, 0, 0, 0, 0]))),
    // What SPC-4 requires, and LIO does not: 6.6.1 INQUIRY and 6.39 REQUEST SENSE without a unit, 6.33 REPORT LUNS,
    // and errors for values and pages that there are not.
    ("INQUIRY of no unit", Answer(Sense(5, 0x2500))),
    ("REQUEST SENSE of no unit", Answer(Sense(5, 0x2500))),
    ("REPORT LUNS of no unit", Answer(Sense(5, 0x2500))),
    ("REPORT LUNS with little room", Answer(Length(8))),
    ("REPORT LUNS of an unknown kind", Answer(Length(32))),
    ("MODE SENSE (6) of saved values", Answer(Starts(&[0x43, 0, 0x10, 8]))),
    ("MODE SENSE (6) of an unknown page", Answer(Starts(&[0x17, 0, 0x10, 8]))),
];

/// Logins that LIO answers otherwise.
const LOGIN_DIFFERENCES: &[&str] = &[
    // It asks for what the initiator has not named before it enters the next stage.
    "a login without negotiation",
    "an unknown key",
    "obsolete keys",
    // Its own limits, and CHAP before None.
    "a login in the operational stage",
    "a login that stays in the security stage",
    "a discovery",
    "all operational keys",
    // Other words and numbers for a refusal.
    "a key of the full feature phase",
    "a key that does not matter for discovery",
    "a value outside of its range",
    "a target that does not exist",
    "a session type that is unknown",
    "CHAP that was not agreed on",
    "a transition backwards",
    "a transition to a stage that does not exist",
    "a login that begins in the full feature phase",
    "a request that is continued and final",
    // It closes the connection without an answer.
    "text without a value",
    "only an unknown authentication method",
    // What RFC 7143 requires, and LIO does not: 13.21 a session is normal by default, 6.1 a key is sent once.
    "a login without a session type",
    "a key twice",
];

/// What a step with an initiator returns. None if it gets no answer.
fn answer_of<T>(step: impl FnOnce() -> T) -> Option<T> {
    catch_unwind(AssertUnwindSafe(step)).ok()
}

#[test]
fn lio_answers_the_same_commands() {
    let Some(lio) = Lio::start() else { return };
    let mut initiator = lio.ready();
    let mut wrong = Vec::new();
    for case in command_cases() {
        println!("{}", case.name);
        let mut listed = COMMAND_DIFFERENCES.iter().filter(|(name, _)| *name == case.name);
        let Some(answer) = answer_of(|| case.run(&mut initiator)) else {
            initiator = lio.ready();
            if !listed.any(|(_, difference)| matches!(difference, Silence)) {
                wrong.push(format!("{}: no answer", case.name));
            }
            continue;
        };
        let is_allowed = |(_, difference): &(&str, Difference)| match difference {
            Answer(expect) => case.check(&answer, *expect).is_ok(),
            Silence => false,
        };
        if let Err(reason) = case.check(&answer, case.expect)
            && !listed.any(is_allowed)
        {
            wrong.push(format!("{}: {reason}", case.name));
        }
    }
    assert!(wrong.is_empty(), "{} commands:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn lio_answers_the_same_logins() {
    let Some(lio) = Lio::start() else { return };
    let mut wrong = Vec::new();
    for case in LOGIN_CASES {
        println!("{}", case.name);
        let mut initiator = Initiator::connect(&lio);
        initiator.set_patience(PATIENCE);
        let result = answer_of(|| case.check(&mut initiator));
        if let Err(reason) = result.unwrap_or_else(|| Err("no answer".to_owned()))
            && !LOGIN_DIFFERENCES.contains(&case.name)
        {
            wrong.push(format!("{}: {reason}", case.name));
        }
    }
    assert!(wrong.is_empty(), "{} logins:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn lio_takes_large_transfers_like_ours() {
    let Some(lio) = Lio::start() else { return };
    large_transfers_are_the_same_at(&lio);
}

#[test]
fn every_listed_difference_of_lio_belongs_to_a_case() {
    let commands: Vec<_> = command_cases().into_iter().map(|case| case.name).collect();
    for (name, _) in COMMAND_DIFFERENCES {
        assert!(commands.contains(name), "{name}");
    }
    for name in LOGIN_DIFFERENCES {
        assert!(LOGIN_CASES.iter().any(|case| case.name == *name), "{name}");
    }
}
