"""Run two foreign test suites on a fresh mount: pjdfstest and fsx.

    python scripts/posix.py --pjdfstest DIR --fsx FILE

DIR is a built pjdfstest, FILE an fsx (that of xfstests or of LTP); neither is part of this
project. As root, for pjdfstest acts as several users. Exits 1 if a case fails, if fsx reads
other bytes than it wrote, or if the daemon has logged an error.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

KVFS = str(Path(sys.executable).with_name("kvfs"))
OPERATIONS = 100_000
SEEDS = (1, 2, 3)
# -R and -W leave mapped reads and writes out, -Z opens with O_DIRECT, -c opens the file anew
# every so many operations, with empty caches. What a mount cannot do (fallocate, clones), fsx
# finds out itself.
MODES = {
    "reads and writes": ("-R", "-W"),
    "reads and writes, reopened": ("-R", "-W", "-c", "100"),
    "O_DIRECT": ("-R", "-W", "-Z"),
    "mmap beside reads and writes": (),
}


@contextmanager
def mounted(directory: Path) -> Iterator[Path]:
    """The mountpoint of a fresh KVFS that all users may enter."""
    image, mountpoint, log = directory / "ring.img", directory / "mnt", directory / "kvfs.log"
    mountpoint.mkdir()
    kvfs("mkfs", image, "--size", "1G")
    kvfs("mount", mountpoint, image, "-o", "allow_other", "--log", log)
    try:
        mountpoint.chmod(0o755)
        yield mountpoint
        kvfs("umount", mountpoint)
    finally:
        subprocess.run([KVFS, "umount", "--force", mountpoint], capture_output=True)
    errors = [line for line in log.read_text().splitlines() if " ERROR " in line]
    if errors:
        raise SystemExit("\n".join(["the daemon has logged errors:", *errors]))


def kvfs(*arguments: str | Path) -> None:
    result = subprocess.run([KVFS, *arguments], capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"kvfs {arguments[0]}: {result.stderr.strip()}")


def pjdfstest(suite: Path, mountpoint: Path) -> bool:
    """Whether all cases pass. What fails is printed."""
    work = mountpoint / "pjdfstest"
    work.mkdir()
    result = subprocess.run(
        ["prove", "-r", suite / "tests"], cwd=work, capture_output=True, text=True
    )
    lines = result.stdout.splitlines()
    passed = result.returncode == 0
    shown = lines[-2:] if passed else [line for line in lines if "... ok" not in line]
    print("pjdfstest:", *shown, result.stderr, sep="\n  ", flush=True)
    return passed


def fsx(program: Path, mountpoint: Path, directory: Path) -> bool:
    """Whether the bytes were right in all modes, for all seeds. What fsx says is printed if not.
    It keeps its own records in `directory`."""
    passed = True
    for number, (mode, flags) in enumerate(MODES.items()):
        for seed in SEEDS:
            file = mountpoint / f"fsx.{number}.{seed}"
            result = subprocess.run(
                [program, "-q", "-N", str(OPERATIONS), "-S", str(seed), "-P", directory, *flags,
                 file],
                capture_output=True, text=True,
            )  # fmt: skip
            verdict = "ok" if result.returncode == 0 else "FAILED"
            print(f"fsx: {mode}, seed {seed}, {OPERATIONS} operations: {verdict}", flush=True)
            if result.returncode:
                print(result.stdout, result.stderr, flush=True)
                passed = False
    return passed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pjdfstest", type=Path, required=True, help="the folder of a built one")
    parser.add_argument("--fsx", type=Path, required=True, help="the program")
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        raise SystemExit("run it as root: pjdfstest acts as several users")
    for program in (arguments.pjdfstest / "pjdfstest", arguments.fsx):
        if not program.is_file():
            raise SystemExit(f"{program} is missing: fetch and build the suites first")
    with tempfile.TemporaryDirectory(prefix="kvfs-posix-") as name:
        directory = Path(name)
        directory.chmod(0o755)
        with mounted(directory) as mountpoint:
            passed = [
                pjdfstest(arguments.pjdfstest.resolve(), mountpoint),
                fsx(arguments.fsx.resolve(), mountpoint, directory),
            ]
    print("all pass" if all(passed) else "FAILED")
    sys.exit(not all(passed))


if __name__ == "__main__":
    main()
