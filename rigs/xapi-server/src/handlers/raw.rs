//! `/export_raw_vdi` and `/import_raw_vdi`: one disk.
//!
//! Source: `ocaml/xapi/export_raw_vdi.ml` and `import_raw_vdi.ml`.

use std::io::{self, Read, Write};
use std::os::unix::fs::FileExt;

use holdfast_block::to_usize;
use serde_json::{Value, json};

use super::Next;
use super::target::Target;
use super::transfer::{Attached, Direction, Mode, Transfer, admit};
use crate::call::vdi::new_vdi;
use crate::database::text;
use crate::failure::{Answer, Failure};
use crate::http::{Connection, Request};
use crate::pool::Pool;
use crate::vhd;

/// Number of bytes to read at a time.
const PIECE_BYTES: u64 = 1 << 20;
/// Size of the largest disk that a VHD supports.
const VHD_BYTES_MAX: u64 = 2040 << 30;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Format {
    Raw,
    Vhd,
}

impl Format {
    fn of(request: &Request) -> Option<Self> {
        match request.parameter("format").map(str::to_lowercase).as_deref() {
            None | Some("raw") => Some(Self::Raw),
            Some("vhd") => Some(Self::Vhd),
            Some(_) => None,
        }
    }
}

/// Answers `GET /export_raw_vdi`.
pub(crate) fn export(pool: &Pool, host: usize, connection: &mut Connection, request: &Request) -> io::Result<Next> {
    let Some(mut transfer) = admit(pool, host, connection, request)? else {
        return Ok(Next::End);
    };
    let vdi = transfer
        .vdi("vdi")
        .and_then(|vdi| vdi.ok_or_else(|| Failure::internal("Missing vdi query parameter")));
    let vdi = match vdi {
        Ok(vdi) => vdi,
        Err(failure) => return refuse(transfer, connection, 500, failure),
    };
    let sr = match pool.state().database.get("VDI", &vdi) {
        Ok(record) => text(record, "SR").to_owned(),
        Err(_) => String::new(),
    };
    if transfer.redirect(connection, &sr)? {
        return Ok(Next::End);
    }
    let Some(format) = Format::of(request) else {
        return refuse(transfer, connection, 404, Failure::internal("Unknown format"));
    };
    let (kind, extension) = match format {
        Format::Raw => ("application/octet-stream", "raw"),
        Format::Vhd => ("application/vhd", "vhd"),
    };
    let uuid = pool
        .state()
        .database
        .get("VDI", &vdi)
        .map(|record| text(record, "uuid").to_owned());
    let headers = [
        format!("content-type:{kind}"),
        format!(
            "content-disposition: attachment; filename=\"{}.{extension}\"",
            uuid.unwrap_or_default()
        ),
    ];
    transfer.accept(connection, "1.1", &headers)?;
    let answer = send(&transfer, connection, &vdi, format);
    transfer.end(answer);
    Ok(Next::End)
}

/// Ends a transfer that was not started.
fn refuse(transfer: Transfer<'_>, connection: &mut Connection, status: u16, failure: Failure) -> io::Result<Next> {
    transfer.end(Err(failure));
    connection.send_error(status, "")?;
    Ok(Next::End)
}

fn send(transfer: &Transfer<'_>, connection: &mut Connection, vdi: &str, format: Format) -> Answer<Value> {
    let pool = transfer.pool;
    let base = transfer.vdi("base")?;
    let disk = pool.state().disk(vdi)?.clone();
    if format == Format::Vhd && disk.size_bytes > VHD_BYTES_MAX {
        return Err(Failure::new("VDI_TOO_LARGE", &[vdi, &VHD_BYTES_MAX.to_string()]));
    }
    let _attached = Attached::new(pool, vdi, Mode::ReadOnly)?;
    let _base_attached = base
        .as_ref()
        .map(|base| Attached::new(pool, base, Mode::ReadOnly))
        .transpose()?;
    let mut flow = transfer.flow(connection, Direction::Down, disk.size_bytes);
    match format {
        Format::Raw => {
            let file = disk.file()?;
            let mut piece = vec![0; to_usize(PIECE_BYTES)];
            for start in (0..disk.size_bytes).step_by(to_usize(PIECE_BYTES)) {
                let length = to_usize(PIECE_BYTES.min(disk.size_bytes - start));
                file.read_exact_at(&mut piece[..length], start)?;
                flow.write_all(&piece[..length])?;
            }
        }
        Format::Vhd => {
            let parent = base.map(|base| parent_of(pool, &base)).transpose()?;
            vhd::write(&mut flow, &disk, parent.as_ref(), &pool.habits())?;
        }
    }
    flow.flush()?;
    Ok(json!(""))
}

