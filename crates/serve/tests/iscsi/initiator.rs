//! An initiator that sends exactly the given PDUs, valid or not, and checks the form of what it receives.

use std::io::{ErrorKind, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use crate::targets::{Portal, TARGET, TestTarget};

/// Timeout of a response, generous for a busy host.
const PATIENCE: Duration = Duration::from_secs(20);

/// No answer has more PDUs with data.
const DATA_COUNT_MAX: u32 = 10_000;

pub(crate) const NO_TAG: u32 = u32::MAX;

/// A PDU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RawPdu {
    pub(crate) header: [u8; 48],
    pub(crate) data: Vec<u8>,
}

impl RawPdu {
    pub(crate) fn new(opcode: u8, flags: u8, task_tag: u32) -> Self {
        let mut header = [0; 48];
        header[0] = opcode;
        header[1] = flags;
        header[16..20].copy_from_slice(&task_tag.to_be_bytes());
        Self {
            header,
            data: Vec::new(),
        }
    }

    pub(crate) fn opcode(&self) -> u8 {
        self.header[0]
    }

    pub(crate) fn u32(&self, at: usize) -> u32 {
        u32::from_be_bytes(self.header[at..at + 4].try_into().unwrap())
    }

    pub(crate) fn with_u32(mut self, at: usize, value: u32) -> Self {
        self.header[at..at + 4].copy_from_slice(&value.to_be_bytes());
        self
    }

    pub(crate) fn with_data(mut self, data: &[u8]) -> Self {
        self.data = data.to_vec();
        self
    }
}

/// The answer to a SCSI command.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Answer {
    pub(crate) status: u8,
    /// Sense key, and additional sense code with its qualifier.
    pub(crate) sense: Option<(u8, u16)>,
    pub(crate) data: Vec<u8>,
    /// Positive for an overflow, negative for an underflow.
    pub(crate) residual: i64,
}

pub(crate) const GOOD: u8 = 0;
pub(crate) const CHECK: u8 = 2;
pub(crate) const CONFLICT: u8 = 0x18;

/// The data of a command.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Data<'a> {
    None,
    /// Receive at most so many bytes.
    In(u32),
    Out(&'a [u8]),
}

/// A connection, before or after the login.
pub(crate) struct Initiator {
    stream: UnixStream,
    pub(crate) command_number: u32,
    pub(crate) task_tag: u32,
    pub(crate) name: String,
    pub(crate) session_id: [u8; 6],
    pub(crate) has_digests: bool,
    /// Whether commands carry immediate data.
    pub(crate) sends_immediate: bool,
    pub(crate) command_max: u32,
}

impl Initiator {
    pub(crate) fn connect(target: &dyn Portal) -> Self {
        Self::on(target.connect())
    }

    pub(crate) fn on(stream: UnixStream) -> Self {
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        Self {
            stream,
            command_number: 100,
            task_tag: 1,
            name: "iqn.2026-01.org.example:initiator".to_owned(),
            session_id: [0x40, 0, 0, 1, 0, 0],
            has_digests: false,
            sends_immediate: true,
            command_max: 0,
        }
    }

    /// An initiator that is logged in to the first target, and has seen the unit attentions.
    pub(crate) fn ready(target: &TestTarget) -> Self {
        Self::ready_as(target, 1)
    }

    /// The same for another port.
    pub(crate) fn ready_as(target: &TestTarget, port: u8) -> Self {
        let mut initiator = Self::connect(target);
        initiator.session_id[5] = port;
        initiator.log_in(TARGET, &["HeaderDigest=None", "ImmediateData=Yes", "InitialR2T=No"]);
        for lun in 0..3 {
            let answer = initiator.command(lun, &[0; 6], Data::None);
            assert_eq!(answer.sense, Some((6, 0x2900)), "the attention of a new session");
        }
        initiator
    }

