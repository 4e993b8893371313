"""The work that a dataset still has: rows left, how long they are, and how we know.

Lengths in tokens are measured in committed batches. Before there are any, a prompt is taken to have a token per four
bytes of UTF-8, and four more per message; a completion, half of the tokens it may have.
"""

from __future__ import annotations

import base64
import contextlib
import heapq
import io
import math
import statistics
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import orjson

from batch_assets.capacity_planning.acceptance import Z, prior_of, rows_for
from batch_assets.snapshot.grouping import rows_of
from batch_assets.snapshot.ingest import RowCheck, source_name
from batch_assets.snapshot.prompts.messages import data_url_of, words_of
from batch_assets.snapshot.source.block import Block
from batch_assets.snapshot.source.errors import LISTED, Reject, SourceError, remedy
from batch_assets.snapshot.source.size import estimated_lines
from batch_assets.spec.models import DEFAULT_MAX_TOKENS, GeneratedDatasetSpec
from gpu_runner.offers.speed import LengthMix
from gpu_runner.offers.workload import Assumption, Subject, UserTexts, Workload
from gpu_runner.rows import POOLED, Generation
from resources.objects.opening import CorruptObject
from resources.store.dataset_store import BatchEntry, BatchFooter, BatchObject, DatasetStore, SnapshotManifest
from resources.store.reusable_answers import ReusableAnswers
from resources.store.snapshot_manifest import USER_SYSTEM, USER_TURNS, stratum_of

# The usual rule for English. Other scripts have more bytes a letter and fewer letters a token: bytes differ less.
BYTES_PER_TOKEN = 4.0
# Of an image: a token per 28 × 28 pixels, as Qwen2-VL and those after it have it. Others differ up to twice.
PIXELS_OF_TOKEN = 28
IMAGE_TOKENS = 1300.0  # of one of a megapixel
AUDIO_TOKENS_OF_SECOND = 25.0  # as Qwen2-Audio and Ultravox have them
WAV_BYTES_OF_SECOND, PACKED_BYTES_OF_SECOND = 32_000, 16_000  # 16 kHz of 16 bits; 128 kbit/s
_HEADER_LETTERS = 64 << 10  # of base64: of an image in which its size stands
MESSAGE_TOKENS = 4.0  # the chat template's words around a message: start, role, line break, end
OUTPUT_SHARE = 0.5
SAMPLED_BATCHES, SAMPLED_ROWS = 8, 250
MEASURED_BATCHES = 16
COUNTED_BLOCKS = 64
CHECKED_ROWS = 10_000  # of a source: rows whose prompts are rendered, to say which cannot be used
REUSABLE_SECONDS = 60.0  # a listing of 80,000 batches is 80 requests; a refresh may find more answers for a snapshot

# How far off the tokens left may be, as a relative standard deviation: guessed from bytes and max_tokens; known from
# one batch; never less than this, as batches of a sorted source differ from those to come. Values of ours.
ESTIMATE_SPREAD, FIRST_SPREAD, LEAST_SPREAD = 0.3, 0.1, 0.01

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PromptLengths:
    """Estimated tokens of some prompts: mean and most.

    Of conversations `mean` is that of all requests of a row, `longest` that of a last request, both without the answers
    that later requests repeat: these are `repeated` answers a row. `turns`: the mean, `most_turns` the most.
    `user`: of `mean`, what the requests of a model that plays the user take, which are `texts` a row.
    """

    mean: float
    longest: float
    turns: float = 1.0
    repeated: float = 0.0
    most_turns: int = 1
    user: float = 0.0
    texts: int = 0

    def of_user(self, text: float) -> UserTexts | None:
        """What the user's model takes of a row; `text`: tokens of an answer, and of what the user says."""
        if not self.texts:
            return None
        return UserTexts(LengthMix(max(1.0, self.user + self.texts**2 * text), self.texts * text))


