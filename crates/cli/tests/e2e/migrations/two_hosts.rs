//! Two hosts, each a libvirtd and an sshd in a mount namespace of their own, and a guest that writes.

use std::path::PathBuf;
use std::process::Output;

use holdfast_test_kit::libvirt::LibvirtLab;
use holdfast_test_kit::run;
use serde_json::Value;

use crate::replication::sshd::{Program, Sshd};
use crate::rig::Rig;
use crate::schedules::wait_until;
use crate::writing_guest::{GuestConsole, guest_file};

/// A guest that writes at the first of two hosts.
pub(super) struct TwoHosts {
    pub(super) here: LibvirtLab,
    pub(super) there: LibvirtLab,
    pub(super) sshd: Sshd,
    pub(super) rig: Rig,
    pub(super) console: GuestConsole,
    pub(super) image: PathBuf,
}

/// The process of a daemon, whose view of the file system its host has.
pub(super) fn process_of(lab: &LibvirtLab) -> u32 {
    let process = std::fs::read_to_string(lab.path("libvirt/libvirtd.pid")).unwrap();
    process.trim().parse().unwrap()
}

impl TwoHosts {
    pub(super) fn new() -> Option<Self> {
        Self::with(Program::Found)
    }

    /// Hosts of which the second one has this program.
    pub(super) fn with(program: Program<'_>) -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            return None;
        }
        let (here, there) = (LibvirtLab::new(), LibvirtLab::new());
        here.connect();
        there.connect();
        let sshd = Sshd::start_inside(process_of(&there), program)?;
        let mut rig = Rig::empty();
        rig.see_files_of(process_of(&here));
        let console = GuestConsole(rig.path("console"));
        let image = here.path("web1.qcow2");
        run(
            "qemu-img",
            &["create", "-q", "-f", "qcow2", image.to_str().unwrap(), "64M"],
        );
        // The guest uses the first 4 MiB only.
        let write = ["-f", "qcow2", "-c", "write -P 165 32M 16M", image.to_str().unwrap()];
        run("qemu-io", &write);
        for lab in [&here, &there] {
            std::fs::create_dir(lab.path("images")).unwrap();
        }
        here.define_xml(&format!(
            "<domain type='qemu'><name>web1</name><memory unit='MiB'>160</memory><vcpu>1</vcpu>\
             <os><type arch='x86_64' machine='pc'>hvm</type><kernel>{}</kernel><initrd>{}</initrd>\
             <cmdline>console=ttyS0 quiet</cmdline></os><features><acpi/></features><devices>\
             <disk type='file' device='disk'><driver name='qemu' type='qcow2'/><source file='{}'/>\
             <target dev='vda' bus='virtio'/></disk>\
             <serial type='file'><source path='{}' append='on'/><target port='0'/></serial>\
             <memballoon model='none'/></devices></domain>",
            guest_file("vmlinuz"),
            guest_file("initrd"),
            image.display(),
            console.0.display(),
        ));
        here.virsh(&["start", "web1"]);
        console.wait_for(20);
        Some(Self {
            here,
            there,
            sshd,
            rig,
            console,
            image,
        })
    }

    /// The machine moves in the other direction from now on.
    pub(super) fn turned(self) -> Self {
        self.turned_with(Program::Found)
    }

    pub(super) fn turned_with(mut self, program: Program<'_>) -> Self {
        std::mem::swap(&mut self.here, &mut self.there);
        self.sshd = Sshd::start_inside(process_of(&self.there), program).unwrap();
        self.rig.see_files_of(process_of(&self.here));
        self
    }

    pub(super) fn destination(&self) -> String {
        format!("ssh://root@127.0.0.1{}", self.there.path("images").display())
    }

    pub(super) fn words(&self, more: &[&str]) -> Vec<String> {
        let mut words = vec!["migrate".to_owned(), "web1".to_owned(), self.destination()];
        words.extend(["--connect".to_owned(), self.here.uri()]);
        words.extend(["--connect-there".to_owned(), self.there.uri()]);
        words.extend(self.sshd.options());
        words.extend(more.iter().map(|word| (*word).to_owned()));
        words
    }

    pub(super) fn migrate(&self, more: &[&str]) -> Output {
        let words = self.words(&[&["--accept-incomplete-memory"], more].concat());
        self.rig.run(&words.iter().map(String::as_str).collect::<Vec<_>>())
    }

    /// Moves the machine; returns the report.
    pub(super) fn moved(&self, more: &[&str]) -> Value {
        let words = self.words(&[&["--accept-incomplete-memory"], more].concat());
        self.rig.report(&words.iter().map(String::as_str).collect::<Vec<_>>())
    }

    pub(super) fn state(lab: &LibvirtLab) -> String {
        let list = lab.virsh(&["list", "--all"]);
        let state = list.lines().find_map(|line| line.trim().split_once("web1"));
        state.map_or_else(|| "absent".to_owned(), |(_, state)| state.trim().to_owned())
    }

    pub(super) fn states(&self) -> [String; 2] {
        [&self.here, &self.there].map(Self::state)
    }

    pub(super) fn wait_for_one_owner(&self) {
        wait_until("the machine runs on one host", || {
            let states = self.states();
            states.iter().filter(|state| *state == "running").count() == 1
                && states
                    .iter()
                    .all(|state| ["running", "shut off", "absent"].contains(&&state[..]))
        });
    }

    /// Sockets of migrations that are left.
    pub(super) fn sockets(lab: &LibvirtLab) -> Vec<String> {
        let entries = std::fs::read_dir(format!("/proc/{}/root/var/lib/libvirt/qemu", process_of(lab))).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names
            .filter(|name| [".memory", ".return"].iter().any(|ending| name.ends_with(ending)))
            .collect()
    }

    /// The other host removes its socket when it sees that the connection has ended.
    pub(super) fn assert_no_sockets(&self) {
        for lab in [&self.here, &self.there] {
            wait_until("the sockets are removed", || Self::sockets(lab).is_empty());
        }
    }

    pub(super) fn names_there(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.there.path("images")).unwrap();
        let mut names: Vec<String> = entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }
}
