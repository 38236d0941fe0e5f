//! The encoding of pages.
//!
//! Integers named *n* are of variable length (see `wire`). Packs are named by their place in the page's own table.
//!
//! ```text
//! leaf:   u8 1     u8 unit as a power of two (12 for disks, 0 for streams)
//!         n packs, 16 bytes each
//!         n pieces, each:  n length in units * 2 + (1 if data)
//!                          if data: n pack, n frame, n offset in units
//! inner:  u8 2
//!         n packs, 16 bytes each
//!         n entries, each: n 0 and n count: so many children without a page (all zero)
//!                          or n pack + 1, n frame, n offset in bytes, n length in bytes: a child's page
//! ```

use super::{FANOUT, LEAF_BYTES, PageRef};
use crate::format::codec::FRAME_BYTES_MAX;
use crate::format::fingerprint::BLOCK_BYTES;
use crate::format::pack::Location;
use crate::id::PackId;
use crate::wire::{Decoder, Malformed, put_varint};

/// Longest page: a leaf whose every block lies in another pack, with room to spare.
pub(crate) const PAGE_BYTES_MAX: usize = 1 << 20;

/// The unit of lengths and offsets in a map.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unit {
    /// Blocks: a disk. Its last block is padded with zeroes.
    Block,
    /// Bytes: a stream.
    Byte,
}

impl Unit {
    pub(crate) fn bytes(self) -> u64 {
        match self {
            Self::Block => BLOCK_BYTES,
            Self::Byte => 1,
        }
    }
}

/// The content of a piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PieceContent {
    /// Zeroes.
    Zero,
    /// The bytes at a location.
    Data(Location),
}

/// Adjacent bytes of a disk that are also adjacent in a frame, or zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Piece {
    /// Length in bytes, a multiple of the map's unit, never 0.
    pub(crate) length: u64,
    pub(crate) content: PieceContent,
}

impl Piece {
    /// This piece joined with the following `next`, if their contents are adjacent.
    pub(crate) fn join(self, next: Self) -> Option<Self> {
        let joins = match (self.content, next.content) {
            (PieceContent::Zero, PieceContent::Zero) => true,
            (PieceContent::Data(first), PieceContent::Data(second)) => {
                first.pack == second.pack
                    && first.frame == second.frame
                    && u64::from(first.offset) + self.length == u64::from(second.offset)
            }
            _ => false,
        };
        joins.then(|| Self {
            length: self.length + next.length,
            content: self.content,
        })
    }

    /// The part of the piece that begins after `skip` bytes and is at most `length` bytes long.
    pub(crate) fn part(self, skip: u64, length: u64) -> Self {
        let content = match self.content {
            PieceContent::Zero => PieceContent::Zero,
            PieceContent::Data(location) => PieceContent::Data(location.advance(skip)),
        };
        Self {
            length: length.min(self.length - skip),
            content,
        }
    }
}

/// The packs that a page refers to, in the order of first use.
#[derive(Default)]
struct PackTable {
    packs: Vec<PackId>,
    numbers: std::collections::HashMap<PackId, u64>,
}

impl PackTable {
    fn number(&mut self, pack: PackId) -> u64 {
        *self.numbers.entry(pack).or_insert_with(|| {
            self.packs.push(pack);
            self.packs.len() as u64 - 1
        })
    }

    fn encode(&self, bytes: &mut Vec<u8>) {
        put_varint(bytes, self.packs.len() as u64);
        for pack in &self.packs {
            bytes.extend_from_slice(pack.as_bytes());
        }
    }

    fn decode(decoder: &mut Decoder<'_>) -> Result<Vec<PackId>, Malformed> {
        let count = decoder.count(PackId::LENGTH)?;
        (0..count).map(|_| Ok(PackId::from_bytes(decoder.array()?))).collect()
    }
}

fn pack_of(packs: &[PackId], number: u64, decoder: &Decoder<'_>) -> Result<PackId, Malformed> {
    match packs.get(holdfast_block::to_usize(number)) {
        Some(pack) => Ok(*pack),
        None => decoder.fail("names a pack that its table does not have"),
    }
}

