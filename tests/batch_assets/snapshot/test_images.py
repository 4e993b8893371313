"""Images of rows: what is sent, what the row's key holds, what the table shows, and what is refused and why."""

from __future__ import annotations

import base64
import hashlib
import http.server
import io
import json
import os
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from support.dataset_project import MODEL, dataset_project
from support.plain_engine import plain_engine

from batch_assets.asset_metadata.sample_rows import sample_markdown
from batch_assets.capacity_planning.preview_rows import first_rows
from batch_assets.capacity_planning.workload_estimate import prompt_tokens
from batch_assets.component import spec_version
from batch_assets.publishing.published_table import published_table
from batch_assets.snapshot.builder import build_snapshot
from batch_assets.snapshot.prompts.images import RowImages
from batch_assets.snapshot.prompts.row_media import RowMedium
from batch_assets.snapshot.source.block import Block
from batch_assets.snapshot.source.errors import SourceError
from batch_assets.spec.media import ImagesSpec
from batch_assets.spec.models import GeneratedDatasetSpec, SpecError, load_spec
from gpu_runner.bounded_http.addresses import AddressRefused, refuse_private
from gpu_runner.rows import Row
from resources.objects.opening import Objects
from resources.store.dataset_store import DatasetStore


def picture(kind: str = "PNG", size: tuple[int, int] = (60, 40), mode: str = "RGB") -> bytes:
    written = io.BytesIO()
    Image.effect_mandelbrot(size, (-2, -1, 1, 1), 20).convert(mode).save(written, kind)
    return written.getvalue()


def data_url(data: bytes) -> str:
    return f"data:application/x;base64,{base64.b64encode(data).decode()}"


def read(cells: list[Any], base: Path, **options: Any) -> tuple[list[list[RowMedium]], dict[int, str]]:
    refused: dict[int, str] = {}
    block = Block("a.parquet", list(range(1, len(cells) + 1)), {"photo": cells})
    return RowImages(ImagesSpec(columns=["photo"], **options), base).of(block, refused), refused


def sent(image: RowMedium) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(image.url.partition(",")[2])))


def spec_of(folder: Path, **prompt: Any) -> GeneratedDatasetSpec:
    least = {"name": "d", "source": {"path": "a.parquet"}, "model": "tiny", "id": "id", "on_bad_row": "skip"}
    return load_spec(least | {"prompt": {"user": "What is it?", "images": "photo", **prompt}}, folder / "defs.yaml")


def rows_of(folder: Path, objects: Objects, **prompt: Any) -> dict[str, Row]:
    store, number = DatasetStore(objects, "d"), len(list(folder.glob("work-*")))
    spec = spec_of(folder, **prompt)
    manifest = build_snapshot(spec, store, now=1.0, workdir=folder / f"work-{number}", base=folder)
    assert manifest.images and manifest.conversations
    return {row.row_id: row for _, rows in store.rows(manifest, store.entries(manifest.snapshot)) for row in rows}


@pytest.mark.slow
def test_rows_ask_with_their_images_and_the_table_has_only_their_digests(tmp_path: Path):
    one, other = picture(), picture("JPEG")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "b.jpg").write_bytes(other)
    lines = [{"id": "a", "photo": data_url(one)}, {"id": "b", "photo": "b.jpg"}, {"id": "c", "photo": "../b.jpg"}]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    prompt = {"user": "What is it?", "system": "s", "images": {"columns": ["photo"], "folders": ["photos"]}}
    with plain_engine(MODEL) as engine, dataset_project(tmp_path, prompt=prompt, on_bad_row="skip") as site:
        assert site.materialize("prompts").success
        assert site.run_rows("00000", "00000", engine.url).success
        contents = [asked["messages"][1]["content"] for asked in engine.requests]
        urls = {f"data:image/png;base64,{base64.b64encode(one).decode()}"}
        urls |= {f"data:image/jpeg;base64,{base64.b64encode(other).decode()}"}
        assert {parts[0]["image_url"]["url"] for parts in contents} == urls
        assert {orjson.dumps(parts[1:]) for parts in contents} == {b'[{"text":"What is it?","type":"text"}]'}
        assert site.materialize("dataset").success
        table = published_table(site.store)
        assert table is not None
        (file,) = table.files
        data = pq.read_table(pa.BufferReader(site.store.objects.get(f"{table.path}/{file.name}")))
        shown = {line["row_id"]: line["prompt"][1]["content"] for line in data.to_pylist()}
        assert shown.keys() == {"a", "b"} and "base64" not in str(shown) + sample_markdown(site.store, table)
        said = f"sha256:{hashlib.sha256(one).hexdigest()} (image/png, {len(one):,} bytes)"
        assert orjson.loads(shown["a"])[0]["image_url"]["url"] == said


