//! SCSI commands, legal or not, and the required answers, as data.

use holdfast_serve::iscsi::Authentication;

use crate::initiator::{Answer, CHECK, Data, GOOD, Initiator};
use crate::targets::{DATA_END, SIZE, pattern, start};

/// Number of blocks of 512 bytes of a unit.
const BLOCKS: u32 = 8192;
const _: () = assert!(BLOCKS as usize * 512 == SIZE);

/// What a command must be answered with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Expect {
    /// Success without data.
    Done,
    /// The bytes of the unit at this offset: so many.
    Bytes(usize, usize),
    /// Success, and data of this length.
    Length(usize),
    /// Success, and data that begins like this.
    Starts(&'static [u8]),
    /// CHECK CONDITION with this key and code.
    Sense(u8, u16),
}

use Expect::{Bytes, Done, Length, Sense, Starts};

const INVALID_FIELD: Expect = Sense(5, 0x2400);
const INVALID_PARAMETER: Expect = Sense(5, 0x2600);
const OUT_OF_RANGE: Expect = Sense(5, 0x2100);
const PROTECTED: Expect = Sense(7, 0x2700);
const UNKNOWN: Expect = Sense(5, 0x2000);
const NO_UNIT: Expect = Sense(5, 0x2500);
const LIST_LENGTH: Expect = Sense(5, 0x1a00);

pub(crate) struct Case {
    pub(crate) name: &'static str,
    lun: u8,
    cdb: Vec<u8>,
    data: Option<Vec<u8>>,
    /// Number of bytes that the initiator is ready to receive.
    room: u32,
    pub(crate) expect: Expect,
}

impl Case {
    fn lun(mut self, lun: u8) -> Self {
        self.lun = lun;
        self
    }

    fn out(mut self, data: impl Into<Vec<u8>>) -> Self {
        self.data = Some(data.into());
        self
    }

    fn room(mut self, room: u32) -> Self {
        self.room = room;
        self
    }

    /// Sets a byte of the CDB.
    fn byte(mut self, at: usize, value: u8) -> Self {
        self.cdb[at] = value;
        self
    }
}

fn case(name: &'static str, cdb: impl Into<Vec<u8>>, expect: Expect) -> Case {
    Case {
        name,
        lun: 0,
        cdb: cdb.into(),
        data: None,
        room: 65536,
        expect,
    }
}

/// A command with a 10-byte CDB for blocks.
fn ten(name: &'static str, opcode: u8, lba: u32, count: u16, expect: Expect) -> Case {
    let mut cdb = vec![opcode, 0];
    cdb.extend(lba.to_be_bytes());
    cdb.push(0);
    cdb.extend(count.to_be_bytes());
    cdb.push(0);
    case(name, cdb, expect)
}

fn twelve(name: &'static str, opcode: u8, lba: u32, count: u32, expect: Expect) -> Case {
    let mut cdb = vec![opcode, 0];
    cdb.extend(lba.to_be_bytes());
    cdb.extend(count.to_be_bytes());
    cdb.extend([0, 0]);
    case(name, cdb, expect)
}

fn sixteen(name: &'static str, opcode: u8, lba: u64, count: u32, expect: Expect) -> Case {
    let mut cdb = vec![opcode, 0];
    cdb.extend(lba.to_be_bytes());
    cdb.extend(count.to_be_bytes());
    cdb.extend([0, 0]);
    case(name, cdb, expect)
}

fn blocks(count: usize, byte: u8) -> Vec<u8> {
    vec![byte; 512 * count]
}

