//! Logins, legal or not, and the required answers, as data.

use holdfast_serve::iscsi::{Authentication, ChapSecret, ChapUser};

use crate::initiator::{Data, Initiator, RawPdu};
use crate::targets::{FRIEND, PRIVATE, TARGET, TestTarget, start};

/// A login by one request: its stage flags, its text with `|` for zero bytes, and the status with a part of the answer.
pub(crate) struct LoginCase {
    pub(crate) name: &'static str,
    flags: u8,
    text: &'static str,
    status: u16,
    answer: &'static [&'static str],
}

const fn case(
    name: &'static str,
    flags: u8,
    text: &'static str,
    status: u16,
    answer: &'static [&'static str],
) -> LoginCase {
    LoginCase {
        name,
        flags,
        text,
        status,
        answer,
    }
}

#[rustfmt::skip]
pub(crate) const LOGIN_CASES: &[LoginCase] = &[
    case("a login in the operational stage", 0x87, "InitiatorName=iqn.i|SessionType=Normal|TargetName=TARGET|", 0,
         &["TargetPortalGroupTag=1", "MaxRecvDataSegmentLength=262144"]),
    case("a login without a session type", 0x87, "InitiatorName=iqn.i|TargetName=TARGET|", 0, &["TargetPortalGroupTag=1"]),
    case("a login without negotiation", 0x83, "InitiatorName=iqn.i|SessionType=Normal|TargetName=TARGET|AuthMethod=None|", 0, &["AuthMethod=None"]),
    case("a login that stays in the security stage", 0x00, "InitiatorName=iqn.i|SessionType=Normal|TargetName=TARGET|AuthMethod=CHAP,None|", 0, &["AuthMethod=None"]),
    case("a login that enters the operational stage", 0x81, "InitiatorName=iqn.i|SessionType=Normal|TargetName=TARGET|AuthMethod=None|", 0, &["AuthMethod=None"]),
    case("a discovery", 0x87, "InitiatorName=iqn.i|SessionType=Discovery|", 0, &["MaxRecvDataSegmentLength=262144"]),
    case("all operational keys", 0x87,
         "InitiatorName=iqn.i|SessionType=Normal|TargetName=TARGET|HeaderDigest=CRC32C,None|DataDigest=None|MaxConnections=4|InitialR2T=Yes|ImmediateData=No|MaxBurstLength=262144|FirstBurstLength=65536|DefaultTime2Wait=2|DefaultTime2Retain=20|MaxOutstandingR2T=16|DataPDUInOrder=Yes|DataSequenceInOrder=Yes|ErrorRecoveryLevel=2|MaxRecvDataSegmentLength=65536|",
         0, &["HeaderDigest=CRC32C", "DataDigest=None", "MaxConnections=1", "InitialR2T=Yes", "ImmediateData=No", "MaxBurstLength=262144", "FirstBurstLength=65536", "DefaultTime2Wait=2", "DefaultTime2Retain=0", "MaxOutstandingR2T=8", "DataPDUInOrder=Yes", "DataSequenceInOrder=Yes", "ErrorRecoveryLevel=0"]),
    case("an unknown key", 0x87, "InitiatorName=iqn.i|SessionType=Normal|TargetName=TARGET|X-org.example.a=1|", 0, &["X-org.example.a=NotUnderstood"]),
    case("obsolete keys", 0x87, "InitiatorName=iqn.i|SessionType=Normal|TargetName=TARGET|IFMarker=Yes|OFMarkInt=1~2|", 0, &["IFMarker=No", "OFMarkInt=Reject"]),
    case("a value outside of its range", 0x87, "InitiatorName=iqn.i|SessionType=Normal|TargetName=TARGET|MaxBurstLength=1|", 0, &["MaxBurstLength=Reject"]),
    case("a key of the full feature phase", 0x87, "InitiatorName=iqn.i|SessionType=Normal|TargetName=TARGET|SendTargets=All|", 0, &["SendTargets=Reject"]),
    case("a key that does not matter for discovery", 0x87, "InitiatorName=iqn.i|SessionType=Discovery|MaxConnections=1|", 0, &["MaxConnections=Irrelevant"]),
    case("no name of the initiator", 0x87, "SessionType=Normal|TargetName=TARGET|", 0x0207, &[]),
    case("no name of the target", 0x87, "InitiatorName=iqn.i|SessionType=Normal|", 0x0207, &[]),
    case("a target that does not exist", 0x87, "InitiatorName=iqn.i|SessionType=Normal|TargetName=iqn.other|", 0x0203, &[]),
    case("a target of others", 0x87, "InitiatorName=iqn.i|SessionType=Normal|TargetName=PRIVATE|", 0x0202, &[]),
    case("a session type that is unknown", 0x87, "InitiatorName=iqn.i|SessionType=Other|", 0x0209, &[]),
    case("a digest that is unknown", 0x87, "InitiatorName=iqn.i|SessionType=Normal|TargetName=TARGET|HeaderDigest=MD5|", 0x0200, &[]),
    case("a key twice", 0x87, "InitiatorName=iqn.i|SessionType=Normal|TargetName=TARGET|MaxBurstLength=512|MaxBurstLength=1024|", 0x0200, &[]),
    case("text without a value", 0x87, "InitiatorName=iqn.i|SessionType=Normal|TargetName=TARGET|nonsense|", 0x0200, &[]),
    case("only an unknown authentication method", 0x00, "InitiatorName=iqn.i|SessionType=Normal|TargetName=TARGET|AuthMethod=KRB5|", 0x0201, &[]),
    case("CHAP that was not agreed on", 0x00, "InitiatorName=iqn.i|SessionType=Normal|TargetName=TARGET|CHAP_A=5|", 0x0200, &[]),
    case("a transition backwards", 0x84, "InitiatorName=iqn.i|SessionType=Normal|TargetName=TARGET|", 0x020b, &[]),
    case("a transition to a stage that does not exist", 0x86, "InitiatorName=iqn.i|SessionType=Normal|TargetName=TARGET|", 0x020b, &[]),
    case("a login that begins in the full feature phase", 0x8f, "InitiatorName=iqn.i|SessionType=Normal|TargetName=TARGET|", 0x020b, &[]),
    case("a request that is continued and final", 0xc7, "InitiatorName=iqn.i|SessionType=Normal|TargetName=TARGET|", 0x0200, &[]),
];

