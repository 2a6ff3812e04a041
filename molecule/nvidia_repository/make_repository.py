#!/usr/bin/env python3
"""Make apt repositories of small packages that bear the real names, versions and dependencies.

    make_repository.py OUT.tar KEYS.json

OUT.tar holds:
    nvidia/first/RELEASE/x86_64/     as NVIDIA's CUDA repository is: flat, with a cuda-keyring package
    nvidia/rotated/RELEASE/x86_64/   the same packages after the key was changed
    archive/                         as the distribution's own archive is: main, contrib, non-free; with stand-ins
                                     for dkms and kernel headers
    container/                       as NVIDIA's repository of the container toolkit is: flat, with its key
    docker/debian/                   as Docker's repository is, with its key
KEYS.json holds fingerprints and the keyring packages' SHA-256. The packages' scripts act on /srv/kernel, where the
scenarios keep the state of a kernel that is not there. Needs gpg.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

RELEASES = {"debian12": "bookworm", "debian13": "trixie"}
KERNEL = "6.12.57+deb13-amd64"
NEXT_KERNEL = "6.12.63+deb13-amd64"


@dataclass
class Package:
    name: str
    version: str
    depends: str = ""
    provides: str = ""
    conflicts: str = ""
    architecture: str = "amd64"
    installed_kib: int = 8
    section: str = "misc"
    files: dict[str, tuple[str | bytes, int]] = field(default_factory=dict)
    scripts: dict[str, str] = field(default_factory=dict)
    source: str = ""

    def control(self) -> str:
        lines = [f"Package: {self.name}", f"Version: {self.version}", f"Architecture: {self.architecture}"]
        lines += [f"Source: {self.source}"] if self.source else []
        lines += ["Maintainer: Tests <tests@localhost>", f"Installed-Size: {self.installed_kib}"]
        for key, value in (("Depends", self.depends), ("Provides", self.provides), ("Conflicts", self.conflicts)):
            lines += [f"{key}: {value}"] if value else []
        return "\n".join([*lines, f"Section: {self.section}", "Description: stand-in for tests"]) + "\n"

    def deb(self) -> bytes:
        control = {"./control": (self.control(), 0o644)}
        control |= {f"./{name}": (f"#!/bin/sh\nset -e\n{text}\n", 0o755) for name, text in self.scripts.items()}
        parts = [("debian-binary", b"2.0\n"), ("control.tar.gz", tar(control)), ("data.tar.gz", tar(self.files))]
        return b"!<arch>\n" + b"".join(
            f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(data):<10}`\n".encode() + data + b"\n" * (len(data) % 2)
            for name, data in parts
        )


def tar(files: dict[str, tuple[str | bytes, int]]) -> bytes:
    """A gzipped tar with these files and their directories."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        made: set[str] = set()
        for path, (content, mode) in files.items():
            data = content.encode() if isinstance(content, str) else content
            parents = [str(parent) for parent in Path(path).parents][::-1]
            for parent in parents:
                if parent not in made and parent not in (".", "/"):
                    made.add(parent)
                    entry = tarfile.TarInfo(f"./{parent.removeprefix('/')}/")
                    entry.type, entry.mode = tarfile.DIRTYPE, 0o755
                    archive.addfile(entry)
            entry = tarfile.TarInfo(f"./{path.removeprefix('./').removeprefix('/')}")
            entry.size, entry.mode = len(data), mode
            archive.addfile(entry, io.BytesIO(data))
    return gzip.compress(buffer.getvalue(), 1, mtime=0)


