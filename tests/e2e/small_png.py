"""Pictures of the screen as PNGs with a palette: a third of the bytes, and no difference that one sees."""

from __future__ import annotations

import base64
import struct
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from playwright.sync_api import Page

COLOURS = 256
BITS = 5  # of each channel: colours that agree in them count as one
PIXELS = """async png => {
  const image = await createImageBitmap(await (await fetch('data:image/png;base64,' + png)).blob());
  const context = new OffscreenCanvas(image.width, image.height).getContext('2d');
  context.drawImage(image, 0, 0);
  const { data } = context.getImageData(0, 0, image.width, image.height);
  let text = '';
  for (let i = 0; i < data.length; i += 32768) text += String.fromCharCode(...data.subarray(i, i + 32768));
  return [image.width, image.height, btoa(text)];
}"""


def shoot(page: Page, file: Path) -> None:
    """The whole page, also what is below the screen."""
    png = base64.b64encode(page.screenshot(full_page=True)).decode()
    width, height, pixels = page.evaluate(PIXELS, png)
    rgb = np.frombuffer(base64.b64decode(pixels), np.uint8).reshape(height, width, 4)[:, :, :3]
    file.write_bytes(with_palette(rgb))


def with_palette(rgb: npt.NDArray[np.uint8]) -> bytes:
    """A PNG of the most frequent colours; each of the others is the nearest of these. `rgb`: height, width, 3."""
    height, width, _ = rgb.shape
    numbers = rgb.reshape(-1, 3).astype(np.int32) @ np.array([1 << 16, 1 << 8, 1], np.int32)
    codes, which, counts = np.unique(numbers, return_inverse=True, return_counts=True)
    found = np.stack([codes >> 16, codes >> 8 & 255, codes & 255], axis=1).astype(np.uint8)
    palette = _palette(found, counts)
    nearest = np.array([np.abs(palette.astype(int) - colour).sum(axis=1).argmin() for colour in found.astype(int)])
    lines = np.zeros((height, width + 1), np.uint8)  # each begins with the filter 0: none
    lines[:, 1:] = nearest[which.reshape(-1)].reshape(height, width)
    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    parts = ((b"IHDR", header), (b"PLTE", palette.tobytes()), (b"IDAT", zlib.compress(lines.tobytes(), 9)))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in (*parts, (b"IEND", b"")))


def _palette(colours: npt.NDArray[np.uint8], counts: npt.NDArray[np.intp]) -> npt.NDArray[np.uint8]:
    """Of those that are much alike only the most frequent one: shades of letters' edges would take all places."""
    order = np.argsort(-counts, kind="stable")
    _, first = np.unique((colours >> (8 - BITS))[order], axis=0, return_index=True)
    palette: npt.NDArray[np.uint8] = colours[order[np.sort(first)[:COLOURS]]]
    return palette


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
