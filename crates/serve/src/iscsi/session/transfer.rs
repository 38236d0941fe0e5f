//! The data that an initiator sends for one command: immediate, unsolicited, and requested (RFC 7143 section 11.7).
//!
//! Data arrives in order: this target insists on `DataPDUInOrder` and `DataSequenceInOrder`. Data that is missing or out
//! of order fails the command, once the initiator has completed the sequences that it has begun.

use std::collections::VecDeque;

use super::super::login::{Parameters, Unsolicited};
use super::super::pdu::{NO_TAG, Pdu};
use super::super::scsi::Sense;

/// A sequence of Data-Out PDUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Burst {
    /// The tag of the request to transfer; [`NO_TAG`] for unsolicited data.
    tag: u32,
    position: u32,
    end: u32,
    next_number: u32,
}

/// A request to transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TransferRequest {
    pub(crate) tag: u32,
    pub(crate) number: u32,
    pub(crate) offset: u32,
    pub(crate) length: u32,
}

/// The state of the data of one command.
#[derive(Debug)]
pub(crate) struct Transfer {
    data: Vec<u8>,
    /// Number of bytes that the command needs.
    wanted: u32,
    /// Open sequences, in the order in which they were requested.
    bursts: VecDeque<Burst>,
    /// The end of the data that arrived without or by requests that were sent.
    requested: u32,
    request_count: u32,
    failure: Option<Sense>,
}

/// The start of a transfer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TransferStart<'a> {
    /// The command.
    pub(crate) pdu: &'a Pdu<'a>,
    /// Number of bytes that the initiator offers.
    pub(crate) offered: u32,
    /// Number of bytes that the command takes.
    pub(crate) taken: u64,
}

impl Transfer {
    pub(crate) fn new(start: &TransferStart<'_>, parameters: &Parameters) -> Self {
        let TransferStart { pdu, offered, taken } = *start;
        let wanted = u32::try_from(taken).unwrap_or(u32::MAX).min(offered);
        let unsolicited_max = parameters.first_burst_bytes.min(offered);
        let immediate = u32::try_from(pdu.data.len()).unwrap_or(u32::MAX);
        let mut transfer = Self {
            data: Vec::new(),
            wanted,
            bursts: VecDeque::new(),
            requested: immediate,
            request_count: 0,
            failure: None,
        };
        if !pdu.is_data_intact {
            transfer.failure = Some(Sense::DATA_LOST);
        }
        if immediate > 0 && (parameters.immediate == Unsolicited::Forbidden || immediate > unsolicited_max) {
            transfer.failure = Some(Sense::UNEXPECTED_UNSOLICITED_DATA);
        }
        transfer.store(pdu.data);
        if offered > 0 && !pdu.header.is_final() {
            if parameters.unsolicited == Unsolicited::Forbidden {
                transfer.failure = Some(Sense::UNEXPECTED_UNSOLICITED_DATA);
            } else {
                transfer.bursts.push_back(Burst {
                    tag: NO_TAG,
                    position: immediate,
                    end: unsolicited_max,
                    next_number: 0,
                });
            }
        }
        transfer
    }

    /// Keeps the part of `data` that the command needs.
    fn store(&mut self, data: &[u8]) {
        let room = holdfast_block::to_usize(u64::from(self.wanted)) - self.data.len();
        self.data
            .extend_from_slice(data.get(..room.min(data.len())).unwrap_or_default());
    }

