//! Machines with a TPM and with firmware in flash: the state of both is part of the point in time, and is restored with
//! the disks.
//!
//! swtpm, libvirt, QEMU and the firmware are real. The firmware starts the TPM, which writes its state; so a restarted
//! machine has another state than before.

use std::fs::File;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use holdfast_block::{Clock as _, SystemClock};
use holdfast_host::{Hypervisor as _, MachineState};
use serde_json::Value;

use super::at;
use super::bare::Bare;
use super::halting_disk::make_halting_disk;
use crate::rig::{Rig, noise};
use crate::schedules::wait_until;
use holdfast_test_kit::libvirt::LibvirtLab;
use holdfast_test_kit::processor_demand;

const FIRMWARE: &str = "/usr/share/OVMF/OVMF_CODE_4M.fd";
const VARIABLES: &str = "/usr/share/OVMF/OVMF_VARS_4M.fd";
const NAME: &str = "tpm2-00.permall";
/// The firmware has started the program that halts when it has written nothing for the first duration, in which it demanded
/// less processor time than a tenth of it; the second one is the timeout.
const IDLE: Duration = Duration::from_secs(2);
const PATIENCE: Duration = Duration::from_secs(180);

/// A machine with firmware variables and a TPM.
struct MachineWithTpm {
    lab: LibvirtLab,
    rig: Rig,
    clock: SystemClock,
}

impl MachineWithTpm {
    /// A machine that is shut off and has never run; `backend` is the content of its TPM backend element.
    fn new(backend: &str) -> Self {
        let lab = LibvirtLab::new();
        lab.connect();
        let mut rig = Rig::new();
        if rustix::process::geteuid().is_root() {
            let process = std::fs::read_to_string(lab.path("libvirt/libvirtd.pid")).unwrap();
            rig.see_files_of(process.trim().parse().unwrap());
        } else {
            rig.have_configurations_in(lab.path("libvirt/config"));
        }
        let (image, variables) = (lab.path("web3.raw"), lab.path("web3_VARS.fd"));
        make_halting_disk(&image, &rig);
        std::fs::copy(VARIABLES, &variables).unwrap();
        let xml = format!(
            "<domain type='qemu'><name>web3</name><memory unit='MiB'>128</memory><vcpu>1</vcpu>\
             <os><type arch='x86_64' machine='q35'>hvm</type><loader readonly='yes' type='pflash'>{FIRMWARE}</loader>\
             <nvram>{}</nvram></os><features><acpi/></features><devices>\
             <disk type='file'><driver name='qemu' type='raw'/><source file='{}'/><target dev='vda' bus='virtio'/></disk>\
             <tpm model='tpm-crb'><backend type='emulator' version='2.0'>{backend}</backend></tpm>\
             <memballoon model='none'/></devices></domain>",
            variables.display(),
            image.display()
        );
        rig.write("web3.xml", xml.as_bytes());
        lab.virsh(&["define", rig.path("web3.xml").to_str().unwrap()]);
        let clock = SystemClock::new();
        Self { lab, rig, clock }
    }

    /// A running machine whose firmware has finished booting.
    fn running() -> Self {
        let world = Self::new("");
        world.start("web3");
        world
    }

    fn start(&self, name: &str) {
        self.lab.virsh(&["start", name]);
        self.wait_until_idle(name);
    }

    /// The path of the state of a machine's TPM in libvirt, as seen by this process.
    fn place(&self, name: &str) -> PathBuf {
        let folder = if rustix::process::geteuid().is_root() {
            "libvirt/lib/swtpm"
        } else {
            "libvirt/config/libvirt/qemu/swtpm"
        };
        let uuid = self.lab.virsh(&["domuuid", name]);
        self.lab.path(folder).join(uuid.trim()).join("tpm2").join(NAME)
    }

    fn state(&self, name: &str) -> Vec<u8> {
        std::fs::read(self.place(name)).unwrap()
    }

    fn variables(&self) -> PathBuf {
        self.lab.path("web3_VARS.fd")
    }

