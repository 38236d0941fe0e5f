//! PDUs to send, collected in one buffer, and the sequence numbers that they get when they are sent.
//!
//! Workers produce responses at the same time, but the status numbers must follow the order in which the responses are
//! sent. So a response is built without these numbers, and [`Frames::stamp`] writes them, and the header digests, at
//! the moment at which the response is queued.

use super::pdu::{Digest, Digests, HEADER_BYTES, Header, crc32c, padded};

/// How a PDU uses the status number of its connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StatusNumber {
    /// It carries status: it has the number, and the next PDU has the next one.
    Advance,
    /// It has the number of the next status.
    Next,
    /// It has none: data before the status.
    Absent,
}

/// Sequence numbers of a session with one connection (RFC 7143 section 4.2.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SequenceNumbers {
    pub(crate) status: u32,
    /// The number of the next command.
    pub(crate) expected_command: u32,
    /// Commands that were accepted and whose response was not sent yet.
    pub(crate) command_count: u32,
    /// The number of commands that may be in progress.
    pub(crate) window: u32,
}

impl SequenceNumbers {
    /// The highest number that the initiator may use. It never decreases: each accepted command also counts as one more
    /// in progress.
    pub(crate) fn command_max(&self) -> u32 {
        let free = self.window.saturating_sub(self.command_count);
        self.expected_command.wrapping_add(free).wrapping_sub(1)
    }
}

/// A PDU in the buffer.
#[derive(Debug, Clone, Copy)]
struct FrameStart {
    at: usize,
    status: StatusNumber,
}

/// Encoded PDUs.
#[derive(Debug, Default)]
pub(crate) struct Frames {
    bytes: Vec<u8>,
    end: usize,
    starts: Vec<FrameStart>,
    digests: Digests,
    /// The data segment of the last PDU: its start and its length.
    segment: (usize, usize),
}

impl Frames {
    pub(crate) fn new(digests: Digests) -> Self {
        Self::with_capacity(digests, 0)
    }

    /// A buffer with memory for `byte_count` bytes.
    pub(crate) fn with_capacity(digests: Digests, byte_count: usize) -> Self {
        Self {
            // Zeroed memory from the system costs nothing, and padding must be zero.
            bytes: vec![0; byte_count],
            digests,
            ..Self::default()
        }
    }

    /// Bytes that a PDU with `data_bytes` of data takes.
    pub(crate) fn pdu_bytes(digests: Digests, data_bytes: usize) -> usize {
        let data = if data_bytes == 0 {
            0
        } else {
            padded(data_bytes) + digests.data.byte_count()
        };
        HEADER_BYTES + digests.header.byte_count() + data
    }

    pub(crate) fn len(&self) -> usize {
        self.end
    }

    fn space(&mut self, length: usize) -> &mut [u8] {
        let start = self.end;
        self.end += length;
        if self.bytes.len() < self.end {
            self.bytes.resize(self.end, 0);
        }
        self.bytes.get_mut(start..self.end).unwrap_or_default()
    }

    /// Appends a PDU with a data segment, which the caller fills before it calls [`seal`](Self::seal).
    pub(crate) fn begin(&mut self, mut header: Header, status: StatusNumber, data_bytes: usize) -> &mut [u8] {
        header.set_data_bytes(data_bytes);
        self.starts.push(FrameStart { at: self.end, status });
        let headers = HEADER_BYTES + self.digests.header.byte_count();
        if let Some(space) = self.space(headers).first_chunk_mut() {
            *space = header.0;
        }
        self.segment = (self.end, data_bytes);
        self.space(padded(data_bytes)).get_mut(..data_bytes).unwrap_or_default()
    }

    /// Appends the data digest of the last PDU.
    pub(crate) fn seal(&mut self) {
        let (start, length) = self.segment;
        if self.digests.data == Digest::Crc32c && length > 0 {
            let digest = crc32c(self.bytes.get(start..self.end).unwrap_or_default());
            self.space(digest.len()).copy_from_slice(&digest);
        }
    }