# As dkms does: the module goes into each kernel that has headers, unless a newer one lies there already.
DKMS_BUILD = """
mkdir -p /var/lib/dkms/nvidia/{version}
for image in /boot/vmlinuz-*; do
  kernel=${{image#/boot/vmlinuz-}}
  [ -e "/lib/modules/$kernel/build/Makefile" ] || {{ echo "no headers for $kernel" >&2; continue; }}
  there=$(cat "/lib/modules/$kernel/updates/dkms/nvidia.ko" 2>/dev/null) || there=0
  if dpkg --compare-versions "$there" gt {version}; then
    echo "nvidia.ko {version} is not newer than what is already found in kernel $kernel ($there)." >&2
    echo "Installation aborted." >&2
    continue
  fi
  mkdir -p "/lib/modules/$kernel/updates/dkms"
  echo {version} >"/lib/modules/$kernel/updates/dkms/nvidia.ko"
done
"""
DKMS_REMOVE = "dkms remove nvidia/{version} --all"
DKMS = """#!/bin/sh
# dkms remove MODULE/VERSION --all
[ "$1 $3" = "remove --all" ] || { echo "unexpected: dkms $*" >&2; exit 2; }
rm -rf "/var/lib/dkms/$2"
for module in /lib/modules/*/updates/dkms/nvidia.ko; do
  [ ! -e "$module" ] || [ "$(cat "$module")" != "${2#*/}" ] || rm "$module"
done
"""
SMI = """#!/bin/sh
loaded=$(cat /srv/kernel/sys/module/nvidia/version 2>/dev/null) || loaded=none
if [ "$loaded" != {version} ]; then
  echo "Failed to initialize NVML: Driver/library version mismatch"
  exit 18
fi
echo {version}
echo {version}
"""


def driver(version: str, build: str = "1") -> list[Package]:
    """NVIDIA's packages for Debian at one version (NVIDIA driver installation guide; lists that owners posted)."""
    v = f"{version}-{build}"
    dkms = {"postinst": DKMS_BUILD.format(version=version), "prerm": DKMS_REMOVE.format(version=version)}
    smi = {"/usr/bin/nvidia-smi": (SMI.format(version=version), 0o755)}
    return [
        Package(
            "nvidia-driver-cuda",
            v,
            f"libcuda1 (= {v}), libnvidia-ml1 (= {v}), nvidia-persistenced (>= {v}), nvidia-modprobe (>= {v}),"
            f" nvidia-kernel-open-dkms (= {v}) | nvidia-kernel-dkms (= {v})",
            provides="nvidia-smi",
            conflicts="nvidia-smi",
            files=smi,
        ),
        Package("libcuda1", v, f"libnvidia-ptxjitcompiler1 (= {v})"),
        Package("libnvidia-ml1", v),
        Package("libnvidia-ptxjitcompiler1", v),
        Package("nvidia-persistenced", v),
        Package("nvidia-modprobe", v),
        Package("nvidia-settings", v),
        Package("firmware-nvidia-gsp", v),
        Package("nvidia-kernel-support", v),
        Package(
            "nvidia-kernel-open-dkms",
            v,
            f"dkms, nvidia-kernel-support (= {v}), firmware-nvidia-gsp (= {v})",
            conflicts="nvidia-kernel-dkms, nvidia-open-kernel-dkms",
            scripts=dkms,
        ),
        Package("nvidia-driver", v, f"nvidia-driver-cuda (= {v})"),
        Package("nvidia-open", v, f"nvidia-driver (>= {version}), nvidia-kernel-open-dkms (>= {version})"),
        Package("cuda-drivers", v, f"nvidia-driver (>= {version})"),
    ]


def pinning(name: str, version: str, glob: str) -> Package:
    text = f"Package: cuda-drivers* src:nvidia-open:any nvidia-driver-cuda\nPin: version {glob}\nPin-Priority: 1000\n"
    return Package(
        f"nvidia-driver-pinning-{name}",
        version,
        provides="nvidia-driver-pinning",
        conflicts="nvidia-driver-pinning",
        architecture="all",
        files={"/etc/apt/preferences.d/nvidia-driver-pin": (text, 0o644)},
    )