    /// Waits until the firmware has started the TPM, and no longer writes to its state or to its own variables.
    fn wait_until_idle(&self, name: &str) {
        let start = self.clock.now();
        let written = || {
            (
                self.state(name),
                std::fs::read(self.lab.path(&format!("{name}_VARS.fd"))).ok(),
            )
        };
        let variables = self.lab.path(&format!("{name}_VARS.fd"));
        let process = holdfast_test_kit::run("pgrep", &["-f", &format!("qemu-system.*{}", variables.display())]);
        let process = process.trim().parse().unwrap();
        let (mut last, mut since, mut demand) = (written(), start, Duration::MAX);
        loop {
            self.clock.sleep(Duration::from_millis(200));
            let (now, state) = (self.clock.now(), written());
            let is_quiet = now.saturating_sub(since) > IDLE;
            if state != last || is_quiet {
                let demand_before = std::mem::replace(&mut demand, processor_demand(process));
                if is_quiet && demand.saturating_sub(demand_before) < IDLE / 10 && state == last && since != start {
                    return;
                }
                (last, since) = (state, now);
            }
            assert!(
                now.saturating_sub(start) < PATIENCE,
                "{name}: its firmware never starts the TPM"
            );
        }
    }

    fn json(&self, code: i32, words: &[&str]) -> Value {
        self.rig.json(code, &at(&self.lab.uri(), words))
    }

    /// Backs the machine up; returns the id of the snapshot.
    fn back_up(&self) -> String {
        let document = self.json(0, &["backup", "web3"]);
        let snapshot = &document["report"]["machines"][0]["snapshot"];
        snapshot["id"].as_str().unwrap().to_owned()
    }

    fn restore(&self, words: &[&str]) -> Value {
        self.json(0, &[&["restore", "web3", "--to-machine"], words].concat())["report"].clone()
    }

    fn machine_state(&self, name: &str) -> MachineState {
        let machine = self.lab.connect().machine(name).unwrap();
        machine.describe().unwrap().summary.state
    }

    /// Whether libvirt had `swtpm_setup` create a new TPM, which must not happen if one was restored.
    fn was_created(&self, name: &str) -> bool {
        let folder = if rustix::process::geteuid().is_root() {
            "libvirt/log/swtpm/libvirt/qemu"
        } else {
            "libvirt/cache/libvirt/qemu/log"
        };
        let log = std::fs::read_to_string(self.lab.path(folder).join(format!("{name}-swtpm.log")));
        log.is_ok_and(|log| log.contains("manufacturing"))
    }
}

fn planned(report: &Value) -> Value {
    let files = report["files"].as_array().unwrap();
    let mut its = files.iter().filter(|file| file["content"] == "tpm-state");
    its.next().unwrap_or_else(|| panic!("{report}")).clone()
}

/// A hook changes both between the point in time and the end of the backup.
#[test]
fn firmware_variables_and_tpm_state_are_of_the_point_in_time() {
    let world = MachineWithTpm::running();
    let garbage = world.rig.path("garbage");
    world.rig.write("garbage", &noise(600_000, 3));
    // On a busy host the firmware is still booting, and may write between the hook and the pause: the files count as they are
    // before it or after it.
    let hook = format!(
        "#!/bin/sh\nPATH=/usr/bin:/bin\n\
         case $1 in pre-freeze) when=before ;; post-thaw) when=after ;; *) exit 0 ;; esac\n\
         cp {variables} {kept}/variables-$when\ncp {tpm} {kept}/state-$when\n[ $when = after ] || exit 0\n\
         for file in {variables} {tpm}; do cat {garbage} > $file; done\n",
        variables = world.variables().display(),
        kept = world.rig.path(".").display(),
        tpm = world.place("web3").display(),
        garbage = garbage.display()
    );
    let hook = world.rig.write_program("hook", &hook);
    world.json(0, &["backup", "web3", "--hook", hook.to_str().unwrap()]);
    assert_eq!(world.state("web3"), noise(600_000, 3), "the hook was called");
    let kept = |what: &str| ["before", "after"].map(|when| world.rig.read(&format!("{what}-{when}")));
    let (states, variables) = (kept("state"), kept("variables"));
    assert_eq!(world.machine_state("web3"), MachineState::Running);

    let plan = world.restore(&["--dry-run"]);
    let file = planned(&plan);
    assert_eq!(file["way"], "new");
    assert!(states.iter().any(|state| file["size_bytes"] == state.len()), "{file}");
    let uuid = plan["target_machine"]["uuid"].as_str().unwrap();
    let target = file["target"].as_str().unwrap();
    assert!(target.ends_with(&format!("/swtpm/{uuid}/tpm2/{NAME}")), "{target}");
    assert!(
        plan["notes"].to_string().contains("has the keys of the machine"),
        "{plan}"
    );
    let folders = world.place("web3").ancestors().nth(3).unwrap().to_owned();
    assert_eq!(
        std::fs::read_dir(&folders).unwrap().count(),
        1,
        "a dry run creates no file"
    );

    world.restore(&[]);
    let place = world.place("web3-restored");
    assert!(states.contains(&std::fs::read(&place).unwrap()) && world.place("web3") != place);
    let mode = |path: &Path| path.metadata().unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(&place), mode(place.parent().unwrap())), (0o600, 0o700));
    assert!(variables.contains(&std::fs::read(world.lab.path("web3-restored_VARS.fd")).unwrap()));
    // The TPM is started with the machine, and is not a new one. Both machines run.
    world.start("web3-restored");
    assert!(!world.was_created("web3-restored") && world.was_created("web3"));
    assert_eq!(
        place.metadata().unwrap().uid(),
        world.place("web3").metadata().unwrap().uid()
    );
    assert_eq!(world.machine_state("web3-restored"), MachineState::Running);
    world.rig.ok(&["verify"]);

    // As an instant restore, directly from the snapshot.
    world.restore(&["--live", "--name", "web5"]);
    assert_eq!(world.machine_state("web5"), MachineState::Running);
    assert!(!world.was_created("web5") && world.place("web5").exists());
}

