//! An export as a readable device.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use holdfast_block::{BlockDevice, ExtentKind, ExtentList, Request, RequestKind};

use super::call::{Call, CommandWithData};
use super::command::ClientCommand;
use super::connect::open;
use super::connection::Connection;
use super::error::Loss;
use super::export::ExportInfo;
use super::read_ahead::ReadAhead;
use super::uri::{NbdUri, Security};
use super::{ALLOCATION, Endpoint, Error, ExportContent, NbdOptions, Result};

/// Time limit of each further connection: a busy server may not accept it for long.
const FURTHER_CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// Requests without data that one operation has in flight at a time.
const WINDOW: usize = 16;
/// Longest unaligned read that uses a bounce buffer.
const BOUNCE_BYTES_MAX: u64 = 128 << 10;

/// An export of an NBD server, read by any number of threads at once over one or several connections.
///
/// A lost connection stays lost: every request in flight and every later one fails with [`Error::Lost`], until
/// [`reconnect`](Self::reconnect).
pub struct NbdDevice {
    endpoint: Endpoint,
    options: NbdOptions,
    export: ExportInfo,
    connections: RwLock<Vec<Arc<Connection>>>,
    rotation: AtomicUsize,
    pub(super) read_aheads: Vec<(String, ReadAhead)>,
}

impl std::fmt::Debug for NbdDevice {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        to.debug_struct("NbdDevice")
            .field("endpoint", &self.endpoint)
            .field("export", &self.export)
            .field("connection_count", &self.connection_count())
            .finish_non_exhaustive()
    }
}

/// Closes the connections that a device had when this stopper was created.
#[derive(Clone)]
pub struct NbdStopper(Vec<Arc<Connection>>);

impl NbdStopper {
    /// Closes the connections. Waiting and later requests fail at once.
    pub fn stop(&self) {
        for connection in &self.0 {
            // An error means that the connection is closed already.
            let _gone = connection.disconnect(Loss::Abandoned);
        }
    }
}

impl NbdDevice {
    /// Connects to `export`; the default export has an empty name.
    ///
    /// Further connections are made if the server allows several. If one fails, the device works with fewer.
    pub fn connect(endpoint: &Endpoint, export: &str, options: NbdOptions) -> Result<Self> {
        let first = open(endpoint, export, &options, options.connect_timeout)?;
        let info = first.export().clone();
        let read_aheads = first
            .contexts()
            .iter()
            .map(|context| (context.name.clone(), ReadAhead::default()));
        let device = Self {
            endpoint: endpoint.clone(),
            read_aheads: read_aheads.collect(),
            connections: RwLock::new(vec![Arc::new(first)]),
            rotation: AtomicUsize::new(0),
            export: info,
            options,
        };
        device.add_connections(FURTHER_CONNECT_TIMEOUT.min(device.options.connect_timeout));
        Ok(device)
    }

    /// Connects to `uri`.
    pub fn connect_to(uri: &NbdUri, options: NbdOptions) -> Result<Self> {
        if uri.security == Security::Tls {
            return Err(Error::Unsupported {
                server: uri.endpoint.to_string(),
                what: "TLS (nbds)",
                detail: "TLS URIs are not supported; use an encrypted tunnel",
            });
        }
        Self::connect(&uri.endpoint, &uri.export, options)
    }

    /// A handle that closes the connections, even while other threads wait for replies.
    pub fn stopper(&self) -> NbdStopper {
        let connections = self.connections.read().unwrap_or_else(PoisonError::into_inner);
        NbdStopper(connections.clone())
    }

    /// The server's description of the export.
    pub fn export(&self) -> &ExportInfo {
        &self.export
    }

    /// Names of the available metadata contexts: those that were requested, and `base:allocation` if offered.
    pub fn context_names(&self) -> impl Iterator<Item = &str> {
        self.read_aheads.iter().map(|(name, _)| name.as_str())
    }

