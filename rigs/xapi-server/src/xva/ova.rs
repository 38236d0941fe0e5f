//! `ova.xml`: the records of a machine and of the objects that it needs, with short references.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::database::{Database, NULL, Record, text, texts};
use crate::failure::{Answer, Failure};
use crate::rpc::xml;
use crate::schema;

/// The version of the format: from 1 on, blocks are followed by checksums.
const EXPORT_VERSION: u64 = 2;
/// The version of XAPI.
const XAPI_MAJOR: u64 = 1;
const XAPI_MINOR: u64 = 20;

/// The content of an archive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scope {
    /// The machine as if it was shut down.
    Machine,
    /// The machine with its state: a suspended machine stays suspended.
    State,
    /// The machine with its state and its snapshots: metadata only.
    Everything,
}

/// Objects that go into an archive, each with its short reference.
#[derive(Debug, Default)]
pub(crate) struct Names {
    short: BTreeMap<String, String>,
    /// In the order in which they were added.
    order: Vec<(&'static str, String)>,
}

impl Names {
    /// The short reference of an object.
    pub(crate) fn short(&self, reference: &str) -> Option<&str> {
        self.short.get(reference).map(String::as_str)
    }

    fn add(&mut self, database: &Database, class: &'static str, reference: &str) {
        if database.exists(class, reference) && !self.short.contains_key(reference) {
            let name = format!("Ref:{}", self.short.len());
            self.short.insert(reference.to_owned(), name);
            self.order.push((class, reference.to_owned()));
        }
    }

    /// Adds a machine and the objects that it needs.
    pub(crate) fn add_vm(&mut self, database: &Database, vm: &str, scope: Scope) -> Answer<()> {
        let record = database.get("VM", vm)?;
        self.add(database, "VM", vm);
        for vif in texts(record, "VIFs") {
            self.add(database, "VIF", &vif);
            self.add(database, "network", text(database.get("VIF", &vif)?, "network"));
        }
        for vbd in texts(record, "VBDs") {
            self.add(database, "VBD", &vbd);
            self.add_vdi(database, text(database.get("VBD", &vbd)?, "VDI"));
        }
        if scope == Scope::Everything {
            for snapshot in texts(record, "snapshots") {
                self.add_vm(database, &snapshot, Scope::State)?;
            }
        }
        if scope != Scope::Machine && text(record, "power_state") == "Suspended" {
            self.add_vdi(database, text(record, "suspend_VDI"));
        }
        self.add(database, "VM_metrics", text(record, "metrics"));
        self.add(database, "VM_guest_metrics", text(record, "guest_metrics"));
        self.add(database, "host", text(record, "resident_on"));
        Ok(())
    }

    fn add_vdi(&mut self, database: &Database, vdi: &str) {
        self.add(database, "VDI", vdi);
        if let Ok(record) = database.get("VDI", vdi) {
            self.add(database, "SR", text(record, "SR"));
        }
    }

    /// Writes `ova.xml` with all objects that were added.
    pub(crate) fn write(&self, database: &Database, scope: Scope) -> Answer<String> {
        // xapi writes the objects class by class.
        const ORDER: [&str; 9] = [
            "host",
            "VM",
            "VM_metrics",
            "VM_guest_metrics",
            "VBD",
            "VIF",
            "network",
            "VDI",
            "SR",
        ];
        let mut objects = Vec::new();
        for class in ORDER {
            for (_, reference) in self.order.iter().filter(|(known, _)| *known == class) {
                let mut record = database.get(class, reference)?.clone();
                if scope == Scope::Machine {
                    forget_state(class, &mut record);
                }
                if scope != Scope::Everything {
                    forget_snapshots(class, &mut record);
                }
                let snapshot: Record = record
                    .into_iter()
                    .map(|(field, value)| (field, self.shortened(value)))
                    .collect();
                objects.push(json!({"class": class, "id": self.short(reference), "snapshot": snapshot}));
            }
        }
        let header = json!({
            "version": {
                "hostname": "xapi-stand-in-1", "date": "2024-09-20", "product_version": "8.3.0", "product_brand": "XCP-ng",
                "build_number": "cloud", "xapi_major": XAPI_MAJOR, "xapi_minor": XAPI_MINOR, "export_vsn": EXPORT_VERSION,
            },
            "objects": objects,
        });
        Ok(xml::write_value(&header))
    }

