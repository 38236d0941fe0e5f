//! Mode pages: caching, control, and informational exceptions (SPC-4 section 7.5, SBC-3 section 6.5).

use super::cdb::Cdb;
use super::sense::{Failure, Sense};

const CACHING: u8 = 0x08;
const CONTROL: u8 = 0x0a;
const EXCEPTIONS: u8 = 0x1c;
const ALL_PAGES: u8 = 0x3f;

/// Bits of the caching page: the write cache is enabled.
const WRITE_CACHE: u8 = 0x04;
/// Bits of the control page: software write protection.
const SOFTWARE_PROTECTION: u8 = 0x08;
/// Bits of the device-specific parameter: write protection; DPO and FUA are supported.
const PROTECTED: u8 = 0x80;
const DPO_FUA: u8 = 0x10;

/// The parameters that initiators can change. They last until the unit is reset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ModePages {
    /// Writes may stay in volatile memory until a flush.
    pub(crate) has_write_cache: bool,
    /// Writes are refused.
    pub(crate) is_write_protected: bool,
}

impl Default for ModePages {
    fn default() -> Self {
        Self {
            has_write_cache: true,
            is_write_protected: false,
        }
    }
}

/// Properties of a unit that are part of the mode parameters.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ModeUnit {
    pub(crate) is_read_only: bool,
    pub(crate) block_count: u64,
    pub(crate) block_bytes: u32,
}

/// Which values of the parameters are reported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PageControl {
    Current,
    /// A mask of the bits that can be changed.
    Changeable,
    Default,
}

/// Whether a command has the short or the long header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum HeaderForm {
    Six,
    Ten,
}

impl HeaderForm {
    fn of(cdb: &Cdb) -> Self {
        if cdb.byte(0) < 0x20 { Self::Six } else { Self::Ten }
    }
}

/// MODE SENSE: the parameter data, not yet truncated to the allocation length.
pub(crate) fn sense(cdb: &Cdb, pages: ModePages, unit: ModeUnit) -> Result<Vec<u8>, Failure> {
    let control = match cdb.byte(2) >> 6 {
        0 => PageControl::Current,
        1 => PageControl::Changeable,
        2 => PageControl::Default,
        _ => return Err(Sense::SAVING_NOT_SUPPORTED.into()),
    };
    let page = cdb.byte(2) & 0x3f;
    let subpage = cdb.byte(3);
    let values = match control {
        PageControl::Current => pages,
        PageControl::Changeable | PageControl::Default => ModePages::default(),
    };
    let list = match (page, subpage) {
        (CACHING, 0) => caching(values, control),
        (CONTROL, 0) => control_page(values, control),
        (EXCEPTIONS, 0) => exceptions(),
        (ALL_PAGES, 0 | 0xff) => [caching(values, control), control_page(values, control), exceptions()].concat(),
        _ => return Err(Sense::INVALID_FIELD_IN_CDB.into()),
    };
    let has_descriptor = cdb.byte(1) & 0x08 == 0;
    let descriptor = if has_descriptor {
        block_descriptor(unit)
    } else {
        Vec::new()
    };
    let is_protected = unit.is_read_only || pages.is_write_protected;
    let device = DPO_FUA | if is_protected { PROTECTED } else { 0 };
    let descriptor_length = u8::try_from(descriptor.len()).unwrap_or(0);
    let length = descriptor.len() + list.len();
    let mut data = match HeaderForm::of(cdb) {
        HeaderForm::Six => vec![
            u8::try_from(3 + length).unwrap_or(u8::MAX),
            0,
            device,
            descriptor_length,
        ],
        HeaderForm::Ten => {
            let [high, low] = u16::try_from(6 + length).unwrap_or(u16::MAX).to_be_bytes();
            vec![high, low, 0, device, 0, 0, 0, descriptor_length]
        }
    };
    data.extend(descriptor);
    data.extend(list);
    Ok(data)
}

