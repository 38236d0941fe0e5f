//! The volume of a device, from sysfs.
//!
//! The device mapper has a name and a UUID for each device. LVM's names are `GROUP-VOLUME`, with each hyphen in
//! either part doubled, and its UUIDs begin with `LVM-`. The only device below a thin volume is its pool, whose UUID
//! ends with `-tpool`.

use std::path::{Path, PathBuf};

/// Length of the UUID of a volume: `LVM-`, 32 letters of its group, 32 of the volume. A longer UUID belongs to a part
/// of a volume.
const UUID_BYTES: usize = 4 + 32 + 32;

/// The kind of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in super::super) enum Found {
    /// A volume in a thin pool, `GROUP/VOLUME`.
    Thin(String),
    /// A volume outside of thin pools.
    Thick(String),
    /// Not a volume of LVM.
    Other,
}

/// The volume that has the device with this number.
pub(in super::super) fn find(system: &Path, major: u32, minor: u32) -> Found {
    let place = system.join(format!("dev/block/{major}:{minor}"));
    let read = |path: PathBuf| std::fs::read_to_string(path).unwrap_or_default().trim().to_owned();
    let (name, uuid) = (read(place.join("dm/name")), read(place.join("dm/uuid")));
    if !uuid.starts_with("LVM-") || uuid.len() != UUID_BYTES {
        return Found::Other;
    }
    let Some((group, volume)) = parse_name(&name) else {
        return Found::Other;
    };
    let full = format!("{group}/{volume}");
    let below = std::fs::read_dir(place.join("slaves")).into_iter().flatten().flatten();
    let is_pool = |entry: std::fs::DirEntry| {
        let uuid = read(entry.path().join("dm/uuid"));
        uuid.starts_with("LVM-") && uuid.ends_with("-tpool")
    };
    if below.into_iter().any(is_pool) {
        Found::Thin(full)
    } else {
        Found::Thick(full)
    }
}

/// The path of a volume's device.
pub(super) fn path_of(group: &str, volume: &str) -> PathBuf {
    Path::new("/dev").join(group).join(volume)
}

/// Splits `vg0-web1--root` into the names of group and volume; none if the name has another form.
pub(super) fn parse_name(name: &str) -> Option<(String, String)> {
    let mut parts = vec![String::new()];
    let mut letters = name.chars().peekable();
    while let Some(letter) = letters.next() {
        if letter != '-' || letters.next_if_eq(&'-').is_some() {
            parts.last_mut()?.push(letter);
        } else {
            parts.push(String::new());
        }
    }
    let [group, volume] = <[String; 2]>::try_from(parts).ok()?;
    (super::names::is_name(&group) && super::names::is_name(&volume)).then_some((group, volume))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::{Found, find, parse_name};

    #[expect(clippy::disallowed_methods, reason = "nothing of it has to last")]
    fn device(system: &Path, number: &str, (name, uuid): (&str, &str), below: Option<&str>) {
        let place = system.join("dev/block").join(number);
        std::fs::create_dir_all(place.join("dm")).unwrap();
        std::fs::write(place.join("dm/name"), format!("{name}\n")).unwrap();
        std::fs::write(place.join("dm/uuid"), format!("{uuid}\n")).unwrap();
        if let Some(uuid) = below {
            std::fs::create_dir_all(place.join("slaves/dm-2/dm")).unwrap();
            std::fs::write(place.join("slaves/dm-2/dm/uuid"), format!("{uuid}\n")).unwrap();
        }
    }

    /// Names and UUIDs that the kernel reported for real volumes.
    #[test]
    fn devices_are_classified_by_name_and_uuid() {
        let system = tempfile::tempdir().unwrap();
        let thin = "LVM-DxwhZOwN4JbouRZFSTpXZXg9oGgF4EfcoTh7tl3ZeXjTaoD5kgYAhJZvZKLAe5QT";
        let thick = "LVM-DxwhZOwN4JbouRZFSTpXZXg9oGgF4EfcUhkKpVHBRxF7fqxijD17Hmsif11nAhLO";
        let pool = "LVM-DxwhZOwN4JbouRZFSTpXZXg9oGgF4EfcNj0YenEpOOJifMHg4TDO0Dfu0mykhdAv-tpool";
        device(system.path(), "253:4", ("vg0-web1--root", thin), Some(pool));
        device(system.path(), "253:5", ("vg0-thick", thick), None);
        device(system.path(), "253:2", ("vg0-pool-tpool", pool), None);
        device(system.path(), "253:6", ("luks", "CRYPT-LUKS2-00"), Some(thick));
        let found = |minor| find(system.path(), 253, minor);
        assert_eq!(found(4), Found::Thin("vg0/web1-root".to_owned()));
        assert_eq!(found(5), Found::Thick("vg0/thick".to_owned()));
        for other in [2, 6, 7] {
            assert_eq!(found(other), Found::Other);
        }
    }

    #[test]
    fn names_of_devices_are_split_into_group_and_volume() {
        let parts = |name: &str| parse_name(name).map(|(group, volume)| format!("{group}/{volume}"));
        assert_eq!(parts("vg0-web1").as_deref(), Some("vg0/web1"));
        assert_eq!(parts("a--b-c--d----e").as_deref(), Some("a-b/c-d--e"));
        for other in ["", "vg0", "vg0-", "-a", "a-b-c", "vg0-pool-tpool", "a-b c"] {
            assert_eq!(parts(other), None, "{other}");
        }
    }
}
