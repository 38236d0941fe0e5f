//! The parameters of a session, and the negotiation of each key (RFC 7143 section 13).

use super::super::pdu::{Digest, Digests};
use super::super::text::{self, Pair};

/// The maximum data segment that this target accepts.
pub(crate) const RECEIVE_SEGMENT_BYTES: u32 = 256 << 10;
/// The maximum data segment in either direction until the parties agree on another one.
pub(crate) const DEFAULT_SEGMENT_BYTES: u32 = 8192;
/// Unsolicited data of one command. It is received without a lease of the memory budget.
pub(crate) const FIRST_BURST_BYTES: u32 = 64 << 10;
/// Data that one request to transfer asks for.
const MAX_BURST_BYTES: u32 = 1 << 20;
/// Requests to transfer that one command may have at a time: the initiator never waits for the next one.
const OUTSTANDING_TRANSFER_COUNT: u32 = 8;
const LENGTH_MAX: u32 = 0x00ff_ffff;

/// Whether a session is for discovery only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SessionType {
    Discovery,
    Normal,
}

/// Whether an initiator may send data that was not requested.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unsolicited {
    Allowed,
    Forbidden,
}

/// The agreed parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Parameters {
    pub(crate) digests: Digests,
    /// The longest data segment that the initiator accepts.
    pub(crate) send_segment_bytes: u32,
    /// Whether Data-Out PDUs may precede the first request to transfer.
    pub(crate) unsolicited: Unsolicited,
    /// Whether a command may have a data segment.
    pub(crate) immediate: Unsolicited,
    pub(crate) first_burst_bytes: u32,
    pub(crate) max_burst_bytes: u32,
    pub(crate) outstanding_transfer_count: u32,
}

impl Default for Parameters {
    /// The defaults of the RFC.
    fn default() -> Self {
        Self {
            digests: Digests::default(),
            send_segment_bytes: DEFAULT_SEGMENT_BYTES,
            unsolicited: Unsolicited::Forbidden,
            immediate: Unsolicited::Allowed,
            first_burst_bytes: 64 << 10,
            max_burst_bytes: 256 << 10,
            outstanding_transfer_count: 1,
        }
    }
}

/// The reaction to a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum KeyAnswer {
    /// The key was a declaration.
    Silence,
    Value(String),
    /// The offered values include no acceptable one: the login fails.
    Unacceptable,
}

impl KeyAnswer {
    fn constant(value: &str) -> Self {
        Self::Value(value.to_owned())
    }
}

const REJECT: &str = "Reject";
const IRRELEVANT: &str = "Irrelevant";
const NOT_UNDERSTOOD: &str = "NotUnderstood";

/// Which of two numbers is the result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Choice {
    Smaller,
    Larger,
}

/// A numerical key.
struct NumberKey {
    key: &'static str,
    range: std::ops::RangeInclusive<u32>,
    ours: u32,
    choice: Choice,
    set: fn(&mut Parameters, u32),
}

const fn ignore(_: &mut Parameters, _: u32) {}

const NUMBERS: &[NumberKey] = &[
    NumberKey {
        key: "MaxConnections",
        range: 1..=65535,
        ours: 1,
        choice: Choice::Smaller,
        set: ignore,
    },
    NumberKey {
        key: "MaxBurstLength",
        range: 512..=LENGTH_MAX,
        ours: MAX_BURST_BYTES,
        choice: Choice::Smaller,
        set: |parameters, value| parameters.max_burst_bytes = value,
    },
    NumberKey {
        key: "FirstBurstLength",
        range: 512..=LENGTH_MAX,
        ours: FIRST_BURST_BYTES,
        choice: Choice::Smaller,
        set: |parameters, value| parameters.first_burst_bytes = value,
    },
    NumberKey {
        key: "MaxOutstandingR2T",
        range: 1..=65535,
        ours: OUTSTANDING_TRANSFER_COUNT,
        choice: Choice::Smaller,
        set: |parameters, value| parameters.outstanding_transfer_count = value,
    },
    NumberKey {
        key: "DefaultTime2Wait",
        range: 0..=3600,
        ours: 0,
        choice: Choice::Larger,
        set: ignore,
    },
    // Tasks of a lost connection are not kept: error recovery level 0.
    NumberKey {
        key: "DefaultTime2Retain",
        range: 0..=3600,
        ours: 0,
        choice: Choice::Smaller,
        set: ignore,
    },
    NumberKey {
        key: "ErrorRecoveryLevel",
        range: 0..=2,
        ours: 0,
        choice: Choice::Smaller,
        set: ignore,
    },
    NumberKey {
        key: "iSCSIProtocolLevel",
        range: 0..=31,
        ours: 1,
        choice: Choice::Smaller,
        set: ignore,
    },
];

