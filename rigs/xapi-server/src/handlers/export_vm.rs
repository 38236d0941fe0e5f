//! `/export` and `/export_metadata`: a machine with its disks, or only its metadata.
//!
//! Source: `ocaml/xapi/export.ml`.

use std::io::{self, Write};

use flate2::write::GzEncoder;
use serde_json::{Value, json};

use super::Next;
use super::transfer::{Attached, Direction, Mode, Transfer, admit};
use crate::call::vm::{refuse_power_state, refuse_while_busy};
use crate::database::{flag, text, texts};
use crate::disk::Disk;
use crate::failure::{Answer, Failure};
use crate::faults::Fault;
use crate::http::{Connection, Request};
use crate::pool::Pool;
use crate::xva::ova::{Names, Scope};
use crate::xva::{disks, tar};

/// A disk of the machine, with its place in the archive.
struct Piece {
    prefix: String,
    vdi: String,
    disk: Disk,
}

/// Answers `GET /export`.
pub(crate) fn export(pool: &Pool, host: usize, connection: &mut Connection, request: &Request) -> io::Result<Next> {
    let Some(mut transfer) = admit(pool, host, connection, request)? else {
        return Ok(Next::End);
    };
    let vm = match vm_of(&transfer) {
        Ok(vm) => vm,
        Err(failure) => return fail(transfer, connection, failure),
    };
    for sr in storage_of(pool, &vm) {
        if transfer.redirect(connection, &sr)? {
            return Ok(Next::End);
        }
    }
    if let Err(failure) = lock(&transfer, &vm) {
        return fail(transfer, connection, failure);
    }
    let headers = [
        "Server: xapi/24.19".to_owned(),
        "content-type: application/octet-stream".to_owned(),
        "Content-Disposition: attachment; filename=\"export.xva\"".to_owned(),
    ];
    let answer = match transfer.accept(connection, "1.0", &headers) {
        Ok(()) => send(&transfer, connection, &vm),
        Err(error) => Err(error.into()),
    };
    unlock(&transfer, &vm);
    transfer.end(answer);
    Ok(Next::End)
}

fn fail(transfer: Transfer<'_>, connection: &mut Connection, failure: Failure) -> io::Result<Next> {
    let extra = failure.to_string();
    transfer.end(Err(failure));
    connection.send_error(500, &extra)?;
    Ok(Next::End)
}

fn vm_of(transfer: &Transfer<'_>) -> Answer<String> {
    let state = transfer.pool.state();
    if let Some(reference) = transfer.request.query("ref") {
        return state.database.get("VM", reference).map(|_| reference.to_owned());
    }
    let uuid = transfer
        .request
        .query("uuid")
        .ok_or_else(|| Failure::internal("Not_found"))?;
    state.database.by_uuid("VM", uuid)
}

/// The storage of the machine's disks.
fn storage_of(pool: &Pool, vm: &str) -> Vec<String> {
    let state = pool.state();
    let Ok(record) = state.database.get("VM", vm) else {
        return Vec::new();
    };
    texts(record, "VBDs")
        .iter()
        .filter_map(|vbd| state.database.get("VBD", vbd).ok())
        .filter_map(|vbd| state.database.get("VDI", text(vbd, "VDI")).ok())
        .map(|vdi| text(vdi, "SR").to_owned())
        .collect()
}

/// Locks the machine against changes. A running machine cannot be exported.
fn lock(transfer: &Transfer<'_>, vm: &str) -> Answer<()> {
    let mut state = transfer.pool.state();
    let record = state.database.get("VM", vm)?;
    refuse_while_busy(record, vm)?;
    if !flag(record, "is_a_snapshot") {
        refuse_power_state(record, vm, &["Halted", "Suspended"])?;
    }
    let operations = json!({transfer.task.clone(): "export"});
    state.database.set("VM", vm, "current_operations", operations)
}

fn unlock(transfer: &Transfer<'_>, vm: &str) {
    let unlocked = transfer
        .pool
        .state()
        .database
        .set("VM", vm, "current_operations", json!({}));
    debug_assert!(unlocked.is_ok(), "it was locked, so no call destroyed it");
}

