"""How long writes of a guest take while it is backed up to a target that accepts 20 MB per second."""

import subprocess
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

from live import peers
from live.guest import percentile_ms
from live.lab import Problem, unmount
from live.series import Series, at_most, milliseconds, number, seconds, take_turns

NAME = "writes"
TITLE = "Writes of the guest while it is backed up at 20 MB/s"
NOTE = (
    "The guest writes 4 KiB at a hundred random places each second, O_DIRECT, and reads some of it back. A write's time counts from when it was\n"
    "due, by the guest's clock; an eighth too much at worst. A target of 20 MB/s is a file on nbdkit's rate filter, mounted by nbdfuse."
)
RATE_BYTES_PER_S = 20_000_000
WRITES_PER_S = 100
ADDED_P99_GOAL_MS = 5.0
OURS = ("holdfast --bwlimit 20M", "holdfast, repository of 20 MB/s")
IDLE = "nothing"


def measure(lab, size, round_count, quiet):
    disk_mib = 96 if size == "quick" else 200
    idle_s = (disk_mib << 20) / RATE_BYTES_PER_S
    guest = lab.define(NAME, [lab.image(f"{NAME}-a", disk_mib, disk_mib)])
    lab.start(NAME)
    guest.ask(f"write vda {WRITES_PER_S} {disk_mib << 20}")
    columns = {
        "p99_ms": ("p99", milliseconds),
        "p50_ms": ("median", milliseconds),
        "max_ms": ("longest", milliseconds),
        "error_count": ("errors", number),
        "gap_ms": ("frozen", milliseconds),
        "seconds": ("all of it", seconds),
    }
    series = Series(TITLE, NOTE, columns)

    def felt(way):
        with guest.watched() as what:
            way()
        return {
            "p99_ms": percentile_ms(what.disk, 0.99),
            "p50_ms": percentile_ms(what.disk, 0.5),
            "max_ms": what.disk["max_us"] / 1000,
            "error_count": what.disk["errors"] + what.disk["wrong"],
            "write_count": what.disk["count"],
            "gap_ms": what.gap_ms,
            "seconds": what.seconds,
        }

    def ours(folder, *words):
        repository = lab.new_repository("writes", folder)
        try:
            return felt(lambda: lab.back_up(NAME, repository, *words))
        finally:
            lab.run(["rm", "-rf", repository])
            lab.remove_bitmaps(NAME)

    def idle():
        return felt(lambda: time.sleep(idle_s))

    with slow_file(lab, disk_mib) as pushed, slow_file(lab, 2 * disk_mib) as file:
        lab.run(["mkfs.ext4", "-q", "-F", "-O", "^has_journal", file])
        with lab.mounted("-o", "loop", file) as folder:
            ways = {
                IDLE: idle,
                OURS[0]: lambda: ours(None, "--bwlimit", "20M"),
                OURS[1]: lambda: ours(folder),
                "virsh backup-begin, push to 20 MB/s": lambda: felt(
                    lambda: peers.push(lab, NAME, {"vda": pushed}, "raw", options=("--reuse-external",))
                ),
                "virsh backup-begin, pull at 20 MB/s": lambda: felt(
                    lambda: peers.pull(lab, NAME, ["vda"], RATE_BYTES_PER_S)
                ),
                "virsh snapshot, copy at 20 MB/s, blockcommit": lambda: felt(
                    lambda: peers.by_hand(lab, NAME, ["vda"], rate=RATE_BYTES_PER_S)
                ),
            }
            take_turns(series, ways, round_count, quiet)
    lab.forget(NAME)
    return [series], goals(series)


@contextmanager
def slow_file(lab, size_mib):
    """A file that accepts 20 MB per second, until the block ends."""
    folder = Path(tempfile.mkdtemp(prefix="slow-", dir=lab.folder))
    server = ["nbdkit", "-s", "--exit-with-parent", "memory", f"{size_mib}M"]
    slowly = ["--filter=rate", f"rate={RATE_BYTES_PER_S * 8}", "burstiness=1"]
    command = ["nbdfuse", f"{folder}/disk", "--command", *server, *slowly]
    process = subprocess.Popen(command, env=lab.env, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        for _ in range(200):
            if (folder / "disk").exists():
                break
            time.sleep(0.05)
        else:
            raise Problem("nbdfuse does not serve")
        yield folder / "disk"
    finally:
        unmount(folder)
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def goals(series):
    idle = series.median(IDLE, "p99_ms")
    found = []
    for way in OURS:
        p99 = series.median(way, "p99_ms")
        added = None if p99 is None or idle is None else max(0.0, p99 - idle)
        found.append(at_most(f"{way}: added to the p99 of writes", added, ADDED_P99_GOAL_MS, milliseconds))
        counts = series.values(way, "error_count")
        found.append(at_most(f"{way}: errors of the guest", sum(counts) if counts else None, 0, number))
    return found