fn text(case: &str) -> Vec<u8> {
    let text = case.replace("TARGET", TARGET).replace("PRIVATE", PRIVATE);
    text.replace('|', "\0").into_bytes()
}

fn pairs(pdu: &RawPdu) -> Vec<String> {
    let text = String::from_utf8(pdu.data.clone()).unwrap();
    text.split_terminator('\0').map(str::to_owned).collect()
}

fn status(pdu: &RawPdu) -> u16 {
    u16::from_be_bytes([pdu.header[36], pdu.header[37]])
}

impl LoginCase {
    /// Logs in; whether the response is the required one.
    ///
    /// # Errors
    /// What the response is instead.
    pub(crate) fn check(&self, initiator: &mut Initiator) -> Result<(), String> {
        let response = initiator.login_request(self.flags, &text(self.text));
        let (opcode, status) = (response.opcode(), status(&response));
        if (opcode, status, response.u32(16)) != (0x23, self.status, 1) {
            return Err(format!("opcode {opcode:x}, status {status:04x}"));
        }
        if self.status != 0 {
            let is_closed = response.data.is_empty() && initiator.receive().is_none();
            return if is_closed {
                Ok(())
            } else {
                Err("not closed".to_owned())
            };
        }
        let found = pairs(&response);
        if let Some(missing) = self
            .answer
            .iter()
            .find(|expected| !found.iter().any(|pair| pair == *expected))
        {
            return Err(format!("{missing} is not in {found:?}"));
        }
        let handle = u16::from_be_bytes([response.header[14], response.header[15]]);
        let stages = (response.header[1] & 0x83, self.flags & 0x83);
        if stages.0 != stages.1 || (handle != 0) != (stages.1 == 0x83) {
            return Err(format!("stages {stages:x?}, session handle {handle}"));
        }
        Ok(())
    }
}

#[test]
fn every_login_has_the_answer_of_the_rfc() {
    let target = start(Authentication::None);
    for case in LOGIN_CASES {
        case.check(&mut Initiator::connect(&target))
            .unwrap_or_else(|wrong| panic!("{}: {wrong}", case.name));
    }
}

