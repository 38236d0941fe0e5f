//! The results of a run, from the JSON document of its program.

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Limit of recorded snapshots of a run.
const SNAPSHOT_COUNT_MAX: usize = 1000;
/// Limit of recorded warnings of a run.
const WARNING_COUNT_MAX: usize = 50;
/// Limit of recorded characters of a warning.
const WARNING_CHARS_MAX: usize = 1000;

/// The results of a run.
///
/// A journal that was written before these fields existed lacks them: they are read as empty.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RunReport {
    /// Snapshots that the run added to a repository.
    pub snapshots: Vec<RunSnapshot>,
    /// Number of bytes read; `None` if the program does not report it.
    pub read_bytes: Option<u64>,
    /// Number of bytes by which the repository has grown; `None` if the program does not report it.
    pub stored_bytes: Option<u64>,
    /// The warnings of the program.
    pub warnings: Vec<String>,
}

/// A snapshot that a run added to a repository.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunSnapshot {
    /// The machine of the snapshot.
    pub machine: String,
    /// The id with all digits.
    pub id: String,
}

impl RunReport {
    /// Reads the results from the document; missing fields stay empty.
    pub(super) fn of_document(document: &Value) -> Self {
        let report = &document["report"];
        let machines = report["machines"].as_array().map_or(&[][..], Vec::as_slice);
        let total_bytes = |field: &str| {
            let parts = machines.iter().filter_map(|machine| machine[field].as_u64());
            let sum = parts.reduce(u64::saturating_add);
            report[field].as_u64().or(sum)
        };
        let backed_up = std::iter::once(report).chain(machines).filter_map(|part| {
            let snapshot = &part["snapshot"];
            RunSnapshot::new(&snapshot["machine"], &snapshot["id"])
        });
        let rows = report["snapshots"].as_array().into_iter().flatten();
        let copied = rows
            .filter(|row| row["outcome"] == "copied")
            .filter_map(|row| RunSnapshot::new(&row["machine"], &row["copy"]));
        let warnings = document["warnings"].as_array().into_iter().flatten();
        let warning = |text: &Value| Some(text.as_str()?.chars().take(WARNING_CHARS_MAX).collect());
        Self {
            snapshots: backed_up.chain(copied).take(SNAPSHOT_COUNT_MAX).collect(),
            read_bytes: total_bytes("read_bytes"),
            stored_bytes: total_bytes("stored_bytes"),
            warnings: warnings.filter_map(warning).take(WARNING_COUNT_MAX).collect(),
        }
    }
}

impl RunSnapshot {
    fn new(machine: &Value, id: &Value) -> Option<Self> {
        Some(Self {
            machine: machine.as_str()?.to_owned(),
            id: id.as_str()?.to_owned(),
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{RunReport, RunSnapshot, SNAPSHOT_COUNT_MAX, WARNING_CHARS_MAX, WARNING_COUNT_MAX};

    fn snapshot(machine: &str, id: &str) -> RunSnapshot {
        RunSnapshot {
            machine: machine.to_owned(),
            id: id.to_owned(),
        }
    }

    #[test]
    fn every_shape_of_a_report_gives_its_snapshots_and_bytes() {
        let images = json!({"warnings": ["odd", 1], "report": {
            "snapshot": {"machine": "a", "id": "01"}, "read_bytes": 5, "stored_bytes": 3}});
        let expected = RunReport {
            snapshots: vec![snapshot("a", "01")],
            read_bytes: Some(5),
            stored_bytes: Some(3),
            warnings: vec!["odd".to_owned()],
        };
        assert_eq!(RunReport::of_document(&images), expected);

        let machines = json!({"report": {"machines": [
            {"snapshot": {"machine": "a", "id": "01"}, "read_bytes": 5, "stored_bytes": 3},
            {"snapshot": {"machine": "b", "id": "02"}, "read_bytes": u64::MAX, "stored_bytes": 0}]}});
        let expected = RunReport {
            snapshots: vec![snapshot("a", "01"), snapshot("b", "02")],
            read_bytes: Some(u64::MAX),
            stored_bytes: Some(3),
            warnings: Vec::new(),
        };
        assert_eq!(RunReport::of_document(&machines), expected);

        let copies = json!({"report": {"read_bytes": 9, "stored_bytes": 4, "snapshots": [
            {"machine": "a", "id": "01", "copy": "11", "outcome": "copied"},
            {"machine": "a", "id": "02", "copy": "12", "outcome": "present"}]}});
        let found = RunReport::of_document(&copies);
        assert_eq!(found.snapshots, [snapshot("a", "11")]);

        let freshness = json!({"report": {"machines": [{"machine": "a", "newest": null}]}});
        assert_eq!(RunReport::of_document(&freshness), RunReport::default());
        assert_eq!(RunReport::of_document(&json!(null)), RunReport::default());
    }

    #[test]
    fn reports_are_bounded() {
        let row = json!({"machine": "a", "copy": "11", "outcome": "copied"});
        let document = json!({
            "warnings": vec!["ä".repeat(WARNING_CHARS_MAX + 1); WARNING_COUNT_MAX + 1],
            "report": {"snapshots": vec![row; SNAPSHOT_COUNT_MAX + 1]},
        });
        let found = RunReport::of_document(&document);
        assert_eq!(
            (
                found.snapshots.len(),
                found.warnings.len(),
                found.warnings[0].chars().count()
            ),
            (SNAPSHOT_COUNT_MAX, WARNING_COUNT_MAX, WARNING_CHARS_MAX)
        );
    }
}