/// A copy of the snapshot in another repository has them as well, even when the first repository is gone.
#[test]
fn firmware_variables_and_tpm_state_are_restored_from_a_copy() {
    let world = MachineWithTpm::running();
    world.lab.virsh(&["destroy", "web3"]);
    let (variables, state) = (std::fs::read(world.variables()).unwrap(), world.state("web3"));
    world.back_up();
    world
        .rig
        .ok(&["init", "--no-encryption", "-r", "far", "--like", "repo"]);
    world.rig.ok(&["copy", "--to", "far", "web3"]);
    std::fs::remove_dir_all(world.rig.path("repo")).unwrap();
    world.restore(&["-r", "far"]);
    assert!(world.state("web3-restored") == state);
    assert!(std::fs::read(world.lab.path("web3-restored_VARS.fd")).unwrap() == variables);
    world.start("web3-restored");
    assert!(!world.was_created("web3-restored"));
}

/// For a machine that is paused or shut off; in place, and when the machine is missing.
#[test]
fn the_existing_tpm_state_is_replaced() {
    let world = MachineWithTpm::running();
    world.lab.virsh(&["suspend", "web3"]);
    let paused = world.state("web3");
    let first = world.back_up();
    world.lab.virsh(&["destroy", "web3"]);
    world.start("web3");
    world.lab.virsh(&["destroy", "web3"]);
    let off = world.state("web3");
    assert_ne!(paused, off, "the firmware has started the TPM again");
    let second = world.back_up();
    for (id, state) in [(&first, &paused), (&second, &off)] {
        world.rig.ok(&["restore", "--force", &format!("{id}:tpm"), "kept"]);
        assert!(world.rig.read("kept") == *state);
    }

    let before = world.place("web3").metadata().unwrap();
    let restore = |words: &[&str]| {
        let words = [&["restore", &first, "--to-machine", "--in-place"], words].concat();
        world.json(0, &words)["report"].clone()
    };
    assert_eq!(planned(&restore(&["--dry-run"]))["way"], "replace");
    assert_eq!(world.state("web3"), off);
    restore(&[]);
    assert_eq!(world.state("web3"), paused);
    let after = world.place("web3").metadata().unwrap();
    assert_eq!(
        (before.uid(), before.gid(), before.mode()),
        (after.uid(), after.gid(), after.mode())
    );
    assert_ne!(before.ino(), after.ino(), "the state is a new file");
    world.start("web3");
    world.lab.virsh(&["destroy", "web3"]);

    // A partial state that a killed restore left is found.
    let half = world.place("web3").with_file_name(format!(".{NAME}.0123abcd.partial"));
    File::create(&half).unwrap();
    let found = world.json(0, &["doctor", "web3", "--fix"]);
    assert!(
        found["report"].to_string().contains("0123abcd") && !half.exists(),
        "{found}"
    );

    // A running swtpm would overwrite the restored state.
    let held = hold(&world.place("web3").with_file_name(".lock"));
    let refused = world.json(4, &["restore", "web3", "--to-machine", "--in-place"]);
    assert!(refused["error"].to_string().contains("an swtpm is using"), "{refused}");
    drop(held);

    // libvirt removes the state together with the machine.
    let place = world.place("web3");
    world.lab.virsh(&["undefine", "web3", "--nvram"]);
    assert!(!place.exists());
    std::fs::remove_file(world.lab.path("web3.raw")).unwrap();
    let report = world.restore(&["--keep-identity"]);
    assert_eq!(planned(&report)["way"], "new");
    assert_eq!(world.state("web3"), off);
    world.start("web3");
    assert_eq!(world.machine_state("web3"), MachineState::Running);
}

