"""Audio of rows: WAV, MP3, FLAC and Ogg, by their content, and how long it lasts by its own headers. Nothing is
decoded: whether all of it can be heard only the engine knows.

Formats: WAV, RIFF with chunks (Microsoft's Multimedia Programming Interface 1.0); MP3, frames of ISO 11172-3 and
13818-3 behind ID3v2; FLAC, RFC 9639; Ogg, RFC 3533, with Opus (RFC 7845) or Vorbis.
"""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

from batch_assets.snapshot.prompts.messages import Message
from batch_assets.snapshot.prompts.row_media import RowMedia, RowMedium, data_url
from batch_assets.spec.media import AudioSpec
from batch_assets.spec.sampling_values import Unfit

_MEDIA = {"wav": "audio/wav", "mp3": "audio/mpeg", "flac": "audio/flac", "ogg": "audio/ogg"}
_SENT_AS = {"input_audio": ("wav", "mp3"), "audio_url": tuple(_MEDIA)}
_OF_INPUT, _OF_URL = "a WAV or MP3 file", "a WAV, MP3, FLAC or Ogg file"
_MOST_CHUNKS = 1000
_LAST_PAGE = 1 << 17  # bytes: an Ogg page has 65,307 at most

# Of MP3 by two bits of a frame's header, 3: MPEG 1, 2: MPEG 2, 0: MPEG 2.5.
_RATES = {3: (44_100, 48_000, 32_000), 2: (22_050, 24_000, 16_000), 0: (11_025, 12_000, 8_000)}
_KBITS_1 = (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320)
_KBITS_2 = (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160)


class RowAudio(RowMedia):
    """Those of a spec. `base`: where relative folders start. Raises SourceError for a folder that is none."""

    named, too_large = "sounds", "Lower max_count or max_bytes, or make them smaller"

    def __init__(self, spec: AudioSpec, base: Path) -> None:
        super().__init__(spec, base, "prompt.audio")
        self._limits = spec
        self.expected = _OF_INPUT if spec.send_as == "input_audio" else _OF_URL

    def read(self, data: bytes) -> RowMedium:
        """Its format and length, by its headers. Raises Unfit."""
        kind = _kind(data)
        if kind not in _SENT_AS[self._limits.send_as]:
            hint = ", which audio_url takes (send_as)" if kind else ""
            raise Unfit(f"expected {self.expected} by its content, found {kind or 'another format'}{hint}")
        try:
            seconds = _SECONDS[kind](data)
        except (struct.error, IndexError, ZeroDivisionError):
            raise Unfit(f"expected a whole {kind} file, found a broken one") from None
        if not 0 < seconds <= self._limits.max_seconds:
            found = f"{seconds:,.1f}" if seconds > 0 else "none"
            raise Unfit(f"expected at most {self._limits.max_seconds:g} seconds of sound (max_seconds), found {found}")
        return RowMedium(data_url(_MEDIA[kind], data), hashlib.sha256(data).hexdigest())

    def part(self, medium: RowMedium, *, keyed: bool) -> Message:
        """OpenAI's content part, or vLLM's."""
        if self._limits.send_as == "audio_url":
            return {"audio_url": {"url": medium.key if keyed else medium.url}, "type": "audio_url"}
        media, _, data = medium.url[5:].partition(";base64,")
        kind = next(name for name, one in _MEDIA.items() if one == media)
        return {"input_audio": {"data": medium.key if keyed else data, "format": kind}, "type": "input_audio"}


def _kind(data: bytes) -> str:
    """The name of a format by its first bytes; empty for another one."""
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
        return "wav"
    if data[:4] in (b"fLaC", b"OggS"):
        return "flac" if data[:4] == b"fLaC" else "ogg"
    return "mp3" if data[:3] == b"ID3" or _frame(data, 0) is not None else ""


def _wav_seconds(data: bytes) -> float:
    at, rate = 12, 0
    for _ in range(_MOST_CHUNKS):
        name, size = struct.unpack_from("<4sI", data, at)
        at += 8
        if name == b"fmt ":
            (rate,) = struct.unpack_from("<I", data, at + 8)  # bytes a second
        if name == b"data":
            left = len(data) - at
            size = left if size in (0, 0xFFFFFFFF) else size  # unknown when it was written, as by a stream
            if size > left:
                raise Unfit(f"expected a whole wav file, found {left:,} bytes of sound where it says {size:,}")
            return float(size / rate)
        at += size + size % 2
    raise IndexError


def _frame(data: bytes, at: int) -> tuple[int, int, int] | None:
    """Bytes, samples and samples a second of the MP3 frame here; None: there is none."""
    if at + 4 > len(data) or data[at] != 0xFF or data[at + 1] & 0xE0 != 0xE0:
        return None
    version, layer = data[at + 1] >> 3 & 3, data[at + 1] >> 1 & 3
    bits, rate = data[at + 2] >> 4, data[at + 2] >> 2 & 3
    if version == 1 or layer != 1 or not 0 < bits < 15 or rate == 3:  # layer III only
        return None
    first = version == 3
    samples, hertz = 1152 if first else 576, _RATES[version][rate]
    kbits = (_KBITS_1 if first else _KBITS_2)[bits - 1]
    return samples // 8 * kbits * 1000 // hertz + (data[at + 2] >> 1 & 1), samples, hertz


def _mp3_seconds(data: bytes) -> float:
    at, seconds = 0, 0.0
    if data[:3] == b"ID3":
        size = data[6:10]
        at = 10 + (size[0] << 21 | size[1] << 14 | size[2] << 7 | size[3])
    while (frame := _frame(data, at)) is not None:
        at += frame[0]
        if at > len(data):
            break  # the last one was cut, as many are
        seconds += frame[1] / frame[2]
    if not seconds:
        raise IndexError
    return seconds


def _flac_seconds(data: bytes) -> float:
    if len(data) < 42 or data[4] & 0x7F:
        raise IndexError
    packed = int.from_bytes(data[18:26], "big")
    rate, samples = packed >> 44, packed & (1 << 36) - 1
    return samples / rate if samples else 1e-3  # it says of no length: as a stream writes it


def _ogg_seconds(data: bytes) -> float:
    head = data[:200]
    if (at := head.find(b"OpusHead")) >= 0:
        rate = 48_000
    elif (at := head.find(b"\x01vorbis")) >= 0:
        (rate,) = struct.unpack_from("<I", data, at + 12)
    else:
        raise Unfit("expected an Ogg file with Opus or Vorbis, found another one")
    last = data.rfind(b"OggS", max(0, len(data) - _LAST_PAGE))
    (samples,) = struct.unpack_from("<q", data, last + 6)
    return float(samples / rate)


_SECONDS = {"wav": _wav_seconds, "mp3": _mp3_seconds, "flac": _flac_seconds, "ogg": _ogg_seconds}