    /// Logs in by a request in the operational stage, and by others if the target has questions.
    pub(crate) fn log_in(&mut self, target: &str, keys: &[&str]) {
        let mut text = format!("InitiatorName={}\0SessionType=Normal\0TargetName={target}\0", self.name);
        for key in keys {
            text.push_str(key);
            text.push('\0');
        }
        let mut response = self.login_request(0x87, text.as_bytes());
        while response.header[1] & 0x80 == 0 && response.header[36] == 0 {
            let asked = String::from_utf8(response.data).unwrap();
            let answers = asked.split_terminator('\0').filter_map(|pair| answer_to(pair, keys));
            response = self.login_request(0x87, answers.collect::<String>().as_bytes());
        }
        assert_eq!(response.header[36..38], [0, 0], "the login succeeds");
        assert_eq!(response.header[1], 0x87);
        self.has_digests = keys.contains(&"DataDigest=CRC32C");
    }

    /// Sets the timeout of a response.
    pub(crate) fn set_patience(&mut self, patience: Duration) {
        self.stream.set_read_timeout(Some(patience)).unwrap();
    }

    /// Sends a login request, and returns the response.
    pub(crate) fn login_request(&mut self, flags: u8, text: &[u8]) -> RawPdu {
        let mut pdu = RawPdu::new(0x43, flags, self.task_tag)
            .with_u32(24, self.command_number)
            .with_data(text);
        pdu.header[8..14].copy_from_slice(&self.session_id);
        self.send(&pdu);
        self.receive().expect("a login response")
    }

    /// Sends a PDU with its digests.
    pub(crate) fn send(&mut self, pdu: &RawPdu) {
        let mut header = pdu.header;
        let length = u32::try_from(pdu.data.len()).unwrap();
        header[5..8].copy_from_slice(&length.to_be_bytes()[1..]);
        let mut bytes = header.to_vec();
        if self.has_digests {
            bytes.extend(crc32c::crc32c(&header).to_le_bytes());
        }
        let mut data = pdu.data.clone();
        data.resize(data.len().next_multiple_of(4), 0);
        if self.has_digests && !data.is_empty() {
            let digest = crc32c::crc32c(&data).to_le_bytes();
            data.extend(digest);
        }
        bytes.extend(data);
        self.send_bytes(&bytes);
    }

    /// Sends bytes as they are; the server may close meanwhile.
    pub(crate) fn send_bytes(&mut self, bytes: &[u8]) {
        match self.stream.write_all(bytes) {
            Err(error) if error.kind() != ErrorKind::BrokenPipe => panic!("{error}"),
            _ => {}
        }
    }

    /// Receives a PDU; `None` when the server has closed.
    pub(crate) fn receive(&mut self) -> Option<RawPdu> {
        let mut header = [0; 48];
        match self.stream.read_exact(&mut header) {
            Err(error) if matches!(error.kind(), ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset) => return None,
            done => done.unwrap(),
        }
        assert_eq!(header[4], 0, "no additional headers");
        if self.has_digests {
            assert_eq!(self.take(4), crc32c::crc32c(&header).to_le_bytes());
        }
        let length = u32::from_be_bytes([0, header[5], header[6], header[7]]) as usize;
        let mut data = self.take(length.next_multiple_of(4));
        if self.has_digests && length > 0 {
            assert_eq!(self.take(4), crc32c::crc32c(&data).to_le_bytes());
        }
        assert!(data[length..].iter().all(|byte| *byte == 0), "padding is zero");
        data.truncate(length);
        let pdu = RawPdu { header, data };
        self.command_max = pdu.u32(32);
        Some(pdu)
    }

    fn take(&mut self, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.stream.read_exact(&mut bytes).unwrap();
        bytes
    }

    /// The next task tag.
    pub(crate) fn next_tag(&mut self) -> u32 {
        self.task_tag += 1;
        self.task_tag
    }

    /// A SCSI command PDU for delivery in order.
    pub(crate) fn command_pdu(&mut self, lun: u8, cdb: &[u8], data: Data<'_>) -> RawPdu {
        let (flags, length) = match data {
            Data::None => (0x80, 0),
            Data::In(length) => (0xc0, length),
            Data::Out(bytes) => (0xa0, u32::try_from(bytes.len()).unwrap()),
        };
        let tag = self.next_tag();
        let mut pdu = RawPdu::new(0x01, flags | 1, tag)
            .with_u32(20, length)
            .with_u32(24, self.command_number);
        self.command_number = self.command_number.wrapping_add(1);
        pdu.header[9] = lun;
        pdu.header[32..32 + cdb.len()].copy_from_slice(cdb);
        pdu
    }

