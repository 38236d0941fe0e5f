//! Responses to SCSI commands: data, status, sense data and residual counts (RFC 7143 sections 11.4 and 11.7).

use std::cmp::Ordering;

use holdfast_block::{BlockDevice, Error as DeviceError, to_usize};

use super::super::frames::{Frames, StatusNumber};
use super::super::login::Parameters;
use super::super::pdu::{FLAG_FINAL, Header, NO_TAG, response};
use super::super::scsi::{CommandResult, DataIn, SENSE_BYTES, read_failure};

const FLAG_OVERFLOW: u8 = 0x04;
const FLAG_UNDERFLOW: u8 = 0x02;
/// A Data-In PDU carries the status.
const FLAG_STATUS: u8 = 0x01;

/// The direction and the amount of data that an initiator expects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Expected {
    /// The initiator receives at most so many bytes.
    In(u32),
    /// The initiator sends at most so many bytes; the command takes the second number.
    Out { offered: u32, taken: u64 },
}

/// A command to be answered.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Answered<'a> {
    pub(crate) task_tag: u32,
    pub(crate) expected: Expected,
    pub(crate) parameters: &'a Parameters,
}

/// The difference between the expected and the actual amount of data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Residual {
    flags: u8,
    count: u32,
}

impl Residual {
    fn of(expected: u32, actual: u64) -> Self {
        let expected = u64::from(expected);
        let (flags, difference) = match actual.cmp(&expected) {
            Ordering::Greater => (FLAG_OVERFLOW, actual - expected),
            Ordering::Less => (FLAG_UNDERFLOW, expected - actual),
            Ordering::Equal => (0, 0),
        };
        Self {
            flags,
            count: u32::try_from(difference).unwrap_or(u32::MAX),
        }
    }
}

impl Answered<'_> {
    /// Encodes the response. Data of the device is read on the way; an error of the device becomes the status, and is
    /// the second value.
    pub(crate) fn encode(
        &self,
        result: &CommandResult,
        device: Option<&dyn BlockDevice>,
    ) -> (Frames, Option<DeviceError>) {
        let Expected::In(expected) = self.expected else {
            return (self.status_only(result, 0), None);
        };
        let length = result.data.len().min(u64::from(expected));
        if length == 0 {
            return (self.status_only(result, 0), None);
        }
        match self.with_data(result, device, to_usize(length)) {
            Ok(frames) => (frames, None),
            Err(error) => {
                let failed = read_failure(error);
                (self.status_only(&failed.failure.into(), 0), failed.error)
            }
        }
    }

    fn residual(&self, result: &CommandResult) -> Residual {
        match self.expected {
            Expected::In(expected) => Residual::of(expected, result.data.len()),
            Expected::Out { offered, taken } => Residual::of(offered, taken),
        }
    }

    fn with_data(
        &self,
        result: &CommandResult,
        device: Option<&dyn BlockDevice>,
        length: usize,
    ) -> Result<Frames, DeviceError> {
        let parameters = self.parameters;
        let segment = to_usize(u64::from(parameters.send_segment_bytes));
        let burst = to_usize(u64::from(parameters.max_burst_bytes));
        let pdus = length.div_ceil(segment) + length.div_ceil(burst);
        let capacity = length + pdus * (Frames::pdu_bytes(parameters.digests, 1));
        let mut frames = Frames::with_capacity(parameters.digests, capacity);
        let has_status = result.sense.is_none();
        let (mut offset, mut number) = (0, 0);
        while offset < length {
            let burst_end = (offset / burst + 1) * burst;
            let end = (offset + segment).min(burst_end).min(length);
            let is_last = end == length;
            let mut header = Header::response(response::DATA_IN, 0, self.task_tag);
            header.set_u32(20, NO_TAG);
            header.set_u32(36, number);
            header.set_u32(40, u32::try_from(offset).unwrap_or(u32::MAX));
            if is_last || end == burst_end {
                header.0[1] = FLAG_FINAL;
            }
            let mut status = StatusNumber::Absent;
            if is_last && has_status {
                let residual = self.residual(result);
                header.0[1] |= FLAG_STATUS | residual.flags;
                header.0[3] = result.status as u8;
                header.set_u32(44, residual.count);
                status = StatusNumber::Advance;
            }
            let space = frames.begin(header, status, end - offset);
            match (&result.data, device) {
                (DataIn::Bytes(bytes), _) => space.copy_from_slice(bytes.get(offset..end).unwrap_or_default()),
                (DataIn::Device { offset: start, .. }, Some(device)) => device.read_at(space, start + offset as u64)?,
                (DataIn::Device { .. }, None) => {}
            }
            frames.seal();
            offset = end;
            number += 1;
        }
        if !has_status {
            frames.append(self.status_only(result, number));
        }
        Ok(frames)
    }

    /// A SCSI Response PDU; `data_count` Data-In PDUs came before it.
    fn status_only(&self, result: &CommandResult, data_count: u32) -> Frames {
        let mut frames = Frames::new(self.parameters.digests);
        let residual = self.residual(result);
        let mut header = Header::response(response::SCSI, FLAG_FINAL | residual.flags, self.task_tag);
        header.0[3] = result.status as u8;
        header.set_u32(36, data_count);
        header.set_u32(44, residual.count);
        match result.sense {
            None => frames.push(header, StatusNumber::Advance, &[]),
            Some(sense) => {
                let mut data = [0; 2 + SENSE_BYTES];
                let length = u16::try_from(SENSE_BYTES).unwrap_or(0);
                [data[0], data[1]] = length.to_be_bytes();
                if let Some(space) = data.last_chunk_mut() {
                    *space = sense.encode();
                }
                frames.push(header, StatusNumber::Advance, &data);
            }
        }
        frames
    }
}