/// A key whose result is the conjunction or the disjunction of both sides.
struct BooleanKey {
    key: &'static str,
    ours: bool,
    is_disjunction: bool,
    set: fn(&mut Parameters, bool),
}

const BOOLEANS: &[BooleanKey] = &[
    BooleanKey {
        key: "InitialR2T",
        ours: false,
        is_disjunction: true,
        set: |parameters, value| {
            parameters.unsolicited = if value {
                Unsolicited::Forbidden
            } else {
                Unsolicited::Allowed
            }
        },
    },
    BooleanKey {
        key: "ImmediateData",
        ours: true,
        is_disjunction: false,
        set: |parameters, value| {
            parameters.immediate = if value {
                Unsolicited::Allowed
            } else {
                Unsolicited::Forbidden
            }
        },
    },
    BooleanKey {
        key: "DataPDUInOrder",
        ours: true,
        is_disjunction: true,
        set: |_, _| (),
    },
    BooleanKey {
        key: "DataSequenceInOrder",
        ours: true,
        is_disjunction: true,
        set: |_, _| (),
    },
    // "The implementation MAY alternatively respond with a No value."
    BooleanKey {
        key: "OFMarker",
        ours: false,
        is_disjunction: false,
        set: |_, _| (),
    },
    BooleanKey {
        key: "IFMarker",
        ours: false,
        is_disjunction: false,
        set: |_, _| (),
    },
    BooleanKey {
        key: "RDMAExtensions",
        ours: false,
        is_disjunction: false,
        set: |_, _| (),
    },
];

/// Keys that only make sense when there are data transfers: their value in a discovery session is "Irrelevant".
const NORMAL_SESSION_KEYS: &[&str] = &[
    "MaxConnections",
    "InitialR2T",
    "ImmediateData",
    "MaxBurstLength",
    "FirstBurstLength",
    "MaxOutstandingR2T",
    "DataPDUInOrder",
    "DataSequenceInOrder",
    "TaskReporting",
];

/// Answers an operational key, and applies its result.
pub(crate) fn negotiate(pair: Pair<'_>, session: SessionType, parameters: &mut Parameters) -> KeyAnswer {
    let Pair { key, value } = pair;
    if session == SessionType::Discovery && NORMAL_SESSION_KEYS.contains(&key) {
        return KeyAnswer::constant(IRRELEVANT);
    }
    if let Some(number) = NUMBERS.iter().find(|number| number.key == key) {
        return negotiate_number(number, value, parameters);
    }
    if let Some(boolean) = BOOLEANS.iter().find(|boolean| boolean.key == key) {
        return negotiate_boolean(boolean, value, parameters);
    }
    match key {
        "HeaderDigest" => negotiate_digest(value, &mut parameters.digests.header),
        "DataDigest" => negotiate_digest(value, &mut parameters.digests.data),
        "MaxRecvDataSegmentLength" => match in_range(value, 512..=LENGTH_MAX) {
            Some(length) => {
                parameters.send_segment_bytes = length;
                KeyAnswer::Silence
            }
            None => KeyAnswer::constant(REJECT),
        },
        "TaskReporting" => {
            let is_offered = value.split(',').any(|offer| offer == "RFC3720");
            KeyAnswer::constant(if is_offered { "RFC3720" } else { REJECT })
        }
        // Obsolete keys: "MUST respond with the constant Reject value". The others belong to the full feature phase, or
        // to targets.
        "OFMarkInt" | "IFMarkInt" | "SendTargets" | "TargetAddress" | "TargetPortalGroupTag" | "AuthMethod" => {
            KeyAnswer::constant(REJECT)
        }
        "InitiatorAlias" | "TargetAlias" => KeyAnswer::Silence,
        "InitiatorRecvDataSegmentLength"
        | "TargetRecvDataSegmentLength"
        | "MaxOutstandingUnexpectedPDUs"
        | "MaxAHSLength"
        | "TaggedBufferForSolicitedDataOnly"
        | "iSERHelloRequired" => KeyAnswer::constant(IRRELEVANT),
        _ => KeyAnswer::constant(NOT_UNDERSTOOD),
    }
}

fn in_range(value: &str, range: std::ops::RangeInclusive<u32>) -> Option<u32> {
    let number = u32::try_from(text::number(value)?).ok()?;
    range.contains(&number).then_some(number)
}

fn negotiate_number(key: &NumberKey, value: &str, parameters: &mut Parameters) -> KeyAnswer {
    let Some(theirs) = in_range(value, key.range.clone()) else {
        return KeyAnswer::constant(REJECT);
    };
    let result = match key.choice {
        Choice::Smaller => theirs.min(key.ours),
        Choice::Larger => theirs.max(key.ours),
    };
    (key.set)(parameters, result);
    KeyAnswer::Value(result.to_string())
}