class WorkloadEstimator:
    """What one dataset still has to generate. Asking again lists the batch objects and reads only what is new."""

    def __init__(
        self,
        spec: GeneratedDatasetSpec,
        store: DatasetStore,
        folder: Path,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`folder`: where relative source paths start; read only while there is no snapshot."""
        self._spec, self._store, self._folder, self._clock = spec, store, folder, clock
        self._reusable: Mapping[str, int] = {}
        self._reusable_of, self._reusable_until = "", -math.inf
        self._snapshot: str | None = None
        self._manifest: SnapshotManifest | None = None
        self._entries: list[BatchEntry] = []
        self._prompts = PromptLengths(0.0, 0.0)
        self._footers: dict[BatchObject, BatchFooter] = {}

    def look(self, anew: Collection[str] = ()) -> Workload:
        """The work as it is now. Raises SourceError when there is no snapshot and the source cannot be read.

        `anew`: batches that are made once more, although they are there.
        """
        snapshot = self._store.current_snapshot()
        if snapshot is None:
            return work_of_source(self._spec, self._folder)
        manifest = self._read(snapshot)
        current = self._store.current_objects(self._entries)
        again = set(anew)
        left = sum(entry.rows for entry in self._entries if entry.key not in current or entry.key in again)
        left -= sum(rows for key, rows in self._list_reusable(snapshot).items() if key not in current)
        more = self.to_come(snapshot)[0] if left else 0
        footers = self._measured(list(current.values()))
        return work_of(manifest.settings(), left + more, manifest.rows + more, self._prompts, footers)

    def to_come(self, snapshot: str) -> tuple[int, float]:
        """Rows that are expected after those of a snapshot, until enough are accepted (`want`), and their standard
        deviation."""
        wanted = self._read(snapshot).wanted
        low, middle, high = (0.0, 0.0, 0.0) if wanted is None else wanted.to_come
        return round(middle), (high - low) / (2 * Z)

    def reusable(self, snapshot: str) -> Mapping[str, int]:
        """Rows by batch whose answers other datasets have: they need no engine. Listed once in REUSABLE_SECONDS."""
        now = self._clock()
        if snapshot != self._reusable_of or now >= self._reusable_until:
            self._reusable = self._list_reusable(snapshot)
            self._reusable_of, self._reusable_until = snapshot, now + REUSABLE_SECONDS
        return self._reusable

    def _list_reusable(self, snapshot: str) -> dict[str, int]:
        if not self._spec.reuse:
            return {}
        answers = ReusableAnswers(self._store.objects, self._store.dataset, self._spec.reuse)
        return {key: batch.rows for key, batch in answers.of_snapshot(snapshot).items()}

    def left(self, snapshot: str, rows: int, committed: Iterable[BatchObject]) -> tuple[Workload, float]:
        """The work of `rows` rows of a snapshot, and how uncertain its tokens are (relative standard deviation).

        Lists nothing: `committed` are batches that the catalog knows, of which a few are looked at.
        """
        manifest = self._read(snapshot)
        # Those whose keys hash lowest: evenly spread, and the same ones again at the next look.
        sampled = heapq.nsmallest(MEASURED_BATCHES, committed, key=lambda batch: zlib.crc32(batch.key.encode()))
        footers = self._measured(sampled)
        all_rows = max(rows, manifest.rows)
        return work_of(manifest.settings(), rows, all_rows, self._prompts, footers), spread_of(footers)

    def model(self, snapshot: str) -> str:
        """The model that the rows of a snapshot are asked of."""
        return self._read(snapshot).settings().model

    def _read(self, snapshot: str) -> SnapshotManifest:
        if snapshot != self._snapshot or self._manifest is None:
            self._manifest, self._entries = self._store.manifest(snapshot), self._store.entries(snapshot)
            self._prompts, self._snapshot = self._sample(self._manifest), snapshot
        return self._manifest

    def _sample(self, manifest: SnapshotManifest) -> PromptLengths:
        columns = ("prompt", USER_TURNS, USER_SYSTEM)
        tables = self._store.prompt_tables(manifest, _spread(self._entries, SAMPLED_BATCHES), columns)
        asked = (
            (row["prompt"], orjson.loads(row.get(USER_TURNS) or b"[]"), row.get(USER_SYSTEM))
            for _, table in tables
            for row in table.slice(0, SAMPLED_ROWS).to_pylist()
        )
        return _estimate(asked, (manifest.generation.get("user_model") or {}).get("turns", 1))

    def _measured(self, batches: Sequence[BatchObject]) -> list[BatchFooter]:
        """What some batches say of themselves; one that cannot be read measures nothing."""
        known, self._footers = self._footers, {}
        for batch in _spread(batches, MEASURED_BATCHES):
            with contextlib.suppress(CorruptObject, FileNotFoundError):
                self._footers[batch] = known.get(batch) or self._store.footer(batch)
        return list(self._footers.values())


def work_of(
    generation: Generation,
    rows: int,
    all_rows: int,
    prompts: PromptLengths,
    footers: Sequence[BatchFooter],
    said: Sequence[Assumption] = (),
) -> Workload:
    """Work of `rows` rows out of `all_rows`: lengths of committed batches where there are some, else estimates."""
    most = _most_output(generation)
    room = max(most, generation.longest_answer or 0)
    before = room * (prompts.most_turns - 1)  # answers that a last request repeats
    answered = sum(footer.ok for footer in footers)
    prompt = sum(footer.prompt_tokens for footer in footers) / answered if answered else 0.0
    if answered and prompt > 0:
        output = sum(footer.completion_tokens for footer in footers) / answered
        expected = prompts.mean + prompts.repeated * output / prompts.turns
        longest = prompts.longest * max(1.0, prompt / max(1.0, expected)) + before
        mix = LengthMix(prompt, output if generation.task not in POOLED else 0.0)
        user = _measured_user(prompts, mix, footers)
        return Workload(
            rows, all_rows, mix, round(longest + room), "measured", "measured", tuple(said), room, user=user
        )
    fixed = generation.task in POOLED or bool(generation.sampling.get("ignore_eos"))
    share = 1.0 if fixed else OUTPUT_SHARE
    texts = [f"prompts: a token per {BYTES_PER_TOKEN:g} bytes, and {MESSAGE_TOKENS:g} per message"]
    limit = f"max_tokens ({most:,})" if generation.most_tokens else f"{most:,} tokens, as sampling has no limit"
    texts += [] if fixed else [f"completions: {OUTPUT_SHARE:.0%} of {limit}"]
    assumed = (*said, *(Assumption(Subject.LENGTHS, text) for text in texts))
    if prompts.most_turns > 1:
        text = f"conversations: {prompts.turns:.3g} requests a row, each with all answers before it in its prompt"
        assumed = (*assumed, Assumption(Subject.LENGTHS, text))
    answer = most * share
    mix = LengthMix(max(1.0, prompts.mean + prompts.repeated * answer), prompts.turns * answer)
    longest = round(prompts.longest + before + room)
    user = prompts.of_user(answer)
    return Workload(rows, all_rows, mix, longest, "estimated", "assumed", assumed, room, user=user)


def _measured_user(prompts: PromptLengths, mix: LengthMix, footers: Sequence[BatchFooter]) -> UserTexts | None:
    """Of measured lengths what the user's model took: as batches say, else by its share of the requests."""
    if not prompts.texts:
        return None
    said = [one for one in footers if one.user_prompt_tokens is not None]
    whole = sum(one.prompt_tokens for one in said), sum(one.completion_tokens for one in said)
    if all(whole):
        prompt = sum(one.user_prompt_tokens or 0 for one in said) / whole[0]
        output = sum(one.user_completion_tokens or 0 for one in said) / whole[1]
    else:
        text = mix.output_tokens / prompts.turns
        prompt = min(1.0, (prompts.user + prompts.texts**2 * text) / (prompts.mean + prompts.repeated * text))
        output = prompts.texts / prompts.turns
    return UserTexts(LengthMix(max(1.0, prompt * mix.prompt_tokens), output * mix.output_tokens))


def spread_of(footers: Sequence[BatchFooter]) -> float:
    """Relative standard error of the mean tokens per row, from the differences between batches; estimates: 0.3."""
    means = [(one.prompt_tokens + one.completion_tokens) / one.ok for one in footers if one.ok]
    if not means or not (average := statistics.fmean(means)):
        return ESTIMATE_SPREAD
    if len(means) == 1:
        return FIRST_SPREAD
    return max(LEAST_SPREAD, statistics.stdev(means) / average / math.sqrt(len(means)))


def work_of_source(spec: GeneratedDatasetSpec, folder: Path) -> Workload:
    """The work of a dataset without a snapshot: the first prompts are rendered, and the first blocks counted.

    The rows of a longer source are estimated from the size of its files, and the share of their lines that pass.
    Raises SourceError where no row can be used.
    """
    found = _FirstRows(spec, folder)
    found.read()
    rows = found.rows
    said = [
        Assumption(
            Subject.LENGTHS, "there is no snapshot yet: rows are those of the source, lengths those of its first rows"
        )
    ]
    if not found.whole:
        rows = _estimated_rows(spec, folder, rows, found.lines)
        text = f"the source has about {rows:,} rows: {found.lines:,} lines were read, the others count by their bytes"
        said.append(Assumption(Subject.ROWS, text))
    skipped = found.rejected and spec.on_bad_row == "skip"
    said += [Assumption(Subject.ROWS, found.rejected_words())] if skipped else []
    rows *= spec.samples
    if spec.want is not None:
        rate, times = prior_of(spec.want.expected_rate), max(1, len(found.strata))
        low, middle, high = (min(rows, round(number * times)) for number in rows_for(spec.want.rows, rate))
        each = f" of each of {times:,} values of {spec.want.per}" if spec.want.per is not None else ""
        text = f"{spec.want.rows:,} rows{each} are to be accepted, of {middle:,} ({low:,} to {high:,}) that are made"
        said.append(Assumption(Subject.ROWS, f"{text}, as {rate.mean:.0%} are expected to be accepted"))
        rows = middle
    work = work_of(spec.generation(), rows, rows, found.lengths(), (), said)
    if not found.rejected or skipped:
        return replace(work, rejected=found.rejected)
    stops = str(SourceError.of_rows(found.first, found.rejected))
    return replace(work, rejected=found.rejected, problems=(found.rejected_words(),), stops=stops)


class _FirstRows:
    """The first blocks of a source: rows that can be used, and those that a snapshot refuses."""

    def __init__(self, spec: GeneratedDatasetSpec, folder: Path) -> None:
        self._spec, self._folder = spec, folder
        self._check, self._ids = RowCheck(spec, folder), dict[str, tuple[str, int]]()
        self._most = SAMPLED_ROWS if spec.prompt.media else CHECKED_ROWS  # a picture takes as long as many rows
        self._passed, self._checked, self._asked = 0, 0, list[_Asked]()
        self.rows = self.lines = self.rejected = 0
        self.first: list[Reject] = []
        self.whole, self.strata = True, set[str]()

    def read(self) -> None:
        """Read them. Raises SourceError where none can be used."""
        check, source = self._check, self._spec.source
        for number, block in enumerate(rows_of(self._spec, check.columns, self._folder, check.unseen)):
            if number >= COUNTED_BLOCKS and source.group_by is None:  # groups are all there at once
                self.whole = False
                break
            self.lines += len(set(block.lines)) + len(block.rejects)  # one line may be several rows: `explode`
            self._take(check.passing(block))
            if check.full:
                break
        if self.whole:
            check.finish()
            if not self.rows and self.rejected and self._spec.on_bad_row == "fail":
                raise SourceError.of_rows(self.first, self.rejected)
            if not self.rows:
                raise SourceError.of_no_row(source_name(self._spec), self.first, self.rejected)
        check.check_conditions(whole=self.whole and self._checked == self._passed)

    def _take(self, block: Block) -> None:
        rejects = list(block.rejects)
        self.rows += len(block.lines)
        self._passed += len(block.lines)
        if self._spec.want is not None and self._spec.want.per is not None:
            self.strata |= set(map(stratum_of, block.columns[self._spec.want.per]))
        part = block.part(0, max(0, self._most - self._checked))
        self._checked += len(part.lines)
        for some in self._check.parts(part):
            rejects += self._look(some)
        self.rejected += len(rejects)
        self.first += sorted(rejects, key=lambda one: one.line)[: LISTED - len(self.first)]

    def _look(self, part: Block) -> list[Reject]:
        """Hold rows to what a snapshot asks of them; returns those that cannot be used."""
        rows = self._check.check(part)
        refused = dict(rows.refused)
        for i, row_id in enumerate(rows.ids or ()):
            first = self._ids.setdefault(row_id, (part.file, part.lines[i])) if i not in refused else None
            if first is not None and first != (part.file, part.lines[i]):
                refused[i] = f"id: the same as in {first[0]}, line {first[1]}"
        self.rows -= len(refused)
        turns: Sequence[Sequence[str]] = rows.turns or [()] * len(rows.prompts)
        users: Sequence[str | None] = rows.user_systems or [None] * len(rows.prompts)
        found = [row for i, row in enumerate(zip(rows.prompts, turns, users, strict=True)) if i not in refused]
        self._asked += found[: SAMPLED_ROWS - len(self._asked)]
        return [Reject(part.file, part.lines[i], reason) for i, reason in refused.items()]

    def lengths(self) -> PromptLengths:
        """Of the first prompts that can be used."""
        user = self._spec.prompt.user_model
        return _estimate(self._asked, user.turns if user is not None else 1)

    def rejected_words(self) -> str:
        """How many rows cannot be used, of how many, and the first of them with its reason."""
        of = f"{'' if self.whole else 'the first '}{self._check.source_rows:,} rows of the source"
        rendered = f"; prompts of {self._checked:,} rows were looked at" if self._checked < self._passed else ""
        rows = f"{self.rejected:,} of {of} cannot be used{rendered}"
        hint = f". {remedy(self.first)}".rstrip(". \n")
        does = "are left out" if self._spec.on_bad_row == "skip" else "stop a run"
        return f"{rows}: they {does} (on_bad_row: {self._spec.on_bad_row}), such as {self.first[0]}{hint}"


def _estimated_rows(spec: GeneratedDatasetSpec, folder: Path, rows: int, lines: int) -> int:
    """Rows of a whole source, of whose first `lines` lines `rows` pass; never fewer than these."""
    estimated = estimated_lines(spec.source, folder) * rows / max(1, lines)
    found = rows if math.isnan(estimated) else max(rows, round(estimated))
    return min(found, spec.source.limit or found)


# A prompt, what the user says in its row, where that is a conversation, and who a model that writes the rest is to be.
_Asked = tuple[bytes, Sequence[str], str | None]


def _estimate(prompts: Iterable[_Asked], written: int) -> PromptLengths:
    """`written`: turns of the user where a model writes them. Its texts count as answers as long as the others, and its
    requests as turns: each repeats all texts before it.
    """
    tokens: list[tuple[float, float, int]] = []
    users: list[float] = []
    for prompt, turns, system in prompts:
        request = prompt_tokens(orjson.loads(prompt), _text_tokens)
        whole, requests = request, 1
        for said in turns[1:]:
            request += _text_tokens(said) + 2 * MESSAGE_TOKENS  # and around the answer before it
            whole, requests = whole + request, requests + 1
        if system is not None:
            asked = _text_tokens(system) + _text_tokens(turns[0]) + 3 * MESSAGE_TOKENS
            whole, requests = written * request + (written - 1) * asked, 2 * written - 1
            users.append((written - 1) * asked)
            request = max(request, asked)
        tokens.append((whole, request, requests))
    if not tokens:
        return PromptLengths(0.0, 0.0)
    wholes, lasts, turns_of = zip(*tokens, strict=True)
    rows = len(tokens)
    repeated = sum(n * (n - 1) / 2 for n in turns_of) / rows
    mean, texts = sum(wholes) / rows, written - 1 if users else 0
    return PromptLengths(mean, max(lasts), sum(turns_of) / rows, repeated, max(turns_of), sum(users) / rows, texts)


def _text_tokens(text: str) -> float:
    return len(text.encode()) / BYTES_PER_TOKEN


def prompt_tokens(prompt: Any, count: Callable[[str], float]) -> float:
    """Tokens of a prompt as the snapshot holds it: chat messages, a text, a pair of texts, or documents to rank.
    `count`: tokens of a text."""
    if isinstance(prompt, str):
        return count(prompt)
    if isinstance(prompt, list):
        return sum(count(words_of(message)) + MESSAGE_TOKENS + _media_tokens(message) for message in prompt)
    documents = prompt.get("documents")
    if documents is None:
        return sum(map(count, prompt.values()))
    return sum(map(count, documents)) + len(documents) * count(prompt["query"])


def _media_tokens(message: Mapping[str, Any]) -> float:
    """Tokens of the images in a message, by their pixels, those of about a megapixel where these are not seen; and of
    its sounds, by their bytes.
    """
    parts, tokens = message.get("content"), 0.0
    for part in parts if type(parts) is list else ():
        media, data = data_url_of(part)
        if part.get("type") == "image_url":
            tokens += _tokens_of_image(data)
        elif part.get("type") in ("audio_url", "input_audio"):
            rate = WAV_BYTES_OF_SECOND if media.endswith("wav") else PACKED_BYTES_OF_SECOND
            tokens += AUDIO_TOKENS_OF_SECOND * max(1.0, len(data) * 3 / 4 / rate)
    return tokens


def _tokens_of_image(data: str) -> float:
    try:
        from PIL import Image

        with Image.open(io.BytesIO(base64.b64decode(data[:_HEADER_LETTERS]))) as image:
            return math.ceil(image.size[0] / PIXELS_OF_TOKEN) * math.ceil(image.size[1] / PIXELS_OF_TOKEN)
    except Exception:  # without Pillow, or of a picture whose size does not stand at its beginning
        return IMAGE_TOKENS


def _most_output(generation: Generation) -> int:
    """Most completion tokens of a row; where its request limits them nowhere, as many as it does by default."""
    if generation.task in POOLED:
        return 0
    asked = (generation, generation.of_user)
    return max(one.most_tokens or DEFAULT_MAX_TOKENS for one in asked if one is not None)


def _spread(items: Sequence[T], most: int) -> list[T]:
    """At most this many of the items, evenly spread, in order."""
    if len(items) <= most:
        return list(items)
    return [items[i * len(items) // most] for i in range(most)]