fn send(transfer: &Transfer<'_>, connection: &mut Connection, vm: &str) -> Answer<Value> {
    let pool = transfer.pool;
    let scope = if transfer.request.flag("preserve_power_state") {
        Scope::State
    } else {
        Scope::Machine
    };
    let (ova, pieces) = plan(pool, vm, scope)?;
    let attached: Vec<_> = pieces
        .iter()
        .map(|piece| Attached::new(pool, &piece.vdi, Mode::ReadOnly))
        .collect::<Answer<_>>()?;
    let total_bytes = pieces.iter().map(|piece| piece.disk.size_bytes).sum();
    let mut flow = transfer.flow(connection, Direction::Down, total_bytes);
    flow.needs_session = true;
    match transfer.request.query("use_compression") {
        Some("true" | "gzip") => {
            let mut packed = GzEncoder::new(&mut flow, flate2::Compression::fast());
            write(pool, &mut packed, &ova, &pieces)?;
            packed.finish()?;
        }
        Some("zstd") => {
            let mut packed = zstd::Encoder::new(&mut flow, 1)?;
            write(pool, &mut packed, &ova, &pieces)?;
            packed.finish()?;
        }
        _ => write(pool, &mut flow, &ova, &pieces)?,
    }
    flow.flush()?;
    drop(attached);
    Ok(json!(""))
}

/// The content of the archive: `ova.xml`, and the disks in the order of their names.
fn plan(pool: &Pool, vm: &str, scope: Scope) -> Answer<(String, Vec<Piece>)> {
    let state = pool.state();
    let mut names = Names::default();
    names.add_vm(&state.database, vm, scope)?;
    let ova = names.write(&state.database, scope)?;
    let record = state.database.get("VM", vm)?;
    let mut vdis = Vec::new();
    if scope == Scope::State && text(record, "power_state") == "Suspended" {
        vdis.push(text(record, "suspend_VDI"));
    }
    for vbd in &texts(record, "VBDs") {
        let vbd = state.database.get("VBD", vbd)?;
        if text(vbd, "type") != "CD" {
            vdis.push(text(vbd, "VDI"));
        }
    }
    let mut pieces = Vec::new();
    for vdi in vdis.into_iter().filter(|vdi| state.database.exists("VDI", vdi)) {
        pieces.push(Piece {
            prefix: names.short(vdi).unwrap_or_default().to_owned(),
            vdi: vdi.to_owned(),
            disk: state.disk(vdi)?.clone(),
        });
    }
    pieces.sort_by(|one, other| one.prefix.cmp(&other.prefix));
    Ok((ova, pieces))
}

fn write(pool: &Pool, out: &mut dyn Write, ova: &str, pieces: &[Piece]) -> io::Result<()> {
    let spoils = pool
        .faults
        .take(|fault| matches!(fault, Fault::ChecksumWrong).then_some(()));
    let mut spoils = spoils.is_some();
    let habits = pool.habits();
    tar::write(out, "ova.xml", ova.as_bytes())?;
    for piece in pieces {
        let file = piece.disk.file()?;
        disks::write(out, &piece.prefix, &file, piece.disk.size_bytes, &habits, &mut spoils)?;
    }
    tar::write_end(out)
}

/// Answers `GET /export_metadata`.
pub(crate) fn export_metadata(
    pool: &Pool,
    host: usize,
    connection: &mut Connection,
    request: &Request,
) -> io::Result<Next> {
    let Some(transfer) = admit(pool, host, connection, request)? else {
        return Ok(Next::End);
    };
    let archive = match metadata(&transfer) {
        Ok(archive) => archive,
        Err(failure) => return fail(transfer, connection, failure),
    };
    let headers = [
        "Server: xapi/24.19".to_owned(),
        "content-type: application/octet-stream".to_owned(),
        format!("Content-Length: {}", archive.len()),
        "Content-Disposition: attachment; filename=\"export.xva\"".to_owned(),
    ];
    transfer.accept(connection, "1.0", &headers)?;
    let mut flow = transfer.flow(connection, Direction::Down, archive.len() as u64);
    let sent = flow.write_all(&archive).and_then(|()| flow.flush());
    transfer.end(sent.map(|()| json!("")).map_err(Failure::from));
    Ok(Next::End)
}

fn metadata(transfer: &Transfer<'_>) -> Answer<Vec<u8>> {
    let scope = match transfer.request.query("export_snapshots") {
        Some("false") => Scope::State,
        _ => Scope::Everything,
    };
    let vms = if transfer.request.flag("all") {
        let state = transfer.pool.state();
        let vms = state
            .database
            .all("VM")
            .filter(|(_, record)| !flag(record, "is_a_snapshot"));
        vms.map(|(vm, _)| vm.clone()).collect()
    } else {
        vec![vm_of(transfer)?]
    };
    let state = transfer.pool.state();
    let mut names = Names::default();
    for vm in vms {
        names.add_vm(&state.database, &vm, scope)?;
    }
    let ova = names.write(&state.database, scope)?;
    let mut archive = Vec::new();
    tar::write(&mut archive, "ova.xml", ova.as_bytes())?;
    tar::write_end(&mut archive)?;
    Ok(archive)
}
