#!/usr/bin/python3
"""holdfast of the other host, whose receivers of disks are killed while they are handed over.

The file PLAN holds "before N" or "after N": the next N receivers are killed before they get COMMIT, or after they have
answered it, and the answer is lost. docs/format/transfer.md describes the frames.
"""

import os
import signal
import struct
import subprocess
import sys
import threading

PROGRAM, PLAN = "@PROGRAM@", "@PLAN@"
COMMIT, COMMITTED = 19, 20


def frames(stream):
    """The frames of a stream: the kind and all bytes of each."""
    while header := stream.read(16):
        length, kind = struct.unpack_from("<IB", header)
        yield kind, header + stream.read(length + 4)


def main():
    with open(PLAN, encoding="ascii") as plan:
        when, count = plan.read().split()
    if sys.argv[1] != "receive-disk" or int(count) == 0:
        os.execv(PROGRAM, ["holdfast", *sys.argv[1:]])
    receiver = subprocess.Popen([PROGRAM, *sys.argv[1:]], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def end():
        with open(PLAN, "w", encoding="ascii") as plan:
            plan.write(f"{when} {int(count) - 1}")
        receiver.send_signal(signal.SIGKILL)
        os._exit(1)

    def answer():
        while b'"ready"' not in (line := receiver.stdout.readline()):
            if not line:
                os._exit(receiver.wait())
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()
        for kind, frame in frames(receiver.stdout):
            if kind == COMMITTED and when == "after":
                end()
            sys.stdout.buffer.write(frame)
            sys.stdout.buffer.flush()
        os._exit(receiver.wait())

    threading.Thread(target=answer).start()
    receiver.stdin.write(sys.stdin.buffer.readline())
    receiver.stdin.flush()
    for kind, frame in frames(sys.stdin.buffer):
        if kind == COMMIT and when == "before":
            end()
        receiver.stdin.write(frame)
        receiver.stdin.flush()
    receiver.stdin.close()


main()