def test_an_image_is_its_content_in_the_key_and_not_where_it_came_from(tmp_path: Path, local_objects: Objects):
    one, other = picture(), picture(size=(61, 40))
    (tmp_path / "a.png").write_bytes(one)
    kinds = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    cells = [{"bytes": one, "path": None}, {"bytes": None, "path": "a.png"}, {"bytes": other, "path": None}]
    pq.write_table(pa.table({"id": ["a", "b", "c"], "photo": pa.array(cells, kinds)}), tmp_path / "a.parquet")
    first = rows_of(tmp_path, local_objects, images={"columns": ["photo"], "folders": ["."]})
    assert first["a"].row_key == first["b"].row_key != first["c"].row_key
    small = rows_of(tmp_path, local_objects, images={"columns": ["photo"], "folders": ["."], "max_pixels": 2400})
    assert {name for name in "abc" if small[name].row_key == first[name].row_key} == {"a", "b"}
    content = orjson.loads(small["c"].prompt)[0]["content"]
    tokens = prompt_tokens(orjson.loads(first["c"].prompt), lambda text: 0.0)
    assert content[0]["type"] == "image_url" and tokens == 4 + 3 * 2  # a token per 28 × 28 pixels
    preview = first_rows(spec_of(tmp_path, images={"columns": ["photo"], "folders": ["."]}), tmp_path, 2)
    assert len(preview) == 2 and "base64" not in str([row.shown() for row in preview])


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_the_format_is_that_of_the_content_and_images_are_scaled_down_on_request_only(tmp_path: Path, kind: str):
    data = picture(kind)
    (whole,), (other,) = read([data, data_url(data)], tmp_path)[0]
    assert whole == other and base64.b64decode(whole.url.partition(",")[2]) == data
    ((same,),) = read([data], tmp_path, max_pixels=2400)[0]
    assert same == whole and whole.key == hashlib.sha256(data).hexdigest()
    ((small,),) = read([data], tmp_path, max_pixels=1024)[0]
    found = sent(small)
    assert found.format == ("JPEG" if kind == "JPEG" else "PNG") and small.key != whole.key
    assert 900 < found.size[0] * found.size[1] <= 1024 and found.size[0] / found.size[1] == pytest.approx(1.5, abs=0.1)


def test_a_scaled_image_stands_upright_and_keeps_what_is_transparent(tmp_path: Path):
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    written = io.BytesIO()
    Image.new("RGB", (90, 60), "red").save(written, "JPEG", exif=exif)
    ((turned,),) = read([written.getvalue()], tmp_path, max_pixels=1350)[0]
    assert sent(turned).size == (30, 45)
    ((clear,),) = read([picture("PNG", (90, 60), "RGBA")], tmp_path, max_pixels=1350)[0]
    assert sent(clear).mode == "RGBA"