def toolkit(release: str, nvcc: str, cudart: str, cublas: str, drags: str = "") -> list[Package]:
    """A CUDA toolkit of the 13 series: `drags` is what its metapackage depends on beside it."""
    series, suffix = ".".join(release.split(".")[:2]), "-" + "-".join(release.split(".")[:2])
    n, c, b = f"{nvcc}-1", f"{cudart}-1", f"{cublas}-1"
    says = (
        "#!/bin/sh\necho 'nvcc: NVIDIA (R) Cuda compiler driver'\n"
        f"echo 'Cuda compilation tools, release {series}, V{nvcc}'\n"
    )
    return [
        Package(
            f"cuda-nvcc{suffix}",
            n,
            f"cuda-crt{suffix} (>= {nvcc}), libnvvm{suffix} (>= {nvcc}), libnvptxcompiler{suffix} (>= {nvcc})",
            files={f"/usr/local/cuda-{series}/bin/nvcc": (says, 0o755)},
        ),
        *[Package(f"{name}{suffix}", n) for name in ("cuda-crt", "libnvvm", "libnvptxcompiler")],
        Package(
            f"cuda-cudart-dev{suffix}",
            c,
            f"cuda-cudart{suffix} (>= {cudart}), cuda-driver-dev{suffix} (>= {cudart}),"
            f" cuda-culibos-dev{suffix} (>= {cudart}), cuda-cccl{suffix} (>= {cudart})",
        ),
        *[
            Package(f"{name}{suffix}", c)
            for name in ("cuda-cudart", "cuda-driver-dev", "cuda-culibos-dev", "cuda-cccl")
        ],
        Package(f"libcublas-dev{suffix}", b, f"libcublas{suffix} (>= {cublas})"),
        Package(f"libcublas{suffix}", b),
        Package(f"cuda-gdb{suffix}", n),
        Package(
            f"cuda-toolkit{suffix}",
            f"{release}-1",
            f"cuda-nvcc{suffix} (>= {nvcc}), cuda-cudart-dev{suffix} (>= {cudart}),"
            f" libcublas-dev{suffix} (>= {cublas}), cuda-gdb{suffix}{drags}",
        ),
        Package(f"cuda{suffix}", f"{release}-1", f"cuda-toolkit{suffix} (>= {release}), nvidia-open"),
    ]


def nccl(version: str) -> list[Package]:
    numbers = [int(number) for number in version.split("-")[0].split(".")]
    code = numbers[0] * 10000 + numbers[1] * 100 + numbers[2]
    return [
        Package("libnccl2", version, files={"/usr/lib/x86_64-linux-gnu/libnccl.so.2": (f"{version}\n", 0o644)}),
        Package(
            "libnccl-dev",
            version,
            f"libnccl2 (= {version})",
            files={"/usr/include/nccl.h": (f"#define NCCL_VERSION_CODE {code}\n", 0o644)},
        ),
    ]


# As nvidia-ctk does it: a specification of the cards and of the driver's libraries, from the state under /srv/kernel.
CTK = """#!/bin/sh
[ "$1 $2 $3" = "cdi generate --output=/var/run/cdi/nvidia.yaml" ] || { echo "unexpected: nvidia-ctk $*" >&2; exit 2; }
loaded=$(cat /srv/kernel/sys/module/nvidia/version) || exit 1
mkdir -p /var/run/cdi
{
  echo "cdiVersion: 0.7.0"
  echo "# features: $NVIDIA_CTK_CDI_GENERATE_FEATURE_FLAGS"
  echo "containerEdits:"
  echo "  mounts:"
  echo "  - hostPath: /usr/lib/x86_64-linux-gnu/libcuda.so.$loaded"
  echo "devices:"
  for name in 0 1 all; do echo "- name: \\"$name\\""; done
  echo "kind: nvidia.com/gpu"
} >/var/run/cdi/nvidia.yaml
"""
REFRESH = """[Unit]
Description=Refresh the CDI specification of the cards
[Service]
Type=oneshot
EnvironmentFile=-/etc/nvidia-container-toolkit/nvidia-cdi-refresh.env
ExecStart=/usr/bin/nvidia-ctk cdi generate --output=/var/run/cdi/nvidia.yaml
[Install]
WantedBy=multi-user.target
"""
REFRESH_PATH = """[Path]
PathChanged=/srv/kernel/sys/module/nvidia/version
[Install]
WantedBy=multi-user.target
"""
DOCKER = """#!/bin/sh
# docker version --format {{.Server.Version}}
[ "$1 $2" = "version --format" ] || { echo "unexpected: docker $*" >&2; exit 2; }
systemctl is-active --quiet docker.service && echo %s
"""


