//! `VM.*`: creates and removes machines, and changes their power state.

use std::fs::File;

use serde_json::{Map, Value, json};

use super::argument::{exactly, field, map, mismatch, text};
use super::{Context, device, generation_id, memory, vdi};
use crate::database::{NULL, new_uuid, text as text_of, texts};
use crate::disk::copy_sparse;
use crate::failure::{Answer, Failure};
use crate::info::{NewDisk, NewVm, SrPlace};
use crate::pool::{Pool, State};
use crate::schema;

pub(super) fn call(context: &mut Context<'_>, operation: &str, arguments: &[Value]) -> Option<Answer<Value>> {
    let power = |from: &'static [&'static str], to: &'static str| Some((from, to));
    let change = match operation {
        "start" | "start_on" => power(&["Halted"], "Running"),
        "resume" => power(&["Suspended"], "Running"),
        "unpause" => power(&["Paused"], "Running"),
        "suspend" => power(&["Running"], "Suspended"),
        "pause" => power(&["Running"], "Paused"),
        "clean_shutdown" => power(&["Running"], "Halted"),
        "hard_shutdown" => power(&["Paused", "Running", "Suspended"], "Halted"),
        _ => None,
    };
    if let Some((from, to)) = change {
        return Some(change_power(context, arguments, from, to));
    }
    match operation {
        "create" => Some(create(context, arguments)),
        "destroy" => Some(destroy(context, arguments)),
        "provision" => Some(provision(context, arguments)),
        _ => None,
    }
}

/// Refuses operations that conflict with a running operation of the machine.
pub(crate) fn refuse_while_busy(record: &Map<String, Value>, vm: &str) -> Answer<()> {
    let operations = record.get("current_operations").and_then(Value::as_object);
    match operations.and_then(|operations| operations.iter().next()) {
        None => Ok(()),
        Some((task, operation)) => {
            let operation = operation.as_str().unwrap_or_default();
            Err(Failure::new(
                "OTHER_OPERATION_IN_PROGRESS",
                &["VM", vm, operation, task],
            ))
        }
    }
}

/// Refuses a machine whose power state is not one of `fit`.
pub(crate) fn refuse_power_state(record: &Map<String, Value>, vm: &str, fit: &[&str]) -> Answer<()> {
    let actual = text_of(record, "power_state");
    if fit.contains(&actual) {
        return Ok(());
    }
    let expected = fit.join(", ").to_lowercase();
    Err(Failure::new(
        "VM_BAD_POWER_STATE",
        &[vm, &expected, &actual.to_lowercase()],
    ))
}

fn change_power(context: &mut Context<'_>, arguments: &[Value], from: &[&str], to: &str) -> Answer<Value> {
    // The machine is the first argument; the others (host, paused, forced) have no effect here.
    let expected = match context.method {
        "VM.start" | "VM.resume" => 3,
        "VM.start_on" => 4,
        _ => 1,
    };
    if arguments.len() != expected {
        return Err(mismatch(context.method, expected, arguments.len()));
    }
    let vm = text(&arguments[0], "vm")?;
    let record = context.state.database.get("VM", vm)?;
    refuse_while_busy(record, vm)?;
    if record.get("is_a_template") == Some(&json!(true)) {
        return Err(Failure::new(
            "VM_IS_TEMPLATE",
            &[vm, context.method.trim_start_matches("VM.")],
        ));
    }
    refuse_power_state(record, vm, from)?;
    match context.method {
        "VM.suspend" => memory::suspend(context, vm)?,
        "VM.resume" => {
            let is_forced = arguments.get(2) == Some(&json!(true));
            if !is_forced {
                memory::refuse_other_processors(context, vm)?;
            }
            memory::resume(context, vm)?;
        }
        _ => {}
    }
    set_power_state(context.state, vm, to)?;
    Ok(json!(""))
}

