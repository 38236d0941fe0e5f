//! PDUs of the full feature phase, legal or not: sequences, digests, task management, and what ends a connection.

use holdfast_serve::iscsi::Authentication;

use crate::initiator::{Answer, Data, GOOD, Initiator, NO_TAG, RawPdu};
use crate::targets::{Portal, TARGET, TestTarget, start};

fn ready() -> (TestTarget, Initiator) {
    let target = start(Authentication::None);
    let initiator = Initiator::ready(&target);
    (target, initiator)
}

/// Asserts that the session still works.
fn assert_alive(initiator: &mut Initiator) {
    assert_eq!(initiator.command(0, &[0; 6], Data::None), Answer::default());
}

#[test]
fn large_transfers_use_several_requests_and_bursts() {
    let target = start(Authentication::None);
    large_transfers_are_the_same_at(&target);
}

/// Writes and reads with several combinations of parameters.
pub(crate) fn large_transfers_are_the_same_at(target: &dyn Portal) {
    for keys in [
        &[
            "MaxBurstLength=4096",
            "FirstBurstLength=512",
            "MaxRecvDataSegmentLength=512",
        ][..],
        &[
            "MaxBurstLength=262144",
            "MaxOutstandingR2T=8",
            "MaxRecvDataSegmentLength=65536",
        ],
        &[
            "HeaderDigest=CRC32C",
            "DataDigest=CRC32C",
            "ImmediateData=No",
            "MaxRecvDataSegmentLength=8192",
        ],
    ] {
        let mut initiator = Initiator::connect(target);
        initiator.log_in(TARGET, keys);
        initiator.sends_immediate = false;
        initiator.command(0, &[0; 6], Data::None);
        let data: Vec<u8> = (0..300_u32 * 512).map(|at| at.to_le_bytes()[at as usize % 3]).collect();
        let write = initiator.command(0, &[0x2a, 0, 0, 0, 2, 0, 0, 1, 44, 0], Data::Out(&data));
        assert_eq!(write, Answer::default(), "{keys:?}");
        let read = initiator.command(0, &[0x28, 0, 0, 0, 2, 0, 0, 1, 44, 0], Data::In(300 * 512));
        assert!(read.status == GOOD && read.data == data, "{keys:?}");
    }
}

#[test]
fn unsolicited_data_is_taken_up_to_the_first_burst() {
    let (target, mut initiator) = ready();
    let mut pdu = initiator.command_pdu(0, &[0x2a, 0, 0, 0, 0, 0, 0, 0, 8, 0], Data::Out(&[3; 4096]));
    pdu.header[1] &= 0x7f;
    pdu.data = vec![3; 1024];
    let tag = pdu.u32(16);
    initiator.send(&pdu);
    for (number, flags) in [(0, 0), (1, 0x80)] {
        let data = RawPdu::new(0x05, flags, tag)
            .with_u32(20, NO_TAG)
            .with_u32(36, number)
            .with_u32(40, 1024 + number * 1536)
            .with_data(&[3; 1536]);
        initiator.send(&data);
    }
    assert_eq!(initiator.finish(tag, &[]), Answer::default());
    assert!(target.device.to_bytes()[..4096].iter().all(|byte| *byte == 3));
}

#[test]
fn invalid_sequences_of_data_fail_the_command_and_write_nothing() {
    let (target, mut initiator) = ready();
    let before = target.device.to_bytes();
    let whole = [9; 1024];
    for (number, offset, length) in [
        (1, 0, 1024),
        (27, 0, 1024),
        (u32::MAX, 0, 1024),
        (0, 512, 512),
        (0, 0, 1000),
    ] {
        let pdu = initiator.command_pdu(0, &[0x2a, 0, 0, 0, 0, 0, 0, 0, 2, 0], Data::Out(&whole));
        let tag = pdu.u32(16);
        initiator.send(&pdu);
        let request = initiator.receive().unwrap();
        assert_eq!((request.opcode(), request.u32(40), request.u32(44)), (0x31, 0, 1024));
        let data = RawPdu::new(0x05, 0x80, tag)
            .with_u32(20, request.u32(20))
            .with_u32(36, number)
            .with_u32(40, offset)
            .with_data(&whole[..length]);
        initiator.send(&data);
        let answer = initiator.finish(tag, &[]);
        assert_eq!(
            answer.sense,
            Some((0xb, 0x4705)),
            "DataSN {number}, offset {offset}, {length} bytes"
        );
    }
    assert!(target.device.to_bytes() == before);
    // Data for a task that does not exist was under way when the task ended.
    initiator.send(&RawPdu::new(0x05, 0x80, 4711).with_data(&whole));
    assert_alive(&mut initiator);
}

