"""The measured programs: Holdfast and its peers, each with the commands for every job.

All encrypt, and compress with zstd if they can. All files of a program (repository, caches, configuration) are in one
folder, so that a state can be copied and restored; the paths never change.
"""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

from process import Failed, first_line

PASSWORD = "a password for measurements"
DISK = "disk.raw"


class Program:
    """One program. All its files are in the folder `live`: the repository in `live/repo`, everything else in
    `live/home`.
    """

    name = ""
    binary = ""
    settings = ""
    how_to_get = ""
    can_mount = False

    def __init__(self, scratch):
        self.root = Path(scratch) / self.name
        self.live = self.root / "live"
        self.repo = self.live / "repo"
        self.home = self.live / "home"
        self.out = self.root / "out"
        self.log = self.root / "log"

    def path(self):
        return shutil.which(self.binary)

    def version(self):
        return first_line([self.path(), "--version"])

    def missing(self, _job):
        """The reason why the program cannot do a job; None if it can."""
        return None

    def env(self):
        keep = {name: os.environ[name] for name in ("PATH", "TMPDIR", "TERM") if name in os.environ}
        return {
            **keep,
            "LC_ALL": "C.UTF-8",
            "HOME": str(self.home),
            "XDG_CACHE_HOME": str(self.home / "cache"),
            "XDG_CONFIG_HOME": str(self.home / "config"),
            "XDG_DATA_HOME": str(self.home / "data"),
        }

    def init(self):
        """Commands that create an empty repository."""
        raise NotImplementedError

    def backup(self, tag, reread):
        """Command that backs up DISK, in its folder; with `reread` it also reads a file that looks unchanged."""
        raise NotImplementedError

    def restore(self, tag):
        """Command that restores DISK below `out`, its working directory."""
        raise NotImplementedError

    def verify(self):
        """Command that reads and checks all stored data."""
        raise NotImplementedError

    def mount(self, folder):
        """Command that mounts the repository and stays in the foreground."""
        raise NotImplementedError

    def mounted_disk(self, folder, tag):
        """Path of DISK in the newest snapshot below `folder`; None while it does not exist."""
        for base, _, names in os.walk(folder):
            if DISK in names:
                return Path(base) / DISK
        return None


class Holdfast(Program):
    name = "holdfast"
    settings = "as it comes"
    can_mount = True
    # The verbs for each job, the preferred one first: scrub reads all stored data, verify only the data that snapshots
    # need.
    verbs = {
        "first": ("backup",),
        "day1": ("backup",),
        "day2": ("backup",),
        "unchanged": ("backup",),
        "second": ("backup",),
        "restore": ("restore",),
        "verify": ("scrub", "verify"),
    }

    def __init__(self, scratch, binary):
        super().__init__(scratch)
        self.binary = str(binary)
        self.password_file = self.root / "password"
        self.help = {}

    def path(self):
        return self.binary

    def has_verb(self, *words):
        """Whether the program has a verb, according to its help."""
        if words not in self.help:
            command = [self.binary, *words, "--help"]
            answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
            self.help[words] = answer.stdout if answer.returncode == 0 else None
        return self.help[words]

    def missing(self, job):
        needed = [("init",), ("backup",), self.verbs[job]]
        absent = sorted({words[0] for words in needed if not any(map(self.has_verb, words))})
        return f"holdfast has no verb {', '.join(absent)}" if absent else None

    def env(self):
        self.root.mkdir(parents=True, exist_ok=True)
        self.password_file.touch(mode=0o600)
        self.password_file.write_text(PASSWORD + "\n")
        return {
            **super().env(),
            "HOLDFAST_REPOSITORY": str(self.repo),
            "HOLDFAST_PASSWORD_FILE": str(self.password_file),
        }

    def init(self):
        return [[self.binary, "init"]]

    def backup(self, tag, reread):
        machine = "second" if tag == "second" else "first"
        return [self.binary, "backup", "--quiet", "--machine", machine, DISK]

    def restore(self, tag):
        return [self.binary, "restore", "--quiet", "latest", self.out / DISK]

    def verify(self):
        verb = "scrub" if self.has_verb("scrub") else "verify"
        return [self.binary, verb, "--quiet"]

    def mount(self, folder):
        return [self.binary, "mount", "--foreground", folder]

    def mounted_disk(self, folder, tag):
        return super().mounted_disk(Path(folder) / "machines" / "first" / "latest", tag)


class Restic(Program):
    name = "restic"
    binary = "restic"
    settings = "repository version 2, --compression auto (its default)"
    how_to_get = "apt install restic"
    can_mount = True

    def version(self):
        return first_line([self.path(), "version"])

    def env(self):
        return {**super().env(), "RESTIC_REPOSITORY": str(self.repo), "RESTIC_PASSWORD": PASSWORD}

    def init(self):
        return [["restic", "init"]]

    def backup(self, tag, reread):
        return ["restic", "backup", "--quiet", *(["--force"] if reread else []), DISK]

    def restore(self, tag):
        words = re.findall(r"\d+", self.version() or "0.0")
        sparse = ["--sparse"] if tuple(map(int, words[:2])) >= (0, 15) else []
        return ["restic", "restore", "--quiet", "latest", *sparse, "--target", self.out]

    def verify(self):
        return ["restic", "check", "--read-data"]

    def mount(self, folder):
        return ["restic", "mount", folder]

    def mounted_disk(self, folder, tag):
        return super().mounted_disk(Path(folder) / "snapshots" / "latest", tag)


