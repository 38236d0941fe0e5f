//! A connection that waits in the queue of a monitor that serves one client at a time.
//!
//! QEMU accepts the next client of a `-qmp unix:` socket when the current one has disconnected. Until then, the
//! kernel queues connections. So a watchdog connects while the backup uses the monitor, is next in the queue, and
//! gets the monitor when the backup disconnects: either regularly, or because the kernel closes the files of a killed
//! process.

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use serde_json::Value;

use super::{MONITOR, Monitor, MonitorError, QmpCommand, QmpSocket, Result};
use crate::system::rights::Rights;
use crate::system::waits::Wait;

/// How long a command waits for its turn before it fails because another client uses the monitor.
const TURN_DEADLINE: Duration = Duration::from_secs(5);

/// A place in the queue of a monitor's clients. A command waits until QEMU accepts the connection, which then stays
/// open.
pub struct QueuedSocket {
    path: PathBuf,
    connection: Mutex<Option<QueuedConnection>>,
}

struct QueuedConnection {
    socket: QmpSocket,
    is_greeted: bool,
}

impl QueuedSocket {
    /// Joins the queue of the monitor at `path`.
    ///
    /// # Errors
    /// There is no socket, or no process listens.
    pub fn connect(path: &Path) -> Result<Self> {
        Ok(Self {
            connection: Mutex::new(Some(open_queued(path)?)),
            path: path.to_owned(),
        })
    }

    /// The rights of the program at the other end.
    pub(crate) fn rights(&self) -> std::io::Result<Rights> {
        let held = self.connection.lock().unwrap_or_else(PoisonError::into_inner);
        held.as_ref()
            .map_or(Ok(Rights::Own), |connection| connection.socket.rights())
    }
}

fn open_queued(path: &Path) -> Result<QueuedConnection> {
    let _wait = Wait::for_answer(MONITOR);
    let stream = UnixStream::connect(path).map_err(|source| MonitorError::Gone {
        during: format!("connecting to {}", path.display()),
        source: Some(source),
    })?;
    Ok(QueuedConnection {
        socket: QmpSocket::start(stream)?,
        is_greeted: false,
    })
}

impl Monitor for QueuedSocket {
    fn execute(&self, command: &QmpCommand) -> Result<Value> {
        let _wait = Wait::for_answer(MONITOR);
        let mut held = self.connection.lock().unwrap_or_else(PoisonError::into_inner);
        let mut connection = match held.take() {
            Some(connection) => connection,
            None => open_queued(&self.path)?,
        };
        if !connection.is_greeted {
            match connection.socket.greet(TURN_DEADLINE) {
                Ok(()) => connection.is_greeted = true,
                Err(error) => {
                    // After a timeout, the connection keeps its position in the queue.
                    *held = matches!(error, MonitorError::TimedOut { .. }).then_some(connection);
                    return Err(error);
                }
            }
        }
        let answer = connection.socket.execute(command);
        // The next command opens a new connection after a broken one.
        *held = (!matches!(answer, Err(MonitorError::Gone { .. }))).then_some(connection);
        answer
    }
}