#[test]
fn a_login_may_be_continued_and_have_several_steps() {
    let target = start(Authentication::None);
    let mut initiator = Initiator::connect(&target);
    let whole = text("InitiatorName=iqn.i|TargetName=TARGET|AuthMethod=None|");
    let (first, second) = whole.split_at(30);
    let response = initiator.login_request(0x40, first);
    assert_eq!((status(&response), response.header[1], response.data.len()), (0, 0, 0));
    let response = initiator.login_request(0x81, second);
    assert_eq!((status(&response), response.header[1]), (0, 0x81));
    let response = initiator.login_request(0x04, &text("MaxBurstLength=4096|"));
    assert_eq!(
        pairs(&response),
        ["MaxBurstLength=4096", "MaxRecvDataSegmentLength=262144"]
    );
    let response = initiator.login_request(0x87, b"");
    assert_eq!((status(&response), response.header[1]), (0, 0x87));
    assert_eq!(initiator.command(0, &[0; 6], Data::None).sense, Some((6, 0x2900)));
}

#[test]
fn other_invalid_logins_end_the_connection() {
    let target = start(Authentication::None);
    let handle = |handle: u16| {
        let mut pdu = RawPdu::new(0x43, 0x87, 1).with_data(&text("InitiatorName=iqn.i|TargetName=TARGET|"));
        pdu.header[14..16].copy_from_slice(&handle.to_be_bytes());
        pdu
    };
    let mut version = handle(0);
    version.header[3] = 1;
    let present = Initiator::ready(&target);
    let mut cases = vec![(version, Some(0x0205)), (handle(9999), Some(0x020a))];
    cases.extend([
        (handle(1), Some(0x0206)),
        (RawPdu::new(0x41, 0x80, 1), None),
        (RawPdu::new(0x40, 0x80, 1), None),
    ]);
    for (pdu, expected) in cases {
        let mut initiator = Initiator::connect(&target);
        initiator.send(&pdu);
        let response = initiator.receive();
        assert_eq!(response.as_ref().map(status), expected, "{pdu:x?}");
        assert_eq!(initiator.receive(), None);
    }
    let mut endless = Initiator::connect(&target);
    let piece = [b'a'; 8000];
    assert_eq!(status(&endless.login_request(0x40, &piece)), 0);
    assert_eq!(status(&endless.login_request(0x40, &piece)), 0);
    assert_eq!(
        status(&endless.login_request(0x40, &piece)),
        0x0302,
        "the text is bounded"
    );
    drop(present);
}

#[test]
fn only_listed_initiators_use_a_private_target() {
    let target = start(Authentication::None);
    let mut friend = Initiator::connect(&target);
    friend.name = FRIEND.to_owned();
    friend.log_in(PRIVATE, &[]);
    assert_eq!(friend.command(0, &[0; 6], Data::None).sense, Some((6, 0x2900)));
}

#[test]
fn a_discovery_lists_the_targets_that_the_initiator_may_use() {
    let target = start(Authentication::None);
    for (name, count) in [("iqn.2026-01.org.example:other", 1), (FRIEND, 2)] {
        let mut initiator = Initiator::connect(&target);
        let login = format!("InitiatorName={name}\0SessionType=Discovery\0");
        assert_eq!(status(&initiator.login_request(0x87, login.as_bytes())), 0);
        let number = initiator.command_number;
        let request = RawPdu::new(0x04, 0x80, 5).with_u32(20, u32::MAX).with_u32(24, number);
        initiator.send(&request.with_data(b"SendTargets=All\0"));
        let response = initiator.receive().unwrap();
        assert_eq!((response.opcode(), response.header[1]), (0x24, 0x80));
        let names = pairs(&response)
            .iter()
            .filter(|pair| pair.starts_with("TargetName="))
            .count();
        assert_eq!(names, count, "{name}");
        // No SCSI in a discovery session.
        initiator.send(&RawPdu::new(0x01, 0x80, 6).with_u32(24, number + 1));
        let reject = initiator.receive().unwrap();
        assert_eq!((reject.opcode(), reject.header[2]), (0x3f, 5));
    }
}