/// Changes the power state of a machine, and whether its disks are attached.
pub(crate) fn set_power_state(state: &mut State, vm: &str, power_state: &str) -> Answer<()> {
    let host = state.hosts[state.master].clone();
    let is_on = matches!(power_state, "Running" | "Paused");
    // The processors of the start are recorded while a machine runs. Devices stay attached while it is suspended.
    let processors = memory::processors(state);
    let record = state.database.get("VM", vm)?;
    let is_started = is_on && text_of(record, "power_state") == "Halted";
    let is_attached = power_state != "Halted";
    let devices = (texts(record, "VBDs"), texts(record, "VIFs"));
    state.database.change("VM", vm, |record| {
        record.insert("power_state".to_owned(), json!(power_state));
        if is_started {
            record.insert("last_boot_CPU_flags".to_owned(), processors);
        }
        record.insert("domid".to_owned(), json!(if is_on { 7 } else { -1 }));
        record.insert(
            "resident_on".to_owned(),
            json!(if is_on { host.as_str() } else { NULL }),
        );
    })?;
    for vbd in devices.0 {
        state
            .database
            .set("VBD", &vbd, "currently_attached", json!(is_attached))?;
    }
    for vif in devices.1 {
        state
            .database
            .set("VIF", &vif, "currently_attached", json!(is_attached))?;
    }
    Ok(())
}

fn create(context: &mut Context<'_>, arguments: &[Value]) -> Answer<Value> {
    let [given] = exactly(context.method, arguments)?;
    let given = map(given, "args")?;
    for needed in ["name_label", "memory_static_max", "VCPUs_max", "platform"] {
        field(given, needed)?;
    }
    let blank = schema::blank("VM");
    let fields = given
        .iter()
        .filter(|(name, _)| blank.contains_key(*name))
        .map(|(name, value)| {
            // XML-RPC sends numbers as text.
            let is_number = blank.get(name).is_some_and(Value::is_number);
            let digits = value
                .as_str()
                .filter(|_| is_number)
                .and_then(|digits| digits.parse::<i64>().ok());
            (
                name.clone(),
                digits.map_or_else(|| value.clone(), |number| json!(number)),
            )
        });
    let mut record: Map<_, _> = blank.clone().into_iter().chain(fields).collect();
    for list in ["VBDs", "VIFs", "snapshots"] {
        record.insert(list.to_owned(), json!([]));
    }
    record.insert("uuid".to_owned(), json!(new_uuid()));
    record.insert("power_state".to_owned(), json!("Halted"));
    Ok(json!(context.state.database.insert("VM", record)))
}

fn provision(context: &mut Context<'_>, arguments: &[Value]) -> Answer<Value> {
    let [vm] = exactly(context.method, arguments)?;
    let vm = text(vm, "vm")?;
    let record = context.state.database.get("VM", vm)?;
    refuse_power_state(record, vm, &["Halted"])?;
    context.state.database.set("VM", vm, "is_a_template", json!(false))?;
    Ok(json!(""))
}

fn destroy(context: &mut Context<'_>, arguments: &[Value]) -> Answer<Value> {
    let [vm] = exactly(context.method, arguments)?;
    let vm = text(vm, "self")?;
    let record = context.state.database.get("VM", vm)?;
    refuse_while_busy(record, vm)?;
    if record.get("is_a_snapshot") != Some(&json!(true)) {
        refuse_power_state(record, vm, &["Halted", "Suspended"])?;
    }
    remove(context.state, vm)?;
    Ok(json!(""))
}

/// Removes a machine with its devices. Its disks are not removed: their creator removes them.
pub(crate) fn remove(state: &mut State, vm: &str) -> Answer<()> {
    let record = state.database.get("VM", vm)?.clone();
    for vbd in texts(&record, "VBDs") {
        device::remove(state, "VBD", &vbd)?;
    }
    for vif in texts(&record, "VIFs") {
        device::remove(state, "VIF", &vif)?;
    }
    for class in ["VM_guest_metrics", "VM_metrics"] {
        let field = if class == "VM_metrics" {
            "metrics"
        } else {
            "guest_metrics"
        };
        let metrics = text_of(&record, field);
        if state.database.exists(class, metrics) {
            state.database.remove(class, metrics)?;
        }
    }
    state.database.remove("VM", vm)?;
    state
        .database
        .take_out("VM", text_of(&record, "snapshot_of"), "snapshots", vm);
    for child in state.database.having("VM", "parent", vm) {
        let parent = record.get("parent").cloned().unwrap_or_default();
        state.database.set("VM", &child, "parent", parent)?;
    }
    Ok(())
}

