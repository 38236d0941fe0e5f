//! `/import` and `/import_metadata`: a machine from an archive.
//!
//! Source: `ocaml/xapi/import.ml`. What was made before something went wrong is removed again.

use std::collections::BTreeMap;
use std::io::{self, BufReader, Read};

use flate2::read::GzDecoder;
use serde_json::{Value, json};

use super::Next;
use super::target::Target;
use super::transfer::{Direction, Flow, Transfer, admit};
use crate::call::vdi::{new_vdi, remove as remove_vdi, rounded_size};
use crate::call::vm::remove as remove_vm;
use crate::database::{NULL, Record, new_uuid, number, text};
use crate::failure::{Answer, Failure};
use crate::http::{Connection, Request};
use crate::pool::{Pool, State};
use crate::xva::disks::{self, Strictness};
use crate::xva::ova::{self, Object};
use crate::xva::tar;

/// Where the disks of a machine come from.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Disks {
    /// The archive has them; they go to this storage.
    InArchive { sr: String },
    /// They are there already, under the uuid that the archive says.
    InPool,
}

/// What an import has made so far.
#[derive(Debug, Default)]
struct Made {
    vms: Vec<String>,
    /// Disks by their names in the archive.
    vdis: BTreeMap<String, String>,
}

/// Answers `PUT /import`.
pub(crate) fn import(pool: &Pool, host: usize, connection: &mut Connection, request: &Request) -> io::Result<Next> {
    let Some(mut transfer) = admit(pool, host, connection, request)? else {
        return Ok(Next::End);
    };
    let sr = transfer
        .sr()
        .map(|sr| sr.unwrap_or_else(|| pool.state().shared_sr.clone()));
    let sr = match sr {
        Ok(sr) => sr,
        Err(failure) => {
            transfer.end(Err(failure));
            connection.send_error(500, "")?;
            return Ok(Next::End);
        }
    };
    if transfer.redirect(connection, &sr)? {
        return Ok(Next::End);
    }
    if request.header("transfer-encoding").is_some() {
        transfer.end(Err(Failure::new("IMPORT_ERROR_CANNOT_HANDLE_CHUNKED", &[])));
        connection.send_error(403, "")?;
        return Ok(Next::End);
    }
    transfer.accept(
        connection,
        "1.1",
        &["content-type: application/octet-stream".to_owned()],
    )?;
    let answer = take_in(&transfer, connection, &Disks::InArchive { sr });
    transfer.end(answer);
    Ok(Next::End)
}

/// Answers `PUT /import_metadata`.
pub(crate) fn import_metadata(
    pool: &Pool,
    host: usize,
    connection: &mut Connection,
    request: &Request,
) -> io::Result<Next> {
    let Some(transfer) = admit(pool, host, connection, request)? else {
        return Ok(Next::End);
    };
    transfer.accept(
        connection,
        "1.1",
        &["content-type: application/octet-stream".to_owned()],
    )?;
    let answer = take_in(&transfer, connection, &Disks::InPool);
    transfer.end(answer);
    Ok(Next::End)
}

/// Reads the whole archive; gives references to the machines that it made.
fn take_in(transfer: &Transfer<'_>, connection: &mut Connection, disks: &Disks) -> Answer<Value> {
    let mut flow = transfer.flow(
        connection,
        Direction::Up,
        transfer.request.content_length().unwrap_or(0),
    );
    flow.needs_session = *disks != Disks::InPool;
    let mut made = Made::default();
    let taken = unpack(&mut flow)
        .map_err(Failure::from)
        .and_then(|mut stream| read(transfer, &mut *stream, disks, &mut made));
    if let Err(failure) = taken {
        if !transfer.request.flag("force") {
            undo(&mut transfer.pool.state(), disks, &made);
        }
        return Err(failure);
    }
    Ok(json!(made.vms))
}

/// Unpacks what begins like a packed stream.
fn unpack<'a>(flow: &'a mut Flow<'_>) -> io::Result<Box<dyn Read + 'a>> {
    let mut begin = Vec::new();
    flow.take(4).read_to_end(&mut begin)?;
    let stream = io::Cursor::new(begin.clone()).chain(flow);
    Ok(match begin[..] {
        [0x1F, 0x8B, ..] => Box::new(GzDecoder::new(stream)),
        [0x28, 0xB5, 0x2F, 0xFD] => Box::new(zstd::Decoder::new(stream)?),
        _ => Box::new(BufReader::new(stream)),
    })
}

fn read(transfer: &Transfer<'_>, stream: &mut dyn Read, disks: &Disks, made: &mut Made) -> Answer<()> {
    let pool = transfer.pool;
    let first = tar::read(stream).map_err(premature)?;
    let (name, content) = first.ok_or_else(|| Failure::new("IMPORT_ERROR_PREMATURE_EOF", &[]))?;
    if name != "ova.xml" {
        return Err(Failure::new("IMPORT_ERROR_UNEXPECTED_FILE", &["ova.xml", &name]));
    }
    let objects = ova::read(&content)?;
    if *disks == Disks::InPool && transfer.request.flag("dry_run") {
        return Ok(());
    }
    make(transfer, &objects, disks, made)?;
    if *disks != Disks::InPool {
        let strictness = if transfer.request.flag("force") {
            Strictness::Forced
        } else {
            Strictness::Checked
        };
        let mut first_length = None;
        // The names are in order in the map, as they are in the archive.
        for (prefix, vdi) in &made.vdis {
            let size_bytes = objects
                .iter()
                .find(|object| object.id == *prefix)
                .map(|vdi| number(&vdi.record, "virtual_size"));
            let target = Target::new(pool, vdi)?;
            disks::read(
                stream,
                prefix,
                &target,
                size_bytes.unwrap_or(0),
                &mut first_length,
                strictness,
            )
            .map_err(premature)?;
        }
    }
    // The end of the archive, and what may follow it.
    io::copy(stream, &mut io::sink()).map_err(premature)?;
    Ok(())
}

