"""How long a copy of a disk to another host takes, with compression and without, over a limited connection and a fast one."""

import os
import socket
import threading
import time

from live.lab import MIB
from live.migrations import Sshd
from live.series import Series, at_most, megabytes, seconds, take_turns

TITLE = "A disk is copied to another host with live-copy"
NOTE = (
    "The other host is an sshd on this one. The limited connection goes through a proxy that passes 10 MB/s; the fast one is limited by\n"
    "ssh, which encrypts on one processor. Text: lines with a counter, between random bytes of the same size. Noise: random bytes."
)
BYTES_PER_S = 10_000_000
WITHOUT = "--no-compression"
COMPRESSED_LIMIT = 0.60
UNCHANGED_LIMIT = 1.03


class SlowProxy:
    """Passes a limited number of bytes per second to a port."""

    def __init__(self, port):
        self.to = port
        self.listener = socket.socket()
        # What is in its buffers is sent, however slow it is.
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
        self.listener.bind(("127.0.0.1", 0))
        self.listener.listen()
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            client, _ = self.listener.accept()
            server = socket.create_connection(("127.0.0.1", self.to))
            for one, other in ((client, server), (server, client)):
                threading.Thread(target=self.forward, args=(one, other), daemon=True).start()

    def forward(self, one, other):
        due_s = time.perf_counter()
        while True:
            try:
                piece = one.recv(16 << 10)
                if not piece:
                    break
                other.sendall(piece)
            except OSError:
                break
            # Time that was not used is lost, as it is on a network.
            due_s = max(due_s, time.perf_counter() - 0.01) + len(piece) / BYTES_PER_S
            time.sleep(max(0.0, due_s - time.perf_counter()))
        for end in (one, other):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass


class Copies:
    def __init__(self, lab, disk_mib):
        self.lab = lab
        self.sshd = Sshd(lab)
        self.slow = SlowProxy(self.sshd.port)
        self.disks = {"text": lab.work / "text.raw", "noise": lab.work / "noise.raw"}
        with open(self.disks["text"], "wb") as file:
            for number in range(disk_mib * 8):
                lines = b"".join(b"%012d a line of a file\n" % (number * 2000 + line) for line in range(2000))
                file.write(os.urandom(65536) + lines[:65536])
        with open(self.disks["noise"], "wb") as file:
            for _ in range(disk_mib):
                file.write(os.urandom(MIB))
        self.target = lab.work / "copy.raw"

    def copy(self, disk, port, *words):
        options = [f"Port={port}", f"IdentityFile={self.sshd.key}", "IdentitiesOnly=yes"]
        options += ["StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null"]
        command = ["live-copy", self.disks[disk], f"ssh://root@127.0.0.1{self.target}", *words]
        for option in options:
            command += ["--ssh-option", option]
        try:
            report = self.lab.holdfast(*command)
        finally:
            self.target.unlink(missing_ok=True)
        return {"seconds": report["duration_ms"] / 1000, "sent": report["sent_bytes"]}


def way_of(link, disk, *words):
    return " ".join([f"{link}, {disk}", *words])


def measure(lab, size, round_count, quiet):
    copies = Copies(lab, 64 if size == "quick" else 128)
    series = Series(TITLE, NOTE, {"seconds": ("all of it", seconds), "sent": ("sent", megabytes)})
    ways = {}
    for link, port in (("10 MB/s", copies.slow.port), ("fast", copies.sshd.port)):
        for disk in copies.disks:
            for words in ([], [WITHOUT], [WITHOUT, "--ssh-option", "Compression=yes"]):
                ways[way_of(link, disk, *words)] = lambda port=port, disk=disk, words=words: copies.copy(disk, port, *words)
    take_turns(series, ways, round_count, quiet)
    return [series], goals(series)


def goals(series):
    def ratio(link, disk):
        ours, without = (series.median(way_of(link, disk, *words), "seconds") for words in ([], [WITHOUT]))
        return ours / without if ours and without else None

    limits = {
        ("10 MB/s", "text"): COMPRESSED_LIMIT,
        ("10 MB/s", "noise"): UNCHANGED_LIMIT,
        ("fast", "text"): UNCHANGED_LIMIT,
        ("fast", "noise"): UNCHANGED_LIMIT,
    }
    return [
        at_most(f"a copy over a connection ({link}) of {disk}, of one without compression", ratio(link, disk), limit, "{:.2f}".format)
        for (link, disk), limit in limits.items()
    ]
