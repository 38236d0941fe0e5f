//! The target's parsers for fuzzing; see [`holdfast_block::hostile`].

use std::cell::Cell;
use std::sync::Arc;

use holdfast_block::MemoryDevice;
use holdfast_block::hostile::Outcome;

use super::frames::{Frames, SequenceNumbers};
use super::login::{
    Authentication, CHALLENGE_BYTES, ChallengeSeed, ChapSecret, ChapUser, LOGIN_DIGESTS, LOGIN_SEGMENT_BYTES, Login,
    LoginContext, LoginProgress, Parameters, Unsolicited,
};
use super::nexus::{InitiatorPort, Nexus};
use super::pdu::{Digest, Digests, Header, NO_TAG, Parsed, parse};
use super::scsi::{LogicalUnit, UnitOptions};
use super::session::{Exchange, Queued, SessionInfo, Step, TargetDirectory, TargetSession};
use super::target::{InitiatorAccess, Target};
use super::target_set::TargetSet;
use super::text;
use crate::server::budget::Budget;
use crate::server::export_device::ExportDevice;

const NAME: &str = "iqn.2026-01.org.example:disk";
const SIZE_BYTES: u64 = 128 << 10;
const WINDOW: u32 = 8;

fn targets() -> Arc<TargetSet> {
    let unit = |device: ExportDevice| LogicalUnit::new(device, UnitOptions::new("serial"));
    let device = || Arc::new(MemoryDevice::new(SIZE_BYTES));
    let units = vec![
        unit(ExportDevice::Writable(device())),
        unit(ExportDevice::ReadOnly(device())),
    ];
    let target = Target::new(NAME, InitiatorAccess::Anyone, units).expect("the name is valid");
    Arc::new(TargetSet::new([target]))
}

fn authentication(choice: u8) -> Authentication {
    let user = |name: &str| ChapUser {
        name: name.to_owned(),
        secret: ChapSecret::new(name.as_bytes()).expect("the name is long enough"),
    };
    match choice % 2 {
        0 => Authentication::None,
        _ => Authentication::Chap {
            users: vec![user("an initiator")],
            target: Some(user("the only target")),
        },
    }
}

fn first_numbers() -> SequenceNumbers {
    SequenceNumbers {
        status: 1,
        expected_command: 0,
        command_count: 0,
        window: WINDOW,
    }
}

/// The requests of a login. The first byte chooses whether CHAP is required.
pub(crate) fn login(bytes: &[u8]) -> Outcome {
    let Some((first, mut bytes)) = bytes.split_first() else {
        return Outcome::Refused;
    };
    let targets = targets();
    let authentication = authentication(*first);
    let context = LoginContext {
        targets: &targets.list(),
        authentication: &authentication,
        has_session: &|handle| handle == 7,
        new_session: &|| Some(1),
        seed: ChallengeSeed {
            identifier: 1,
            challenge: [2; CHALLENGE_BYTES],
        },
    };
    let mut login = Login::new();
    let mut numbers = first_numbers();
    while let Parsed::Pdu(pdu, length) = parse(bytes, LOGIN_DIGESTS, LOGIN_SEGMENT_BYTES) {
        let mut frames = Frames::new(LOGIN_DIGESTS);
        let progress = login.step(&pdu, &context, &mut numbers, &mut frames);
        frames.stamp(&mut numbers);
        assert!(
            frames.len() < 2 * LOGIN_SEGMENT_BYTES,
            "the answer is out of proportion"
        );
        check_pdus(frames.as_ref(), LOGIN_DIGESTS);
        bytes = bytes.get(length..).unwrap_or_default();
        match progress {
            LoginProgress::Continue => {}
            LoginProgress::Complete(logged_in) => {
                let is_open = matches!(authentication, Authentication::None);
                assert!(is_open || first % 2 == 1, "a login without authentication");
                assert_eq!(logged_in.session_handle, 1);
                return Outcome::Decoded;
            }
            LoginProgress::Failed(_) => return Outcome::Refused,
        }
    }
    Outcome::Refused
}

