"""`POST /v1/files`: the file object, forms as clients write them, and every refusal."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.batch_api import BatchApi, is_error

from .conftest import LARGEST_FILE

pytestmark = pytest.mark.slow

CONTENT = b'{"a": 1}\n'
DAY = 86_400
MISSING = "missing_required_parameter"


def form(*parts: tuple[str, bytes], end: bytes = b"--x--\r\n") -> bytes:
    """A multipart body of the boundary `x`, from (Content-Disposition after `form-data; `, content)."""
    whole = b""
    for disposition, content in parts:
        whole += b"--x\r\nContent-Disposition: form-data; " + disposition.encode() + b"\r\n\r\n" + content + b"\r\n"
    return whole + end


FILE = ('name="file"; filename="in.jsonl"', CONTENT)
PURPOSE = ('name="purpose"', b"batch")
KIND = {"content-type": "multipart/form-data; boundary=x"}


def test_the_file_object_has_the_documented_fields(api: BatchApi) -> None:
    file = api.file(CONTENT)
    assert set(file) == {
        "id",
        "object",
        "bytes",
        "created_at",
        "expires_at",
        "filename",
        "purpose",
        "status",
        "status_details",
    }
    assert file["id"].startswith("file-") and file["object"] == "file" and file["bytes"] == len(CONTENT)
    assert (file["filename"], file["purpose"], file["status"]) == ("in.jsonl", "batch", "processed")
    assert isinstance(file["created_at"], int) and file["status_details"] is None


def test_a_file_lives_thirty_days(api: BatchApi) -> None:
    file = api.file()
    assert file["expires_at"] - file["created_at"] == 30 * DAY


@pytest.mark.parametrize("seconds", [3_600, 3_601, 2_592_000])
def test_a_file_lives_as_long_as_it_is_said(api: BatchApi, seconds: int) -> None:
    file = api.file(**{"expires_after[anchor]": "created_at", "expires_after[seconds]": str(seconds)})
    assert file["expires_at"] - file["created_at"] == seconds


@pytest.mark.parametrize("seconds", ["3599", "2592001", "0", "-1", "x", "", "3600.5", "9" * 40, "٣٦٠٠"])
def test_a_life_beyond_its_bounds_is_refused(api: BatchApi, seconds: str) -> None:
    answer = api.upload(CONTENT, **{"expires_after[anchor]": "created_at", "expires_after[seconds]": seconds})
    assert "expires_after" in is_error(answer, 400)["param"]


@pytest.mark.parametrize("fields", [{"expires_after[anchor]": "created_at"}, {"expires_after[seconds]": "3600"}])
def test_half_of_a_life_is_refused(api: BatchApi, fields: dict[str, str]) -> None:
    assert "expires_after" in is_error(api.upload(CONTENT, **fields), 400)["param"]


def test_a_life_from_another_moment_is_refused(api: BatchApi) -> None:
    fields = {"expires_after[anchor]": "last_active_at", "expires_after[seconds]": "3600"}
    assert "expires_after" in is_error(api.upload(CONTENT, **fields), 400)["param"]


@pytest.mark.parametrize("name", ["expires_after", "expires_after[x]", "colour"])
def test_a_field_that_is_not_documented_is_refused(api: BatchApi, name: str) -> None:
    is_error(api.upload(CONTENT, **{name: '{"anchor": "created_at", "seconds": 3600}'}), 400, name, "unknown_parameter")


def test_a_form_without_a_file_is_refused(api: BatchApi) -> None:
    answer = api.client.post("/v1/files", data={"purpose": "batch"}, files={"other": ("a", b"b")})
    is_error(answer, 400, "file")
    is_error(
        api.client.post("/v1/files", content=form(PURPOSE), headers=KIND), 400, "file", "missing_required_parameter"
    )


def test_a_form_without_a_purpose_is_refused(api: BatchApi) -> None:
    answer = api.client.post("/v1/files", files={"file": ("in.jsonl", CONTENT)})
    is_error(answer, 400, "purpose", MISSING)


@pytest.mark.parametrize("purpose", ["nonsense", "", "BATCH", "batch ", "batch_output"])
def test_an_unknown_purpose_is_refused(api: BatchApi, purpose: str) -> None:
    is_error(api.upload(CONTENT, purpose=purpose), 400, "purpose")


def test_a_file_that_is_no_jsonl_is_refused(api: BatchApi) -> None:
    is_error(api.upload(CONTENT, name="in.pdf"), 400)


def test_two_files_are_refused(api: BatchApi) -> None:
    is_error(api.client.post("/v1/files", content=form(FILE, FILE, PURPOSE), headers=KIND), 400, "file")


@pytest.mark.parametrize(
    "kind", ["application/json", "multipart/form-data", "text/plain", "multipart/mixed; boundary=x"]
)
def test_a_body_that_is_no_form_is_refused(api: BatchApi, kind: str) -> None:
    is_error(api.client.post("/v1/files", content=form(PURPOSE, FILE), headers={"content-type": kind}), 400)


@pytest.mark.parametrize("body", [b"garbage", b"", form(PURPOSE, FILE)[:-40], form(PURPOSE, FILE, end=b"")])
def test_a_form_that_is_broken_or_has_no_end_is_refused(api: BatchApi, body: bytes) -> None:
    is_error(api.client.post("/v1/files", content=body, headers=KIND), 400)


@pytest.mark.parametrize("parts", [(FILE, PURPOSE), (PURPOSE, FILE)])
def test_fields_come_in_any_order(api: BatchApi, parts: tuple[tuple[str, bytes], ...]) -> None:
    answer = api.client.post("/v1/files", content=form(*parts), headers=KIND)
    assert answer.status_code == 200 and answer.json()["bytes"] == len(CONTENT), answer.text


@pytest.mark.parametrize("around", [(b"preamble\r\n", b""), (b"\r\n", b""), (b"", b"epilogue")])
def test_what_stands_around_a_form_is_no_part_of_it(api: BatchApi, around: tuple[bytes, bytes]) -> None:
    before, behind = around
    answer = api.client.post("/v1/files", content=before + form(PURPOSE, FILE) + behind, headers=KIND)
    if answer.status_code == 200:
        assert api.content(answer.json()["id"]) == CONTENT
    else:
        is_error(answer, 400)


def test_a_quoted_boundary_and_a_chunked_body_are_read(api: BatchApi) -> None:
    def parts() -> Iterator[bytes]:
        whole = form(PURPOSE, FILE)
        yield from (whole[start : start + 7] for start in range(0, len(whole), 7))

    kind = {"content-type": 'multipart/form-data; boundary="x"'}
    answer = api.client.post("/v1/files", content=parts(), headers=kind)
    assert answer.status_code == 200, answer.text
    assert api.content(answer.json()["id"]) == CONTENT


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ('filename="eingabe-ü-日本.jsonl"', "eingabe-ü-日本.jsonl"),
        ('filename="a%22b.jsonl"', 'a"b.jsonl'),
        ('filename="../../etc/in.jsonl"', "in.jsonl"),
        (r'filename="C:\dir\in.jsonl"', "in.jsonl"),
        ('filename="no-extension"', "no-extension"),
        ('filename="IN.JSONL"', "IN.JSONL"),
    ],
)
def test_names_of_files(api: BatchApi, name: str, shown: str) -> None:
    part = (f'name="file"; {name}', CONTENT)
    answer = api.client.post("/v1/files", content=form(PURPOSE, part), headers=KIND)
    assert answer.status_code == 200, answer.text
    assert answer.json()["filename"] == shown
    content = api.client.get(f"/v1/files/{answer.json()['id']}/content")
    assert content.content == CONTENT


def test_a_long_name_is_no_failure(api: BatchApi) -> None:
    answer = api.upload(CONTENT, name="n" * 3_000 + ".jsonl")
    assert answer.status_code in (200, 400), answer.text


@pytest.mark.parametrize(
    "content",
    [bytes(range(256)) * 300, b"", b"\r\n--y\r\n--x", b"\r\n" * 5_000, b"--x", "ü\u2028\n".encode() * 100],
)
def test_the_content_is_kept_byte_for_byte(api: BatchApi, content: bytes) -> None:
    file = api.file(content)
    assert file["bytes"] == len(content) and api.content(file["id"]) == content


def test_a_file_above_the_limit_is_refused(api: BatchApi) -> None:
    answer = api.upload(b"x" * (LARGEST_FILE + 1))
    assert answer.status_code in (400, 413)
    is_error(answer, answer.status_code)


def test_a_file_at_the_limit_is_taken(api: BatchApi) -> None:
    assert api.file(b"x" * LARGEST_FILE)["bytes"] == LARGEST_FILE
