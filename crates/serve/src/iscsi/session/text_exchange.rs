//! Text requests in the full feature phase: lists of targets, in parts if they are long (RFC 7143 sections 11.10 and
//! 11.11).

use holdfast_block::to_usize;

use super::super::login::Parameters;
use super::super::pdu::{FLAG_CONTINUE, FLAG_FINAL, NO_TAG, Pdu, RejectReason};
use super::super::text;

/// Limit of the text of one request with all its continuations.
const REQUEST_BYTES_MAX: usize = 16 << 10;
/// The tag of an exchange that continues; one is enough, because there is one exchange at a time.
const EXCHANGE_TAG: u32 = 1;

/// The text that was received or is still to be sent.
#[derive(Debug, Default)]
pub(crate) struct TextExchange {
    received: Vec<u8>,
    rest: Vec<u8>,
}

/// A part of the answer to a text request.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct TextAnswer {
    pub(crate) flags: u8,
    pub(crate) tag: u32,
    pub(crate) data: Vec<u8>,
}

impl TextExchange {
    /// Handles a request. `list` returns the answer to `SendTargets`, for one target or for all.
    pub(crate) fn request(
        &mut self,
        pdu: &Pdu<'_>,
        parameters: &mut Parameters,
        list: &dyn Fn(Option<&str>) -> Option<Vec<u8>>,
    ) -> Result<TextAnswer, RejectReason> {
        let tag = pdu.header.word_20();
        if tag == NO_TAG {
            // A new exchange replaces one that was not completed.
            *self = Self::default();
        } else if tag != EXCHANGE_TAG {
            return Err(RejectReason::ProtocolError);
        }
        if !self.rest.is_empty() {
            return Ok(self.next_part(parameters));
        }
        if self.received.len() + pdu.data.len() > REQUEST_BYTES_MAX {
            return Err(RejectReason::ProtocolError);
        }
        self.received.extend(pdu.data);
        if pdu.header.flags() & FLAG_CONTINUE != 0 {
            return Ok(TextAnswer {
                flags: 0,
                tag: EXCHANGE_TAG,
                data: Vec::new(),
            });
        }
        let received = std::mem::take(&mut self.received);
        self.rest = answer(&received, parameters, list)?;
        Ok(self.next_part(parameters))
    }

    fn next_part(&mut self, parameters: &Parameters) -> TextAnswer {
        let length = to_usize(u64::from(parameters.send_segment_bytes)).min(self.rest.len());
        let data: Vec<u8> = self.rest.drain(..length).collect();
        let (flags, tag) = if self.rest.is_empty() {
            (FLAG_FINAL, NO_TAG)
        } else {
            (FLAG_CONTINUE, EXCHANGE_TAG)
        };
        TextAnswer { flags, tag, data }
    }
}

fn answer(
    received: &[u8],
    parameters: &mut Parameters,
    list: &dyn Fn(Option<&str>) -> Option<Vec<u8>>,
) -> Result<Vec<u8>, RejectReason> {
    let pairs = text::parse(received).ok_or(RejectReason::ProtocolError)?;
    let mut answer = Vec::new();
    for pair in pairs {
        match (pair.key, pair.value) {
            ("SendTargets", "All") => answer.extend(list(None).unwrap_or_default()),
            ("SendTargets", name) => answer.extend(list(Some(name)).ok_or(RejectReason::InvalidField)?),
            ("MaxRecvDataSegmentLength", value) => {
                let length = text::number(value).and_then(|length| u32::try_from(length).ok());
                let length = length.filter(|length| (512..=0x00ff_ffff).contains(length));
                parameters.send_segment_bytes = length.ok_or(RejectReason::InvalidField)?;
            }
            (key, _) => text::push(&mut answer, key, "NotUnderstood"),
        }
    }
    Ok(answer)
}

#[cfg(test)]
mod tests {
    use super::super::super::login::Parameters;
    use super::super::super::pdu::{Header, NO_TAG, Pdu, RejectReason};
    use super::{TextAnswer, TextExchange};

    fn request(exchange: &mut TextExchange, flags: u8, tag: u32, data: &[u8]) -> Result<TextAnswer, RejectReason> {
        let mut header = Header::response(4, flags, 1);
        header.set_u32(20, tag);
        let pdu = Pdu {
            header,
            data,
            is_data_intact: true,
        };
        let mut parameters = Parameters {
            send_segment_bytes: 512,
            ..Parameters::default()
        };
        let list = |name: Option<&str>| match name {
            None => Some(vec![b'x'; 1200]),
            Some("iqn.known") => Some(b"known".to_vec()),
            Some(_) => None,
        };
        exchange.request(&pdu, &mut parameters, &list)
    }

    #[test]
    fn a_long_answer_comes_in_parts() {
        let mut exchange = TextExchange::default();
        let mut parts = vec![request(&mut exchange, 0x80, NO_TAG, b"SendTargets=All\0").unwrap()];
        while parts.last().unwrap().flags != 0x80 {
            parts.push(request(&mut exchange, 0x80, 1, b"").unwrap());
        }
        let shape: Vec<_> = parts
            .iter()
            .map(|part| (part.flags, part.tag, part.data.len()))
            .collect();
        assert_eq!(shape, [(0x40, 1, 512), (0x40, 1, 512), (0x80, NO_TAG, 176)]);
    }

    #[test]
    fn requests_may_be_continued_and_wrong_ones_are_rejected() {
        let mut exchange = TextExchange::default();
        let part = request(&mut exchange, 0x40, NO_TAG, b"SendTarg").unwrap();
        assert_eq!((part.flags, part.tag, part.data.len()), (0, 1, 0));
        let done = request(&mut exchange, 0x80, 1, b"ets=iqn.known\0A=1\0").unwrap();
        assert_eq!(done.data, b"knownA=NotUnderstood\0");
        for (tag, text, reason) in [
            (NO_TAG, &b"SendTargets=iqn.other\0"[..], RejectReason::InvalidField),
            (NO_TAG, b"MaxRecvDataSegmentLength=5\0", RejectReason::InvalidField),
            (NO_TAG, b"nonsense\0", RejectReason::ProtocolError),
            (77, b"SendTargets=All\0", RejectReason::ProtocolError),
            (NO_TAG, &vec![b'a'; 17 << 10], RejectReason::ProtocolError),
        ] {
            assert_eq!(request(&mut exchange, 0x80, tag, text), Err(reason));
        }
    }
}
