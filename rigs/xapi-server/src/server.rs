//! The server: its listeners, its threads, and its interface for tests.

use std::collections::BTreeMap;
use std::io;
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use holdfast_block::to_usize;
use rustls::ServerConnection;
use serde_json::json;

use crate::call::{perform, vm};
use crate::database::{NULL, flag, number, text, texts};
use crate::failure::Failure;
use crate::faults::Faults;
use crate::habits::{Habits, NbdPurpose};
use crate::http::Connection;
use crate::info::{NewVm, TaskInfo, VdiInfo, VmInfo};
use crate::pool::{ADDRESSES, PASSWORD, Pool, USER, host_number, new_identity};
use crate::{handlers, nbd};

/// Number of attempts to find a port that is free on the addresses of both hosts.
const PORT_ATTEMPT_COUNT: u32 = 50;

/// A pool of two hosts that answers calls until it is dropped.
pub struct Server {
    pool: Arc<Pool>,
    threads: Arc<Threads>,
    doors: Vec<JoinHandle<()>>,
    nbd: Vec<holdfast_serve::nbd::Server>,
}

/// The open connections and their threads.
#[derive(Default)]
struct Threads {
    open: Mutex<BTreeMap<u64, TcpStream>>,
    running: Mutex<Vec<JoinHandle<()>>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Listens on the addresses of both hosts, on one port that the system chooses.
pub(crate) fn on_both_hosts<T>(listen: impl Fn((Ipv4Addr, u16)) -> io::Result<(T, u16)>) -> io::Result<([T; 2], u16)> {
    let mut last = None;
    for _ in 0..PORT_ATTEMPT_COUNT {
        let (first, port) = listen((ADDRESSES[0], 0))?;
        match listen((ADDRESSES[1], port)) {
            Ok((second, _)) => return Ok(([first, second], port)),
            Err(error) => last = Some(error),
        }
    }
    Err(last.unwrap_or_else(|| io::Error::other("no port is free")))
}

impl Server {
    /// Starts a pool whose master is 127.0.0.1 and whose slave is 127.0.0.2, on the same port, with TLS.
    ///
    /// The data of disks is stored in files in `folder`, which must exist.
    pub fn start(folder: &Path) -> io::Result<Self> {
        let (listeners, port) = on_both_hosts(|address| {
            let listener = TcpListener::bind(SocketAddr::from(address))?;
            let port = listener.local_addr()?.port();
            Ok((listener, port))
        })?;
        let (nbd_listeners, nbd_port) = nbd::listen()?;
        let identities = [Arc::new(new_identity(0)?), Arc::new(new_identity(1)?)];
        let pool = Arc::new(Pool::new(folder, port, nbd_port, identities));
        let threads = Arc::new(Threads::default());
        let mut doors = Vec::new();
        for listener in listeners {
            let (pool, threads) = (Arc::clone(&pool), Arc::clone(&threads));
            let name = "xapi-listener".to_owned();
            doors.push(
                std::thread::Builder::new()
                    .name(name)
                    .spawn(move || welcome(&pool, &threads, &listener))?,
            );
        }
        Ok(Self {
            nbd: nbd::start(&pool, nbd_listeners)?,
            pool,
            threads,
            doors,
        })
    }

    /// Address and port of the initial master: `127.0.0.1:PORT`.
    pub fn address(&self) -> String {
        format!("{}:{}", ADDRESSES[0], self.pool.port)
    }

    /// Address and port of the initial slave: `127.0.0.2:PORT`.
    pub fn slave_address(&self) -> String {
        format!("{}:{}", ADDRESSES[1], self.pool.port)
    }

    /// SHA-256 of the certificate of 127.0.0.1 as pairs of digits with colons, like the output of `openssl x509
    /// -fingerprint -sha256`.
    pub fn fingerprint(&self) -> String {
        self.pool.identity(0).fingerprint()
    }

    /// SHA-256 of the certificate of 127.0.0.2 in the same form.
    pub fn slave_fingerprint(&self) -> String {
        self.pool.identity(1).fingerprint()
    }

    /// The certificate of 127.0.0.1.
    pub fn certificate_pem(&self) -> String {
        self.pool.identity(0).certificate_pem()
    }

    /// The certificate of 127.0.0.2.
    pub fn slave_certificate_pem(&self) -> String {
        self.pool.identity(1).certificate_pem()
    }

    /// The user name of the only account.
    pub fn user(&self) -> &str {
        USER
    }

    /// The password of the account.
    pub fn password(&self) -> &str {
        PASSWORD
    }

