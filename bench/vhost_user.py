#!/usr/bin/env python3
"""Compares vhost-user-blk servers in a guest: Holdfast's and QEMU's storage daemon.

    bench/vhost_user.py --server SERVE_VHOST_USER --guest DIR [--rounds 9] [--seconds 1] [--folder /dev/shm]

SERVE_VHOST_USER is the example of crates/serve, built in release mode. DIR is a guest of scripts/test-guest, for its
kernel and modules; bench/guest/disk.c is its only process. Both servers serve copies of one raw file in memory. Each
round starts a guest (TCG, one processor, one queue) for each server, alternately. The table shows the median of each
case, and the ratio of Holdfast to the storage daemon, where more is better.
"""

import argparse
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FILE_BYTES = 512 << 20
MODULES = ["virtio_ring", "virtio", "virtio_pci_modern_dev", "virtio_pci_legacy_dev", "virtio_pci", "virtio_blk"]
HERE = Path(__file__).parent
RESULT = re.compile(r"RESULT (\w+) p50_us=([\d.]+) mib_s=([\d.]+)")

# Name, what is compared, and whether a higher figure is better.
CASES = [
    ("read_4k", "p50_us", False),
    ("write_4k", "p50_us", False),
    ("write_flush_4k", "p50_us", False),
    ("read_1m", "mib_s", True),
    ("write_1m", "mib_s", True),
]


def initrd(guest, folder):
    """Builds the initial file system of the guest."""
    root = folder / "root"
    for name in ("modules", "dev", "proc"):
        (root / name).mkdir(parents=True)
    for module in MODULES:
        shutil.copyfile(next((guest / "tree").rglob(f"{module}.ko")), root / "modules" / f"{module}.ko")
    subprocess.run(["gcc", "-O2", "-static", "-o", root / "init", HERE / "guest/disk.c"], check=True)
    subprocess.run([HERE.parent / "scripts/make-initrd", root, folder / "initrd"], check=True)


def start(name, folder, program):
    """Starts a server and waits until its socket exists."""
    image, path = folder / f"{name}.img", folder / f"{name}.sock"
    shutil.copyfile(folder / "source.img", image)
    command = {
        "holdfast": [program, path, "rw", image],
        "qemu": [
            "qemu-storage-daemon",
            *("--blockdev", f"driver=file,filename={image},node-name=file"),
            *("--blockdev", "driver=raw,file=file,node-name=disk"),
            *("--export", f"type=vhost-user-blk,id=e,node-name=disk,addr.type=unix,addr.path={path},writable=on"),
        ],
    }[name]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for _ in range(200):
        if path.exists():
            return process, path
        time.sleep(0.05)
    raise SystemExit(f"{name} does not start")


def measure(guest, folder, socket, seconds):
    """Runs a guest; returns its figures by case."""
    command = [
        *("qemu-system-x86_64", "-M", "q35,memory-backend=mem", "-m", "256", "-cpu", "max", "-smp", "1"),
        *("-object", "memory-backend-memfd,id=mem,size=256M,share=on", "-accel", "tcg,thread=multi"),
        *("-display", "none", "-nodefaults", "-no-reboot", "-serial", "stdio"),
        *("-kernel", guest / "vmlinuz", "-initrd", folder / "initrd"),
        *("-append", f"console=ttyS0 quiet panic=-1 no_timer_check disk=speed seconds={seconds}"),
        *("-chardev", f"socket,id=disk,path={socket}", "-device", "vhost-user-blk-pci,chardev=disk,num-queues=1"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=300, check=False)
    figures = {name: {"p50_us": float(p50), "mib_s": float(mib)} for name, p50, mib in RESULT.findall(done.stdout)}
    if len(figures) != len(CASES):
        raise SystemExit(f"the guest failed: {done.stdout[-400:]} {done.stderr[-400:]}")
    return figures


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", type=Path, required=True)
    parser.add_argument("--guest", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=1)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    chosen = parser.parse_args()
    names = ["holdfast", "qemu"]
    figures = {name: [] for name in names}
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        folder = Path(folder)
        initrd(chosen.guest, folder)
        with open(folder / "source.img", "wb") as source:
            for _ in range(FILE_BYTES >> 20):
                source.write(b"\x5a" * (1 << 20))
        servers = {name: start(name, folder, chosen.server) for name in names}
        try:
            for number in range(chosen.rounds):
                for name in names if number % 2 else reversed(names):
                    figures[name].append(measure(chosen.guest, folder, servers[name][1], chosen.seconds))
                print(f"round {number + 1} of {chosen.rounds}", file=sys.stderr, flush=True)
        finally:
            for process, _ in servers.values():
                process.kill()
                process.wait()
    print("| case | Holdfast | QEMU | ratio |\n|---|---:|---:|---:|")
    for case, unit, is_higher_better in CASES:
        ours, theirs = (statistics.median(run[case][unit] for run in figures[name]) for name in names)
        ratio = ours / theirs if is_higher_better else theirs / ours
        print(f"| {case} ({unit}) | {ours:.1f} | {theirs:.1f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
