//! What a sender asks of a receiver before the first frame: a line of JSON, and a line as the answer.

use std::path::PathBuf;

use holdfast_transfer::{PriorContent, UnitLayout};
use serde::{Deserialize, Serialize};

/// Limit of the line of a request.
pub(crate) const REQUEST_BYTES_MAX: u64 = 64 << 10;
/// Limit of the line of an answer.
pub(crate) const READY_BYTES_MAX: u64 = 64 << 10;

/// The target that a receiver is to fill.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReceiveRequest {
    /// A file that will be created, or a block device: an absolute path at the receiver.
    pub target: PathBuf,
    /// Size of the disk.
    pub size_bytes: u64,
    /// Bytes of the disk that are expected to take space.
    pub expected_bytes: u64,
    /// What happens to a target that exists.
    pub existing: ExistingTarget,
    /// What happens to an interrupted copy.
    pub interrupted: InterruptedCopy,
    /// What has a similar content at the receiver; only the differences are sent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seed: Option<Seed>,
    /// The name of the format of a new file; none for a raw disk. Receivers of older versions refuse others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<String>,
}

impl ReceiveRequest {
    /// How the disk is divided for this copy.
    ///
    /// # Errors
    /// The disk is empty or too large.
    pub fn layout(&self) -> holdfast_transfer::Result<UnitLayout> {
        UnitLayout::of_copy(self.size_bytes, self.prior())
    }

    pub(crate) fn prior(&self) -> PriorContent {
        PriorContent::of_seed(self.seed.as_ref())
    }
}

/// An image or a block device with a content similar to that of the disk: an earlier copy, or a backup that was restored. It is
/// only read. A target can be its own seed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Seed {
    /// An absolute path at the receiver.
    pub path: PathBuf,
    /// The format; none if it is to be detected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<String>,
}

/// How much of a seed the receiver has copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SeedProgress {
    /// Bytes that were copied.
    pub done_bytes: u64,
    /// All bytes.
    pub total_bytes: u64,
}

/// What happens to a target that exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ExistingTarget {
    /// The copy is refused.
    Refuse,
    /// A file is replaced when the copy is complete; a block device is overwritten at once.
    Replace,
}

/// What happens to an interrupted copy to the same target.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum InterruptedCopy {
    /// It continues, if it is of the same source.
    Continue,
    /// It is deleted.
    Delete,
}

/// The answer of a receiver.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum Answer {
    /// The seed is being copied; another answer follows.
    Seeding(SeedProgress),
    /// Frames may follow.
    Ready {},
    /// The target cannot be used.
    Refused { kind: RefusalKind, reason: String },
}

/// Why a target cannot be used, for programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RefusalKind {
    /// It exists.
    Exists,
    /// It has not enough space, or is too small.
    NoSpace,
    /// It is used by another process.
    Locked,
    /// It holds an interrupted copy of something else.
    OtherCopy,
    /// It is not allowed, or not a file or block device, or cannot have the format.
    NotAllowed,
    /// Its seed cannot be read.
    Seed,
    /// The sides do not understand each other.
    OtherVersion,
    /// The system refuses it.
    #[serde(other)]
    Io,
}

#[cfg(test)]
mod tests {
    use serde::Serialize;
    use serde::de::DeserializeOwned;

    use super::{Answer, ReceiveRequest, RefusalKind};

    /// Requests and answers of version 1, as docs/format/transfer.md describes them.
    const REQUESTS: &str = include_str!("../tests/fixtures/requests-1.jsonl");
    const ANSWERS: &str = include_str!("../tests/fixtures/answers-1.jsonl");

    fn assert_unchanged<T: Serialize + DeserializeOwned>(lines: &str) {
        for line in lines.lines() {
            let value: T = serde_json::from_str(line).unwrap();
            assert_eq!(serde_json::to_string(&value).unwrap(), line);
        }
    }

    #[test]
    fn version_1_is_understood_and_written_as_it_was() {
        assert_unchanged::<ReceiveRequest>(REQUESTS);
        assert_unchanged::<Answer>(ANSWERS);
        assert_eq!([REQUESTS, ANSWERS].map(|lines| lines.lines().count()), [5, 10]);
    }

    #[test]
    fn only_unknown_kinds_of_refusals_are_accepted() {
        let refused = serde_json::from_str(r#"{"refused":{"kind":"tired","reason":"a text"}}"#).unwrap();
        let Answer::Refused { kind, .. } = refused else {
            panic!("{refused:?}")
        };
        assert_eq!(kind, RefusalKind::Io);
        for line in [r#"{"ready":{"soon":true}}"#, r#"{"later":{}}"#] {
            assert!(serde_json::from_str::<Answer>(line).is_err(), "{line}");
        }
        let request = REQUESTS.lines().next().unwrap().replace("size_bytes", "length");
        assert!(serde_json::from_str::<ReceiveRequest>(&request).is_err());
    }
}