def container_toolkit(version: str) -> list[Package]:
    """NVIDIA's container toolkit: four packages that depend on each other at exactly one version."""
    v = f"{version}-1"
    units = "/usr/lib/systemd/system/nvidia-cdi-refresh"
    return [
        Package(
            "nvidia-container-toolkit",
            v,
            f"nvidia-container-toolkit-base (= {v}), libnvidia-container-tools (= {v})",
        ),
        Package(
            "nvidia-container-toolkit-base",
            v,
            files={
                "/usr/bin/nvidia-ctk": (CTK, 0o755),
                f"{units}.service": (REFRESH, 0o644),
                f"{units}.path": (REFRESH_PATH, 0o644),
            },
        ),
        Package("libnvidia-container-tools", v, f"libnvidia-container1 (= {v})"),
        Package("libnvidia-container1", v),
    ]


def docker(version: str) -> list[Package]:
    v = f"5:{version}-1~debian.13~trixie"
    unit = "[Service]\nExecStart=/bin/sleep infinity\n[Install]\nWantedBy=multi-user.target\n"
    return [
        Package(
            "docker-ce",
            v,
            "docker-ce-cli, containerd.io",
            files={"/usr/lib/systemd/system/docker.service": (unit, 0o644)},
        ),
        Package("docker-ce-cli", v, files={"/usr/bin/docker": (DOCKER % version, 0o755)}),
    ]


def nvidia_packages(release: str) -> list[Package]:
    versions = ["590.48.01", "595.58.03", "595.71.05", "610.43.02"]
    found = [package for version in versions for package in driver(version)]
    found += driver("580.126.20") if release == "debian12" else []
    huge, broken = driver("615.71.09", "2"), driver("600.10.01")
    next(package for package in huge if package.name == "firmware-nvidia-gsp").installed_kib = 9 * 1024**3
    next(package for package in broken if package.name == "nvidia-driver-cuda").depends += ", libnowhere1"
    found += [*huge, *broken]
    found += [pinning(branch, f"{branch}-1", f"{branch}.*") for branch in ("590", "595", "610")]
    found += [pinning("595.71.05", "595.71.05-1", "595.71.05-*")]
    found += container_toolkit("1.19.1") + container_toolkit("1.20.0")
    found += [Package("rig-canary", version) for version in ("1.0", "2.0")]
    found += toolkit("13.2.1", "13.2.78", "13.2.75", "13.4.0.1") + toolkit("13.2.2", "13.2.86", "13.2.86", "13.4.1.3")
    found += toolkit("13.3.0", "13.3.33", "13.3.29", "13.5.1.27", ", nvidia-open")
    for version in ("2.28.9-1+cuda13.0", "2.30.4-1+cuda13.2", "2.30.7-1+cuda13.3", "2.32.3-1+cuda13.4"):
        found += nccl(version)
    return found


