"""A private libvirtd with machines, which are always removed at the end, even after an error or a kill."""

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

from live.guest import Guest

MARK = "HOLDFAST_BENCH_LAB"
MIB = 1 << 20
# The exit code of a program that succeeded with warnings (docs/exit-codes.md).
WARNINGS = 3
DOMAIN = """<domain type='qemu'>
  <name>{name}</name>
  <memory unit='MiB'>192</memory>
  <vcpu>1</vcpu>
  <os><type arch='x86_64' machine='pc'>hvm</type><kernel>{kernel}</kernel><initrd>{initrd}</initrd>
    <cmdline>console=ttyS0 quiet measure {words}</cmdline></os>
  <features><acpi/></features>
  <devices>{disks}
    <serial type='file'><source path='{console}' append='on'/><target port='0'/></serial>
    <channel type='unix'><source mode='bind' path='{measure}'/><target type='virtio' name='holdfast.measure'/></channel>
    <channel type='unix'><target type='virtio' name='org.qemu.guest_agent.0'/></channel>
    <memballoon model='none'/>
  </devices>
</domain>
"""
DISK = """
    <disk type='file' device='disk'><driver name='qemu' type='qcow2'/><source file='{image}'/><target dev='{name}' bus='virtio'/></disk>"""


class Problem(Exception):
    """A measured operation failed, or behaved differently than expected."""