fn reads() -> Vec<Case> {
    vec![
        case("READ (6)", [0x08, 0, 0, 8, 2, 0], Bytes(4096, 1024)),
        case("READ (6) of 256 blocks", [0x08, 0, 0, 0, 0, 0], Bytes(0, 131_072)).room(131_072),
        case("READ (6) past the end", [0x08, 0x00, 0x1f, 0xff, 2, 0], OUT_OF_RANGE),
        ten("READ (10)", 0x28, 8, 2, Bytes(4096, 1024)),
        ten(
            "READ (10) of the last block",
            0x28,
            BLOCKS - 1,
            1,
            Bytes(SIZE - 512, 512),
        ),
        ten("READ (10) of no block", 0x28, 0, 0, Done),
        ten("READ (10) of no block at the end", 0x28, BLOCKS, 0, Done),
        ten("READ (10) of no block past the end", 0x28, BLOCKS + 1, 0, OUT_OF_RANGE),
        ten("READ (10) past the end", 0x28, BLOCKS - 1, 2, OUT_OF_RANGE),
        ten("READ (10) with DPO and FUA", 0x28, 0, 1, Bytes(0, 512)).byte(1, 0x18),
        ten("READ (10) with protection", 0x28, 0, 1, INVALID_FIELD).byte(1, 0x20),
        twelve("READ (12)", 0xa8, 2040, 16, Bytes(2040 * 512, 8192)),
        twelve("READ (12) past the end", 0xa8, BLOCKS, 1, OUT_OF_RANGE),
        sixteen("READ (16)", 0x88, 1, 3, Bytes(512, 1536)),
        sixteen("READ (16) far past the end", 0x88, 1 << 62, 1, OUT_OF_RANGE),
        sixteen("READ (16) whose end has no number", 0x88, u64::MAX, 2, OUT_OF_RANGE),
        sixteen("READ (16) of too many blocks", 0x88, 0, u32::MAX, OUT_OF_RANGE),
        ten("a read of a unit that does not exist", 0x28, 0, 1, NO_UNIT).lun(3),
        ten("a read of large sectors", 0x28, 1, 1, Bytes(4096, 4096)).lun(2),
        ten(
            "a read past the end of large sectors",
            0x28,
            BLOCKS / 8,
            1,
            OUT_OF_RANGE,
        )
        .lun(2),
        ten("PRE-FETCH (10)", 0x34, 0, 100, Done),
        ten("PRE-FETCH (10) past the end", 0x34, BLOCKS, 1, OUT_OF_RANGE),
        sixteen("PRE-FETCH (16) to the end", 0x90, 0, 0, Done),
        ten("VERIFY (10) of the medium", 0x2f, 0, 100, Done),
        ten("VERIFY (10) with equal data", 0x2f, 2048, 2, Done)
            .byte(1, 2)
            .out(blocks(2, 0)),
        ten("VERIFY (10) with other data", 0x2f, 0, 1, Sense(14, 0x1d00))
            .byte(1, 2)
            .out(blocks(1, 9)),
        ten("VERIFY (10) with one block", 0x2f, 2048, 100, Done)
            .byte(1, 6)
            .out(blocks(1, 0)),
        ten("VERIFY (10) with a reserved check", 0x2f, 0, 1, INVALID_FIELD).byte(1, 4),
        sixteen("VERIFY (16) past the end", 0x8f, u64::from(BLOCKS), 1, OUT_OF_RANGE),
        twelve("VERIFY (12)", 0xaf, 2048, 1, Done).byte(1, 2).out(blocks(1, 0)),
    ]
}

