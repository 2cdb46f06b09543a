"""One trainer at a time in a directory, by a lock that dies with its process (chapter 17).

Two trainers in one `save_dir` would mix their journals and delete each other's checkpoints. The lock is a record lock on
`train.lock` (POSIX fcntl). It belongs to the process, so the system takes it back however the process ends, and data
workers do not inherit it: forked from the trainer they have its open files, and a flock would live on with a worker that
outlives a killed trainer. What such a lock asks for in return:

- The process must not open `train.lock` a second time: closing any descriptor of the file gives the lock up. Nothing but
  this module opens it, and what this process holds stands in a table that is looked at before.
- The file goes while the lock is held, and whoever has locked a file looks whether it still has its name. A file that a
  killed trainer left has no lock: it is in nobody's way.

Only training locks. Reading a run (`load_run`, `gptoss generate`, `gptoss record`) neither waits nor is noticed.
"""

import contextlib
import errno
import os
import socket
import time
import warnings
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

try:
    import fcntl
except (
    ImportError
):  # Windows: nothing is locked there, and two trainers in one directory are not noticed
    fcntl = None  # type: ignore[assignment]

LOCK_FILE = "train.lock"
PATIENCE = 2.0  # seconds: a process that was just killed needs a moment until the system has taken back what it had
TAKEN = (errno.EACCES, errno.EAGAIN)  # POSIX leaves open which
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # a network file system without locks

_held: dict[
    tuple[int, int, int], object
] = {}  # (process, device, inode) of directories; a fork's entries are its parent's


class DirectoryInUse(OSError):
    """Another trainer works in the directory; the message says which and what to do."""


@contextlib.contextmanager
def hold_directory(directory: Path, patience: float = PATIENCE) -> Iterator[None]:
    """Be the only trainer in a directory for as long as the context lasts.

    On NFS the lock holds between machines where the server keeps locks. Should a machine die there with its trainer, the
    server frees the lock when the machine's lease runs out, or when somebody deletes `train.lock`.

    Args:
        directory: exists and can be written.
        patience: seconds to wait for a lock that somebody has.

    Raises:
        DirectoryInUse: another trainer holds it, in this process or another.
        OSError: `train.lock` cannot be opened.

    Source: POSIX.1-2017, fcntl, F_SETLK; chapter 17.
    """
    if fcntl is None:
        yield
        return
    status = os.stat(directory)
    key, mine = (os.getpid(), status.st_dev, status.st_ino), object()
    if _held.setdefault(key, mine) is not mine:  # one step, whatever other threads do
        raise DirectoryInUse(
            f"{directory}: this process trains into it already: wait for it, or choose another training.save_dir"
        )
    try:
        descriptor = _lock(directory / LOCK_FILE, patience)
        try:
            yield
        finally:
            if descriptor is not None:
                _release(directory / LOCK_FILE, descriptor)
    finally:
        del _held[key]


def _lock(path: Path, patience: float) -> int | None:
    """The descriptor of the locked file; None where the file system knows no locks."""
    until = time.monotonic() + patience
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(path, descriptor):
                _sign(descriptor)
                return descriptor
            os.close(descriptor)  # its holder had just ended and taken the name away: once more
        except OSError as error:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
            os.close(descriptor)
            if error.errno in NO_LOCKS:
                path.unlink(missing_ok=True)
                warnings.warn(
                    f"{path.parent}: this file system knows no locks ({error.strerror}); see to it yourself that no second "
                    "trainer saves there",
                    stacklevel=2,
                )
                return None
            if error.errno not in TAKEN:
                raise OSError(error.errno, error.strerror, str(path)) from error
            if time.monotonic() >= until:
                raise DirectoryInUse(_refusal(path, holder)) from None
            time.sleep(0.05)


def _release(path: Path, descriptor: int) -> None:
    with contextlib.suppress(OSError):
        if _is_at(path, descriptor):
            path.unlink()  # while it is locked: nobody else can have taken it
    os.close(descriptor)


def _is_at(path: Path, descriptor: int) -> bool:
    """Whether an open file still has its name."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _sign(descriptor: int) -> None:
    """Write who holds the lock: for people, so that a full disk is no reason not to train."""
    since = datetime.now().strftime("%Y-%m-%d %H:%M:%S")
    with contextlib.suppress(OSError):
        os.fchmod(descriptor, 0o666)  # left behind by a kill it must not stop a colleague
        os.ftruncate(descriptor, 0)
        os.pwrite(
            descriptor,
            f"process {os.getpid()} on {socket.gethostname()}, since {since}\n".encode(),
            0,
        )


def _refusal(path: Path, holder: str) -> str:
    line = (
        f"{path.parent}: another trainer works here ({holder or 'it left no name'}): wait until it has ended, end it, or "
        "choose another directory with --set training.save_dir=…"
    )
    if holder and f" on {socket.gethostname()}," not in holder:
        line += f"; should that machine be gone for good, delete {path}"
    return line
