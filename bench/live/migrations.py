"""How long a guest is stopped while its machine moves to another host with its disk."""

import json
import os
import re
import shutil
import socket
import subprocess
import threading
import time
from contextlib import ExitStack

from live.lab import WARNINGS, Lab, Problem
from live.series import Series, at_most, milliseconds, seconds, share, take_turns

NAME = "moving"
TITLE = "A machine moves to another host with its disk and memory"
NOTE = (
    "Both hosts are on this one, each a libvirtd with its own view of the file system; the memory and the disk of holdfast go through ssh,\n"
    "those of virsh through TCP without encryption. Stopped: the longest time without a byte on the guest's console, to which it writes every\n"
    "millisecond. Rate: the guest's writes per second meanwhile, as a share of those before."
)
DOMAIN = """<domain type='qemu'>
  <name>{name}</name>
  <memory unit='MiB'>160</memory>
  <vcpu>1</vcpu>
  <os><type arch='x86_64' machine='pc'>hvm</type><kernel>{kernel}</kernel><initrd>{initrd}</initrd>
    <cmdline>console=ttyS0 quiet tick</cmdline></os>
  <features><acpi/></features>
  <devices>
    <disk type='file' device='disk'><driver name='qemu' type='qcow2'/><source file='{image}'/><target dev='vda' bus='virtio'/></disk>
    <serial type='file'><source path='{console}' append='on'/><target port='0'/></serial>
    <memballoon model='none'/>
  </devices>
</domain>
"""
MEDIAN_GOAL_MS = 65.0
WORST_GOAL_MS = 120.0
COLUMNS = {
    "gap_ms": ("stopped", milliseconds),
    "own_ms": ("own figure", milliseconds),
    "seconds": ("all of it", seconds),
    "rate": ("rate", share),
}
LINE = re.compile(rb"seq (\d+) boot ([0-9a-f]{16})")


class Sshd:
    """A sshd that sees the files of a host."""

    def __init__(self, lab):
        folder = lab.folder
        os.makedirs("/run/sshd", exist_ok=True)
        for name in ("host-key", "user-key"):
            lab.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name])
        with socket.socket() as chosen:
            chosen.bind(("127.0.0.1", 0))
            self.port = chosen.getsockname()[1]
        self.key = folder / "user-key"
        programs = f"{os.path.dirname(lab.binary)}:{lab.env['PATH']}"
        (folder / "sshd.conf").write_text(
            f"ListenAddress 127.0.0.1:{self.port}\nHostKey {folder}/host-key\nAuthorizedKeysFile {folder}/user-key.pub\n"
            "PidFile none\nStrictModes no\nUsePAM no\nPermitRootLogin yes\nPasswordAuthentication no\nLogLevel ERROR\n"
            f"SetEnv PATH={programs} HOME={folder}/home\n"
        )
        log = open(folder / "sshd.log", "ab")
        command = [*inside(lab), "/usr/sbin/sshd", "-D", "-e", "-f", folder / "sshd.conf"]
        subprocess.Popen([str(word) for word in command], env=lab.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        for _ in range(100):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.1)
        raise Problem(f"sshd does not answer: {(folder / 'sshd.log').read_text()[-500:]}")


def inside(lab):
    """The words before a command that sees the files of a host."""
    process = (lab.folder / "libvirt/libvirtd.pid").read_text().strip()
    return ["nsenter", f"--mount=/proc/{process}/ns/mnt", "--"]


class Console:
    """Watches the console of the guest: its lines, and the longest time without a byte."""

    def __init__(self, path):
        self.path, self.is_ended = path, threading.Event()
        self.gap_s, self.last_s, self.bytes = 0.0, time.perf_counter(), 0

    def __enter__(self):
        self.bytes = self.path.stat().st_size
        self.last_s, self.started = time.perf_counter(), self.number()
        self.began_s = self.last_s
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.is_ended.set()
        self.thread.join()

    def watch(self):
        while not self.is_ended.is_set():
            length, now = self.path.stat().st_size, time.perf_counter()
            if length != self.bytes:
                self.gap_s, self.last_s, self.bytes = max(self.gap_s, now - self.last_s), now, length
            time.sleep(0.0005)

    def lines(self):
        return LINE.findall(self.path.read_bytes())

    def number(self):
        return int(self.lines()[-1][0])

    def wait(self, number):
        for _ in range(600):
            found = self.lines() if self.path.exists() else []
            if found and int(found[-1][0]) >= number:
                return
            time.sleep(0.1)
        raise Problem("the guest writes nothing")

    def rate(self):
        return (self.number() - self.started) / (time.perf_counter() - self.began_s)


class MovedGuest:
    """A guest that writes lines on the console at `path`. Subclasses start it, and clear what is left of it."""

    def felt(self, way):
        """Starts the machine, lets `way` move it, and measures what the guest felt."""
        self.start()
        try:
            with Console(self.path) as before:
                time.sleep(2)
                usual = before.rate()
            boot = before.lines()[-1][1]
            with Console(self.path) as console:
                started = time.perf_counter()
                own_us = way()
                took, rate = time.perf_counter() - started, console.rate()
                console.wait(console.number() + 50)
            text = self.path.read_bytes()
            if b"BAD" in text or LINE.findall(text)[-1][1] != boot:
                raise Problem("the guest has read other bytes than it wrote, or has booted again")
            return {
                "gap_ms": console.gap_s * 1000,
                "own_ms": None if own_us is None else own_us / 1000,
                "seconds": took,
                "rate": rate / usual,
            }
        finally:
            self.clear()