/// The PDUs of a session. The first byte chooses digests and whether unsolicited data is allowed.
pub(crate) fn session(bytes: &[u8]) -> Outcome {
    let Some((first, mut bytes)) = bytes.split_first() else {
        return Outcome::Refused;
    };
    let digest = |bit: u8| if first & bit == 0 { Digest::None } else { Digest::Crc32c };
    let unsolicited = |bit: u8| {
        if first & bit == 0 {
            Unsolicited::Allowed
        } else {
            Unsolicited::Forbidden
        }
    };
    let parameters = Parameters {
        digests: Digests {
            header: digest(1),
            data: digest(2),
        },
        unsolicited: unsolicited(4),
        immediate: unsolicited(8),
        send_segment_bytes: 4096,
        first_burst_bytes: 8192,
        max_burst_bytes: 16_384,
        outstanding_transfer_count: 2,
    };
    let mut driver = SessionDriver::new(parameters);
    loop {
        match parse(bytes, parameters.digests, 16_384) {
            Parsed::Incomplete | Parsed::Malformed(_) => return Outcome::Refused,
            Parsed::Pdu(pdu, length) => {
                let step = driver.session.receive(&pdu, &mut driver.queue());
                if !driver.take(step) {
                    return Outcome::Decoded;
                }
                bytes = bytes.get(length..).unwrap_or_default();
                if bytes.is_empty() {
                    return Outcome::Decoded;
                }
            }
        }
    }
}

/// A session that executes its commands at once.
struct SessionDriver {
    session: TargetSession,
    parameters: Parameters,
    budget: Arc<Budget>,
    /// The highest command number that the initiator may use: it never decreases.
    command_max: Cell<u32>,
}

impl SessionDriver {
    fn new(parameters: Parameters) -> Self {
        let targets = targets();
        let info = Arc::new(SessionInfo {
            nexus: Nexus {
                id: 1,
                port: InitiatorPort {
                    name: "iqn.2026-01.org.example:initiator".to_owned(),
                    session_id: [0; 6],
                },
            },
            target: targets.list().first().cloned(),
        });
        let exchange = Arc::new(Exchange::new(first_numbers()));
        let directory = TargetDirectory {
            targets,
            portal: "127.0.0.1:3260".to_owned(),
        };
        Self {
            session: TargetSession::new(info, exchange, parameters, 0, directory),
            parameters,
            budget: Arc::new(Budget::new(64 << 10)),
            command_max: Cell::new(WINDOW - 1),
        }
    }

    /// Checks each response.
    fn queue(&self) -> impl FnMut(Queued) + use<> {
        let digests = self.parameters.digests;
        move |queued| {
            let (Queued::OfTask(frames) | Queued::Own(frames)) = queued;
            check_pdus(frames.as_ref(), digests);
        }
    }

    /// Executes what a step wants. Returns whether the session continues.
    fn take(&mut self, mut step: Step) -> bool {
        loop {
            match step {
                Step::Continue => {}
                Step::Execute(task) => {
                    let (frames, error) = task.run(&self.session.info);
                    assert!(
                        error.is_none(),
                        "memory has no errors, and commands stay on the unit: {error:?}"
                    );
                    let exchange = Arc::clone(&self.session.exchange);
                    exchange.complete(task.command.task_tag, frames, &mut self.queue());
                }
                Step::LoggedOut | Step::TargetReset | Step::Malformed(_) => return false,
            }
            let max = self.session.exchange.numbers().command_max();
            let advance = max.wrapping_sub(self.command_max.replace(max));
            assert!(advance < 1 << 16, "the window shrinks");
            let Some(wanted) = self.session.wanted_memory() else {
                return true;
            };
            let Some(lease) = self.budget.try_take(crate::stream::Origin::Unknown, wanted.bytes) else {
                assert!(self.session.holds_memory(), "all memory is lost");
                return true;
            };
            step = self.session.grant(wanted.task_tag, lease, &mut self.queue());
        }
    }
}

/// Checks that an initiator can parse responses.
fn check_pdus(mut bytes: &[u8], digests: Digests) {
    while !bytes.is_empty() {
        let Parsed::Pdu(pdu, length) = parse(bytes, digests, 64 << 20) else {
            unreachable!("it is no PDU");
        };
        assert!(pdu.is_data_intact && pdu.header.opcode() >= 0x20);
        bytes = bytes.get(length..).unwrap_or_default();
    }
}

