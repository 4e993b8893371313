"""Images and audio of rows, as a spec states them: columns, where files may lie, and limits."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag

from batch_assets.spec.errors import Unusable, show
from batch_assets.spec.fields import Column, Strict, TextFile

MOST_IMAGES = 8  # of one row, where the user says nothing
MOST_IMAGE_BYTES = 4 << 20  # of one row, as they are sent
MOST_SOUNDS = 1  # of one row, where the user says nothing
MOST_AUDIO_BYTES = 28 << 20  # of one row, as they are sent


def _host(value: str) -> str:
    name, colon, port = value.rpartition(":")
    known = [re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?", name if colon else value)]
    if not all(known) or (colon and not (port.isdecimal() and 0 < int(port) < 1 << 16)):
        raise Unusable("a host, or host:port, as images.example.com", show(value))
    return value.lower()


class MediaSpec(Strict):
    """Files of each row, before the text of its last message of the user."""

    columns: list[Column] = Field(
        min_length=1,
        max_length=20,
        description="Columns with them: their bytes, a path below one of `folders`, an address at one of `hosts`, a "
        "data URL, or a list of these. An empty cell is none; a row needs one.",
    )
    folders: list[TextFile] = Field(
        default=[],
        max_length=100,
        description="Folders below which files lie; a relative one starts at the folder of the `defs.yaml`, "
        "a relative path of a row at the first one.",
    )
    hosts: list[Annotated[str, AfterValidator(_host)]] = Field(
        default=[],
        max_length=1000,
        description="Hosts from which files are fetched, as `files.example.com` or `10.0.0.5:8080`. Private "
        "addresses only where the address itself is listed; redirects are not followed.",
    )
    max_count: int
    max_bytes: int

    @property
    def row_bytes(self) -> int:
        """Most bytes of all of one row, as they are sent."""
        return self.max_count * (self.max_bytes * 4 // 3 + 1000)


class ImagesSpec(MediaSpec):
    """Images of each row, before the text of its last message of the user."""

    max_count: int = Field(default=MOST_IMAGES, ge=1, le=64, description="Most images of a row.")
    max_bytes: int = Field(default=4 << 20, ge=1024, le=20 << 20, description="Most bytes of one image as it comes.")
    max_source_pixels: int = Field(
        default=32_000_000, ge=1024, le=80_000_000, description="Most pixels of one image as it comes."
    )
    max_pixels: int | None = Field(
        default=None, ge=1024, le=80_000_000, description="Scale larger images down to at most so many pixels."
    )

    @property
    def row_bytes(self) -> int:
        """Most bytes of all images of one row, as they are sent."""
        return min(MOST_IMAGE_BYTES, super().row_bytes)


class AudioSpec(MediaSpec):
    """Audio of each row, before the text of its last message of the user."""

    max_count: int = Field(default=MOST_SOUNDS, ge=1, le=16, description="Most sounds of a row.")
    max_bytes: int = Field(default=3 << 20, ge=1024, le=20 << 20, description="Most bytes of one sound as it comes.")
    max_seconds: float = Field(default=600.0, gt=0, le=86_400, description="Longest sound, by its own headers.")
    send_as: Literal["input_audio", "audio_url"] = Field(
        default="input_audio",
        description="input_audio: OpenAI's content part, WAV and MP3; audio_url: vLLM's, with FLAC and Ogg, too.",
    )

    @property
    def row_bytes(self) -> int:
        """Most bytes of all sounds of one row, as they are sent."""
        return min(MOST_AUDIO_BYTES, super().row_bytes)


def _media_kind(value: object) -> str:
    return "column" if isinstance(value, str) else "columns" if isinstance(value, list) else "section"


_Columns = Annotated[list[Column], Field(min_length=1, max_length=20), Tag("columns")]
Images = Annotated[
    Annotated[Column, Tag("column")] | _Columns | Annotated[ImagesSpec, Tag("section")], Discriminator(_media_kind)
]
Audio = Annotated[
    Annotated[Column, Tag("column")] | _Columns | Annotated[AudioSpec, Tag("section")], Discriminator(_media_kind)
]
