//! `VM.snapshot`, `VM.checkpoint` and `VM.clone`: copies of a machine with its disks.

use serde_json::{Map, Value, json};

use super::argument::{mismatch, text};
use super::vdi::{CopyKind, copy_vdi, remove as remove_vdi};
use super::{Context, device, generation_id, memory};
use crate::database::{NULL, flag, new_uuid, text as text_of, texts};
use crate::failure::{Answer, Failure};
use crate::pool::State;

/// The kind of a copy of a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Snapshot,
    Checkpoint,
    Clone,
}

pub(super) fn call(context: &mut Context<'_>, operation: &str, arguments: &[Value]) -> Option<Answer<Value>> {
    let kind = match operation {
        "snapshot" => Kind::Snapshot,
        "checkpoint" => Kind::Checkpoint,
        "clone" => Kind::Clone,
        _ => return None,
    };
    Some(copy(context, kind, arguments).map(|copy| json!(copy)))
}

fn copy(context: &mut Context<'_>, kind: Kind, arguments: &[Value]) -> Answer<String> {
    let takes_ignored = kind == Kind::Snapshot && context.pool.habits().has_ignore_vdis;
    let (vm, name, ignored) = match arguments {
        [vm, name] => (vm, name, Vec::new()),
        [vm, name, Value::Array(ignored)] if takes_ignored => {
            (vm, name, ignored.iter().filter_map(Value::as_str).collect())
        }
        _ => {
            let expected = if takes_ignored { 3 } else { 2 };
            return Err(mismatch(context.method, expected, arguments.len()));
        }
    };
    let (vm, name) = (text(vm, "vm")?, text(name, "new_name")?);
    let record = context.state.database.get("VM", vm)?.clone();
    super::vm::refuse_while_busy(&record, vm)?;
    let power_state = text_of(&record, "power_state");
    let is_fit = match kind {
        Kind::Snapshot => true,
        Kind::Checkpoint => matches!(power_state, "Running" | "Suspended"),
        Kind::Clone => matches!(power_state, "Halted" | "Suspended"),
    };
    if !is_fit {
        let expected = if kind == Kind::Checkpoint {
            "running, suspended"
        } else {
            "halted, suspended"
        };
        return Err(Failure::new(
            "VM_BAD_POWER_STATE",
            &[vm, expected, &power_state.to_lowercase()],
        ));
    }
    let vdis = copy_disks(context, &record, kind, &ignored)?;
    let copy = copy_record(context, vm, &record, kind, name)?;
    copy_vbds(context.state, &record, kind, &copy, &vdis)?;
    copy_vifs(context.state, &record, &copy, kind)?;
    if kind == Kind::Checkpoint {
        add_memory(context, &record, &copy)?;
    }
    Ok(copy)
}

/// Copies all disks; returns the copies by their originals. If one copy fails, the previous ones are removed.
fn copy_disks(
    context: &mut Context<'_>,
    vm: &Map<String, Value>,
    kind: Kind,
    ignored: &[&str],
) -> Answer<Map<String, Value>> {
    let how = if kind == Kind::Clone {
        CopyKind::Clone
    } else {
        CopyKind::Snapshot
    };
    let mut copies = Map::new();
    for vbd in texts(vm, "VBDs") {
        let vbd = context.state.database.get("VBD", &vbd)?;
        let vdi = text_of(vbd, "VDI").to_owned();
        if text_of(vbd, "type") == "CD" || vdi == NULL || ignored.contains(&vdi.as_str()) {
            continue;
        }
        match copy_vdi(context.pool, context.state, &vdi, how) {
            Ok(copy) => {
                copies.insert(vdi, json!(copy));
            }
            Err(failure) => {
                for copy in copies.values().filter_map(Value::as_str) {
                    remove_vdi(context.state, copy)?;
                }
                return Err(failure);
            }
        }
    }
    Ok(copies)
}