class Borg(Program):
    name = "borg"
    binary = "borg"
    settings = "repokey-blake2, zstd,3, --chunker-params fixed,4194304 --sparse"
    how_to_get = "apt install borgbackup (and python3-pyfuse3 for its mount)"

    @property
    def can_mount(self):
        """Borg can mount only if one of its two FUSE modules is installed for the system's Python."""
        tests = (f"import {module}" for module in ("pyfuse3", "llfuse"))
        return any(
            subprocess.run(["/usr/bin/python3", "-c", test], capture_output=True, check=False).returncode == 0
            for test in tests
        )

    def env(self):
        return {
            **super().env(),
            "BORG_REPO": str(self.repo),
            "BORG_PASSPHRASE": PASSWORD,
            "BORG_BASE_DIR": str(self.home),
            "BORG_RELOCATED_REPO_ACCESS_IS_OK": "yes",
        }

    def init(self):
        return [["borg", "init", "-e", "repokey-blake2"]]

    def backup(self, tag, reread):
        fixed = ["--chunker-params", "fixed,4194304", "--sparse", "-C", "zstd,3"]
        return ["borg", "create", *fixed, *(["--files-cache=disabled"] if reread else []), f"::{tag}", DISK]

    def restore(self, tag):
        return ["borg", "extract", "--sparse", f"::{tag}"]

    def verify(self):
        return ["borg", "check", "--verify-data"]

    def mount(self, folder):
        return ["borg", "mount", "-f", "::", folder]

    def mounted_disk(self, folder, tag):
        return super().mounted_disk(Path(folder) / tag, tag)


class Rustic(Program):
    name = "rustic"
    binary = "rustic"
    settings = "fixed_size chunks of 1 MiB, zstd 3"
    how_to_get = "cargo install --locked rustic-rs"
    chunker = ("--set-chunker", "fixed_size", "--set-chunk-size", "1MiB")

    def env(self):
        return {
            **super().env(),
            "RUSTIC_REPOSITORY": str(self.repo),
            "RUSTIC_PASSWORD": PASSWORD,
            "RUSTIC_NO_PROGRESS": "true",
            "RUSTIC_LOG_LEVEL": "warn",
        }

    def init(self):
        return [["rustic", "init", *self.chunker, "--set-compression", "3"]]

    def backup(self, tag, reread):
        return ["rustic", "backup", *(["--force"] if reread else []), DISK]

    def restore(self, tag):
        return ["rustic", "restore", "--sparse", "by-content", f"latest:{DISK}", self.out / DISK]

    def verify(self):
        return ["rustic", "check", "--read-data"]


class RusticDefault(Rustic):
    name = "rustic-default"
    settings = "its own chunker (Rabin), zstd 3"
    chunker = ()


class Kopia(Program):
    name = "kopia"
    binary = "kopia"
    settings = "its own splitter, --compression=zstd"
    how_to_get = "https://kopia.io/docs/installation (no Debian package)"
    can_mount = True

    def env(self):
        return {
            **super().env(),
            "KOPIA_CONFIG_PATH": str(self.home / "repository.config"),
            "KOPIA_CACHE_DIRECTORY": str(self.home / "cache"),
            "KOPIA_LOG_DIR": str(self.home / "log"),
            "KOPIA_PASSWORD": PASSWORD,
            "KOPIA_CHECK_FOR_UPDATES": "false",
        }

    def init(self):
        return [
            ["kopia", "repository", "create", "filesystem", f"--path={self.repo}"],
            ["kopia", "policy", "set", "--global", "--compression=zstd"],
        ]

    def backup(self, tag, reread):
        return ["kopia", "snapshot", "create", *(["--force-hash=100"] if reread else []), "."]

    def newest(self):
        """Id of the root of the newest snapshot."""
        command = ["kopia", "snapshot", "list", "--all", "--json"]
        answer = subprocess.run(command, env=self.env(), capture_output=True, text=True, check=False)
        snapshots = json.loads(answer.stdout or "[]") if answer.returncode == 0 else []
        if not snapshots:
            raise Failed(f"kopia lists no snapshot: {answer.stderr.strip()[-200:]}")
        return max(snapshots, key=lambda snapshot: snapshot["startTime"])["rootEntry"]["obj"]

    def restore(self, tag):
        return ["kopia", "snapshot", "restore", "--write-sparse-files", self.newest(), self.out]

    def verify(self):
        return ["kopia", "snapshot", "verify", "--verify-files-percent=100"]

    def mount(self, folder):
        return ["kopia", "mount", self.newest(), folder]


PEERS = [Restic, Borg, Rustic, RusticDefault, Kopia]