def bomb(wide: int, high: int) -> bytes:
    """A PNG of a few bytes that says that it has so many pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", wide, high, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")


def _linked(folder: Path) -> str:
    (folder / "outside.png").write_bytes(picture())
    (folder / "photos" / "link.png").symlink_to(folder / "outside.png")
    return "link.png"


def _sparse(folder: Path) -> str:
    with (folder / "photos" / "large.png").open("wb") as file:
        file.truncate(1 << 30)
    return "large.png"


def _pipe(folder: Path) -> str:
    os.mkfifo(folder / "photos" / "pipe.png")
    return "pipe.png"


def _circle(folder: Path) -> str:
    (folder / "photos" / "a").symlink_to(folder / "photos" / "b")
    (folder / "photos" / "b").symlink_to(folder / "photos" / "a")
    return "a"


SVG = b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>'
HOSTILE: list[tuple[Any, str]] = [
    (SVG, "found SVG"),
    (b"<!doctype html>", "found another format, or a broken one"),
    (b"", "found another format, or a broken one"),
    (picture("BMP"), "found another format, or a broken one"),
    (picture("TIFF"), "found another format, or a broken one"),
    (picture()[:-300], "expected a whole image, found a broken one"),
    (picture("JPEG", (300, 300))[:-900], "expected a whole image, found a broken one"),
    (bomb(50_000, 50_000), "expected at most 32,000,000 pixels (max_source_pixels), found far more"),
    (bomb(8_000, 8_000), "found 8,000 × 8,000"),
    (bomb(100, 100), "expected a whole image, found a broken one"),
    (bytes(5 << 20), "expected at most 4,194,304 bytes (max_bytes), found 5,242,880"),
    (lambda: "data:image/png;base64," + "A" * (100 << 20), "found a data URL of 104,857,622 letters"),
    ("data:image/png,%89PNG", "expected a data URL in base64, data:image/png;base64,…, found another one"),
    ("data:image/png;base64,@@@@", "found other letters in it"),
    ("../outside.png", "found one that leads elsewhere"),
    ("/etc/passwd", "found one that leads elsewhere"),
    ("\0.png", "expected a file that can be read, found none (ValueError)"),
    ("x" * 10_000, "expected a file that can be read, found none (File name too long)"),
    ("not-there.png", "expected a file that can be read, found none (No such file or directory)"),
    (".", "expected a file that can be read, found none (Is a directory)"),
    (_linked, "found one that leads elsewhere"),
    (_sparse, "found a file of 1,073,741,824"),
    (_pipe, "found a folder, a pipe or a device"),
    (_circle, "expected a file that can be read, found none"),
    ("http://127.0.0.1:1/a.png", "expected an address at a host in prompt.images.hosts, found another host"),
    ("http://169.254.169.254/latest/meta-data", "found another host"),
    ("https://user:secret@images.example.com/a.png", "found one with them"),
    ("http://[::1", "found what cannot be read as one"),
    ("http://localhost/a.png?token=secret", "found one that is not connected to"),
    ("http://169.254.169.253/a.png", "found one that is not connected to"),
    ("file:///etc/passwd", "found none"),
    (7, "a path or an address, found another value"),
    ([], "expected a PNG, JPEG, WebP or GIF image, found none"),
    (None, "expected a PNG, JPEG, WebP or GIF image, found none"),
    (["a.png"] * 10_000, "expected at most 8 images (max_count), found 10,000"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cell", "said"), HOSTILE, ids=lambda one: one if isinstance(one, str) and len(one) < 60 else ""
)
def test_an_image_that_cannot_be_used_is_a_reject_with_its_reason(tmp_path: Path, cell: Any, said: str):
    (tmp_path / "photos").mkdir()
    (tmp_path / "outside.png").write_bytes(picture())
    if callable(cell):
        cell = cell(tmp_path) if cell.__code__.co_argcount else cell()
    hosts = ["images.example.com", "localhost", "169.254.169.253"]
    _, refused = read([picture(), cell], tmp_path, folders=["photos"], hosts=hosts)
    assert refused.keys() == {1} and said in refused[1] and refused[1].startswith("prompt.images: ")
    assert "secret" not in refused[1] and len(refused[1]) < 300


def test_images_that_are_too_large_together_are_named_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("batch_assets.spec.media.MOST_IMAGE_BYTES", 9_000)
    noise = Image.frombytes("RGB", (40, 40), os.urandom(4800))
    written = io.BytesIO()
    noise.save(written, "PNG")
    found, refused = read([[written.getvalue()], [written.getvalue()] * 2], tmp_path)
    assert len(found[0]) == 1 and refused.keys() == {1} and "Set max_pixels" in refused[1]


@contextmanager
def web(answer: Callable[[http.server.BaseHTTPRequestHandler], None]) -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(self)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_images_are_fetched_from_listed_hosts_within_bounds(tmp_path: Path):
    tries: list[str] = []

    def answer(asked: http.server.BaseHTTPRequestHandler) -> None:
        tries.append(asked.path)
        status = {"/away": 302, "/gone": 404, "/busy": 503 if tries.count("/busy") < 2 else 200, "/down": 500}
        asked.send_response(status.get(asked.path, 200))
        asked.send_header("Location", "http://169.254.169.254/")
        asked.end_headers()
        if asked.path == "/endless":
            try:
                while True:
                    asked.wfile.write(bytes(1 << 16))
            except OSError:
                return
        asked.wfile.write(picture())

    with web(answer) as host:
        names = ["a.png", "busy", "away", "gone", "endless", "down"]
        cells = [f"http://{host}/{name}" for name in names]
        found, refused = read(cells, tmp_path, hosts=[host])
        assert [len(one) for one in found] == [1, 1, 0, 0, 0, 0]
        said = [
            "a redirect, which is not followed",
            "status 404",
            "4,194,304 bytes (max_bytes), found more",
            "status 500",
        ]
        assert [words in refused[place] for place, words in enumerate(said, 2)] == [True] * 4, refused
        assert tries.count("/busy") == tries.count("/down") == 2 and tries.count("/gone") == 1
        _, refused = read(cells[:1], tmp_path, hosts=["127.0.0.1"])
        assert "found another host" in refused[0]  # without its port


def test_private_addresses_are_refused_whatever_they_are_written_as():
    for address in ("127.0.0.1", "10.1.2.3", "192.168.0.1", "::1", "::ffff:10.0.0.1", "fd00::1", "169.254.169.254"):
        with pytest.raises(AddressRefused):
            refuse_private(address)
    refuse_private("93.184.216.34")


@pytest.mark.parametrize(
    ("attributes", "said"),
    [
        ({"prompt": {"user": "a", "images": {"columns": []}}}, "prompt.images.columns: expected at least"),
        (
            {"prompt": {"user": "a", "images": {"columns": ["p"], "hosts": ["http://x"]}}},
            "expected a host, or host:port",
        ),
        (
            {"prompt": {"user": "a", "images": {"columns": ["p"], "hosts": ["x:99999"]}}},
            "expected a host, or host:port",
        ),
        ({"prompt": {"user": "a", "images": {"columns": ["p"], "max_byte": 1}}}, "Did you mean 'max_bytes'?"),
        ({"prompt": {"messages_from": "m", "images": "p"}}, "prompt.images: expected task chat, and prompt.user"),
        ({"prompt": {"text": "a", "images": "p"}, "task": "completion"}, "found task completion"),
        ({"batch_rows": 5_000}, "batch_rows: expected at most 256 beside prompt.images, found 5000"),
        ({"engine": {"limit_mm_per_prompt": {"image": 2}}}, "engine.limit_mm_per_prompt.image: expected at least 8"),
    ],
)
def test_what_does_not_fit_images_is_refused_when_the_file_is_read(attributes: dict[str, Any], said: str):
    least = {"name": "d", "source": {"path": "a"}, "model": "m", "prompt": {"user": "{{ q }}", "images": "p"}}
    with pytest.raises(SpecError) as caught:
        load_spec(least | attributes, "defs.yaml")
    assert said in str(caught.value)


def test_an_engine_gets_the_limit_and_a_file_without_images_is_as_before(tmp_path: Path):
    made = spec_of(tmp_path, images={"columns": ["photo"], "max_count": 3})
    assert made.engine.arguments() == ('--limit-mm-per-prompt={"image":3}',)
    plain = load_spec({"name": "d", "source": {"path": "a"}, "model": "m", "prompt": {"user": "q"}}, "defs.yaml")
    assert not plain.engine.arguments() and spec_version(plain) != spec_version(made)
    with pytest.raises(SourceError, match="folders: expected a folder, found none at 'nowhere'"):
        RowImages(ImagesSpec(columns=["p"], folders=["nowhere"]), tmp_path)