#[test]
fn commands_outside_of_the_window_are_ignored() {
    let (_target, mut initiator) = ready();
    for number in [
        initiator.command_number.wrapping_sub(1),
        initiator.command_max.wrapping_add(1),
    ] {
        let pdu = RawPdu::new(0x01, 0x80, 70).with_u32(24, number);
        initiator.send(&pdu);
    }
    assert_alive(&mut initiator);
    assert_eq!(initiator.command_max.wrapping_sub(initiator.command_number), 63);
    let gap = RawPdu::new(0x01, 0x80, 71).with_u32(24, initiator.command_number + 1);
    initiator.send(&gap);
    assert_eq!(initiator.receive(), None, "the missing command can never come");
}

#[test]
fn pings_are_echoed() {
    let (_target, mut initiator) = ready();
    let ping = RawPdu::new(0x40, 0x80, 9)
        .with_u32(20, NO_TAG)
        .with_u32(24, initiator.command_number);
    initiator.send(&ping.clone().with_data(b"are you there?"));
    let pong = initiator.receive().unwrap();
    assert_eq!((pong.opcode(), pong.u32(16), pong.u32(20)), (0x20, 9, NO_TAG));
    assert_eq!(pong.data, b"are you there?");
    let mut numbered = RawPdu::new(0x00, 0x80, 10).with_u32(24, initiator.command_number);
    numbered.header[20..24].fill(0xff);
    initiator.send(&numbered);
    assert_eq!(initiator.receive().unwrap().u32(16), 10);
    initiator.command_number += 1;
    // An answer to a ping that was not sent is ignored.
    initiator.send(&RawPdu::new(0x40, 0x80, NO_TAG).with_u32(20, 3));
    assert_alive(&mut initiator);
}

#[test]
fn what_cannot_be_done_is_rejected_with_its_header() {
    let (_target, mut initiator) = ready();
    let number = initiator.command_number;
    let held = initiator.command_pdu(0, &[0x2a, 0, 0, 0, 0, 0, 0, 0, 2, 0], Data::Out(&[1; 1024]));
    initiator.send(&held);
    assert_eq!(initiator.receive().unwrap().opcode(), 0x31);
    let mut again = held.clone();
    again.header[0] |= 0x40;
    for (pdu, reason) in [
        (RawPdu::new(0x50, 0x80, 20), 3),
        (RawPdu::new(0x43, 0x87, 21), 4),
        (RawPdu::new(0x5c, 0x80, 22), 5),
        (
            RawPdu::new(0x44, 0x80, 23)
                .with_u32(20, NO_TAG)
                .with_data(b"nonsense\0"),
            4,
        ),
        (
            RawPdu::new(0x44, 0x80, 24)
                .with_u32(20, NO_TAG)
                .with_data(b"SendTargets=iqn.x\0"),
            9,
        ),
        (again, 4),
    ] {
        initiator.send(&pdu.clone().with_u32(24, number + 1));
        let reject = initiator.receive().unwrap();
        assert_eq!((reject.opcode(), reject.header[2]), (0x3f, reason), "{pdu:x?}");
        assert_eq!(reject.u32(16), NO_TAG);
        assert_eq!(reject.data[..2], pdu.header[..2]);
    }
    assert_alive(&mut initiator);
}

fn manage(initiator: &mut Initiator, function: u8, lun: u8, referenced: u32) -> u8 {
    let tag = initiator.next_tag();
    let mut pdu = RawPdu::new(0x42, 0x80 | function, tag)
        .with_u32(20, referenced)
        .with_u32(24, initiator.command_number);
    pdu.header[9] = lun;
    initiator.send(&pdu);
    let response = initiator.receive().unwrap();
    assert_eq!((response.opcode(), response.u32(16)), (0x22, tag));
    response.header[2]
}

