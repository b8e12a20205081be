"""/proc and /sys of three machines, as their kernels print them.

A server (two NVMe disks, one of them under LVM, a SATA disk, an H100), a virtual machine with a
virtio disk, and a container that shows next to nothing. Programs are scripts that print what the
real ones print.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from mount_tools.doctor.system import System

Files = Mapping[str, str]

_SERVER_MEMINFO = """\
MemTotal:       528236544 kB
MemFree:        401236544 kB
MemAvailable:   498236544 kB
HugePages_Total:       0
HugePages_Free:        0
Hugepagesize:       2048 kB
"""
_SERVER_MOUNTS = """\
22 1 259:3 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw,errors=remount-ro
24 22 0:22 / /sys rw,nosuid,nodev,noexec,relatime - sysfs sysfs rw
25 22 0:23 / /proc rw,nosuid,nodev,noexec,relatime - proc proc rw
30 22 0:26 / /dev/shm rw,nosuid,nodev shared:4 - tmpfs tmpfs rw,size=264118272k,huge=within_size
88 22 253:0 / /srv/rings rw,relatime shared:44 - xfs /dev/mapper/vg0-rings rw,attr2,noquota
90 22 0:50 / /data rw,relatime - btrfs /dev/sda rw,space_cache=v2,subvolid=5
91 22 0:51 / /net rw,relatime - nfs4 filer:/kv rw,vers=4.2
"""
_SMART = """{
  "critical_warning" : 0, "temperature" : 311, "avail_spare" : 100, "spare_thresh" : 10,
  "percent_used" : 3, "data_units_read" : 91234567, "data_units_written" : 123456789,
  "media_errors" : 0
}"""
_NVIDIA_SMI = """#!/bin/sh
case "$1" in
--query-gpu=*) echo '0, NVIDIA H100 80GB HBM3, 81559, 40211' ;;
--query-compute-apps=*) printf '4711, 39000\\n4712, 1000\\n' ;;
esac
"""

SERVER: Files = {
    "proc/sys/kernel/osrelease": "6.8.0-45-generic\n",
    "proc/sys/kernel/io_uring_disabled": "0\n",
    "proc/sys/vm/swappiness": "1\n",
    "proc/sys/vm/vfs_cache_pressure": "100\n",
    "proc/sys/vm/max_map_count": "1048576\n",
    "proc/sys/vm/dirty_ratio": "20\n",
    "proc/sys/vm/dirty_background_ratio": "10\n",
    "proc/sys/fs/aio-max-nr": "1048576\n",
    "proc/sys/fs/aio-nr": "1024\n",
    "proc/sys/fs/fuse/max_pages_limit": "256\n",
    "proc/swaps": "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n/swap.img file 8388604 0 -2\n",
    "proc/filesystems": "nodev\tsysfs\nnodev\ttmpfs\n\text4\n\tfuseblk\nnodev\tfuse\n\txfs\n",
    "proc/meminfo": _SERVER_MEMINFO,
    "proc/self/mountinfo": _SERVER_MOUNTS,
    "proc/self/cgroup": "0::/user.slice/user-1000.slice/session-3.scope\n",
    "sys/fs/cgroup/user.slice/memory.max": "max\n",
    "sys/module/fuse/parameters/max_user_bgreq": "65535\n",
    "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
    "sys/kernel/mm/transparent_hugepage/shmem_enabled":
        "always within_size advise [never] deny force\n",
    "dev/fuse": "",
    "etc/fuse.conf": "# mount_max = 1000\nuser_allow_other\n",
    "usr/bin/fusermount3": "#!/bin/sh\n",
    "usr/bin/nvidia-smi": _NVIDIA_SMI,
    "usr/sbin/nvme": f"#!/bin/sh\ncat << 'END'\n{_SMART}\nEND\n",
    **{
        f"sys/bus/pci/devices/{address}/{name}": f"{value}\n"
        for address, facts in {
            "0000:17:00.0": ("0x010802", "0x144d", "16.0 GT/s PCIe", "4"),
            "0000:18:00.0": ("0x010802", "0x144d", "16.0 GT/s PCIe", "4"),
            "0000:4f:00.0": ("0x030200", "0x10de", "32.0 GT/s PCIe", "16"),
            "0000:01:00.0": ("0x020000", "0x8086", "8.0 GT/s PCIe", "8"),
        }.items()
        for name, value in zip(
            ("class", "vendor", "max_link_speed", "max_link_width"), facts, strict=True
        )
    },
    **{
        f"sys/bus/pci/devices/{address}/current_link_{name}": f"{value}\n"
        for address, speed, width in (
            ("0000:17:00.0", "16.0 GT/s PCIe", 4),
            ("0000:18:00.0", "16.0 GT/s PCIe", 4),
            ("0000:4f:00.0", "32.0 GT/s PCIe", 16),
        )
        for name, value in (("speed", speed), ("width", width))
    },
    **{
        f"sys/devices/pci0000:16/{place}/queue/{name}": f"{value}\n"
        for place in ("nvme/nvme0/nvme0n1", "nvme/nvme1/nvme1n1")
        for name, value in {
            "scheduler": "[none] mq-deadline kyber bfq",
            "nr_requests": 1023,
            "max_sectors_kb": 1024,
            "max_hw_sectors_kb": 2048,
            "write_cache": "write through",
            "rotational": 0,
            "discard_max_bytes": 2199023255040,
            "zoned": "none",
        }.items()
    },
    **{
        f"sys/devices/pci0000:00/ata1/0:0:0:0/block/sda/queue/{name}": f"{value}\n"
        for name, value in {
            "scheduler": "none [mq-deadline]",
            "nr_requests": 64,
            "max_sectors_kb": 1280,
            "max_hw_sectors_kb": 32767,
            "write_cache": "write back",
            "rotational": 0,
            "discard_max_bytes": 2147450880,
            "zoned": "none",
        }.items()
    },
    "sys/devices/pci0000:00/ata1/0:0:0:0/queue_depth": "32\n",
    "sys/devices/pci0000:00/ata1/0:0:0:0/model": "Samsung SSD 870 \n",
    "sys/devices/pci0000:00/ata1/0:0:0:0/scsi_disk/0:0:0:0/cache_type":
        "write back\n",
    "sys/devices/pci0000:16/nvme/nvme0/model": "SAMSUNG MZQL23T8HCLS-00A07              \n",
    "sys/devices/pci0000:16/nvme/nvme1/model": "SAMSUNG MZQL23T8HCLS-00A07              \n",
    "sys/devices/pci0000:16/nvme/nvme0/nvme0n1/nvme0n1p2/partition": "2\n",
    "sys/devices/virtual/block/loop7/loop/backing_file": "/srv/rings/ring.img\n",
    "sys/devices/virtual/block/dm-0/dm/name": "vg0-rings\n",
    "dev/nvme0n1p2": "",
    "dev/nvme1n1": "",
    "dev/sda": "",
    "dev/loop7": "",
    "dev/dm-0": "",
    "srv/rings/ring.img": "",
    "data/ring.img": "",
    "net/ring.img": "",
}  # fmt: skip
SERVER_LINKS: Files = {
    "sys/block/nvme0n1": "../devices/pci0000:16/nvme/nvme0/nvme0n1",
    "sys/block/nvme1n1": "../devices/pci0000:16/nvme/nvme1/nvme1n1",
    "sys/block/sda": "../devices/pci0000:00/ata1/0:0:0:0/block/sda",
    "sys/devices/pci0000:16/nvme/nvme0/nvme0n1/device": "../../nvme0",
    "sys/devices/pci0000:16/nvme/nvme1/nvme1n1/device": "../../nvme1",
    "sys/devices/pci0000:00/ata1/0:0:0:0/block/sda/device": "../../../0:0:0:0",
    "sys/class/block/nvme0n1": "../../devices/pci0000:16/nvme/nvme0/nvme0n1",
    "sys/class/block/nvme0n1p2": "../../devices/pci0000:16/nvme/nvme0/nvme0n1/nvme0n1p2",
    "sys/class/block/nvme1n1": "../../devices/pci0000:16/nvme/nvme1/nvme1n1",
    "sys/class/block/sda":
        "../../devices/pci0000:00/ata1/0:0:0:0/block/sda",
    "sys/class/block/dm-0": "../../devices/virtual/block/dm-0",
    "sys/class/block/loop7": "../../devices/virtual/block/loop7",
    "sys/devices/virtual/block/dm-0/slaves/nvme1n1":
        "../../../../pci0000:16/nvme/nvme1/nvme1n1",
    "sys/dev/block/259:3": "../../devices/pci0000:16/nvme/nvme0/nvme0n1/nvme0n1p2",
    "sys/dev/block/253:0": "../../devices/virtual/block/dm-0",
    "dev/mapper/vg0-rings": "../dm-0",
}  # fmt: skip

VM: Files = {
    "proc/sys/kernel/osrelease": "6.1.0-28-cloud-amd64\n",
    "proc/sys/vm/swappiness": "60\n",
    "proc/sys/vm/vfs_cache_pressure": "100\n",
    "proc/sys/vm/max_map_count": "65530\n",
    "proc/sys/vm/dirty_ratio": "20\n",
    "proc/sys/vm/dirty_background_ratio": "10\n",
    "proc/sys/fs/aio-max-nr": "65536\n",
    "proc/sys/fs/aio-nr": "0\n",
    "proc/swaps": "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n",
    "proc/filesystems": "nodev\ttmpfs\nnodev\tfuse\n\text4\n",
    "proc/meminfo": "MemTotal:       24684100 kB\nMemAvailable:   17684100 kB\n"
    "HugePages_Free:        0\nHugepagesize:       2048 kB\n",
    "proc/self/mountinfo": "22 1 254:1 / / rw,relatime - ext4 /dev/vda1 rw\n"
    "30 22 0:26 / /dev/shm rw,nosuid,nodev - tmpfs tmpfs rw\n",
    "proc/self/cgroup": "0::/init.scope\n",
    "sys/kernel/mm/transparent_hugepage/enabled": "[always] madvise never\n",
    "sys/kernel/mm/transparent_hugepage/shmem_enabled":
        "always within_size advise [never] deny force\n",
    "sys/bus/pci/devices/0000:00:04.0/class": "0x010000\n",
    "sys/bus/pci/devices/0000:00:04.0/vendor": "0x1af4\n",
    **{
        f"sys/devices/pci0000:00/0000:00:04.0/virtio1/block/vda/queue/{name}": f"{value}\n"
        for name, value in {
            "scheduler": "none [mq-deadline] kyber bfq",
            "nr_requests": 256,
            "max_sectors_kb": 1280,
            "max_hw_sectors_kb": 2147483647,
            "write_cache": "write back",
            "rotational": 1,
            "discard_max_bytes": 0,
        }.items()
    },
    "sys/devices/pci0000:00/0000:00:04.0/virtio1/block/vda/vda1/partition": "1\n",
    "dev/fuse": "",
    "usr/bin/fusermount3": "#!/bin/sh\n",
    "srv/ring.img": "",
}  # fmt: skip
VM_LINKS: Files = {
    "sys/block/vda": "../devices/pci0000:00/0000:00:04.0/virtio1/block/vda",
    "sys/class/block/vda": "../../devices/pci0000:00/0000:00:04.0/virtio1/block/vda",
    "sys/class/block/vda1": "../../devices/pci0000:00/0000:00:04.0/virtio1/block/vda/vda1",
    "sys/devices/pci0000:00/0000:00:04.0/virtio1/block/vda/device": "../../../virtio1",
    "sys/dev/block/254:1": "../../devices/pci0000:00/0000:00:04.0/virtio1/block/vda/vda1",
}

CONTAINER: Files = {
    "proc/sys/kernel/osrelease": "5.15.0-1075-aws\n",
    "proc/filesystems": "nodev\toverlay\nnodev\tfuse\n",
    "proc/meminfo": _SERVER_MEMINFO,
    "proc/self/mountinfo": "100 99 0:60 / / rw - overlay overlay rw,lowerdir=/l,upperdir=/u\n"
    "101 100 0:61 / /dev/shm rw,nosuid,nodev,noexec - tmpfs shm rw,size=65536k,inode64\n",
    "proc/self/cgroup": "0::/\n",
    "sys/fs/cgroup/memory.max": "1073741824\n",
    "srv/ring.img": "",
}


def build(root: Path, files: Files, links: Files | None = None) -> System:
    """That machine, below `root`. Scripts below bin and sbin can be run."""
    for name, content in files.items():
        put(root, name, content)
    for name, target in (links or {}).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).symlink_to(target)
    return System(root)


def put(root: Path, name: str, content: str | int) -> None:
    file = root / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(str(content))
    if content and file.parent.name in ("bin", "sbin"):
        os.chmod(file, 0o755)
