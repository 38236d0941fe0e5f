//! On-disk structures of fixed size, with fields checked at compile time.

#![deny(clippy::indexing_slicing)]
#![cfg_attr(not(test), deny(clippy::string_slice))]

/// A structure of `SIZE` bytes in a file.
///
/// Fields have constant offsets. A field outside of the structure is a compile error, so reading a field needs no check
/// and cannot panic.
#[derive(Debug, Clone, Copy)]
pub struct Record<'a, const SIZE: usize>(&'a [u8; SIZE]);

impl<'a, const SIZE: usize> Record<'a, SIZE> {
    /// Interprets `bytes` as the structure.
    pub fn new(bytes: &'a [u8; SIZE]) -> Self {
        Self(bytes)
    }

    /// The structure at the start of `bytes`; `None` if there are too few bytes.
    pub fn first_of(bytes: &'a [u8]) -> Option<Self> {
        bytes.first_chunk().map(Self)
    }

    /// The `LENGTH` bytes at `AT`.
    pub fn field<const AT: usize, const LENGTH: usize>(self) -> &'a [u8; LENGTH] {
        const {
            assert!(
                AT <= SIZE && LENGTH <= SIZE - AT,
                "the field lies outside of the structure"
            );
        };
        let (_, rest) = self.0.split_at(AT);
        rest.first_chunk().expect("the compiler has checked where it ends")
    }

    /// The byte at `AT`.
    pub fn byte<const AT: usize>(self) -> u8 {
        let [byte] = *self.field::<AT, 1>();
        byte
    }

    /// The little-endian number of 16 bits at `AT`.
    pub fn le_u16<const AT: usize>(self) -> u16 {
        u16::from_le_bytes(*self.field::<AT, 2>())
    }

    /// The little-endian number of 32 bits at `AT`.
    pub fn le_u32<const AT: usize>(self) -> u32 {
        u32::from_le_bytes(*self.field::<AT, 4>())
    }

    /// The little-endian number of 64 bits at `AT`.
    pub fn le_u64<const AT: usize>(self) -> u64 {
        u64::from_le_bytes(*self.field::<AT, 8>())
    }

    /// The big-endian number of 16 bits at `AT`.
    pub fn be_u16<const AT: usize>(self) -> u16 {
        u16::from_be_bytes(*self.field::<AT, 2>())
    }

    /// The big-endian number of 32 bits at `AT`.
    pub fn be_u32<const AT: usize>(self) -> u32 {
        u32::from_be_bytes(*self.field::<AT, 4>())
    }

    /// The big-endian number of 64 bits at `AT`.
    pub fn be_u64<const AT: usize>(self) -> u64 {
        u64::from_be_bytes(*self.field::<AT, 8>())
    }
}

#[cfg(test)]
mod tests {
    use super::Record;

    #[test]
    fn fields_are_read_up_to_the_last_byte() {
        let bytes = [1, 2, 3, 4, 5, 6, 7, 8, 9];
        let record = Record::new(&bytes);
        assert_eq!(record.byte::<8>(), 9);
        assert_eq!(record.le_u16::<7>(), 0x0908);
        assert_eq!(record.be_u16::<7>(), 0x0809);
        assert_eq!(record.le_u32::<5>(), 0x0908_0706);
        assert_eq!(record.be_u32::<5>(), 0x0607_0809);
        assert_eq!(record.le_u64::<1>(), 0x0908_0706_0504_0302);
        assert_eq!(record.be_u64::<1>(), 0x0203_0405_0607_0809);
        assert_eq!(record.field::<0, 9>(), &bytes);
    }

    #[test]
    fn a_structure_that_is_cut_off_is_none() {
        assert!(Record::<4>::first_of(&[0; 3]).is_none());
        assert!(Record::<4>::first_of(&[0; 5]).is_some());
    }
}
