"""A guest that measures itself (scripts/guest/measure.c): its ticks, by the host's clock, and the time of its
writes.
"""

import json
import os
import queue
import socket
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field

GAP_COUNT_MAX = 5


@dataclass
class Felt:
    """The measurements in a guest during an operation."""

    seconds: float = 0.0
    gap_ms: float = 0.0  # the longest time without a tick, by the host's clock
    gaps: list = field(default_factory=list)  # all long ones: seconds since the start, and milliseconds
    disk: dict = field(default_factory=dict)
    file: dict = field(default_factory=dict)


class Guest:
    """The connection to one guest, which survives restarts of its machine."""

    def __init__(self, path, console):
        self.path, self.console = str(path), console
        self.answers = queue.Queue()
        self.lock = threading.Lock()
        self.connection = None
        self.tick_count = 0
        self.last_tick_s = None
        self.gaps = []  # end and length of each, in seconds
        self.is_closed = False
        self.thread = threading.Thread(target=self.read, daemon=True)
        self.thread.start()

    def close(self):
        self.is_closed = True
        self.thread.join()

    def read(self):
        try:
            # With real-time priority, so that delays of this thread do not count as gaps of the guest.
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
        except OSError:
            pass
        while not self.is_closed:
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(self.path)
            except OSError:
                connection.close()
                time.sleep(0.002)
                continue
            connection.settimeout(0.2)
            self.connection = connection
            self.follow(connection)
            self.connection = None
            connection.close()

    def follow(self, connection):
        rest = b""
        while not self.is_closed:
            try:
                received = connection.recv(65536)
            except TimeoutError:
                continue
            except OSError:
                return
            if not received:
                return
            now_s = time.perf_counter()
            *lines, rest = (rest + received).split(b"\n")
            if b"t" in lines:
                self.note_tick(now_s, lines.count(b"t"))
            for line in lines:
                if line and line != b"t":
                    self.answers.put(line.decode())

    def note_tick(self, now_s, count):
        with self.lock:
            if self.last_tick_s is not None:
                gap = (now_s, now_s - self.last_tick_s)
                # Only the longest gaps are kept.
                self.gaps = sorted([*self.gaps, gap], key=lambda gap: -gap[1])[:GAP_COUNT_MAX]
            self.last_tick_s = now_s
            self.tick_count += count

    def wait(self, timeout_s=120):
        """Waits for a tick; returns its time by the host's clock."""
        with self.lock:
            begin = self.tick_count
        deadline = time.perf_counter() + timeout_s
        while time.perf_counter() < deadline:
            with self.lock:
                if self.tick_count > begin:
                    return self.last_tick_s
            time.sleep(0.001)
        console = self.console.read_text(errors="replace")[-300:] if self.console.exists() else ""
        raise RuntimeError(f"the guest does not tick; its console says {console!r}")

    def ask(self, line, timeout_s=120):
        """Sends a command to the guest; returns its answer."""
        while not self.answers.empty():
            self.answers.get_nowait()
        connection = self.connection
        if connection is None:
            raise RuntimeError(f"the guest is not connected: {line}")
        connection.sendall(line.encode() + b"\n")
        try:
            answer = self.answers.get(timeout=timeout_s)
        except queue.Empty:
            raise RuntimeError(f"the guest does not answer: {line}") from None
        if answer.startswith("error"):
            raise RuntimeError(f"the guest says of {line!r}: {answer}")
        return answer

    def report(self):
        return json.loads(self.ask("report"))

    @contextmanager
    def watched(self, after_s=0.3):
        """Yields the measurements of the guest from now until shortly after the end of the block."""
        felt = Felt()
        self.wait()
        self.report()
        with self.lock:
            self.gaps = []
        start_s = time.perf_counter()
        yield felt
        felt.seconds = time.perf_counter() - start_s
        time.sleep(after_s)
        self.wait()
        with self.lock:
            felt.gaps = [(round(end_s - gap_s - start_s, 3), round(gap_s * 1000, 1)) for end_s, gap_s in self.gaps]
        felt.gap_ms = felt.gaps[0][1]
        report = self.report()
        felt.disk, felt.file = report["disk"], report["file"]

    def errors(self):
        """Errors in the guest since the last report: failed writes, and blocks with wrong content."""
        report = self.report()
        said = [line for line in self.console.read_text(errors="replace").splitlines() if "BAD" in line]
        counts = {f"{kind} {what}": report[kind][what] for kind in ("disk", "file") for what in ("errors", "wrong")}
        return [f"{count} {what}" for what, count in counts.items() if count] + said


def percentile_ms(latencies, share):
    """The time in milliseconds within which this share of writes was completed; up to an eighth too high."""
    wanted, seen = latencies["count"] * share, 0
    for end_us, count in latencies["buckets"]:
        seen += count
        if seen >= wanted:
            return min(end_us, latencies["max_us"]) / 1000
    return latencies["max_us"] / 1000