fn premature(error: io::Error) -> Failure {
    if error.kind() == io::ErrorKind::UnexpectedEof {
        return Failure::new("IMPORT_ERROR_PREMATURE_EOF", &[]);
    }
    error.into()
}

fn make(transfer: &Transfer<'_>, objects: &[Object], disks: &Disks, made: &mut Made) -> Answer<()> {
    let mut state = transfer.pool.state();
    let is_restore = transfer.request.flag("restore");
    let used = objects
        .iter()
        .filter(|object| object.class == "VBD" && text(&object.record, "type") != "CD");
    let used: Vec<&str> = used.map(|vbd| text(&vbd.record, "VDI")).collect();
    for object in objects
        .iter()
        .filter(|object| object.class == "VDI" && used.contains(&object.id.as_str()))
    {
        let vdi = match disks {
            Disks::InArchive { sr } => {
                let size_bytes = rounded_size(number(&object.record, "virtual_size"));
                new_vdi(transfer.pool, &mut state, sr, size_bytes, &kept_of_vdi(&object.record))?
            }
            Disks::InPool => match state.database.by_uuid("VDI", text(&object.record, "uuid")) {
                Ok(vdi) => vdi,
                Err(_) => return Err(Failure::new("IMPORT_ERROR_ATTACHED_DISKS_NOT_FOUND", &[&object.id])),
            },
        };
        made.vdis.insert(object.id.clone(), vdi);
    }
    for object in objects.iter().filter(|object| object.class == "VM") {
        make_vm(&mut state, objects, object, is_restore, made)?;
    }
    Ok(())
}

fn kept_of_vdi(record: &Record) -> Record {
    let kept = [
        "name_label",
        "name_description",
        "type",
        "sharable",
        "read_only",
        "other_config",
        "tags",
    ];
    let fields = record.iter().filter(|(name, _)| kept.contains(&name.as_str()));
    fields.map(|(name, value)| (name.clone(), value.clone())).collect()
}

fn make_vm(state: &mut State, objects: &[Object], object: &Object, is_restore: bool, made: &mut Made) -> Answer<()> {
    let mut record = object.record.clone();
    let uuid = text(&record, "uuid").to_owned();
    if is_restore && state.database.by_uuid("VM", &uuid).is_ok() {
        return Err(Failure::new("DUPLICATE_VM", &[&state.database.by_uuid("VM", &uuid)?]));
    }
    let changes = json!({
        "uuid": if is_restore { uuid } else { new_uuid() }, "power_state": "Halted", "VBDs": [], "VIFs": [], "snapshots": [],
        "snapshot_of": NULL, "is_a_snapshot": false, "parent": NULL, "children": [], "metrics": NULL, "guest_metrics": NULL,
        "resident_on": NULL, "affinity": NULL, "domid": -1, "suspend_VDI": NULL, "current_operations": {}, "VTPMs": [],
    });
    if let Value::Object(changes) = changes {
        record.extend(changes);
    }
    let vm = state.database.insert("VM", record);
    made.vms.push(vm.clone());
    let of_this_vm = |class: &'static str| {
        objects
            .iter()
            .filter(move |it| it.class == class && text(&it.record, "VM") == object.id)
    };
    for vbd in of_this_vm("VBD") {
        let vdi = made.vdis.get(text(&vbd.record, "VDI")).cloned();
        if vdi.is_none() && text(&vbd.record, "type") != "CD" {
            continue;
        }
        let mut record = vbd.record.clone();
        record.insert("uuid".to_owned(), json!(new_uuid()));
        record.insert("VM".to_owned(), json!(vm));
        record.insert("VDI".to_owned(), json!(vdi.as_deref().unwrap_or(NULL)));
        record.insert("empty".to_owned(), json!(vdi.is_none()));
        record.insert("currently_attached".to_owned(), json!(false));
        let vbd = state.database.insert("VBD", record);
        state.database.append("VM", &vm, "VBDs", &vbd)?;
        if let Some(vdi) = vdi {
            state.database.append("VDI", &vdi, "VBDs", &vbd)?;
        }
    }
    for vif in of_this_vm("VIF") {
        make_vif(state, &vm, vif, is_restore)?;
    }
    Ok(())
}

/// A network card; its address is kept only where a machine is restored.
fn make_vif(state: &mut State, vm: &str, vif: &Object, is_restore: bool) -> Answer<()> {
    let network = state.network.clone();
    let uuid = new_uuid();
    let mut record = vif.record.clone();
    if !is_restore {
        record.insert("MAC".to_owned(), json!(crate::call::mac_from(&uuid)));
        record.insert("MAC_autogenerated".to_owned(), json!(true));
    }
    record.insert("uuid".to_owned(), json!(uuid));
    record.insert("VM".to_owned(), json!(vm));
    record.insert("network".to_owned(), json!(network));
    record.insert("currently_attached".to_owned(), json!(false));
    let vif = state.database.insert("VIF", record);
    state.database.append("VM", vm, "VIFs", &vif)?;
    state.database.append("network", &network, "VIFs", &vif)
}

/// Removes what an import that failed has made; disks that were there before stay.
fn undo(state: &mut State, disks: &Disks, made: &Made) {
    for vm in &made.vms {
        // A client that found it may have destroyed it.
        drop(remove_vm(state, vm));
    }
    if *disks != Disks::InPool {
        for vdi in made.vdis.values() {
            drop(remove_vdi(state, vdi));
        }
    }
}