    /// The UUID of the storage that both hosts see, which is the default.
    pub fn shared_sr(&self) -> String {
        let state = self.pool.state();
        let record = state
            .database
            .get("SR", &state.shared_sr)
            .expect("storage is never removed");
        text(record, "uuid").to_owned()
    }

    /// The UUID of the storage that only the slave sees.
    pub fn slave_sr(&self) -> String {
        let state = self.pool.state();
        let record = state
            .database
            .get("SR", &state.slave_sr)
            .expect("storage is never removed");
        text(record, "uuid").to_owned()
    }

    /// The UUID of the network of all hosts.
    pub fn network(&self) -> String {
        let state = self.pool.state();
        let record = state
            .database
            .get("network", &state.network)
            .expect("the network is there from the beginning");
        text(record, "uuid").to_owned()
    }

    /// Creates a machine; returns its UUID.
    pub fn add_vm(&self, vm: &NewVm) -> String {
        let mut state = self.pool.state();
        let reference = vm::add(&self.pool, &mut state, vm).expect("the disks can be made");
        let record = state.database.get("VM", &reference).expect("it was just made");
        text(record, "uuid").to_owned()
    }

    /// Writes `bytes` at `offset` of the disk `device` like the guest, with changed block tracking.
    pub fn write_disk(&self, vm_uuid: &str, device: &str, offset: u64, bytes: &[u8]) {
        let mut state = self.pool.state();
        let vdi = disk_of(&state.database, vm_uuid, device).expect("the machine has this disk");
        let disk = state.disk_mut(&vdi).expect("a disk has bytes");
        disk.write(offset, bytes).expect("the disk can be written");
    }

    /// The content of the disk `device` of a machine.
    pub fn disk_bytes(&self, vm_uuid: &str, device: &str) -> Vec<u8> {
        let vdi = disk_of(&self.pool.state().database, vm_uuid, device).expect("the machine has this disk");
        self.bytes_of(&vdi)
    }

    /// The content of the disk with this UUID.
    pub fn vdi_bytes(&self, vdi_uuid: &str) -> Vec<u8> {
        let vdi = self
            .pool
            .state()
            .database
            .by_uuid("VDI", vdi_uuid)
            .expect("there is this disk");
        self.bytes_of(&vdi)
    }

    fn bytes_of(&self, vdi: &str) -> Vec<u8> {
        let disk = self.pool.state().disk(vdi).expect("a disk has bytes").clone();
        let mut bytes = vec![0; to_usize(disk.size_bytes)];
        let file = disk.file().expect("the data was not destroyed");
        file.read_exact_at(&mut bytes, 0).expect("the disk can be read");
        bytes
    }

    /// Sets the power state: `Running`, `Halted`, `Paused` or `Suspended`.
    pub fn set_power_state(&self, vm_uuid: &str, power_state: &str) {
        let mut state = self.pool.state();
        let vm = state.database.by_uuid("VM", vm_uuid).expect("there is this machine");
        vm::set_power_state(&mut state, &vm, power_state).expect("its devices are there");
    }

    /// Sets the vendor of the hosts' processors (initially `GenuineIntel`). Machines that were started on processors of
    /// another vendor cannot be resumed.
    pub fn set_processors(&self, vendor: &str) {
        self.pool.state().set_processors(vendor);
    }

    /// The UUID of the disk with the memory of a suspended machine.
    pub fn memory_of(&self, vm_uuid: &str) -> Option<String> {
        let state = self.pool.state();
        let vm = state.database.by_uuid("VM", vm_uuid).ok()?;
        let vdi = text(state.database.get("VM", &vm).ok()?, "suspend_VDI");
        let record = state.database.get("VDI", vdi).ok()?;
        Some(text(record, "uuid").to_owned())
    }

    /// The MAC addresses of a machine.
    pub fn addresses_of(&self, vm_uuid: &str) -> Vec<String> {
        let state = self.pool.state();
        let Ok(vm) = state.database.by_uuid("VM", vm_uuid) else {
            return Vec::new();
        };
        let vifs = state.database.all("VIF").filter(|(_, vif)| text(vif, "VM") == vm);
        vifs.map(|(_, vif)| text(vif, "MAC").to_owned()).collect()
    }

    /// Adds a tag to a machine, like a user.
    pub fn add_tag(&self, vm_uuid: &str, tag: &str) {
        let mut state = self.pool.state();
        let vm = state.database.by_uuid("VM", vm_uuid).expect("there is this machine");
        state
            .database
            .append("VM", &vm, "tags", tag)
            .expect("it was just found");
    }