fn writes() -> Vec<Case> {
    let scratch = BLOCKS / 2;
    let compare = |old: u8, new: u8| [blocks(1, old), blocks(1, new)].concat();
    vec![
        case("WRITE (6)", [0x0a, 0, 16, 0, 1, 0], Done).out(blocks(1, 1)),
        ten("WRITE (10)", 0x2a, scratch, 2, Done).out(blocks(2, 1)),
        ten("WRITE (10) with FUA", 0x2a, scratch, 1, Done)
            .byte(1, 8)
            .out(blocks(1, 1)),
        ten("WRITE (10) of no block", 0x2a, 0, 0, Done),
        ten("WRITE (10) past the end", 0x2a, BLOCKS - 1, 2, OUT_OF_RANGE).out(blocks(2, 1)),
        ten("WRITE (10) to a read-only unit", 0x2a, 0, 1, PROTECTED)
            .lun(1)
            .out(blocks(1, 1)),
        ten("WRITE (10) with protection", 0x2a, 0, 1, INVALID_FIELD)
            .byte(1, 0xe0)
            .out(blocks(1, 1)),
        ten("WRITE (10) without data", 0x2a, 0, 1, INVALID_FIELD),
        twelve("WRITE (12)", 0xaa, scratch, 300, Done).out(blocks(300, 2)),
        sixteen("WRITE (16)", 0x8a, u64::from(scratch), 1, Done).out(blocks(1, 3)),
        sixteen("WRITE (16) of too many blocks", 0x8a, 0, 1 << 20, INVALID_FIELD).out(blocks(1, 1)),
        ten("WRITE AND VERIFY (10)", 0x2e, scratch, 1, Done).out(blocks(1, 4)),
        sixteen("WRITE AND VERIFY (16) with a check", 0x8e, u64::from(scratch), 1, Done)
            .byte(1, 2)
            .out(blocks(1, 4)),
        sixteen("WRITE AND VERIFY (16) with a reserved check", 0x8e, 0, 1, INVALID_FIELD)
            .byte(1, 4)
            .out(blocks(1, 4)),
        sixteen("COMPARE AND WRITE of equal data", 0x89, u64::from(scratch), 1, Done).out(compare(4, 5)),
        sixteen(
            "COMPARE AND WRITE of other data",
            0x89,
            u64::from(scratch),
            1,
            Sense(14, 0x1d00),
        )
        .out(compare(4, 6)),
        sixteen("COMPARE AND WRITE of half the data", 0x89, 0, 1, INVALID_FIELD).out(blocks(1, 0)),
        sixteen("COMPARE AND WRITE of nothing", 0x89, 0, 0, Done),
        sixteen("ORWRITE", 0x8b, u64::from(scratch), 1, Done).out(blocks(1, 0xf0)),
        sixteen("ORWRITE to a read-only unit", 0x8b, 0, 1, PROTECTED)
            .lun(1)
            .out(blocks(1, 1)),
        ten("WRITE SAME (10)", 0x41, scratch, 1000, Done).out(blocks(1, 7)),
        ten("WRITE SAME (10) of no block", 0x41, 0, 0, INVALID_FIELD).out(blocks(1, 7)),
        ten("WRITE SAME (10) past the end", 0x41, BLOCKS, 1, OUT_OF_RANGE).out(blocks(1, 7)),
        ten("WRITE SAME (10) with half a block", 0x41, 0, 1, INVALID_FIELD).out(vec![7; 256]),
        sixteen("WRITE SAME (16) with UNMAP", 0x93, u64::from(scratch), 9, Done)
            .byte(1, 8)
            .out(blocks(1, 0)),
        sixteen("WRITE SAME (16) without data", 0x93, u64::from(scratch), 9, Done).byte(1, 1),
        sixteen("WRITE SAME (16) with ANCHOR", 0x93, 0, 9, INVALID_FIELD)
            .byte(1, 0x18)
            .out(blocks(1, 0)),
        sixteen("WRITE SAME (16) to a read-only unit", 0x93, 0, 9, PROTECTED)
            .lun(1)
            .byte(1, 1),
        ten("UNMAP", 0x42, 0, 24, Done).out(unmap(scratch, 8)),
        ten("UNMAP without ranges", 0x42, 0, 8, Done).out([0, 6, 0, 0, 0, 0, 0, 0]),
        ten("UNMAP of no block at the end", 0x42, 0, 24, Done).out(unmap(BLOCKS, 0)),
        ten("UNMAP past the end", 0x42, 0, 24, OUT_OF_RANGE).out(unmap(BLOCKS, 1)),
        ten("UNMAP with half a header", 0x42, 0, 4, LIST_LENGTH).out([0; 4]),
        ten("UNMAP with ANCHOR", 0x42, 0, 24, INVALID_FIELD)
            .byte(1, 1)
            .out(unmap(0, 1)),
        ten("UNMAP of a read-only unit", 0x42, 0, 24, PROTECTED)
            .lun(1)
            .out(unmap(0, 1)),
        ten("SYNCHRONIZE CACHE (10)", 0x35, 0, 0, Done),
        ten("SYNCHRONIZE CACHE (10) past the end", 0x35, BLOCKS + 1, 1, OUT_OF_RANGE),
        sixteen("SYNCHRONIZE CACHE (16) of a read-only unit", 0x91, 0, 0, Done).lun(1),
    ]
}

