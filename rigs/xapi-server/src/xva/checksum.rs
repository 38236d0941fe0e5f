//! The checksum after each block.

use aws_lc_rs::digest::{self, SHA1_FOR_LEGACY_USE_ONLY};
use twox_hash::XxHash64;

use crate::habits::Checksum;

/// The file name extension of a checksum member, and its text.
pub(super) fn of(kind: Checksum, block: &[u8]) -> (&'static str, String) {
    match kind {
        Checksum::Xxhash => (".xxhash", format!("{:016X}", XxHash64::oneshot(0, block))),
        Checksum::Sha1 => {
            let digest = digest::digest(&SHA1_FOR_LEGACY_USE_ONLY, block);
            let digits: Vec<String> = digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
            (".checksum", digits.concat())
        }
    }
}

/// Whether the member `name` with this text is the checksum of `block`; `None` if it is not a checksum.
pub(super) fn fits(name: &str, text: &[u8], block: &[u8]) -> Option<bool> {
    let kinds = [Checksum::Xxhash, Checksum::Sha1];
    kinds
        .into_iter()
        .map(|kind| of(kind, block))
        .find(|(ending, _)| name.ends_with(ending))
        .map(|(_, expected)| expected.as_bytes() == text)
}

#[cfg(test)]
mod tests {
    use super::{fits, of};
    use crate::habits::Checksum;

    #[test]
    fn checksums_match_their_specifications() {
        assert_eq!(of(Checksum::Xxhash, b""), (".xxhash", "EF46DB3751D8E999".to_owned()));
        assert_eq!(of(Checksum::Sha1, b"abc").1, "a9993e364706816aba3e25717850c26c9cd0d89d");
        assert_eq!(fits("Ref:1/00000000.xxhash", b"EF46DB3751D8E999", b""), Some(true));
        assert_eq!(fits("Ref:1/00000000.checksum", b"EF46DB3751D8E999", b""), Some(false));
        assert_eq!(fits("Ref:1/00000001", b"", b""), None);
    }
}