/// The short block descriptor: number and length of blocks.
fn block_descriptor(unit: ModeUnit) -> Vec<u8> {
    let mut descriptor = u32::try_from(unit.block_count)
        .unwrap_or(u32::MAX)
        .to_be_bytes()
        .to_vec();
    descriptor.extend((unit.block_bytes & 0x00ff_ffff).to_be_bytes());
    descriptor
}

fn caching(values: ModePages, control: PageControl) -> Vec<u8> {
    let mut page = [0; 20];
    [page[0], page[1]] = [CACHING, 18];
    if control == PageControl::Changeable || values.has_write_cache {
        page[2] = WRITE_CACHE;
    }
    page.to_vec()
}

fn control_page(values: ModePages, control: PageControl) -> Vec<u8> {
    let mut page = [0; 12];
    [page[0], page[1]] = [CONTROL, 10];
    if control == PageControl::Changeable {
        page[4] = SOFTWARE_PROTECTION;
        return page.to_vec();
    }
    // Commands may be executed in any order, and tasks that another initiator aborts end with TASK ABORTED.
    page[3] = 0x10;
    page[4] = if values.is_write_protected {
        SOFTWARE_PROTECTION
    } else {
        0
    };
    page[5] = 0x40;
    page.to_vec()
}

fn exceptions() -> Vec<u8> {
    let mut page = [0; 12];
    [page[0], page[1]] = [EXCEPTIONS, 10];
    page.to_vec()
}

/// MODE SELECT: the parameters after the change. Bits that cannot be changed must have their present value.
pub(crate) fn select(cdb: &Cdb, pages: ModePages, unit: ModeUnit, data: &[u8]) -> Result<ModePages, Failure> {
    const PAGE_FORMAT: u8 = 0x10;
    const SAVE_PAGES: u8 = 0x01;
    if cdb.byte(1) & PAGE_FORMAT == 0 || cdb.byte(1) & SAVE_PAGES != 0 {
        return Err(Sense::INVALID_FIELD_IN_CDB.into());
    }
    if data.is_empty() {
        return Ok(pages);
    }
    let header_length = match HeaderForm::of(cdb) {
        HeaderForm::Six => 4,
        HeaderForm::Ten => 8,
    };
    let (header, mut rest) = data
        .split_at_checked(header_length)
        .ok_or(Sense::PARAMETER_LIST_LENGTH_ERROR)?;
    let descriptor_length = usize::from(header.last().copied().unwrap_or(0));
    if descriptor_length > 0 {
        let (descriptor, pages) = rest
            .split_at_checked(descriptor_length)
            .ok_or(Sense::PARAMETER_LIST_LENGTH_ERROR)?;
        let length = descriptor.get(5..8).filter(|_| descriptor_length == 8);
        if length != unit.block_bytes.to_be_bytes().get(1..) {
            return Err(Sense::INVALID_FIELD_IN_PARAMETERS.into());
        }
        rest = pages;
    }
    let mut changed = pages;
    while let Some((head, _)) = rest.split_first_chunk::<2>() {
        let length = 2 + usize::from(head[1]);
        let (page, others) = rest
            .split_at_checked(length)
            .ok_or(Sense::PARAMETER_LIST_LENGTH_ERROR)?;
        select_page(page, &mut changed)?;
        rest = others;
    }
    if rest.is_empty() {
        Ok(changed)
    } else {
        Err(Sense::PARAMETER_LIST_LENGTH_ERROR.into())
    }
}

