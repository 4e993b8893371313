"""Images of rows. Nothing is decoded before its size in bytes and pixels is known to be allowed. A row's key has the
digest of an image as it came, so that another version of Pillow asks for no row again.
"""

from __future__ import annotations

import hashlib
import io
import math
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from batch_assets.snapshot.prompts.messages import Message
from batch_assets.snapshot.prompts.row_media import RowMedia, RowMedium, data_url
from batch_assets.snapshot.source.errors import SourceError
from batch_assets.spec.media import ImagesSpec
from batch_assets.spec.sampling_values import Unfit

if TYPE_CHECKING:
    from PIL.Image import Image

DECODED_AT_ONCE = 2  # of the largest images each takes some hundred megabytes
_MEDIA = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp", "GIF": "image/gif"}
_JPEG = ("JPEG", "MPO")  # as cameras write it, with further pictures behind the first one
_EXPECTED = "a PNG, JPEG, WebP or GIF image"


class RowImages(RowMedia):
    """Those of a spec. `base`: where relative folders start. Raises SourceError without Pillow, or for a folder that is
    none."""

    named, expected, too_large = "images", _EXPECTED, "Set max_pixels, which scales them down"

    def __init__(self, spec: ImagesSpec, base: Path) -> None:
        if find_spec("PIL") is None:
            raise SourceError("prompt.images: expected the package Pillow: install batch-assets[images]")
        super().__init__(spec, base, "prompt.images")
        self._limits, self._decoding = spec, threading.Semaphore(DECODED_AT_ONCE)

    def part(self, medium: RowMedium, *, keyed: bool) -> Message:
        """OpenAI's content part."""
        return {"image_url": {"url": medium.key if keyed else medium.url}, "type": "image_url"}

    def read(self, data: bytes) -> RowMedium:
        """Decodes it once, so that a broken one is found. Raises Unfit."""
        from PIL import Image, UnidentifiedImageError

        digest = hashlib.sha256(data).hexdigest()
        with self._decoding:
            try:
                with Image.open(io.BytesIO(data), formats=tuple(_MEDIA)) as image:
                    kind, (wide, high) = "JPEG" if image.format in _JPEG else str(image.format), image.size
                    if wide * high > self._limits.max_source_pixels:
                        raise _too_large(f"{wide:,} × {high:,}", self._limits)
                    most = self._limits.max_pixels
                    if most is None or wide * high <= most:
                        image.draft(
                            "L", (max(1, wide // 8), max(1, high // 8))
                        )  # of JPEG alone: reads all, writes less
                        image.load()
                        return RowMedium(data_url(_MEDIA[kind], data), digest)
                    sent, media = _scaled(image, most)
                    return RowMedium(data_url(media, sent), f"{digest} of at most {most} pixels")
            except Unfit:
                raise
            except UnidentifiedImageError:
                found = "SVG" if b"<svg" in data[:1000].lower() else "another format, or a broken one"
                raise Unfit(f"expected {_EXPECTED} by its content, found {found}") from None
            except (Image.DecompressionBombError, Image.DecompressionBombWarning):
                raise _too_large("far more", self._limits) from None
            except Exception as error:  # Pillow's decoders have no error of their own
                raise Unfit(f"expected a whole image, found a broken one ({type(error).__name__})") from None


def _too_large(found: str, spec: ImagesSpec) -> Unfit:
    return Unfit(f"expected at most {spec.max_source_pixels:,} pixels (max_source_pixels), found {found}")


def _scaled(image: Image, most: int) -> tuple[bytes, str]:
    """An image of at most so many pixels, and its media type: JPEG stays JPEG, all else is PNG."""
    from PIL import Image as pil
    from PIL import ImageOps

    wide, high = image.size
    share = math.sqrt(most / (wide * high))
    size = max(1, math.floor(wide * share)), max(1, math.floor(high * share))
    jpeg = image.format in _JPEG
    if jpeg:
        image.draft("RGB", size)
    image.load()
    upright = ImageOps.exif_transpose(image)
    if upright.size[0] * upright.size[1] and (upright.size[0] > upright.size[1]) != (wide > high):
        size = size[1], size[0]
    wanted = "RGB" if jpeg else "RGBA" if upright.has_transparency_data else "RGB"
    small = upright.convert(wanted).resize(size, pil.Resampling.LANCZOS)
    written = io.BytesIO()
    small.save(written, "JPEG" if jpeg else "PNG", **({"quality": 90} if jpeg else {}))
    return written.getvalue(), "image/jpeg" if jpeg else "image/png"
