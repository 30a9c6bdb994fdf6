"""A file system for fsspec, in memory, that does what storage does on a bad day.

Every change of it has a number; `faults` says what goes wrong at which one. A listing may be older than what it lists.
"""

import errno
import io
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fsspec
from fsspec.spec import AbstractFileSystem

TORN = "torn"
"""Half of the bytes arrive, and the answer is good."""
LOST = "lost"
"""None of them do, and the answer is good."""
REFUSED = "refused"
"""503: nothing happens."""
UNANSWERED = "unanswered"
"""It happens, and the answer is an error."""
RESENT = "resent"
"""It happens, the answer gets lost, and the driver sends it again: a conditional creation finds its own object."""
FULL = "full"
"""No space left on device."""
KINDS = (TORN, LOST, REFUSED, UNANSWERED, RESENT, FULL)


@dataclass
class Weather:
    """The state of one chaos file system, which outlives its clients."""

    held: dict[str, bytes] = field(default_factory=dict)
    faults: dict[int, str] = field(default_factory=dict)
    """By number of the change, from 0."""
    refused_names: dict[str, int] = field(default_factory=dict)
    """How often a write of a file by this end of its name still finds the disk full."""
    listing_lag: int = 0
    """Changes that a listing does not show yet."""
    close_seconds: float = 0.0
    """What closing a stream takes."""
    num_changes: int = 0
    past: list[frozenset[str]] = field(default_factory=list)

    def change(self, path: str, act: Any, data: bytes | None = None) -> None:
        """Do what `act(data)` does, or less; `data` is None for a deletion."""
        number = self.num_changes
        self.num_changes += 1
        fault = self.faults.get(number)
        name = next((end for end, left in self.refused_names.items() if left and path.endswith(end)), None)
        if name is not None and data is not None:
            self.refused_names[name] -= 1
            fault = FULL
        self.past.append(frozenset(self.held))
        if fault == REFUSED:
            raise OSError(errno.EBUSY, "503 SlowDown")
        if fault == FULL and data is not None:
            raise OSError(errno.ENOSPC, "No space left on device")
        if fault == LOST:
            return
        if fault == TORN and data is not None:
            data = data[: len(data) // 2]
        act(data)
        if fault == UNANSWERED:
            raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")

    def listed(self) -> frozenset[str]:
        return self.past[-self.listing_lag] if 0 < self.listing_lag <= len(self.past) else frozenset(self.held)


PLACES: dict[str, Weather] = {}


class ChaosFiles(AbstractFileSystem):
    """`chaos://<place>/...`; every place has a weather of its own."""

    protocol = "chaos"
    cachable = False

    def _weather(self, path: str) -> Weather:
        return PLACES.setdefault(self._strip_protocol(path).strip("/").split("/")[0], Weather())

    def _key(self, path: str) -> str:
        return self._strip_protocol(path).strip("/")

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        pass

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        key, weather = self._key(path), self._weather(path)
        if mode == "create" and key in weather.held:
            raise FileExistsError(key)
        fault = weather.faults.get(weather.num_changes)
        weather.change(key, lambda data: weather.held.__setitem__(key, data), value)
        if mode == "create" and fault == RESENT:
            raise FileExistsError(key)

    def cat_file(self, path: str, start: Any = None, end: Any = None, **options: Any) -> bytes:
        key, weather = self._key(path), self._weather(path)
        if key not in weather.held:
            raise FileNotFoundError(key)
        return weather.held[key][start:end]

    def get_file(self, rpath: str, lpath: str, **options: Any) -> None:
        Path(lpath).write_bytes(self.cat_file(rpath))

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        key, weather = self._key(path), self._weather(path)
        if key in weather.held:
            return {"name": key, "size": len(weather.held[key]), "type": "file"}
        if any(name.startswith(f"{key}/") for name in weather.listed()):
            return {"name": key, "size": 0, "type": "directory"}
        raise FileNotFoundError(key)

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        prefix, weather = f"{self._key(path)}/", self._weather(path)
        below = {name.removeprefix(prefix) for name in weather.listed() if name.startswith(prefix)}
        if not below:
            raise FileNotFoundError(path)
        names = sorted({prefix + name.split("/")[0] for name in below})
        if not detail:
            return names
        kinds = {name: "file" if name.removeprefix(prefix) in below else "directory" for name in names}
        return [{"name": name, "size": len(weather.held.get(name, b"")), "type": kinds[name]} for name in names]

    def rm_file(self, path: str) -> None:
        key, weather = self._key(path), self._weather(path)
        weather.change(key, lambda data: weather.held.pop(key, None))

    def rm(self, path: str, recursive: bool = False, maxdepth: Any = None) -> None:
        key, weather = self._key(path), self._weather(path)
        gone = [name for name in {*weather.listed(), key} if name == key or name.startswith(f"{key}/")]
        for name in sorted(gone):
            if name in weather.held:
                self.rm_file(name)

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if mode == "rb":
            return io.BytesIO(self.cat_file(path))
        return _Upload(self, path)


class _Upload(io.BytesIO):
    """Arrives when it is closed, as an upload in parts does."""

    def __init__(self, files: ChaosFiles, path: str) -> None:
        super().__init__()
        self._files, self._path, self._is_discarded = files, path, False

    def discard(self) -> None:
        self._is_discarded = True

    def close(self) -> None:
        if not self.closed and not self._is_discarded:
            time.sleep(self._files._weather(self._path).close_seconds)
            self._is_discarded = True
            self._files.pipe_file(self._path, self.getvalue())
        super().close()


def register() -> None:
    fsspec.register_implementation("chaos", ChaosFiles, clobber=True)
