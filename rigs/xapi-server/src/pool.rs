//! The pool: its hosts, storage and network, and its running transfers and tasks.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use holdfast_block::{Clock, SystemClock};
use serde_json::{Value, json};

use crate::database::{Database, text};
use crate::disk::Disk;
use crate::failure::{Answer, Failure};
use crate::faults::Faults;
use crate::habits::{Habits, NbdPurpose};
use crate::identity::Identity;
use crate::rpc::MethodCall;

/// The user name of the only account.
pub(crate) const USER: &str = "root";
pub(crate) const PASSWORD: &str = "correct horse";

/// Addresses of the hosts, by number.
pub(crate) const ADDRESSES: [Ipv4Addr; 2] = [Ipv4Addr::LOCALHOST, Ipv4Addr::new(127, 0, 0, 2)];

/// The first day in dates of records: the server does not read the real clock.
const FIRST_DAY: u64 = 20_260_101;

/// A pool of two hosts.
pub(crate) struct Pool {
    state: Mutex<State>,
    habits: Mutex<Habits>,
    identities: Mutex<[Arc<Identity>; 2]>,
    pub(crate) faults: Faults,
    pub(crate) clock: SystemClock,
    pub(crate) is_stopping: AtomicBool,
    pub(crate) folder: PathBuf,
    /// The port of both hosts.
    pub(crate) port: u16,
    /// The NBD port, on the address of each host.
    pub(crate) nbd_port: u16,
}

/// The state that changes.
#[derive(Debug, Default)]
pub(crate) struct State {
    pub(crate) database: Database,
    pub(crate) disks: BTreeMap<String, Disk>,
    /// Number of transfers that use a disk, by its reference.
    pub(crate) users: BTreeMap<String, usize>,
    /// Tasks of `Async.` calls that do not report their result yet.
    pub(crate) pending: BTreeMap<String, Pending>,
    pub(crate) calls: Vec<String>,
    pub(crate) hosts: [String; 2],
    /// The number of the host that is the master.
    pub(crate) master: usize,
    pub(crate) network: String,
    pub(crate) shared_sr: String,
    pub(crate) slave_sr: String,
}

/// The task of an `Async.` call that is reported as pending.
#[derive(Debug)]
pub(crate) struct Pending {
    pub(crate) looks_left: u32,
    pub(crate) looks_total: u32,
    pub(crate) outcome: Outcome,
}

/// The future result of a pending task.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// The call was executed; its result is not reported yet.
    Done(Answer<Value>),
    /// The call is executed at the last poll.
    Waiting {
        /// The session of the call.
        session: String,
        /// The call, without `Async.`.
        call: MethodCall,
    },
}

