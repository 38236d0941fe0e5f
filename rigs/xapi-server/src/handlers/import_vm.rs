//! `/import` and `/import_metadata`: imports a machine from an archive.
//!
//! Source: `ocaml/xapi/import.ml`. If the import fails, the created objects are removed again.

use std::io::{self, BufReader, Read};

use flate2::read::GzDecoder;
use serde_json::{Value, json};

use super::Next;
use super::import_objects::{Disks, Import, Made, streamed};
use super::target::Target;
use super::transfer::{Direction, Flow, Transfer, admit};
use crate::call::vdi::remove as remove_vdi;
use crate::call::vm::remove as remove_vm;
use crate::database::number;
use crate::failure::{Answer, Failure};
use crate::http::{Connection, Request};
use crate::pool::{Pool, State};
use crate::xva::disks::{self, Strictness};
use crate::xva::{ova, tar};

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

/// Reads the whole archive; returns references to the machines that were created.
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
        .and_then(|mut stream| read(transfer, &mut *stream, disks, &mut made))
        .and_then(|()| transfer.planned_end());
    if let Err(failure) = taken {
        if !transfer.request.flag("force") {
            undo(&mut transfer.pool.state(), disks, &made);
        }
        return Err(failure);
    }
    let mut state = transfer.pool.state();
    for vm in &made.vms {
        state.database.set("VM", vm, "current_operations", json!({}))?;
    }
    Ok(json!(made.vms))
}

/// Decompresses the stream if it begins like a compressed one.
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
    let import = Import {
        objects: &objects,
        disks,
        is_restore: transfer.request.flag("restore"),
        task: &transfer.task,
    };
    import.make(pool, made)?;
    if *disks != Disks::InPool {
        let strictness = if transfer.request.flag("force") {
            Strictness::Forced
        } else {
            Strictness::Checked
        };
        let mut first_length = None;
        // The map has the disks in the order of their names, as the archive has.
        let streamed = streamed(&objects)?;
        for (prefix, vdi) in &made.vdis {
            let Some(object) = streamed.iter().find(|object| object.id == *prefix) else {
                continue;
            };
            let target = Target::new(pool, vdi)?;
            let size_bytes = number(&object.record, "virtual_size");
            disks::read(stream, prefix, &target, size_bytes, &mut first_length, strictness).map_err(premature)?;
        }
    }
    // Reads the end of the archive, and anything after it.
    io::copy(stream, &mut io::sink()).map_err(premature)?;
    Ok(())
}

fn premature(error: io::Error) -> Failure {
    if error.kind() == io::ErrorKind::UnexpectedEof {
        return Failure::new("IMPORT_ERROR_PREMATURE_EOF", &[]);
    }
    error.into()
}

/// Removes the objects that a failed import has created. Disks that existed before are kept.
fn undo(state: &mut State, disks: &Disks, made: &Made) {
    for vm in &made.vms {
        // A client may have found and destroyed it.
        drop(remove_vm(state, vm));
    }
    for network in &made.networks {
        drop(state.database.remove("network", network));
    }
    if *disks != Disks::InPool {
        for vdi in made.vdis.values() {
            drop(remove_vdi(state, vdi));
        }
    }
}
