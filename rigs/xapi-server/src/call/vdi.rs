//! `VDI.*`: disks, their snapshots, and their changed blocks.

use serde_json::{Map, Value, json};

use super::Context;
use super::argument::{exactly, field, flag as flag_of, map, number, text};
use crate::base64;
use crate::database::{NULL, flag, new_uuid, text as text_of};
use crate::disk::{Disk, Unrelated, tick};
use crate::failure::{Answer, Failure};
use crate::pool::{ADDRESSES, Pool, State};
use crate::schema;

/// A port without a server.
const CLOSED_PORT: u16 = 1;
/// Storage of VHDs rounds the size of a new disk up to whole blocks.
const SIZE_UNIT: u64 = 2 << 20;

pub(super) fn call(context: &mut Context<'_>, operation: &str, arguments: &[Value]) -> Option<Answer<Value>> {
    let answer = match operation {
        "create" => create(context, arguments),
        "destroy" => destroy(context, arguments),
        "snapshot" => copy(context, arguments, CopyKind::Snapshot),
        "clone" => copy(context, arguments, CopyKind::Clone),
        "resize" | "resize_online" => resize(context, arguments),
        "enable_cbt" => set_tracking(context, arguments, true),
        "disable_cbt" => set_tracking(context, arguments, false),
        "data_destroy" => data_destroy(context, arguments),
        "list_changed_blocks" => list_changed_blocks(context, arguments),
        "get_nbd_info" => nbd_info(context, arguments),
        _ => return None,
    };
    Some(answer)
}

/// Creates a disk of zeroes.
pub(crate) fn new_vdi(
    pool: &Pool,
    state: &mut State,
    sr: &str,
    size_bytes: u64,
    fields: &Map<String, Value>,
) -> Answer<String> {
    state.database.get("SR", sr)?;
    let uuid = new_uuid();
    let disk = Disk::create(&pool.disk_path(&uuid), size_bytes)?;
    let mut record = schema::blank("VDI");
    record.extend(fields.iter().map(|(name, value)| (name.clone(), value.clone())));
    record.insert("location".to_owned(), json!(uuid));
    record.insert("uuid".to_owned(), json!(uuid));
    record.insert("SR".to_owned(), json!(sr));
    record.insert("virtual_size".to_owned(), json!(size_bytes));
    Ok(adopt(state, record, disk, sr))
}

fn adopt(state: &mut State, record: Map<String, Value>, disk: Disk, sr: &str) -> String {
    let vdi = state.database.insert("VDI", record);
    state.disks.insert(vdi.clone(), disk);
    let linked = state.database.append("SR", sr, "VDIs", &vdi);
    debug_assert!(linked.is_ok(), "storage is never removed");
    vdi
}

/// The size that storage of VHDs gives a disk for which `size_bytes` were requested.
pub(crate) fn rounded_size(size_bytes: u64) -> u64 {
    size_bytes.max(1).next_multiple_of(SIZE_UNIT)
}

fn create(context: &mut Context<'_>, arguments: &[Value]) -> Answer<Value> {
    let [given] = exactly(context.method, arguments)?;
    let given = map(given, "args")?;
    let sr = text(field(given, "SR")?, "SR")?.to_owned();
    let size_bytes = number(field(given, "virtual_size")?, "virtual_size")?;
    flag_of(field(given, "sharable")?, "sharable")?;
    flag_of(field(given, "read_only")?, "read_only")?;
    let kept = [
        "name_label",
        "name_description",
        "type",
        "sharable",
        "read_only",
        "other_config",
        "xenstore_data",
        "sm_config",
        "tags",
    ];
    let fields = given
        .iter()
        .filter(|(name, _)| kept.contains(&name.as_str()))
        .map(|(name, value)| (name.clone(), value.clone()))
        .collect();
    new_vdi(context.pool, context.state, &sr, rounded_size(size_bytes), &fields).map(|vdi| json!(vdi))
}

/// Refuses `operation` on a disk that is used by a machine or a transfer.
fn refuse_in_use(state: &State, vdi: &str, operation: &str) -> Answer<()> {
    let is_attached = state
        .database
        .all("VBD")
        .any(|(_, vbd)| text_of(vbd, "VDI") == vdi && flag(vbd, "currently_attached"));
    if is_attached || state.users.contains_key(vdi) {
        return Err(Failure::new("VDI_IN_USE", &[vdi, operation]));
    }
    Ok(())
}