/// If libvirt chooses the firmware, versions before 9.2 report the path of its variables only while the machine is
/// running.
#[test]
fn firmware_variables_of_a_machine_that_is_off_are_found() {
    if !Path::new(FIRMWARE).exists() {
        return;
    }
    let world = MachineWithTpm::new("");
    let image = world.lab.path("web4.raw");
    File::create(&image).unwrap().set_len(1 << 20).unwrap();
    let xml = format!(
        "<domain type='qemu'><name>web4</name><memory unit='MiB'>128</memory><vcpu>1</vcpu>\
         <os firmware='efi'><type arch='x86_64' machine='q35'>hvm</type></os><features><acpi/></features><devices>\
         <disk type='file'><driver name='qemu' type='raw'/><source file='{}'/><target dev='vda' bus='virtio'/></disk>\
         <memballoon model='none'/></devices></domain>",
        image.display()
    );
    world.rig.write("web4.xml", xml.as_bytes());
    world
        .lab
        .virsh(&["define", world.rig.path("web4.xml").to_str().unwrap()]);
    let names = || world.json(0, &["backup", "web4"])["report"]["machines"][0]["snapshot"].to_string();
    assert!(!names().contains("nvram"), "the machine has never run");
    world.lab.virsh(&["start", "web4", "--paused"]);
    world.lab.virsh(&["destroy", "web4"]);
    assert!(names().contains("nvram"));
    let folder = if rustix::process::geteuid().is_root() {
        "libvirt/lib/qemu/nvram"
    } else {
        "libvirt/config/libvirt/qemu/nvram"
    };
    let variables = world.lab.path(folder).join("web4_VARS.fd");
    let mut marked = std::fs::read(&variables).unwrap();
    let end = marked.len() - 6;
    marked[end..].copy_from_slice(b"MARKED");
    let file = File::options().write(true).open(&variables).unwrap();
    file.write_all_at(&marked, 0).unwrap();
    world.json(0, &["backup", "web4"]);
    world.json(0, &["restore", "web4", "--to-machine", "--name", "web5"]);
    world.lab.virsh(&["start", "web5", "--paused"]);
    let restored = world.lab.connect().machine("web5").unwrap().describe().unwrap();
    // libvirt sees the folder under another path than the program.
    let name = restored.nvram.unwrap();
    let restored = variables.with_file_name(name.file_name().unwrap());
    let beside = world.lab.path(&name.file_name().unwrap().to_string_lossy());
    let restored = [restored, beside].into_iter().find(|path| path.exists()).unwrap();
    assert!(std::fs::read(restored).unwrap() == marked);
}

/// A lock held by another process, as by swtpm.
fn hold(path: &Path) -> Held {
    let script = "import fcntl, sys\nfile = open(sys.argv[1], 'w')\nfcntl.lockf(file, fcntl.LOCK_EX)\nprint('locked', flush=True)\n\
                  sys.stdin.read()";
    Held::start("python3", &["-c", script, path.to_str().unwrap()])
}

/// A child process that prints one line, and ends when its input is closed.
struct Held(std::process::Child);

impl Held {
    #[expect(clippy::disallowed_methods, reason = "these tests run programs from outside")]
    fn start(program: &str, words: &[&str]) -> Self {
        let mut child = std::process::Command::new(program)
            .args(words)
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        let text = child.stdout.as_mut().unwrap();
        std::io::BufRead::read_line(&mut std::io::BufReader::new(text), &mut line).unwrap();
        assert_eq!(line, "locked\n");
        Self(child)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        self.0.wait().unwrap();
    }
}

