//! Checks encryption and feature bits, and finds their names.

#![deny(clippy::indexing_slicing)]
#![cfg_attr(not(test), deny(clippy::string_slice))]

use crate::model::bytes::rows;
use crate::{CheckReport, Error, ProblemKind, Result, Severity};

pub(crate) fn refuse_encryption(method: u32, image: &str) -> Result<()> {
    let feature = match method {
        0 => return Ok(()),
        1 => "AES encryption".to_owned(),
        2 => "LUKS encryption".to_owned(),
        other => format!("encryption method {other}"),
    };
    Err(Error::UnsupportedFeature {
        image: image.to_owned(),
        feature,
        detail: "decrypt it first, by converting it with its key".to_owned(),
    })
}

pub(crate) fn refuse_unknown(incompatible: u64, extensions: &[Extension], image: &str) -> Result<()> {
    let unknown = incompatible & !INCOMPATIBLE_KNOWN;
    if unknown == 0 {
        return Ok(());
    }
    let names: Vec<_> = (0..64)
        .filter(|bit| unknown >> bit & 1 == 1)
        .map(|bit| feature_name(extensions, bit).unwrap_or_else(|| format!("unknown feature bit {bit}")))
        .collect();
    Err(Error::UnsupportedFeature {
        image: image.to_owned(),
        feature: names.join(", "),
        detail: "the image requires support for it".to_owned(),
    })
}

/// The name of incompatible feature `bit`, from the image's own name table.
fn feature_name(extensions: &[Extension], bit: u8) -> Option<String> {
    let table = extensions
        .iter()
        .find(|extension| extension.kind == EXTENSION_FEATURE_NAMES)?;
    let name = rows::<48>(&table.data, 0)
        .iter()
        .find_map(|[kind, found, name @ ..]| (*kind == 0 && *found == bit).then_some(name))?;
    let name: String = String::from_utf8_lossy(name)
        .chars()
        .take_while(|letter| *letter != '\0')
        .filter(|letter| !letter.is_control())
        .collect();
    (!name.is_empty()).then_some(name)
}

/// Reports marks that other programs have set.
pub(super) fn report_marks(incompatible: u64, report: &mut CheckReport) {
    let mut mark = |bit: u64, severity, detail: &str| {
        if incompatible & bit != 0 {
            let detail = detail.to_owned();
            report.add(severity, ProblemKind::Structure { detail });
        }
    };
    mark(
        INCOMPATIBLE_DIRTY,
        Severity::Leak,
        "it was not closed cleanly, or is open: its refcounts may be outdated",
    );
    mark(
        INCOMPATIBLE_CORRUPT,
        Severity::Corruption,
        "it is marked as corrupt: programs refuse to write to it",
    );
}

/// The table of feature names for new images.
pub(crate) fn feature_names() -> Extension {
    const NAMES: [(u8, u8, &str); 8] = [
        (0, 0, "dirty bit"),
        (0, 1, "corrupt bit"),
        (0, 2, "external data file"),
        (0, 3, "compression type"),
        (0, 4, "extended L2 entries"),
        (1, 0, "lazy refcounts"),
        (2, 0, "bitmaps"),
        (2, 1, "raw external data"),
    ];
    let mut data = Vec::new();
    for (kind, bit, name) in NAMES {
        data.extend([kind, bit]);
        data.extend(name.as_bytes());
        data.resize(data.len().next_multiple_of(48), 0);
    }
    Extension {
        kind: EXTENSION_FEATURE_NAMES,
        data,
    }
}

/// A stored header extension.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Extension {
    pub(crate) kind: u32,
    pub(crate) data: Vec<u8>,
}

pub(crate) const INCOMPATIBLE_DIRTY: u64 = 1;
pub(crate) const INCOMPATIBLE_CORRUPT: u64 = 1 << 1;
pub(crate) const INCOMPATIBLE_DATA_FILE: u64 = 1 << 2;
pub(crate) const INCOMPATIBLE_COMPRESSION: u64 = 1 << 3;
pub(crate) const INCOMPATIBLE_EXTENDED_L2: u64 = 1 << 4;
pub(crate) const INCOMPATIBLE_KNOWN: u64 = 0x1f;
pub(crate) const COMPATIBLE_LAZY_REFCOUNTS: u64 = 1;
pub(crate) const AUTOCLEAR_BITMAPS: u64 = 1;
pub(crate) const AUTOCLEAR_RAW_DATA_FILE: u64 = 1 << 1;
pub(crate) const EXTENSION_END: u32 = 0;
pub(crate) const EXTENSION_BACKING_FORMAT: u32 = 0xe279_2aca;
pub(crate) const EXTENSION_FEATURE_NAMES: u32 = 0x6803_f857;
pub(crate) const EXTENSION_BITMAPS: u32 = 0x2385_2875;
pub(crate) const EXTENSION_DATA_FILE: u32 = 0x4441_5441;