    /// Executes a command, and answers requests to transfer.
    pub(crate) fn command(&mut self, lun: u8, cdb: &[u8], data: Data<'_>) -> Answer {
        let mut pdu = self.command_pdu(lun, cdb, data);
        let out = match data {
            Data::Out(bytes) => bytes,
            _ => &[],
        };
        if self.sends_immediate {
            pdu.data = out[..out.len().min(4096)].to_vec();
        }
        let tag = pdu.u32(16);
        self.send(&pdu);
        self.finish(tag, out)
    }

    /// Receives the answer to a command.
    pub(crate) fn finish(&mut self, tag: u32, out: &[u8]) -> Answer {
        let mut data = Vec::new();
        let mut number = 0;
        loop {
            let pdu = self.receive().expect("the server answers");
            assert_eq!(pdu.u32(16), tag, "{pdu:?}");
            match pdu.opcode() {
                0x31 => self.transfer(&pdu, out),
                0x25 => {
                    assert_eq!(
                        (pdu.u32(36), pdu.u32(40) as usize),
                        (number, data.len()),
                        "data is in order"
                    );
                    number += 1;
                    assert!(number <= DATA_COUNT_MAX, "data without end");
                    data.extend(&pdu.data);
                    if pdu.header[1] & 1 != 0 {
                        return answer(&pdu, data, &[]);
                    }
                }
                0x21 => {
                    assert_eq!(pdu.header[2], 0, "the command completed at the target");
                    assert_eq!(pdu.u32(36), number, "the number of Data-In PDUs");
                    return answer(&pdu, data, &pdu.data);
                }
                _ => panic!("{pdu:x?}"),
            }
        }
    }

    /// Answers a request to transfer with PDUs of 8 KiB.
    fn transfer(&mut self, request: &RawPdu, out: &[u8]) {
        let (offset, length) = (request.u32(40) as usize, request.u32(44) as usize);
        let data = &out[offset..offset + length];
        let count = data.len().div_ceil(8192);
        for (number, piece) in data.chunks(8192).enumerate() {
            let flags = if number + 1 == count { 0x80 } else { 0 };
            let pdu = RawPdu::new(0x05, flags, request.u32(16))
                .with_u32(20, request.u32(20))
                .with_u32(36, u32::try_from(number).unwrap())
                .with_u32(40, u32::try_from(offset + number * 8192).unwrap())
                .with_data(piece);
            self.send(&pdu);
        }
    }
}

/// The answer to a question of a target: its own value, without digests. None if the target declares a value, or
/// answers one of `keys`.
fn answer_to(pair: &str, keys: &[&str]) -> Option<String> {
    let (key, value) = pair.split_once('=')?;
    let is_declared = key.starts_with("Target") || key == "MaxRecvDataSegmentLength";
    if is_declared || keys.iter().any(|own| own.split('=').next() == Some(key)) {
        return None;
    }
    let value = if key.ends_with("Digest") { "None" } else { value };
    Some(format!("{key}={value}\0"))
}

fn answer(pdu: &RawPdu, data: Vec<u8>, sense: &[u8]) -> Answer {
    let count = i64::from(pdu.u32(44));
    let residual = match pdu.header[1] & 6 {
        4 => count,
        2 => -count,
        _ => 0,
    };
    let sense = (!sense.is_empty()).then(|| {
        assert_eq!(usize::from(sense[1]) + 2, sense.len());
        assert_eq!(sense[2] & 0x7f, 0x70, "fixed format");
        (sense[4] & 15, u16::from_be_bytes([sense[14], sense[15]]))
    });
    Answer {
        status: pdu.header[3],
        sense,
        data,
        residual,
    }
}
