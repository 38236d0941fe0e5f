//! The model's NBD server, which uses that of Holdfast.

use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::JoinHandle;

use holdfast_block::{BlockDevice, BlockDeviceMut, Error, ExtentKind, ExtentList, Result, SystemClock, to_usize};
use holdfast_serve::nbd::{
    Event, Export, ExportDevice, ExportEntry, Exports, Limits, Server, ServerOptions, ServerResources, Socket,
    TlsPolicy, ZeroSpeed,
};
use rustix::net::Shutdown;

use crate::content::gone;
use crate::node::Driver;
use crate::state::State;

/// A running server. Dropping it disconnects its clients; the state must not be locked then.
pub(crate) struct NbdServer {
    listener: Arc<UnixListener>,
    thread: Option<JoinHandle<()>>,
}

impl NbdServer {
    /// Serves the exports of `state` on a listening socket.
    pub(crate) fn start(listener: OwnedFd, state: &Weak<Mutex<State>>) -> std::io::Result<Self> {
        let listener = Arc::new(UnixListener::from(listener));
        let server = Server::new(ServerOptions {
            exports: Arc::new(ExportsOfState(Weak::clone(state))),
            resources: ServerResources::new(Limits::default()),
            tls: TlsPolicy::Off,
            clock: Arc::new(SystemClock::new()),
            events: Arc::new(|_: &Event<'_>| {}),
        });
        let accepting = Arc::clone(&listener);
        let accept = move || {
            while let Ok((stream, _)) = accepting.accept() {
                if server.serve(Socket::Unix(stream)).is_err() {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name("model-nbd".to_owned()).spawn(accept)?;
        Ok(Self {
            listener,
            thread: Some(thread),
        })
    }
}

impl Drop for NbdServer {
    fn drop(&mut self) {
        // After the shutdown the listener accepts no more clients: the thread ends, and stops the server.
        rustix::net::shutdown(&*self.listener, Shutdown::Both).ok();
        if let Some(thread) = self.thread.take() {
            // A panic of that thread was already reported.
            drop(thread.join());
        }
    }
}

struct ExportsOfState(Weak<Mutex<State>>);

impl Exports for ExportsOfState {
    fn list(&self) -> Vec<ExportEntry> {
        Vec::new()
    }

    fn open(&self, name: &str) -> Result<Option<Arc<Export>>> {
        let Some(shared) = self.0.upgrade() else {
            return Ok(None);
        };
        let state = shared.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(exported) = state.exports.iter().find(|exported| exported.name == name) else {
            return Ok(None);
        };
        let Some(node) = state.nodes.get(&exported.node) else {
            return Ok(None);
        };
        let device = ExportedNode {
            state: Weak::clone(&self.0),
            export: exported.id.clone(),
            node: exported.node.clone(),
            size_bytes: node.size_bytes,
            generation: state.generation,
        };
        let device = if exported.is_writable {
            ExportDevice::Writable(Arc::new(device))
        } else {
            ExportDevice::ReadOnly(Arc::new(device))
        };
        let mut export = Export::new(name, device);
        if matches!(node.driver, Driver::NullCo) {
            export = export.with_zero_speed(ZeroSpeed::Quick);
        }
        for (node, bitmap) in &exported.bitmaps {
            if let Some(bitmap) = state.nodes.get(node).and_then(|node| node.bitmap(bitmap)) {
                export = export.with_bitmap(&bitmap.name, Arc::new(bitmap.dirty.clone()));
            }
        }
        Ok(Some(Arc::new(export)))
    }
}

/// A node as a device, while it is exported.
struct ExportedNode {
    state: Weak<Mutex<State>>,
    export: String,
    node: String,
    size_bytes: u64,
    generation: u64,
}

impl ExportedNode {
    fn with<T>(
        &self,
        action: &'static str,
        offset: u64,
        work: impl FnOnce(&mut State) -> std::io::Result<T>,
    ) -> Result<T> {
        let failed = |source| Error::Io { action, offset, source };
        let shared = self.state.upgrade().ok_or_else(|| failed(gone()))?;
        let mut state = shared.lock().unwrap_or_else(PoisonError::into_inner);
        if !state.exports.iter().any(|exported| exported.id == self.export) || state.generation != self.generation {
            return Err(failed(gone()));
        }
        work(&mut state).map_err(failed)
    }
}

impl BlockDevice for ExportedNode {
    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        self.check_bounds(offset, buffer.len() as u64)?;
        self.with("read", offset, |state| state.read(&self.node, buffer, offset))
    }

    fn extents(&self, range: Range<u64>, extent_count_max: usize) -> Result<ExtentList> {
        let length = range.end.saturating_sub(range.start);
        self.check_bounds(range.start, length)?;
        let mut list = ExtentList::new(range.start, extent_count_max);
        list.push(length, ExtentKind::Data);
        Ok(list)
    }
}

impl BlockDeviceMut for ExportedNode {
    fn write_at(&self, data: &[u8], offset: u64) -> Result<()> {
        self.check_bounds(offset, data.len() as u64)?;
        self.with("write", offset, |state| state.write(&self.node, data, offset))
    }

    fn write_zeroes(&self, range: Range<u64>) -> Result<()> {
        let length = range.end.saturating_sub(range.start);
        self.check_bounds(range.start, length)?;
        self.with("write zeroes", range.start, |state| {
            match state.nodes.get_mut(&self.node) {
                // A null node stores nothing, and the length of a request is not limited.
                Some(node) if matches!(node.driver, Driver::NullCo) => {
                    node.mark(range.start, length);
                    Ok(())
                }
                _ => state.write(&self.node, &vec![0; to_usize(length)], range.start),
            }
        })
    }

    fn trim(&self, range: Range<u64>) -> Result<()> {
        let length = range.end.saturating_sub(range.start);
        self.check_bounds(range.start, length)?;
        self.with("discard", range.start, |state| {
            state.discard(&self.node, range.start, length)
        })
    }

    fn flush(&self) -> Result<()> {
        Ok(())
    }
}
