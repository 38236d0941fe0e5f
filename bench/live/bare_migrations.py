"""How long a guest is stopped while the machine of a QEMU without libvirt moves to another host with its disk."""

import json
import re
import shutil
import socket
import subprocess
import time

from live.lab import WARNINGS, Problem
from live.migrations import COLUMNS, Console, MovedGuest
from live.series import Series, at_most, milliseconds, take_turns

TITLE = "The machine of a QEMU without libvirt moves to another host with its disk and memory"
NOTE = (
    "Both hosts are on this one, and all connections are sockets without encryption. Mirror: QEMU's own means, a mirror of the disk to an\n"
    "NBD server of the other QEMU, then the migration of the memory, which waits before its end until the mirror has ended; switched: the\n"
    "mirror is switched to synchronous writes when little is left (QEMU 8.2). Stopped and rate: as for machines of libvirt."
)
TOTAL_GOAL_MS = 60.0
NEWEST_PEER = "mirror, switched"
PEERS = ("mirror", NEWEST_PEER)


class Qmp:
    """A connection to a monitor."""

    def __init__(self, path):
        for _ in range(500):
            self.connection = socket.socket(socket.AF_UNIX)
            try:
                self.connection.connect(str(path))
                break
            except OSError:
                self.connection.close()
                time.sleep(0.02)
        else:
            raise Problem(f"no QEMU listens at {path}")
        self.lines = self.connection.makefile("rb")
        self.events = []
        self.read()
        self("qmp_capabilities")

    def close(self):
        self.lines.close()
        self.connection.close()

    def read(self):
        line = self.lines.readline()
        if not line:
            raise Problem("QEMU has ended")
        return json.loads(line)

    def __call__(self, command, **arguments):
        arguments = {name.replace("_", "-"): value for name, value in arguments.items()}
        self.connection.sendall(json.dumps({"execute": command, "arguments": arguments}).encode() + b"\n")
        while True:
            message = self.read()
            if "event" in message:
                self.events.append(message)
            elif "error" in message:
                raise Problem(f"{command}: {message['error']['desc']}")
            else:
                return message["return"]

    def wait(self, name, is_it=lambda data: True):
        while True:
            for event in self.events:
                if event["event"] == name and is_it(event["data"]):
                    self.events.remove(event)
                    return event["data"]
            message = self.read()
            if "event" in message:
                self.events.append(message)