fn select_page(page: &[u8], pages: &mut ModePages) -> Result<(), Failure> {
    let invalid = Failure::Check(Sense::INVALID_FIELD_IN_PARAMETERS);
    let byte = |at: usize| page.get(at).copied().unwrap_or(0);
    let mut wanted = *pages;
    let expected = match byte(0) & 0x7f {
        CACHING => {
            wanted.has_write_cache = byte(2) & WRITE_CACHE != 0;
            caching(wanted, PageControl::Current)
        }
        CONTROL => {
            wanted.is_write_protected = byte(4) & SOFTWARE_PROTECTION != 0;
            control_page(wanted, PageControl::Current)
        }
        EXCEPTIONS => exceptions(),
        _ => return Err(invalid),
    };
    let is_same = page.get(1..) == expected.get(1..);
    if !is_same {
        return Err(invalid);
    }
    *pages = wanted;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::cdb::Cdb;
    use super::super::sense::{Failure, Sense};
    use super::{ModePages, ModeUnit, select, sense};

    const UNIT: ModeUnit = ModeUnit {
        is_read_only: false,
        block_count: 100,
        block_bytes: 512,
    };

    fn cdb(bytes: &[u8]) -> Cdb {
        let mut cdb = [0; 16];
        cdb[..bytes.len()].copy_from_slice(bytes);
        Cdb(cdb)
    }

    #[test]
    fn what_is_sensed_can_be_selected_again() {
        for (get, set) in [
            (&[0x1a, 0, 0x3f][..], &[0x15, 0x10][..]),
            (&[0x1a, 8, 0x3f, 0xff], &[0x15, 0x10]),
            (&[0x5a, 0, 0x0a], &[0x55, 0x10]),
            (&[0x5a, 8, 0x08], &[0x55, 0x10]),
        ] {
            let data = sense(&cdb(get), ModePages::default(), UNIT).unwrap();
            assert_eq!(
                select(&cdb(set), ModePages::default(), UNIT, &data),
                Ok(ModePages::default()),
                "{get:x?}"
            );
        }
    }

    #[test]
    fn the_write_cache_and_the_protection_can_be_changed_and_nothing_else() {
        let page = |code| sense(&cdb(&[0x1a, 8, code]), ModePages::default(), UNIT).unwrap();
        let set = cdb(&[0x15, 0x10]);
        let mut caching = page(0x08);
        caching[6] = 0;
        let changed = select(&set, ModePages::default(), UNIT, &caching).unwrap();
        assert!(!changed.has_write_cache);
        let mut control = page(0x0a);
        control[8] |= 8;
        let changed = select(&set, changed, UNIT, &control).unwrap();
        assert!(changed.is_write_protected && !changed.has_write_cache);
        let data = sense(&cdb(&[0x1a, 8, 0x0a]), changed, UNIT).unwrap();
        assert_eq!(data[2] & 0x80, 0x80);
        let invalid = Err(Failure::Check(Sense::INVALID_FIELD_IN_PARAMETERS));
        caching[7] = 1;
        assert_eq!(select(&set, changed, UNIT, &caching), invalid);
        assert_eq!(select(&set, changed, UNIT, &[0, 0, 0, 0, 0x01, 2, 0, 0]), invalid);
        assert_eq!(
            select(&set, changed, UNIT, &[0, 0, 0, 0, 0x0a, 10, 0]),
            Err(Failure::Check(Sense::PARAMETER_LIST_LENGTH_ERROR))
        );
        assert_eq!(
            select(&cdb(&[0x15, 0x11]), changed, UNIT, &control),
            Err(Failure::Check(Sense::INVALID_FIELD_IN_CDB)),
            "pages cannot be saved"
        );
    }

    #[test]
    fn the_header_has_lengths_and_the_write_protection() {
        let read_only = ModeUnit {
            is_read_only: true,
            ..UNIT
        };
        let short = sense(&cdb(&[0x1a, 0, 0x08]), ModePages::default(), read_only).unwrap();
        assert_eq!(short[..12], [31, 0, 0x90, 8, 0, 0, 0, 100, 0, 0, 2, 0]);
        assert_eq!(short.len(), 32);
        let long = sense(&cdb(&[0x5a, 8, 0x48]), ModePages::default(), UNIT).unwrap();
        assert_eq!(long[..11], [0, 26, 0, 0x10, 0, 0, 0, 0, 0x08, 18, 4]);
        let saved = sense(&cdb(&[0x1a, 0, 0xc8]), ModePages::default(), UNIT);
        assert_eq!(saved, Err(Failure::Check(Sense::SAVING_NOT_SUPPORTED)));
    }
}
