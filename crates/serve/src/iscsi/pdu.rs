//! PDUs: the basic header segment, as RFC 7143 section 11 defines it.

/// Bytes of the basic header segment.
pub(crate) const HEADER_BYTES: usize = 48;
/// Bytes of a digest.
pub(crate) const DIGEST_BYTES: usize = 4;
/// The tag that means "no task".
pub(crate) const NO_TAG: u32 = 0xffff_ffff;
/// Data segments and digests begin at multiples of this.
const ALIGNMENT: usize = 4;

/// Operation codes that initiators send.
pub(crate) mod request {
    pub(crate) const NOP_OUT: u8 = 0x00;
    pub(crate) const SCSI_COMMAND: u8 = 0x01;
    pub(crate) const TASK_MANAGEMENT: u8 = 0x02;
    pub(crate) const LOGIN: u8 = 0x03;
    pub(crate) const TEXT: u8 = 0x04;
    pub(crate) const DATA_OUT: u8 = 0x05;
    pub(crate) const LOGOUT: u8 = 0x06;
    pub(crate) const SNACK: u8 = 0x10;
}

/// Operation codes that targets send.
pub(crate) mod response {
    pub(crate) const NOP_IN: u8 = 0x20;
    pub(crate) const SCSI: u8 = 0x21;
    pub(crate) const TASK_MANAGEMENT: u8 = 0x22;
    pub(crate) const LOGIN: u8 = 0x23;
    pub(crate) const TEXT: u8 = 0x24;
    pub(crate) const DATA_IN: u8 = 0x25;
    pub(crate) const LOGOUT: u8 = 0x26;
    pub(crate) const READY_TO_TRANSFER: u8 = 0x31;
    pub(crate) const ASYNCHRONOUS_MESSAGE: u8 = 0x32;
    pub(crate) const REJECT: u8 = 0x3f;
}

/// Why a PDU was rejected (RFC 7143 section 11.17.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RejectReason {
    SnackReject = 0x03,
    ProtocolError = 0x04,
    CommandNotSupported = 0x05,
    TooManyImmediateCommands = 0x06,
    InvalidField = 0x09,
}

/// The final PDU of a sequence.
pub(crate) const FLAG_FINAL: u8 = 0x80;
/// Text continues in the next PDU.
pub(crate) const FLAG_CONTINUE: u8 = 0x40;

/// Rounds up to the alignment of data segments.
pub(crate) const fn padded(length: usize) -> usize {
    length.next_multiple_of(ALIGNMENT)
}

/// A basic header segment: fields are big-endian.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header(pub(crate) [u8; HEADER_BYTES]);

impl Header {
    /// The header of a response.
    pub(crate) fn response(opcode: u8, flags: u8, task_tag: u32) -> Self {
        let mut header = Self([0; HEADER_BYTES]);
        header.0[0] = opcode;
        header.0[1] = flags;
        header.set_u32(16, task_tag);
        header
    }

    pub(crate) fn opcode(&self) -> u8 {
        self.0[0] & 0x3f
    }

    /// Whether the command does not wait for its turn by CmdSN.
    pub(crate) fn is_immediate(&self) -> bool {
        self.0[0] & 0x40 != 0
    }

    pub(crate) fn flags(&self) -> u8 {
        self.0[1]
    }

    pub(crate) fn is_final(&self) -> bool {
        self.0[1] & FLAG_FINAL != 0
    }

    /// Length of the additional header segments in bytes.
    pub(crate) fn additional_header_bytes(&self) -> usize {
        4 * usize::from(self.0[4])
    }

    /// Length of the data segment in bytes, without padding.
    pub(crate) fn data_bytes(&self) -> usize {
        holdfast_block::to_usize(u64::from(self.u32(4) & 0x00ff_ffff))
    }

    /// The logical unit number, or a field that takes its place.
    pub(crate) fn lun(&self) -> [u8; 8] {
        self.field(8)
    }

    pub(crate) fn task_tag(&self) -> u32 {
        self.u32(16)
    }

    /// Target transfer tag, expected data transfer length, or referenced task tag.
    pub(crate) fn word_20(&self) -> u32 {
        self.u32(20)
    }

    pub(crate) fn command_number(&self) -> u32 {
        self.u32(24)
    }

    pub(crate) fn u16(&self, at: usize) -> u16 {
        u16::from_be_bytes(self.field(at))
    }

    pub(crate) fn u32(&self, at: usize) -> u32 {
        u32::from_be_bytes(self.field(at))
    }

    /// The bytes at `at`; zeros beyond the end.
    pub(crate) fn field<const N: usize>(&self, at: usize) -> [u8; N] {
        let bytes = self.0.get(at..).and_then(<[u8]>::first_chunk);
        bytes.copied().unwrap_or([0; N])
    }

    pub(crate) fn set(&mut self, at: usize, bytes: &[u8]) {
        if let Some(field) = self.0.get_mut(at..at + bytes.len()) {
            field.copy_from_slice(bytes);
        }
    }

    pub(crate) fn set_u16(&mut self, at: usize, value: u16) {
        self.set(at, &value.to_be_bytes());
    }

    pub(crate) fn set_u32(&mut self, at: usize, value: u32) {
        self.set(at, &value.to_be_bytes());
    }