/// Creates a machine for a test: its disks, a drive without a medium, and a network card.
pub(crate) fn add(pool: &Pool, state: &mut State, new: &NewVm) -> Answer<String> {
    let guest = state.database.add(
        "VM_guest_metrics",
        json!({
            "os_version": {"name": "Debian GNU/Linux 12 (bookworm)", "distro": "debian", "major": "12", "uname": "6.1.0"},
            "PV_drivers_version": {"major": "8", "minor": "4", "micro": "0", "build": "1"},
            "networks": {"0/ip": "192.0.2.10", "0/ipv4/0": "192.0.2.10"},
        }),
    );
    let metrics = state.database.add(
        "VM_metrics",
        json!({"VCPUs_number": 2, "memory_actual": 2_147_483_648_u64}),
    );
    let vm = state.database.add(
        "VM",
        json!({
            "name_label": new.name, "guest_metrics": guest, "metrics": metrics, "generation_id": generation_id(),
            "other_config": {"base_template_name": "Debian Bookworm 12", "import_task": "", "mac_seed": new_uuid()},
        }),
    );
    for (index, disk) in new.disks.iter().enumerate() {
        add_disk(pool, state, &vm, index, new, disk)?;
    }
    let drive = state.database.add(
        "VBD",
        json!({"VM": vm, "userdevice": "3", "device": "xvdd", "type": "CD", "mode": "RO", "empty": true}),
    );
    state.database.append("VM", &vm, "VBDs", &drive)?;
    let network = state.network.clone();
    let vif = state.database.add(
        "VIF",
        json!({"VM": vm, "network": network, "device": "0", "MAC": device::mac_from(&new_uuid()), "MAC_autogenerated": true}),
    );
    state.database.append("VM", &vm, "VIFs", &vif)?;
    state.database.append("network", &network, "VIFs", &vif)?;
    let power_state = if new.power_state.is_empty() {
        "Halted"
    } else {
        &new.power_state
    };
    set_power_state(state, &vm, power_state)?;
    Ok(vm)
}

fn add_disk(pool: &Pool, state: &mut State, vm: &str, index: usize, new: &NewVm, disk: &NewDisk) -> Answer<()> {
    let sr = match disk.place {
        SrPlace::Shared => state.shared_sr.clone(),
        SrPlace::OnSlave => state.slave_sr.clone(),
    };
    let fields = json!({"name_label": format!("{} {index}", new.name), "name_description": "Created by a test"});
    let fields = fields.as_object().cloned().unwrap_or_default();
    let vdi = vdi::new_vdi(pool, state, &sr, disk.size_bytes, &fields)?;
    if let Some(content) = &disk.content {
        let content = File::open(content)?;
        let size_bytes = content.metadata()?.len().min(disk.size_bytes);
        copy_sparse(&content, &*state.disk(&vdi)?.file()?, size_bytes)?;
    }
    // The guest names disks by letters in the order of their numbers; the third letter is reserved for the drive.
    let letter = disk
        .device
        .bytes()
        .last()
        .filter(u8::is_ascii_lowercase)
        .unwrap_or(b'a');
    let vbd = state.database.add(
        "VBD",
        json!({
            "VM": vm, "VDI": vdi, "device": disk.device, "userdevice": (letter - b'a').to_string(), "bootable": index == 0,
        }),
    );
    state.database.append("VM", vm, "VBDs", &vbd)?;
    state.database.append("VDI", &vdi, "VBDs", &vbd)
}
