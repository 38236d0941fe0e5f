"""Reads of 1 MiB at random offsets of the newest snapshot, through the FUSE mount of each program."""

import os
import random
import shutil
import signal
import statistics
import subprocess
import time

import sparse
from jobs import Result, wait_for
from process import Failed, Run

READ_BYTES = 1 << 20
READ_COUNT = 50
MOUNT_TIMEOUT_S = 60
SEED = 20240229


def places(disk):
    """Offsets in the data of a disk, the same for every program."""
    last = os.path.getsize(disk) - READ_BYTES
    extents = [(start, min(end, last)) for start, end in sparse.data_extents(disk) if start < last]
    dice = random.Random(SEED)
    weights = [end - start for start, end in extents]
    chosen = dice.choices(extents, weights, k=READ_COUNT)
    return [dice.randrange(start, end) // 4096 * 4096 for start, end in chosen]


def measure(laboratory, programs, run_count):
    """A Result per program; each run has the times of its reads in milliseconds."""
    results = {}
    for program in programs:
        result = results[program.name] = Result()
        reason = None if program.can_mount and os.path.exists("/dev/fuse") else f"{program.name} cannot mount here"
        if reason:
            result.problem, result.is_missing = reason, True
            laboratory.say(f"    {program.name:<15} MISSING: {reason}")
    for _ in range(run_count):
        for program in programs:
            result = results[program.name]
            if result.problem:
                continue
            try:
                disk = laboratory.present("day2.raw")
                laboratory.bring_back(program, "day2")
                run = through_mount(program, disk)
            except Failed as failure:
                result.problem = str(failure)
                laboratory.say(f"    {program.name:<15} NOT DONE: {failure}")
                continue
            result.runs.append(run)
            p50, p95 = percentiles([run])
            ready = run.figures["open_ms"]
            laboratory.say(f"    {program.name:<15} p50 {p50:7.2f} ms  p95 {p95:7.2f} ms  ready after {ready:5.0f} ms")
    return results


def percentiles(runs):
    """p50 and p95 in milliseconds of the reads of all runs."""
    reads = sorted(ms for run in runs for ms in run.figures["reads_ms"])
    return statistics.median(reads), reads[min(len(reads) - 1, len(reads) * 95 // 100)]


def through_mount(program, disk):
    folder = program.root / "mount"
    folder.mkdir(exist_ok=True)
    begun = time.perf_counter()
    with open(program.log, "ab") as log:
        server = subprocess.Popen(
            [str(word) for word in program.mount(folder)],
            env=program.env(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        found = wait_for(lambda: server.poll() is not None or program.mounted_disk(folder, "day2"), MOUNT_TIMEOUT_S)
        if found is True or not found:
            raise Failed(f"the mount of {program.name} shows no disk (see {program.log})")
        open_ms = (time.perf_counter() - begun) * 1e3
        reads_ms = read_and_compare(found, disk)
        rss = peak_rss(server.pid)
    finally:
        unmount(server, folder)
    return Run(sum(reads_ms) / 1e3, 0.0, rss, 0.0, {"open_ms": open_ms, "reads_ms": reads_ms})


def read_and_compare(mounted, disk):
    reads_ms = []
    with open(mounted, "rb", buffering=0) as file, open(disk, "rb", buffering=0) as source:
        for place in places(disk):
            begun = time.perf_counter()
            data = os.pread(file.fileno(), READ_BYTES, place)
            reads_ms.append((time.perf_counter() - begun) * 1e3)
            if data != os.pread(source.fileno(), READ_BYTES, place):
                raise Failed(f"the mounted disk differs from its source near byte {place}")
    return reads_ms


def peak_rss(pid):
    with open(f"/proc/{pid}/status", encoding="utf-8") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def unmount(server, folder):
    fusermount = shutil.which("fusermount3") or shutil.which("fusermount") or "umount"
    option = [] if fusermount == "umount" else ["-u", "-z"]
    if os.path.ismount(folder):
        subprocess.run([fusermount, *option, str(folder)], capture_output=True, check=False)
    try:
        server.wait(timeout=20)
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
