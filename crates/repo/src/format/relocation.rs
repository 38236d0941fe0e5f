//! Relocations: the present locations of bytes of rewritten or damaged packs.
//!
//! Maps refer to bytes by the pack that they were first stored in, and maps are never rewritten. When gc moves the live
//! bytes of a pack to another, or a backup stores bytes again that a pack had lost, a relocation records the new
//! location. It is durable before the old pack is deleted.
//!
//! Plaintext of the sealed objects `relocations/<pack>.<random>` and `relocations/<pack>.<random>.copy` (integers named *n* are of variable length, see `wire`):
//!
//! ```text
//! u8   format version, 1
//! n    packs that bytes went to, 16 bytes each
//! n    ranges, each:  n frame, n offset, n length: bytes of the old pack
//!                     n new pack (place in the table), n frame, n offset: where they are now
//! ```

use std::collections::BTreeMap;

use crate::format::codec::FRAME_BYTES_MAX;
use crate::format::pack::Location;
use crate::id::PackId;
use crate::wire::{Decoder, Malformed, put_varint};

const FORMAT_VERSION: u8 = 1;

/// The offset after the longest frame.
#[expect(clippy::cast_possible_truncation, reason = "a frame is far smaller than 4 GiB")]
const FRAME_END: u32 = FRAME_BYTES_MAX as u32;

/// Bytes that moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Move {
    pub(crate) frame: u32,
    pub(crate) offset: u32,
    pub(crate) length: u32,
    pub(crate) to: Location,
}

/// All known relocations of bytes of one pack.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct RelocationTable {
    /// By frame and offset: length and new location.
    moves: BTreeMap<(u32, u32), (u32, Location)>,
}

impl RelocationTable {
    pub(crate) fn add(&mut self, moved: Move) {
        self.moves.insert((moved.frame, moved.offset), (moved.length, moved.to));
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.moves.is_empty()
    }

    pub(crate) fn moves(&self) -> impl Iterator<Item = Move> + '_ {
        self.moves.iter().map(|(&(frame, offset), &(length, to))| Move {
            frame,
            offset,
            length,
            to,
        })
    }

    /// The new location of the byte at `location`, if it was relocated; and how many of `length` bytes were
    /// moved, or were not moved, together.
    pub(crate) fn find(&self, location: Location, length: u64) -> (Option<Location>, u64) {
        let key = (location.frame, location.offset);
        if let Some((&(frame, offset), &(moved, to))) = self.moves.range(..=key).next_back()
            && frame == location.frame
            && location.offset - offset < moved
        {
            let skip = location.offset - offset;
            return (Some(to.advance(skip.into())), length.min(u64::from(moved - skip)));
        }
        match self.moves.range(key..).next() {
            Some((&(frame, offset), _)) if frame == location.frame => {
                (None, length.min(u64::from(offset - location.offset)))
            }
            _ => (None, length),
        }
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut packs: Vec<PackId> = self.moves.values().map(|(_, to)| to.pack).collect();
        packs.sort_unstable();
        packs.dedup();
        let mut bytes = vec![FORMAT_VERSION];
        put_varint(&mut bytes, packs.len() as u64);
        for pack in &packs {
            bytes.extend_from_slice(pack.as_bytes());
        }
        put_varint(&mut bytes, self.moves.len() as u64);
        for moved in self.moves() {
            let pack = packs.binary_search(&moved.to.pack).expect("the table has every pack");
            for value in [moved.frame, moved.offset, moved.length] {
                put_varint(&mut bytes, value.into());
            }
            put_varint(&mut bytes, pack as u64);
            put_varint(&mut bytes, moved.to.frame.into());
            put_varint(&mut bytes, moved.to.offset.into());
        }
        bytes
    }

    /// Decodes `bytes` and adds the moves.
    pub(crate) fn decode_into(&mut self, bytes: &[u8]) -> Result<(), Malformed> {
        let mut decoder = Decoder::new(bytes);
        if decoder.u8()? != FORMAT_VERSION {
            return decoder.fail("has an unknown version");
        }
        let pack_count = decoder.count(PackId::LENGTH)?;
        let packs: Vec<_> = (0..pack_count)
            .map(|_| decoder.array().map(PackId::from_bytes))
            .collect::<Result<_, _>>()?;
        for _ in 0..decoder.count(6)? {
            let mut number = |limit: u64| -> Result<u32, Malformed> {
                let value = decoder.varint_at_most(limit)?;
                Ok(u32::try_from(value).expect("the limit is below 2^32"))
            };
            let frame_limit = u64::from(u32::MAX);
            let byte_limit = FRAME_BYTES_MAX as u64;
            let (frame, offset, length) = (number(frame_limit)?, number(byte_limit)?, number(byte_limit)?);
            let (pack, to_frame, to_offset) = (number(frame_limit)?, number(frame_limit)?, number(byte_limit)?);
            let Some(&pack) = packs.get(pack as usize) else {
                return decoder.fail("names a pack that its table does not have");
            };
            // An empty move would be followed forever.
            if length == 0 {
                return decoder.fail("moves nothing");
            }
            if offset.max(to_offset) + length > FRAME_END {
                return decoder.fail("has a range that reaches past the end of a frame");
            }
            self.add(Move {
                frame,
                offset,
                length,
                to: Location {
                    pack,
                    frame: to_frame,
                    offset: to_offset,
                },
            });
        }
        decoder.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::{FRAME_END, Move, RelocationTable};
    use crate::format::pack::Location;
    use crate::id::PackId;

    fn at(pack: u8, frame: u32, offset: u32) -> Location {
        Location {
            pack: PackId::from_bytes([pack; 16]),
            frame,
            offset,
        }
    }

    #[test]
    fn bytes_are_found_where_they_went_and_nowhere_else() {
        let mut table = RelocationTable::default();
        table.add(Move {
            frame: 1,
            offset: 4096,
            length: 8192,
            to: at(9, 0, 100),
        });
        table.add(Move {
            frame: 1,
            offset: 12288,
            length: 4096,
            to: at(8, 3, 0),
        });
        let mut again = RelocationTable::default();
        again.decode_into(&table.encode()).unwrap();
        assert_eq!(again, table);
        assert_eq!(table.find(at(1, 1, 4096), 99), (Some(at(9, 0, 100)), 99));
        assert_eq!(table.find(at(1, 1, 8192), 9000), (Some(at(9, 0, 4196)), 4096));
        assert_eq!(table.find(at(1, 1, 12288), 4096), (Some(at(8, 3, 0)), 4096));
        assert_eq!(table.find(at(1, 1, 0), 8192), (None, 4096));
        for nowhere in [at(1, 1, 16384), at(1, 2, 4096), at(1, 0, 4096)] {
            assert_eq!(table.find(nowhere, 8192), (None, 8192));
        }
    }

    /// A move of zero bytes made readers loop.
    #[test]
    fn a_move_of_nothing_and_one_past_the_end_of_a_frame_are_refused() {
        for (offset, length, to_offset) in [(4096, 0, 0), (FRAME_END, 1, 0), (0, 4096, FRAME_END - 4095)] {
            let mut table = RelocationTable::default();
            table.add(Move {
                frame: 1,
                offset,
                length,
                to: at(9, 0, to_offset),
            });
            let mut again = RelocationTable::default();
            assert!(
                again.decode_into(&table.encode()).is_err(),
                "{length} bytes at {offset}"
            );
        }
    }
}
