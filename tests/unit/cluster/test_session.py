"""Sessions of dead owners are found and cleaned, those of live ones and of other users are not touched."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhpc.cluster.session import alive, clean, open_session, processes

OWNER = """
import os, subprocess, sys
from rlhpc.cluster.session import TOKEN_VARIABLE, open_session
session = open_session(sys.argv[1])
marked = os.environ | {TOKEN_VARIABLE: session.token}
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env=marked, stdout=subprocess.DEVNULL)
open(f"/dev/shm/{session.ident}-x", "w").write("x")
print(session.token, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def root() -> Iterator[Path]:
    """Short, as Ray needs it."""
    path = Path(tempfile.mkdtemp(prefix="rs", dir="/tmp"))
    yield path
    shutil.rmtree(path)


def start(root: Path) -> tuple[subprocess.Popen[str], str]:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout
    return owner, owner.stdout.readline().strip()


def sweep(root: Path) -> str:
    command = [sys.executable, "-m", "rlhpc.cluster.session", "sweep", "--temp-root", str(root)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_a_sweep_takes_what_a_dead_owner_left_and_nothing_of_a_live_one(root: Path) -> None:
    (dead, gone), (living, kept) = start(root), start(root)
    assert sweep(root) == ""  # both live
    dead.kill()
    dead.wait()
    assert len(processes(gone)) == 1
    assert sweep(root) == f"removed what session {gone} had left in {root}/rlhpc-{os.getuid()}/{gone}\n"
    assert processes(gone) == []
    assert not Path(f"/dev/shm/rlhpc{gone}-x").exists()
    assert [path.name for path in (root / f"rlhpc-{os.getuid()}").iterdir()] == [kept]
    assert len(processes(kept)) == 1 and Path(f"/dev/shm/rlhpc{kept}-x").exists()
    living.kill()
    living.wait()
    assert kept in sweep(root)


def test_a_directory_in_the_making_is_left_alone_and_an_old_one_without_an_owner_is_not(root: Path) -> None:
    session = open_session(str(root))
    young, old = session.directory.with_name("0123abcd"), session.directory.with_name("4567abcd")
    other = session.directory.with_name("notes")  # no session's name
    for directory in (young, old, other):
        directory.mkdir()
    os.utime(old, (time.time() - 3600,) * 2)
    os.utime(other, (time.time() - 3600,) * 2)
    assert alive(session.directory) and alive(young) and not alive(old)
    sweep(root)
    assert young.exists() and other.exists() and not old.exists()
    clean(session)


def test_a_link_in_the_place_of_the_owners_file_stops_no_sweep(root: Path) -> None:
    made = root / f"rlhpc-{os.getuid()}" / "0123abcd"
    made.mkdir(parents=True)
    (made / "owner.json").symlink_to("/etc/passwd")
    session = open_session(str(root))
    assert not made.exists()
    clean(session)


def test_a_root_that_is_not_ones_own_is_refused(root: Path) -> None:
    """Somebody else could have made it first in a shared /tmp."""
    if os.getuid() != 0:
        pytest.skip("needs root to make another user's directory; run the tests as root to cover this")
    theirs = root / "rlhpc-0"
    theirs.mkdir()
    os.chown(theirs, 65534, 65534)
    with pytest.raises(ValueError, match=r"belongs to user id 65534.*set cluster.ray_temp_root to another"):
        open_session(str(root))
    theirs.rmdir()
    theirs.symlink_to("/var/tmp")
    with pytest.raises(ValueError, match=r"wouldn't be private there"):
        open_session(str(root))


def test_the_root_is_closed_to_others_even_where_it_was_open(root: Path) -> None:
    (root / f"rlhpc-{os.getuid()}").mkdir(mode=0o777)
    session = open_session(str(root))
    assert (session.directory.parent.stat().st_mode & 0o777) == 0o700
    clean(session)


def test_cleaning_touches_nothing_of_another_user(root: Path) -> None:
    """As root, a directory's name is whatever its user chose: here the token of somebody else's processes."""
    if os.getuid() != 0:
        pytest.skip("needs root to act for two users; run the tests as root to cover this")
    owner, token = start(root)
    decoy = root / "rlhpc-65534" / token
    decoy.mkdir(parents=True)
    for directory in (decoy.parent, decoy):
        os.chown(directory, 65534, 65534)
    os.utime(decoy, (time.time() - 3600,) * 2)
    assert token in sweep(root)
    assert not decoy.exists()
    assert len(processes(token)) == 1 and Path(f"/dev/shm/rlhpc{token}-x").exists()
    owner.kill()
    owner.wait()
    sweep(root)
