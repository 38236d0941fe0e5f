"""A disk of 10 TiB with little data at many offsets: memory must not grow with the size of a disk."""

import os
import random

import process
import sparse
from jobs import JOBS, Result, repository_bytes
from process import Failed

SIZE_BYTES = 10 << 40
SEED = 20240229
# Count and size of the pieces: long runs like files, and single blocks like a database.
PIECES = {"small": ((256, 128 << 10), (8192, 4096)), "large": ((8192, 128 << 10), (65536, 4096))}


def create(path, size):
    """Writes the disk; half of each piece is noise, and half can be compressed."""
    dice = random.Random(SEED)
    with open(path, "wb", buffering=0) as file:
        file.truncate(SIZE_BYTES)
        for count, length in PIECES[size]:
            for number in range(count):
                place = dice.randrange(SIZE_BYTES // length) * length
                text = (b"row %d of a table that is not very original\n" % number) * (length // 64)
                os.pwrite(file.fileno(), (dice.randbytes(length // 2) + text)[:length], place)


def measure(laboratory, holdfast, size, say):
    """A Result with one run of each job: backup, unchanged, restore, verify. Only Holdfast: peers read all the
    zeroes.
    """
    results = {job.name: Result() for job in JOBS if job.name in ("first", "unchanged", "restore", "verify")}
    for name, result in results.items():
        result.problem = holdfast.missing(name) or ""
        result.is_missing = bool(result.problem)
    if not results["first"].problem:
        try:
            create(laboratory.disks / "day0.raw", size)
        except OSError as error:
            results["first"].problem = f"a sparse file of 10 TiB cannot be made here: {error.strerror}"
    steps = {
        "first": lambda: holdfast.backup("first", reread=False),
        "unchanged": lambda: holdfast.backup("again", reread=True),
        "restore": lambda: holdfast.restore("again"),
        "verify": holdfast.verify,
    }
    for name, command in steps.items():
        result = results[name]
        if not result.problem and results["first"].problem:
            result.problem = "not run: the first backup did not succeed"
        if not result.problem:
            try:
                if name == "first":
                    laboratory.prepare(holdfast)
                result.runs.append(step(laboratory, holdfast, name, command(), say))
            except Failed as failure:
                result.problem = str(failure)
        if result.problem:
            say(f"    {name:<10} {'MISSING' if result.is_missing else 'NOT DONE'}: {result.problem}")
    return results


def step(laboratory, holdfast, name, command, say):
    disk = laboratory.present("day0.raw")
    before = repository_bytes(holdfast.repo)
    if name == "restore":
        laboratory.empty_out(holdfast)
    run = laboratory.run(holdfast, command, laboratory.source)
    if name == "restore":
        restored = holdfast.out / disk.name
        difference = sparse.first_difference(restored, disk)
        if difference is not None:
            raise Failed(f"the restored disk differs from its source near byte {difference}")
        run.figures["target_bytes"] = sparse.allocated_bytes(restored)
        laboratory.empty_out(holdfast)
    after = repository_bytes(holdfast.repo)
    run.figures.update(repository_bytes=after, added_bytes=after - before)
    say(
        f"    {name:<10} {run.wall_s:8.2f} s  cpu {run.cpu_s:8.2f} s  {run.rss_bytes / 2**20:7.0f} MiB"
        f"  +{run.figures['added_bytes'] / 1e6:9.2f} MB"
    )
    return run
