//! The kinds of damage to an object.

use holdfast_repo::store::ObjectName;

use super::base::Objects;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Damage {
    Delete,
    /// Keeps this many 64ths of the object.
    Truncate(usize),
    LoseLastByte,
    /// At this many 64ths of the object.
    FlipBit(usize),
    FlipInFirst(usize),
    FlipInLast(usize),
    ZeroPage(usize),
    Append,
    Swap,
}

pub(crate) const DAMAGES: [Damage; 19] = [
    Damage::Delete,
    Damage::Truncate(0),
    Damage::Truncate(32),
    Damage::LoseLastByte,
    Damage::FlipInFirst(0),
    Damage::FlipInFirst(8),
    Damage::FlipInFirst(10),
    Damage::FlipInFirst(20),
    Damage::FlipBit(8),
    Damage::FlipBit(32),
    Damage::FlipBit(50),
    Damage::FlipBit(62),
    Damage::FlipInLast(1),
    Damage::FlipInLast(40),
    Damage::FlipInLast(100),
    Damage::ZeroPage(0),
    Damage::ZeroPage(32),
    Damage::Append,
    Damage::Swap,
];

/// The objects after the damage; `None` if the damage changes nothing.
pub(crate) fn damaged(objects: &Objects, name: &ObjectName, damage: Damage) -> Option<Objects> {
    let mut changed = objects.clone();
    let bytes = changed.get_mut(name).unwrap();
    let length = bytes.len();
    let flip = |bytes: &mut Vec<u8>, at: usize| {
        if let Some(byte) = bytes.get_mut(at) {
            *byte ^= 4;
        }
    };
    match damage {
        Damage::Delete => {
            changed.remove(name);
        }
        Damage::Truncate(part) => bytes.truncate(length * part / 64),
        Damage::LoseLastByte => bytes.truncate(length - 1),
        Damage::FlipBit(part) => flip(bytes, length * part / 64),
        Damage::FlipInFirst(at) => flip(bytes, at),
        Damage::FlipInLast(at) => flip(bytes, length.wrapping_sub(at)),
        Damage::ZeroPage(part) => {
            let start = length * part / 64;
            let end = (start + 4096).min(length);
            bytes[start..end].fill(0);
        }
        Damage::Append => bytes.push(0),
        Damage::Swap => {
            let sibling = objects
                .range(name..)
                .chain(objects)
                .find(|(other, _)| other.kind() == name.kind() && *other != name)?;
            bytes.clone_from(sibling.1);
            changed.insert(sibling.0.clone(), objects[name].clone());
        }
    }
    (changed != *objects).then_some(changed)
}
