//! Disk maps: pages alone, and whole trees whose pages are slices of the hostile bytes.

use holdfast_block::hostile::Outcome;

use crate::error::{Error, Result};
use crate::format::codec::FRAME_BYTES_MAX;
use crate::format::manifest::DiskRecord;
use crate::format::map::{
    FANOUT, LEAF_BYTES, MapReader, PageCache, PageRef, PieceContent, Unit, decode_inner, decode_leaf, encode_inner,
    encode_leaf,
};
use crate::format::pack::{Location, pack_name};
use crate::id::PackId;
use crate::repository::packs::{FrameBuffers, Packs};

fn unit_of(byte: u8) -> Unit {
    if byte & 1 == 0 { Unit::Block } else { Unit::Byte }
}

/// A leaf page: u8 unit (even: blocks), u32 bytes of disk that it describes, the page.
pub fn map_leaf(bytes: &[u8]) -> Outcome {
    let Some((&[unit, s0, s1, s2, s3], page)) = bytes.split_first_chunk() else {
        return Outcome::Refused;
    };
    let unit = unit_of(unit);
    let span = u64::from(u32::from_le_bytes([s0, s1, s2, s3])) % (LEAF_BYTES + 1);
    let Ok(pieces) = decode_leaf(page, unit, span) else {
        return Outcome::Refused;
    };
    let covered: u64 = pieces.iter().map(|piece| piece.length).sum();
    assert!(
        covered >= span && covered - span < unit.bytes(),
        "the leaf describes its span"
    );
    let again = decode_leaf(&encode_leaf(unit, &pieces), unit, span);
    assert_eq!(again.as_ref(), Ok(&pieces), "it reads as something else");
    Outcome::Decoded
}

/// An inner page: u16 children, the page.
pub fn map_inner(bytes: &[u8]) -> Outcome {
    let Some((&[low, high], page)) = bytes.split_first_chunk() else {
        return Outcome::Refused;
    };
    let child_count = u64::from(u16::from_le_bytes([low, high])) % (FANOUT + 1);
    let Ok(children) = decode_inner(page, child_count) else {
        return Outcome::Refused;
    };
    assert_eq!(children.len() as u64, child_count);
    let again = decode_inner(&encode_inner(&children), child_count);
    assert_eq!(again.as_ref(), Ok(&children), "it reads as something else");
    Outcome::Decoded
}

/// Pages are slices of the bytes; pack and frame are ignored.
struct Pages<'a>(&'a [u8]);

impl PageCache for Pages<'_> {
    fn page(&self, page: PageRef) -> Result<Vec<u8>> {
        let start = page.location.offset as usize;
        match self.0.get(start..start + page.length as usize) {
            Some(bytes) => Ok(bytes.to_vec()),
            None => Err(Error::damaged(&pack_name(page.location.pack), 0, "no such page")),
        }
    }
}

/// A whole map: u64 bytes of disk, u8 unit, u32 offset and u32 length of the root, the pages.
pub fn map(bytes: &[u8]) -> Outcome {
    const LEAF_COUNT_MAX: usize = 16;
    let Some((head, pages)) = bytes.split_first_chunk::<17>() else {
        return Outcome::Refused;
    };
    let number = |at: usize| u32::from_le_bytes(head[at..at + 4].try_into().expect("four bytes"));
    // No manifest with a larger disk is read.
    let size_bytes = u64::from_le_bytes(head[..8].try_into().expect("eight bytes")) >> 1;
    let location = Location {
        pack: PackId::from_bytes([1; 16]),
        frame: 0,
        offset: number(9),
    };
    let root = PageRef {
        location,
        length: number(13),
    };
    let pages = Pages(pages);
    let mut reader = MapReader::new(&pages, Some(root), size_bytes, unit_of(head[8]));
    let mut from = 0;
    for _ in 0..LEAF_COUNT_MAX {
        let Ok(next) = reader.next_leaf(from) else {
            return Outcome::Refused;
        };
        let Some(leaf) = next else { break };
        assert!(leaf >= from, "leaves come in order");
        if let Ok(Some(pieces)) = reader.leaf(leaf) {
            let has_frames = |piece: &crate::format::map::Piece| match piece.content {
                PieceContent::Data(place) => u64::from(place.offset) + piece.length <= FRAME_BYTES_MAX as u64,
                PieceContent::Zero => true,
            };
            assert!(pieces.iter().all(has_frames), "a piece lies in a frame");
        }
        from = leaf + 1;
    }
    Outcome::Decoded
}

/// Inputs of the map parsers, from the map of a disk: name of the parser, bytes.
///
/// All pages of the map are in one frame, as in a small backup.
pub(super) fn parts(packs: &Packs, disk: &DiskRecord) -> Result<Vec<(&'static str, Vec<u8>)>> {
    let Some(root) = disk.root else {
        return Ok(Vec::new());
    };
    let unit = match disk.content.unit() {
        Unit::Block => 0,
        Unit::Byte => 1,
    };
    let mut raw = Vec::new();
    let Location { pack, frame, .. } = root.location;
    packs.frame(pack, frame, &mut FrameBuffers::new(), &mut raw)?;
    let mut tree = (disk.size_bytes << 1).to_le_bytes().to_vec();
    tree.push(unit);
    tree.extend_from_slice(&root.location.offset.to_le_bytes());
    tree.extend_from_slice(&root.length.to_le_bytes());
    tree.extend_from_slice(&raw);
    let mut reader = MapReader::new(packs, Some(root), disk.size_bytes, disk.content.unit());
    let child_count = u16::try_from(reader.leaf_count()).expect("the disk is small");
    let mut parts = vec![
        ("map", tree),
        (
            "map_inner",
            [&child_count.to_le_bytes(), &packs.page(root)?[..]].concat(),
        ),
    ];
    for number in 0..reader.leaf_count() {
        if let Some(page) = reader.leaf_ref(number)? {
            let span = u32::try_from(reader.leaf_span(number)).expect("a leaf describes 64 MiB");
            let head = [&[unit], &span.to_le_bytes()[..]].concat();
            parts.push(("map_leaf", [&head, &packs.page(page)?[..]].concat()));
        }
    }
    Ok(parts)
}