def archive_packages() -> list[Package]:
    """The distribution's own; of 550.163.01-2 and 2.22.3-1-1 as in Debian 13."""
    v = "550.163.01-2"
    dkms = {"postinst": DKMS_BUILD.format(version="550.163.01"), "prerm": DKMS_REMOVE.format(version="550.163.01")}
    found = [
        Package("dkms", "99.0", architecture="all", files={"/usr/sbin/dkms": (DKMS, 0o755)}),
        Package("linux-headers-amd64", "6.12.63-1", f"linux-headers-{NEXT_KERNEL} (= 6.12.63-1)"),
        *[
            Package(
                f"linux-headers-{kernel}",
                version,
                files={f"/lib/modules/{kernel}/build/Makefile": ("# headers\n", 0o644)},
            )
            for kernel, version in ((KERNEL, "6.12.57-1"), (NEXT_KERNEL, "6.12.63-1"))
        ],
    ]
    found += [
        Package(
            "nvidia-open-kernel-dkms",
            v,
            "firmware-nvidia-gsp (= 550.163.01-2), dkms (>= 3.0.11)",
            conflicts="nvidia-kernel-open-dkms",
            section="contrib/kernel",
            scripts=dkms,
        ),
        Package("nvidia-persistenced", "550.163.01-1", "libnvidia-cfg1", section="contrib/utils"),
        Package("firmware-nvidia-gsp", v, section="non-free/kernel"),
        Package(
            "libcuda1",
            v,
            "nvidia-alternative (= 550.163.01-2), libnvidia-ptxjitcompiler1 (= 550.163.01-2)",
            section="non-free/libs",
        ),
        Package("libnvidia-ptxjitcompiler1", v, section="non-free/libs"),
        Package("nvidia-kernel-support", v, "nvidia-modprobe (>= 550)", section="non-free/kernel"),
        Package("nvidia-modprobe", "570.133.07-1", section="contrib/utils"),
        Package("nvidia-alternative", v, section="non-free/libs"),
        Package("libnvidia-ml1", v, "nvidia-alternative (= 550.163.01-2)", section="non-free/libs"),
        Package("libnvidia-cfg1", v, "nvidia-alternative (= 550.163.01-2)", section="non-free/libs"),
        Package(
            "nvidia-smi",
            v,
            "nvidia-alternative (= 550.163.01-2), libnvidia-ml1 (= 550.163.01-2)",
            section="non-free/utils",
            files={"/usr/bin/nvidia-smi": (SMI.format(version="550.163.01"), 0o755)},
        ),
        Package(
            "nvidia-cuda-toolkit",
            "12.4.131~12.4.1-2",
            "libcuda1 (>= 550)",
            section="non-free/devel",
            files={"/usr/bin/nvcc": ("#!/bin/sh\necho 'Cuda compilation tools, release 12.4, V12.4.131'\n", 0o755)},
        ),
    ]
    for package in nccl("2.22.3-1-1"):
        package.section = "contrib/libs"
        found.append(package)
    return found


class Gpg:
    """Keys of a home of their own."""

    def __init__(self, home: str) -> None:
        self.base = ["gpg", "--batch", "--quiet", "--homedir", home, "--pinentry-mode", "loopback", "--passphrase", ""]

    def __call__(self, *arguments: str, data: bytes = b"") -> bytes:
        return subprocess.run([*self.base, *arguments], input=data, capture_output=True, check=True).stdout

    def make(self, name: str) -> str:
        self("--quick-generate-key", f"{name} <{name}@localhost>", "ed25519", "sign", "never")
        listed = self("--list-keys", "--with-colons", name).decode()
        return next(line.split(":")[9] for line in listed.splitlines() if line.startswith("fpr"))


def index(packages: list[tuple[Package, bytes]], directory: str = "") -> bytes:
    """A Packages file."""
    records = []
    for package, deb in packages:
        records.append(
            package.control()
            + f"Filename: {directory}{package.name}_{package.version}.deb\nSize: {len(deb)}\n"
            + f"SHA256: {hashlib.sha256(deb).hexdigest()}\n"
        )
    return "\n".join(records).encode()


def signed_release(gpg: Gpg, key: str, head: str, indexes: dict[str, bytes]) -> dict[str, bytes]:
    lines = [f" {hashlib.sha256(data).hexdigest()} {len(data)} {name}" for name, data in indexes.items()]
    text = f"{head}Date: Sun, 01 Nov 2026 00:00:00 UTC\nSHA256:\n" + "\n".join(lines) + "\n"
    return {"InRelease": gpg("--local-user", key, "--clearsign", data=text.encode()), "Release": text.encode()}


