//! Whether QEMU's dirty bitmap can be believed, disk by disk.
//!
//! A bitmap is named after the repository and a random number, which the snapshot keeps with each disk: the bitmap of the newest
//! snapshot has begun at exactly its instant. Whether it has recorded all that was written since has to be proven: see
//! [`proof`](super::proof). What is left is an image that is written past QEMU, with a bitmap that does not know: that is what the spot
//! checks are for.

use std::fmt;

use holdfast_block::{BlockDevice, DirtyBitmap, SeededRandom, to_usize};

use super::method::Method;

/// What the names of our bitmaps begin with.
const PREFIX: &str = "holdfast-";
/// Clean places of a disk that are compared with the snapshot before.
const SPOT_COUNT: u64 = 16;
const SPOT_BYTES: u64 = 4096;
const SPOT_LENGTH: usize = to_usize(SPOT_BYTES);

/// How a disk was compared with the snapshot before.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Compared {
    /// By its bitmap: so many bytes may have changed, and only they were read.
    ByBitmap {
        /// Bytes that the bitmap names.
        dirty_bytes: u64,
    },
    /// By where its image lies in two host snapshots: so many bytes may have changed, and only they were read.
    ByHostSnapshots {
        /// Bytes that lie elsewhere.
        dirty_bytes: u64,
    },
    /// By its content: everything was read, for this reason.
    ByContent(ReadAll),
}

/// Where a disk may have changed since the snapshot before.
#[derive(Debug, Clone)]
pub(super) enum Changes {
    /// Only there.
    Only(DirtyBitmap),
    /// Only there, as the file system says of two host snapshots.
    Between(DirtyBitmap),
    /// It is not known.
    Unknown(ReadAll),
}

/// Why everything of a disk is read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReadAll {
    /// There is no snapshot of the machine to compare with.
    NoParent,
    /// The snapshot before has no such disk.
    NewDisk,
    /// The snapshot before was not made in a way that leaves a bitmap.
    NoBitmapThen,
    /// No layer of the disk has the bitmap: QEMU was killed or restarted, or the image is another one.
    BitmapGone,
    /// QEMU says that the bitmap is not to be relied on.
    Inconsistent,
    /// The bitmap was switched off, or a job uses it.
    NotRecording,
    /// The disk has another size now.
    Resized {
        /// Size in the snapshot before, in bytes.
        before_bytes: u64,
        /// Size now.
        now_bytes: u64,
    },
    /// The snapshot before was made by a version that left nothing by which its bitmap could be proven.
    NoWitnessThen,
    /// The bitmap has lost what was recorded first.
    BegunAnew,
    /// The disk has layers above the bitmap, or filters between them, and QEMU does not report what was written to those.
    LayersUnknown,
    /// It is not known whether the image still has the same base.
    BasesUnknown,
    /// The image is based on something else now, or that was written.
    BasesChanged,
    /// The bitmap is in another image and another QEMU than it was begun in.
    Moved,
    /// QEMU does not answer what has changed; its words.
    NotTold(String),
    /// The layers of the disk were changed while it was frozen.
    LayersChanged,
    /// A place that the bitmap calls unchanged has changed.
    SpotCheck {
        /// Where, in bytes.
        offset: u64,
    },
    /// The machine is shut off, and its images were read.
    ShutOff,
    /// The snapshot before was not read from a host snapshot.
    NoHostSnapshotThen,
    /// The host snapshot that the snapshot before was read from is gone, or another one has its name.
    HostSnapshotGone {
        /// Its full name.
        name: String,
    },
    /// The disk was on another image then.
    OtherImage,
    /// The file system does not tell; why not.
    NotComparable(String),
    /// It was read in a way that has no bitmaps.
    NoBitmapNow(Method),
}

