#!/usr/bin/env python3
"""Compares NBD servers: Holdfast's, nbdkit and qemu-nbd, with two clients (libnbd by fio, and qemu-img).

    bench/nbd.py --server SERVE_FILE [--rounds 5] [--seconds 2] [--folder /dev/shm]

SERVE_FILE is the example of crates/serve, built in release mode. All servers run at the same time and serve copies of
one file in memory. They are measured alternately. The table shows the median of each, and the ratio of Holdfast's
median to each of the others.
"""

import argparse
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FILE_MIB = 1024

# name, client, direction, block size, queue depth
CASES = [
    *[(f"fio randread 4k QD{depth}", "fio", "randread", 4096, depth) for depth in (1, 2, 4, 8, 16, 32)],
    ("fio randwrite 4k QD1", "fio", "randwrite", 4096, 1),
    ("fio randwrite 4k QD32", "fio", "randwrite", 4096, 32),
    ("fio read 1M QD1", "fio", "read", 1 << 20, 1),
    ("fio read 1M QD8", "fio", "read", 1 << 20, 8),
    ("fio write 1M QD1", "fio", "write", 1 << 20, 1),
    ("fio write 1M QD8", "fio", "write", 1 << 20, 8),
    *[(f"qemu read 4k QD{depth}", "qemu", "read", 4096, depth) for depth in (1, 2, 4, 8, 16, 32)],
    ("qemu read 1M QD8", "qemu", "read", 1 << 20, 8),
]


def start(name, folder, program):
    """Starts a server and waits until its socket answers; returns the process and the URI."""
    image, socket = folder / f"{name}.img", folder / f"{name}.sock"
    shutil.copyfile(folder / "source.img", image)
    command = {
        "holdfast": [program, socket, "rw", image],
        "nbdkit": ["nbdkit", "-f", "--exit-with-parent", "-U", socket, "file", image],
        "qemu-nbd": ["qemu-nbd", "-t", "-f", "raw", "-k", socket, "-x", "disk", "-e", "8", image],
    }[name]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for _ in range(200):
        if socket.exists():
            return process, f"nbd+unix:///disk?socket={socket}"
        time.sleep(0.05)
    raise SystemExit(f"{name} does not start")


def cpu_seconds(process):
    fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run_fio(uri, direction, block, depth, seconds):
    out = subprocess.run(
        ["fio", "--name=x", "--ioengine=nbd", f"--uri={uri}", f"--rw={direction}", f"--bs={block}", f"--iodepth={depth}",
         "--time_based", f"--runtime={round(seconds * 1000)}ms", "--output-format=json", "--randrepeat=0", "--norandommap"],
        check=True, capture_output=True, text=True).stdout
    job = json.loads(out[out.index("{"):])["jobs"][0]
    return max(job["read"]["iops"], job["write"]["iops"]), job["read"]["total_ios"] + job["write"]["total_ios"]


def run_qemu(uri, _direction, block, depth, seconds):
    count = int((40000 if block == 4096 else 2500) * seconds)
    out = subprocess.run(
        ["qemu-img", "bench", "-f", "raw", "-c", str(count), "-d", str(depth), "-s", str(block), uri],
        check=True, capture_output=True, text=True).stdout
    return count / float(re.search(r"in ([0-9.]+) seconds", out).group(1)), count


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2)
    parser.add_argument("--folder", default="/dev/shm")
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    # Exit normally, so that the servers are stopped.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    names = ["holdfast", "nbdkit", "qemu-nbd"]
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        folder = Path(folder)
        with open(folder / "source.img", "wb") as source:
            for _ in range(FILE_MIB):
                source.write(os.urandom(1 << 20))
        servers = {}
        try:
            for name in names:
                servers[name] = start(name, folder, arguments.server)
            (folder / "source.img").unlink()
            print(f"{'case':24}" + "".join(f"{name:>12}" for name in names) + "   vs nbdkit  vs qemu-nbd   server CPU us/op")
            for title, client, direction, block, depth in CASES:
                if arguments.only not in title:
                    continue
                rates, costs = {name: [] for name in names}, {name: [] for name in names}
                for _ in range(arguments.rounds):
                    for name in names:
                        process, uri = servers[name]
                        before = cpu_seconds(process)
                        run = run_fio if client == "fio" else run_qemu
                        rate, count = run(uri, direction, block, depth, arguments.seconds)
                        rates[name].append(rate)
                        costs[name].append((cpu_seconds(process) - before) / count * 1e6)
                median = {name: statistics.median(rates[name]) for name in names}
                ours = median["holdfast"]
                print(f"{title:24}" + "".join(f"{median[name]:12.0f}" for name in names)
                      + f"   {ours / median['nbdkit']:9.2f}  {ours / median['qemu-nbd']:11.2f}   "
                      + " / ".join(f"{statistics.median(costs[name]):.1f}" for name in names), flush=True)
        finally:
            for process, _ in servers.values():
                process.stdin.close()
                process.terminate()
                process.wait()


if __name__ == "__main__":
    main()
