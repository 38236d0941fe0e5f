"""The jobs that every program runs, alternately: Holdfast, one peer after the other, and again."""

import os
import shutil
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

import process
import sparse
from process import Failed
from programs import DISK


@dataclass(frozen=True)
class Job:
    """A job: the action, the disk, and the states of the repository before and after it."""

    name: str
    title: str
    action: str  # backup, restore or verify
    begins: str  # state that is restored before each run
    disk: str
    ends: str = ""  # state that is kept for later jobs
    reread: bool = False

    @property
    def tag(self):
        """Name of the snapshot that is created, or restored."""
        return {"unchanged": "again", "restore": "day2", "verify": "day2"}.get(self.name, self.name)


JOBS = [
    Job("first", "first backup of day0", "backup", "empty", "day0.raw", ends="day0"),
    Job("day1", "day1: packages installed, logs rotated, files deleted", "backup", "day0", "day1.raw", ends="day1"),
    Job("day2", "day2: scattered changes in a database", "backup", "day1", "day2.raw", ends="day2"),
    Job("unchanged", "unchanged disk, read again", "backup", "day2", "day2.raw", reread=True),
    Job("restore", "restore of day2, durable at the end", "restore", "day2", "day2.raw"),
    Job("verify", "verify all that is stored", "verify", "day2", "day2.raw"),
    Job("second", "second machine of the same kind, after day0", "backup", "day0", "second.raw"),
]


@dataclass
class Result:
    """All runs of a job by one program, or the reason why there are none."""

    runs: list = field(default_factory=list)
    problem: str = ""  # why it was not run, or did not complete
    is_missing: bool = False  # the program does not support the job

    def median(self, figure):
        values = [value for value in map(figure, self.runs) if value is not None]
        return statistics.median(values) if values and not self.problem else None

    def spread(self, figure):
        values = [value for value in map(figure, self.runs) if value is not None]
        return (min(values), max(values)) if values else None


def repository_bytes(folder):
    """Total length of all files: the bytes to store or to send elsewhere."""
    return sum((Path(base) / name).lstat().st_size for base, _, names in os.walk(folder) for name in names)


class Laboratory:
    """Runs jobs: has the folders of the disks, stores states of repositories, and prints the progress."""

    def __init__(self, disks, source, timeout_s, say):
        self.disks = disks
        self.source = source  # folder in which the disk of a job appears under one name
        self.timeout_s = timeout_s
        self.say = say

    def present(self, disk):
        """Puts a disk of the corpus where the programs look for it, and reads it into the page cache."""
        place = self.source / DISK
        place.unlink(missing_ok=True)
        os.link(self.disks / disk, place)
        sparse.warm(place)
        return place

    def run(self, program, command, cwd):
        os.sync()
        return process.run(command, program.env(), cwd, program.log, self.timeout_s)

    def prepare(self, program):
        """Creates an empty repository, and stores it as the state `empty`."""
        shutil.rmtree(program.root, ignore_errors=True)
        for folder in (program.live, program.home, program.out):
            folder.mkdir(parents=True)
        for command in program.init():
            self.run(program, command, self.source)
        self.keep(program, "empty")

    def keep(self, program, state):
        shutil.rmtree(program.root / state, ignore_errors=True)
        copy(program.live, program.root / state)

    def bring_back(self, program, state):
        if not (program.root / state).is_dir():
            raise Failed(f"it never reached the state {state}")
        shutil.rmtree(program.live)
        copy(program.root / state, program.live)

    def empty_out(self, program):
        shutil.rmtree(program.out, ignore_errors=True)
        program.out.mkdir(parents=True)

    def do(self, program, job):
        """Runs one job once."""
        disk = self.present(job.disk)
        self.bring_back(program, job.begins)
        before = repository_bytes(program.repo)
        if job.action == "backup":
            run = self.run(program, program.backup(job.tag, job.reread), self.source)
        elif job.action == "restore":
            self.empty_out(program)
            warm_tree(program.repo)
            run = self.run(program, process.then_synced(program.restore(job.tag), program.out), program.out)
            run.figures["target_bytes"] = check_restored(program.out, disk)
            self.empty_out(program)
        else:
            warm_tree(program.repo)
            run = self.run(program, program.verify(), self.source)
        after = repository_bytes(program.repo)
        run.figures.update(repository_bytes=after, added_bytes=after - before)
        return run

    def measure(self, job, programs, run_count):
        """Runs a job by all programs; returns a Result by name of the program."""
        results = {program.name: Result() for program in programs}
        for number in range(1, run_count + 1):
            for program in programs:
                result = results[program.name]
                reason = program.missing(job.name)
                if reason:
                    result.problem, result.is_missing = reason, True
                if result.problem:
                    continue
                try:
                    run = self.do(program, job)
                    if number == 1 and job.ends:
                        self.keep(program, job.ends)
                except Failed as failure:
                    result.problem = str(failure)
                    self.say(f"    {program.name:<15} NOT DONE: {failure}")
                    continue
                result.runs.append(run)
                self.say(
                    f"    {program.name:<15} run {number}: {run.wall_s:8.2f} s  cpu {run.cpu_s:8.2f} s  "
                    f"{run.rss_bytes / 2**20:7.0f} MiB  +{run.figures['added_bytes'] / 1e6:9.2f} MB"
                    + (f"  (others used {run.others_share:.0%})" if run.others_share > 0.05 else "")
                )
        for program in programs:
            if results[program.name].is_missing:
                self.say(f"    {program.name:<15} MISSING: {results[program.name].problem}")
        return results


def copy(source, target):
    """Copies a folder, sharing blocks if the file system can."""
    command = ["cp", "-a", "--reflink=auto", str(source), str(target)]
    process.run(command, dict(os.environ), "/", os.devnull, 3600)


def warm_tree(folder):
    for base, _, names in os.walk(folder):
        for name in names:
            sparse.warm(Path(base) / name)


def check_restored(folder, disk):
    """Compares the restored disk with its source; returns how many bytes it occupies."""
    found = [Path(base) / name for base, _, names in os.walk(folder) for name in names if name == DISK]
    if len(found) != 1:
        raise Failed(f"the restore left {len(found)} files called {DISK} in {folder}")
    difference = sparse.first_difference(found[0], disk)
    if difference is not None:
        raise Failed(f"the restored disk differs from its source near byte {difference}")
    return sparse.allocated_bytes(found[0])


def wait_for(condition, timeout_s):
    """Waits until `condition` returns a true value, and returns it; None after the timeout."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        try:
            found = condition()
        except OSError:
            found = None
        if found:
            return found
        time.sleep(0.05)
    return None
