"""The cost of host snapshots: frozen time on each file system, bytes read by an incremental backup, fifty machines
at once.
"""

import shutil
import subprocess
import time
from contextlib import contextmanager

from live.lab import Problem, unmount
from live.series import Series, at_most, megabytes, milliseconds, seconds, stolen_in, take_turns

NAME = "snapshots"
KINDS = {"btrfs": "mkfs.btrfs", "xfs": "mkfs.xfs", "zfs": "zpool"}
WAYS = {
    "snapshot --quiesce off": ("--quiesce", "off"),
    "snapshot --quiesce require": ("--quiesce", "require"),
    "snapshot --with-memory=live": ("--with-memory=live",),
    "snapshot --with-memory=stopped": ("--with-memory=stopped",),
}
NOTE = (
    "Frozen: the longest time between two ticks of the guest, by the host's clock. Own figure: how long it stood still, as holdfast says. File\n"
    "system: the longest durable write of 4 KiB to a mounted ext4. Two disks in one dataset; on XFS they are cloned one after the other."
)
PAUSE_GOAL_MS = 100.0
READ_GOAL = 2.0
MACHINE_COUNT = 50
IDLE = """<domain type='qemu'><name>{name}</name><memory unit='MiB'>16</memory><vcpu>1</vcpu>
<os><type arch='x86_64' machine='pc'>hvm</type></os><devices><disk type='file' device='disk'><driver name='qemu' type='qcow2'/>
<source file='{image}'/><target dev='vda' bus='virtio'/></disk><memballoon model='none'/></devices></domain>"""


def measure(lab, size, round_count, quiet):
    disk_mib = 128 if size == "quick" else 512
    all_series, goals = [], []
    for kind in KINDS:
        try:
            with file_system(lab, kind, disk_mib) as folder:
                done, reached = measure_on(lab, (kind, folder), disk_mib, round_count, quiet)
                all_series += done
                goals += reached
        except Problem as problem:
            quiet.say(f"    {kind} not done: {problem}")
    return all_series, goals


