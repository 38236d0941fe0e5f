//! Limits: initiators that are slow, idle or greedy harm only themselves.

use std::time::Duration;

use holdfast_serve::iscsi::{Authentication, Limits};

use crate::initiator::{Answer, Data, GOOD, Initiator, RawPdu};
use crate::targets::{TARGET, start_with};

#[test]
fn a_login_has_a_time_limit() {
    let limits = Limits {
        handshake: Duration::from_millis(50),
        ..Limits::default()
    };
    let target = start_with(Authentication::None, limits);
    let mut initiator = Initiator::connect(&target);
    assert_eq!(initiator.receive(), None);
    while target.server.connection_count() > 0 {
        std::thread::yield_now();
    }
    let events = target.events.lock().unwrap().join("\n");
    assert!(events.contains("took too long"), "{events}");
}

#[test]
fn connections_are_limited() {
    let limits = Limits {
        connection_count_max: 2,
        ..Limits::default()
    };
    let target = start_with(Authentication::None, limits);
    let first = Initiator::ready_as(&target, 1);
    let second = Initiator::ready_as(&target, 2);
    let mut third = Initiator::connect(&target);
    assert_eq!(third.receive(), None);
    drop((first, second));
    while target.server.connection_count() > 0 {
        std::thread::yield_now();
    }
    Initiator::ready_as(&target, 3);
}

#[test]
fn an_idle_initiator_is_pinged_and_must_answer() {
    let limits = Limits {
        stall: Duration::from_millis(100),
        ..Limits::default()
    };
    let target = start_with(Authentication::None, limits);
    let mut initiator = Initiator::ready(&target);
    for _ in 0..3 {
        let ping = initiator.receive().unwrap();
        assert_eq!((ping.opcode(), ping.u32(16)), (0x20, u32::MAX));
        let answer = RawPdu::new(0x40, 0x80, u32::MAX).with_u32(20, ping.u32(20));
        initiator.send(&answer.with_u32(24, initiator.command_number));
    }
    assert_eq!(initiator.receive().unwrap().opcode(), 0x20);
    assert_eq!(initiator.receive(), None, "the last ping was not answered");
}

#[test]
fn data_that_was_announced_must_come() {
    let limits = Limits {
        stall: Duration::from_millis(200),
        memory_bytes_max: 1 << 20,
        ..Limits::default()
    };
    let target = start_with(Authentication::None, limits);
    let mut greedy = Initiator::ready_as(&target, 1);
    greedy.sends_immediate = false;
    let data = vec![1; 1 << 20];
    let pdu = greedy.command_pdu(0, &[0x2a, 0, 0, 0, 0, 0, 0, 8, 0, 0], Data::Out(&data));
    greedy.send(&pdu);
    assert_eq!(greedy.receive().unwrap().opcode(), 0x31);
    // All memory is taken: another initiator waits, until the greedy one has lost its connection.
    let mut patient = Initiator::ready_as(&target, 2);
    let read = patient.command(0, &[0x28, 0, 0, 0, 0, 0, 0, 8, 0, 0], Data::In(1 << 20));
    assert_eq!((read.status, read.data.len()), (GOOD, 1 << 20));
    while let Some(ping) = greedy.receive() {
        assert_eq!(ping.opcode(), 0x20);
    }
}

#[test]
fn memory_is_shared_without_a_deadlock() {
    let limits = Limits {
        memory_bytes_max: 300 << 10,
        ..Limits::default()
    };
    let target = start_with(Authentication::None, limits);
    std::thread::scope(|scope| {
        for port in 1..=4 {
            let target = &target;
            scope.spawn(move || {
                let mut initiator = Initiator::ready_as(target, port);
                initiator.sends_immediate = false;
                let data = vec![port; 256 << 10];
                let first = port * 2;
                for _ in 0..20 {
                    let write = initiator.command(0, &[0x2a, 0, 0, 0, first, 0, 0, 2, 0, 0], Data::Out(&data));
                    assert_eq!(write, Answer::default());
                    let read = initiator.command(0, &[0x28, 0, 0, 0, first, 0, 0, 2, 0, 0], Data::In(256 << 10));
                    assert!(read.data == data);
                }
            });
        }
    });
}

/// Commands that are sent at once are all answered, although the memory suffices for one at a time.
#[test]
fn pipelined_commands_wait_for_memory_in_their_order() {
    let limits = Limits {
        memory_bytes_max: 300 << 10,
        ..Limits::default()
    };
    let target = start_with(Authentication::None, limits);
    let mut initiator = Initiator::connect(&target);
    initiator.log_in(TARGET, &["MaxRecvDataSegmentLength=262144", "MaxBurstLength=262144"]);
    initiator.command(0, &[0; 6], Data::None);
    let data = vec![6; 256 << 10];
    let mut open = 0;
    for block in 0..8 {
        let cdb = [0x2a, 0, 0, 0, block * 2, 0, 0, 2, 0, 0];
        let pdu = initiator.command_pdu(0, &cdb, Data::Out(&data));
        initiator.send(&pdu);
        open += 1;
    }
    while open > 0 {
        let pdu = initiator.receive().unwrap();
        match pdu.opcode() {
            0x31 => {
                let (offset, length) = (pdu.u32(40) as usize, pdu.u32(44) as usize);
                let out = RawPdu::new(0x05, 0x80, pdu.u32(16))
                    .with_u32(20, pdu.u32(20))
                    .with_u32(40, pdu.u32(40))
                    .with_data(&data[offset..offset + length]);
                initiator.send(&out);
            }
            0x21 => {
                assert_eq!(pdu.header[3], GOOD);
                open -= 1;
            }
            _ => panic!("{pdu:?}"),
        }
    }
    assert!(target.device.to_bytes()[..2 << 20].iter().all(|byte| *byte == 6));
}

#[test]
fn a_stopped_server_completes_and_closes() {
    let target = start_with(Authentication::None, Limits::default());
    let mut initiator = Initiator::ready(&target);
    let report = target.server.stop(Duration::from_secs(5));
    assert_eq!(report.abandoned_connection_count, 0);
    assert_eq!(initiator.receive(), None);
    let events = target.events.lock().unwrap().join("\n");
    assert!(events.contains("ByServer"), "{events}");
}
