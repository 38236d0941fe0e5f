#!/usr/bin/env python3
"""Measures containers, and compares their disks with QEMU's FUSE export.

    bench/containers.py HOLDFAST [--folder DIR] [--snapshots 50] [--seconds 3] [--rounds 5]

Needs root, FUSE and loop devices. Reads of the disk: direct, of one thread, in turn with qemu-storage-daemon on the same
image; the table shows medians of the rounds, and the ratio of Holdfast. Snapshots: a program writes 4 KiB blocks to a
file of the mounted container while snapshots are taken and deleted; the longest time without a completed write around
each snapshot counts.
"""

import argparse
import json
import mmap
import os
import random
import statistics
import subprocess
import tempfile
import threading
import time
from pathlib import Path

DISK_BYTES = 1 << 30


def run(holdfast, *words):
    done = subprocess.run([holdfast, *map(str, words), "--json"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{words}: {done.stderr}")
    return json.loads(done.stdout)["report"]


def reads(path, length, seconds):
    """Latencies of random direct reads, in seconds."""
    file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    buffer = mmap.mmap(-1, length)
    count, times = os.fstat(file).st_size // length, []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        offset = random.randrange(count) * length
        start = time.perf_counter()
        os.preadv(file, [buffer], offset)
        times.append(time.perf_counter() - start)
    os.close(file)
    return times


def fill(path):
    """Makes the whole disk data."""
    block = os.urandom(1 << 20)
    with open(path, "r+b", buffering=0) as file:
        for offset in range(0, DISK_BYTES, 1 << 20):
            file.seek(offset)
            file.write(block)
        os.fsync(file.fileno())


def qemu_export(image, folder):
    """Starts a FUSE export of an image, and returns its process and its file."""
    point = folder / "qemu.raw"
    point.write_bytes(b"")
    process = subprocess.Popen(
        [
            "qemu-storage-daemon",
            *("--blockdev", f"driver=file,filename={image},node-name=file,cache.direct=on,read-only=on"),
            *("--blockdev", "driver=qcow2,file=file,node-name=disk,read-only=on"),
            *("--export", f"type=fuse,id=e,node-name=disk,mountpoint={point},writable=off"),
        ]
    )
    while point.stat().st_size != DISK_BYTES:
        time.sleep(0.05)
    return process, point


def compare_reads(holdfast, folder, arguments):
    container, point = folder / "disk", folder / "mnt"
    point.mkdir()
    run(holdfast, "container", "create", container, DISK_BYTES, "--filesystem", "none")
    run(holdfast, "container", "mount", container, point, "--disk")
    fill(point / "disk.raw")
    image = run(holdfast, "container", "info", container)["layers"][0]["file"]
    figures = {}
    for _ in range(arguments.rounds):
        for length in (4096, 1 << 20):
            figures.setdefault(("holdfast", length), []).append(
                statistics.median(reads(point / "disk.raw", length, arguments.seconds))
            )
        run(holdfast, "container", "unmount", container)
        process, export = qemu_export(image, folder)
        for length in (4096, 1 << 20):
            figures.setdefault(("qemu", length), []).append(
                statistics.median(reads(export, length, arguments.seconds))
            )
        process.terminate()
        process.wait()
        run(holdfast, "container", "mount", container, point, "--disk")
    run(holdfast, "container", "unmount", container)
    for length in (4096, 1 << 20):
        own, peer = (statistics.median(figures[name, length]) * 1e6 for name in ("holdfast", "qemu"))
        print(f"read {length >> 10:>5} KiB p50: holdfast {own:8.1f} us, qemu {peer:8.1f} us, ratio {own / peer:.2f}")


class Writer:
    """Writes blocks without a pause, and remembers when each was complete."""

    def __init__(self, path):
        self.file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        os.ftruncate(self.file, 256 << 20)
        self.buffer = mmap.mmap(-1, 4096)
        self.ends, self.is_done = [], False
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self):
        while not self.is_done:
            os.pwritev(self.file, [self.buffer], random.randrange(65536) * 4096)
            self.ends.append(time.monotonic())

    def gap(self, start, end):
        """The longest time without a completed write, in ms."""
        ends = [at for at in list(self.ends) if start - 0.5 <= at <= end + 0.5]
        return max((later - earlier for earlier, later in zip(ends, ends[1:])), default=0) * 1000

    def rate(self, start, end):
        return sum(start <= at <= end for at in list(self.ends)) / (end - start)

    def close(self):
        self.is_done = True
        self.thread.join()
        os.close(self.file)


def measure_snapshots(holdfast, folder, arguments):
    container, point = folder / "busy", folder / "busy-mnt"
    point.mkdir()
    run(holdfast, "container", "create", container, 1 << 30)
    run(holdfast, "container", "mount", container, point)
    writer = Writer(point / "file")
    time.sleep(2)
    start = time.monotonic()
    time.sleep(2)
    calm = writer.gap(start, time.monotonic())
    rate = writer.rate(start, time.monotonic())
    gaps, paused, merging = [], [], []
    for number in range(arguments.snapshots):
        start = time.monotonic()
        paused.append(run(holdfast, "container", "snapshot", container, f"s{number}")["paused_ms"])
        time.sleep(0.6)
        gaps.append(writer.gap(start, start + 0.1))
        if number > 0:
            start = time.monotonic()
            run(holdfast, "container", "delete", container, f"s{number - 1}")
            merging.append(writer.rate(start, time.monotonic()) / rate)
    writer.close()
    run(holdfast, "container", "unmount", container)
    print(f"writes: {rate:.0f}/s, longest gap without snapshots {calm:.1f} ms")
    print(f"snapshots: writes stand still p50 {statistics.median(gaps):.1f} ms, max {max(gaps):.1f} ms")
    print(f"snapshots: frozen p50 {statistics.median(paused):.1f} ms, max {max(paused):.1f} ms")
    if merging:
        print(f"merges: rate of writes while they run, median {statistics.median(merging):.2f} x")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("holdfast", type=Path)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--snapshots", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        measure_snapshots(arguments.holdfast.resolve(), Path(folder), arguments)
        compare_reads(arguments.holdfast.resolve(), Path(folder), arguments)


if __name__ == "__main__":
    main()