    /// Takes a Data-Out PDU.
    pub(crate) fn receive(&mut self, pdu: &Pdu<'_>) {
        let tag = pdu.header.word_20();
        let Some(burst) = self.bursts.iter_mut().find(|burst| burst.tag == tag) else {
            let sense = if tag == NO_TAG {
                Sense::UNEXPECTED_UNSOLICITED_DATA
            } else {
                Sense::DATA_LOST
            };
            self.failure.get_or_insert(sense);
            return;
        };
        let length = u32::try_from(pdu.data.len()).unwrap_or(u32::MAX);
        let end = burst.position.checked_add(length);
        let is_in_order = pdu.header.u32(36) == burst.next_number && pdu.header.u32(40) == burst.position;
        let is_valid = is_in_order && pdu.is_data_intact && end.is_some_and(|end| end <= burst.end);
        if is_valid {
            burst.next_number += 1;
            burst.position += length;
        }
        let is_short = tag != NO_TAG && pdu.header.is_final() && burst.position < burst.end;
        let position = burst.position;
        let is_first = self.bursts.front().is_some_and(|burst| burst.tag == tag);
        if !is_valid || is_short || !is_first {
            self.failure.get_or_insert(Sense::DATA_LOST);
        }
        if tag == NO_TAG && is_valid {
            self.requested = position;
        }
        if self.failure.is_none() {
            self.store(pdu.data);
        }
        if pdu.header.is_final() {
            self.bursts.retain(|burst| burst.tag != tag);
        }
    }

    /// The next request to transfer, with the tag `tag`; `None` if none is due.
    pub(crate) fn request(&mut self, tag: u32, parameters: &Parameters) -> Option<TransferRequest> {
        let is_unsolicited_open = self.bursts.front().is_some_and(|burst| burst.tag == NO_TAG);
        let outstanding = u32::try_from(self.bursts.len()).unwrap_or(u32::MAX);
        if self.failure.is_some()
            || is_unsolicited_open
            || self.requested >= self.wanted
            || outstanding >= parameters.outstanding_transfer_count
        {
            return None;
        }
        let offset = self.requested;
        let length = (self.wanted - offset).min(parameters.max_burst_bytes);
        self.requested += length;
        self.bursts.push_back(Burst {
            tag,
            position: offset,
            end: self.requested,
            next_number: 0,
        });
        let number = self.request_count;
        self.request_count += 1;
        if self.data.capacity() == 0 || number == 0 {
            let rest = holdfast_block::to_usize(u64::from(self.wanted)) - self.data.len();
            self.data.reserve_exact(rest);
        }
        Some(TransferRequest {
            tag,
            number,
            offset,
            length,
        })
    }

    /// Whether all data is there, or will never be.
    pub(crate) fn is_complete(&self) -> bool {
        self.bursts.is_empty() && (self.failure.is_some() || self.requested >= self.wanted)
    }

    /// Stops requesting data: the command fails anyway.
    pub(crate) fn give_up(&mut self) {
        self.wanted = u32::try_from(self.data.len()).unwrap_or(0);
    }

    pub(crate) fn failure(&self) -> Option<Sense> {
        self.failure
    }

