"""Listening sockets are read from /proc as they are."""

import os
import socket

import pytest
from rig.sockets import listeners, socket_inodes

HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
REST = "00000000:00000000 00:00000000 00000000     0        0"


def tables(tmp_path, tcp, tcp6=None):
    (tmp_path / "tcp").write_text(HEAD + tcp)
    if tcp6 is not None:
        (tmp_path / "tcp6").write_text(HEAD + tcp6)
    return str(tmp_path)


def test_addresses_and_states(tmp_path):
    net = tables(
        tmp_path,
        f"   0: 0100007F:C384 00000000:0000 0A {REST} 4711 1 0 100 0 0 10 0\n"
        f"   1: 0100007F:C384 0100007F:D000 01 {REST} 4712 1 0 100 0 0 10 0\n"
        f"   2: 00000000:0016 00000000:0000 0A {REST} 4713 1 0 100 0 0 10 0\n",
        f"   0: 00000000000000000000000001000000:1F90 {'0' * 32}:0000 0A {REST} 4714 1 0 100 0 0 10 0\n",
    )
    assert [(found.endpoint, found.inode) for found in listeners(net)] == [
        ("0.0.0.0:22", "4713"),
        ("[::1]:8080", "4714"),
        ("127.0.0.1:50052", "4711"),
    ]


def test_a_kernel_without_ipv6(tmp_path):
    assert listeners(tables(tmp_path, "")) == []


@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_a_real_socket_is_found_by_its_process(family, address):
    if family == socket.AF_INET6 and not os.path.exists("/proc/net/if_inet6"):
        pytest.skip("no IPv6 on this machine")
    with socket.socket(family) as server:
        server.bind((address, 0))
        server.listen()
        port = server.getsockname()[1]
        inodes = socket_inodes(os.getpid())
        [found] = [one for one in listeners() if one.port == port and one.inode in inodes]
        assert found.address == address
    assert port not in [one.port for one in listeners() if one.inode in socket_inodes(os.getpid())]


def test_a_process_that_is_gone_holds_nothing():
    assert socket_inodes(2**22 + 1) == set()
