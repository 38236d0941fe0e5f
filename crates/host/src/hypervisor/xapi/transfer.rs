//! Transfers of data from and to a pool.
//!
//! A host that has no access to the storage redirects to a host that has access (302). Its certificate is then
//! queried from the master, unless it is known. The HTTP status precedes the transfer, so only the task of a transfer
//! reports its success.

use std::io;
use std::io::Read;
use std::sync::Arc;
use std::time::Duration;

use super::address::{host_and_port, split_host};
use super::http::{Body, Connection, ResponseHead, encoded};
use super::record::Reference;
use super::retry::RetryContext;
use super::task::{Task, reference_in};
use super::{Pool, XapiError, XapiResult};

/// The error code of a session that has expired.
const SESSION_INVALID: &str = "SESSION_INVALID";
/// Limit on the redirects of one transfer.
const HOP_COUNT_MAX: usize = 4;
/// Limit on the restarts of a broken download.
const RETRY_COUNT_MAX: u32 = 5;
/// How long a transfer may make no progress: storage may be busy for minutes.
const TRANSFER_IDLE_TIMEOUT: Duration = Duration::from_secs(300);
const DISCARD_BYTES: usize = 256 << 10;

/// The format in which a disk is transferred.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DiskForm {
    /// Raw: all bytes.
    Raw,
    /// A VHD: only allocated blocks.
    Vhd,
    /// A differencing VHD: only the differences to this disk.
    VhdSince(Reference),
}

/// The source of a download.
#[derive(Debug, Clone)]
struct DownloadSource {
    path: &'static str,
    query: Vec<(&'static str, String)>,
    /// The label for tasks and errors: `export of web1`.
    label: String,
}

/// A running download.
///
/// The source does not change. So a broken download is restarted from the beginning, and the bytes that were already
/// read are skipped, since XAPI cannot start at an offset.
pub struct Download {
    pool: Arc<Pool>,
    what: DownloadSource,
    task: Task,
    body: Body,
    position: u64,
    retry_count: u32,
}

impl Pool {
    /// The content of a disk.
    pub fn download_disk(self: &Arc<Self>, disk: &Reference, form: &DiskForm) -> XapiResult<Download> {
        let mut query = vec![("vdi", disk.0.clone())];
        match form {
            DiskForm::Raw => query.push(("format", "raw".to_owned())),
            DiskForm::Vhd => query.push(("format", "vhd".to_owned())),
            DiskForm::VhdSince(base) => {
                query.push(("format", "vhd".to_owned()));
                query.push(("base", base.0.clone()));
            }
        }
        self.download(&DownloadSource {
            path: "/export_raw_vdi",
            query,
            label: format!("export of the disk {disk}"),
        })
    }

    /// The records of a machine or snapshot, as an archive without disks.
    pub fn download_metadata(self: &Arc<Self>, machine: &Reference) -> XapiResult<Download> {
        self.download_once(DownloadSource {
            path: "/export_metadata",
            query: vec![("ref", machine.0.clone()), ("export_snapshots", "false".to_owned())],
            label: format!("export of the records of {machine}"),
        })
    }

    /// Starts a download, with retries.
    fn download(self: &Arc<Self>, what: &DownloadSource) -> XapiResult<Download> {
        self.retry_context.retry(|| self.download_once(what.clone()))
    }

    fn download_once(self: &Arc<Self>, what: DownloadSource) -> XapiResult<Download> {
        let begin = || {
            let task = Task::new(self, "holdfast", &what.label)?;
            Ok((self.get(&what, &task)?, task))
        };
        let (body, task) = with_valid_session(begin)?;
        Ok(Download {
            pool: Arc::clone(self),
            what,
            task,
            body,
            position: 0,
            retry_count: 0,
        })
    }

    fn get(&self, what: &DownloadSource, task: &Task) -> XapiResult<Body> {
        let (connection, head) = self.request("GET", what.path, &what.query, &what.label, task, &[])?;
        connection.body(&head, &what.label)
    }