/// An swtpm that is started manually, for a QEMU without libvirt.
fn start_swtpm(folder: &Path, options: &[(&str, &str)], by_variable: Option<&Path>) -> Swtpm {
    #[expect(clippy::disallowed_methods, reason = "these tests run programs from outside")]
    let mut command = std::process::Command::new("swtpm");
    let socket = folder.join("control");
    command.args(["socket", "--tpm2", "--ctrl"]);
    command.arg(format!("type=unixio,path={}", socket.display()));
    command.args(options.iter().flat_map(|(name, value)| [name, value]));
    command.envs(by_variable.map(|state| ("TPM_PATH", state)));
    let swtpm = Swtpm(command.spawn().unwrap());
    wait_until("swtpm listens", || socket.exists());
    swtpm
}

struct Swtpm(std::process::Child);

impl Drop for Swtpm {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().unwrap();
    }
}

/// QEMU only knows a socket; the process behind it and the path of its state are found in command lines.
#[test]
fn the_tpm_state_of_a_bare_qemu_is_found_by_its_swtpm() {
    let folder = tempfile::tempdir().unwrap();
    let channel = format!("socket,id=channel,path={}", folder.path().join("control").display());
    let words = [
        "-chardev",
        &channel,
        "-tpmdev",
        "emulator,id=t,chardev=channel",
        "-device",
        "tpm-crb,tpmdev=t",
    ];
    {
        let state = format!("dir={},mode=0600", folder.path().display());
        let _swtpm = start_swtpm(folder.path(), &[("--tpmstate", &state)], None);
        let bare = Bare::new(&words);
        // The firmware may be about to use the TPM.
        bare.lab.execute("stop", serde_json::Value::Null);
        bare.back_up(&[]);
        let state = std::fs::read(folder.path().join(NAME)).unwrap();
        bare.rig.ok(&["restore", "web1@latest:tpm", "kept"]);
        assert!(bare.rig.read("kept") == state);
    }
    std::fs::remove_file(folder.path().join("control")).unwrap();
    // The path was passed in an environment variable, which only its own user can read.
    let _swtpm = start_swtpm(folder.path(), &[], Some(folder.path()));
    let bare = Bare::new(&words);
    let document = bare.rig.json(3, &["backup", &bare.source]);
    let warnings = document["warnings"].to_string();
    assert!(
        warnings.contains("state of its TPM is not kept") && warnings.contains("no swtpm listens"),
        "{document}"
    );
}

/// The stream of QEMU contains the state; the files in the folder are of the same point in time.
#[test]
fn a_machine_with_a_tpm_resumes_from_its_memory() {
    let world = MachineWithTpm::running();
    let state = world.state("web3");
    world.json(0, &["backup", "web3", "--with-memory"]);
    assert_eq!(world.machine_state("web3"), MachineState::Running);
    world.lab.virsh(&["destroy", "web3"]);
    world.start("web3");
    assert_ne!(world.state("web3"), state);
    world.lab.virsh(&["destroy", "web3"]);
    let report = world.restore(&["--in-place", "--resume"]);
    assert_eq!(report["target_machine"]["is_resumed"], true);
    assert_eq!(world.machine_state("web3"), MachineState::Running);
    let report = world.restore(&["--resume", "--name", "web4"]);
    assert_eq!(report["target_machine"]["is_resumed"], true);
    assert_eq!(world.machine_state("web4"), MachineState::Running);
    assert!(!world.was_created("web4"));
}

#[test]
fn a_tpm_without_a_state_and_a_missing_secret_are_reported() {
    let secret = "11111111-bbbb-4ccc-8ddd-eeeeeeeeeeee";
    let world = MachineWithTpm::new(&format!("<encryption secret='{secret}'/>"));
    let report = world.json(0, &["backup", "web3"]);
    assert!(
        !report["report"].to_string().contains("tpm"),
        "the machine never ran: {report}"
    );
    let document = world.json(3, &["restore", "web3", "--to-machine", "--dry-run"]);
    let warnings = document["warnings"].to_string();
    assert!(
        warnings.contains("no state of its TPM") && warnings.contains(secret),
        "{warnings}"
    );
    let listing = world.json(0, &["machines"]);
    let tpm = &listing["report"]["machines"][0]["tpm"];
    assert_eq!(tpm["version"], "2.0");
    assert!(tpm["state"].as_str().unwrap().ends_with(NAME), "{tpm}");
}