    /// `value` with short references. References to objects outside of the archive become null, or are removed from
    /// lists.
    fn shortened(&self, value: Value) -> Value {
        match value {
            Value::String(word) if word.starts_with("OpaqueRef:") => json!(self.short(&word).unwrap_or(NULL)),
            Value::Array(items) => items
                .into_iter()
                .map(|item| self.shortened(item))
                .filter(|item| item != NULL)
                .collect(),
            value => value,
        }
    }
}

/// Changes a record so that the machine appears shut down, whatever its state.
fn forget_state(class: &str, record: &mut Record) {
    let changes = match class {
        "VM" => json!({"power_state": "Halted", "suspend_VDI": NULL}),
        "VBD" | "VIF" => json!({"currently_attached": false}),
        _ => json!({}),
    };
    if let Value::Object(changes) = changes {
        record.extend(changes);
    }
}

/// Changes a record so that the machine is no snapshot and has none. A snapshot stays a template.
fn forget_snapshots(class: &str, record: &mut Record) {
    let changes = match class {
        "VM" => json!({
            "is_a_snapshot": false, "snapshot_of": NULL, "snapshots": [], "parent": NULL, "children": [],
            "snapshot_time": schema::EPOCH, "transportable_snapshot_id": "", "current_operations": {}, "allowed_operations": [],
        }),
        "VBD" | "VIF" => json!({"current_operations": {}, "allowed_operations": []}),
        _ => json!({}),
    };
    if let Value::Object(changes) = changes {
        record.extend(changes);
    }
}

/// An object that was read from an archive.
#[derive(Debug, Clone)]
pub(crate) struct Object {
    pub(crate) class: String,
    /// `Ref:N`
    pub(crate) id: String,
    pub(crate) record: Record,
}

/// Reads `ova.xml`.
pub(crate) fn read(content: &[u8]) -> Answer<Vec<Object>> {
    let bad = || Failure::new("IMPORT_ERROR", &["ova.xml cannot be read"]);
    let value = std::str::from_utf8(content)
        .ok()
        .and_then(xml::read_value)
        .ok_or_else(bad)?;
    let version = |name: &str| value["version"][name].as_str()?.parse::<u64>().ok();
    // An archive of a newer pool is refused.
    let is_newer = (version("xapi_major"), version("xapi_minor")) > (Some(XAPI_MAJOR), Some(XAPI_MINOR));
    if version("export_vsn") != Some(EXPORT_VERSION) || is_newer {
        return Err(Failure::new("IMPORT_INCOMPATIBLE_VERSION", &[]));
    }
    let objects = value["objects"].as_array().ok_or_else(bad)?;
    let object = |object: &Value| {
        let class = object["class"].as_str()?;
        Some(Object {
            class: class.to_owned(),
            id: object["id"].as_str()?.to_owned(),
            record: typed(class, object["snapshot"].as_object()?),
        })
    };
    objects.iter().map(object).collect::<Option<_>>().ok_or_else(bad)
}

/// The fields of the class, with numbers instead of the text that XML-RPC uses.
fn typed(class: &str, record: &Record) -> Record {
    let mut typed = schema::blank(class);
    for (field, value) in record {
        if let Some(known) = typed.get_mut(field) {
            let digits = value
                .as_str()
                .filter(|_| known.is_i64())
                .and_then(|digits| digits.parse::<i64>().ok());
            *known = digits.map_or_else(|| value.clone(), |number| json!(number));
        }
    }
    typed
}