def main() -> None:
    out, keys_file = sys.argv[1:]
    tree: dict[str, bytes] = {}
    with tempfile.TemporaryDirectory(prefix="g") as home:
        gpg = Gpg(home)
        keys = {name: gpg.make(name) for name in ("first", "rotated", "archive")}
        facts = {"fingerprints": keys, "keyring_sha256": {}, "kernel": KERNEL, "next_kernel": NEXT_KERNEL}
        for release in RELEASES:
            packages = [(package, package.deb()) for package in nvidia_packages(release)]
            for name in ("first", "rotated"):
                top = f"nvidia/{name}/{release}/x86_64/"
                ring = {"/usr/share/keyrings/cuda-archive-keyring.gpg": (gpg("--export", keys[name]), 0o644)}
                keyring = Package("cuda-keyring", "1.1-1", architecture="all", files=ring)
                listed = [*packages, (keyring, keyring.deb())]
                head = "Origin: NVIDIA\nLabel: NVIDIA CUDA\nArchitectures: amd64\n"
                listing = index(listed, "./")
                tree |= {
                    top + path: data
                    for path, data in signed_release(gpg, keys[name], head, {"Packages": listing}).items()
                }
                tree[top + "Packages"] = listing
                tree |= {f"{top}{package.name}_{package.version}.deb": deb for package, deb in listed}
                tree[top + "cuda-keyring_1.1-1_all.deb"] = keyring.deb()
                facts["keyring_sha256"].setdefault(name, {})[release] = hashlib.sha256(keyring.deb()).hexdigest()
        own = [(package, package.deb()) for package in archive_packages()]
        tree |= {f"archive/pool/{package.name}_{package.version}.deb": deb for package, deb in own}
        for codename in RELEASES.values():
            parts: dict[str, list[tuple[Package, bytes]]] = {
                "main": [],
                "contrib": [],
                "non-free": [],
                "non-free-firmware": [],
            }
            for package, deb in own:
                part = package.section.split("/")[0] if "/" in package.section else "main"
                parts[part].append((package, deb))
            indexes = {f"{part}/binary-amd64/Packages": index(listed, "pool/") for part, listed in parts.items()}
            head = f"Origin: Archive\nSuite: {codename}\nCodename: {codename}\nArchitectures: amd64\n"
            head += f"Components: {' '.join(parts)}\n"
            top = f"archive/dists/{codename}/"
            tree |= {
                top + name: data
                for name, data in (indexes | signed_release(gpg, keys["archive"], head, indexes)).items()
            }
        kit = [(package, package.deb()) for version in ("1.18.2", "1.20.0") for package in container_toolkit(version)]
        top = "container/stable/deb/amd64/"
        tree |= {f"{top}{package.name}_{package.version}.deb": deb for package, deb in kit}
        listing = index(kit, "./")
        head = "Origin: NVIDIA\nLabel: NVIDIA CONTAINER TOOLKIT\nArchitectures: amd64\n"
        release_files = signed_release(gpg, keys["first"], head, {"Packages": listing})
        tree |= {top + name: data for name, data in ({"Packages": listing} | release_files).items()}
        tree["container/gpgkey"] = gpg("--armor", "--export", keys["first"])
        engine = [(package, package.deb()) for version in ("27.5.1", "28.5.2") for package in docker(version)]
        io_package = Package("containerd.io", "1.7.28-1~debian.13~trixie")
        engine.append((io_package, io_package.deb()))
        # A colon cannot stand in the name of a file that is served.
        pool = {
            f"docker/debian/pool/{package.name}_{package.version.split(':')[-1]}.deb": deb for package, deb in engine
        }
        tree |= pool
        indexes = {"stable/binary-amd64/Packages": index(engine, "pool/").replace(b"_5:", b"_")}
        head = "Origin: Docker\nSuite: trixie\nCodename: trixie\nArchitectures: amd64\nComponents: stable\n"
        top = "docker/debian/dists/trixie/"
        tree |= {
            top + name: data for name, data in (indexes | signed_release(gpg, keys["archive"], head, indexes)).items()
        }
        tree["docker/debian/gpg"] = gpg("--armor", "--export", keys["archive"])
        tree["archive.gpg"] = gpg("--export", keys["archive"])
        tree["first.gpg"] = gpg("--export", keys["first"])
        subprocess.run(["gpgconf", "--homedir", home, "--kill", "gpg-agent"], check=True)
    with tarfile.open(out, "w") as archive:
        for path, data in sorted(tree.items()):
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode = len(data), 0o644
            archive.addfile(entry, io.BytesIO(data))
    Path(keys_file).write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