fn copy_record(
    context: &mut Context<'_>,
    vm: &str,
    original: &Map<String, Value>,
    kind: Kind,
    name: &str,
) -> Answer<String> {
    let mut record = original.clone();
    let power_state = text_of(original, "power_state");
    for list in ["VBDs", "VIFs", "VTPMs", "snapshots", "children", "consoles", "tags"] {
        record.insert(list.to_owned(), json!([]));
    }
    let is_snapshot = kind != Kind::Clone;
    let state = if kind == Kind::Checkpoint {
        "Suspended"
    } else {
        "Halted"
    };
    let changes = json!({
        "uuid": new_uuid(), "name_label": name, "power_state": state, "domid": -1, "resident_on": NULL, "guest_metrics": NULL,
        "is_a_snapshot": is_snapshot,
        // A snapshot is also a template.
        "is_a_template": is_snapshot || flag(original, "is_a_template"),
        "snapshot_of": if is_snapshot { vm } else { NULL },
        "snapshot_time": if is_snapshot { context.pool.date() } else { crate::schema::EPOCH.to_owned() },
        "snapshot_info": if is_snapshot {
            json!({"power-state-at-snapshot": power_state, "disk-snapshot-type": "crash_consistent"})
        } else {
            json!({})
        },
        "snapshot_metadata": if is_snapshot { format!("(('uuid' '{}'))", text_of(original, "uuid")) } else { String::new() },
        "generation_id": generation_id(), "current_operations": {},
    });
    if let Value::Object(changes) = changes {
        record.extend(changes);
    }
    if kind != Kind::Checkpoint {
        // `xapi_vm_clone.ml`: only a checkpoint copies the memory of a suspended machine.
        record.insert("suspend_VDI".to_owned(), json!(NULL));
    }
    if !is_snapshot && let Some(config) = record.get_mut("other_config").and_then(Value::as_object_mut) {
        config.insert("mac_seed".to_owned(), json!(new_uuid()));
    }
    let database = &mut context.state.database;
    let copy = database.insert("VM", record);
    if is_snapshot {
        database.append("VM", vm, "snapshots", &copy)?;
        database.set("VM", vm, "parent", json!(copy))?;
    }
    Ok(copy)
}

fn copy_vbds(
    state: &mut State,
    original: &Map<String, Value>,
    kind: Kind,
    copy: &str,
    vdis: &Map<String, Value>,
) -> Answer<()> {
    for vbd in texts(original, "VBDs") {
        let mut record = state.database.get("VBD", &vbd)?.clone();
        let vdi = text_of(&record, "VDI").to_owned();
        let copied = vdis.get(&vdi).and_then(Value::as_str);
        // The copy has no device for a disk that was left out, but it has one for a CD drive.
        if copied.is_none() && text_of(&record, "type") != "CD" {
            continue;
        }
        let new = copied.unwrap_or(&vdi).to_owned();
        for (name, value) in [("uuid", json!(new_uuid())), ("VM", json!(copy)), ("VDI", json!(new))] {
            record.insert(name.to_owned(), value);
        }
        detach_unless_suspended(&mut record, kind);
        let vbd = state.database.insert("VBD", record);
        state.database.append("VM", copy, "VBDs", &vbd)?;
        if new != NULL {
            state.database.append("VDI", &new, "VBDs", &vbd)?;
        }
    }
    Ok(())
}

/// Detaches the devices of a copy. The devices of a checkpoint stay attached, like those of any suspended machine.
fn detach_unless_suspended(device: &mut Map<String, Value>, kind: Kind) {
    if kind != Kind::Checkpoint {
        device.insert("currently_attached".to_owned(), json!(false));
    }
}

fn copy_vifs(state: &mut State, original: &Map<String, Value>, copy: &str, kind: Kind) -> Answer<()> {
    for vif in texts(original, "VIFs") {
        let mut record = state.database.get("VIF", &vif)?.clone();
        let uuid = new_uuid();
        // A clone may run at the same time as its origin, so it needs a different identity; a snapshot keeps it.
        if kind == Kind::Clone {
            record.insert("MAC".to_owned(), json!(device::mac_from(&uuid)));
        }
        record.insert("uuid".to_owned(), json!(uuid));
        record.insert("VM".to_owned(), json!(copy));
        detach_unless_suspended(&mut record, kind);
        let network = text_of(&record, "network").to_owned();
        let vif = state.database.insert("VIF", record);
        state.database.append("VM", copy, "VIFs", &vif)?;
        state.database.append("network", &network, "VIFs", &vif)?;
    }
    Ok(())
}

/// Adds the disk with the memory of the machine to a checkpoint: a snapshot of the disk to which the machine was
/// suspended.
fn add_memory(context: &mut Context<'_>, original: &Map<String, Value>, copy: &str) -> Answer<()> {
    let suspended = text_of(original, "suspend_VDI").to_owned();
    if text_of(original, "power_state") == "Suspended" && suspended != NULL {
        let vdi = copy_vdi(context.pool, context.state, &suspended, CopyKind::Snapshot)?;
        return context.state.database.set("VM", copy, "suspend_VDI", json!(vdi));
    }
    // A running machine is suspended and resumed; the disk for that is removed again.
    let (vdi, record) = memory::save(context.pool, context.state, "Suspend image")?;
    let vdi_of_copy = copy_vdi(context.pool, context.state, &vdi, CopyKind::Snapshot)?;
    remove_vdi(context.state, &vdi)?;
    context.state.database.change("VM", copy, |machine| {
        machine.insert("suspend_VDI".to_owned(), json!(vdi_of_copy));
        machine.insert("last_booted_record".to_owned(), json!(record));
    })
}
