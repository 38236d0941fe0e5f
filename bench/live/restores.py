"""The time from the command until the guest of a restored machine runs."""

import threading
import time

from live.series import Series, at_most, seconds, take_turns

NAME = "restored"
TITLE = "From the command to the guest's first tick"
NOTE = (
    "The guest boots, reads 64 MiB from places all over its disk as a system does, and ticks. Images and repository are in the page cache.\n"
    "Own figure: when holdfast says that the machine runs. The command of an instant restore ends when the machine runs on its own images."
)
READ_MIB = 64
LOCAL, LIVE, WHOLE = "virsh start, from its own image", "holdfast restore --live", "holdfast restore, then start"
GOAL = 1.5


def measure(lab, size, round_count, quiet):
    disk_mib = 512 if size == "quick" else 2048
    image = lab.image(f"{NAME}-a", disk_mib, disk_mib // 2)
    guest = lab.define(NAME, [image], f"read={READ_MIB}")
    lab.start(NAME)
    repository = lab.new_repository("restores")
    lab.back_up(NAME, repository)
    columns = {
        "tick_s": ("first tick", seconds),
        "own_s": ("own figure", seconds),
        "ended_s": ("command ended", seconds),
    }
    series = Series(TITLE, NOTE, columns)

    def gone():
        lab.virsh("destroy", NAME, check=False)
        lab.virsh("undefine", NAME)
        image.unlink()

    def measured(command):
        """Runs a command; returns the time of the first tick of the guest during or after it."""
        while guest.connection is not None:
            time.sleep(0.005)
        ticked = []
        waiter = threading.Thread(target=lambda: ticked.append(guest.wait()))
        start = time.perf_counter()
        waiter.start()
        result = command()
        ended = time.perf_counter()
        waiter.join()
        if not ticked:
            raise RuntimeError("the guest does not tick")
        if problems := guest.errors():
            raise RuntimeError(f"the guest: {problems}")
        return {"tick_s": ticked[0] - start, "ended_s": ended - start}, result

    def local():
        lab.virsh("destroy", NAME)
        figures, _ = measured(lambda: lab.virsh("start", NAME))
        return figures

    def restore(*words):
        gone()
        words = ["restore", NAME, "--to-machine", "--keep-identity", "-c", lab.uri, "-r", repository, *words]
        return measured(lambda: lab.holdfast(*words))

    def live():
        figures, report = restore("--live")
        return {**figures, "own_s": report["live"]["runs_after_ms"] / 1000}

    def whole():
        return restore("--start")[0]

    take_turns(series, {LOCAL: local, LIVE: live, WHOLE: whole}, round_count, quiet)
    lab.forget(NAME)
    return [series], goals(series)


def goals(series):
    ours, local = series.median(LIVE, "tick_s"), series.median(LOCAL, "tick_s")
    relative = ours / local if ours and local else None
    return [at_most("first tick of an instant restore, of a start from its own image", relative, GOAL, lambda value: f"{value:.2f}")]