    /// Sends a request, follows redirects, and returns status and headers of the answer.
    fn request(
        &self,
        method: &str,
        path: &str,
        query: &[(&str, String)],
        label: &str,
        task: &Task,
        headers: &[String],
    ) -> XapiResult<(Connection, ResponseHead)> {
        let retry_context = RetryContext {
            idle_timeout: TRANSFER_IDLE_TIMEOUT,
            ..self.retry_context.clone()
        };
        let mut host = self.host();
        for _ in 0..HOP_COUNT_MAX {
            let session = self.session()?;
            let own = [("session_id", session.clone()), ("task_id", task.reference().0.clone())];
            let words: Vec<String> = query
                .iter()
                .chain(&own)
                .map(|(name, value)| format!("{name}={}", encoded(value)))
                .collect();
            let mut connection = self.open(&host, &retry_context)?;
            connection.ask(method, &format!("{path}?{}", words.join("&")), headers)?;
            let head = connection.head(label)?;
            match head.status {
                200 => return Ok((connection, head)),
                301 | 302 | 303 | 307 | 308 => {
                    let location = head.header("location").unwrap_or_default();
                    host = host_of(location, host.1).ok_or_else(|| {
                        self.invalid_answer(
                            label,
                            &format!("it redirects to {location:?}, which is not an HTTPS address"),
                        )
                    })?;
                }
                // The task ended with the session.
                401 | 403 if self.is_expired(&session) => {
                    return Err(XapiError::Refused {
                        request: label.to_owned(),
                        code: SESSION_INVALID.to_owned(),
                        details: Vec::new(),
                    });
                }
                status => {
                    return Err(XapiError::Status {
                        host: host_and_port(&host.0, host.1),
                        request: label.to_owned(),
                        status,
                        reason: head.reason,
                    });
                }
            }
        }
        Err(self.invalid_answer(label, "too many redirects"))
    }

    /// Whether a session has expired. An expired session is discarded.
    fn is_expired(&self, session: &str) -> bool {
        // A call renews an expired session.
        drop(self.call("session.get_this_host", &[]));
        let now = self.session();
        now.is_ok_and(|now| now != session)
    }

    /// Connects to a host of the pool. The certificate of an unknown host is queried from the master.
    fn open(&self, host: &(String, u16), retry_context: &RetryContext) -> XapiResult<Connection> {
        match Connection::open(&host.0, host.1, &self.trust().tls()?, retry_context) {
            Err(XapiError::Untrusted { .. }) if *host != self.host() => {
                self.fetch_certificates()?;
                Connection::open(&host.0, host.1, &self.trust().tls()?, retry_context)
            }
            other => other,
        }
    }
}

/// Starts a transfer. If the session expired after the task was created, starts it once more.
fn with_valid_session<T>(begin: impl Fn() -> XapiResult<T>) -> XapiResult<T> {
    match begin() {
        Err(error) if error.is_refusal(SESSION_INVALID) => begin(),
        other => other,
    }
}

/// Host and port of an `https://` address.
fn host_of(location: &str, port: u16) -> Option<(String, u16)> {
    let rest = location.strip_prefix("https://")?;
    let authority = rest.split(['/', '?']).next()?;
    split_host(authority, port).ok()
}

impl Download {
    /// Restarts the download. A failure of the restart counts as an attempt, too.
    fn restart(&mut self, reason: io::Error) -> io::Result<()> {
        let mut reason = reason;
        loop {
            if (self.pool.retry_context.is_stopped)() {
                return Err(io::Error::other(XapiError::Interrupted));
            }
            self.retry_count += 1;
            if self.retry_count > RETRY_COUNT_MAX {
                return Err(io::Error::other(self.broken(reason)));
            }
            if self.retry_count > 1 {
                let pause = self.pool.retry_context.pause_after(self.retry_count - 2);
                pause.map_err(io::Error::other)?;
            }
            // The result of the failed task is not needed.
            self.task.cancel();
            match self.pool.download_once(self.what.clone()) {
                Ok(retry) => (self.task, self.body) = (retry.task, retry.body),
                Err(error) if self.pool.retry_context.may_be_temporary(&error) => {
                    reason = io::Error::other(error);
                    continue;
                }
                Err(error) => return Err(io::Error::other(error)),
            }
            match self.skip() {
                Ok(()) => return Ok(()),
                Err(error) => reason = error,
            }
        }
    }

    /// The error after the last attempt.
    fn broken(&self, reason: io::Error) -> XapiError {
        match reason.downcast::<XapiError>() {
            Ok(error) => error,
            Err(source) => {
                let host = self.pool.host();
                XapiError::Broken {
                    action: "read from",
                    host: host_and_port(&host.0, host.1),
                    source,
                }
            }
        }
    }

    /// Skips the bytes that were already read.
    fn skip(&mut self) -> io::Result<()> {
        let mut left = self.position;
        let mut buffer = vec![0; DISCARD_BYTES];
        while left > 0 {
            let wanted = buffer.len().min(usize::try_from(left).unwrap_or(usize::MAX));
            match self.body.read(&mut buffer[..wanted])? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                count => left -= count as u64,
            }
        }
        Ok(())
    }