#[test]
fn tasks_can_be_aborted_while_their_data_is_awaited() {
    let (target, mut initiator) = ready();
    let before = target.device.to_bytes();
    for function in [1, 2, 4, 5, 6] {
        let pdu = initiator.command_pdu(0, &[0x2a, 0, 0, 0, 0, 0, 0, 0, 2, 0], Data::Out(&[1; 1024]));
        initiator.send(&pdu);
        let request = initiator.receive().unwrap();
        assert_eq!(
            manage(&mut initiator, function, 0, pdu.u32(16)),
            0,
            "function {function}"
        );
        let late = RawPdu::new(0x05, 0x80, pdu.u32(16)).with_u32(20, request.u32(20));
        initiator.send(&late.with_data(&[1; 1024]));
        let answer = initiator.command(0, &[0; 6], Data::None);
        let expected = if function > 4 { Some((6, 0x2903)) } else { None };
        assert_eq!(answer.sense, expected, "function {function}");
    }
    assert!(target.device.to_bytes() == before);
}

#[test]
fn other_task_management_is_answered_by_its_kind() {
    let (_target, mut initiator) = ready();
    for (function, lun, expected) in [
        (1, 0, 1),
        (2, 0, 0),
        (2, 9, 2),
        (3, 0, 5),
        (5, 9, 2),
        (8, 0, 4),
        (99, 0, 255),
    ] {
        assert_eq!(
            manage(&mut initiator, function, lun, 4711),
            expected,
            "function {function} on {lun}"
        );
    }
    assert_alive(&mut initiator);
    assert_eq!(manage(&mut initiator, 7, 0, NO_TAG), 0);
    assert_eq!(initiator.receive(), None, "a cold reset ends the sessions");
}

#[test]
fn a_logout_ends_the_session() {
    for (reason, answer, is_closed) in [(0x80, 0, true), (0x81, 0, true), (0x82, 2, false)] {
        let (target, mut initiator) = ready();
        let logout = RawPdu::new(0x46, reason, 5).with_u32(24, initiator.command_number);
        initiator.send(&logout);
        let response = initiator.receive().unwrap();
        assert_eq!((response.opcode(), response.header[2]), (0x26, answer));
        if is_closed {
            assert_eq!(initiator.receive(), None);
            while target.server.connection_count() > 0 {
                std::thread::yield_now();
            }
            let events = target.events.lock().unwrap().join("\n");
            assert!(events.contains("LoggedOut"), "{events}");
        } else {
            assert_alive(&mut initiator);
        }
    }
}

#[test]
fn a_second_session_of_the_same_port_replaces_the_first() {
    let target = start(Authentication::None);
    let mut first = Initiator::ready_as(&target, 1);
    let mut other = Initiator::ready_as(&target, 2);
    let mut second = Initiator::ready_as(&target, 1);
    assert_eq!(first.receive(), None);
    assert_alive(&mut second);
    assert_alive(&mut other);
}

#[test]
fn damaged_headers_end_the_connection_and_damaged_data_fails_its_command() {
    let target = start(Authentication::None);
    let mut initiator = Initiator::connect(&target);
    initiator.log_in(TARGET, &["HeaderDigest=CRC32C", "DataDigest=CRC32C"]);
    initiator.command(0, &[0; 6], Data::None);
    let before = target.device.to_bytes();
    let mut pdu = initiator.command_pdu(0, &[0x2a, 0, 0, 0, 0, 0, 0, 0, 1, 0], Data::Out(&[1; 512]));
    pdu.header[5..8].copy_from_slice(&[0, 2, 0]);
    let mut bytes = pdu.header.to_vec();
    bytes.extend(crc32c::crc32c(&pdu.header).to_le_bytes());
    bytes.extend([1; 512]);
    bytes.extend([0xba; 4]);
    initiator.send_bytes(&bytes);
    assert_eq!(initiator.finish(pdu.u32(16), &[]).sense, Some((0xb, 0x4705)));
    assert!(target.device.to_bytes() == before);
    assert_alive(&mut initiator);
    let header = RawPdu::new(0x40, 0x80, 9).header;
    initiator.send_bytes(&[&header[..], &[0; 4]].concat());
    assert_eq!(initiator.receive(), None);
}

#[test]
fn a_segment_that_is_too_long_ends_the_connection() {
    let (target, mut initiator) = ready();
    let mut header = RawPdu::new(0x40, 0x80, 9).header;
    header[5..8].fill(0xff);
    initiator.send_bytes(&header);
    assert_eq!(initiator.receive(), None);
    drop(target);
}
