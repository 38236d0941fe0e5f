"""How long a guest is paused while it is backed up."""

import time

from live import peers
from live.guest import percentile_ms
from live.series import Series, at_most, milliseconds, seconds, take_turns

NAME = "frozen"
TITLE = "Frozen time, as the guest feels it"
NOTE = (
    "Frozen: the longest time between two ticks of the guest, by the host's clock; it holds whatever kept the guest from running, a busy\n"
    "host as well: see the idle machine. Own figure: what holdfast says itself. File system: the longest durable write of 4 KiB to a mounted ext4,\n"
    "by the guest's clock, which stands still with the machine."
)
DISKS = ("vda", "vdb")
MEMORY_WAYS = ("holdfast --with-memory=live", "holdfast --with-memory=stopped")
PAUSE_GOAL_MS = 100.0


def measure(lab, size, round_count, quiet):
    disk_mib = 256 if size == "quick" else 1024
    images = [lab.image(f"{NAME}-a", disk_mib, disk_mib // 2), lab.file_system(f"{NAME}-b", 64)]
    guest = lab.define(NAME, images, "mount=vdb")
    lab.start(NAME)
    guest.ask(f"write vda 50 {disk_mib << 20}")
    guest.ask("file 50")
    columns = {
        "gap_ms": ("frozen", milliseconds),
        "own_ms": ("own figure", milliseconds),
        "file_ms": ("file system", milliseconds),
        "seconds": ("all of it", seconds),
    }
    series = Series(TITLE, NOTE, columns)
    steady = lab.new_repository("steady")
    lab.back_up(NAME, steady, "--quiesce", "off")

    def felt(way):
        with guest.watched() as what:
            own_us = way()
        problems = guest.errors()
        if problems:
            raise RuntimeError(f"the guest: {problems}")
        return {
            "gap_ms": what.gap_ms,
            "gaps": what.gaps,
            "own_ms": None if own_us is None else own_us / 1000,
            "file_ms": what.file["max_us"] / 1000,
            "disk_p99_ms": percentile_ms(what.disk, 0.99),
            "seconds": what.seconds,
        }

    def ours(*words):
        return lambda: felt(lambda: lab.back_up(NAME, steady, *words)["paused_us"])

    def first():
        repository, others = lab.new_repository("first"), lab.bitmaps(NAME)
        figures = felt(lambda: lab.back_up(NAME, repository, "--quiesce", "off")["paused_us"])
        for node, bitmap in set(lab.bitmaps(NAME)) - set(others):
            lab.qmp(NAME, "block-dirty-bitmap-remove", node=node, name=bitmap)
        return figures

    def theirs(way):
        return lambda: felt(lambda: (way(), None)[1])

    def pushed():
        targets = {disk: lab.work / f"pushed-{disk}" for disk in DISKS}
        try:
            peers.push(lab, NAME, targets)
        finally:
            for path in targets.values():
                path.unlink(missing_ok=True)

    ways = {
        "nothing, 3 s": theirs(lambda: time.sleep(3)),
        "holdfast, first backup": first,
        "holdfast, incremental": ours("--quiesce", "off"),
        "holdfast --quiesce require": ours("--quiesce", "require"),
        MEMORY_WAYS[0]: ours("--with-memory=live"),
        MEMORY_WAYS[1]: ours("--with-memory=stopped"),
        "virsh snapshot, copy, blockcommit": theirs(lambda: peers.by_hand(lab, NAME, DISKS)),
        "the same with --quiesce": theirs(lambda: peers.by_hand(lab, NAME, DISKS, "--quiesce")),
        "virsh backup-begin, pull": theirs(lambda: peers.pull(lab, NAME, DISKS)),
        "virsh backup-begin, push": theirs(pushed),
        "virsh save, restore": theirs(lambda: peers.save_and_restore(lab, NAME)),
    }
    take_turns(series, ways, round_count, quiet)
    lab.forget(NAME)
    return [series], goals(series)


def goals(series):
    saved = series.median("virsh save, restore", "gap_ms")
    memory = series.median(MEMORY_WAYS[0], "gap_ms")
    return [
        at_most("frozen, incremental", series.median("holdfast, incremental", "gap_ms"), PAUSE_GOAL_MS, milliseconds),
        at_most("file system, frozen by the agent", series.median("holdfast --quiesce require", "file_ms"), PAUSE_GOAL_MS, milliseconds),
        at_most(
            "frozen with memory, of virsh save and restore",
            memory / saved if memory and saved else None,
            0.25,
            lambda value: f"{value:.2f}",
        ),
    ]