pub(crate) fn encode_leaf(unit: Unit, pieces: &[Piece]) -> Vec<u8> {
    let mut table = PackTable::default();
    let mut body = Vec::with_capacity(pieces.len() * 8);
    put_varint(&mut body, pieces.len() as u64);
    for piece in pieces {
        let units = piece.length / unit.bytes();
        match piece.content {
            PieceContent::Zero => put_varint(&mut body, units * 2),
            PieceContent::Data(location) => {
                put_varint(&mut body, units * 2 + 1);
                put_varint(&mut body, table.number(location.pack));
                put_varint(&mut body, location.frame.into());
                put_varint(&mut body, u64::from(location.offset) / unit.bytes());
            }
        }
    }
    let mut bytes = vec![1, unit.bytes().trailing_zeros().to_le_bytes()[0]];
    table.encode(&mut bytes);
    bytes.extend_from_slice(&body);
    bytes
}

/// Decodes a leaf that describes `span_bytes` of a map of `unit`.
pub(crate) fn decode_leaf(bytes: &[u8], unit: Unit, span_bytes: u64) -> Result<Vec<Piece>, Malformed> {
    let mut decoder = Decoder::new(bytes);
    if decoder.u8()? != 1 || u32::from(decoder.u8()?) != unit.bytes().trailing_zeros() {
        return decoder.fail("is no leaf of this map");
    }
    let packs = PackTable::decode(&mut decoder)?;
    let piece_count = decoder.count(1)?;
    let mut pieces = Vec::with_capacity(piece_count);
    let mut covered = 0;
    let unit_limit = LEAF_BYTES / unit.bytes();
    for _ in 0..piece_count {
        let tagged = decoder.varint_at_most(unit_limit * 2 + 1)?;
        let length = (tagged >> 1) * unit.bytes();
        let content = if tagged & 1 == 0 {
            PieceContent::Zero
        } else {
            let number = decoder.varint()?;
            let pack = pack_of(&packs, number, &decoder)?;
            let frame = decode_u32(&mut decoder, u64::from(u32::MAX))?;
            let offset = decode_u32(&mut decoder, FRAME_BYTES_MAX as u64 / unit.bytes())?;
            let offset = offset * u32::try_from(unit.bytes()).expect("a unit is at most a block");
            if u64::from(offset) + length > FRAME_BYTES_MAX as u64 {
                return decoder.fail("has a piece that is longer than a frame");
            }
            PieceContent::Data(Location { pack, frame, offset })
        };
        if length == 0 {
            return decoder.fail("has an empty piece");
        }
        covered += length;
        pieces.push(Piece { length, content });
    }
    if covered != span_bytes.next_multiple_of(unit.bytes()) {
        return decoder.fail("does not describe its span");
    }
    decoder.finish()?;
    Ok(pieces)
}

pub(crate) fn encode_inner(children: &[Option<PageRef>]) -> Vec<u8> {
    let mut table = PackTable::default();
    let mut body = Vec::with_capacity(children.len() * 8);
    let runs = children.chunk_by(|a, b| a.is_none() && b.is_none());
    put_varint(&mut body, runs.clone().count() as u64);
    for run in runs {
        match run[0] {
            None => {
                put_varint(&mut body, 0);
                put_varint(&mut body, run.len() as u64);
            }
            Some(PageRef { location, length }) => {
                put_varint(&mut body, table.number(location.pack) + 1);
                put_varint(&mut body, location.frame.into());
                put_varint(&mut body, location.offset.into());
                put_varint(&mut body, length.into());
            }
        }
    }
    let mut bytes = vec![2];
    table.encode(&mut bytes);
    bytes.extend_from_slice(&body);
    bytes
}

