//! Binary encoding: the little-endian fields and variable-length integers that all binary formats here share.
//!
//! Variable-length integers are LEB128: seven bits per byte, least significant first; the top bit says that another
//! byte follows; at most ten bytes.

/// The bytes end early or are invalid; the caller adds the object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Malformed {
    /// The position in the decoded bytes.
    pub(crate) position: usize,
    /// The problem.
    pub(crate) problem: &'static str,
}

/// Appends `value` as LEB128.
pub(crate) fn put_varint(bytes: &mut Vec<u8>, mut value: u64) {
    loop {
        let low = value.to_le_bytes()[0] & 0x7f;
        value >>= 7;
        if value == 0 {
            bytes.push(low);
            return;
        }
        bytes.push(low | 0x80);
    }
}

/// Reads fields from the front of a slice, never past its end.
#[derive(Debug)]
pub(crate) struct Decoder<'a> {
    bytes: &'a [u8],
    position: usize,
}

impl<'a> Decoder<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, position: 0 }
    }

    pub(crate) fn fail<T>(&self, problem: &'static str) -> Result<T, Malformed> {
        Err(Malformed {
            position: self.position,
            problem,
        })
    }

    pub(crate) fn remaining(&self) -> usize {
        self.bytes.len() - self.position
    }

    pub(crate) fn take(&mut self, length: usize) -> Result<&'a [u8], Malformed> {
        if length > self.remaining() {
            return self.fail("ends early");
        }
        let taken = &self.bytes[self.position..self.position + length];
        self.position += length;
        Ok(taken)
    }

    pub(crate) fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let taken = self.take(N)?;
        Ok(taken.try_into().expect("take returns the length asked for"))
    }

    pub(crate) fn u8(&mut self) -> Result<u8, Malformed> {
        Ok(self.array::<1>()?[0])
    }

    pub(crate) fn varint(&mut self) -> Result<u64, Malformed> {
        let mut value = 0u64;
        for shift in (0..64).step_by(7) {
            let byte = self.u8()?;
            let bits = u64::from(byte & 0x7f);
            if shift == 63 && bits > 1 {
                return self.fail("number too large");
            }
            value |= bits << shift;
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        self.fail("number too long")
    }

    /// A count of items of at least `item_bytes` each that follow: limited by the number of remaining bytes.
    pub(crate) fn count(&mut self, item_bytes: usize) -> Result<usize, Malformed> {
        let count = self.varint()?;
        if count > (self.remaining() / item_bytes.max(1)) as u64 {
            return self.fail("counts more than follows");
        }
        Ok(holdfast_block::to_usize(count))
    }

    pub(crate) fn varint_at_most(&mut self, limit: u64) -> Result<u64, Malformed> {
        let value = self.varint()?;
        if value > limit {
            return self.fail("number over its limit");
        }
        Ok(value)
    }

    pub(crate) fn finish(self) -> Result<(), Malformed> {
        if self.remaining() == 0 {
            Ok(())
        } else {
            self.fail("has extra bytes after its end")
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{any, prop_assert_eq, proptest};

    use super::{Decoder, put_varint};

    proptest! {
        #[test]
        fn varints_round_trip(value in any::<u64>(), shift in 0u32..64) {
            let value = value >> shift;
            let mut bytes = Vec::new();
            put_varint(&mut bytes, value);
            let mut decoder = Decoder::new(&bytes);
            prop_assert_eq!(decoder.varint(), Ok(value));
            prop_assert_eq!(decoder.finish(), Ok(()));
        }

        #[test]
        fn no_bytes_make_the_decoder_panic(bytes in proptest::collection::vec(any::<u8>(), 0..40)) {
            let mut decoder = Decoder::new(&bytes);
            while decoder.remaining() > 0 && decoder.varint().is_ok() {}
            let mut decoder = Decoder::new(&bytes);
            if let Ok(count) = decoder.count(4) {
                assert!(count * 4 <= decoder.remaining());
            }
        }
    }

    #[test]
    fn eleven_bytes_and_overflow_are_refused() {
        assert!(Decoder::new(&[0xff; 11]).varint().is_err());
        let mut largest = [0xff; 10];
        largest[9] = 1;
        assert_eq!(Decoder::new(&largest).varint(), Ok(u64::MAX));
        largest[9] = 2;
        assert!(Decoder::new(&largest).varint().is_err());
    }
}
