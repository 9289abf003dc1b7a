"""The interface that a node uses, on the interfaces of this machine."""

import socket
import subprocess

import pytest

from rlhpc.cluster.network import Interface, choose, interfaces, towards_peers
from rlhpc.errors import ConfigError


def test_interfaces_are_those_that_ip_shows() -> None:
    shown = subprocess.run(["ip", "-4", "-o", "addr", "show"], capture_output=True, text=True, check=True).stdout
    expected = {(line.split()[1], line.split()[3].partition("/")[0]) for line in shown.splitlines()}
    assert {(known.name, known.ip) for known in interfaces()} == expected
    assert Interface("lo", "127.0.0.1") in interfaces()


def test_by_name_by_network_and_by_route() -> None:
    assert choose("lo", "192.0.2.77") == Interface("lo", "127.0.0.1")
    assert choose("127.0.0.0/8", "192.0.2.77") == Interface("lo", "127.0.0.1")
    assert choose(None, "127.0.0.1").ip == "127.0.0.1"
    for known in interfaces():
        assert choose(None, known.ip).ip == known.ip  # one's own address is reached from itself
        assert choose(f"{known.ip}/32", "127.0.0.1") == known


def test_every_library_is_told_the_same() -> None:
    assert Interface("ib0", "10.1.2.3").environment() == {
        "VLLM_HOST_IP": "10.1.2.3",
        "GLOO_SOCKET_IFNAME": "ib0",
        "NCCL_SOCKET_IFNAME": "=ib0",
    }


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("ib7", r"cluster.network_interface='ib7' is not on node .*, which has .*lo \(127.0.0.1\)"),
        ("203.0.113.0/24", r"cluster.network_interface='203.0.113.0/24' is not on node"),
        ("10.1.0.0/99", r"cluster.network_interface='10.1.0.0/99'.*use a name or a CIDR as 10.1.0.0/16"),
    ],
)
def test_an_interface_that_is_not_there_is_refused_with_those_that_are(wanted: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose(wanted, "127.0.0.1")


def test_node_0_finds_its_peers_by_name_else_by_how_they_know_it() -> None:
    assert towards_peers(["no-such-node.invalid", "localhost"], None) == socket.gethostbyname("localhost")
    assert towards_peers(["no-such-node.invalid"], "10.9.8.7") == "10.9.8.7"
    assert towards_peers([], None) == "127.0.0.1"