class Lab:
    """`folder` contains sockets, so its path is short; `work` contains large files."""

    def __init__(self, root, scratch, binary):
        self.root, self.binary = root, os.path.abspath(binary)
        self.folder = Path(tempfile.mkdtemp(prefix="hfb-", dir="/tmp"))
        self.work = Path(tempfile.mkdtemp(prefix="live-", dir=scratch))
        self.images = self.work / "images"
        self.guests = {}
        self.daemon = None
        self.uri = ""
        keep = {name: os.environ[name] for name in ("PATH", "TERM") if name in os.environ}
        self.env = {
            **keep,
            "PATH": keep.get("PATH", "/usr/bin:/bin") + ":/usr/sbin:/sbin",
            "LC_ALL": "C.UTF-8",
            MARK: str(self.folder),
            "HOME": str(self.folder / "home"),
            "XDG_STATE_HOME": str(self.folder / "state"),
            "XDG_CACHE_HOME": str(self.folder / "cache"),
            "XDG_RUNTIME_DIR": str(self.folder / "runtime"),
        }

    def __enter__(self):
        self.janitor = start_janitor(self.folder, self.work)
        try:
            for name in ("home", "state", "cache", "runtime"):
                (self.folder / name).mkdir(mode=0o700)
            self.images.mkdir()
            self.start_daemon()
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, *_):
        self.end()

    def end(self):
        for guest in self.guests.values():
            guest.close()
        clear(self.folder, self.work)
        os.write(self.janitor, b"done")
        os.close(self.janitor)

    def start_daemon(self):
        self.run([self.root / "scripts/test-guest", self.root / "build/guest"])
        log = open(self.folder / "libvirtd.log", "ab")
        self.daemon = subprocess.Popen(
            [self.root / "scripts/private-libvirtd", self.folder / "libvirt"],
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        for _ in range(600):
            if (self.folder / "libvirt/uri").exists():
                self.uri = (self.folder / "libvirt/uri").read_text().strip()
                if self.run(["virsh", "-q", "-c", self.uri, "list"], check=False).returncode == 0:
                    return
            time.sleep(0.1)
        raise Problem(f"libvirtd does not answer: {(self.folder / 'libvirtd.log').read_text()[-500:]}")

    # Programs

    def run(self, command, check=True, timeout_s=600):
        command = [str(word) for word in command]
        try:
            answer = subprocess.run(
                command, env=self.env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s, check=False
            )
        except subprocess.TimeoutExpired:
            raise Problem(f"took longer than {timeout_s} s: {' '.join(command)}") from None
        if check and answer.returncode != 0:
            raise Problem(f"exit code {answer.returncode}: {' '.join(command)}\n{(answer.stderr or answer.stdout)[-800:]}")
        return answer

    def virsh(self, *words, check=True):
        return self.run(["virsh", "-q", "-c", self.uri, *words], check=check).stdout

    def holdfast_words(self, *words):
        return [self.binary, *map(str, words)]

    def holdfast(self, *words, timeout_s=600):
        """Runs Holdfast and returns its report; warnings are not an error."""
        words = self.holdfast_words(*words, "--json", "--quiet")
        answer = self.run(words, check=False, timeout_s=timeout_s)
        if answer.returncode not in (0, WARNINGS):
            raise Problem(f"exit code {answer.returncode}: {' '.join(map(str, words))}\n{(answer.stderr or answer.stdout)[-800:]}")
        return json.loads(answer.stdout)["report"]

    def back_up(self, name, repository, *words):
        """Backs up a machine; returns the part of the report about it."""
        scratch = [] if "--scratch" in words else ["--scratch", self.work]
        report = self.holdfast("backup", name, "-c", self.uri, "-r", repository, *scratch, *words)
        return report["machines"][0]

    def new_repository(self, name, folder=None):
        repository = (folder or self.work) / name
        shutil.rmtree(repository, ignore_errors=True)
        self.env["HOLDFAST_PASSWORD_FILE"] = str(self.password_file())
        self.holdfast("init", "-r", repository)
        return repository

    def password_file(self):
        path = self.folder / "password"
        if not path.exists():
            with open(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600), "w") as file:
                file.write("a password for measurements\n")
        return path

    # Machines

    def image(self, name, size_mib, data_mib):
        """A qcow2 image with data spread over it, of which every second 64 KiB can be compressed."""
        raw, image = self.work / "raw", self.images / f"{name}.qcow2"
        with open(raw, "wb") as file:
            file.truncate(size_mib * MIB)
            step = size_mib * MIB // max(data_mib, 1)
            for number in range(data_mib):
                file.seek(step * number // 65536 * 65536)
                for _ in range(8):
                    file.write(os.urandom(65536) + (b"%08d a line of a file\n" % number * 3000)[:65536])
        self.run(["qemu-img", "convert", "-f", "raw", "-O", "qcow2", raw, image])
        raw.unlink()
        return image

    def file_system(self, name, size_mib):
        """A qcow2 image with an ext4 file system."""
        raw, image = self.work / "raw", self.images / f"{name}.qcow2"
        with open(raw, "wb") as file:
            file.truncate(size_mib * MIB)
        self.run(["mkfs.ext4", "-q", "-F", raw])
        self.run(["qemu-img", "convert", "-f", "raw", "-O", "qcow2", raw, image])
        raw.unlink()
        return image

    def define(self, name, images, words=""):
        """Defines a machine with these images as vda, vdb and so on."""
        disks = (DISK.format(image=image, name=f"vd{letter}") for image, letter in zip(images, "abcdef"))
        text = DOMAIN.format(
            name=name,
            kernel=self.root / "build/guest/vmlinuz",
            initrd=self.root / "build/guest/initrd",
            words=words,
            disks="".join(disks),
            console=self.folder / f"{name}.console",
            measure=self.folder / f"{name}.measure",
        )
        file = self.folder / f"{name}.xml"
        file.write_text(text)
        self.virsh("define", file)
        return self.guest(name)

    def guest(self, name):
        if name not in self.guests:
            self.guests[name] = Guest(self.folder / f"{name}.measure", self.folder / f"{name}.console")
        return self.guests[name]

    def start(self, name):
        self.virsh("start", name)
        self.guests[name].wait()

    def forget(self, name):
        """Removes the machine and its images."""
        self.virsh("destroy", name, check=False)
        self.virsh("undefine", name, "--checkpoints-metadata", check=False)
        if name in self.guests:
            self.guests.pop(name).close()
        for image in self.images.glob(f"{name}*"):
            image.unlink()

    def kill(self, name):
        """Ends the machine as a crash of the host would."""
        number = int((self.folder / f"libvirt/run/qemu/{name}.pid").read_text())
        os.kill(number, signal.SIGKILL)
        while self.state(name) != "shut off":
            time.sleep(0.02)

    def state(self, name):
        return self.virsh("domstate", name).strip()

    def qmp(self, name, command, /, **arguments):
        question = {"execute": command, **({"arguments": arguments} if arguments else {})}
        answer = json.loads(self.virsh("qemu-monitor-command", name, json.dumps(question)))
        if "error" in answer:
            raise Problem(f"{command}: {answer['error']['desc']}")
        return answer["return"]

    def bitmaps(self, name):
        """The node and the name of each bitmap."""
        nodes = self.qmp(name, "query-named-block-nodes", flat=True)
        found = ((node["node-name"], bitmap.get("name")) for node in nodes for bitmap in node.get("dirty-bitmaps", []))
        # QEMU has some temporary bitmaps without a name.
        return [(node, bitmap) for node, bitmap in found if bitmap]

    def remove_bitmaps(self, name):
        for node, bitmap in self.bitmaps(name):
            self.qmp(name, "block-dirty-bitmap-remove", node=node, name=bitmap)

    def left_behind(self, name):
        """The leftovers of a run of Holdfast in QEMU."""
        names = [node["node-name"] for node in self.qmp(name, "query-named-block-nodes", flat=True)]
        names += [export["id"] for export in self.qmp(name, "query-block-exports")]
        names += [bitmap for _, bitmap in self.bitmaps(name)]
        names += [opened.get("opaque", "") for one in self.qmp(name, "query-fdsets") for opened in one["fds"]]
        return sorted(found for found in names if found.startswith("hf-"))

    # Slow and failing targets

    @contextmanager
    def mounted(self, *words):
        """Mounts a file system with these arguments of `mount` in a new folder, until the block ends."""
        folder = Path(tempfile.mkdtemp(prefix="mount-", dir=self.folder))
        try:
            self.run(["mount", *words, folder])
            yield folder
        finally:
            unmount(folder)
            folder.rmdir()


def start_janitor(folder, work):
    """Starts a process that cleans up if this one ends without doing so, for example because it was killed."""
    reader, writer = os.pipe()
    os.set_inheritable(writer, False)
    if os.fork() == 0:
        try:
            os.setsid()
            os.close(writer)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            if os.read(reader, 4) != b"done":
                clear(folder, work)
        finally:
            os._exit(0)
    os.close(reader)
    return writer


def clear(folder, work):
    """Kills every process of a lab, unmounts its file systems, and removes its folders."""
    for _ in range(100):
        found = [number for number in processes() if belongs(number, folder, work)]
        if not found:
            break
        for number in found:
            try:
                os.kill(number, signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(0.05)
    for place in reversed(mounts_below(folder) + mounts_below(work)):
        unmount(place)
    for path in (folder, work):
        shutil.rmtree(path, ignore_errors=True)


def processes():
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]


def belongs(number, folder, work):
    """Whether a process was started with the environment variable of a lab, is the QEMU of a machine with images in it, or
    a sshd with its configuration, which writes its title over its environment.
    """
    base = Path(f"/proc/{number}")
    try:
        words = (base / "cmdline").read_bytes().split(b"\0")
        variables = (base / "environ").read_bytes().split(b"\0")
    except OSError:
        return False
    is_qemu = os.path.basename(words[0]).startswith(b"qemu-system")
    is_sshd = words[0].startswith(b"sshd: ") and f"{folder}/".encode() in words[0]
    return is_sshd or f"{MARK}={folder}".encode() in variables or (is_qemu and any(f"{work}/".encode() in word for word in words))


def mounts_below(folder):
    places = (line.split()[1] for line in Path("/proc/mounts").read_text().splitlines())
    return [Path(place) for place in places if place.startswith(f"{folder}/")]


def unmount(place):
    if subprocess.run(["umount", place], capture_output=True, check=False).returncode != 0:
        subprocess.run(["umount", "--lazy", place], capture_output=True, check=False)
