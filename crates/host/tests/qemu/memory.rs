//! The memory of a running machine: saved with its disks at one point in time, and loaded into another QEMU.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use holdfast_block::{BlockDevice, BlockDeviceMut, Clock as _, MemoryDevice};
use holdfast_host::qemu::memory::{MemoryMode, MemoryPipe, MemoryReceiver, MemoryState, assemble, receive};
use holdfast_host::qemu::{PointInTime, PointInTimeEvent};
use holdfast_host::qmp::{Monitor, MonitorError, QmpCommand};
use serde_json::{Value, json};

use holdfast_test_kit::assert_served;
use holdfast_test_kit::qemu::{DISK_BYTES, MIB, QemuLab};

const PAGE_BYTES: u64 = 4096;
const PATTERN_START: u64 = 8 * MIB;

pub(crate) fn taken_in() -> (MemoryPipe, MemoryReceiver) {
    let store = |size_bytes| Ok(Box::new(MemoryDevice::new(size_bytes)) as Box<dyn BlockDeviceMut>);
    receive(PAGE_BYTES, Box::new(store)).unwrap()
}

/// A machine with a pattern in memory that its firmware does not use.
fn with_pattern(formats: &[&str], more: &[&str]) -> QemuLab {
    let pattern: Vec<u8> = (0..2 * MIB).map(|at| u8::try_from(at / 4096 % 251).unwrap()).collect();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("pattern");
    std::io::Write::write_all(&mut std::fs::File::create(&file).unwrap(), &pattern).unwrap();
    let loader = format!("loader,file={},addr={PATTERN_START},force-raw=on", file.display());
    QemuLab::with(formats, &[&["-device", &loader], more].concat())
}

/// The memory of a machine, as its processor sees it.
fn memory_of(lab: &QemuLab) -> Vec<u8> {
    let file = lab.path("memory");
    let arguments = json!({ "val": 0, "size": 16 * MIB, "filename": file.to_str().unwrap() });
    lab.execute("pmemsave", arguments);
    std::fs::read(file).unwrap()
}

fn stream_of(state: &MemoryState, memory: &dyn BlockDevice) -> Vec<u8> {
    let mut stream = Vec::new();
    assemble(state, memory, &mut stream).unwrap();
    stream
}

/// The state is encoded and decoded; another QEMU loads the stream, and has the same memory to the last byte.
#[test]
fn another_qemu_loads_the_memory() {
    let lab = with_pattern(&["qcow2"], &[]);
    lab.execute("stop", Value::Null);
    let (mut request, socket) = lab.request(lab.directory.path());
    let (pipe, receiving) = taken_in();
    request.memory = Some((pipe, MemoryMode::Live));
    let cut = PointInTime::make(&*lab.monitor, &lab.clock, request, &mut |_| ()).unwrap();
    let (state, memory) = receiving.finish().unwrap();
    assert!(!lab.is_running(), "a paused machine stays paused");
    assert_served(&socket, &cut.exports[0], 1, 0, DISK_BYTES);
    let held = memory_of(&lab);
    cut.release(&*lab.monitor, &lab.clock).unwrap();

    let pattern_start = usize::try_from(PATTERN_START).unwrap();
    assert_eq!(held[pattern_start + 4096 * 7], 7, "the machine has the pattern");
    let state = {
        let bytes = state.encode();
        let again = MemoryState::decode(&bytes).unwrap();
        assert_eq!(again, state);
        for length in 0..bytes.len().min(600) {
            assert!(MemoryState::decode(&bytes[..length]).is_err(), "{length}");
        }
        again
    };
    let names: Vec<&str> = state.blocks.iter().map(|block| &block.name[..]).collect();
    assert!(names.contains(&"pc.ram"), "{names:?}");
    let file = lab.path("stream");
    let stream = stream_of(&state, &*memory);
    std::io::Write::write_all(&mut std::fs::File::create(&file).unwrap(), &stream).unwrap();
    let incoming = format!("exec:cat {}", file.display());
    let other = QemuLab::with(&["qcow2"], &["-S", "-incoming", &incoming]);
    while other.execute("query-status", Value::Null)["status"] == "inmigrate" {
        other.clock.sleep(Duration::from_millis(20));
    }
    assert!(memory_of(&other) == held, "the memory differs");
    other.execute("cont", Value::Null);
    assert!(other.is_running());
}

/// Repeated, because the second time bitmaps are released and activated together with their images.
#[test]
fn disks_and_memory_are_of_one_point_in_time() {
    for mode in [MemoryMode::Live, MemoryMode::Stopped] {
        let lab = with_pattern(&["qcow2", "raw"], &[]);
        let before = lab.everything();
        for round in 0..2_u8 {
            let (mut request, socket) = lab.request(lab.directory.path());
            for disk in &mut request.disks {
                disk.next_bitmap = Some(format!("bitmap{round}"));
                let last = format!("bitmap{}", round.wrapping_sub(1));
                disk.changes = disk
                    .disk
                    .bitmaps
                    .iter()
                    .any(|bitmap| bitmap.name == last)
                    .then_some(last);
                assert!(round == 0 || disk.changes.is_some(), "{:?}", disk.disk.bitmaps);
            }
            let (pipe, receiving) = taken_in();
            request.memory = Some((pipe, mode));
            let mut moments = Vec::new();
            let cut = PointInTime::make(&*lab.monitor, &lab.clock, request, &mut |moment| {
                moments.push((moment, lab.is_running()));
            })
            .unwrap();
            assert_eq!(
                moments,
                [(PointInTimeEvent::Stopped, false), (PointInTimeEvent::Reached, false)]
            );
            assert!(lab.is_running() && cut.pause.total > Duration::ZERO);
            let held = if round == 0 { [1, 2] } else { [60, 60] };
            for (disk, export) in cut.exports.iter().enumerate() {
                lab.guest_writes(disk, 60, 0, MIB);
                assert_served(&socket, export, held[disk], 0, MIB);
                assert_served(&socket, export, disk + 1, MIB, DISK_BYTES - MIB);
            }
            let (state, memory) = receiving.finish().unwrap();
            assert_eq!(state.size_bytes(), memory.size_bytes());
            cut.release(&*lab.monitor, &lab.clock).unwrap();
            let settings = lab.execute("query-migrate-parameters", Value::Null);
            assert_eq!(settings["downtime-limit"], 300, "the setting is restored");
        }
        for (number, disk) in lab.disks().into_iter().enumerate() {
            let names: Vec<&str> = disk.bitmaps.iter().map(|bitmap| &bitmap.name[..]).collect();
            assert!(names.contains(&"bitmap0") && names.contains(&"bitmap1"), "{names:?}");
            for name in names {
                let arguments = json!({ "node": format!("format{number}"), "name": name });
                lab.execute("block-dirty-bitmap-remove", arguments);
            }
        }
        assert_eq!(lab.everything(), before);
    }
}

