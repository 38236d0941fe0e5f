"""The guest must not be affected when its backup fails: by a full scratch, a kill, or a full or lost repository."""

import fcntl
import os
import random
import shutil
import signal
import struct
import subprocess
import time

from live.lab import Problem
from live.series import Series, at_most, milliseconds, number, seconds, stolen_in

NAME = "injected"
TITLE = "Backups that are made to fail"
NOTE = (
    "The guest writes 4 KiB at five hundred random places each second all the time, reads some of it back, and compares. A backup has died\n"
    "where it did not end well of its own. Cleared after: from its end until nothing of it is left in QEMU. Left: what still was after 30 s."
)
DISK_MIB = 32
WRITES_PER_S = 500
CLEAR_DEADLINE_S = 30
HANG_S = 60
# Simulates the loss of a device for ext4: every later access fails (EXT4_IOC_SHUTDOWN, without a flush of the journal).
SHUTDOWN, SHUTDOWN_NO_LOG = 0x8004587D, struct.pack("I", 2)
# Limits the rate of a backup, so that there is time to inject a fault.
RATE = "40M"
BACKUP_S = DISK_MIB / 40


def measure(lab, injection_count, seed, quiet):
    guest = lab.define(NAME, [lab.image(f"{NAME}-a", DISK_MIB, DISK_MIB)])
    lab.start(NAME)
    guest.ask(f"write vda {WRITES_PER_S} {DISK_MIB << 20}")
    columns = {
        "error_count": ("errors of the guest", number),
        "has_died": ("died", lambda value: "yes" if value else "no"),
        "gap_ms": ("frozen", milliseconds),
        "cleared_s": ("cleared after", seconds),
        "seconds": ("a round", seconds),
    }
    series = Series(TITLE, NOTE, columns)
    injector = Injector(lab, guest, random.Random(seed))
    for turn in range(injection_count):
        for name, way in injector.ways().items():
            figures, stolen = stolen_in(lambda: injector.inject(way))
            figures["stolen"] = stolen
            series.add(name, figures)
            if figures["problems"]:
                quiet.say(f"    round {turn + 1}: {name}: {figures['problems']}")
        if (turn + 1) % 10 == 0 or turn + 1 == injection_count:
            quiet.say(f"    {turn + 1} of each; seed {seed}")
    lab.forget(NAME)
    return [series], goals(series)


class Injector:
    def __init__(self, lab, guest, chance):
        self.lab, self.guest, self.chance = lab, guest, chance
        self.template = lab.new_repository("template")

    def ways(self):
        return {
            "scratch above --scratch-max": self.scratch_max,
            "scratch file system filled by others": self.scratch_full,
            "holdfast killed at a random moment": self.killed,
            "file system of the repository full": self.repository_full,
            "file system of the repository gone at a random moment": self.repository_gone,
        }

    def inject(self, way):
        """Runs one backup with an injected fault; returns the measurements of the guest, and what the backup left
        behind.
        """
        start = time.perf_counter()
        problems = []
        with self.guest.watched(after_s=0.05) as felt:
            try:
                has_died = way()
            except Problem as problem:
                has_died = True
                problems.append(str(problem))
            ended = time.perf_counter()
            left = self.lab.left_behind(NAME)
            while left and time.perf_counter() - ended < CLEAR_DEADLINE_S:
                time.sleep(0.05)
                left = self.lab.left_behind(NAME)
            cleared_s = time.perf_counter() - ended
        state = self.lab.state(NAME)
        said = [line for line in self.guest.console.read_text(errors="replace").splitlines() if "BAD" in line]
        error_count = felt.disk["errors"] + felt.disk["wrong"]
        problems += [f"left: {left}"] * bool(left) + [f"it is {state}"] * (state != "running") + said
        problems += [f"{error_count} errors of the guest"] * bool(error_count)
        self.lab.remove_bitmaps(NAME)
        return {
            "error_count": error_count,
            "write_count": felt.disk["count"],
            "has_died": has_died,
            "gap_ms": felt.gap_ms,
            "cleared_s": cleared_s,
            "problems": problems,
            "seconds": time.perf_counter() - start,
        }

    def repository(self, folder=None):
        target = (folder or self.lab.work) / "repository"
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(self.template, target)
        return target

    def start(self, repository, *words):
        scratch = [] if "--scratch" in words else ["--scratch", str(self.lab.work)]
        backup = ["backup", NAME, "-c", self.lab.uri, "-r", repository, "--bwlimit", RATE, "--quiet", *scratch, *words]
        return subprocess.Popen(
            self.lab.holdfast_words(*backup),
            env=self.lab.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def some_moment(self):
        time.sleep(self.chance.uniform(0, BACKUP_S))

    def scratch_max(self):
        return has_failed(self.start(self.repository(), "--scratch-max", "1M"))

    def scratch_full(self):
        with self.lab.mounted("-t", "tmpfs", "-o", "size=96m", "tmpfs") as folder:
            backup = self.start(self.repository(), "--scratch", str(folder))
            self.some_moment()
            fill(folder)
            return has_failed(backup)

    def killed(self):
        backup = self.start(self.repository())
        self.some_moment()
        backup.send_signal(signal.SIGKILL)
        return backup.wait() == -signal.SIGKILL

    def repository_full(self):
        with self.lab.mounted("-t", "tmpfs", "-o", "size=16m", "tmpfs") as folder:
            return has_failed(self.start(self.repository(folder)))

    def repository_gone(self):
        disk = self.lab.work / "dying"
        with open(disk, "wb") as file:
            file.truncate(256 << 20)
        self.lab.run(["mkfs.ext4", "-q", "-F", disk])
        with self.lab.mounted("-o", "loop", disk) as folder:
            backup = self.start(self.repository(folder))
            self.some_moment()
            opened = os.open(folder, os.O_RDONLY)
            try:
                fcntl.ioctl(opened, SHUTDOWN, SHUTDOWN_NO_LOG)
            finally:
                os.close(opened)
            has_died = has_failed(backup)
        disk.unlink()
        return has_died


def has_failed(backup):
    """Whether a backup ends with an error; raises Problem if it does not end."""
    try:
        return backup.wait(timeout=HANG_S) != 0
    except subprocess.TimeoutExpired:
        backup.kill()
        backup.wait()
        raise Problem(f"the backup did not end in {HANG_S} s, and was killed") from None


def fill(folder):
    """Fills all free space of a file system."""
    with open(folder / "filler", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 20))
        except OSError:
            return


def goals(series):
    counts = [count for way in series.rounds for count in series.values(way, "error_count")]
    left = [figures for way in series.rounds.values() for figures in way if figures["problems"]]
    died = [count for way in series.rounds for count in series.values(way, "has_died")]
    return [
        at_most(f"errors of the guest, {len(counts)} injections, {sum(died)} of which the backup died of", sum(counts), 0, number),
        at_most("injections after which something was left, or the machine did not run", len(left), 0, number),
    ]
