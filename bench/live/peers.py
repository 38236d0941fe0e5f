"""Backups of machines without Holdfast: manually with virsh, and by libvirt's backup jobs."""

import time
from contextlib import contextmanager

from live.lab import Problem

POLL_S = 0.02


def by_hand(lab, name, disks, *options, rate=None):
    """Takes a snapshot into overlays, copies the original images, and commits the overlays."""
    overlays = {disk: lab.images / f"{name}-{disk}.overlay" for disk in disks}
    before = images_of(lab, name)
    places = [word for disk, path in overlays.items() for word in ("--diskspec", f"{disk},file={path}")]
    begun = ["snapshot-create-as", name, "now", "--disk-only", "--atomic", "--no-metadata", *options, *places]
    try:
        lab.virsh(*begun)
        for disk in disks:
            copy(lab, before[disk], "qcow2", disk, rate)
    finally:
        for disk, path in overlays.items():
            if images_of(lab, name).get(disk) == str(path):
                lab.virsh("blockcommit", name, disk, "--active", "--pivot", "--wait")
            path.unlink(missing_ok=True)


def images_of(lab, name):
    return dict(line.split(None, 1) for line in lab.virsh("domblklist", name).splitlines() if line.strip())


def copy(lab, source, source_format, disk, rate):
    target = lab.work / f"copy-{disk}"
    limit = ["-r", str(rate)] if rate else []
    try:
        lab.run(["qemu-img", "convert", *limit, "-f", source_format, "-O", "qcow2", source, target])
    finally:
        target.unlink(missing_ok=True)


def pull(lab, name, disks, rate=None):
    """libvirt's pull mode, read by qemu-img."""
    socket = lab.folder / "pull"
    scratch = {disk: lab.work / f"scratch-{disk}" for disk in disks}
    entries = "".join(f"<disk name='{disk}' type='file'><scratch file='{path}'/></disk>" for disk, path in scratch.items())
    text = f"<domainbackup mode='pull'><server transport='unix' socket='{socket}'/><disks>{entries}</disks></domainbackup>"
    try:
        with job(lab, name, text):
            for disk in disks:
                copy(lab, f"nbd+unix:///{disk}?socket={socket}", "raw", disk, rate)
    finally:
        for path in (socket, *scratch.values()):
            path.unlink(missing_ok=True)


def push(lab, name, targets, image_format="qcow2", increment=None, options=()):
    """libvirt's push mode: QEMU writes to the targets. `increment` has the checkpoint to start from, and the name of
    the new one.
    """
    since, checkpoint = increment or (None, None)
    entries = "".join(
        f"<disk name='{disk}' type='file'><target file='{path}'/><driver type='{image_format}'/></disk>"
        for disk, path in targets.items()
    )
    begin = f"<incremental>{since}</incremental>" if since else ""
    text = f"<domainbackup mode='push'>{begin}<disks>{entries}</disks></domainbackup>"
    with job(lab, name, text, checkpoint, options) as state:
        while state():
            time.sleep(POLL_S)


@contextmanager
def job(lab, name, text, checkpoint=None, options=()):
    """Runs a backup job until the block or the job ends. Yields a function that returns whether the job is running."""
    request, point = lab.folder / "backup.xml", lab.folder / "checkpoint.xml"
    request.write_text(text)
    words = ["backup-begin", name, str(request)]
    if checkpoint:
        point.write_text(f"<domaincheckpoint><name>{checkpoint}</name></domaincheckpoint>")
        words.append(str(point))

    def goes_on():
        return "None" not in lab.virsh("domjobinfo", name).splitlines()[0]

    lab.virsh(*words, *options)
    has_ended = False
    try:
        yield goes_on
        has_ended = not goes_on()
    finally:
        if not has_ended:
            lab.virsh("domjobabort", name, check=False)
            while goes_on():
                time.sleep(POLL_S)
        elif "Completed" not in lab.virsh("domjobinfo", name, "--completed"):
            raise Problem("the backup job did not complete")


def save_and_restore(lab, name):
    """Saves the machine's memory to a file and resumes the machine from it: libvirt's way to save memory."""
    path = lab.work / f"{name}.save"
    try:
        lab.virsh("save", name, str(path))
        lab.virsh("restore", str(path))
    finally:
        path.unlink(missing_ok=True)