fn parent_of(pool: &Pool, base: &str) -> Answer<vhd::Parent> {
    let state = pool.state();
    let record = state.database.get("VDI", base)?;
    let sr = state.database.get("SR", text(record, "SR"))?;
    Ok(vhd::Parent {
        disk: state.disk(base)?.clone(),
        uuid: text(record, "uuid").to_owned(),
        path: format!("/run/sr-mount/{}/{}.vhd", text(sr, "uuid"), text(record, "uuid")),
    })
}

/// Answers `PUT /import_raw_vdi`.
pub(crate) fn import(pool: &Pool, host: usize, connection: &mut Connection, request: &Request) -> io::Result<Next> {
    let Some(mut transfer) = admit(pool, host, connection, request)? else {
        return Ok(Next::End);
    };
    let named = transfer.vdi("vdi").and_then(|vdi| Ok((vdi, transfer.sr()?)));
    let (vdi, sr) = match named {
        Ok(named) => named,
        Err(failure) => return refuse(transfer, connection, 400, failure),
    };
    let sr_of_vdi = vdi.as_ref().and_then(|vdi| {
        let state = pool.state();
        state
            .database
            .get("VDI", vdi)
            .ok()
            .map(|record| text(record, "SR").to_owned())
    });
    let Some(sr) = sr_of_vdi.or(sr) else {
        return refuse(transfer, connection, 400, Failure::new("VDI_MISSING", &[]));
    };
    if transfer.redirect(connection, &sr)? {
        return Ok(Next::End);
    }
    let is_chunked = request.parameter("chunked").is_some();
    let format = match Format::of(request) {
        None => return refuse(transfer, connection, 404, Failure::internal("Unknown format")),
        Some(Format::Vhd) if is_chunked => {
            return refuse(
                transfer,
                connection,
                404,
                Failure::internal("Cannot handle chunked VHD"),
            );
        }
        Some(format) => format,
    };
    if let Some(encoding) = request.header("transfer-encoding") {
        let failure = Failure::internal(format!("Cannot handle encoding: {encoding}"));
        return refuse(transfer, connection, pool.habits().chunked_status, failure);
    }
    let vdi = match (vdi, format, request.content_length()) {
        (Some(vdi), _, _) => vdi,
        (None, Format::Raw, Some(length)) => match new_disk(pool, &sr, length) {
            Ok(vdi) => vdi,
            Err(failure) => return refuse(transfer, connection, 400, failure),
        },
        (None, Format::Vhd, _) => {
            let failure = Failure::internal("Importing a VHD directly into an SR not yet supported");
            return refuse(transfer, connection, 400, failure);
        }
        _ => {
            return refuse(
                transfer,
                connection,
                400,
                Failure::internal("Not enough info supplied to import"),
            );
        }
    };
    transfer.accept(connection, "1.1", &["content-type:application/octet-stream".to_owned()])?;
    let answer = receive(&transfer, connection, &vdi, format).map(|()| json!(vdi));
    transfer.end(answer);
    Ok(Next::End)
}

fn new_disk(pool: &Pool, sr: &str, size_bytes: u64) -> Answer<String> {
    let fields = json!({"name_label": "Imported VDI"})
        .as_object()
        .cloned()
        .unwrap_or_default();
    new_vdi(
        pool,
        &mut pool.state(),
        sr,
        crate::call::vdi::rounded_size(size_bytes),
        &fields,
    )
}

fn receive(transfer: &Transfer<'_>, connection: &mut Connection, vdi: &str, format: Format) -> Answer<()> {
    let pool = transfer.pool;
    let _attached = Attached::new(pool, vdi, Mode::ReadWrite)?;
    let target = Target::new(pool, vdi)?;
    let mut flow = transfer.flow(connection, Direction::Up, target.size_bytes);
    let received = match format {
        Format::Vhd => vhd::read(&mut flow, &target),
        Format::Raw => receive_raw(&mut flow, &target),
    };
    received.map_err(|error| match Failure::carried_by(&error) {
        Some(failure) => failure,
        None => Failure::new("VDI_IO_ERROR", &["Device I/O errors"]),
    })
}

fn receive_raw(flow: &mut impl Read, target: &Target<'_>) -> io::Result<()> {
    let mut piece = vec![0; to_usize(PIECE_BYTES)];
    let mut offset = 0;
    loop {
        let received = flow.read(&mut piece)?;
        if received == 0 {
            return Ok(());
        }
        target.write(offset, &piece[..received])?;
        offset += received as u64;
    }
}