    /// Fills a buffer, with restarts after a broken connection or an early end.
    fn fill(&mut self, mut buffer: &mut [u8]) -> io::Result<()> {
        while !buffer.is_empty() {
            match self.body.read(buffer) {
                Ok(count @ 1..) => {
                    self.position += count as u64;
                    buffer = &mut buffer[count..];
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                _ if (self.pool.retry_context.is_stopped)() => return Err(io::Error::other(XapiError::Interrupted)),
                Err(error) => self.restart(error)?,
                Ok(_) => {
                    let reason = self.end_reason();
                    self.restart(reason)?;
                }
            }
        }
        Ok(())
    }

    /// The reason of an early end: the error of the task, if the task has failed.
    fn end_reason(&self) -> io::Error {
        match self.task.poll() {
            Err(error @ XapiError::Refused { .. }) => io::Error::other(error),
            _ => io::ErrorKind::UnexpectedEof.into(),
        }
    }

    /// Checks that the task succeeded.
    pub fn finish(self) -> XapiResult<()> {
        self.task.wait(&mut |_| ()).map(drop)
    }

    /// Reads the rest, of unknown size up to `bytes_max` bytes.
    pub fn read_to_end(mut self, bytes_max: u64) -> XapiResult<Vec<u8>> {
        let mut bytes = Vec::new();
        let read = (&mut self.body).take(bytes_max + 1).read_to_end(&mut bytes);
        let host = self.pool.host();
        read.map_err(|source| XapiError::Broken {
            action: "read from",
            host: host_and_port(&host.0, host.1),
            source,
        })?;
        if bytes.len() as u64 > bytes_max {
            let detail = format!("it has more than {bytes_max} bytes");
            return Err(self.pool.invalid_answer(&self.what.label, &detail));
        }
        self.finish()?;
        Ok(bytes)
    }
}

impl Read for Download {
    /// Fills the whole buffer, since the caller knows the size.
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.fill(buffer)?;
        Ok(buffer.len())
    }
}

/// Which UUID and addresses an uploaded machine has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UploadIdentity {
    /// The UUID and addresses in the archive.
    Kept,
    /// New UUID and addresses.
    New,
}

/// A running upload.
pub struct Upload {
    connection: Connection,
    task: Task,
}

impl Pool {
    /// Starts to send a machine in an XVA. Its disks are created in `storage`.
    ///
    /// No data is sent before a host has accepted the request, since a host may redirect to another host.
    pub fn upload_machine(self: &Arc<Self>, storage: &Reference, identity: UploadIdentity) -> XapiResult<Upload> {
        let query = [
            ("sr_id", storage.0.clone()),
            ("restore", (identity == UploadIdentity::Kept).to_string()),
            ("force", "false".to_owned()),
        ];
        let headers = ["Content-Type: application/octet-stream".to_owned()];
        with_valid_session(|| {
            let task = Task::new(self, "holdfast", "import of a machine")?;
            let (connection, _) = self.request("PUT", "/import", &query, "import of a machine", &task, &headers)?;
            Ok(Upload { connection, task })
        })
    }
}

impl Upload {
    /// Sends all of the bytes.
    pub fn send(&mut self, bytes: &[u8]) -> XapiResult<()> {
        let sent = self.connection.send(bytes);
        sent.map_err(|error| self.reason(error))
    }

    /// Waits for the task after all data was sent, and returns the machine.
    pub fn finish(mut self, progress: &mut dyn FnMut(u16)) -> XapiResult<Reference> {
        let ended = self.connection.end_sending();
        // The pool's error has more details than the error of the broken connection.
        let result = self.task.wait(progress)?;
        ended?;
        reference_in(&result).ok_or_else(|| self.task.invalid_answer("its result has no machine"))
    }

    /// Cancels the upload. The pool removes the incomplete machine.
    pub fn cancel(self) {
        drop(self.connection);
        self.task.cancel();
    }

    /// The reason of a failed write: the error of the task, if the task has failed.
    fn reason(&self, error: XapiError) -> XapiError {
        match self.task.poll() {
            Err(reason @ XapiError::Refused { .. }) => reason,
            _ => error,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::host_of;

    #[test]
    fn redirections_lead_to_https_only() {
        let host = |location: &str| host_of(location, 443);
        assert_eq!(
            host("https://10.0.0.2/export_raw_vdi?a=b"),
            Some(("10.0.0.2".to_owned(), 443))
        );
        assert_eq!(host("https://[fd00::2]:8443?a"), Some(("fd00::2".to_owned(), 8443)));
        for wrong in ["http://10.0.0.2/", "https:///x", "/export", ""] {
            assert_eq!(host(wrong), None, "{wrong}");
        }
    }
}