fn chap() -> TestTarget {
    let user = |name: &str, secret: &[u8]| ChapUser {
        name: name.to_owned(),
        secret: ChapSecret::new(secret).unwrap(),
    };
    start(Authentication::Chap {
        users: vec![user("mary", b"twelve bytes")],
        target: Some(user("target", b"another secret")),
    })
}

/// The response to a challenge by MD5.
fn response(identifier: u8, secret: &[u8], challenge: &[u8]) -> String {
    use md5::Digest as _;
    let digest = md5::Md5::digest([&[identifier][..], secret, challenge].concat());
    let digits: Vec<String> = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("0x{}", digits.concat())
}

/// Logs in with a secret. Returns the last response.
fn authenticate(initiator: &mut Initiator, secret: &[u8], more: &str) -> RawPdu {
    let offer = text("InitiatorName=iqn.i|TargetName=TARGET|AuthMethod=CHAP,None|");
    // The target does not leave the stage before the authentication.
    let begun = initiator.login_request(0x81, &offer);
    assert_eq!((status(&begun), begun.header[1]), (0, 0));
    assert!(pairs(&begun).contains(&"AuthMethod=CHAP".to_owned()));
    let challenge = initiator.login_request(0x00, b"CHAP_A=5\0");
    let expected = format!("CHAP_C=0x{}", "05".repeat(16));
    assert_eq!(pairs(&challenge), ["CHAP_A=5", "CHAP_I=5", &expected]);
    let answer = format!("CHAP_N=mary\0CHAP_R={}\0{more}", response(5, secret, &[5; 16]));
    initiator.login_request(0x83, answer.as_bytes())
}

#[test]
fn chap_admits_the_right_secret_only() {
    let target = chap();
    let mut initiator = Initiator::connect(&target);
    let done = authenticate(&mut initiator, b"twelve bytes", "");
    assert_eq!((status(&done), done.header[1], done.data.len()), (0, 0x83, 0));
    assert_eq!(initiator.command(0, &[0; 6], Data::None).sense, Some((6, 0x2900)));
    let mut initiator = Initiator::connect(&target);
    assert_eq!(status(&authenticate(&mut initiator, b"wrong secret", "")), 0x0201);
    assert_eq!(initiator.receive(), None);
}

#[test]
fn chap_is_mutual_if_the_initiator_asks_for_it() {
    let target = chap();
    let mut initiator = Initiator::connect(&target);
    let done = authenticate(&mut initiator, b"twelve bytes", "CHAP_I=9\0CHAP_C=0x01020304\0");
    let expected = response(9, b"another secret", &[1, 2, 3, 4]);
    assert_eq!(pairs(&done), ["CHAP_N=target".to_owned(), format!("CHAP_R={expected}")]);
    assert_eq!(done.header[1], 0x83);
    let mut reflected = Initiator::connect(&target);
    let own = format!("CHAP_I=9\0CHAP_C=0x{}\0", "05".repeat(16));
    assert_eq!(status(&authenticate(&mut reflected, b"twelve bytes", &own)), 0x0201);
}

#[test]
fn chap_cannot_be_bypassed() {
    let target = chap();
    for (flags, login, expected) in [
        (0x87, "InitiatorName=iqn.i|TargetName=TARGET|", 0x0201),
        (0x83, "InitiatorName=iqn.i|TargetName=TARGET|", 0x0201),
        (0x83, "InitiatorName=iqn.i|TargetName=TARGET|AuthMethod=None|", 0x0201),
        (0x87, "InitiatorName=iqn.i|SessionType=Discovery|", 0x0201),
    ] {
        let mut initiator = Initiator::connect(&target);
        assert_eq!(
            status(&initiator.login_request(flags, &text(login))),
            expected,
            "{login}"
        );
        assert_eq!(initiator.receive(), None);
    }
    let mut initiator = Initiator::connect(&target);
    let offer = text("InitiatorName=iqn.i|TargetName=TARGET|AuthMethod=CHAP|");
    initiator.login_request(0x00, &offer);
    assert_eq!(
        status(&initiator.login_request(0x87, b"")),
        0x020b,
        "the next stage was not reached"
    );
}
