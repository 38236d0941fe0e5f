//! The status of commands, and sense data (SPC-4 section 4.5).

/// Bytes of fixed-format sense data.
pub(crate) const SENSE_BYTES: usize = 18;

/// The status of a command (SAM-5 section 5.3).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ScsiStatus {
    Good = 0x00,
    CheckCondition = 0x02,
    ReservationConflict = 0x18,
    TaskAborted = 0x40,
}

/// The category of an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SenseKey {
    NoSense = 0x0,
    MediumError = 0x3,
    HardwareError = 0x4,
    IllegalRequest = 0x5,
    UnitAttention = 0x6,
    DataProtect = 0x7,
    AbortedCommand = 0xb,
    Miscompare = 0xe,
}

/// Why a command failed: the key, and the additional sense code with its qualifier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sense {
    pub(crate) key: SenseKey,
    pub(crate) code: u16,
    /// A block address or an offset.
    pub(crate) information: Option<u32>,
}

const fn sense(key: SenseKey, code: u16) -> Sense {
    Sense {
        key,
        code,
        information: None,
    }
}

impl Sense {
    pub(crate) const NONE: Self = sense(SenseKey::NoSense, 0x0000);
    pub(crate) const UNRECOVERED_READ_ERROR: Self = sense(SenseKey::MediumError, 0x1100);
    pub(crate) const WRITE_ERROR: Self = sense(SenseKey::MediumError, 0x0c00);
    pub(crate) const INTERNAL_FAILURE: Self = sense(SenseKey::HardwareError, 0x4400);
    pub(crate) const PARAMETER_LIST_LENGTH_ERROR: Self = sense(SenseKey::IllegalRequest, 0x1a00);
    pub(crate) const INVALID_OPERATION_CODE: Self = sense(SenseKey::IllegalRequest, 0x2000);
    pub(crate) const ADDRESS_OUT_OF_RANGE: Self = sense(SenseKey::IllegalRequest, 0x2100);
    pub(crate) const INVALID_FIELD_IN_CDB: Self = sense(SenseKey::IllegalRequest, 0x2400);
    pub(crate) const UNIT_NOT_SUPPORTED: Self = sense(SenseKey::IllegalRequest, 0x2500);
    pub(crate) const INVALID_FIELD_IN_PARAMETERS: Self = sense(SenseKey::IllegalRequest, 0x2600);
    pub(crate) const INVALID_RELEASE: Self = sense(SenseKey::IllegalRequest, 0x2604);
    pub(crate) const SAVING_NOT_SUPPORTED: Self = sense(SenseKey::IllegalRequest, 0x3900);
    pub(crate) const INSUFFICIENT_REGISTRATIONS: Self = sense(SenseKey::IllegalRequest, 0x5504);
    pub(crate) const WRITE_PROTECTED: Self = sense(SenseKey::DataProtect, 0x2700);
    pub(crate) const SPACE_ALLOCATION_FAILED: Self = sense(SenseKey::DataProtect, 0x2707);
    pub(crate) const MISCOMPARE_DURING_VERIFY: Self = sense(SenseKey::Miscompare, 0x1d00);
    /// "Protocol service CRC error": data was lost or arrived out of order (RFC 7143 section 11.4.7.2).
    pub(crate) const DATA_LOST: Self = sense(SenseKey::AbortedCommand, 0x4705);
    pub(crate) const UNEXPECTED_UNSOLICITED_DATA: Self = sense(SenseKey::AbortedCommand, 0x0c0c);

    /// A condition that the initiator has to know of before its next command.
    pub(crate) const fn attention(code: u16) -> Self {
        sense(SenseKey::UnitAttention, code)
    }

    pub(crate) const fn with_information(mut self, information: u32) -> Self {
        self.information = Some(information);
        self
    }

    /// Fixed-format sense data.
    pub(crate) fn encode(self) -> [u8; SENSE_BYTES] {
        let mut data = [0; SENSE_BYTES];
        data[0] = 0x70;
        data[2] = self.key as u8;
        data[7] = 10;
        [data[12], data[13]] = self.code.to_be_bytes();
        if let Some(information) = self.information {
            data[0] |= 0x80;
            [data[3], data[4], data[5], data[6]] = information.to_be_bytes();
        }
        data
    }
}

/// Why a command did not succeed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Failure {
    /// CHECK CONDITION.
    Check(Sense),
    /// RESERVATION CONFLICT.
    Reserved,
}

impl From<Sense> for Failure {
    fn from(sense: Sense) -> Self {
        Self::Check(sense)
    }
}