fn destroy(context: &mut Context<'_>, arguments: &[Value]) -> Answer<Value> {
    let [vdi] = exactly(context.method, arguments)?;
    let vdi = text(vdi, "self")?;
    context.state.database.get("VDI", vdi)?;
    refuse_in_use(context.state, vdi, "destroy")?;
    remove(context.state, vdi)?;
    Ok(json!(""))
}

/// Removes a disk with its data, and the references to it.
pub(crate) fn remove(state: &mut State, vdi: &str) -> Answer<()> {
    if let Some(mut disk) = state.disks.remove(vdi) {
        disk.destroy_data()?;
    }
    for vbd in state.database.having("VBD", "VDI", vdi) {
        super::device::remove(state, "VBD", &vbd)?;
    }
    let record = state.database.remove("VDI", vdi)?;
    state.database.take_out("SR", text_of(&record, "SR"), "VDIs", vdi);
    state
        .database
        .take_out("VDI", text_of(&record, "snapshot_of"), "snapshots", vdi);
    Ok(())
}

/// The kind of a copy of a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CopyKind {
    Snapshot,
    Clone,
}

fn copy(context: &mut Context<'_>, arguments: &[Value], kind: CopyKind) -> Answer<Value> {
    // The map for the driver is optional.
    let vdi = match arguments {
        [vdi] | [vdi, _] => text(vdi, "vdi")?,
        _ => return Err(super::argument::mismatch(context.method, 2, arguments.len())),
    };
    copy_vdi(context.pool, context.state, vdi, kind).map(|copy| json!(copy))
}

/// Creates a snapshot or a clone of a disk.
pub(super) fn copy_vdi(pool: &Pool, state: &mut State, vdi: &str, kind: CopyKind) -> Answer<String> {
    let mut record = state.database.get("VDI", vdi)?.clone();
    if text_of(&record, "type") == "cbt_metadata" {
        return Err(Failure::new("VDI_INCOMPATIBLE_TYPE", &[vdi, "cbt_metadata"]));
    }
    let uuid = new_uuid();
    let path = pool.disk_path(&uuid);
    let disk = match kind {
        CopyKind::Snapshot => state.disk(vdi)?.snapshot(&path)?,
        CopyKind::Clone => state.disk(vdi)?.fork(&path)?,
    };
    for name in ["VBDs", "snapshots"] {
        record.insert(name.to_owned(), json!([]));
    }
    record.insert("uuid".to_owned(), json!(uuid));
    record.insert("location".to_owned(), json!(uuid));
    record.insert("is_a_snapshot".to_owned(), json!(kind == CopyKind::Snapshot));
    record.insert("cbt_enabled".to_owned(), json!(disk.tracking.is_some()));
    let (of, time) = match kind {
        CopyKind::Snapshot => (vdi, pool.date()),
        CopyKind::Clone => (NULL, schema::EPOCH.to_owned()),
    };
    record.insert("snapshot_of".to_owned(), json!(of));
    record.insert("snapshot_time".to_owned(), json!(time));
    let sr = text_of(&record, "SR").to_owned();
    let copy = adopt(state, record, disk, &sr);
    if kind == CopyKind::Snapshot {
        state.database.append("VDI", vdi, "snapshots", &copy)?;
    }
    Ok(copy)
}

fn resize(context: &mut Context<'_>, arguments: &[Value]) -> Answer<Value> {
    let [vdi, size] = exactly(context.method, arguments)?;
    let (vdi, size_bytes) = (text(vdi, "vdi")?, rounded_size(number(size, "size")?));
    context.state.database.get("VDI", vdi)?;
    if context.method == "VDI.resize" {
        refuse_in_use(context.state, vdi, "resize")?;
    }
    let disk = context.state.disk_mut(vdi)?;
    if size_bytes < disk.size_bytes {
        let details = ["", "VDI Invalid size [opterr=shrinking not allowed]", ""];
        return Err(Failure::new("SR_BACKEND_FAILURE_79", &details));
    }
    disk.resize(size_bytes)?;
    context
        .state
        .database
        .set("VDI", vdi, "virtual_size", json!(size_bytes))?;
    Ok(json!(""))
}

fn set_tracking(context: &mut Context<'_>, arguments: &[Value], is_wanted: bool) -> Answer<Value> {
    let [vdi] = exactly(context.method, arguments)?;
    let vdi = text(vdi, "self")?;
    let record = context.state.database.get("VDI", vdi)?;
    if text_of(record, "type") == "cbt_metadata" {
        return Err(Failure::new("VDI_INCOMPATIBLE_TYPE", &[vdi, "cbt_metadata"]));
    }
    if flag(record, "is_a_snapshot") {
        return Err(Failure::new("OPERATION_NOT_ALLOWED", &["VDI is a snapshot", vdi]));
    }
    if flag(record, "cbt_enabled") != is_wanted {
        context.state.disk_mut(vdi)?.tracking = is_wanted.then(tick);
        context
            .state
            .database
            .set("VDI", vdi, "cbt_enabled", json!(is_wanted))?;
    }
    Ok(json!(""))
}