/// Decodes an inner page with `child_count` children.
pub(crate) fn decode_inner(bytes: &[u8], child_count: u64) -> Result<Vec<Option<PageRef>>, Malformed> {
    assert!(child_count <= FANOUT, "an inner page has at most FANOUT children");
    let mut decoder = Decoder::new(bytes);
    if decoder.u8()? != 2 {
        return decoder.fail("is no inner page");
    }
    let packs = PackTable::decode(&mut decoder)?;
    let entry_count = decoder.count(2)?;
    let child_count = holdfast_block::to_usize(child_count);
    let mut children = Vec::with_capacity(child_count);
    for _ in 0..entry_count {
        let number = decoder.varint()?;
        if number == 0 {
            let count = holdfast_block::to_usize(decoder.varint_at_most(FANOUT)?);
            children.resize(children.len() + count, None);
        } else {
            let pack = pack_of(&packs, number - 1, &decoder)?;
            let frame = decode_u32(&mut decoder, u64::from(u32::MAX))?;
            let offset = decode_u32(&mut decoder, FRAME_BYTES_MAX as u64)?;
            let length = decode_u32(&mut decoder, PAGE_BYTES_MAX as u64)?;
            children.push(Some(PageRef {
                location: Location { pack, frame, offset },
                length,
            }));
        }
        if children.len() > child_count {
            return decoder.fail("has too many children");
        }
    }
    if children.len() != child_count {
        return decoder.fail("has too few children");
    }
    decoder.finish()?;
    Ok(children)
}

fn decode_u32(decoder: &mut Decoder<'_>, limit: u64) -> Result<u32, Malformed> {
    let value = decoder.varint_at_most(limit)?;
    Ok(u32::try_from(value).expect("every limit of a page is below 2^32"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{Just, Strategy, any, prop_assert_eq, prop_oneof, proptest};

    use super::{Piece, PieceContent, Unit, decode_inner, decode_leaf, encode_inner, encode_leaf};
    use crate::format::map::PageRef;
    use crate::format::pack::Location;
    use crate::id::PackId;

    fn location() -> impl Strategy<Value = Location> {
        (any::<u8>(), any::<u32>(), 0u32..256).prop_map(|(pack, frame, block)| Location {
            pack: PackId::from_bytes([pack % 5; 16]),
            frame,
            offset: block * 4096,
        })
    }

    fn piece() -> impl Strategy<Value = Piece> {
        let content = prop_oneof![Just(PieceContent::Zero), location().prop_map(PieceContent::Data)];
        (1u64..200, content).prop_map(|(blocks, content)| Piece {
            length: blocks * 4096,
            content,
        })
    }

    proptest! {
        #[test]
        fn leaves_round_trip(pieces in proptest::collection::vec(piece(), 1..60)) {
            let span: u64 = pieces.iter().map(|piece| piece.length).sum();
            for unit in [Unit::Block, Unit::Byte] {
                let bytes = encode_leaf(unit, &pieces);
                prop_assert_eq!(decode_leaf(&bytes, unit, span), Ok(pieces.clone()));
                assert!(decode_leaf(&bytes, unit, span + 4096).is_err());
            }
            assert!(decode_leaf(&encode_leaf(Unit::Byte, &pieces), Unit::Block, span).is_err());
        }

        #[test]
        fn inner_pages_round_trip(children in proptest::collection::vec(proptest::option::of((location(), 0u32..1 << 20)), 1..80)) {
            let children: Vec<_> =
                children.into_iter().map(|child| child.map(|(location, length)| PageRef { location, length })).collect();
            let bytes = encode_inner(&children);
            prop_assert_eq!(decode_inner(&bytes, children.len() as u64), Ok(children.clone()));
            assert!(decode_inner(&bytes, children.len() as u64 + 1).is_err());
        }

        #[test]
        fn hostile_pages_never_panic(mut bytes in proptest::collection::vec(any::<u8>(), 0..200), kind in 1u8..3, count in 0u64..1024) {
            if let Some(first) = bytes.first_mut() {
                *first = kind;
            }
            decode_leaf(&bytes, Unit::Byte, count).ok();
            decode_inner(&bytes, count).ok();
        }
    }
}
