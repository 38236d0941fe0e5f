#!/usr/bin/env python3
"""Compares iSCSI targets: Holdfast's and tgt's, with QEMU as initiator.

    bench/iscsi.py HOLDFAST [--rounds 9] [--seconds 0.5] [--clients 1] [--folder /dev/shm]

Needs root, tgt, qemu-utils and qemu-block-extra. Both targets serve copies of one raw file in memory. In each round
`qemu-img bench` runs each case with each target, in turn. The table shows the median rate of each target, and their
ratio; with --clients, so many processes send requests at the same time.
"""

import argparse
import os
import re
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

FILE_BYTES = 1 << 30
PORTS = {"holdfast": 32600, "tgt": 32601}
# The number of tgt's control socket, beside a tgtd of the system.
CONTROL = "77"
TAKEN = re.compile(r"Run completed in ([\d.]+) seconds")

# Name, further words, bytes of a request, and depth.
CASES = [
    ("read 4 KiB, depth 1", [], 4096, 1),
    ("read 4 KiB, depth 2", [], 4096, 2),
    ("read 4 KiB, depth 8", [], 4096, 8),
    ("read 4 KiB, depth 32", [], 4096, 32),
    ("write 4 KiB, depth 1", ["-w"], 4096, 1),
    ("write 4 KiB, depth 32", ["-w"], 4096, 32),
    ("read 1 MiB, depth 8", [], 1 << 20, 8),
    ("write 1 MiB, depth 8", ["-w"], 1 << 20, 8),
]
# Requests that show how many the measurement should have.
PROBE_COUNT = 64


def serve_holdfast(program, image):
    """Starts the target, and returns its process and the URL of the disk."""
    listen = f"127.0.0.1:{PORTS['holdfast']}"
    words = [program, "serve", "iscsi", image, "--writable", "--listen", listen]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if found := re.search(r"iscsi://\S+", line):
            return process, found[0]
    raise SystemExit("holdfast does not serve")


def serve_tgt(image):
    process = subprocess.Popen(
        ["tgtd", "-f", "-C", CONTROL, "--iscsi", f"portal=127.0.0.1:{PORTS['tgt']}"], stderr=subprocess.DEVNULL
    )
    name = "iqn.2026-01.org.holdfast.bench:tgt"
    steps = [
        ["--mode", "target", "--op", "new", "--tid", "1", "-T", name],
        ["--mode", "logicalunit", "--op", "new", "--tid", "1", "--lun", "1", "-b", image],
        ["--mode", "target", "--op", "bind", "--tid", "1", "-I", "ALL"],
    ]
    for step in steps:
        for _ in range(100):
            words = ["tgtadm", "-C", CONTROL, "--lld", "iscsi", *step]
            if not subprocess.run(words, capture_output=True, check=False).returncode:
                break
            time.sleep(0.05)
        else:
            raise SystemExit(f"tgtadm {step} fails")
    return process, f"iscsi://127.0.0.1:{PORTS['tgt']}/{name}/1"


def rate(url, case, count, client_count=1):
    """Requests per second of a case, with this number of requests of each client."""
    _, more, request_bytes, depth = case
    # A stride that is not a power of two visits the whole disk.
    stride = request_bytes * 257
    words = ["qemu-img", "bench", "-f", "raw", "-t", "none", "-c", str(count), "-d", str(depth)]
    words += ["-s", str(request_bytes), "-S", str(stride), *more, url]
    clients = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(client_count)]
    taken = [TAKEN.search(client.communicate()[0]) for client in clients]
    if not all(taken):
        raise SystemExit(f"{words} fails")
    return count * client_count / max(float(found[1]) for found in taken)


def measured_rate(url, case, chosen):
    """A target may need 40 ms for each request, or some microseconds."""
    probed = rate(url, case, PROBE_COUNT)
    return rate(url, case, max(PROBE_COUNT, int(probed * chosen.seconds)), chosen.clients)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("holdfast", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    chosen = parser.parse_args()
    figures = {}
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        images = {name: Path(folder) / f"{name}.raw" for name in PORTS}
        block = os.urandom(1 << 20)
        with open(images["holdfast"], "wb") as file:
            for _ in range(FILE_BYTES >> 20):
                file.write(block)
        shutil.copyfile(images["holdfast"], images["tgt"])
        servers = {"holdfast": serve_holdfast(chosen.holdfast, images["holdfast"]), "tgt": serve_tgt(images["tgt"])}
        try:
            for number in range(chosen.rounds):
                for case in CASES:
                    for name in sorted(servers, reverse=number % 2 == 1):
                        figures.setdefault((case[0], name), []).append(measured_rate(servers[name][1], case, chosen))
        finally:
            for process, _ in servers.values():
                # tgtd ignores SIGTERM.
                process.kill()
                process.wait()
    print("| case | Holdfast, 1/s | tgt, 1/s | ratio |\n|---|---:|---:|---:|")
    for name, *_ in CASES:
        ours, theirs = (statistics.median(figures[name, server]) for server in ("holdfast", "tgt"))
        print(f"| {name} | {ours:.0f} | {theirs:.0f} | {ours / theirs:.2f} |")


if __name__ == "__main__":
    main()
