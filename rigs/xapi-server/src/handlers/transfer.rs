//! Shared by all transfers: permission, progress as a task, and injected faults.

use std::io::{self, Read, Write};

use holdfast_block::Clock;
use serde_json::{Value, json};

use crate::base64;
use crate::call::{end_task, new_task};
use crate::database::text;
use crate::failure::{Answer, Failure};
use crate::faults::Fault;
use crate::http::{Connection, Request};
use crate::nbd::release;
use crate::pool::{ADDRESSES, PASSWORD, Pool, USER};

/// An admitted transfer.
pub(crate) struct Transfer<'a> {
    pub(crate) pool: &'a Pool,
    pub(crate) request: &'a Request,
    /// The host that received the request.
    pub(crate) host: usize,
    pub(crate) task: String,
    /// Whether the server has created the task, which is then removed after the transfer.
    owns_task: bool,
    planned_end: Option<Failure>,
}

/// Checks whether a transfer is allowed; otherwise answers with an error.
pub(crate) fn admit<'a>(
    pool: &'a Pool,
    host: usize,
    connection: &mut Connection,
    request: &'a Request,
) -> io::Result<Option<Transfer<'a>>> {
    let line = format!("{} {}", request.method, request.target);
    pool.state().calls.push(line);
    let status = pool.faults.take(|fault| match fault {
        Fault::HandlerStatus(status) => Some(*status),
        _ => None,
    });
    if let Some(status) = status {
        connection.send_error(status, "")?;
        return Ok(None);
    }
    let given = request.parameter("task_id").map(str::to_owned);
    if !is_known(pool, request) {
        let failure = Failure::new("SESSION_AUTHENTICATION_FAILED", &[]);
        if let Some(task) = given {
            end_task(pool, &mut pool.state(), &task, &Err(failure));
        }
        connection.send_error(401, "Please check your credentials and retry.")?;
        return Ok(None);
    }
    let planned_end = pool.faults.take(|fault| match fault {
        Fault::TransferFails(error) => Some(Failure::from_words(error)),
        _ => None,
    });
    Ok(Some(Transfer {
        pool,
        request,
        host,
        owns_task: given.is_none(),
        task: given.unwrap_or_else(|| new_task(pool, &mut pool.state(), "transfer")),
        planned_end,
    }))
}

/// Whether the request has a valid session, or a valid name and password.
fn is_known(pool: &Pool, request: &Request) -> bool {
    if let Some(session) = request.parameter("session_id") {
        return pool.state().database.exists("session", session);
    }
    let basic = request
        .header("authorization")
        .and_then(|value| value.strip_prefix("Basic "));
    basic.and_then(base64::decode) == Some(format!("{USER}:{PASSWORD}").into_bytes())
}