fn unmap(lba: u32, count: u32) -> Vec<u8> {
    let mut list = vec![0, 22, 0, 16, 0, 0, 0, 0, 0, 0, 0, 0];
    list.extend(lba.to_be_bytes());
    list.extend(count.to_be_bytes());
    list.extend([0; 4]);
    list
}

#[allow(clippy::too_many_lines, reason = "it is a table")]
fn reports() -> Vec<Case> {
    vec![
        case("TEST UNIT READY", [0; 6], Done),
        case("TEST UNIT READY of no unit", [0; 6], NO_UNIT).lun(9),
        case(
            "REQUEST SENSE",
            [0x03, 0, 0, 0, 252, 0],
            Starts(&[0x70, 0, 0, 0, 0, 0, 0, 10]),
        ),
        case(
            "REQUEST SENSE of no unit",
            [0x03, 0, 0, 0, 18, 0],
            Starts(&[0x70, 0, 5]),
        )
        .lun(9),
        case("REQUEST SENSE with descriptors", [0x03, 1, 0, 0, 18, 0], INVALID_FIELD),
        case(
            "INQUIRY",
            [0x12, 0, 0, 0, 255, 0],
            Starts(b"\0\0\x06\x12\x5b\0\0\x02HOLDFAST"),
        ),
        case("INQUIRY with little room", [0x12, 0, 0, 0, 5, 0], Length(5)),
        case("INQUIRY of no unit", [0x12, 0, 0, 0, 96, 0], Starts(&[0x7f])).lun(77),
        case(
            "INQUIRY with a page but no EVPD",
            [0x12, 0, 0x80, 0, 96, 0],
            INVALID_FIELD,
        ),
        case(
            "INQUIRY of page 00",
            [0x12, 1, 0, 0, 96, 0],
            Starts(&[0, 0, 0, 6, 0, 0x80, 0x83, 0xb0, 0xb1, 0xb2]),
        ),
        case(
            "INQUIRY of page 80",
            [0x12, 1, 0x80, 0, 96, 0],
            Starts(b"\0\x80\0\x05first"),
        ),
        case(
            "INQUIRY of page 83",
            [0x12, 1, 0x83, 1, 0, 0],
            Starts(&[0, 0x83, 0, 0x7d, 1, 3, 0, 8]),
        ),
        case(
            "INQUIRY of page B0",
            [0x12, 1, 0xb0, 0, 96, 0],
            Starts(&[0, 0xb0, 0, 60, 1, 255, 0, 8, 0, 1, 0, 0]),
        ),
        case(
            "INQUIRY of page B1",
            [0x12, 1, 0xb1, 0, 96, 0],
            Starts(&[0, 0xb1, 0, 60, 0, 1]),
        ),
        case(
            "INQUIRY of page B2",
            [0x12, 1, 0xb2, 0, 96, 0],
            Starts(&[0, 0xb2, 0, 4, 0, 0xe4, 2, 0]),
        ),
        case(
            "INQUIRY of page B2 of a read-only unit",
            [0x12, 1, 0xb2, 0, 96, 0],
            Starts(&[0, 0xb2, 0, 4, 0, 0, 0, 0]),
        )
        .lun(1),
        case("INQUIRY of an unknown page", [0x12, 1, 0xc0, 0, 96, 0], INVALID_FIELD),
        case(
            "READ CAPACITY (10)",
            [0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0],
            Starts(&[0, 0, 0x1f, 0xff, 0, 0, 2, 0]),
        ),
        case(
            "READ CAPACITY (10) with an address",
            [0x25, 0, 0, 0, 0, 1, 0, 0, 0, 0],
            INVALID_FIELD,
        ),
        sixteen(
            "READ CAPACITY (16)",
            0x9e,
            0,
            32,
            Starts(&[0, 0, 0, 0, 0, 0, 0x1f, 0xff, 0, 0, 2, 0, 0, 3, 0xc0]),
        )
        .byte(1, 0x10),
        sixteen(
            "READ CAPACITY (16) of large sectors",
            0x9e,
            0,
            32,
            Starts(&[0, 0, 0, 0, 0, 0, 3, 0xff, 0, 0, 16, 0, 0, 0]),
        )
        .byte(1, 0x10)
        .lun(2),
        sixteen("a service action that is unknown", 0x9e, 0, 32, INVALID_FIELD).byte(1, 0x11),
        sixteen("GET LBA STATUS of data", 0x9e, 0, 24, Starts(&[0, 0, 0])).byte(1, 0x12),
        sixteen("GET LBA STATUS of a hole", 0x9e, 4096, 24, Length(24))
            .byte(1, 0x12)
            .lun(1),
        sixteen("GET LBA STATUS past the end", 0x9e, u64::from(BLOCKS), 24, OUT_OF_RANGE).byte(1, 0x12),
        twelve(
            "REPORT LUNS",
            0xa0,
            0,
            4096,
            Starts(&[0, 0, 0, 24, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]),
        ),
        twelve("REPORT LUNS of no unit", 0xa0, 0, 4096, Length(32)).lun(9),
        twelve("REPORT LUNS with little room", 0xa0, 0, 8, INVALID_FIELD),
        twelve("REPORT LUNS of an unknown kind", 0xa0, 0, 4096, INVALID_FIELD).byte(2, 9),
        case("MODE SENSE (6)", [0x1a, 0, 0x3f, 0, 255, 0], Starts(&[55, 0, 0x10, 8])),
        case(
            "MODE SENSE (6) of a read-only unit",
            [0x1a, 8, 0x08, 0, 255, 0],
            Starts(&[23, 0, 0x90, 0, 8, 18, 4]),
        )
        .lun(1),
        case(
            "MODE SENSE (10)",
            [0x5a, 8, 0x0a, 0, 0, 0, 0, 0, 255, 0],
            Starts(&[0, 18, 0, 0x10, 0, 0, 0, 0, 0x0a]),
        ),
        case(
            "MODE SENSE (6) of saved values",
            [0x1a, 0, 0xff, 0, 255, 0],
            Sense(5, 0x3900),
        ),
        case(
            "MODE SENSE (6) of an unknown page",
            [0x1a, 0, 0x01, 0, 255, 0],
            INVALID_FIELD,
        ),
        case("MODE SELECT (6)", [0x15, 0x10, 0, 0, 24, 0], Done).out(caching(4)),
        case(
            "MODE SELECT (6) of an unknown bit",
            [0x15, 0x10, 0, 0, 24, 0],
            INVALID_PARAMETER,
        )
        .out(caching(6)),
        case("MODE SELECT (6) of half a page", [0x15, 0x10, 0, 0, 10, 0], LIST_LENGTH).out(caching(4)[..10].to_vec()),
        case("START STOP UNIT", [0x1b, 0, 0, 0, 1, 0], Done),
        case("START STOP UNIT that ejects", [0x1b, 0, 0, 0, 2, 0], INVALID_FIELD),
        case("PREVENT ALLOW MEDIUM REMOVAL", [0x1e, 0, 0, 0, 1, 0], Done),
        twelve("REPORT SUPPORTED OPERATION CODES", 0xa3, 0, 65536, Starts(&[0, 0])).byte(1, 0x0c),
        twelve(
            "one operation code",
            0xa3,
            0x0128_0000,
            64,
            Starts(&[0, 3, 0, 10, 0x28]),
        )
        .byte(1, 0x0c),
        twelve(
            "one operation code that is unknown",
            0xa3,
            0x0101_0000,
            64,
            Starts(&[0, 1]),
        )
        .byte(1, 0x0c),
        twelve(
            "one operation code that needs an action",
            0xa3,
            0x019e_0000,
            64,
            INVALID_FIELD,
        )
        .byte(1, 0x0c),
        twelve(
            "one service action",
            0xa3,
            0x029e_0010,
            64,
            Starts(&[0, 3, 0, 16, 0x9e, 0x10]),
        )
        .byte(1, 0x0c),
        twelve(
            "REPORT SUPPORTED TASK MANAGEMENT FUNCTIONS",
            0xa3,
            0,
            4,
            Starts(&[0xda, 0, 0, 0]),
        )
        .byte(1, 0x0d),
        sixteen("an operation code that is unknown", 0x9c, 0, 1, UNKNOWN),
        case(
            "EXTENDED COPY",
            [0x83, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
            UNKNOWN,
        ),
        case("FORMAT UNIT", [0x04, 0, 0, 0, 0, 0], UNKNOWN),
    ]
}

/// The parameter list of the caching page, with the given flags.
fn caching(flags: u8) -> Vec<u8> {
    let mut list = vec![0; 24];
    list[4..7].copy_from_slice(&[8, 18, flags]);
    list
}

impl Case {
    /// Executes the command.
    pub(crate) fn run(&self, initiator: &mut Initiator) -> Answer {
        let data = match &self.data {
            Some(data) => Data::Out(data),
            None => Data::In(self.room),
        };
        initiator.command(self.lun, &self.cdb, data)
    }

    /// Whether the answer is `expect`.
    ///
    /// # Errors
    /// What the answer is instead.
    pub(crate) fn check(&self, answer: &Answer, expect: Expect) -> Result<(), String> {
        let is_good = (answer.status, answer.sense) == (GOOD, None);
        let is_right = match expect {
            Done => is_good && answer.data.is_empty(),
            Bytes(offset, length) => {
                let bytes = (offset..offset + length).map(|at| if at < DATA_END { pattern(at) } else { 0 });
                is_good && answer.data == bytes.collect::<Vec<u8>>()
            }
            Length(length) => is_good && answer.data.len() == length,
            Starts(start) => is_good && answer.data.starts_with(start),
            Sense(key, code) => (answer.status, answer.sense) == (CHECK, Some((key, code))) && answer.data.is_empty(),
        };
        if !is_right {
            let start = &answer.data[..answer.data.len().min(24)];
            return Err(format!(
                "status {:x}, sense {:x?}, {} bytes {start:x?} instead of {expect:x?}",
                answer.status,
                answer.sense,
                answer.data.len()
            ));
        }
        let is_read = self.data.is_none() && self.room > 0 && !matches!(expect, Sense(..));
        let missing = i64::try_from(answer.data.len()).unwrap() - i64::from(self.room);
        if is_read && answer.residual != missing {
            return Err(format!("a residual count of {} instead of {missing}", answer.residual));
        }
        Ok(())
    }
}

pub(crate) fn command_cases() -> Vec<Case> {
    reads().into_iter().chain(writes()).chain(reports()).collect()
}

#[test]
fn every_command_has_the_answer_of_the_standards() {
    let target = start(Authentication::None);
    let mut initiator = Initiator::ready(&target);
    for sends_immediate in [true, false] {
        initiator.sends_immediate = sends_immediate;
        for case in command_cases() {
            let answer = case.run(&mut initiator);
            case.check(&answer, case.expect)
                .unwrap_or_else(|wrong| panic!("{}: {wrong}", case.name));
        }
    }
}

#[test]
fn writes_change_exactly_their_blocks() {
    let target = start(Authentication::None);
    let mut initiator = Initiator::ready(&target);
    let mut expected = target.device.to_bytes();
    let mut write = |cdb: &[u8], data: &[u8]| {
        let answer = initiator.command(0, cdb, Data::Out(data));
        assert_eq!(answer.status, GOOD, "{cdb:x?}: {answer:?}");
    };
    write(&[0x2a, 0, 0, 0, 0, 4, 0, 0, 3, 0], &blocks(3, 0xa1));
    expected[2048..3584].fill(0xa1);
    write(&[0x41, 0, 0, 0, 1, 0, 0, 0, 8, 0], &blocks(1, 0xa2));
    expected[131_072..135_168].fill(0xa2);
    write(&[0x42, 0, 0, 0, 0, 0, 0, 0, 24, 0], &unmap(5, 1));
    expected[2560..3072].fill(0);
    write(
        &[0x89, 0, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 1, 0, 0],
        &[blocks(1, 0xa1), blocks(1, 0xa3)].concat(),
    );
    expected[2048..2560].fill(0xa3);
    write(&[0x8b, 0, 0, 0, 0, 0, 0, 0, 0, 6, 0, 0, 0, 1, 0, 0], &blocks(1, 0x0f));
    expected[3072..3584].fill(0xaf);
    let large = vec![0xa4; 1 << 20];
    write(&[0x8a, 0, 0, 0, 0, 0, 0, 0, 0x10, 0, 0, 0, 8, 0, 0, 0], &large);
    expected[2 << 20..3 << 20].fill(0xa4);
    assert!(target.device.to_bytes() == expected);
}

#[test]
fn residual_counts_tell_how_much_data_there_was() {
    let target = start(Authentication::None);
    let mut initiator = Initiator::ready(&target);
    let read = |initiator: &mut Initiator, count: u8, room: u32| {
        let answer = initiator.command(0, &[0x28, 0, 0, 0, 0, 0, 0, 0, count, 0], Data::In(room));
        assert_eq!(answer.status, GOOD);
        (answer.data.len(), answer.residual)
    };
    assert_eq!(read(&mut initiator, 1, 10_000), (512, -9488));
    assert_eq!(read(&mut initiator, 1, 200), (200, 312));
    assert_eq!(read(&mut initiator, 2, 512), (512, 512));
    assert_eq!(read(&mut initiator, 2, 0), (0, 1024));
    for (data, residual, written) in [(blocks(2, 1), -512, 512), (vec![2; 200], 312, 200)] {
        let answer = initiator.command(0, &[0x2a, 0, 0, 0, 9, 0, 0, 0, 1, 0], Data::Out(&data));
        assert_eq!((answer.status, answer.residual), (GOOD, residual));
        let start = 0x900 * 512;
        assert!(
            target.device.to_bytes()[start..start + written]
                .iter()
                .all(|byte| *byte == data[0])
        );
    }
}

#[test]
fn every_listed_operation_code_is_known() {
    let target = start(Authentication::None);
    let mut initiator = Initiator::ready(&target);
    let all = initiator
        .command(0, &[0xa3, 0x0c, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0], Data::In(65536))
        .data;
    assert!(all.len() > 40 * 8);
    for row in all[4..].chunks(8) {
        let mut cdb = [0; 16];
        cdb[0] = row[0];
        cdb[1] = if row[5] & 1 == 1 { row[3] } else { 0 };
        let answer = initiator.command(0, &cdb, Data::None);
        assert_ne!(answer.sense, Some((5, 0x2000)), "{row:x?}");
    }
}
