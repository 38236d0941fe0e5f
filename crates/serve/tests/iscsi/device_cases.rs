//! Devices that fail, panic, or take long: what initiators see of it, and which tasks can be aborted.

use std::io::{Error as IoError, ErrorKind};
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex};

use holdfast_block::{BlockDevice, BlockDeviceMut, Error as DeviceError, ExtentList, MemoryDevice, Result};
use holdfast_serve::iscsi::{Authentication, Limits};

use crate::initiator::{Answer, Data, GOOD, Initiator, RawPdu};
use crate::targets::{TestTarget, device, start_on};

/// The first bytes of ranges with a behaviour of their own.
const FAILS: u64 = 1 << 20;
const IS_FULL: u64 = 2 << 20;
const PANICS: u64 = 3 << 20;
/// Reads from here wait until the gate is open.
const WAITS: u64 = (3 << 20) + (512 << 10);

/// A device whose ranges behave differently.
struct Moody {
    device: Arc<MemoryDevice>,
    is_open: Mutex<bool>,
    opened: Condvar,
    /// What was done, in order.
    log: Mutex<Vec<&'static str>>,
}

impl Moody {
    fn check(&self, offset: u64) -> Result<()> {
        match offset {
            FAILS..IS_FULL => Err(DeviceError::io("read", offset, IoError::other("the disk is broken"))),
            IS_FULL..PANICS => Err(DeviceError::io("write", offset, ErrorKind::StorageFull)),
            PANICS..WAITS => panic!("this device panics"),
            WAITS.. => {
                let mut is_open = self.is_open.lock().unwrap();
                while !*is_open {
                    is_open = self.opened.wait(is_open).unwrap();
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn open(&self) {
        *self.is_open.lock().unwrap() = true;
        self.opened.notify_all();
    }
}

impl BlockDevice for Moody {
    fn size_bytes(&self) -> u64 {
        self.device.size_bytes()
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        self.check(offset)?;
        self.log.lock().unwrap().push("read");
        self.device.read_at(buffer, offset)
    }

    fn extents(&self, range: Range<u64>, extent_count_max: usize) -> Result<ExtentList> {
        self.check(range.start)?;
        self.device.extents(range, extent_count_max)
    }
}

impl BlockDeviceMut for Moody {
    fn write_at(&self, data: &[u8], offset: u64) -> Result<()> {
        self.check(offset)?;
        self.log.lock().unwrap().push("write");
        self.device.write_at(data, offset)
    }

    fn write_zeroes(&self, range: Range<u64>) -> Result<()> {
        self.check(range.start)?;
        self.device.write_zeroes(range)
    }

    fn trim(&self, range: Range<u64>) -> Result<()> {
        self.device.trim(range)
    }

    fn flush(&self) -> Result<()> {
        self.log.lock().unwrap().push("flush");
        self.device.flush()
    }
}

fn start() -> (TestTarget, Arc<Moody>) {
    let device = device();
    let moody = Arc::new(Moody {
        device: Arc::clone(&device),
        is_open: Mutex::new(false),
        opened: Condvar::new(),
        log: Mutex::default(),
    });
    let unit = Arc::clone(&moody);
    (start_on(unit, device, Authentication::None, Limits::default()), moody)
}

/// A command for one block at `offset`.
fn at(opcode: u8, offset: u64) -> [u8; 10] {
    let mut cdb = [opcode, 0, 0, 0, 0, 0, 0, 0, 1, 0];
    let block = u32::try_from(offset / 512).unwrap();
    cdb[2..6].copy_from_slice(&block.to_be_bytes());
    cdb
}

#[test]
fn errors_of_the_device_become_sense_data() {
    let (target, _) = start();
    let mut initiator = Initiator::ready(&target);
    let block = [1; 512];
    for (cdb, data, sense) in [
        (at(0x28, FAILS), Data::In(512), (3, 0x1100)),
        (at(0x2a, FAILS), Data::Out(&block), (3, 0x0c00)),
        (at(0x2f, FAILS), Data::None, (3, 0x1100)),
        (at(0x2a, IS_FULL), Data::Out(&block), (7, 0x2707)),
        (at(0x41, IS_FULL), Data::Out(&block), (7, 0x2707)),
        (at(0x28, PANICS), Data::In(512), (4, 0x4400)),
        (at(0x2a, PANICS), Data::Out(&block), (4, 0x4400)),
    ] {
        let answer = initiator.command(0, &cdb, data);
        assert_eq!((answer.sense, answer.data.len()), (Some(sense), 0), "{cdb:x?}");
    }
    assert_eq!(initiator.command(0, &at(0x28, 0), Data::In(512)).status, GOOD);
    let events = target.events.lock().unwrap().join("\n");
    assert!(
        events.contains("the disk is broken") && events.contains("panicked"),
        "{events}"
    );
}

#[test]
fn forced_and_verified_writes_are_flushed() {
    let (target, moody) = start();
    let mut initiator = Initiator::ready(&target);
    let mut forced = at(0x2a, 0);
    forced[1] = 8;
    for (cdb, data, expected) in [
        (at(0x2a, 0), Data::Out(&[1; 512]), &["write"][..]),
        (forced, Data::Out(&[1; 512]), &["write", "flush"]),
        (at(0x2e, 0), Data::Out(&[1; 512]), &["write", "flush", "read"]),
        (at(0x35, 0), Data::None, &["flush"]),
    ] {
        assert_eq!(initiator.command(0, &cdb, data).status, GOOD);
        assert_eq!(std::mem::take(&mut *moody.log.lock().unwrap()), expected, "{cdb:x?}");
    }
}

#[test]
fn a_slow_command_delays_no_other() {
    let (target, moody) = start();
    let mut initiator = Initiator::ready(&target);
    let slow = initiator.command_pdu(0, &at(0x28, WAITS), Data::In(512));
    initiator.send(&slow);
    assert_eq!(initiator.command(0, &[0; 6], Data::None), Answer::default());
    assert_eq!(initiator.command(0, &at(0x28, 0), Data::In(512)).status, GOOD);
    moody.open();
    assert_eq!(initiator.finish(slow.u32(16), &[]).status, GOOD);
}

#[test]
fn the_response_to_an_abort_waits_for_the_task_which_gets_none() {
    let (target, moody) = start();
    let mut initiator = Initiator::ready(&target);
    let slow = initiator.command_pdu(0, &at(0x28, WAITS), Data::In(512));
    initiator.send(&slow);
    let tag = initiator.next_tag();
    let abort = RawPdu::new(0x42, 0x81, tag)
        .with_u32(20, slow.u32(16))
        .with_u32(24, initiator.command_number);
    initiator.send(&abort);
    assert_eq!(initiator.command(0, &[0; 6], Data::None), Answer::default());
    moody.open();
    let response = initiator.receive().unwrap();
    assert_eq!(
        (response.opcode(), response.u32(16), response.header[2]),
        (0x22, tag, 0)
    );
    assert_eq!(initiator.command(0, &[0; 6], Data::None), Answer::default());
}

#[test]
fn tasks_that_another_initiator_aborts_are_reported_as_aborted() {
    const TASK_ABORTED: u8 = 0x40;
    let (target, _) = start();
    let mut first = Initiator::ready_as(&target, 1);
    let mut second = Initiator::ready_as(&target, 2);
    let before = target.device.to_bytes();
    first.sends_immediate = false;
    let pdu = first.command_pdu(0, &at(0x2a, 0), Data::Out(&[1; 512]));
    first.send(&pdu);
    let request = first.receive().unwrap();
    let tag = second.next_tag();
    second.send(&RawPdu::new(0x42, 0x84, tag).with_u32(24, second.command_number));
    assert_eq!(second.receive().unwrap().header[2], 0, "CLEAR TASK SET");
    let data = RawPdu::new(0x05, 0x80, pdu.u32(16)).with_u32(20, request.u32(20));
    first.send(&data.with_data(&[1; 512]));
    assert_eq!(first.finish(pdu.u32(16), &[]).status, TASK_ABORTED);
    assert_eq!(first.command(0, &[0; 6], Data::None).sense, Some((6, 0x2f00)));
    assert!(target.device.to_bytes() == before);
}

#[test]
fn an_ordered_task_runs_after_the_earlier_ones() {
    const ORDERED: u8 = 2;
    let (target, moody) = start();
    let mut initiator = Initiator::ready(&target);
    let slow = initiator.command_pdu(0, &at(0x28, WAITS), Data::In(512));
    let mut ordered = initiator.command_pdu(0, &at(0x2a, 0), Data::Out(&[1; 512]));
    ordered.header[1] = ordered.header[1] & !7 | ORDERED;
    ordered.data = vec![1; 512];
    initiator.send(&slow);
    initiator.send(&ordered);
    moody.open();
    assert_eq!(initiator.finish(slow.u32(16), &[]).status, GOOD);
    assert_eq!(initiator.finish(ordered.u32(16), &[]).status, GOOD);
    assert_eq!(*moody.log.lock().unwrap(), ["read", "write"]);
}

#[test]
fn a_stopped_server_reports_commands_that_did_not_end() {
    let (target, moody) = start();
    let mut initiator = Initiator::ready(&target);
    let slow = initiator.command_pdu(0, &at(0x28, WAITS), Data::In(512));
    initiator.send(&slow);
    initiator.command(0, &[0; 6], Data::None);
    let report = target.server.stop(std::time::Duration::from_millis(50));
    assert_eq!(report.abandoned_connection_count, 1);
    moody.open();
}
