//! Names of folders and files in a mounted repository.

use std::collections::HashMap;

use holdfast_repo::Manifest;
use jiff::tz::TimeZone;

use crate::job::MachineName;
use crate::repository::calendar::time_of;

/// The folder of a snapshot in the folder of its machine: its local time. Colons are avoided, since QEMU and rsync take
/// the text before one as a protocol or a host.
const TIME_FORMAT: &str = "%Y-%m-%d_%H-%M-%S";

/// The names of one snapshot's folder and of the folder above.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct SnapshotPlace {
    pub(super) machine: String,
    pub(super) time: String,
}

/// The places of snapshots, in their order. Of several snapshots with the same machine and second, the first has the
/// time as its name, and the others have their id added.
pub(super) fn places(manifests: &[Manifest], zone: &TimeZone) -> Vec<SnapshotPlace> {
    let mut counts: HashMap<SnapshotPlace, usize> = HashMap::new();
    let place = |manifest: &Manifest| {
        let place = SnapshotPlace {
            machine: MachineName::near(&manifest.machine).to_string(),
            time: time_of(manifest)
                .to_zoned(zone.clone())
                .strftime(TIME_FORMAT)
                .to_string(),
        };
        let count = counts.entry(place.clone()).or_default();
        *count += 1;
        if *count == 1 {
            return place;
        }
        SnapshotPlace {
            time: format!("{}_{}", place.time, manifest.id.short()),
            ..place
        }
    };
    manifests.iter().map(place).collect()
}

#[cfg(test)]
mod tests {
    use holdfast_repo::Manifest;
    use jiff::tz::TimeZone;

    use super::places;

    fn manifest(number: u8, machine: &str, time_ms: i64) -> Manifest {
        let id = format!("{number:02x}").repeat(16);
        let value = serde_json::json!({ "format": 1, "id": id, "machine": machine, "time_ms": time_ms, "disks": [], "copy": id });
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn a_snapshot_has_the_name_of_its_machine_and_time() {
        let berlin = TimeZone::get("Europe/Berlin").unwrap();
        let found = places(&[manifest(1, "web1", 1_700_000_000_999)], &berlin);
        assert_eq!(found[0].machine, "web1");
        assert_eq!(found[0].time, "2023-11-14_23-13-20");
    }

    /// When clocks are set back, the same hour occurs twice.
    #[test]
    fn snapshots_of_the_same_second_have_different_names() {
        let all = [
            manifest(1, "web1", 1_700_000_000_000),
            manifest(2, "web1", 1_700_000_000_500),
            manifest(3, "web2", 1_700_000_000_000),
            manifest(4, "web1", 1_700_000_000_600),
        ];
        let found = places(&all, &TimeZone::UTC);
        let times: Vec<&str> = found.iter().map(|place| &*place.time).collect();
        let time = "2023-11-14_22-13-20";
        assert_eq!(times[0], time);
        assert_eq!(times[1], format!("{time}_02020202"));
        assert_eq!(times[2], time);
        assert_eq!(times[3], format!("{time}_04040404"));
    }

    /// The writer of a snapshot chose the name.
    #[test]
    fn a_name_that_is_a_path_becomes_a_valid_name() {
        for name in ["../../etc", "..", "", "a/b", "a\0b"] {
            let found = places(&[manifest(1, name, 0)], &TimeZone::UTC);
            let machine = &found[0].machine;
            assert!(
                !machine.is_empty() && !machine.contains(['/', '\0']),
                "{name:?}: {machine:?}"
            );
            assert!(machine != "." && machine != "..", "{name:?}");
        }
    }
}
