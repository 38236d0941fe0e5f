//! A client that sends exactly the given bytes, valid or not, and parses the replies.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// Timeout of a reply, generous for a busy host.
const PATIENCE: Duration = Duration::from_secs(20);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Style {
    Simple,
    Structured,
    Extended,
}

/// The replies to an option: kind and data of each.
pub(crate) type OptionReplies = Vec<(u32, Vec<u8>)>;

/// The reply to a request.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Answer {
    /// 0 for success.
    pub(crate) error: u32,
    /// Kinds and payloads of all chunks; the data of a simple reply is a chunk of kind 1 with its offset before it.
    pub(crate) chunks: Vec<(u16, Vec<u8>)>,
}

pub(crate) struct Raw {
    stream: UnixStream,
    pub(crate) style: Style,
}

impl Raw {
    /// Connects and receives the greeting, which must be that of the fixed newstyle.
    pub(crate) fn connect(socket: &Path) -> Self {
        let stream = UnixStream::connect(socket).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        let mut raw = Self {
            stream,
            style: Style::Simple,
        };
        let greeting = raw.take(18).expect("a greeting");
        assert_eq!(&greeting[..16], b"NBDMAGICIHAVEOPT");
        assert_eq!(greeting[17] & 3, 3, "fixed newstyle, and no zeroes");
        raw
    }

    /// Connects, selects the contexts, and enters the transmission phase of `export` in `style`; `None` if the server
    /// does not support them.
    pub(crate) fn enter(socket: &Path, export: &str, style: Style, contexts: &[&str]) -> Option<Self> {
        let mut raw = Self::connect(socket);
        raw.say(&3_u32.to_be_bytes());
        raw.agree_on(style)?;
        if !contexts.is_empty() {
            let replies = raw.option(10, &context_query(export, contexts))?;
            assert_eq!(replies.last().unwrap().0, 1, "contexts can be selected: {replies:x?}");
        }
        let replies = raw.option(7, &info_query(export, &[]))?;
        assert_eq!(replies.last().unwrap().0, 1, "the export can be used: {replies:x?}");
        Some(raw)
    }

    pub(crate) fn agree_on(&mut self, style: Style) -> Option<()> {
        let option = match style {
            Style::Simple => return Some(()),
            Style::Structured => 8,
            Style::Extended => 11,
        };
        if self.option(option, &[])?.last()?.0 != 1 {
            return None;
        }
        self.style = style;
        Some(())
    }