/// Counts the queries of the machine's state that were answered.
struct CountsLooks<'a> {
    monitor: &'a dyn Monitor,
    looks: Arc<AtomicU64>,
}

impl Monitor for CountsLooks<'_> {
    fn execute(&self, command: &QmpCommand) -> Result<Value, MonitorError> {
        let answer = self.monitor.execute(command)?;
        if command.name == "query-status" {
            self.looks.fetch_add(1, Ordering::SeqCst);
        }
        Ok(answer)
    }
}

/// Sending takes minutes, and the owner may pause the machine meanwhile: then only the owner resumes it.
#[test]
fn a_pause_by_the_owner_during_sending_is_kept() {
    let lab = with_pattern(&["raw"], &["-qmp", "unix:{}/owner,server=on,wait=off"]);
    let owner = holdfast_host::qmp::QmpSocket::connect(&lab.path("owner")).unwrap();
    let monitor = CountsLooks {
        monitor: &*lab.monitor,
        looks: Arc::default(),
    };
    let looks = Arc::clone(&monitor.looks);
    let store = move |size_bytes| {
        // QEMU waits for the receiver: this is in the middle of the stream.
        owner.execute(&QmpCommand::new("stop", Value::Null)).unwrap();
        let before = looks.load(Ordering::SeqCst);
        let clock = holdfast_block::SystemClock::new();
        while looks.load(Ordering::SeqCst) < before + 2 {
            assert!(
                clock.now() < Duration::from_secs(120),
                "the state of the machine is not polled"
            );
            clock.sleep(Duration::from_millis(5));
        }
        Ok(Box::new(MemoryDevice::new(size_bytes)) as Box<dyn BlockDeviceMut>)
    };
    let (pipe, receiving) = receive(PAGE_BYTES, Box::new(store)).unwrap();
    let (mut request, socket) = lab.request(lab.directory.path());
    request.memory = Some((pipe, MemoryMode::Live));
    let cut = PointInTime::make(&monitor, &lab.clock, request, &mut |_| ()).unwrap();
    receiving.finish().unwrap();
    assert!(cut.is_left_paused && !lab.is_running());
    assert_eq!(cut.pause.total, Duration::ZERO);
    assert_served(&socket, &cut.exports[0], 1, 0, DISK_BYTES);
    cut.release(&*lab.monitor, &lab.clock).unwrap();
    assert!(!lab.is_running());
    lab.execute("cont", Value::Null);
    assert!(lab.is_running());
    lab.guest_writes(0, 60, 0, MIB);
}

/// The receiver has no space: the migration fails, without effect on the machine.
#[test]
fn a_failed_receiver_does_not_stop_the_machine() {
    let lab = with_pattern(&["raw"], &[]);
    let before = lab.everything();
    let full = |_| {
        Err(holdfast_block::Error::Unsupported {
            what: "memory",
            detail: "no room".to_owned(),
        })
    };
    let (pipe, receiving) = receive(PAGE_BYTES, Box::new(full)).unwrap();
    let (mut request, _) = lab.request(lab.directory.path());
    request.memory = Some((pipe, MemoryMode::Live));
    let refused = PointInTime::make(&*lab.monitor, &lab.clock, request, &mut |_| ()).unwrap_err();
    assert!(
        receiving.finish().err().unwrap().to_string().contains("store"),
        "{refused}"
    );
    assert_eq!(lab.everything(), before);
}

/// Another client migrates the machine: its migration continues, with its settings.
#[test]
fn a_migration_of_another_client_is_left_alone() {
    let lab = with_pattern(&["raw"], &[]);
    lab.execute(
        "migrate-set-parameters",
        json!({ "max-bandwidth": 100_000, "downtime-limit": 77 }),
    );
    lab.execute(
        "migrate",
        json!({ "uri": format!("exec:cat > {}", lab.path("theirs").display()) }),
    );
    let (mut request, _) = lab.request(lab.directory.path());
    let (pipe, _receiving) = taken_in();
    request.memory = Some((pipe, MemoryMode::Live));
    let refused = PointInTime::make(&*lab.monitor, &lab.clock, request, &mut |_| ()).unwrap_err();
    assert!(refused.to_string().contains("another migration"), "{refused}");
    // It may have just started.
    let status = lab.execute("query-migrate", Value::Null)["status"].clone();
    assert!(["setup", "active"].iter().any(|known| status == *known), "{status}");
    assert_eq!(
        lab.execute("query-migrate-parameters", Value::Null)["downtime-limit"],
        77
    );
    lab.execute("migrate_cancel", Value::Null);
    assert!(lab.is_running());
}