impl fmt::Display for ReadAll {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoParent => formatter.write_str("there is no earlier snapshot to compare with"),
            Self::NewDisk => formatter.write_str("the snapshot before has no such disk"),
            Self::NoBitmapThen => formatter.write_str("the snapshot before left no bitmap"),
            Self::BitmapGone => formatter.write_str(
                "the bitmap of the snapshot before is gone: QEMU was restarted or killed, or the image was replaced",
            ),
            Self::Inconsistent => {
                formatter.write_str("the bitmap is inconsistent: QEMU was killed before it could save it")
            }
            Self::NotRecording => {
                formatter.write_str("the bitmap does not record: it was switched off, or a job uses it")
            }
            Self::Resized {
                before_bytes,
                now_bytes,
            } => {
                write!(formatter, "the disk had {before_bytes} bytes and has {now_bytes} now")
            }
            Self::SpotCheck { offset } => write!(
                formatter,
                "the bitmap is wrong: it calls offset {offset} unchanged, and it is not; \
                 the image was changed in a way that QEMU did not record"
            ),
            Self::NoWitnessThen => formatter
                .write_str("the snapshot before is of an earlier version of Holdfast, whose bitmaps cannot be proven"),
            Self::BegunAnew => formatter.write_str(
                "the bitmap does not go back to the snapshot before: it was cleared, or begun anew in another image",
            ),
            Self::LayersUnknown => formatter.write_str(
                "the image of the snapshot before is below other layers, and QEMU does not tell what was written to them",
            ),
            Self::BasesUnknown => {
                formatter.write_str("it is not known whether the base of the image is the same and unchanged")
            }
            Self::BasesChanged => formatter.write_str("the base of the image was replaced or written"),
            Self::Moved => formatter.write_str(
                "the bitmap came to another image in another QEMU, and it is not known whether it had recorded everything by then",
            ),
            Self::NotTold(why) => write!(formatter, "QEMU does not tell what has changed: {why}"),
            Self::LayersChanged => formatter.write_str("the layers of its image were changed while it was frozen"),
            Self::ShutOff => formatter.write_str("the machine is shut off"),
            Self::NoHostSnapshotThen => {
                formatter.write_str("the snapshot before was not read from a host snapshot that is kept")
            }
            Self::HostSnapshotGone { name } => write!(
                formatter,
                "the host snapshot {name}, from which the snapshot before was read, is gone"
            ),
            Self::OtherImage => formatter.write_str("the disk was on another image, or one of another format, then"),
            Self::NotComparable(why) => write!(formatter, "the two host snapshots cannot be compared: {why}"),
            Self::NoBitmapNow(method) => write!(formatter, "the method {} has no bitmaps", method.word()),
        }
    }
}

impl Changes {
    pub(super) fn all(why: ReadAll) -> Self {
        Self::Unknown(why)
    }

    pub(super) fn compared(&self) -> Compared {
        match self {
            Self::Only(changed) => Compared::ByBitmap {
                dirty_bytes: changed.dirty_bytes(),
            },
            Self::Between(changed) => Compared::ByHostSnapshots {
                dirty_bytes: changed.dirty_bytes(),
            },
            Self::Unknown(why) => Compared::ByContent(why.clone()),
        }
    }

    /// About how much of `device` will be read.
    pub(super) fn bytes_to_read(&self, device: &dyn BlockDevice) -> u64 {
        match self {
            Self::Only(changed) | Self::Between(changed) => changed.dirty_bytes(),
            Self::Unknown(_) => device.size_bytes(),
        }
    }
}

/// The names of the bitmaps that we make for a repository.
#[derive(Debug, Clone)]
pub(super) struct BitmapNames {
    prefix: String,
    run: u32,
}

impl BitmapNames {
    pub(super) fn new(repository: &str, run: u32) -> Self {
        let digits: String = repository.chars().take(8).collect();
        Self {
            prefix: format!("{PREFIX}{digits}-"),
            run,
        }
    }

    /// The bitmap that this run begins for the disk of this number. Each disk has a name of its own: their images can be exchanged.
    pub(super) fn next(&self, number: u32) -> String {
        format!("{}{:08x}", self.prefix, self.run.wrapping_add(number))
    }

    /// Whether a bitmap was made for this repository.
    pub(super) fn is_ours(&self, name: &str) -> bool {
        name.starts_with(&self.prefix)
    }
}