    /// Sends bytes. A closed connection is detected when no reply comes.
    pub(crate) fn say(&mut self, bytes: &[u8]) {
        match self.stream.write_all(bytes) {
            Err(error) if matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset) => {}
            printed => printed.unwrap(),
        }
    }

    /// Receives bytes; `None` if the peer closed the connection.
    pub(crate) fn take(&mut self, length: usize) -> Option<Vec<u8>> {
        let mut bytes = vec![0; length];
        match self.stream.read_exact(&mut bytes) {
            Ok(()) => Some(bytes),
            Err(error) if matches!(error.kind(), ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset) => None,
            Err(error) => panic!("no answer: {error}"),
        }
    }

    /// Sends an option and receives all replies to it; `None` if the connection was closed.
    pub(crate) fn option(&mut self, option: u32, data: &[u8]) -> Option<OptionReplies> {
        self.say(&option_bytes(option, data));
        self.option_replies(option)
    }

    pub(crate) fn option_replies(&mut self, option: u32) -> Option<OptionReplies> {
        let mut replies = OptionReplies::new();
        loop {
            let header = self.take(20)?;
            assert_eq!(&header[..8], &0x0003_e889_0455_65a9_u64.to_be_bytes());
            assert_eq!(u32_at(&header, 8), option, "the reply is for the same option");
            let kind = u32_at(&header, 12);
            let data = self.take(u32_at(&header, 16) as usize)?;
            replies.push((kind, data));
            if kind == 1 || kind & 0x8000_0000 != 0 {
                return Some(replies);
            }
        }
    }

    /// The header of a request in the negotiated style.
    pub(crate) fn header(&self, flags: u16, kind: u16, cookie: u64, offset: u64, length: u64) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend(match self.style {
            Style::Extended => 0x21e4_1c71_u32.to_be_bytes(),
            _ => 0x2560_9513_u32.to_be_bytes(),
        });
        bytes.extend(flags.to_be_bytes());
        bytes.extend(kind.to_be_bytes());
        bytes.extend(cookie.to_be_bytes());
        bytes.extend(offset.to_be_bytes());
        match self.style {
            Style::Extended => bytes.extend(length.to_be_bytes()),
            _ => bytes.extend(u32::try_from(length).unwrap().to_be_bytes()),
        }
        bytes
    }

    /// Receives the reply to a request; `data_length` is the length of the data after a successful simple reply.
    pub(crate) fn answer(&mut self, cookie: u64, offset: u64, data_length: usize) -> Option<Answer> {
        let mut answer = Answer::default();
        loop {
            let magic = u32_at(&self.take(4)?, 0);
            if magic == 0x6744_6698 {
                assert_ne!(self.style, Style::Extended, "extended headers were negotiated");
                let header = self.take(12)?;
                assert_eq!(u64_at(&header, 4), cookie);
                answer.error = u32_at(&header, 0);
                if answer.error == 0 && data_length > 0 {
                    let data = self.take(data_length)?;
                    answer
                        .chunks
                        .push((1, [&offset.to_be_bytes(), data.as_slice()].concat()));
                }
                return Some(answer);
            }
            let (header, length) = match magic {
                0x668e_33ef => {
                    let header = self.take(16)?;
                    let length = u32_at(&header, 12) as usize;
                    (header, length)
                }
                0x6e8a_278c => {
                    let header = self.take(28)?;
                    assert_eq!(u64_at(&header, 12), offset, "the offset is that of the request");
                    let length = usize::try_from(u64_at(&header, 20)).unwrap();
                    (header, length)
                }
                other => panic!("a reply begins with {other:x}"),
            };
            assert_eq!(u64_at(&header, 4), cookie);
            let kind = u16_at(&header, 2);
            let payload = self.take(length)?;
            if kind & 0x8000 != 0 {
                answer.error = u32_at(&payload, 0);
                let message = &payload[6..6 + usize::from(u16_at(&payload, 4))];
                assert!(std::str::from_utf8(message).is_ok());
            }
            answer.chunks.push((kind, payload));
            if u16_at(&header, 0) & 1 != 0 {
                return Some(answer);
            }
        }
    }

    /// Sends a request and receives the reply.
    pub(crate) fn ask(&mut self, flags: u16, kind: u16, offset: u64, length: u64, payload: &[u8]) -> Option<Answer> {
        let cookie = 0x1234_5678_9abc_def0 ^ offset ^ length;
        let header = self.header(flags, kind, cookie, offset, length);
        self.say(&[header.as_slice(), payload].concat());
        let data_length = if kind == 0 { length } else { 0 };
        self.answer(cookie, offset, usize::try_from(data_length).unwrap_or(0))
    }

    /// Reads a range, which must succeed.
    pub(crate) fn read(&mut self, offset: u64, length: usize) -> Vec<u8> {
        let answer = self.ask(0, 0, offset, length as u64, &[]).expect("an answer");
        assert_eq!(answer.error, 0, "a read of {length} bytes at {offset}");
        answer.data(offset, length)
    }
}

impl Answer {
    /// The bytes of a read, assembled from its chunks, which must cover it without overlap.
    pub(crate) fn data(&self, offset: u64, length: usize) -> Vec<u8> {
        let mut bytes: Vec<Option<u8>> = vec![None; length];
        for (kind, payload) in &self.chunks {
            let zeroes;
            let data = match kind {
                1 => &payload[8..],
                2 => {
                    zeroes = vec![0; u32_at(payload, 8) as usize];
                    &zeroes[..]
                }
                0 => continue,
                other => panic!("a chunk of kind {other}"),
            };
            let start = usize::try_from(u64_at(payload, 0) - offset).unwrap();
            for (place, byte) in bytes[start..].iter_mut().zip(data) {
                assert_eq!(place.replace(*byte), None, "chunks overlap");
            }
        }
        bytes
            .into_iter()
            .map(|byte| byte.expect("chunks leave a gap"))
            .collect()
    }
}

pub(crate) fn option_bytes(option: u32, data: &[u8]) -> Vec<u8> {
    let length = u32::try_from(data.len()).unwrap();
    [
        b"IHAVEOPT",
        option.to_be_bytes().as_slice(),
        &length.to_be_bytes(),
        data,
    ]
    .concat()
}

/// The data of INFO and GO.
pub(crate) fn info_query(export: &str, wanted: &[u16]) -> Vec<u8> {
    let mut data = string(export);
    data.extend(u16::try_from(wanted.len()).unwrap().to_be_bytes());
    data.extend(wanted.iter().flat_map(|kind| kind.to_be_bytes()));
    data
}

/// The data of LIST_META_CONTEXT and SET_META_CONTEXT.
pub(crate) fn context_query(export: &str, queries: &[&str]) -> Vec<u8> {
    let mut data = string(export);
    data.extend(u32::try_from(queries.len()).unwrap().to_be_bytes());
    data.extend(queries.iter().flat_map(|query| string(query)));
    data
}

pub(crate) fn string(text: &str) -> Vec<u8> {
    [
        u32::try_from(text.len()).unwrap().to_be_bytes().as_slice(),
        text.as_bytes(),
    ]
    .concat()
}

pub(crate) fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes(bytes[at..at + 2].try_into().unwrap())
}

pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(bytes[at..at + 4].try_into().unwrap())
}

pub(crate) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap())
}
