#!/usr/bin/python3
"""holdfast of the other host, whose receivers of disks are killed at a message.

The file PLAN holds "KIND N NAME": the next N receivers of files whose path has NAME in it are killed when they are sent a message
of this kind, or send one, and the message is lost. docs/format/transfer.md has the kinds and describes the frames.
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
        words = plan.read().split()
        last, count, name = int(words[0]), int(words[1]), words[2]
    if sys.argv[1] != "receive-disk" or count == 0:
        os.execv(PROGRAM, ["holdfast", *sys.argv[1:]])
    receiver = subprocess.Popen([PROGRAM, *sys.argv[1:]], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def end():
        with open(PLAN, "w", encoding="ascii") as plan:
            plan.write(f"{last} {count - 1} {name}")
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
    request = sys.stdin.buffer.readline()
    if name.encode() not in request:
        last = None
    receiver.stdin.write(request)
    receiver.stdin.flush()
    for kind, frame in frames(sys.stdin.buffer):
        if kind == last:
            end()
        receiver.stdin.write(frame)
        receiver.stdin.flush()
    receiver.stdin.close()


main()
