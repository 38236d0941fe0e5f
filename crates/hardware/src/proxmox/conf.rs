//! Parses the lines of a configuration, without their meaning.

use std::collections::BTreeMap;

use crate::machine::bound;
use crate::{Error, Result, percent};

pub(super) const FORM: &str = "configuration of Proxmox";
/// Limit of lines in a configuration.
const LINE_COUNT_MAX: usize = 20_000;
/// The prefix of lines that a backup adds.
const MAP: &str = "#qmdump#map:";

/// A parsed configuration.
#[derive(Debug, Default)]
pub(super) struct Conf<'t> {
    /// Values by name; the last one of duplicates.
    pub(super) settings: BTreeMap<&'t str, &'t str>,
    pub(super) description: String,
    /// Device names in the archive by disk.
    pub(super) devices: BTreeMap<&'t str, &'t str>,
    /// Names of snapshots.
    pub(super) snapshots: Vec<&'t str>,
    /// Whether there are pending changes for the next start of the machine.
    pub(super) has_pending: bool,
}

impl<'t> Conf<'t> {
    pub(super) fn parse(text: &'t str) -> Result<Self> {
        if text.len() > bound::TEXT_BYTES {
            return Err(wrong(format!("it has {} bytes", text.len())));
        }
        let mut conf = Self::default();
        let mut lines: Vec<String> = Vec::new();
        let mut is_machine = true;
        for (number, line) in (1..).zip(text.lines().map(str::trim)) {
            if number > LINE_COUNT_MAX {
                return Err(wrong(format!("it has more than {LINE_COUNT_MAX} lines")));
            }
            if let Some(map) = line.strip_prefix(MAP) {
                let mut parts = map.split(':');
                let (Some(disk), Some(device)) = (parts.next(), parts.next().filter(|device| !device.is_empty()))
                else {
                    return Err(wrong(format!("line {number} names no device")));
                };
                conf.devices.insert(disk, device);
            } else if let Some(name) = section(line) {
                is_machine = false;
                match name {
                    "PENDING" => conf.has_pending = true,
                    special if special.contains(':') => {}
                    snapshot => conf.snapshots.push(snapshot),
                }
            } else if !is_machine || line.is_empty() || line.starts_with("#qmdump#") || line.starts_with("#vzdump#") {
                // Lines of a snapshot or of a backup are not part of the description.
            } else if let Some(comment) = line.strip_prefix('#') {
                lines.push(percent::decoded(comment).unwrap_or_else(|| comment.to_owned()));
            } else {
                let Some((name, value)) = line.split_once(':') else {
                    return Err(wrong(format!("line {number} is no setting")));
                };
                conf.settings.insert(name.trim(), value.trim());
            }
        }
        // Older versions had a setting instead of comments.
        if let Some(text) = conf.settings.remove("description") {
            lines.push(percent::decoded(text).unwrap_or_else(|| text.to_owned()));
        }
        lines.join("\n").trim_end().clone_into(&mut conf.description);
        if conf.settings.is_empty() {
            return Err(wrong("it has no settings"));
        }
        Ok(conf)
    }

    /// A number, or `default` if it is not set.
    pub(super) fn number(&self, name: &str, default: u32) -> Result<u32> {
        match self.settings.get(name) {
            Some(text) => text.parse().map_err(|_| wrong(format!("{name} is {text:?}"))),
            None => Ok(default),
        }
    }

    /// Splits a value into its unnamed and its named parts.
    pub(super) fn parts(&self, name: &str) -> Parts<'t> {
        Parts::of(self.settings.get(name).copied().unwrap_or_default())
    }

    /// The values of `net0`, `net1` and so on, by their numbers.
    pub(super) fn numbered(&self, prefix: &str) -> Vec<(u32, &'t str)> {
        let names = self.settings.iter();
        let mut values: Vec<(u32, &str)> = names
            .filter_map(|(name, value)| Some((numbered_name(name)?, *value)))
            .filter_map(|((found, number), value)| (found == prefix).then_some((number, value)))
            .collect();
        values.sort_by_key(|(number, _)| *number);
        values
    }
}

/// A value of several parts: `local-lvm:vm-100-disk-0,iothread=1,size=32G`.
#[derive(Debug)]
pub(super) struct Parts<'t> {
    /// The part without a name, which comes first.
    pub(super) first: &'t str,
    parts: Vec<(&'t str, &'t str)>,
}

impl<'t> Parts<'t> {
    pub(super) fn of(value: &'t str) -> Self {
        let mut first = "";
        let mut parts = Vec::new();
        for part in value.split(',') {
            match part.split_once('=') {
                Some((name, value)) => parts.push((name.trim(), value.trim())),
                None if first.is_empty() => first = part.trim(),
                None => {}
            }
        }
        Self { first, parts }
    }

    pub(super) fn get(&self, name: &str) -> Option<&'t str> {
        self.iter().find(|(found, _)| *found == name).map(|(_, value)| value)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&'t str, &'t str)> {
        self.parts.iter().copied()
    }
}

/// Splits `scsi0` into `scsi` and 0.
pub(super) fn numbered_name(name: &str) -> Option<(&str, u32)> {
    let prefix = name.trim_end_matches(|character: char| character.is_ascii_digit());
    let number = name.strip_prefix(prefix)?.parse().ok()?;
    Some((prefix, number))
}

/// The name of the section that this line begins.
fn section(line: &str) -> Option<&str> {
    line.strip_prefix('[')?.strip_suffix(']')
}

pub(super) fn wrong(detail: impl Into<String>) -> Error {
    Error::Malformed {
        form: FORM,
        detail: detail.into(),
    }
}