fn data_destroy(context: &mut Context<'_>, arguments: &[Value]) -> Answer<Value> {
    let [vdi] = exactly(context.method, arguments)?;
    let vdi = text(vdi, "self")?;
    let record = context.state.database.get("VDI", vdi)?;
    if text_of(record, "type") == "cbt_metadata" {
        return Ok(json!(""));
    }
    if !flag(record, "is_a_snapshot") {
        return Err(Failure::new(
            "OPERATION_NOT_ALLOWED",
            &[&format!("VDI is not a snapshot: {vdi}")],
        ));
    }
    if !flag(record, "cbt_enabled") {
        return Err(Failure::new("VDI_NO_CBT_METADATA", &[vdi]));
    }
    // XAPI waits four seconds for machines to release the disk; this server does not wait.
    let has_vbds = !context.state.database.having("VBD", "VDI", vdi).is_empty();
    if has_vbds || context.state.users.contains_key(vdi) {
        return Err(Failure::new("VDI_IN_USE", &[vdi, "data_destroy"]));
    }
    context.state.disk_mut(vdi)?.destroy_data()?;
    context.state.database.change("VDI", vdi, |record| {
        record.insert("type".to_owned(), json!("cbt_metadata"));
        record.insert("physical_utilisation".to_owned(), json!(0));
    })?;
    Ok(json!(""))
}

fn list_changed_blocks(context: &mut Context<'_>, arguments: &[Value]) -> Answer<Value> {
    let [from, to] = exactly(context.method, arguments)?;
    let (from, to) = (text(from, "vdi_from")?, text(to, "vdi_to")?);
    context.state.database.get("VDI", from)?;
    let record = context.state.database.get("VDI", to)?;
    // Attached snapshots do not count as in use: checkpoints leave theirs attached.
    if !flag(record, "is_a_snapshot") {
        refuse_in_use(context.state, to, "list_changed_blocks")?;
    }
    let changed = context.state.disk(to)?.changed_blocks(context.state.disk(from)?);
    changed
        .map(|bitmap| json!(base64::encode(&bitmap)))
        .map_err(|unrelated| match unrelated {
            Unrelated::NotTracked => {
                let is_from = context.state.disk(from).is_ok_and(|disk| disk.tracking.is_none());
                Failure::new("VDI_NO_CBT_METADATA", &[if is_from { from } else { to }])
            }
            Unrelated::NotOfOneDisk => {
                let reason =
                    "Failed to calculate changed blocks for given VDIs. [opterr=Source and target VDI are unrelated]";
                Failure::new("SR_BACKEND_FAILURE_460", &["", reason, ""])
            }
        })
}

/// The NBD addresses of a disk: each address of each host that sees the storage and whose network allows NBD.
fn nbd_info(context: &mut Context<'_>, arguments: &[Value]) -> Answer<Value> {
    let [vdi] = exactly(context.method, arguments)?;
    let vdi = text(vdi, "self")?;
    let state = &*context.state;
    let record = state.database.get("VDI", vdi)?;
    if text_of(record, "type") == "cbt_metadata" {
        return Err(Failure::new("VDI_INCOMPATIBLE_TYPE", &[vdi, "cbt_metadata"]));
    }
    let purposes = crate::database::texts(state.database.get("network", &state.network)?, "purpose");
    let is_for_nbd = purposes
        .iter()
        .any(|purpose| purpose == "nbd" || purpose == "insecure_nbd");
    let name = format!("/{}?session_id={}", text_of(record, "uuid"), context.session);
    let port = if context.pool.habits().has_closed_nbd {
        CLOSED_PORT
    } else {
        context.pool.nbd_port
    };
    let hosts = (0..ADDRESSES.len()).filter(|host| is_for_nbd && state.host_sees(*host, text_of(record, "SR")));
    let places = hosts.map(|host| {
        let identity = context.pool.identity(host);
        json!({
            "exportname": name, "address": ADDRESSES[host].to_string(), "port": port,
            "cert": identity.certificate_pem(), "subject": identity.name,
        })
    });
    Ok(places.collect())
}
