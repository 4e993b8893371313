"""Looks models up: what a dataset declares, files on this machine, built-in shapes, and at last the hub.

Nothing of torch or transformers is imported, and no weights are read: two small JSON files say it all.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gpu_runner.models.facts import AS_IT_IS, STAND_IN, KnownModel, ServedAs, of_config, of_declared, served_as
from gpu_runner.models.known import built_in
from gpu_runner.models.model_config import CONFIG, ModelConfig
from gpu_runner.models.model_files import ModelFilesUnreadable, cached_folder, read_folder, read_hub
from gpu_runner.models.quantization import ModelConfigError
from gpu_runner.offers.speed import ModelFacts

DECLARE = "State hardware.model_facts in the dataset's defs.yaml"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_ON = ("1", "on", "yes", "true")  # as huggingface_hub reads its variables


@dataclass(frozen=True, slots=True)
class DeclaredModel:
    """What a dataset's YAML states of its model by hand. `context`: most tokens of a row. `served`: how it is served.

    `facts` None: none are stated.
    """

    facts: ModelFacts | None
    context: int | None = None
    served: ServedAs = AS_IT_IS


class Models:
    """Models by name. What was found is kept for good; a hub that cannot be reached is asked again after `retry` s."""

    def __init__(
        self,
        *,
        seconds: float = 4.0,
        retry: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
        read: Callable[[str], ModelConfig] | None = None,
    ) -> None:
        """`seconds` bounds one look at the hub; `read` takes the place of that look."""
        self._seconds, self._retry, self._clock = seconds, retry, clock
        self._read = read or self._from_hub
        self._found: dict[str, KnownModel] = {}
        self._failed: dict[str, tuple[float, str]] = {}

    def known(self, name: str, declared: DeclaredModel | None = None, *, hub: bool = True) -> KnownModel:
        """The model of this name; an assumed one, with the reason in `where`, when nothing is known of it.

        The hub is asked last, and not at all without `hub` or with HF_HUB_OFFLINE. Files that are there and cannot be
        used are a reason too: an unknown architecture, a broken config.json.
        """
        found = self._known(name, declared, hub=hub)
        return found if declared is None else served_as(found, declared.served)

    def _known(self, name: str, declared: DeclaredModel | None, *, hub: bool) -> KnownModel:
        if declared is not None and declared.facts is not None:
            return of_declared(declared.facts, "hardware.model_facts", declared.context)
        if name not in self._found:
            try:
                self._found[name] = self._look(name, hub=hub)
            except ModelConfigError as error:
                return _stand_in(name, f"{error} {DECLARE}.")
        return self._found[name]

    def _look(self, name: str, *, hub: bool) -> KnownModel:
        folder = _local_folder(name) or (cached_folder(name) if _HUB_NAME.fullmatch(name) else None)
        if folder is not None:
            config = read_folder(folder)
            return of_config(name, config, "files", config.where)
        if (config_here := built_in(name)) is not None:
            return of_config(name, config_here, "built in", config_here.where)
        if not _HUB_NAME.fullmatch(name) or name.startswith("simulated/"):
            advice = "It is no folder, no built-in model and no name of the hub (owner/name)."
            raise ModelFilesUnreadable(f"a folder with {CONFIG}", "none", name, advice)
        if not hub or os.environ.get("HF_HUB_OFFLINE", "").lower() in _ON:
            advice = "It is neither in the Hugging Face cache nor built in, and the hub is not to be asked."
            raise ModelFilesUnreadable(f"a folder with {CONFIG}", "none", name, advice)
        return self._ask_hub(name)

    def _ask_hub(self, name: str) -> KnownModel:
        """One look at the hub, in a thread of its own: resolving a name knows no time-out."""
        failed_at, why = self._failed.get(name, (0.0, ""))
        if why and self._clock() - failed_at < self._retry:
            raise ModelFilesUnreadable("an answer from the hub", why, name, "It is asked again later.")
        found: list[ModelConfig] = []
        failures: list[ModelConfigError] = []

        def look() -> None:
            try:
                found.append(self._read(name))
            except ModelConfigError as error:
                failures.append(error)

        thread = threading.Thread(target=look, name="hub", daemon=True)
        thread.start()
        thread.join(self._seconds)
        if found:
            return of_config(name, found[0], "files", found[0].where)
        if failures and not isinstance(failures[0], ModelFilesUnreadable):
            raise failures[0]
        why = failures[0].found if failures else f"nothing within {self._seconds:g} s"
        self._failed[name] = self._clock(), why
        raise failures[0] if failures else ModelFilesUnreadable("an answer from the hub", why, name, "")

    def _from_hub(self, name: str) -> ModelConfig:
        return read_hub(name, seconds=self._seconds / 2)


def _local_folder(name: str) -> Path | None:
    folder = Path(name).expanduser()
    return folder if (folder / CONFIG).is_file() else None


def _stand_in(name: str, why: str) -> KnownModel:
    """A model of which nothing is known, taken for an 8B."""
    config = built_in(STAND_IN)
    assert config is not None
    return of_config(name, config, "assumed", why)