    /// Number of connections in use, including lost ones.
    pub fn connection_count(&self) -> usize {
        self.connections.read().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// Replaces lost connections. Requests that were in flight have failed and are not repeated.
    ///
    /// Fails if the server now offers a different export under this name.
    pub fn reconnect(&self) -> Result<()> {
        let lost = |connection: &Arc<Connection>| connection.is_lost();
        let mut connected = {
            let connections = self.connections.read().unwrap_or_else(PoisonError::into_inner);
            if !connections.iter().any(lost) {
                return Ok(());
            }
            connections.clone()
        };
        connected.retain(|connection| !connection.is_lost());
        if connected.is_empty() {
            let first = open(
                &self.endpoint,
                self.export.name(),
                &self.options,
                self.options.connect_timeout,
            )?;
            self.check_same(&first)?;
            connected.push(Arc::new(first));
        }
        // The server may be another one, with different block status.
        self.invalidate();
        *self.connections.write().unwrap_or_else(PoisonError::into_inner) = connected;
        self.add_connections(FURTHER_CONNECT_TIMEOUT.min(self.options.connect_timeout));
        Ok(())
    }

    /// Connects up to the requested number of connections, if the server allows several.
    fn add_connections(&self, timeout: Duration) {
        if !self.export.is_multi_connection() {
            return;
        }
        while self.connection_count() < self.options.connection_count_max {
            // Further connections are an optimization: the server may limit their number.
            let Ok(further) = open(&self.endpoint, self.export.name(), &self.options, timeout) else {
                return;
            };
            if self.check_same(&further).is_err() {
                return;
            }
            let mut connections = self.connections.write().unwrap_or_else(PoisonError::into_inner);
            connections.push(Arc::new(further));
        }
    }

    fn check_same(&self, further: &Connection) -> Result<()> {
        let changed = |what, before: String, now: String| Error::Changed {
            server: self.endpoint.to_string(),
            export: self.export.name().to_owned(),
            what,
            before,
            now,
        };
        let (before, now) = (&self.export, further.export());
        if before.size_bytes() != now.size_bytes() {
            let sizes = [before, now].map(|export| format!("{} bytes", export.size_bytes()));
            let [before, now] = sizes;
            return Err(changed("the size", before, now));
        }
        if before.flags() != now.flags() || before.block_sizes() != now.block_sizes() {
            let abilities = [before, now].map(|export| format!("{:?}, {:?}", export.flags(), export.block_sizes()));
            let [before, now] = abilities;
            return Err(changed("what it can do", before, now));
        }
        let names: Vec<&str> = further.contexts().iter().map(|context| context.name.as_str()).collect();
        let known: Vec<&str> = self.context_names().collect();
        if known.iter().any(|name| !names.contains(name)) {
            return Err(changed("the metadata contexts", known.join(", "), names.join(", ")));
        }
        Ok(())
    }

    /// The connection with the fewest calls in progress.
    pub(super) fn least_busy(&self) -> Arc<Connection> {
        let connections = self.connections.read().unwrap_or_else(PoisonError::into_inner);
        let count = connections.len();
        if count == 1 {
            return connections[0].clone();
        }
        let start = self.rotation.fetch_add(1, Ordering::Relaxed);
        let rotated = (0..count).map(|number| &connections[(start + number) % count]);
        let least = rotated.min_by_key(|connection| (connection.is_lost(), connection.call_count()));
        least.expect("there is at least one connection").clone()
    }

    /// Discards all cached block status.
    pub(super) fn invalidate(&self) {
        self.read_aheads
            .iter()
            .for_each(|(_, read_ahead)| read_ahead.invalidate());
    }

    pub(super) fn content(&self) -> ExportContent {
        self.options.content
    }

    pub(super) fn server(&self) -> String {
        self.endpoint.to_string()
    }

    /// Maximum number of bytes that one request reads or writes.
    fn piece_bytes(&self) -> u64 {
        let sizes = self.export.block_sizes();
        let minimum = u64::from(sizes.minimum_bytes);
        let wished = u64::from(self.options.piece_bytes) / minimum * minimum;
        wished.clamp(minimum, u64::from(sizes.payload_max_bytes).max(minimum))
    }

    /// Splits a request with data into pieces, and returns how many may be in flight.
    pub(super) fn pieces(&self, request: Request) -> (impl Iterator<Item = Request> + use<>, usize) {
        let piece_bytes = self.piece_bytes();
        let window = (self.options.in_flight_bytes / piece_bytes).clamp(1, 1024);
        (split_request(request, piece_bytes), holdfast_block::to_usize(window))
    }

    /// Runs commands without data.
    pub(super) fn run_plain(&self, commands: impl Iterator<Item = ClientCommand>) -> Result<()> {
        let connection = self.least_busy();
        let call = Call::new(&connection, &mut [], 0)?;
        call.run(
            commands.map(|command| -> CommandWithData<'static> { (command, &[]) }),
            WINDOW,
        )?;
        Ok(())
    }

    /// Reads whole blocks of the server.
    pub(super) fn read_blocks(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        if buffer.is_empty() {
            return Ok(());
        }
        let (pieces, window) = self.pieces(Request::new(RequestKind::Read, offset, buffer.len() as u64));
        let connection = self.least_busy();
        let call = Call::new(&connection, buffer, offset)?;
        call.run(
            pieces.map(|piece| -> CommandWithData<'static> { (ClientCommand::of(piece), &[]) }),
            window,
        )?;
        Ok(())
    }

    /// The whole blocks of the server that `range` touches; the last one may end with the export.
    pub(super) fn blocks_around(&self, range: &Range<u64>) -> Range<u64> {
        let minimum = u64::from(self.export.block_sizes().minimum_bytes);
        let end = range.end.next_multiple_of(minimum).min(self.export.size_bytes());
        range.start / minimum * minimum..end
    }

    /// Reads any range of the export.
    pub(super) fn read_unaligned(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        let end = offset + buffer.len() as u64;
        let blocks = self.blocks_around(&(offset..end));
        if blocks == (offset..end) {
            return self.read_blocks(buffer, offset);
        }
        if blocks.end - blocks.start <= BOUNCE_BYTES_MAX {
            let mut bounce = vec![0; holdfast_block::to_usize(blocks.end - blocks.start)];
            self.read_blocks(&mut bounce, blocks.start)?;
            let from = holdfast_block::to_usize(offset - blocks.start);
            buffer.copy_from_slice(&bounce[from..from + buffer.len()]);
            return Ok(());
        }
        // A long read: whole blocks are read directly, partial blocks at both ends separately.
        let minimum = u64::from(self.export.block_sizes().minimum_bytes);
        let first = offset.next_multiple_of(minimum);
        let last = end / minimum * minimum;
        let (head, rest) = buffer.split_at_mut(holdfast_block::to_usize(first - offset));
        let (middle, tail) = rest.split_at_mut(holdfast_block::to_usize(last - first));
        self.read_blocks(middle, first)?;
        if !head.is_empty() {
            self.read_unaligned(head, offset)?;
        }
        if !tail.is_empty() {
            self.read_unaligned(tail, last)?;
        }
        Ok(())
    }
}

/// Splits a request into pieces of at most `length_max` bytes.
pub(super) fn split_request(request: Request, length_max: u64) -> impl Iterator<Item = Request> + use<> {
    let end = request.offset + request.length;
    let mut at = request.offset;
    std::iter::from_fn(move || {
        (at < end).then(|| {
            let length = length_max.min(end - at);
            let piece = Request::new(request.kind, at, length);
            at += length;
            piece
        })
    })
}

impl BlockDevice for NbdDevice {
    fn size_bytes(&self) -> u64 {
        self.export.size_bytes()
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> holdfast_block::Result<()> {
        self.check_bounds(offset, buffer.len() as u64)?;
        if buffer.is_empty() {
            return Ok(());
        }
        Ok(self.read_unaligned(buffer, offset)?)
    }

    fn extents(&self, range: Range<u64>, extent_count_max: usize) -> holdfast_block::Result<ExtentList> {
        self.check_bounds(range.start, range.end.saturating_sub(range.start))?;
        let mut list = ExtentList::new(range.start, extent_count_max);
        if range.is_empty() {
            return Ok(list);
        }
        if !self.context_names().any(|name| name == ALLOCATION) {
            list.push(range.end - range.start, ExtentKind::Data);
            return Ok(list);
        }
        self.fill(&mut list, range)?;
        Ok(list)
    }

    fn block_size_bytes(&self) -> u32 {
        self.export.block_sizes().preferred_bytes
    }
}
