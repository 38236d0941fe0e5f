//! Decides for each disk whether QEMU's dirty bitmap can be trusted.
//!
//! The name of a bitmap contains the repository and a random number, which the snapshot notes for each disk: the bitmap
//! of the newest snapshot started exactly at its point in time. That it recorded all writes since must be proven: see
//! [`proof`](super::proof). The proof cannot detect writes to an image that bypass QEMU; the spot checks are for these.

use std::fmt;

use holdfast_block::{BlockDevice, DirtyBitmap, SeededRandom, to_usize};

use super::method::Method;

/// The prefix of Holdfast's bitmaps.
const PREFIX: &str = "holdfast-";
/// The number of places without changes that are compared with the previous snapshot.
const SPOT_COUNT: u64 = 16;
const SPOT_BYTES: u64 = 4096;
const SPOT_LENGTH: usize = to_usize(SPOT_BYTES);

/// How a disk was compared with the previous snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Compared {
    /// By its bitmap: only the bytes that may have changed were read.
    ByBitmap {
        /// Bytes marked in the bitmap.
        dirty_bytes: u64,
    },
    /// By the location of its image in two host snapshots: only the bytes that may have changed were read.
    ByHostSnapshots {
        /// Bytes that are at another location.
        dirty_bytes: u64,
    },
    /// By its content: everything was read, for this reason.
    ByContent(ReadAll),
}

/// Where a disk may have changed since the previous snapshot.
#[derive(Debug, Clone)]
pub(super) enum Changes {
    /// Only in the ranges that QEMU's bitmap marks.
    Only(DirtyBitmap),
    /// Only in the ranges that differ between two host snapshots, according to the file system.
    Between(DirtyBitmap),
    /// Not known.
    Unknown(ReadAll),
}

/// Why a whole disk is read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReadAll {
    /// There is no snapshot of the machine to compare with.
    NoParent,
    /// The previous snapshot has no such disk.
    NewDisk,
    /// The method of the previous snapshot leaves no bitmap.
    NoBitmapThen,
    /// No layer of the disk has the bitmap: QEMU was killed or restarted, or the image was replaced.
    BitmapGone,
    /// QEMU reports the bitmap as inconsistent.
    Inconsistent,
    /// The bitmap was disabled, or a job uses it.
    NotRecording,
    /// The size of the disk has changed.
    Resized {
        /// Size in the previous snapshot, in bytes.
        before_bytes: u64,
        /// Current size in bytes.
        now_bytes: u64,
    },
    /// The previous snapshot was made by a version that stored nothing to prove its bitmap.
    NoWitnessThen,
    /// The bitmap lacks the marks that were recorded first.
    BegunAnew,
    /// The disk has layers above the bitmap, or filters between them, and QEMU does not report writes to those.
    LayersUnknown,
    /// It is not known whether the image still has the same base.
    BasesUnknown,
    /// The image has another base image now, or its base image was written.
    BasesChanged,
    /// The bitmap is in another image and another QEMU process than at its start.
    Moved,
    /// QEMU does not report the changes; its error.
    NotTold(String),
    /// The layers of the disk were changed while it was frozen.
    LayersChanged,
    /// A place that the bitmap marks as unchanged has changed.
    SpotCheck {
        /// Its offset in bytes.
        offset: u64,
    },
    /// The machine is shut off, and its images were read.
    ShutOff,
    /// The previous snapshot was not read from a host snapshot.
    NoHostSnapshotThen,
    /// The host snapshot of the previous snapshot is missing, or another one has its name.
    HostSnapshotGone {
        /// Its full name.
        name: String,
    },
    /// The disk was on another image at that time.
    OtherImage,
    /// The file system does not report the changes; the reason.
    NotComparable(String),
    /// The method has no bitmaps.
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

    /// Approximate number of bytes of `device` that will be read.
    pub(super) fn bytes_to_read(&self, device: &dyn BlockDevice) -> u64 {
        match self {
            Self::Only(changed) | Self::Between(changed) => changed.dirty_bytes(),
            Self::Unknown(_) => device.size_bytes(),
        }
    }
}

/// The names of Holdfast's bitmaps for a repository.
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

    /// The name of the bitmap that this run starts for the disk with this number. Each disk has its own name, since
    /// images can be exchanged.
    pub(super) fn next(&self, number: u32) -> String {
        format!("{}{:08x}", self.prefix, self.run.wrapping_add(number))
    }

    /// Whether a bitmap was made for this repository.
    pub(super) fn is_of_this_repository(&self, name: &str) -> bool {
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

/// Whether a bitmap was made for the repository with this id.
pub(crate) fn is_bitmap_of(name: &str, repository: &str) -> bool {
    BitmapNames::new(repository, 0).is_of_this_repository(name)
}

/// Compares some places that `changed` marks as unchanged with the previous snapshot. An unreadable place is not proof
/// of an error: it is reported when it is used.
///
/// # Errors
/// The first place that differs.
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

    /// A disk whose blocks contain their number, and other values from `changed_from` on.
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
        assert!(names.is_of_this_repository(&one) && names.is_of_this_repository(&other) && is_holdfast_bitmap(&one));
        assert!(is_bitmap_of(&one, &first) && !is_bitmap_of(&one, &second));
        assert!(!BitmapNames::new(&second, 0).is_of_this_repository(&one));
    }
}