impl Transfer<'_> {
    /// If this host does not see the storage, redirects the client to one that does; returns whether it was redirected.
    pub(crate) fn redirect(&mut self, connection: &mut Connection, sr: &str) -> io::Result<bool> {
        let state = self.pool.state();
        if state.host_sees(self.host, sr) {
            return Ok(false);
        }
        let other = (0..ADDRESSES.len()).find(|host| state.host_sees(*host, sr));
        drop(state);
        let Some(other) = other else {
            connection.send_error(500, "no host sees the storage")?;
            return Ok(true);
        };
        let location = format!("https://{}:{}{}", ADDRESSES[other], self.pool.port, self.request.target);
        let head = [
            "HTTP/1.1 302 Found".to_owned(),
            "Connection: close".to_owned(),
            "Cache-Control: no-cache, no-store".to_owned(),
            format!("Location: {location}"),
        ];
        connection.send_head(&head)?;
        // The other host ends the task.
        self.planned_end = None;
        self.discard_own_task();
        Ok(true)
    }

    /// The failure with which a test wants the transfer to end, if any: the objects that it would have created are then
    /// removed.
    pub(crate) fn planned_end(&self) -> Answer<()> {
        self.planned_end.clone().map_or(Ok(()), Err)
    }

    /// Answers 200, before the first byte of the transfer.
    pub(crate) fn accept(&self, connection: &mut Connection, version: &str, headers: &[String]) -> io::Result<()> {
        let mut head = vec![
            format!("HTTP/{version} 200 OK"),
            "Connection: close".to_owned(),
            "Cache-Control: no-cache, no-store".to_owned(),
            format!("task-id: {}", self.task),
        ];
        head.extend_from_slice(headers);
        connection.send_head(&head)
    }

    /// Records how the transfer ended.
    pub(crate) fn end(mut self, answer: Answer<Value>) {
        let answer = match (answer, self.planned_end.take()) {
            (Ok(_), Some(planned)) => Err(planned),
            (answer, _) => answer,
        };
        end_task(self.pool, &mut self.pool.state(), &self.task, &answer);
        self.discard_own_task();
    }

    fn discard_own_task(&self) {
        if self.owns_task {
            // A client may have found and destroyed it.
            drop(self.pool.state().database.remove("task", &self.task));
        }
    }

    /// The disk in the query parameter `name`, by reference or UUID.
    pub(crate) fn vdi(&self, name: &str) -> Answer<Option<String>> {
        let given = self.request.parameter(name);
        given
            .map(|vdi| self.pool.state().database.by_reference_or_uuid("VDI", vdi))
            .transpose()
    }

    /// The storage in the query.
    pub(crate) fn sr(&self) -> Answer<Option<String>> {
        let state = self.pool.state();
        if let Some(sr) = self.request.parameter("sr_id") {
            return state.database.get("SR", sr).map(|_| Some(sr.to_owned()));
        }
        let uuid = self.request.parameter("sr_uuid");
        uuid.map(|uuid| state.database.by_uuid("SR", uuid)).transpose()
    }

    /// The data stream of the transfer.
    pub(crate) fn flow<'a>(
        &'a self,
        connection: &'a mut Connection,
        direction: Direction,
        total_bytes: u64,
    ) -> Flow<'a> {
        let delay = self.pool.faults.take(|fault| match fault {
            Fault::TransferDelayed(delay) => Some(*delay),
            _ => None,
        });
        if let Some(delay) = delay {
            self.pool.clock.sleep(delay);
        }
        let cut_after = self.pool.faults.take(|fault| match (direction, fault) {
            // The fault applies only to a transfer that reaches this position: the records of a machine must not use up
            // a fault for its disk.
            (Direction::Down, Fault::CutDownloadAfter(bytes)) => Some(*bytes).filter(|bytes| *bytes < total_bytes),
            (Direction::Up, Fault::CutUploadAfter(bytes)) => Some(*bytes),
            _ => None,
        });
        let sessions_end_after = self.pool.faults.take(|fault| match fault {
            Fault::SessionExpiresAfterBytes(bytes) => Some(*bytes),
            _ => None,
        });
        Flow {
            transfer: self,
            connection,
            moved_bytes: 0,
            limit_bytes: match direction {
                Direction::Down => None,
                Direction::Up => self.request.content_length(),
            },
            total_bytes,
            cut_after,
            sessions_end_after,
            needs_session: false,
            piece_bytes: self.pool.habits().piece_bytes.max(1),
        }
    }
}

/// The direction of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    Down,
    Up,
}

/// The data stream of a transfer.
pub(crate) struct Flow<'a> {
    transfer: &'a Transfer<'a>,
    connection: &'a mut Connection,
    moved_bytes: u64,
    /// The length of an upload's body; `None` if it ends with the connection.
    limit_bytes: Option<u64>,
    /// Total size, for the progress of the task.
    total_bytes: u64,
    cut_after: Option<u64>,
    sessions_end_after: Option<u64>,
    /// Whether the session is checked for each piece, as for an XVA.
    pub(crate) needs_session: bool,
    piece_bytes: usize,
}