    pub(crate) fn into_data(self) -> Vec<u8> {
        self.data
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::login::{Parameters, Unsolicited};
    use super::super::super::pdu::{Header, NO_TAG, Pdu};
    use super::super::super::scsi::Sense;
    use super::{Transfer, TransferRequest, TransferStart};

    const PARAMETERS: Parameters = Parameters {
        digests: super::super::super::login::LOGIN_DIGESTS,
        send_segment_bytes: 8192,
        unsolicited: Unsolicited::Allowed,
        immediate: Unsolicited::Allowed,
        first_burst_bytes: 1000,
        max_burst_bytes: 2000,
        outstanding_transfer_count: 2,
    };

    /// A command with `offered` bytes, of which `taken` are needed, and `immediate` bytes of immediate data.
    fn begin(parameters: &Parameters, offered: u32, taken: u64, immediate: usize, is_final: bool) -> Transfer {
        let pdu = Pdu {
            header: Header::response(1, if is_final { 0xa0 } else { 0x20 }, 1),
            data: &vec![7; immediate],
            is_data_intact: true,
        };
        let start = TransferStart {
            pdu: &pdu,
            offered,
            taken,
        };
        Transfer::new(&start, parameters)
    }

    fn send(transfer: &mut Transfer, tag: u32, number: u32, offset: u32, length: usize, is_final: bool) {
        let mut header = Header::response(5, if is_final { 0x80 } else { 0 }, 1);
        header.set_u32(20, tag);
        header.set_u32(36, number);
        header.set_u32(40, offset);
        transfer.receive(&Pdu {
            header,
            data: &vec![7; length],
            is_data_intact: true,
        });
    }

    #[test]
    fn immediate_unsolicited_and_requested_data_make_the_whole() {
        let mut transfer = begin(&PARAMETERS, 6000, 6000, 400, false);
        assert_eq!(
            transfer.request(1, &PARAMETERS),
            None,
            "unsolicited data is still to come"
        );
        send(&mut transfer, NO_TAG, 0, 400, 300, false);
        send(&mut transfer, NO_TAG, 1, 700, 300, true);
        let request = |tag, number, offset, length| {
            Some(TransferRequest {
                tag,
                number,
                offset,
                length,
            })
        };
        assert_eq!(transfer.request(1, &PARAMETERS), request(1, 0, 1000, 2000));
        assert_eq!(transfer.request(2, &PARAMETERS), request(2, 1, 3000, 2000));
        assert_eq!(transfer.request(3, &PARAMETERS), None, "two may be outstanding");
        send(&mut transfer, 1, 0, 1000, 2000, true);
        assert_eq!(transfer.request(3, &PARAMETERS), request(3, 2, 5000, 1000));
        send(&mut transfer, 2, 0, 3000, 1500, false);
        send(&mut transfer, 2, 1, 4500, 500, true);
        assert!(!transfer.is_complete());
        send(&mut transfer, 3, 0, 5000, 1000, true);
        assert!(transfer.is_complete());
        assert_eq!((transfer.failure(), transfer.into_data().len()), (None, 6000));
    }

    #[test]
    fn only_what_the_command_takes_is_kept() {
        let mut transfer = begin(&PARAMETERS, 6000, 512, 800, false);
        send(&mut transfer, NO_TAG, 0, 800, 200, true);
        assert_eq!(transfer.request(1, &PARAMETERS), None);
        assert!(transfer.is_complete());
        assert_eq!(transfer.into_data().len(), 512);
        let transfer = begin(&PARAMETERS, 0, 0, 0, false);
        assert!(transfer.is_complete());
    }

    #[test]
    fn lost_or_unexpected_data_fails_the_command_after_its_last_sequence() {
        let lost = Some(Sense::DATA_LOST);
        for (number, offset, length) in [
            (1, 0, 1000),
            (0, 4, 1000),
            (0, 0, 2001),
            (u32::MAX, 0, 1000),
            (0, u32::MAX, 10),
        ] {
            let mut transfer = begin(&PARAMETERS, 4000, 4000, 0, true);
            transfer.request(1, &PARAMETERS).unwrap();
            send(&mut transfer, 1, number, offset, length, false);
            assert!(!transfer.is_complete(), "the sequence is not over");
            assert_eq!(transfer.request(2, &PARAMETERS), None, "no more is requested");
            send(&mut transfer, 1, 1, 1000, 1000, true);
            assert!(transfer.is_complete());
            assert_eq!(transfer.failure(), lost);
        }
        let mut short = begin(&PARAMETERS, 2000, 2000, 0, true);
        short.request(1, &PARAMETERS).unwrap();
        send(&mut short, 1, 0, 0, 1999, true);
        assert_eq!((short.failure(), short.is_complete()), (lost, true));
        let mut second_first = begin(&PARAMETERS, 4000, 4000, 0, true);
        second_first.request(1, &PARAMETERS).unwrap();
        second_first.request(2, &PARAMETERS).unwrap();
        send(&mut second_first, 2, 0, 2000, 2000, true);
        assert_eq!(second_first.failure(), lost);
        let unexpected = Some(Sense::UNEXPECTED_UNSOLICITED_DATA);
        let none = Parameters {
            unsolicited: Unsolicited::Forbidden,
            immediate: Unsolicited::Forbidden,
            ..PARAMETERS
        };
        assert_eq!(begin(&none, 2000, 2000, 4, true).failure(), unexpected);
        assert_eq!(begin(&none, 2000, 2000, 0, false).failure(), unexpected);
        assert_eq!(begin(&PARAMETERS, 2000, 2000, 1001, true).failure(), unexpected);
        let mut late = begin(&PARAMETERS, 2000, 2000, 0, true);
        send(&mut late, NO_TAG, 0, 0, 10, true);
        assert_eq!(late.failure(), unexpected);
    }
}