class Hosts(MovedGuest):
    """Two hosts, and a machine that starts on the first one."""

    def __init__(self, here, there, disk_mib):
        self.here, self.there = here, there
        self.sshd = Sshd(there)
        self.original = here.image("original", disk_mib, disk_mib // 4)
        self.path = here.folder / "moving.console"
        self.image, self.other = here.images / "moving.qcow2", there.images / "moving.qcow2"

    def domain(self, image):
        guest = self.here.root / "build/guest"
        return DOMAIN.format(name=NAME, kernel=guest / "vmlinuz", initrd=guest / "initrd", image=image, console=self.path)

    def start(self):
        self.path.unlink(missing_ok=True)
        shutil.copyfile(self.original, self.image)
        file = self.here.folder / "moving.xml"
        file.write_text(self.domain(self.image))
        self.here.virsh("define", file)
        self.here.virsh("start", NAME)
        Console(self.path).wait(50)

    def clear(self):
        for lab in (self.here, self.there):
            lab.virsh("destroy", NAME, check=False)
            lab.virsh("undefine", NAME, check=False)
        for image in [*self.there.images.iterdir(), self.image]:
            image.unlink(missing_ok=True)

    def migrate(self, *more):
        here, there = self.here, self.there
        options = [f"IdentityFile={self.sshd.key}", "IdentitiesOnly=yes", "StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null"]
        words = ["migrate", NAME, f"ssh://root@127.0.0.1:{self.sshd.port}{there.images}", "--connect", here.uri]
        words += ["--connect-there", there.uri, "--accept-incomplete-memory", "--json", "--quiet"]
        for option in options:
            words += ["--ssh-option", option]
        words += more
        answer = here.run([*inside(here), *here.holdfast_words(*words)], check=False)
        if answer.returncode not in (0, WARNINGS):
            raise Problem((answer.stderr or answer.stdout)[-800:])
        return int(re.search(r'"stopped_us":(\d+)', answer.stdout).group(1))

    def virsh_migrate(self, *words):
        """libvirt copies the disk by QEMU's mirror, into an image that exists there."""
        size = json.loads(self.here.run(["qemu-img", "info", self.image, "--output", "json", "-U"]).stdout)["virtual-size"]
        self.there.run(["qemu-img", "create", "-q", "-f", "qcow2", self.other, str(size)])
        file = self.here.folder / "moved.xml"
        configuration = self.here.virsh("dumpxml", NAME, "--migratable")
        file.write_text(configuration.replace(str(self.image), str(self.other)))
        command = ["migrate", NAME, self.there.uri, "--live", "--persistent", "--copy-storage-all", "--xml", file]
        self.here.virsh(*command, "--migrateuri", "tcp://127.0.0.1", *words)

    def save_and_restore(self):
        """The machine is stopped while its disk and its memory are copied."""
        state, moved = self.here.work / "state", self.there.work / "state"
        self.here.virsh("save", NAME, state)
        shutil.copyfile(self.image, self.other)
        shutil.copyfile(state, moved)
        file = self.here.folder / "moved.xml"
        configuration = self.here.virsh("save-image-dumpxml", state)
        file.write_text(configuration.replace(str(self.image), str(self.other)))
        self.there.virsh("restore", moved, "--xml", file)
        state.unlink()
        moved.unlink()


def measure(lab, size, round_count, quiet):
    disk_mib = 256 if size == "quick" else 1024
    series = Series(TITLE, NOTE, COLUMNS)
    with ExitStack() as stack:
        there = stack.enter_context(Lab(lab.root, lab.work, lab.binary))
        hosts = Hosts(lab, there, disk_mib)

        def theirs(way):
            return lambda: hosts.felt(lambda: (way(), None)[1])

        ways = {
            "nothing, 3 s": theirs(lambda: time.sleep(3)),
            "holdfast migrate": lambda: hosts.felt(hosts.migrate),
            "holdfast migrate --post-copy": lambda: hosts.felt(lambda: hosts.migrate("--post-copy")),
            "virsh migrate --copy-storage-all": theirs(hosts.virsh_migrate),
            "the same with synchronous writes": theirs(lambda: hosts.virsh_migrate("--copy-storage-synchronous-writes")),
            "virsh save, copy, restore": theirs(hosts.save_and_restore),
        }
        take_turns(series, ways, round_count, quiet)
    return [series], goals(series)


def goals(series):
    ours = series.values("holdfast migrate", "gap_ms")
    median = series.median("holdfast migrate", "gap_ms")
    libvirt = series.median("virsh migrate --copy-storage-all", "gap_ms")
    return [
        at_most("stopped by a migration, median", median, MEDIAN_GOAL_MS, milliseconds),
        at_most("stopped by a migration, worst", max(ours, default=None), WORST_GOAL_MS, milliseconds),
        at_most(
            "stopped by a migration, of virsh migrate",
            median / libvirt if median and libvirt else None,
            1.0,
            lambda value: f"{value:.2f}",
        ),
    ]