    /// Changes a field of an object, like a user.
    pub fn set_field(&self, class: &'static str, uuid: &str, field: &str, value: serde_json::Value) {
        let mut state = self.pool.state();
        let reference = state.database.by_uuid(class, uuid).expect("there is this object");
        state
            .database
            .set(class, &reference, field, value)
            .expect("it was just found");
    }

    /// Calls a method such as `VDI.clone`, like a user.
    ///
    /// # Errors
    /// The pool's error.
    pub fn call(&self, method: &str, arguments: &[serde_json::Value]) -> Result<serde_json::Value, Vec<String>> {
        let mut state = self.pool.state();
        perform(&self.pool, &mut state, "", method, arguments).map_err(|failure| failure.words())
    }

    /// Calls `VM.resume`, like a user.
    ///
    /// # Errors
    /// The pool's error.
    pub fn resume(&self, vm_uuid: &str) -> Result<(), Vec<String>> {
        let mut state = self.pool.state();
        let words = |failure: Failure| failure.words();
        let vm = state.database.by_uuid("VM", vm_uuid).map_err(words)?;
        let arguments = [json!(vm), json!(false), json!(false)];
        let done = perform(&self.pool, &mut state, "", "VM.resume", &arguments);
        done.map(drop).map_err(words)
    }

    /// Calls `VM.destroy`, and destroys all disks of the machine, as before a restore.
    ///
    /// # Errors
    /// The pool's error.
    pub fn destroy(&self, vm_uuid: &str) -> Result<(), Vec<String>> {
        let mut state = self.pool.state();
        let words = |failure: Failure| failure.words();
        let vm = state.database.by_uuid("VM", vm_uuid).map_err(words)?;
        let record = state.database.get("VM", &vm).map_err(words)?.clone();
        let of_vbds = texts(&record, "VBDs").into_iter().filter_map(|vbd| {
            let vbd = state.database.get("VBD", &vbd).ok()?;
            (text(vbd, "type") == "Disk").then(|| text(vbd, "VDI").to_owned())
        });
        let vdis: Vec<String> = of_vbds.chain([text(&record, "suspend_VDI").to_owned()]).collect();
        perform(&self.pool, &mut state, "", "VM.destroy", &[json!(vm)]).map_err(words)?;
        for vdi in vdis.iter().filter(|vdi| *vdi != NULL) {
            perform(&self.pool, &mut state, "", "VDI.destroy", &[json!(vdi)]).map_err(words)?;
        }
        Ok(())
    }

    /// All machines, templates and snapshots.
    pub fn vms(&self) -> Vec<VmInfo> {
        let state = self.pool.state();
        let info = |(reference, record): (&String, &crate::database::Record)| VmInfo {
            reference: reference.clone(),
            uuid: text(record, "uuid").to_owned(),
            name: text(record, "name_label").to_owned(),
            power_state: text(record, "power_state").to_owned(),
            is_a_snapshot: flag(record, "is_a_snapshot"),
            snapshot_of: text(record, "snapshot_of").to_owned(),
        };
        state.database.all("VM").map(info).collect()
    }

    /// All disks and snapshots of disks.
    pub fn vdis(&self) -> Vec<VdiInfo> {
        let state = self.pool.state();
        let info = |(reference, record): (&String, &crate::database::Record)| VdiInfo {
            reference: reference.clone(),
            uuid: text(record, "uuid").to_owned(),
            name: text(record, "name_label").to_owned(),
            kind: text(record, "type").to_owned(),
            size_bytes: number(record, "virtual_size"),
            is_a_snapshot: flag(record, "is_a_snapshot"),
            cbt_enabled: flag(record, "cbt_enabled"),
            snapshot_of: text(record, "snapshot_of").to_owned(),
        };
        state.database.all("VDI").map(info).collect()
    }

    /// Tasks that were not destroyed.
    pub fn tasks(&self) -> Vec<TaskInfo> {
        let state = self.pool.state();
        let info = |(reference, record): (&String, &crate::database::Record)| TaskInfo {
            reference: reference.clone(),
            name: text(record, "name_label").to_owned(),
            status: text(record, "status").to_owned(),
            error_info: texts(record, "error_info"),
        };
        state.database.all("task").map(info).collect()
    }

    /// Number of sessions that were not closed.
    pub fn session_count(&self) -> usize {
        self.pool.state().database.all("session").count()
    }