class BareHosts(MovedGuest):
    """A QEMU, and another host: a mount namespace in which the folder of the sockets is another one."""

    def __init__(self, lab, disk_mib):
        self.lab, self.path = lab, lab.folder / "bare.console"
        self.monitors = []
        self.original = lab.image("bare-original", disk_mib, disk_mib // 4)
        self.image, self.images = lab.images / "bare.qcow2", lab.work / "there"
        self.run, self.run_there = lab.folder / "run", lab.folder / "run-there"
        for folder in (self.images, self.run, self.run_there):
            folder.mkdir()
        script = f"mount -t tmpfs run /run && mount --bind {self.run_there} {self.run} && touch {self.run}/ready && exec sleep infinity"
        words = ["unshare", "--mount", "--propagation", "slave", "sh", "-c", script]
        self.other = subprocess.Popen(words, env=lab.env, stdin=subprocess.DEVNULL)
        while not (self.run_there / "ready").exists():
            time.sleep(0.01)

    def qemu(self, image, image_format, sockets, *more):
        guest = self.lab.root / "build/guest"
        words = ["qemu-system-x86_64", "-name", "bare", "-accel", "tcg", "-m", "160", "-nodefaults", "-display", "none"]
        words += ["-kernel", guest / "vmlinuz", "-initrd", guest / "initrd", "-append", "console=ttyS0 quiet tick"]
        words += ["-chardev", f"file,id=console,path={self.path},append=on", "-serial", "chardev:console"]
        words += ["-blockdev", f"driver={image_format},node-name=disk,file.driver=file,file.filename={image}"]
        words += ["-device", "virtio-blk-pci,drive=disk,id=disk0"]
        for name in ("moving", "bench"):
            words += ["-qmp", f"unix:{sockets}/{name}.qmp,server=on,wait=off"]
        words = [str(word) for word in [*words, *more]]
        subprocess.Popen(words, env=self.lab.env, stdin=subprocess.DEVNULL)
        monitor = Qmp(sockets / "bench.qmp")
        self.monitors.append(monitor)
        return monitor

    def start(self):
        self.path.unlink(missing_ok=True)
        shutil.copyfile(self.original, self.image)
        self.source = self.qemu(self.image, "qcow2", self.run)
        Console(self.path).wait(50)

    def clear(self):
        for monitor in self.monitors:
            monitor.close()
        self.monitors = []
        for folder in (self.run, self.run_there):
            path = folder / "bench.qmp"
            with socket.socket(socket.AF_UNIX) as probe:
                is_there = probe.connect_ex(str(path)) == 0
            if is_there:
                monitor = Qmp(path)
                monitor("quit")
                monitor.close()
        for image in [*self.images.iterdir(), self.image]:
            image.unlink(missing_ok=True)

    def migrate(self):
        receiver = [*self.lab.holdfast_words("receive-migration", "1", "--connect", f"qmp:{self.run}/moving.qmp")]
        command = ["nsenter", f"--mount=/proc/{self.other.pid}/ns/mnt", "--", *receiver]
        words = ["migrate", f"qmp:{self.run}/moving.qmp", self.images, "--connect-command", " ".join(command)]
        words += ["--accept-incomplete-memory", "--json", "--quiet"]
        answer = self.lab.run(self.lab.holdfast_words(*words), check=False)
        if answer.returncode not in (0, WARNINGS):
            raise Problem((answer.stderr or answer.stdout)[-800:])
        return int(re.search(r'"stopped_us":(\d+)', answer.stdout).group(1))

    def mirror(self, is_switched):
        """The ways of QEMU itself, with the other QEMU's image made before."""
        source, image = self.source, self.images / "bare.raw"
        size = json.loads(self.lab.run(["qemu-img", "info", "--output", "json", "-U", self.image]).stdout)["virtual-size"]
        with open(image, "wb") as file:
            file.truncate(size)
        there = self.qemu(image, "raw", self.run_there, "-incoming", "defer")
        nbd, memory = self.run_there / "nbd", self.run_there / "memory"
        there("nbd-server-start", addr={"type": "unix", "data": {"path": str(nbd)}})
        there("block-export-add", type="nbd", id="disk", node_name="disk", name="disk", writable=True)
        capabilities = [{"capability": name, "state": True} for name in ("events", "pause-before-switchover")]
        source("migrate-set-capabilities", capabilities=capabilities)
        there("migrate-set-capabilities", capabilities=capabilities)
        there("migrate-incoming", uri=f"unix:{memory}")
        server = {"type": "unix", "path": str(nbd)}
        source("blockdev-add", driver="nbd", node_name="target", server=server, export="disk")
        source("blockdev-mirror", device="disk", target="target", sync="full", job_id="mirror", filter_node_name="mirror-filter")
        source.wait("BLOCK_JOB_READY")
        if is_switched:
            source("block-job-change", id="mirror", type="mirror", copy_mode="write-blocking")
        source("migrate-set-parameters", max_bandwidth=64 << 30, downtime_limit=50)
        source("migrate", uri=f"unix:{memory}")
        source.wait("MIGRATION", lambda data: data["status"] == "pre-switchover")
        source("block-job-cancel", device="mirror")
        source.wait("BLOCK_JOB_COMPLETED")
        there("nbd-server-stop")
        source("migrate-continue", state="pre-switchover")
        source.wait("MIGRATION", lambda data: data["status"] == "completed")
        source("quit")


def measure(lab, size, round_count, quiet):
    series = Series(TITLE, NOTE, COLUMNS)
    hosts = BareHosts(lab, 256 if size == "quick" else 1024)
    try:

        def theirs(way):
            return lambda: hosts.felt(lambda: (way(), None)[1])

        ways = {
            "nothing, 3 s": theirs(lambda: time.sleep(3)),
            "holdfast migrate": lambda: hosts.felt(hosts.migrate),
            "mirror": theirs(lambda: hosts.mirror(False)),
        }
        if can_switch(lab):
            ways[NEWEST_PEER] = theirs(lambda: hosts.mirror(True))
        take_turns(series, ways, round_count, quiet)
    finally:
        hosts.other.kill()
    return [series], goals(series)


def can_switch(lab):
    version = re.search(r"version (\d+)\.(\d+)", lab.run(["qemu-system-x86_64", "--version"]).stdout)
    return tuple(int(number) for number in version.groups()) >= (8, 2)


def goals(series):
    own = series.median("holdfast migrate", "own_ms")
    median = series.median("holdfast migrate", "gap_ms")
    peers = [value for value in (series.median(way, "gap_ms") for way in PEERS) if value]
    return [
        at_most("stopped by a migration without libvirt, own figure", own, TOTAL_GOAL_MS, milliseconds),
        at_most(
            "stopped by a migration without libvirt, of the best of QEMU's own",
            median / min(peers) if median and peers else None,
            1.0,
            lambda value: f"{value:.2f}",
        ),
    ]
