"""Audio of rows: what is sent, what the row's key holds, what the table shows, and what is refused and why."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import struct
import wave
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.dataset_project import MODEL, dataset_project
from support.plain_engine import plain_engine

from batch_assets.asset_metadata.sample_rows import sample_markdown
from batch_assets.capacity_planning.workload_estimate import prompt_tokens
from batch_assets.component import spec_version
from batch_assets.publishing.current_rows import find_rows
from batch_assets.publishing.published_table import published_table
from batch_assets.snapshot.prompts.audio import RowAudio
from batch_assets.snapshot.prompts.row_media import RowMedium
from batch_assets.snapshot.source.block import Block
from batch_assets.snapshot.source.errors import SourceError
from batch_assets.spec.errors import SpecError
from batch_assets.spec.media import AudioSpec
from batch_assets.spec.models import load_spec
from batch_assets.spec.sampling_values import Unfit


def wav(seconds: float = 0.5, rate: int = 8000) -> bytes:
    written = io.BytesIO()
    with wave.open(written, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(bytes(2 * int(seconds * rate)))
    return written.getvalue()


def mp3(frames: int = 20, tag: int = 0) -> bytes:
    """Silent frames of MPEG 1, layer III, 128 kbit/s, 44.1 kHz: 417 bytes and 1,152 samples each."""
    head = b"ID3\x04\0\0" + bytes([0, 0, tag >> 7, tag & 127]) + bytes(tag) if tag else b""
    return head + (b"\xff\xfb\x90\x00" + bytes(413)) * frames


def flac(samples: int = 16_000, rate: int = 16_000) -> bytes:
    about = struct.pack(">HH", 4096, 4096) + bytes(6) + ((rate << 44) | (15 << 36) | samples).to_bytes(8, "big")
    return b"fLaC" + bytes([0x80, 0, 0, 34]) + about + bytes(16)


def ogg(samples: int = 48_000, codec: bytes = b"OpusHead") -> bytes:
    page = b"OggS\0\2" + struct.pack("<q", 0) + bytes(14) + codec + b"\1\1" + bytes(40)
    return page + b"OggS\0\4" + struct.pack("<q", samples) + bytes(20)


def data_url(data: bytes) -> str:
    return f"data:application/x;base64,{base64.b64encode(data).decode()}"


def read(cells: list[Any], base: Path, **options: Any) -> tuple[list[list[RowMedium]], dict[int, str]]:
    refused: dict[int, str] = {}
    block = Block("a.parquet", list(range(1, len(cells) + 1)), {"sound": cells})
    return RowAudio(AudioSpec(columns=["sound"], **options), base).of(block, refused), refused


@pytest.mark.slow
def test_rows_ask_with_their_sounds_and_the_table_has_only_their_digests(tmp_path: Path) -> None:
    one, other = wav(), mp3()
    (tmp_path / "sounds").mkdir()
    (tmp_path / "sounds" / "b.bin").write_bytes(other)
    lines = [{"id": "a", "sound": data_url(one)}, {"id": "b", "sound": "b.bin"}, {"id": "c", "sound": "../b.bin"}]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    prompt = {"user": "What is said?", "audio": {"columns": ["sound"], "folders": ["sounds"]}}
    prompt["user_model"] = {"system": "You wonder.", "turns": 2}
    with plain_engine(MODEL) as engine, dataset_project(tmp_path, prompt=prompt, on_bad_row="skip") as site:
        assert site.materialize("prompts").success
        assert site.run_rows("00000", "00000", engine.url).success
        asked = [one["messages"] for one in engine.requests]
        heard = {orjson.dumps(one[0]["content"]) for one in asked if one[0]["role"] == "user"}
        text = {"text": "What is said?", "type": "text"}
        assert heard == {
            orjson.dumps(
                [
                    {"input_audio": {"data": base64.b64encode(data).decode(), "format": kind}, "type": "input_audio"},
                    text,
                ]
            )
            for data, kind in ((one, "wav"), (other, "mp3"))
        }
        users = [one for one in asked if one[0]["role"] == "system"]
        assert len(users) == 2 and all(one[2]["content"] == "What is said?" for one in users)
        manifest = site.store.manifest(site.store.current_snapshot() or "")
        seen = find_rows(site.store, manifest, site.store.entries(manifest.snapshot), lambda rows: rows, 9).rows
        assert len(seen) == 2 and base64.b64encode(one).decode()[-60:] not in str(seen)
        assert site.materialize("dataset").success
        table = published_table(site.store)
        assert table is not None
        (file,) = table.files
        data = pq.read_table(pa.BufferReader(site.store.objects.get(f"{table.path}/{file.name}")))
        shown = {line["row_id"]: line["prompt"] for line in data.to_pylist()}
        assert shown.keys() == {"a", "b"}
        sent = base64.b64encode(one).decode()[-60:]
        assert sent not in str(shown) + sample_markdown(site.store, table)
        said = f"sha256:{hashlib.sha256(one).hexdigest()} (audio/wav, {len(one):,} bytes)"
        assert orjson.loads(shown["a"][0]["content"])[0]["input_audio"] == {"data": said, "format": "wav"}


@pytest.mark.parametrize(
    ("data", "media", "seconds"),
    [
        (wav(0.5), "audio/wav", 0.5),
        (mp3(20), "audio/mpeg", 20 * 1152 / 44_100),
        (mp3(20, tag=300), "audio/mpeg", 20 * 1152 / 44_100),
        (flac(), "audio/flac", 1),
        (ogg(), "audio/ogg", 1),
        (ogg(44_100, b"\1vorbis" + bytes(4) + b"\1" + struct.pack("<I", 44_100)), "audio/ogg", 1),
    ],
)
def test_the_format_is_that_of_the_content_and_the_length_that_of_its_headers(
    tmp_path: Path, data: bytes, media: str, seconds: float
) -> None:
    ((found,),), refused = read([data], tmp_path, send_as="audio_url", max_seconds=seconds + 0.001)
    assert found.url == f"data:{media};base64,{base64.b64encode(data).decode()}" and not refused
    assert found.key == hashlib.sha256(data).hexdigest()
    _, refused = read([data], tmp_path, send_as="audio_url", max_seconds=seconds - 0.001)
    assert "seconds of sound (max_seconds), found" in refused[0]


def test_a_part_is_openais_or_vllms_and_the_key_has_the_digest(tmp_path: Path) -> None:
    data = wav()
    for send_as, wanted in (("input_audio", {"data": "K", "format": "wav"}), ("audio_url", {"url": "K"})):
        kind = RowAudio(AudioSpec(columns=["s"], send_as=send_as), tmp_path)
        medium = kind.read(data)
        part, keyed = kind.part(medium, keyed=False), kind.part(medium, keyed=True)
        assert part["type"] == keyed["type"] == send_as
        assert orjson.loads(orjson.dumps(keyed[send_as]).replace(medium.key.encode(), b"K")) == wanted
        tokens = prompt_tokens([{"role": "user", "content": [part]}], lambda text: 0.0)
        assert tokens == pytest.approx(4 + 25, abs=1)


def _wav(*chunks: tuple[bytes, bytes], size: int | None = None) -> bytes:
    body = b"".join(name + struct.pack("<I", len(data) if size is None else size) + data for name, data in chunks)
    return b"RIFF" + struct.pack("<I", 4 + len(body)) + b"WAVE" + body


_FORMAT = struct.pack("<HHIIHH", 1, 1, 8000, 16_000, 2, 16)
HOSTILE: list[tuple[Any, str]] = [
    (b"", "expected a WAV or MP3 file by its content, found another format"),
    (b"<!doctype html>", "found another format"),
    (b"\x89PNG\r\n\x1a\n" + bytes(100), "found another format"),
    (b"RIFF" + bytes(4) + b"AVI " + bytes(100), "found another format"),
    (flac(), "found flac, which audio_url takes (send_as)"),
    (ogg(), "found ogg, which audio_url takes (send_as)"),
    (wav()[:-100], "expected a whole wav file, found 7,900 bytes of sound where it says 8,000"),
    (wav()[:30], "expected a whole wav file, found a broken one"),
    (_wav((b"data", b"12")), "expected a whole wav file, found a broken one"),  # without a format
    (_wav((b"fmt ", _FORMAT)), "expected a whole wav file, found a broken one"),  # without sound
    (_wav((b"fmt ", _FORMAT), (b"data", b"")), "max_seconds), found none"),
    (_wav((b"fmt ", bytes(16)), (b"data", b"1234")), "expected a whole wav file, found a broken one"),
    (_wav(*[(b"LIST", b"")] * 5000), "expected a whole wav file, found a broken one"),
    (_wav((b"LIST", b""), size=0xFFFFFFFF), "expected a whole wav file, found a broken one"),
    (wav(601, 1000), "expected at most 600 seconds of sound (max_seconds), found 601.0"),
    (mp3(1)[:200], "expected a whole mp3 file, found a broken one"),
    (b"ID3\x04\0\0\x7f\x7f\x7f\x7f", "expected a whole mp3 file, found a broken one"),
    (b"ID3", "expected a whole mp3 file, found a broken one"),
    (b"ID3" + bytes(1 << 20), "expected a whole mp3 file, found a broken one"),
    (bytes(4 << 20), "expected at most 3,145,728 bytes (max_bytes), found 4,194,304"),
    ("data:audio/wav;base64," + "A" * (5 << 20), "found a data URL of 5,242,902 letters"),
    ("data:audio/wav,RIFF", "expected a data URL in base64"),
    ("data:audio/wav;base64,@@", "found other letters in it"),
    ("../outside.wav", "found one that leads elsewhere"),
    ("not-there.wav", "expected a file that can be read, found none (No such file or directory)"),
    ("http://169.254.169.254/a.wav", "expected an address at a host in prompt.audio.hosts, found another host"),
    ("https://user:secret@sounds.example.com/a.wav", "found one with them"),
    ("http://localhost/a.wav?token=secret", "found one that is not connected to"),
    ([wav(), wav()], "expected at most 1 sounds (max_count), found 2"),
    (7, "a path or an address, found another value"),
    (None, "expected a WAV or MP3 file, found none"),
    ([], "expected a WAV or MP3 file, found none"),
]


@pytest.mark.parametrize(("cell", "said"), HOSTILE, ids=lambda one: one[:50] if isinstance(one, str) else "")
def test_a_sound_that_cannot_be_used_is_a_reject_with_its_reason(tmp_path: Path, cell: Any, said: str) -> None:
    (tmp_path / "sounds").mkdir()
    (tmp_path / "outside.wav").write_bytes(wav())
    hosts = ["sounds.example.com", "localhost"]
    _, refused = read([wav(), cell], tmp_path, folders=["sounds"], hosts=hosts)
    assert refused.keys() == {1} and said in refused[1] and refused[1].startswith("prompt.audio: ")
    assert "secret" not in refused[1] and len(refused[1]) < 300


@given(st.sampled_from([wav(0.01), mp3(2, 10), flac(), ogg()]), st.data())
def test_no_broken_file_is_anything_but_read_or_unfit(good: bytes, data: st.DataObject) -> None:
    broken = bytearray(good)
    for place in data.draw(st.lists(st.integers(0, len(broken) - 1), max_size=6)):
        broken[place] = data.draw(st.integers(0, 255))
    kind = RowAudio(AudioSpec(columns=["s"], send_as="audio_url"), Path("/"))
    try:
        kind.read(bytes(broken[: data.draw(st.integers(0, len(broken)))]))
    except Unfit as error:
        assert str(error).startswith("expected ")


@pytest.mark.parametrize(
    ("attributes", "said"),
    [
        ({"prompt": {"user": "a", "audio": {"columns": []}}}, "prompt.audio.columns: expected at least"),
        ({"prompt": {"user": "a", "audio": {"columns": ["p"], "max_second": 1}}}, "Did you mean 'max_seconds'?"),
        ({"prompt": {"user": "a", "audio": {"columns": ["p"], "send_as": "file"}}}, "prompt.audio.send_as"),
        ({"prompt": {"user": "a", "audio": {"columns": ["p"], "hosts": ["http://x"]}}}, "a host, or host:port"),
        ({"prompt": {"messages_from": "m", "audio": "p"}}, "prompt.audio: expected task chat, and prompt.user"),
        ({"prompt": {"text": "a", "audio": "p"}, "task": "completion"}, "found task completion"),
        ({"batch_rows": 5_000}, "batch_rows: expected at most 255 beside prompt.audio, found 5000"),
        (
            {"prompt": {"user": "a", "audio": "p", "images": "q"}, "batch_rows": 200},
            "batch_rows: expected at most 127 beside prompt.images and prompt.audio, found 200",
        ),
        ({"engine": {"limit_mm_per_prompt": {"audio": 0}}}, "engine.limit_mm_per_prompt.audio: expected at least 1"),
    ],
)
def test_what_does_not_fit_audio_is_refused_when_the_file_is_read(attributes: dict[str, Any], said: str) -> None:
    least = {"name": "d", "source": {"path": "a"}, "model": "m", "prompt": {"user": "{{ q }}", "audio": "p"}}
    with pytest.raises(SpecError) as caught:
        load_spec(least | attributes, "defs.yaml")
    assert said in str(caught.value)


def test_an_engine_gets_the_limits_and_a_file_without_audio_is_as_before(tmp_path: Path) -> None:
    least: dict[str, Any] = {"name": "d", "source": {"path": "a"}, "model": "m", "batch_rows": 100}
    both = load_spec(least | {"prompt": {"user": "q", "audio": "s", "images": "p"}}, "defs.yaml")
    assert both.engine.arguments() == ('--limit-mm-per-prompt={"image":8,"audio":1}',)
    plain = load_spec(least | {"prompt": {"user": "q"}}, "defs.yaml")
    assert spec_version(plain) == spec_version(load_spec(least | {"prompt": {"user": "q", "audio": None}}, "defs.yaml"))
    with pytest.raises(SourceError, match=r"prompt.audio.folders: expected a folder, found none at 'nowhere'"):
        RowAudio(AudioSpec(columns=["p"], folders=["nowhere"]), tmp_path)
