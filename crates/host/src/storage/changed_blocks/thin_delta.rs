//! Parses the output of `thin_delta` for two volumes of a thin pool: the blocks that both map to the same address.
//!
//! A pool never overwrites a block that two volumes share, and the mapping of a read-only volume does not change. So
//! where two read-only snapshots map the same block, they have equal content. Blocks that neither snapshot maps are
//! zero in both.
//!
//! Source: thin_delta(8); thin-provisioning-tools 0.9.0.

use super::ranges::{ChangedRanges, Collector};

/// Size of a sector, the unit of a pool's block size.
const SECTOR_BYTES: u64 = 512;

/// The requested comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ThinDeltaQuery {
    /// The thin ids of the two volumes, the older one first.
    pub ids: (u64, u64),
    /// Block size of the pool.
    pub block_bytes: u64,
    /// Size of both volumes, in bytes.
    pub size_bytes: u64,
}

/// The output is unusable. The fallback is to read everything.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line} of the output of thin_delta {detail}")]
pub struct ThinDeltaError {
    /// The line number, from 1 on.
    pub line: usize,
    /// What is wrong with the line.
    pub detail: &'static str,
}

/// The ranges in which the newer of two volumes may differ from the older one.
pub fn by_thin_delta(answer: &str, query: &ThinDeltaQuery) -> Result<ChangedRanges, ThinDeltaError> {
    let mut changed = Collector::new(query.size_bytes);
    let (mut state, mut next) = (ParserState::Begin, 0);
    let mut line_count = 0;
    for line in answer.lines().map(str::trim).filter(|line| !line.is_empty()) {
        line_count += 1;
        let wrong = |detail| ThinDeltaError {
            line: line_count,
            detail,
        };
        let element = Element::parse(line).ok_or(wrong("has an unknown format"))?;
        state = match (state, element.name) {
            (ParserState::Begin, "superblock") => {
                let sectors = element.number("data_block_size");
                let bytes = sectors.and_then(|sectors| sectors.checked_mul(SECTOR_BYTES));
                if bytes != Some(query.block_bytes) {
                    return Err(wrong("has another block size"));
                }
                ParserState::InPool
            }
            (ParserState::InPool, "diff") => {
                if (element.number("left"), element.number("right")) != (Some(query.ids.0), Some(query.ids.1)) {
                    return Err(wrong("is for other volumes"));
                }
                ParserState::InDifferences
            }
            (ParserState::InDifferences, name @ ("same" | "different" | "left_only" | "right_only")) => {
                let (begin, length) = element.extent().ok_or(wrong("has no extent"))?;
                let bytes = |blocks: u64| blocks.checked_mul(query.block_bytes).ok_or(wrong("is out of range"));
                let end = begin.checked_add(length).ok_or(wrong("is out of range"))?;
                if begin < next {
                    return Err(wrong("is out of order"));
                }
                next = end;
                if name != "same" {
                    changed.add(bytes(begin)?..bytes(end)?);
                }
                ParserState::InDifferences
            }
            (ParserState::InDifferences, "/diff") => ParserState::AfterDifferences,
            (ParserState::AfterDifferences, "/superblock") => ParserState::End,
            _ => return Err(wrong("is misplaced")),
        };
    }
    if state != ParserState::End {
        return Err(ThinDeltaError {
            line: line_count,
            detail: "is the last one, but the output is incomplete",
        });
    }
    Ok(changed.finish())
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ParserState {
    Begin,
    InPool,
    InDifferences,
    AfterDifferences,
    End,
}

/// A line: `<same begin="0" length="10"/>`.
struct Element<'a> {
    name: &'a str,
    attributes: &'a str,
}

impl<'a> Element<'a> {
    fn parse(line: &'a str) -> Option<Self> {
        let inside = line.strip_prefix('<')?.strip_suffix('>')?;
        let inside = inside.strip_suffix('/').unwrap_or(inside);
        if inside.contains(['<', '>']) {
            return None;
        }
        let (name, attributes) = inside.split_once(' ').unwrap_or((inside, ""));
        Some(Self { name, attributes })
    }

    fn number(&self, key: &str) -> Option<u64> {
        let mut all = self
            .attributes
            .split(' ')
            .filter_map(|attribute| attribute.split_once('='));
        let (_, value) = all.find(|(name, _)| *name == key)?;
        value.strip_prefix('"')?.strip_suffix('"')?.parse().ok()
    }

    /// The begin and the length of an extent, which is not empty.
    fn extent(&self) -> Option<(u64, u64)> {
        Some((
            self.number("begin")?,
            self.number("length").filter(|length| *length > 0)?,
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::{ThinDeltaQuery, by_thin_delta};

    const QUERY: ThinDeltaQuery = ThinDeltaQuery {
        ids: (5, 7),
        block_bytes: 65_536,
        size_bytes: 1 << 20,
    };

    /// Output of thin_delta 0.9.0.
    const ANSWER: &str = "<superblock uuid=\"\" time=\"10\" transaction=\"17\" data_block_size=\"128\" nr_data_blocks=\"0\">\n  \
        <diff left=\"5\" right=\"7\">\n    <same begin=\"0\" length=\"4\"/>\n    <different begin=\"4\" length=\"1\"/>\n    \
        <right_only begin=\"5\" length=\"1\"/>\n    <left_only begin=\"8\" length=\"2\"/>\n    <same begin=\"10\" length=\"3\"/>\n    \
        <different begin=\"15\" length=\"40\"/>\n  </diff>\n</superblock>\n";

    #[test]
    fn blocks_that_are_not_shared_may_have_changed() {
        let found = by_thin_delta(ANSWER, &QUERY).unwrap();
        let blocks = |range: &std::ops::Range<u64>| (range.start / 65_536, range.end / 65_536);
        let found: Vec<_> = found.as_slice().iter().map(blocks).collect();
        assert_eq!(found, [(4, 6), (8, 10), (15, 16)]);
    }

    #[test]
    fn an_answer_to_another_query_is_an_error() {
        let error_of = |answer: &str| by_thin_delta(answer, &QUERY).unwrap_err().detail;
        for (from, to, detail) in [
            ("\"128\"", "\"64\"", "has another block size"),
            ("left=\"5\"", "left=\"6\"", "is for other volumes"),
            ("right=\"7\"", "right=\"5\"", "is for other volumes"),
            ("</superblock>\n", "", "is the last one, but the output is incomplete"),
            ("begin=\"4\"", "begin=\"3\"", "is out of order"),
            ("length=\"1\"", "length=\"0\"", "has no extent"),
            ("length=\"40\"", "length=\"18446744073709551615\"", "is out of range"),
            ("<left_only", "<perhaps", "is misplaced"),
            ("<left_only", "left_only", "has an unknown format"),
            (
                "  </diff>\n",
                "  </diff>\n  <diff left=\"5\" right=\"7\">\n",
                "is misplaced",
            ),
        ] {
            let answer = ANSWER.replace(from, to);
            assert_ne!(answer, ANSWER);
            assert_eq!(error_of(&answer), detail, "{from} -> {to}");
        }
        assert_eq!(error_of(""), "is the last one, but the output is incomplete");
        for length in 0..ANSWER.len() - 1 {
            assert!(by_thin_delta(&ANSWER[..length], &QUERY).is_err(), "{length}");
        }
    }
}