    /// The record of any object, such as `("VM", uuid)`.
    pub fn record(&self, class: &str, uuid: &str) -> Option<serde_json::Value> {
        let class = crate::schema::class(class)?;
        let state = self.pool.state();
        let reference = state.database.by_uuid(class, uuid).ok()?;
        let record = state.database.get(class, &reference).ok()?;
        Some(serde_json::Value::Object(record.clone()))
    }

    /// The faults that can be injected.
    pub fn faults(&self) -> &Faults {
        &self.pool.faults
    }

    /// Changes the behaviour of this pool where pools differ.
    pub fn change_habits(&self, change: impl FnOnce(&mut Habits)) {
        self.pool.change_habits(change);
    }

    /// Changes the purpose of the network.
    pub fn set_nbd_purpose(&self, purpose: NbdPurpose) {
        self.pool.set_nbd_purpose(purpose);
    }

    /// Ends all sessions.
    pub fn end_sessions(&self) {
        self.pool.state().end_sessions();
    }

    /// Makes the other host the master.
    pub fn move_master(&self) {
        let mut state = self.pool.state();
        state.master = 1 - state.master;
        let master = serde_json::json!(state.hosts[state.master]);
        let pools: Vec<String> = state.database.all("pool").map(|(pool, _)| pool.clone()).collect();
        for pool in pools {
            state
                .database
                .set("pool", &pool, "master", master.clone())
                .expect("it was just listed");
        }
    }

    /// Creates a new certificate for 127.0.0.1, as after a new installation; NBD keeps the old one.
    pub fn change_certificate(&self) -> io::Result<()> {
        self.pool.change_identity(0)
    }

    /// The calls so far, in order: methods, and the request lines of transfers (`GET /export_raw_vdi?...`).
    pub fn calls(&self) -> Vec<String> {
        self.pool.state().calls.clone()
    }

    /// Clears the list of calls.
    pub fn forget_calls(&self) {
        self.pool.state().calls.clear();
    }
}

fn disk_of(database: &crate::database::Database, vm_uuid: &str, device: &str) -> Result<String, Failure> {
    let vm = database.by_uuid("VM", vm_uuid)?;
    let vbd = database
        .all("VBD")
        .find(|(_, record)| text(record, "VM") == vm && text(record, "device") == device);
    let by_number = || {
        // A disk that was never attached has no device name yet; its number determines the name that the guest would
        // use.
        let number = device.bytes().last().filter(u8::is_ascii_lowercase)? - b'a';
        database
            .all("VBD")
            .find(|(_, record)| text(record, "VM") == vm && text(record, "userdevice") == number.to_string())
    };
    let (_, record) = vbd
        .or_else(by_number)
        .ok_or_else(|| Failure::new("INVALID_DEVICE", &[device]))?;
    Ok(text(record, "VDI").to_owned())
}

impl Drop for Server {
    fn drop(&mut self) {
        self.pool.is_stopping.store(true, Ordering::Relaxed);
        for address in ADDRESSES {
            // This wakes the thread that waits for clients.
            drop(TcpStream::connect((address, self.pool.port)));
        }
        for door in self.doors.drain(..) {
            drop(door.join());
        }
        for stream in lock(&self.threads.open).values() {
            drop(stream.shutdown(Shutdown::Both));
        }
        let running: Vec<_> = lock(&self.threads.running).drain(..).collect();
        for thread in running {
            drop(thread.join());
        }
        self.nbd.clear();
    }
}

/// Accepts clients until the server stops.
fn welcome(pool: &Arc<Pool>, threads: &Arc<Threads>, listener: &TcpListener) {
    let mut number = 0;
    while let Ok((socket, _)) = listener.accept() {
        if pool.is_stopping() {
            return;
        }
        number += 1;
        // An error means that the client has disconnected.
        drop(take_in(pool, threads, socket, number));
    }
}

fn take_in(pool: &Arc<Pool>, threads: &Arc<Threads>, socket: TcpStream, number: u64) -> io::Result<()> {
    socket.set_nodelay(true)?;
    let host = host_number(socket.local_addr()?.ip());
    // Each listener counts separately: the number of the host makes the numbers unique.
    let number = number * 2 + host as u64;
    lock(&threads.open).insert(number, socket.try_clone()?);
    let tls = ServerConnection::new(Arc::clone(&pool.identity(host).config)).map_err(io::Error::other)?;
    let (pool, ours) = (Arc::clone(pool), Arc::clone(threads));
    let thread = std::thread::Builder::new()
        .name("xapi-client".to_owned())
        .spawn(move || {
            handlers::serve(&pool, host, &mut Connection::new(tls, socket));
            lock(&ours.open).remove(&number);
        })?;
    lock(&threads.running).push(thread);
    Ok(())
}