impl Flow<'_> {
    /// Number of bytes of at most `length` that may be transferred now; fails if the transfer has ended.
    fn allow(&mut self, length: usize) -> io::Result<usize> {
        let next = |limit: Option<u64>| {
            let left = limit.map(|limit| limit.saturating_sub(self.moved_bytes));
            left.map_or(usize::MAX, holdfast_block::to_usize)
        };
        if next(self.cut_after) == 0 {
            self.connection.cut();
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        let mut length = length.min(self.piece_bytes).min(next(self.cut_after));
        let pool = self.transfer.pool;
        let mut state = pool.state();
        if next(self.sessions_end_after) == 0 {
            self.sessions_end_after = None;
            state.end_sessions();
        }
        length = length.min(self.sessions_end_after.map_or(usize::MAX, |limit| {
            holdfast_block::to_usize(limit.saturating_sub(self.moved_bytes))
        }));
        let session = self.transfer.request.parameter("session_id");
        let is_gone = |session: &&str| self.needs_session && !state.database.exists("session", session);
        if let Some(session) = session.filter(is_gone) {
            return Err(io::Error::other(Failure::new("SESSION_INVALID", &[session])));
        }
        let task = &self.transfer.task;
        let is_cancelled = state
            .database
            .get("task", task)
            .is_ok_and(|task| text(task, "status") == "cancelling");
        if is_cancelled || pool.is_stopping() {
            return Err(io::Error::other(Failure::new("TASK_CANCELLED", &[task])));
        }
        Ok(length)
    }

    fn note(&mut self, length: usize) {
        let before = self.percent();
        self.moved_bytes += length as u64;
        let now = self.percent();
        if now != before {
            let mut state = self.transfer.pool.state();
            #[expect(clippy::cast_precision_loss, reason = "at most 99")]
            let progress = json!(now as f64 / 100.0);
            // The task was destroyed: there is no progress to update.
            drop(state.database.set("task", &self.transfer.task, "progress", progress));
        }
    }

    fn percent(&self) -> u64 {
        (self.moved_bytes * 100 / self.total_bytes.max(1)).min(99)
    }
}

impl Write for Flow<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let length = self.allow(bytes.len())?;
        let written = self.connection.write(&bytes[..length])?;
        if self.cut_after.is_some() {
            // Bytes before the cut must reach the client, so they must not wait in a buffer.
            self.connection.flush()?;
        }
        self.note(written);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.connection.flush()
    }
}

impl Read for Flow<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.limit_bytes.map_or(u64::MAX, |limit| limit - self.moved_bytes);
        let wanted = buffer.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        if wanted == 0 {
            return Ok(0);
        }
        let length = self.allow(wanted)?;
        let received = self.connection.read(&mut buffer[..length])?;
        if received == 0 && self.limit_bytes.is_some() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.note(received);
        Ok(received)
    }
}

/// A disk that a transfer uses. It counts as in use until this is dropped.
pub(crate) struct Attached<'a> {
    pool: &'a Pool,
    vdi: String,
}

/// The access mode of a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    ReadOnly,
    ReadWrite,
}

impl<'a> Attached<'a> {
    /// Attaches a disk to the host. Fails if a running machine uses the disk, or another transfer conflicts.
    pub(crate) fn new(pool: &'a Pool, vdi: &str, mode: Mode) -> Answer<Self> {
        let mut state = pool.state();
        let is_writable = |vbd: &crate::database::Record| mode == Mode::ReadWrite || text(vbd, "mode") == "RW";
        // Devices of a suspended machine are only marked as attached.
        let is_suspended = |vbd: &crate::database::Record| {
            let vm = state.database.get("VM", text(vbd, "VM"));
            vm.is_ok_and(|vm| text(vm, "power_state") == "Suspended")
        };
        let is_attached = state.database.all("VBD").any(|(_, vbd)| {
            let is_of_it = text(vbd, "VDI") == vdi && crate::database::flag(vbd, "currently_attached");
            is_of_it && is_writable(vbd) && !is_suspended(vbd)
        });
        if is_attached || (mode == Mode::ReadWrite && state.users.contains_key(vdi)) {
            let word = if mode == Mode::ReadOnly { "RO" } else { "RW" };
            return Err(Failure::new("VDI_IN_USE", &[vdi, word]));
        }
        *state.users.entry(vdi.to_owned()).or_default() += 1;
        Ok(Self {
            pool,
            vdi: vdi.to_owned(),
        })
    }
}

impl Drop for Attached<'_> {
    fn drop(&mut self) {
        release(&mut self.pool.state(), &self.vdi);
    }
}