def measure_on(lab, place, disk_mib, round_count, quiet):
    kind, folder = place
    usual, lab.images = lab.images, folder
    try:
        name = f"{NAME}-{kind}"
        images = [lab.image(f"{name}-a", disk_mib, disk_mib // 2), lab.file_system(f"{name}-b", 64)]
        guest = lab.define(name, images, "mount=vdb")
        lab.start(name)
        guest.ask(f"write vda 50 {disk_mib << 20}")
        guest.ask("file 50")
        frozen = measure_frozen(lab, (kind, name), guest, round_count, quiet)
        guest.ask("stop")
        changes = measure_changes(lab, (kind, name), guest, (disk_mib, round_count), quiet)
        lab.forget(name)
        done = [frozen, changes]
        if kind == "btrfs":
            done.append(measure_fifty(lab, folder, round_count, quiet))
        return done, goals(kind, frozen, changes)
    finally:
        lab.images = usual


def measure_frozen(lab, machine, guest, round_count, quiet):
    kind, name = machine
    columns = {
        "gap_ms": ("frozen", milliseconds),
        "own_ms": ("own figure", milliseconds),
        "cut_ms": ("the cut", milliseconds),
        "file_ms": ("file system", milliseconds),
        "seconds": ("all of it", seconds),
    }
    series = Series(f"Host snapshots on {kind}", NOTE, columns)

    def felt(way):
        with guest.watched() as what:
            cut = way()
        if problems := guest.errors():
            raise RuntimeError(f"the guest: {problems}")
        paused_us = cut["machines"][0]["paused_us"] if cut else None
        return {
            "gap_ms": what.gap_ms,
            "own_ms": None if paused_us is None else paused_us / 1000,
            "cut_ms": cut["cut_us"] / 1000 if cut else None,
            "file_ms": what.file["max_us"] / 1000,
            "seconds": what.seconds,
        }

    def snapshot(words):
        def take():
            report = lab.holdfast("snapshot", name, "-c", lab.uri, *words)
            return report["cuts"][0]

        def way():
            figures = felt(take)
            listed = lab.holdfast("host", "list", name, "-c", lab.uri)["datasets"]
            full = [f"{one['dataset']}@{snapshot['name']}" for one in listed for snapshot in one["snapshots"]]
            lab.holdfast("host", "remove", *full)
            return figures

        return way

    ways = {"nothing, 3 s": lambda: felt(lambda: time.sleep(3))}
    ways |= {way: snapshot(words) for way, words in WAYS.items()}
    take_turns(series, ways, round_count, quiet)
    return series


def measure_changes(lab, machine, guest, size, quiet):
    (kind, name), (disk_mib, round_count) = machine, size
    columns = {
        "seconds": ("time", seconds),
        "read_bytes": ("MB read", megabytes),
        "ratio": ("of the true change", lambda value: f"{value:.2f}"),
        "share": ("of the disk", lambda value: f"{value:.3f}"),
    }
    note = "One percent of the disk has changed, in pieces of 64 KiB; read: what the file system says may have changed."
    series = Series(f"Backups from host snapshots on {kind}: what is read", note, columns)
    repository = lab.new_repository(f"snapshots-{kind}")
    count = (disk_mib << 20) // 100 // 65_536
    # The command ends with a flush. Otherwise QEMU's pending metadata would count as changes of the first round.
    guest.ask(f"dirty vda {count} 65536 {disk_mib << 20}")
    lab.back_up(name, repository, "--method", "snapshot", "--quiesce", "off")

    def ours():
        start = time.perf_counter()
        report = lab.back_up(name, repository, "--method", "snapshot", "--quiesce", "off")
        took_s = time.perf_counter() - start
        disk = next(disk for disk in report["disks"] if disk["name"] == "vda")
        if not disk["is_incremental"]:
            raise RuntimeError(disk["reason"])
        return {"seconds": took_s, "read_bytes": disk["dirty_bytes"]}

    for _ in range(round_count):
        guest.ask(f"dirty vda {count} 65536 {disk_mib << 20}")
        quiet.wait()
        try:
            figures, stolen = stolen_in(ours)
        except RuntimeError as problem:
            series.fail("incremental", problem)
            continue
        figures["stolen"] = stolen
        figures["ratio"] = figures["read_bytes"] / (count * 65_536)
        figures["share"] = figures["read_bytes"] / (disk_mib << 20)
        series.add("incremental", figures)
    return series


def measure_fifty(lab, folder, round_count, quiet):
    columns = {"seconds": ("all of it", seconds), "cut_ms": ("the cut", milliseconds)}
    note = f"{MACHINE_COUNT} machines that run, with a disk each in one subvolume, and a watchdog each."
    series = Series(f"Host snapshots of {MACHINE_COUNT} machines on btrfs", note, columns)
    names = [f"fifty-{number}" for number in range(MACHINE_COUNT)]
    for name in names:
        image = folder / f"{name}.qcow2"
        lab.run(["qemu-img", "create", "-q", "-f", "qcow2", image, "64M"])
        text = lab.folder / "idle.xml"
        text.write_text(IDLE.format(name=name, image=image))
        lab.virsh("define", str(text))
        lab.virsh("start", name)

    def timed(*words):
        def way():
            start = time.perf_counter()
            report = lab.holdfast("snapshot", *words, "-c", lab.uri)
            took_s = time.perf_counter() - start
            cut_us = max(cut["cut_us"] for cut in report["cuts"])
            made = [name for cut in report["cuts"] for name in cut["snapshots"]]
            lab.holdfast("host", "remove", *made)
            return {"seconds": took_s, "cut_ms": cut_us / 1000}

        return way

    ways = {"the subvolume, once": timed(str(folder)), "each machine by itself": timed("fifty-*")}
    take_turns(series, ways, round_count, quiet)
    for name in names:
        lab.virsh("destroy", name)
        lab.virsh("undefine", name)
    return series


@contextmanager
def file_system(lab, kind, disk_mib):
    if shutil.which(KINDS[kind], path=lab.env["PATH"]) is None:
        raise Problem(f"{KINDS[kind]} is not installed")
    device = lab.work / f"{kind}.device"
    with open(device, "wb") as file:
        file.truncate((disk_mib * 8 + 2048) << 20)
    folder = lab.work / kind
    folder.mkdir()
    daemon = None
    try:
        if kind == "zfs":
            daemon = start_zfs(lab)
            lab.run(["zpool", "create", "-o", "cachefile=none", "-m", folder, f"bench-{lab.folder.name}", device])
        else:
            lab.run([KINDS[kind], "-q", device])
            lab.run(["mount", "-o", "loop", device, folder])
        yield folder
    finally:
        if kind == "zfs":
            lab.run(["zpool", "destroy", "-f", f"bench-{lab.folder.name}"], check=False)
            if daemon:
                daemon.terminate()
                daemon.wait()
        else:
            unmount(folder)
        device.unlink(missing_ok=True)
        folder.rmdir()


def start_zfs(lab):
    """The daemon of zfs-fuse, if there is no other ZFS."""
    if lab.run(["zpool", "list"], check=False).returncode == 0:
        return None
    command = ["zfs-fuse", "--no-daemon", "--no-kstat-mount"]
    lab.run(["mkdir", "-p", "/run/zfs"])
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    daemon = subprocess.Popen(command, env=lab.env, start_new_session=True, **quiet)
    for _ in range(100):
        if lab.run(["zpool", "list"], check=False).returncode == 0:
            return daemon
        time.sleep(0.1)
    daemon.kill()
    raise Problem("zfs-fuse does not answer")


def goals(kind, frozen, changes):
    return [
        at_most(f"{kind}: frozen by a host snapshot", frozen.median("snapshot --quiesce off", "gap_ms"), PAUSE_GOAL_MS, milliseconds),
        at_most(f"{kind}: read, of the true change", changes.median("incremental", "ratio"), READ_GOAL, lambda value: f"{value:.2f}"),
    ]
