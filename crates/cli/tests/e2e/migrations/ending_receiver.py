#!/usr/bin/python3
"""holdfast of the other host, whose receivers of disks are killed at a message.

The file PLAN holds "KIND N": the next N receivers are killed when they are sent a message of this kind, or send one, and the
message is lost. docs/format/transfer.md has the kinds and describes the frames.
"""

import os
import signal
import struct
import subprocess
import sys
import threading

PROGRAM, PLAN = "@PROGRAM@", "@PLAN@"


def frames(stream):
    """The frames of a stream: the kind and all bytes of each."""
    while header := stream.read(16):
        length, kind = struct.unpack_from("<IB", header)
        yield kind, header + stream.read(length + 4)


def main():
    with open(PLAN, encoding="ascii") as plan:
        last, count = map(int, plan.read().split())
    if sys.argv[1] != "receive-disk" or count == 0:
        os.execv(PROGRAM, ["holdfast", *sys.argv[1:]])
    receiver = subprocess.Popen([PROGRAM, *sys.argv[1:]], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def end():
        with open(PLAN, "w", encoding="ascii") as plan:
            plan.write(f"{last} {count - 1}")
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
            if kind == last:
                end()
            sys.stdout.buffer.write(frame)
            sys.stdout.buffer.flush()
        os._exit(receiver.wait())

    threading.Thread(target=answer).start()
    receiver.stdin.write(sys.stdin.buffer.readline())
    receiver.stdin.flush()
    for kind, frame in frames(sys.stdin.buffer):
        if kind == last:
            end()
        receiver.stdin.write(frame)
        receiver.stdin.flush()
    receiver.stdin.close()


main()