impl Pool {
    pub(crate) fn new(folder: &Path, port: u16, nbd_port: u16, identities: [Arc<Identity>; 2]) -> Self {
        let pool = Self {
            state: Mutex::default(),
            habits: Mutex::default(),
            identities: Mutex::new(identities),
            faults: Faults::default(),
            clock: SystemClock::new(),
            is_stopping: AtomicBool::new(false),
            folder: folder.to_owned(),
            port,
            nbd_port,
        };
        pool.state().furnish();
        pool
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn habits(&self) -> Habits {
        self.habits.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn change_habits(&self, change: impl FnOnce(&mut Habits)) {
        change(&mut self.habits.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// The identity of the host with this number.
    pub(crate) fn identity(&self, host: usize) -> Arc<Identity> {
        let identities = self.identities.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(&identities[host])
    }

    /// Creates a new certificate for the host, as a new installation does.
    pub(crate) fn change_identity(&self, host: usize) -> io::Result<()> {
        let new = Arc::new(new_identity(host)?);
        self.identities.lock().unwrap_or_else(PoisonError::into_inner)[host] = new;
        Ok(())
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.is_stopping.load(Ordering::Relaxed)
    }

    /// A date for records: the seconds of the first day, then of the next.
    pub(crate) fn date(&self) -> String {
        let seconds = self.clock.now().as_secs();
        let (day, second) = (FIRST_DAY + seconds / 86_400, seconds % 86_400);
        format!("{day}T{:02}:{:02}:{:02}Z", second / 3600, second / 60 % 60, second % 60)
    }

    /// The path of the file with the data of the disk with this UUID.
    pub(crate) fn disk_path(&self, uuid: &str) -> PathBuf {
        self.folder.join(format!("{uuid}.raw"))
    }

    /// Sets the purpose of the network.
    pub(crate) fn set_nbd_purpose(&self, purpose: NbdPurpose) {
        let purpose = match purpose {
            NbdPurpose::Nbd => json!(["nbd"]),
            NbdPurpose::InsecureNbd => json!(["insecure_nbd"]),
            NbdPurpose::None => json!([]),
        };
        let mut state = self.state();
        let network = state.network.clone();
        let set = state.database.set("network", &network, "purpose", purpose);
        debug_assert!(set.is_ok(), "the network is there from the beginning");
    }
}

/// Creates an identity for the host with this number.
pub(crate) fn new_identity(host: usize) -> io::Result<Identity> {
    let name = ["xapi-stand-in-1.test", "xapi-stand-in-2.test"][host];
    Identity::new(name, ADDRESSES[host].octets())
}

/// The number of the host at `address`.
pub(crate) fn host_number(address: IpAddr) -> usize {
    usize::from(address != IpAddr::V4(ADDRESSES[0]))
}

impl State {
    /// Adds the objects that every pool has.
    fn furnish(&mut self) {
        let database = &mut self.database;
        self.network = database.add(
            "network",
            json!({"name_label": "Pool-wide network associated with eth0", "bridge": "xenbr0", "purpose": ["nbd"]}),
        );
        let sr = |name: &str, shared| {
            json!({
                "name_label": name, "shared": shared, "type": if shared { "nfs" } else { "ext" },
                "sm_config": {}, "other_config": {},
            })
        };
        self.shared_sr = database.add("SR", sr("Shared storage", true));
        self.slave_sr = database.add("SR", sr("Local storage of the slave", false));
        for (number, address) in ADDRESSES.iter().enumerate() {
            let metrics = database.add("host_metrics", json!({}));
            let name = format!("xapi-stand-in-{}", number + 1);
            let host = database.add(
                "host",
                json!({"name_label": name, "hostname": name, "address": address.to_string(), "metrics": metrics}),
            );
            let mac = format!("02:00:00:00:00:0{}", number + 1);
            database.add(
                "PIF",
                json!({"host": host, "network": self.network, "IP": address.to_string(), "MAC": mac}),
            );
            self.hosts[number] = host;
        }
        let places = [
            (self.hosts[0].clone(), self.shared_sr.clone()),
            (self.hosts[1].clone(), self.shared_sr.clone()),
            (self.hosts[1].clone(), self.slave_sr.clone()),
        ];
        for (host, sr) in places {
            let pbd = database.add("PBD", json!({"host": host, "SR": sr}));
            let linked = database
                .append("SR", &sr, "PBDs", &pbd)
                .and_then(|()| database.append("host", &host, "PBDs", &pbd));
            debug_assert!(linked.is_ok(), "both were just made");
        }
        for kind in ["nfs", "ext"] {
            let features =
                json!({"VDI_CREATE": 1, "VDI_DELETE": 1, "VDI_SNAPSHOT": 1, "VDI_CLONE": 1, "VDI_CONFIG_CBT": 1});
            database.add("SM", json!({"name_label": kind, "type": kind, "features": features}));
        }
        database.add(
            "pool",
            json!({"name_label": "stand-in", "master": self.hosts[0], "default_SR": self.shared_sr}),
        );
        self.set_processors("GenuineIntel");
    }

    /// Sets the vendor of the processors of all hosts.
    pub(crate) fn set_processors(&mut self, vendor: &str) {
        let info = json!({"cpu_count": "8", "socket_count": "1", "vendor": vendor});
        for class in ["pool", "host"] {
            let all: Vec<String> = self
                .database
                .all(class)
                .map(|(reference, _)| reference.clone())
                .collect();
            for reference in all {
                let set = self.database.set(class, &reference, "cpu_info", info.clone());
                debug_assert!(set.is_ok(), "it was just listed");
            }
        }
    }

    /// Whether the host with this number sees the storage.
    pub(crate) fn host_sees(&self, host: usize, sr: &str) -> bool {
        let host = &self.hosts[host];
        self.database.all("PBD").any(|(_, pbd)| {
            text(pbd, "host") == host && text(pbd, "SR") == sr && pbd.get("currently_attached") == Some(&json!(true))
        })
    }

    /// The data of a disk.
    pub(crate) fn disk(&self, vdi: &str) -> Answer<&Disk> {
        self.disks
            .get(vdi)
            .ok_or_else(|| Failure::new("HANDLE_INVALID", &["VDI", vdi]))
    }

    /// The data of a disk, mutable.
    pub(crate) fn disk_mut(&mut self, vdi: &str) -> Answer<&mut Disk> {
        self.disks
            .get_mut(vdi)
            .ok_or_else(|| Failure::new("HANDLE_INVALID", &["VDI", vdi]))
    }

    /// Ends all sessions.
    pub(crate) fn end_sessions(&mut self) {
        let sessions: Vec<String> = self
            .database
            .all("session")
            .map(|(session, _)| session.clone())
            .collect();
        for session in sessions {
            let removed = self.database.remove("session", &session);
            debug_assert!(removed.is_ok(), "it was just listed");
        }
    }
}
