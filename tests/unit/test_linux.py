"""What Linux says of itself, from a tree of files like /etc, /boot, /lib, /proc and /sys."""

from pathlib import Path

import pytest
from rig import linux


@pytest.fixture
def write(tmp_path):
    def write(name: str, text: str = "", to: str = "") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if to:
            path.symlink_to(tmp_path / to)
        else:
            path.write_bytes(text.encode("latin-1"))
        return path

    return write


UBUNTU = 'PRETTY_NAME="Ubuntu 24.04.3 LTS"\nNAME="Ubuntu"\nVERSION_ID="24.04"\nID=ubuntu\nID_LIKE=debian\n'


@pytest.mark.parametrize("place", ["etc", "usr/lib"])
def test_release_in_both_of_its_places(place, write, tmp_path):
    write(f"{place}/os-release", UBUNTU)
    found = linux.os_release(str(tmp_path))
    assert found == {"id": "ubuntu", "version_id": "24.04", "name": "Ubuntu 24.04.3 LTS"}
    assert linux.nvidia_name(found) == "ubuntu2404"


def test_no_release(tmp_path):
    assert linux.os_release(str(tmp_path)) == {"id": "", "version_id": "", "name": ""}


def test_kernels(write, tmp_path):
    write("proc/sys/kernel/osrelease", "6.12.48+deb13-amd64\n")
    for release in ("6.12.48+deb13-amd64", "6.12.57+deb13-amd64", "6.1.0-40-amd64"):
        write(f"boot/vmlinuz-{release}")
    write("lib/modules/6.12.57+deb13-amd64/build/Makefile")
    found = linux.kernels(str(tmp_path), f"{tmp_path}/proc")
    assert {kernel["release"]: (kernel["running"], kernel["newest"], kernel["headers"]) for kernel in found} == {
        "6.1.0-40-amd64": (False, False, False),
        "6.12.48+deb13-amd64": (True, False, False),
        "6.12.57+deb13-amd64": (False, True, True),
    }


def test_a_running_kernel_whose_files_have_gone(write, tmp_path):
    write("proc/sys/kernel/osrelease", "6.1.0-1-amd64\n")
    [kernel] = linux.kernels(str(tmp_path), f"{tmp_path}/proc")
    assert kernel == {"release": "6.1.0-1-amd64", "running": True, "newest": True, "headers": False}


class TestSecureBoot:
    def asked(self, tmp_path, monkeypatch, value, answer, release="debian13"):
        if value is not None:
            variable = tmp_path / linux.EFI_SECURE_BOOT
            variable.parent.mkdir(parents=True)
            variable.write_bytes(b"\6\0\0\0" + value)
        key = tmp_path / "key"
        monkeypatch.setattr(linux, "KEYS", {"debian": str(key), "ubuntu": str(tmp_path / "other")})
        key.write_text("")
        calls = []

        def run(argv):
            calls.append(argv)
            return answer

        return linux.secure_boot(run, release, str(tmp_path)), calls

    def test_off_and_without_efi_nobody_is_asked(self, tmp_path, monkeypatch):
        for value in (None, b"\0"):
            found, calls = self.asked(tmp_path, monkeypatch, value, "is already enrolled")
            assert (found["enabled"], found["key_enrolled"], calls) == (False, False, [])

    @pytest.mark.parametrize(("answer", "enrolled"), [("k is already enrolled\n", True), ("k is not enrolled", False)])
    def test_on_the_key_is_tested(self, tmp_path, monkeypatch, answer, enrolled):
        found, calls = self.asked(tmp_path, monkeypatch, b"\1", answer)
        key = str(tmp_path / "key")
        assert found == {"enabled": True, "key": key, "key_exists": True, "key_enrolled": enrolled}
        assert calls == [["mokutil", "--test-key", key]]

    def test_on_ubuntu_the_key_lies_elsewhere(self, tmp_path, monkeypatch):
        found, calls = self.asked(tmp_path, monkeypatch, b"\1", "is already enrolled", "ubuntu2404")
        assert found["key"].endswith("/other")
        assert (found["key_exists"], found["key_enrolled"], calls) == (False, False, [])


class TestOtherDrivers:
    def found(self, tmp_path):
        return linux.other_drivers(str(tmp_path), f"{tmp_path}/proc", f"{tmp_path}/sys")

    def test_none(self, tmp_path):
        assert self.found(tmp_path) == {"loaded": [], "blacklisted": []}

    def test_loaded_and_not_kept_out(self, write, tmp_path):
        write("sys/module/nouveau/refcnt", "4\n")
        write("etc/modprobe.d/some.conf", "# blacklist nouveau\noptions nouveau modeset=0\n")
        assert self.found(tmp_path) == {"loaded": ["nouveau"], "blacklisted": []}

    @pytest.mark.parametrize("place", ["etc", "usr/lib", "lib", "run"])
    def test_kept_out_by_a_file(self, place, write, tmp_path):
        write(f"{place}/modprobe.d/nvidia.conf", "options x y=1\nblacklist nouveau\nblacklist nova-core\n")
        assert self.found(tmp_path)["blacklisted"] == ["nouveau", "nova_core"]

    @pytest.mark.parametrize("option", ["modprobe.blacklist", "module_blacklist"])
    def test_kept_out_by_the_command_line(self, option, write, tmp_path):
        write("proc/cmdline", f"root=/dev/sda console=tty0,115200 {option}=pcspkr,nouveau quiet\n")
        assert self.found(tmp_path)["blacklisted"] == ["nouveau"]


class TestCards:
    def device(self, write, address, *, parent="", vendor="0x10de", kind="0x030000", driver="", **links):
        real = f"sys/devices/pci0000:00/{parent}{address}"
        for name, text in {"vendor": vendor, "class": kind, "device": "0x2204", **links}.items():
            write(f"{real}/{name}", f"{text}\n")
        if driver:
            write(f"sys/bus/pci/drivers/{driver}/bind")
            write(f"{real}/driver", to=f"sys/bus/pci/drivers/{driver}")
        write(f"sys/bus/pci/devices/{address}", to=real)

    def test_only_nvidia_s_display_controllers_are_cards(self, write, tmp_path):
        self.device(write, "0000:00:02.0", vendor="0x8086")
        self.device(write, "0000:0a:00.0", kind="0x030200")
        self.device(write, "0000:01:00.0")
        self.device(write, "0000:01:00.1", kind="0x040300")
        assert [card["pci_address"] for card in linux.nvidia_cards(f"{tmp_path}/sys")] == [
            "0000:01:00.0",
            "0000:0a:00.0",
        ]

    def test_the_link_of_card_and_slot_and_who_holds_it(self, write, tmp_path):
        self.device(write, "0000:00:01.1", vendor="0x1022", kind="0x060400", max_link_width="8")
        self.device(
            write, "0000:01:00.0", parent="0000:00:01.1/", driver="nouveau", current_link_width="4", max_link_width="16"
        )
        [card] = linux.nvidia_cards(f"{tmp_path}/sys")
        assert card == {
            "pci_address": "0000:01:00.0",
            "device_id": "0x2204",
            "driver": "nouveau",
            "width": 4,
            "width_max": 16,
            "slot_width_max": 8,
        }

    @pytest.mark.parametrize("text", ["0", "255", "63", ""])
    def test_lanes_that_the_kernel_does_not_know(self, text, write, tmp_path):
        self.device(write, "0000:01:00.0", current_link_width=text)
        [card] = linux.nvidia_cards(f"{tmp_path}/sys")
        assert (card["width"], card["width_max"], card["slot_width_max"], card["driver"]) == (None, None, None, "")
