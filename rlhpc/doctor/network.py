"""Names, interfaces and ports, as Ray, gloo and NCCL would find them. Standard library only."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import closing

from rlhpc.cluster.network import choose, interfaces, towards_peers
from rlhpc.cluster.ports import claim_block
from rlhpc.cluster.slurm_env import SlurmEnv
from rlhpc.doctor.finding import Finding, refusal
from rlhpc.errors import ClusterError, ConfigError


def network(wanted: str | None) -> Iterator[Finding]:
    """`wanted`: cluster.network_interface. Claims a block of ports for a moment."""
    yield from _ports()
    yield from _interface(wanted)
    yield from _settings(os.environ)
    name = socket.gethostname()
    try:
        yield Finding("host name", "ok", f"{name} is {socket.gethostbyname(name)}")
    except OSError as error:
        yield Finding("host name", "warning", f"{name} doesn't resolve: {error}", f"put {name} into /etc/hosts")


def _interface(wanted: str | None) -> Iterator[Finding]:
    here = ", ".join(f"{known.name} ({known.ip})" for known in interfaces())
    env = SlurmEnv.from_environ(os.environ) if "SLURM_JOB_ID" in os.environ else None
    peers = [node for node in env.nodes if node != env.node_name] if env else []
    try:
        if wanted is None and not peers:
            found = f"lo for a run of this machine alone; there are {here}, and over several nodes the route decides"
        else:
            taken = choose(wanted, towards_peers(peers, os.environ.get("SLURM_LAUNCH_NODE_IPADDR")))
            variables = " ".join(f"{key}={value}" for key, value in taken.environment().items())
            found = f"{taken.name} for Ray, {variables}"
        yield Finding("interface", "ok", found)
    except ConfigError as error:
        yield refusal("interface", str(error))


def _settings(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Variables that name an interface which isn't here. NCCL takes prefixes unless "=" comes first."""
    known = {interface.name for interface in interfaces()}
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = environ.get(variable, "")
        exact = variable.startswith("GLOO") or value.startswith("=")
        names = value.lstrip("=").split(",")
        fits = any(one == name or (not exact and one.startswith(name)) for name in names for one in known)
        if value and not value.startswith("^") and not fits:
            fix = f"unset {variable}; cluster.network_interface sets it for all libraries"
            yield Finding(variable, "failed", f"{value} is none of {', '.join(sorted(known))}", fix)


def _ports() -> Iterator[Finding]:
    try:
        with closing(claim_block("doctor", os.getpid())) as block:
            yield Finding("ports", "ok", f"a block for a run is free, such as {block.base} to {block.workers.stop - 1}")
    except ClusterError as error:
        yield refusal("ports", str(error))
