"""The cost of the next backup after one percent of a disk has changed, with the dirty bitmap and after it was lost."""

import time

from live import peers
from live.series import Series, at_most, megabytes, seconds, stolen_in

NAME = "changes"
KINDS = {
    "pieces": "One percent has changed, in pieces of 64 KiB",
    "blocks": "One percent has changed, in pieces of 4 KiB",
    "lost": "One percent has changed, in pieces of 64 KiB, and QEMU was killed",
}
NOTES = {
    "pieces": "MB written: what the repository grew by, and what QEMU's target holds.",
    "blocks": "Bitmaps of qcow2 know pieces of 64 KiB.",
    "lost": "libvirt does not believe its checkpoint any more, and everything is written again.",
}
PIECE_BYTES = {"pieces": 65_536, "blocks": 4096, "lost": 65_536}
OURS, THEIRS, THEIRS_FULL = "holdfast", "virsh backup-begin, push, incremental", "virsh backup-begin, push, everything"
TRANSFER_GOAL = 1.02


class Checkpoints:
    """libvirt's incremental backups of the machine, with a checkpoint after each."""

    def __init__(self, lab):
        self.lab, self.number = lab, 0

    def push(self, is_incremental):
        target = self.lab.work / "increment"
        since = f"c{self.number}" if is_incremental else None
        self.number += 1
        try:
            start = time.perf_counter()
            peers.push(self.lab, NAME, {"vda": target}, increment=(since, f"c{self.number}"))
            # Holdfast's result is durable when it returns, so this one must be too.
            self.lab.run(["sync", "-f", target])
            took_s = time.perf_counter() - start
            written = target.stat().st_blocks * 512
        finally:
            target.unlink(missing_ok=True)
        return {"seconds": took_s, "read_bytes": None, "written_bytes": written}

    def lose(self):
        """The backup after QEMU was killed."""
        for name in self.lab.virsh("checkpoint-list", NAME, "--name", "--topological").split()[::-1]:
            self.lab.virsh("checkpoint-delete", NAME, name, "--metadata")
        for node, bitmap in self.lab.bitmaps(NAME):
            if not bitmap.startswith("holdfast-"):
                self.lab.qmp(NAME, "block-dirty-bitmap-remove", node=node, name=bitmap)


def measure(lab, size, round_count, quiet):
    disk_mib = 256 if size == "quick" else 1024
    guest = lab.define(NAME, [lab.image(f"{NAME}-a", disk_mib, disk_mib)])
    lab.start(NAME)
    repository = lab.new_repository("changes")
    checkpoints = Checkpoints(lab)
    lab.back_up(NAME, repository)
    checkpoints.push(is_incremental=False)
    columns = {
        "seconds": ("time", seconds),
        "written_bytes": ("MB written", megabytes),
        "ratio": ("of the true change", lambda value: f"{value:.3f}"),
        "read_bytes": ("MB read", megabytes),
    }
    all_series = {kind: Series(title, NOTES[kind], columns) for kind, title in KINDS.items()}
    for turn in range(round_count):
        for kind, series in all_series.items():
            count = (disk_mib << 20) // 100 // PIECE_BYTES[kind]
            changed_bytes = count * PIECE_BYTES[kind]
            guest.ask(f"dirty vda {count} {PIECE_BYTES[kind]} {disk_mib << 20}")
            if kind == "lost":
                lab.kill(NAME)
                lab.start(NAME)
                checkpoints.lose()
            ways = {
                OURS: lambda: ours(lab, repository),
                THEIRS_FULL if kind == "lost" else THEIRS: lambda: checkpoints.push(kind != "lost"),
            }
            for way in list(ways)[:: -1 if turn % 2 else 1]:
                quiet.wait()
                figures, stolen = stolen_in(ways[way])
                figures["stolen"] = stolen
                series.add(way, {**figures, "changed_bytes": changed_bytes, "ratio": figures["written_bytes"] / changed_bytes})
                quiet.say(
                    f"    round {turn + 1}: {kind:<7} {way:<40} {seconds(figures['seconds']):>8}"
                    f" {megabytes(figures['written_bytes']):>12}"
                )
    lab.forget(NAME)
    return list(all_series.values()), [goal for kind, series in all_series.items() for goal in goals(kind, series)]


def ours(lab, repository):
    start = time.perf_counter()
    report = lab.back_up(NAME, repository)
    took_s = time.perf_counter() - start
    return {
        "seconds": took_s,
        "read_bytes": report["read_bytes"],
        "written_bytes": report["stored_bytes"],
        "reasons": [disk["reason"] for disk in report["disks"]],
    }


def goals(kind, series):
    ratio = series.median(OURS, "ratio")
    return [at_most(f"{kind}: written, of the true change", ratio, TRANSFER_GOAL, lambda value: f"{value:.3f}")]
