#!/usr/bin/env python3
"""Measures containers, and compares their disks with QEMU's FUSE export and nbdfuse.

    bench/containers.py HOLDFAST [--folder DIR] [--snapshots 50] [--seconds 3] [--rounds 5] [--only PART]

Needs root, FUSE, loop devices, fio, qemu-storage-daemon and nbdfuse (libnbd-bin). Parts:

- snapshots: a program writes 4 KiB blocks to a file of the mounted container while snapshots
  are taken and deleted; the longest time without a completed write during each snapshot counts, and the longest during
  a time of the same length without one.
- reads: direct reads of the disk by fio, in turn with the peers on the same image, through the page cache of the host;
  medians of the rounds.
- chain: random reads and writes of a file on ext4 in a container with five layers, and on ext4 in a raw image behind the
  same server.
- fsync: random reads, alone and beside a program that writes and syncs: of the disk, and of a file on ext4, where the loop
  device of the kernel does one flush or hands over one read at a time.
"""

import argparse
import bisect
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
FILE_BYTES = 256 << 20


def run(holdfast, *words):
    done = subprocess.run([holdfast, *map(str, words), "--json"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{words}: {done.stderr}")
    return json.loads(done.stdout)["report"]


def fio(path, rw, block, depth, seconds, *more):
    """Runs fio; returns the rate in operations per second, and the latencies p50 and p99 in microseconds."""
    words = [f"--filename={path}", f"--rw={rw}", f"--bs={block}", f"--numjobs={depth}", f"--runtime={seconds}", *more]
    # Threads instead of a queue: with a queue, the submission of some requests waits for their end.
    fixed = ["--name=job", "--direct=1", "--ioengine=psync", "--thread", "--group_reporting", "--time_based"]
    fixed += ["--output-format=json", "--norandommap"]
    done = subprocess.run(["fio", *fixed, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"fio {words}: {done.stderr}{done.stdout}")
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    part = job["write" if "write" in rw else "read"]
    percentiles = part["clat_ns"].get("percentile", {})
    return part["iops"], *(percentiles.get(name, 0) / 1000 for name in ("50.000000", "99.000000"))


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
            *("--blockdev", f"driver=file,filename={image},node-name=file,read-only=on"),
            *("--blockdev", "driver=qcow2,file=file,node-name=disk,read-only=on"),
            *("--export", f"type=fuse,id=e,node-name=disk,mountpoint={point},writable=off"),
        ]
    )
    while point.stat().st_size != DISK_BYTES:
        time.sleep(0.05)
    return process, point


def nbdfuse_export(image, folder):
    """Starts nbdfuse on qemu-nbd, and returns its process and its file."""
    point = folder / "nbdfuse"
    point.mkdir(exist_ok=True)
    server = ["qemu-nbd", "--read-only", "--cache=writeback", "--format=qcow2", str(image)]
    process = subprocess.Popen(["nbdfuse", "--readonly", str(point), "--socket-activation", *server])
    while not (point / "nbd").exists():
        time.sleep(0.05)
    return process, point / "nbd"


READS = (("4k", 1, "p50", 1), ("4k", 16, "rate", 0), ("1m", 1, "p50", 1))


def compare_reads(holdfast, folder, arguments):
    container, point = folder / "disk", folder / "mnt"
    point.mkdir()
    run(holdfast, "container", "create", container, DISK_BYTES, "--filesystem", "none")
    run(holdfast, "container", "mount", container, point, "--disk")
    fill(point / "disk.raw")
    image = run(holdfast, "container", "info", container)["layers"][0]["file"]
    run(holdfast, "container", "unmount", container)
    figures = {}

    def measure(name, path):
        for block, depth, _, place in READS:
            figure = fio(path, "randread", block, depth, arguments.seconds, "--readonly")[place]
            figures.setdefault((name, block, depth), []).append(figure)

    for _ in range(arguments.rounds):
        run(holdfast, "container", "mount", container, point, "--disk")
        measure("holdfast", point / "disk.raw")
        run(holdfast, "container", "unmount", container)
        for name, start in (("qemu", qemu_export), ("nbdfuse", nbdfuse_export)):
            process, export = start(image, folder)
            measure(name, export)
            process.terminate()
            process.wait()
    for block, depth, what, _ in READS:
        own, *peers = (statistics.median(figures[name, block, depth]) for name in ("holdfast", "qemu", "nbdfuse"))
        unit = "us" if what == "p50" else "/s"
        best = min(peers) if what == "p50" else max(peers)
        print(
            f"read {block:>2}, depth {depth:>2}, {what:>4}: holdfast {own:8.0f} {unit}, qemu {peers[0]:8.0f} {unit}, "
            f"nbdfuse {peers[1]:8.0f} {unit}, ratio to the best {own / best:.2f}"
        )


def compare_chain(holdfast, folder, arguments):
    raw, raw_point = folder / "disk.raw", folder / "raw-disk"
    points = {"raw": folder / "raw-mnt", "chain": folder / "chain-mnt"}
    for point in (raw_point, *points.values()):
        point.mkdir()
    with open(raw, "wb") as file:
        file.truncate(DISK_BYTES)
    subprocess.run(["mkfs.ext4", "-q", "-F", str(raw)], check=True)
    run(holdfast, "image", "mount", raw, raw_point, "--writable")
    served = next(path for path in raw_point.iterdir() if path.stat().st_size == DISK_BYTES)
    words = ["losetup", "--find", "--show", "--direct-io=on", str(served)]
    device = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    subprocess.run(["mount", device, str(points["raw"])], check=True)
    container = folder / "chain"
    run(holdfast, "container", "create", container, DISK_BYTES)
    run(holdfast, "container", "mount", container, points["chain"])
    for point in points.values():
        fio(point / "file", "write", "1m", 1, 60, f"--size={FILE_BYTES}", "--time_based=0", "--end_fsync=1")
    for layer in range(4):
        run(holdfast, "container", "snapshot", container, f"layer{layer}")
        fio(points["chain"] / "file", "randwrite", "64k", 4, 60, f"--size={FILE_BYTES}", "--time_based=0", "--io_size=48m")
    figures = {}
    # Writes at last: the top layer has all blocks afterwards.
    for rw in ("randread", "randwrite"):
        for _ in range(arguments.rounds):
            for name, point in points.items():
                rate = fio(point / "file", rw, "4k", 4, arguments.seconds, f"--size={FILE_BYTES}")[0]
                figures.setdefault((name, rw), []).append(rate)
    for rw in ("randread", "randwrite"):
        chain, plain = (statistics.median(figures[name, rw]) for name in ("chain", "raw"))
        print(f"ext4, {rw:>9} 4k: five layers {chain:8.0f} /s, raw {plain:8.0f} /s, ratio {chain / plain:.2f}")
    run(holdfast, "container", "unmount", container)
    subprocess.run(["umount", str(points["raw"])], check=True)
    subprocess.run(["losetup", "--detach", device], check=True)
    run(holdfast, "unmount", raw_point)


def reads_beside_fsync(holdfast, folder, arguments):
    container, point = folder / "synced", folder / "synced-mnt"
    point.mkdir()
    run(holdfast, "container", "create", container, DISK_BYTES)
    for what, words, read, written in (("disk", ["--disk"], "disk.raw", "disk.raw"), ("ext4", [], "file", "journal")):
        run(holdfast, "container", "mount", container, point, *words)
        if what == "disk":
            fill(point / read)
        else:
            fio(point / read, "write", "1m", 1, 60, f"--size={FILE_BYTES}", "--time_based=0", "--end_fsync=1")
        # The writes are in the first 64 MiB.
        where = ["--offset=512m", "--size=256m"] if what == "disk" else []
        figures = {"alone": [], "beside": []}
        for _ in range(arguments.rounds):
            figures["alone"].append(fio(point / read, "randread", "4k", 1, arguments.seconds, *where)[1:])
            job = ["--name=sync", f"--filename={point / written}", "--rw=write", "--bs=4k", "--fsync=1", "--size=64m"]
            syncing = subprocess.Popen(["fio", *job, "--time_based", "--runtime=600"], stdout=subprocess.DEVNULL)
            time.sleep(1)
            figures["beside"].append(fio(point / read, "randread", "4k", 1, arguments.seconds, *where)[1:])
            syncing.terminate()
            syncing.wait()
        run(holdfast, "container", "unmount", container)
        for place, name in enumerate(("p50", "p99")):
            alone, beside = (statistics.median(figure[place] for figure in figures[name]) for name in ("alone", "beside"))
            print(f"{what}, read 4k {name}: {alone:.0f} us, beside fsyncs {beside:.0f} us, ratio {beside / alone:.2f}")
        if what == "disk":
            run(holdfast, "container", "mount", container, point, "--disk")
            subprocess.run(["mkfs.ext4", "-q", "-F", str(point / "disk.raw")], check=True)
            run(holdfast, "container", "unmount", container)


class Writer:
    """Writes blocks without a pause, and remembers when each was complete."""

    def __init__(self, path):
        self.file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        # Writes that allocate blocks fill the journal: its commits, with a flush each, would stop the writes every second.
        whole = mmap.mmap(-1, 1 << 20)
        for offset in range(0, FILE_BYTES, 1 << 20):
            os.pwritev(self.file, [whole], offset)
        os.fsync(self.file)
        self.buffer = mmap.mmap(-1, 4096)
        self.ends, self.is_done = [], False
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self):
        while not self.is_done:
            os.pwritev(self.file, [self.buffer], random.randrange(FILE_BYTES // 4096) * 4096)
            self.ends.append(time.monotonic())

    def gap(self, start, end):
        """The longest time without a completed write, in ms."""
        ends = list(self.ends)
        first = max(bisect.bisect_left(ends, start) - 1, 0)
        ends = ends[first : bisect.bisect_right(ends, end) + 1]
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
    rate = writer.rate(start, time.monotonic())
    gaps, calm, paused, merging = [], [], [], []
    for number in range(arguments.snapshots):
        start = time.monotonic()
        paused.append(run(holdfast, "container", "snapshot", container, f"s{number}")["paused_ms"])
        end = time.monotonic()
        time.sleep(0.3 + end - start)
        gaps.append(writer.gap(start, end))
        calm.append(writer.gap(end + 0.2, end + 0.2 + end - start))
        if number > 0:
            start = time.monotonic()
            run(holdfast, "container", "delete", container, f"s{number - 1}")
            merging.append(writer.rate(start, time.monotonic()) / rate)
    writer.close()
    run(holdfast, "container", "unmount", container)
    print(f"writes: {rate:.0f}/s")
    for what, found in (("snapshots", gaps), ("as long without", calm)):
        print(f"{what}: writes stand still p50 {statistics.median(found):.1f} ms, max {max(found):.1f} ms")
    print(f"snapshots: frozen p50 {statistics.median(paused):.1f} ms, max {max(paused):.1f} ms")
    if merging:
        print(f"merges: rate of writes while they run, median {statistics.median(merging):.2f} x")


PARTS = {"snapshots": measure_snapshots, "reads": compare_reads, "chain": compare_chain, "fsync": reads_beside_fsync}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("holdfast", type=Path)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--snapshots", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=PARTS)
    arguments = parser.parse_args()
    for name, part in PARTS.items():
        if arguments.only in (None, name):
            with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
                part(arguments.holdfast.resolve(), Path(folder), arguments)


if __name__ == "__main__":
    main()
