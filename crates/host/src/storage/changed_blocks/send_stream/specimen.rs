//! Small streams as a sender encodes them, for tests and fuzzers.

use super::checked::Fletcher4;
use super::record::{ByteOrder, MAGIC, RECORD_LENGTH, SUM_AT};
use super::{SendStreamQuery, StreamObject};

/// The generation of the sender.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SenderVersion {
    /// Only the end record has a checksum.
    Old,
    /// Each record has a checksum.
    New,
}

/// Encodes a stream, record by record.
pub(crate) struct SendStreamWriter {
    order: ByteOrder,
    age: SenderVersion,
    pub(super) bytes: Vec<u8>,
    sum: Fletcher4,
}

/// An offset in a record, and the number at it.
pub(crate) enum Field {
    Byte(usize, u8),
    Word(usize, u32),
    Long(usize, u64),
}

/// The query for the test streams.
pub(crate) const QUERY: SendStreamQuery = SendStreamQuery {
    from_guid: 0x1111_2222_3333_4444,
    to_guid: 0x5555_6666_7777_8888,
    object: StreamObject::File {
        number: 8,
        block_before_bytes: 8192,
        from_transaction: Some(100),
    },
    size_before_bytes: 100_000,
    size_after_bytes: 100_000,
};

impl SendStreamWriter {
    /// A stream with the begin record for [`QUERY`], and these features.
    pub(crate) fn new(order: ByteOrder, age: SenderVersion, features: u64) -> Self {
        let mut writer = Self {
            order,
            age,
            bytes: Vec::new(),
            sum: Fletcher4::default(),
        };
        writer.begin(features << 2 | 1, &[]);
        writer
    }

    /// An empty stream.
    #[cfg(test)]
    pub(crate) fn empty(order: ByteOrder) -> Self {
        let mut writer = Self::new(order, SenderVersion::New, 0);
        (writer.bytes, writer.sum) = (Vec::new(), Fletcher4::default());
        writer
    }

    pub(crate) fn begin(&mut self, version_word: u64, payload: &[u8]) {
        let fields = [
            Field::Word(4, u32::try_from(payload.len()).expect("short")),
            Field::Long(8, MAGIC),
            Field::Long(16, version_word),
            Field::Long(24, 1_700_000_000),
            Field::Word(32, 2),
            Field::Long(40, QUERY.to_guid),
            Field::Long(48, QUERY.from_guid),
        ];
        let mut record = self.fill(0, &fields);
        record[56..66].copy_from_slice(b"tank/vm@b\0");
        self.put(&record);
        self.put(payload);
    }

    fn fill(&self, kind: u32, fields: &[Field]) -> [u8; RECORD_LENGTH] {
        let mut record = [0; RECORD_LENGTH];
        let mut set = |at: usize, bytes: &[u8]| record[at..at + bytes.len()].copy_from_slice(bytes);
        let is_little = self.order == ByteOrder::Little;
        let word = |number: u32| {
            if is_little {
                number.to_le_bytes()
            } else {
                number.to_be_bytes()
            }
        };
        let long = |number: u64| {
            if is_little {
                number.to_le_bytes()
            } else {
                number.to_be_bytes()
            }
        };
        set(0, &word(kind));
        for field in fields {
            match field {
                Field::Byte(at, number) => set(*at, &[*number]),
                Field::Word(at, number) => set(*at, &word(*number)),
                Field::Long(at, number) => set(*at, &long(*number)),
            }
        }
        record
    }

    fn put(&mut self, bytes: &[u8]) {
        self.sum.take(bytes, self.order);
        self.bytes.extend_from_slice(bytes);
    }

    /// Appends a later record, with its payload.
    pub(crate) fn record(&mut self, kind: u32, fields: &[Field], payload: &[u8]) -> &mut Self {
        let mut record = self.fill(kind, fields);
        if self.age == SenderVersion::New {
            let mut sum = self.sum;
            sum.take(&record[..SUM_AT], self.order);
            self.set_sum(&mut record, SUM_AT, sum.sums());
        }
        self.put(&record);
        self.put(payload);
        self
    }

    fn set_sum(&self, record: &mut [u8; RECORD_LENGTH], at: usize, sums: [u64; 4]) {
        for (number, sum) in sums.into_iter().enumerate() {
            let bytes = match self.order {
                ByteOrder::Little => sum.to_le_bytes(),
                ByteOrder::Big => sum.to_be_bytes(),
            };
            record[at + number * 8..][..8].copy_from_slice(&bytes);
        }
    }

    /// Appends an OBJECT record of a file with system attributes, created in `transaction`.
    pub(crate) fn object(&mut self, number: u64, block: u32, size: u64, transaction: u64) -> &mut Self {
        let mut bonus = match self.order {
            ByteOrder::Little => [
                &0x2F_505A_u32.to_le_bytes()[..],
                &(1_u16 << 10 | 2).to_le_bytes(),
                &[0; 2],
            ]
            .concat(),
            ByteOrder::Big => [
                &0x2F_505A_u32.to_be_bytes()[..],
                &(1_u16 << 10 | 2).to_be_bytes(),
                &[0; 2],
            ]
            .concat(),
        };
        for word in [0o100_644, size, transaction, 0] {
            bonus.extend(match self.order {
                ByteOrder::Little => u64::to_le_bytes(word),
                ByteOrder::Big => u64::to_be_bytes(word),
            });
        }
        let fields = [
            Field::Long(8, number),
            Field::Word(16, 19),
            Field::Word(20, 44),
            Field::Word(24, block),
            Field::Word(28, u32::try_from(bonus.len()).expect("short")),
        ];
        self.record(1, &fields, &bonus)
    }

    pub(crate) fn write(&mut self, number: u64, offset: u64, length: usize) -> &mut Self {
        let fields = [
            Field::Long(8, number),
            Field::Word(16, 19),
            Field::Long(24, offset),
            Field::Long(32, length as u64),
        ];
        self.record(3, &fields, &vec![7; length])
    }

    pub(crate) fn free(&mut self, number: u64, offset: u64, length: u64) -> &mut Self {
        let fields = [Field::Long(8, number), Field::Long(16, offset), Field::Long(24, length)];
        self.record(4, &fields, &[])
    }

    /// Appends the end record.
    pub(crate) fn end(mut self) -> Vec<u8> {
        let mut record = self.fill(5, &[Field::Long(40, QUERY.to_guid)]);
        self.set_sum(&mut record, 8, self.sum.sums());
        if self.age == SenderVersion::New {
            let mut sum = self.sum;
            sum.take(&record[..SUM_AT], self.order);
            self.set_sum(&mut record, SUM_AT, sum.sums());
        }
        self.put(&record);
        self.bytes
    }
}
