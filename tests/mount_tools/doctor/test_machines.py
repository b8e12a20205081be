"""The parsers over other machines' /proc and /sys: each check found good, found bad, missing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from mount_tools.doctor import block, fuse, gpu, kernel, memory, pci, software, sysctls, wear
from mount_tools.doctor.check import Check, Status
from mount_tools.doctor.system import System
from tests.mount_tools.doctor.machines import (
    CONTAINER,
    SERVER,
    SERVER_LINKS,
    VM,
    VM_LINKS,
    build,
    put,
)
from tests.support.users import as_user, needs_root

Look = Callable[[System], Iterable[Check]]
SHM = Path("/dev/shm")
NVME = "sys/devices/pci0000:16/nvme/nvme1/nvme1n1/queue"
SATA = "sys/devices/pci0000:00/ata1/0:0:0:0"
PCI = "sys/bus/pci/devices"


@pytest.fixture
def server(tmp_path: Path) -> System:
    return build(tmp_path / "server", SERVER, SERVER_LINKS)


@pytest.fixture
def vm(tmp_path: Path) -> System:
    return build(tmp_path / "vm", VM, VM_LINKS)


@pytest.fixture
def container(tmp_path: Path) -> System:
    return build(tmp_path / "container", CONTAINER)


def disk(system: System) -> Iterable[Check]:
    return block.disk_checks(system, "nvme1n1")


def sata(system: System) -> Iterable[Check]:
    return block.disk_checks(system, "sda")


def ram(system: System) -> Iterable[Check]:
    return [*memory.checks(system), *memory.tmpfs_checks(system, SHM)]


def find(checks: Iterable[Check], name: str) -> Check:
    (found,) = [check for check in checks if check.name == name]
    return found


@dataclass(frozen=True)
class Case:
    """`file` is what the check reads; with `bad` in it the status is `worse`, without it unknown
    (or `missing`)."""

    look: Look
    name: str
    file: str
    bad: str | int
    worse: Status
    missing: Status = Status.UNKNOWN


ADVICE, WARNING, ERROR, UNKNOWN = Status.ADVICE, Status.WARNING, Status.ERROR, Status.UNKNOWN
SMART_BAD = (
    '#!/bin/sh\necho \'{"percent_used": 91, "avail_spare": 100, "data_units_written": 5}\'\n'
)
MEM = "proc/meminfo"
THP = "sys/kernel/mm/transparent_hugepage"
SMI_FULL = "#!/bin/sh\necho '0, NVIDIA H100 80GB HBM3, 81559, 79000'\n"
SHM_SMALL = "30 22 0:26 / /dev/shm rw - tmpfs tmpfs rw,size=524288k,huge=within_size\n"
SHM_NO_HUGE = "30 22 0:26 / /warm rw - tmpfs tmpfs rw,size=16g\n"
CASES = [
    Case(kernel.checks, "version", "proc/sys/kernel/osrelease", "5.10.0-33-amd64", WARNING),
    Case(kernel.checks, "io_uring", "proc/sys/kernel/io_uring_disabled", 2, ADVICE),
    Case(sysctls.checks, "vm.swappiness", "proc/sys/vm/swappiness", 60, WARNING),
    Case(sysctls.checks, "vm.vfs_cache_pressure", "proc/sys/vm/vfs_cache_pressure", 0, ADVICE),
    Case(sysctls.checks, "vm.max_map_count", "proc/sys/vm/max_map_count", 1024, WARNING),
    Case(sysctls.checks, "vm.dirty_ratio", "proc/sys/vm/dirty_ratio", 80, ADVICE),
    Case(
        sysctls.checks, "vm.dirty_background_ratio", "proc/sys/vm/dirty_background_ratio", 50,
        ADVICE,
    ),
    Case(sysctls.checks, "fs.aio-max-nr", "proc/sys/fs/aio-max-nr", 1100, ADVICE),
    Case(fuse.checks, "module", "proc/filesystems", "nodev\ttmpfs\n\tfuseblk\n", ERROR),
    Case(fuse.checks, "max_pages_limit", "proc/sys/fs/fuse/max_pages_limit", 32, WARNING),
    Case(
        fuse.checks, "max_user_bgreq", "sys/module/fuse/parameters/max_user_bgreq", 12, ADVICE
    ),
    Case(ram, "available", MEM, "MemTotal: 64000000 kB\nMemAvailable: 9000000 kB\n", WARNING),
    Case(ram, "limit of the control group", "proc/self/cgroup", "0::/small", WARNING),
    Case(ram, "transparent huge pages", f"{THP}/enabled", "always madvise [never]", ADVICE),
    Case(ram, "huge pages in tmpfs", f"{THP}/shmem_enabled", "always [deny] force", WARNING),
    Case(
        ram, "reserved huge pages", MEM, "HugePages_Free: 1024\nHugepagesize: 2048 kB\n", ADVICE
    ),
    Case(ram, "size of /dev/shm", "proc/self/mountinfo", SHM_SMALL, WARNING),
    Case(pci.checks, "NVMe 0000:17:00.0", f"{PCI}/0000:17:00.0/current_link_width", 2, WARNING),
    Case(
        pci.checks, "NVMe 0000:18:00.0", f"{PCI}/0000:18:00.0/current_link_speed",
        "8.0 GT/s PCIe", WARNING,
    ),
    Case(
        pci.checks, "NVIDIA GPU 0000:4f:00.0", f"{PCI}/0000:4f:00.0/current_link_speed",
        "2.5 GT/s PCIe", ADVICE,
    ),
    Case(gpu.checks, "memory", "usr/bin/nvidia-smi", SMI_FULL, WARNING),
    Case(wear.checks, "nvme1n1", "usr/sbin/nvme", SMART_BAD, WARNING),
    Case(disk, "scheduler", f"{NVME}/scheduler", "none mq-deadline [bfq]", ADVICE),
    Case(disk, "queue depth", f"{NVME}/nr_requests", 31, ADVICE),
    Case(disk, "largest request", f"{NVME}/max_sectors_kb", 128, ADVICE),
    Case(sata, "write cache", f"{SATA}/block/sda/queue/write_cache", "write through", WARNING),
    Case(disk, "rotational", f"{NVME}/rotational", 1, WARNING),
    Case(disk, "discard", f"{NVME}/discard_max_bytes", 0, ADVICE),
    Case(
        software.checks, "torch", "site-packages/torch-2.9.0.dist-info/METADATA",
        "Metadata-Version: 2.1\nName: torch\nVersion: 2.4.1\n", WARNING,
    ),
    Case(
        software.checks, "transformers", "site-packages/transformers-5.24.0.dist-info/METADATA",
        "Metadata-Version: 2.1\nName: transformers\nVersion: 6.0.1\n", WARNING,
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_found_good_found_bad_and_missing(server: System, case: Case) -> None:
    put(server.root, "sys/fs/cgroup/small/memory.max", 512 * 1024**2)
    for name, version in (("torch", "2.9.0"), ("transformers", "5.24.0")):
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        put(server.root, f"site-packages/{name}-{version}.dist-info/METADATA", metadata)

    good = find(case.look(server), case.name)
    assert good.status is Status.OK, good
    assert good.wanted and good.why

    put(server.root, case.file, case.bad)
    bad = find(case.look(server), case.name)
    assert bad.status is case.worse, bad
    assert bad.command or case.name in ("version", "rotational"), bad

    (server.root / case.file).unlink()
    missing = find(case.look(server), case.name)
    assert missing.status is case.missing, missing


def test_a_good_server_has_no_trouble_at_all(server: System) -> None:
    looks: list[Look] = [
        kernel.checks, sysctls.checks, fuse.checks, ram, pci.checks, gpu.checks, wear.checks,
        disk, sata,
    ]  # fmt: skip
    checks = [check for look in looks for check in look(server)]
    assert {check.status for check in checks if check.name != "sda"} == {Status.OK}
    wear_of = {check.name: check for check in wear.checks(server)}
    assert set(wear_of) == {"nvme0n1", "nvme1n1", "sda"}
    assert wear_of["nvme0n1"].found == (
        "SAMSUNG MZQL23T8HCLS-00A07 (SSD); 3 % used, 63.2 TB written, 100 % spare, "
        "0 media errors, 38 C"
    )
    assert wear_of["sda"].status is Status.UNKNOWN
    assert wear_of["sda"].found.startswith("Samsung SSD 870 (SSD)")


def test_a_virtual_machine(vm: System) -> None:
    assert find(sysctls.checks(vm), "vm.swappiness").found == "60, and no swap"
    assert find(kernel.checks(vm), "io_uring").status is UNKNOWN
    assert find(pci.checks(vm), "GPU and NVMe").status is UNKNOWN
    assert find(gpu.checks(vm), "memory").status is UNKNOWN
    assert find(wear.checks(vm), "vda").status is UNKNOWN
    # Without an option a tmpfs has half of the memory.
    assert find(ram(vm), "size of /dev/shm").found == "11.8 GiB"
    checks = list(block.checks(vm, Path("/srv/ring.img")))
    assert find(checks, "filesystem of the image").found == "ext4 on / (/dev/vda1)"
    assert find(checks, "rotational").status is ADVICE
    assert find(checks, "discard").status is ADVICE
    assert {check.group for check in checks} == {"device", "device vda"}


def test_a_container_says_plainly_what_it_does_not_show(container: System) -> None:
    assert find(fuse.checks(container), "/dev/fuse").status is ERROR
    assert find(fuse.checks(container), "fusermount3").status is ERROR
    assert find(ram(container), "size of /dev/shm").status is WARNING
    assert find(ram(container), "limit of the control group").found == "1.0 GiB"
    for check in sysctls.checks(container):
        assert check.status is UNKNOWN and "cannot be read" in check.found
    (filesystem,) = block.checks(container, Path("/srv/ring.img"))
    assert filesystem.status is ADVICE and filesystem.found.startswith("overlay on /")


def test_a_machine_without_proc_and_sys_is_unknown_and_no_failure(tmp_path: Path) -> None:
    nothing = System(tmp_path)
    looks: list[Look] = [
        kernel.checks, sysctls.checks, ram, pci.checks, gpu.checks, software.checks, disk,
        lambda system: block.checks(system, Path("/srv/ring.img")),
    ]  # fmt: skip
    for look in looks:
        checks = list(look(nothing))
        assert checks
        assert {check.status for check in checks} == {UNKNOWN}, checks
    assert list(wear.checks(nothing)) == []


@pytest.mark.parametrize(
    ("source", "disks", "kinds"),
    [
        ("/dev/nvme1n1", ["nvme1n1"], []),
        ("/dev/nvme0n1p2", ["nvme0n1"], []),
        ("/dev/dm-0", ["nvme1n1"], []),
        ("/dev/mapper/vg0-rings", ["nvme1n1"], []),
        ("/srv/rings/ring.img", ["nvme1n1"], ["xfs"]),
        ("/dev/loop7", ["nvme1n1"], ["xfs"]),
        ("/srv/elsewhere.img", ["nvme0n1"], ["ext4"]),
        ("/data/ring.img", ["sda"], ["btrfs"]),
        ("/net/ring.img", [], ["nfs4"]),
        ("/dev/shm/ring.img", [], ["tmpfs"]),
    ],
)
def test_the_disk_below_is_found(
    server: System, source: str, disks: list[str], kinds: list[str]
) -> None:
    found = block.below(server, Path(source))
    assert list(found.disks) == disks
    assert [filesystem.kind for filesystem in found.filesystems] == kinds


def test_every_disk_of_a_stripe_is_looked_at(server: System) -> None:
    slave = server.root / "sys/devices/virtual/block/dm-0/slaves/sda"
    slave.symlink_to(f"../../../../../../{SATA}/block/sda")
    assert block.below(server, Path("/dev/dm-0")).disks == ("nvme1n1", "sda")


def test_a_loop_device_on_itself_ends(server: System) -> None:
    put(server.root, "sys/devices/virtual/block/loop7/loop/backing_file", "/dev/loop7")
    assert block.below(server, Path("/dev/loop7")).disks == ("loop7",)


@pytest.mark.parametrize(
    ("source", "status"),
    [
        ("/srv/rings/ring.img", Status.OK),
        ("/data/ring.img", ADVICE),
        ("/dev/shm/ring.img", WARNING),
        ("/net/ring.img", UNKNOWN),
    ],
)
def test_the_filesystem_of_an_image_is_judged(server: System, source: str, status: Status) -> None:
    check = find(block.checks(server, Path(source)), "filesystem of the image")
    assert check.status is status


def test_dev_fuse_good_forbidden_and_missing(server: System) -> None:
    assert find(fuse.checks(server), "/dev/fuse").status is Status.OK
    (server.root / "dev/fuse").unlink()
    assert find(fuse.checks(server), "/dev/fuse").status is ERROR


@needs_root
def test_a_user_is_told_of_rights_that_root_does_not_need(server: System) -> None:
    for place in (server.root, *server.root.parents):
        if place.owner() == "root" and place != Path("/"):
            place.chmod(place.stat().st_mode | 0o011)
    os.chmod(server.root / "dev/fuse", 0o600)

    def look() -> dict[str, Check]:
        return {check.name: check for check in fuse.checks(server)}

    checks = as_user(65534, look)
    assert checks["/dev/fuse"].found == "permission denied"
    assert checks["/dev/fuse"].status is ERROR
    assert checks["fusermount3"].status is ERROR
    assert checks["user_allow_other"].status is Status.OK

    os.chmod(server.root / "dev/fuse", 0o666)
    os.chmod(server.root / "usr/bin/fusermount3", 0o4755)
    put(server.root, "etc/fuse.conf", "#user_allow_other\n")
    checks = as_user(65534, look)
    assert checks["/dev/fuse"].status is Status.OK
    assert checks["fusermount3"].status is Status.OK
    assert checks["user_allow_other"].status is ADVICE


def test_large_pages_of_the_warm_directory(server: System) -> None:
    name = "large pages of /warm"
    put(server.root, "proc/self/mountinfo", "30 22 0:26 / /warm rw - tmpfs t rw,huge=within_size\n")
    assert find(memory.tmpfs_checks(server, Path("/warm")), name).status is Status.OK
    put(server.root, "proc/self/mountinfo", SHM_NO_HUGE)
    assert find(memory.tmpfs_checks(server, Path("/warm")), name).status is ADVICE
    (server.root / "proc/self/mountinfo").unlink()
    assert find(memory.tmpfs_checks(server, Path("/warm")), name).status is UNKNOWN


def test_a_warm_directory_that_is_no_tmpfs(server: System) -> None:
    (check,) = [c for c in memory.tmpfs_checks(server, Path("/srv")) if c.name == "size of /srv"]
    assert check.status is WARNING and "not a tmpfs" in check.found


def test_swap_counts_only_where_there_is_some(server: System) -> None:
    put(server.root, "proc/sys/vm/swappiness", 60)
    assert find(sysctls.checks(server), "vm.swappiness").status is WARNING
    put(server.root, "proc/swaps", SERVER["proc/swaps"].splitlines()[0])
    assert find(sysctls.checks(server), "vm.swappiness").status is Status.OK


def test_a_copy_is_judged_by_its_speed() -> None:
    assert memory.judge_copy(12e9).status is Status.OK
    assert memory.judge_copy(1e9).status is ADVICE


@pytest.mark.parametrize(
    ("log", "status"),
    [
        ('{"percent_used":3,"avail_spare":100,"spare_thresh":10,"data_units_written":9}', "ok"),
        ('{"percent_used":75,"avail_spare":100,"data_units_written":9}', "advice"),
        ('{"percent_used":3,"avail_spare":100,"data_units_written":9,"temperature":358}', "advice"),
        ('{"percent_used":3,"avail_spare":100,"data_units_written":9,"media_errors":2}', "warning"),
        ('{"percent_used":3,"avail_spare":5,"spare_thresh":10,"data_units_written":9}', "error"),
        ('{"percent_used":120,"avail_spare":100,"data_units_written":9}', "error"),
        ('{"percent_used":"much","avail_spare":100,"data_units_written":9}', "unknown"),
        ("[]", "unknown"),
        ("not JSON", "unknown"),
    ],
)
def test_wear_by_the_health_log(server: System, log: str, status: str) -> None:
    put(server.root, "usr/sbin/nvme", f"#!/bin/sh\necho '{log}'\n")
    assert find(wear.checks(server), "nvme0n1").status.value == status


def test_smartctl_serves_where_there_is_no_nvme(server: System) -> None:
    (server.root / "usr/sbin/nvme").unlink()
    log = (
        '{"nvme_smart_health_information_log": {"temperature": 38, "available_spare": 100, '
        '"available_spare_threshold": 10, "percentage_used": 95, "data_units_written": 1000000}}'
    )
    put(server.root, "usr/sbin/smartctl", f"#!/bin/sh\necho '{log}'\n")
    check = find(wear.checks(server), "nvme0n1")
    assert check.status is WARNING
    assert "95 % used, 0.5 TB written" in check.found and "38 C" in check.found


def test_what_nvidia_smi_does_not_know_is_left_out(server: System) -> None:
    put(server.root, "usr/bin/nvidia-smi", "#!/bin/sh\necho '0, NVIDIA GB10, [N/A], [N/A]'\n")
    assert gpu.gpus(server) == []
    assert find(gpu.checks(server), "memory").status is UNKNOWN


def test_gpu_memory_of_processes(server: System) -> None:
    assert gpu.memory_of(server, {4711}) == 39000 * 1024**2
    assert gpu.memory_of(server, {4711, 4712, 9}) == 40000 * 1024**2
    assert gpu.memory_of(server, {9}) is None
    shutil.rmtree(server.root / "usr/bin")
    assert gpu.memory_of(server, {4711}) is None


def test_the_versions_wanted_are_those_of_the_package() -> None:
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    assert (
        f'"torch>={software.RANGES["torch"].least[0]}.{software.RANGES["torch"].least[1]}"' in text
    )
    wanted = software.RANGES["transformers"]
    assert wanted.before is not None
    least = f"{wanted.least[0]}.{wanted.least[1]}"
    assert f'"transformers>={least},<{wanted.before[0]}"' in text