/// Whether a bitmap was made by a backup, into any repository.
pub(crate) fn is_holdfast_bitmap(name: &str) -> bool {
    let is_number = |text: &str| text.len() == 8 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    name.strip_prefix(PREFIX)
        .and_then(|rest| rest.split_once('-'))
        .is_some_and(|(repository, run)| is_number(repository) && is_number(run))
}

/// Whether a bitmap was made for the repository of this id.
pub(crate) fn is_bitmap_of(name: &str, repository: &str) -> bool {
    BitmapNames::new(repository, 0).is_ours(name)
}

/// Compares some places that `changed` calls unchanged with the snapshot before.
/// What cannot be read is not proven wrong: it is found when it is used.
///
/// # Errors
/// The first of them that differs.
pub(super) fn check_spots(
    device: &dyn BlockDevice,
    changed: &DirtyBitmap,
    before: &dyn BlockDevice,
    seed: u64,
) -> Result<(), ReadAll> {
    let mut random = SeededRandom::new(seed);
    let block_count = device.size_bytes() / SPOT_BYTES;
    for _ in 0..SPOT_COUNT.min(block_count) {
        let offset = random.next_u64() % block_count * SPOT_BYTES;
        if changed.is_dirty(offset..offset + SPOT_BYTES) {
            continue;
        }
        let (mut now, mut then) = ([0; SPOT_LENGTH], [0; SPOT_LENGTH]);
        let is_read = device.read_at(&mut now, offset).is_ok() && before.read_at(&mut then, offset).is_ok();
        if is_read && now != then {
            return Err(ReadAll::SpotCheck { offset });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use holdfast_block::{DirtyBitmap, MemoryDevice};

    use super::{BitmapNames, ReadAll, SPOT_BYTES, SPOT_LENGTH, check_spots, is_bitmap_of, is_holdfast_bitmap};

    const BLOCK_COUNT: u8 = 64;

    /// A disk whose blocks are full of their numbers, or of others from `changed_from` on.
    fn device(changed_from: u8) -> MemoryDevice {
        let byte = |block: u8| if block < changed_from { block } else { block + 100 };
        let blocks = (0..BLOCK_COUNT).flat_map(|block| [byte(block); SPOT_LENGTH]);
        MemoryDevice::from_bytes(&blocks.collect::<Vec<u8>>())
    }

    fn bitmap() -> DirtyBitmap {
        DirtyBitmap::new(u64::from(BLOCK_COUNT) * SPOT_BYTES, SPOT_BYTES).unwrap()
    }

    #[test]
    fn a_change_that_a_bitmap_does_not_name_is_found_where_it_is_large() {
        let first = u64::from(BLOCK_COUNT) * 3 / 4 * SPOT_BYTES;
        for seed in 0..8 {
            let found = check_spots(&device(BLOCK_COUNT / 4 * 3), &bitmap(), &device(BLOCK_COUNT), seed);
            assert!(
                matches!(found, Err(ReadAll::SpotCheck { offset }) if offset >= first),
                "{seed}: {found:?}"
            );
        }
    }

    #[test]
    fn what_a_bitmap_names_may_differ() {
        let mut changed = bitmap();
        changed.set(u64::from(BLOCK_COUNT) / 4 * 3 * SPOT_BYTES..u64::from(BLOCK_COUNT) * SPOT_BYTES);
        for seed in 0..8 {
            let found = check_spots(&device(BLOCK_COUNT / 4 * 3), &changed, &device(BLOCK_COUNT), seed);
            assert_eq!(found, Ok(()), "{seed}");
        }
    }

    #[test]
    fn bitmaps_have_names_of_their_own_for_each_disk_and_each_repository() {
        let [first, second] = ["0123abcd".repeat(4), "4567cdef".repeat(4)];
        let names = BitmapNames::new(&first, u32::MAX);
        let [one, other] = [names.next(0), names.next(1)];
        assert_eq!(
            [&one, &other],
            ["holdfast-0123abcd-ffffffff", "holdfast-0123abcd-00000000"]
        );
        assert!(names.is_ours(&one) && names.is_ours(&other) && is_holdfast_bitmap(&one));
        assert!(is_bitmap_of(&one, &first) && !is_bitmap_of(&one, &second));
        assert!(!BitmapNames::new(&second, 0).is_ours(&one));
    }
}