/// Valid bytes: name of the parser, name of the seed, bytes.
pub(crate) fn seeds() -> Vec<(&'static str, &'static str, Vec<u8>)> {
    vec![
        ("iscsi_login", "plain", login_seed()),
        ("iscsi_login", "chap", chap_seed()),
        ("iscsi_session", "commands", session_seed(0)),
        ("iscsi_session", "requested", session_seed(12)),
    ]
}

fn pdu(opcode: u8, flags: u8, number: u32, data: &[u8]) -> Vec<u8> {
    let mut header = Header::response(opcode, flags, number + 1);
    header.set_u32(24, number);
    header.set_data_bytes(data.len());
    let mut bytes = header.0.to_vec();
    bytes.extend(data);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

fn login_seed() -> Vec<u8> {
    let text = format!("InitiatorName=iqn.i\0TargetName={NAME}\0AuthMethod=None\0");
    let mut bytes = vec![0];
    bytes.extend(pdu(0x43, 0x81, 0, text.as_bytes()));
    bytes.extend(pdu(0x43, 0x04, 0, b"HeaderDigest=None\0MaxBurstLength=262144\0"));
    bytes.extend(pdu(0x43, 0x87, 0, b"InitialR2T=No\0"));
    bytes
}

fn chap_seed() -> Vec<u8> {
    let names = format!("InitiatorName=iqn.i\0TargetName={NAME}\0AuthMethod=CHAP\0");
    let mut bytes = vec![1];
    bytes.extend(pdu(0x43, 0x00, 0, names.as_bytes()));
    bytes.extend(pdu(0x43, 0x00, 0, b"CHAP_A=7,5\0"));
    let message = [&[1], &b"an initiator"[..], &[2; CHALLENGE_BYTES]].concat();
    let digest = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, &message);
    let response = text::to_hexadecimal(digest.as_ref());
    let answer = format!("CHAP_N=an initiator\0CHAP_R={response}\0CHAP_I=1\0CHAP_C=0x0102\0");
    bytes.extend(pdu(0x43, 0x83, 0, answer.as_bytes()));
    bytes
}

fn session_seed(first: u8) -> Vec<u8> {
    let mut bytes = vec![first];
    let command = |flags: u8, number: u32, length: u32, cdb: &[u8], data: &[u8]| {
        let mut pdu = pdu(0x01, flags, number, data);
        let fields = [length.to_be_bytes().as_slice(), &number.to_be_bytes()].concat();
        pdu.splice(20..28, fields);
        pdu.splice(32..32 + cdb.len(), cdb.iter().copied());
        pdu
    };
    let out = vec![7; 1024];
    bytes.extend(command(0xc0, 0, 96, &[0x12, 0, 0, 0, 96, 0], &[]));
    bytes.extend(command(0xc0, 1, 8192, &[0x28, 0, 0, 0, 0, 8, 0, 0, 16, 0], &[]));
    if first == 0 {
        bytes.extend(command(0xa0, 2, 1024, &[0x2a, 0, 0, 0, 0, 8, 0, 0, 2, 0], &out));
    } else {
        bytes.extend(command(0xa0, 2, 1024, &[0x2a, 0, 0, 0, 0, 8, 0, 0, 2, 0], &[]));
        let mut data = pdu(0x05, 0x80, 2, &out);
        data.splice(20..28, [0; 8]);
        bytes.extend(data);
    }
    bytes.extend(command(0xa0, 3, 24, &[0x42, 0, 0, 0, 0, 0, 0, 0, 24, 0], &[0; 24]));
    bytes.extend(command(0xc0, 4, 512, &[0xa3, 0x0c, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0], &[]));
    bytes.extend(command(0xa0, 5, 24, &[0x5f, 6, 0, 0, 0, 0, 0, 0, 24, 0], &[1; 24]));
    let mut text = pdu(0x04, 0x80, 6, b"SendTargets=All\0");
    text.splice(20..24, NO_TAG.to_be_bytes());
    bytes.extend(text);
    bytes.extend(pdu(0x02, 0x85, 7, &[]));
    bytes.extend(pdu(0x06, 0x80, 8, &[]));
    bytes
}