    /// Sets the length of the data segment.
    pub(crate) fn set_data_bytes(&mut self, length: usize) {
        let length = u32::try_from(length).unwrap_or(u32::MAX) & 0x00ff_ffff;
        let additional = u32::from(self.0[4]) << 24;
        self.set_u32(4, additional | length);
    }
}

/// The parts of a received PDU.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pdu<'a> {
    pub(crate) header: Header,
    pub(crate) data: &'a [u8],
    /// Whether the data digest, if any, was correct.
    pub(crate) is_data_intact: bool,
}

/// Which digests PDUs have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Digests {
    pub(crate) header: Digest,
    pub(crate) data: Digest,
}

/// A digest of headers or of data segments.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Digest {
    #[default]
    None,
    Crc32c,
}

impl Digest {
    pub(crate) fn byte_count(self) -> usize {
        match self {
            Self::None => 0,
            Self::Crc32c => DIGEST_BYTES,
        }
    }
}

/// The digest of `bytes` as it is sent: least significant byte first.
pub(crate) fn crc32c(bytes: &[u8]) -> [u8; DIGEST_BYTES] {
    ::crc32c::crc32c(bytes).to_le_bytes()
}

/// The result of looking for a PDU at the start of received bytes.
#[derive(Debug)]
pub(crate) enum Parsed<'a> {
    /// More bytes are needed.
    Incomplete,
    /// A PDU, and the number of its bytes.
    Pdu(Pdu<'a>, usize),
    /// The stream cannot be parsed any further.
    Malformed(&'static str),
}

/// Takes the PDU at the start of `bytes`. Its data segment has at most `data_bytes_max` bytes.
///
/// Additional header segments are skipped: they extend CDBs beyond 16 bytes and describe bidirectional commands, which
/// no command of this target uses.
pub(crate) fn parse(bytes: &[u8], digests: Digests, data_bytes_max: usize) -> Parsed<'_> {
    let Some(header) = bytes.first_chunk::<HEADER_BYTES>().map(|bytes| Header(*bytes)) else {
        return Parsed::Incomplete;
    };
    let headers_end = HEADER_BYTES + header.additional_header_bytes();
    let data_start = headers_end + digests.header.byte_count();
    let Some(headers) = bytes.get(..data_start) else {
        return Parsed::Incomplete;
    };
    // The length is not trusted before its digest was checked.
    if digests.header == Digest::Crc32c {
        let (headers, digest) = headers.split_at(headers_end);
        if digest != crc32c(headers) {
            return Parsed::Malformed("a header digest is wrong");
        }
    }
    if header.data_bytes() > data_bytes_max {
        return Parsed::Malformed("a data segment is longer than the maximum");
    }
    if header.data_bytes() == 0 {
        let pdu = Pdu {
            header,
            data: &[],
            is_data_intact: true,
        };
        return Parsed::Pdu(pdu, data_start);
    }
    let padding_end = data_start + padded(header.data_bytes());
    let end = padding_end + digests.data.byte_count();
    let Some(segment) = bytes.get(data_start..end) else {
        return Parsed::Incomplete;
    };
    let (data, digest) = segment.split_at(padding_end - data_start);
    let is_data_intact = digests.data == Digest::None || digest == crc32c(data);
    let pdu = Pdu {
        header,
        data: data.get(..header.data_bytes()).unwrap_or(data),
        is_data_intact,
    };
    Parsed::Pdu(pdu, end)
}

#[cfg(test)]
mod tests {
    use super::{Digest, Digests, Header, Parsed, crc32c, padded, parse};

    #[test]
    fn the_digest_is_that_of_the_rfc() {
        // RFC 7143 appendix A: 32 bytes of zeros, and 32 ascending bytes.
        assert_eq!(crc32c(&[0; 32]), [0xaa, 0x36, 0x91, 0x8a]);
        let ascending: Vec<u8> = (0..32).collect();
        assert_eq!(crc32c(&ascending), [0x4e, 0x79, 0xdd, 0x46]);
    }

    #[test]
    fn a_pdu_is_found_only_when_it_is_complete_and_intact() {
        let mut header = Header::response(0x01, 0x80, 7);
        header.set_data_bytes(5);
        let digests = Digests {
            header: Digest::Crc32c,
            data: Digest::Crc32c,
        };
        let mut bytes = header.0.to_vec();
        bytes.extend(crc32c(&header.0));
        bytes.extend(b"12345\0\0\0");
        bytes.extend(crc32c(b"12345\0\0\0"));
        for length in 0..bytes.len() {
            let parsed = parse(&bytes[..length], digests, 5);
            assert!(matches!(parsed, Parsed::Incomplete), "{length} bytes are not enough");
        }
        let Parsed::Pdu(pdu, length) = parse(&bytes, digests, 5) else {
            panic!("it is complete");
        };
        assert_eq!(
            (length, pdu.data, pdu.is_data_intact),
            (bytes.len(), &b"12345"[..], true)
        );
        assert!(matches!(parse(&bytes, digests, 4), Parsed::Malformed(_)));
        bytes[60] ^= 1;
        assert!(matches!(parse(&bytes, digests, 5), Parsed::Pdu(pdu, _) if !pdu.is_data_intact));
        bytes[9] ^= 1;
        assert!(matches!(parse(&bytes, digests, 5), Parsed::Malformed(_)));
        assert_eq!([padded(0), padded(1), padded(4), padded(5)], [0, 4, 4, 8]);
    }
}
