"""Orders at a cloud without tokens, where names may repeat: a name is ordered once, whoever asks, whatever is lost.

What was ordered is written down before the order is sent, in a file for each name below the home:

1. One process at a time orders a name (a lock on its file).
2. A name whose id is known is that machine, also after its end.
3. The cloud's list is asked for the name. What is there is that machine.
4. An earlier order without an answer may still appear in the list, which lags: nothing is ordered again until
   SETTLE_SECONDS after it.
5. The order is sent once. A refusal takes the note back; without an answer it stays.

Should two machines of a name appear all the same, `same_name` ends the younger one. The file also
keeps when a machine was ended: such clouds forget ended machines at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from gpu_runner.bounded_http.small_pages import read_file
from gpu_runner.providers.base import ProviderError, ProviderUnclear

SETTLE_SECONDS = 30.0
LOCK_SECONDS = 4.0
KEEP_SECONDS = 86_400.0
_STEP, _LARGEST = 0.02, 4096


@dataclass(frozen=True, slots=True)
class Order:
    """What is known of an order. Unix seconds. `asked_at`: when it was sent; `id`: the cloud's, once it has said it."""

    name: str
    asked_at: float | None = None
    id: str | None = None
    ready: bool = False
    ended_at: float | None = None


class OrderBook:
    """The orders of one provider below a home. Any thread and process may use it."""

    def __init__(self, home: Path, provider: str, now: Callable[[], float] = time.time) -> None:
        self._folder = Path(home) / "orders" / provider
        self._now = now

    def create(self, name: str, find: Callable[[], str | None], order: Callable[[], str]) -> str:
        """The id of the machine of this name, ordered if nobody did. `find`: its id as the cloud lists it.

        Raises what `find` and `order` raise, and ProviderUnclear while an earlier order may still appear.
        """
        with self._locked(name) as path:
            known = self._read(path, name)
            if known.id is not None:
                return known.id
            if (found := find()) is not None:
                self._write(path, replace(known, id=found))
                return found
            if known.asked_at is not None and 0 <= self._now() - known.asked_at < SETTLE_SECONDS:
                raise ProviderUnclear(f"{name}: an earlier order was not answered, and may still be listed")
            self._forget_old(path)
            self._write(path, Order(name, asked_at=self._now()))
            try:
                machine_id = order()
            except ProviderError:
                path.write_text("")  # certain: nothing was ordered
                raise
            self._write(path, Order(name, asked_at=self._now(), id=machine_id))
            return machine_id

    def get(self, name: str) -> Order:
        """What is known of a name."""
        return self._read(self._folder / name, name)

    def ready(self, name: str) -> None:
        """Its engine has answered."""
        with self._locked(name) as path:
            self._write(path, replace(self._read(path, name), ready=True))

    def ended(self, name: str, listed: str | None) -> None:
        """The cloud has accepted its end. `listed`: the id of the machine, where it was there until now.

        The first end counts, unless the machine was still there: then this one does.
        """
        with self._locked(name) as path:
            known = self._read(path, name)
            if listed is not None or (known.id is not None and known.ended_at is None):
                self._write(path, replace(known, id=known.id or listed, ended_at=self._now()))

    def ended_lately(self, tag: str) -> list[Order]:
        """Orders whose machines were ended within a day, by the beginning of their names."""
        if not self._folder.is_dir():
            return []
        found = (self._read(path, path.name) for path in sorted(self._folder.glob("*")) if path.name.startswith(tag))
        return [one for one in found if one.ended_at is not None and self._now() - one.ended_at < KEEP_SECONDS]

    @contextlib.contextmanager
    def _locked(self, name: str) -> Iterator[Path]:
        """The file of a name, while nobody else has it. Raises ProviderUnclear when somebody has it for long."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._folder / name
        ends = time.monotonic() + LOCK_SECONDS
        with path.open("a") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > ends:
                        raise ProviderUnclear(f"{name}: another order of it is under way") from None
                    time.sleep(_STEP)
            yield path

    @staticmethod
    def _read(path: Path, name: str) -> Order:
        """What the file says; an empty or torn one says nothing, like none."""
        try:
            found = json.loads(read_file(path, _LARGEST))
            return Order(**found)
        except (OSError, ValueError, TypeError):
            return Order(name)

    @staticmethod
    def _write(path: Path, order: Order) -> None:
        """In place, as the lock is on the file: what is written is shorter than a block of the disk."""
        path.write_text(json.dumps(asdict(order)))

    def _forget_old(self, but: Path) -> None:
        for path in self._folder.glob("*"):
            with contextlib.suppress(OSError):
                if path != but and time.time() - path.stat().st_mtime > 7 * KEEP_SECONDS:
                    path.unlink()