    /// Appends a PDU.
    pub(crate) fn push(&mut self, header: Header, status: StatusNumber, data: &[u8]) {
        self.begin(header, status, data.len()).copy_from_slice(data);
        self.seal();
    }

    /// Appends all PDUs of `other`, which has the same digests.
    pub(crate) fn append(&mut self, other: Self) {
        let offset = self.end;
        self.space(other.end).copy_from_slice(other.as_ref());
        let moved = other.starts.into_iter().map(|start| FrameStart {
            at: start.at + offset,
            ..start
        });
        self.starts.extend(moved);
    }

    /// Writes the sequence numbers and header digests of all PDUs.
    pub(crate) fn stamp(&mut self, numbers: &mut SequenceNumbers) {
        for FrameStart { at, status } in &self.starts {
            let Some(bytes) = self.bytes.get_mut(*at..) else {
                continue;
            };
            let Some((header_bytes, rest)) = bytes.split_first_chunk_mut::<HEADER_BYTES>() else {
                continue;
            };
            let mut header = Header(*header_bytes);
            if *status != StatusNumber::Absent {
                header.set_u32(24, numbers.status);
            }
            if *status == StatusNumber::Advance {
                numbers.status = numbers.status.wrapping_add(1);
            }
            header.set_u32(28, numbers.expected_command);
            header.set_u32(32, numbers.command_max());
            *header_bytes = header.0;
            if self.digests.header == Digest::Crc32c
                && let Some(digest) = rest.first_chunk_mut()
            {
                *digest = crc32c(&header.0);
            }
        }
        self.starts.clear();
    }
}

impl AsRef<[u8]> for Frames {
    fn as_ref(&self) -> &[u8] {
        self.bytes.get(..self.end).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::super::pdu::{Digest, Digests, Header, Parsed, parse};
    use super::{Frames, SequenceNumbers, StatusNumber};

    #[test]
    fn numbers_are_given_in_the_order_of_stamping() {
        let digests = Digests {
            header: Digest::Crc32c,
            data: Digest::Crc32c,
        };
        let mut numbers = SequenceNumbers {
            status: 10,
            expected_command: 5,
            command_count: 2,
            window: 8,
        };
        let mut first = Frames::new(digests);
        first.push(Header::response(0x25, 0, 1), StatusNumber::Absent, b"data");
        first.push(Header::response(0x21, 0x80, 1), StatusNumber::Advance, b"");
        let mut second = Frames::with_capacity(digests, 200);
        second.push(Header::response(0x31, 0x80, 2), StatusNumber::Next, b"");
        second.stamp(&mut numbers);
        first.stamp(&mut numbers);
        assert_eq!(numbers.status, 11);
        let mut bytes = [second.as_ref(), first.as_ref()].concat();
        let mut found = Vec::new();
        while !bytes.is_empty() {
            let Parsed::Pdu(pdu, length) = parse(&bytes, digests, 100) else {
                panic!("a PDU");
            };
            assert!(pdu.is_data_intact);
            assert_eq!((pdu.header.u32(28), pdu.header.u32(32)), (5, 10));
            found.push((pdu.header.opcode(), pdu.header.u32(24)));
            bytes.drain(..length);
        }
        assert_eq!(found, [(0x31, 10), (0x25, 0), (0x21, 10)]);
    }

    #[test]
    fn the_window_never_shrinks() {
        let mut numbers = SequenceNumbers {
            status: 0,
            expected_command: u32::MAX - 1,
            command_count: 0,
            window: 4,
        };
        let before = numbers.command_max();
        for _ in 0..4 {
            numbers.expected_command = numbers.expected_command.wrapping_add(1);
            numbers.command_count += 1;
            assert_eq!(numbers.command_max(), before);
        }
        numbers.command_count -= 1;
        assert_eq!(numbers.command_max(), before.wrapping_add(1));
    }
}