fn negotiate_boolean(key: &BooleanKey, value: &str, parameters: &mut Parameters) -> KeyAnswer {
    let theirs = match value {
        "Yes" => true,
        "No" => false,
        _ => return KeyAnswer::constant(REJECT),
    };
    let result = if key.is_disjunction {
        theirs || key.ours
    } else {
        theirs && key.ours
    };
    (key.set)(parameters, result);
    KeyAnswer::constant(if result { "Yes" } else { "No" })
}

/// Chooses the first digest that this target knows: the initiator lists them in the order of its preference.
fn negotiate_digest(value: &str, digest: &mut Digest) -> KeyAnswer {
    for offer in value.split(',') {
        match offer {
            "None" => *digest = Digest::None,
            "CRC32C" => *digest = Digest::Crc32c,
            _ => continue,
        }
        return KeyAnswer::constant(offer);
    }
    KeyAnswer::Unacceptable
}

#[cfg(test)]
mod tests {
    use super::super::super::pdu::Digest;
    use super::super::super::text::Pair;
    use super::{KeyAnswer, Parameters, SessionType, Unsolicited, negotiate};

    fn answers(session: SessionType, offers: &[(&str, &str, &str)]) -> Parameters {
        let mut parameters = Parameters::default();
        for (key, value, expected) in offers {
            let answer = match negotiate(Pair { key, value }, session, &mut parameters) {
                KeyAnswer::Silence => String::new(),
                KeyAnswer::Value(value) => value,
                KeyAnswer::Unacceptable => "!".to_owned(),
            };
            assert_eq!(answer, *expected, "{key}={value}");
        }
        parameters
    }

    #[test]
    fn every_key_has_the_answer_of_the_rfc() {
        let parameters = answers(
            SessionType::Normal,
            &[
                ("HeaderDigest", "CRC32C,None", "CRC32C"),
                ("DataDigest", "X-new,None,CRC32C", "None"),
                ("MaxConnections", "8", "1"),
                ("InitialR2T", "No", "No"),
                ("ImmediateData", "Yes", "Yes"),
                ("MaxRecvDataSegmentLength", "0x40000", ""),
                ("MaxBurstLength", "16776192", "1048576"),
                ("FirstBurstLength", "65536", "65536"),
                ("MaxOutstandingR2T", "1", "1"),
                ("DefaultTime2Wait", "2", "2"),
                ("DefaultTime2Retain", "20", "0"),
                ("ErrorRecoveryLevel", "2", "0"),
                ("DataPDUInOrder", "No", "Yes"),
                ("DataSequenceInOrder", "Yes", "Yes"),
                ("IFMarker", "Yes", "No"),
                ("OFMarker", "No", "No"),
                ("IFMarkInt", "2048~8192", "Reject"),
                ("TaskReporting", "FastAbort,RFC3720", "RFC3720"),
                ("iSCSIProtocolLevel", "2", "1"),
                ("RDMAExtensions", "Yes", "No"),
                ("MaxAHSLength", "256", "Irrelevant"),
                ("InitiatorAlias", "me", ""),
                ("SendTargets", "All", "Reject"),
                ("X-com.example.key", "1", "NotUnderstood"),
            ],
        );
        assert_eq!(parameters.digests.header, Digest::Crc32c);
        assert_eq!(parameters.digests.data, Digest::None);
        assert_eq!(parameters.unsolicited, Unsolicited::Allowed);
        assert_eq!(parameters.send_segment_bytes, 256 << 10);
        assert_eq!(
            (parameters.max_burst_bytes, parameters.first_burst_bytes),
            (1 << 20, 65536)
        );
    }

    #[test]
    fn values_outside_of_their_range_are_rejected_and_change_nothing() {
        let parameters = answers(
            SessionType::Normal,
            &[
                ("MaxBurstLength", "511", "Reject"),
                ("MaxBurstLength", "16777216", "Reject"),
                ("MaxConnections", "0", "Reject"),
                ("ErrorRecoveryLevel", "3", "Reject"),
                ("InitialR2T", "yes", "Reject"),
                ("ImmediateData", "", "Reject"),
                ("MaxRecvDataSegmentLength", "100", "Reject"),
                ("FirstBurstLength", "-1", "Reject"),
                ("TaskReporting", "FastAbort", "Reject"),
                ("HeaderDigest", "X-new", "!"),
            ],
        );
        assert_eq!(parameters, Parameters::default());
    }

    #[test]
    fn keys_of_transfers_are_irrelevant_for_discovery() {
        answers(
            SessionType::Discovery,
            &[
                ("MaxConnections", "1", "Irrelevant"),
                ("InitialR2T", "No", "Irrelevant"),
                ("MaxRecvDataSegmentLength", "32768", ""),
                ("DefaultTime2Wait", "2", "2"),
                ("HeaderDigest", "None", "None"),
            ],
        );
    }
}
