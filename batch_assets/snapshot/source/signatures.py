"""What a file is by its first bytes, where these are of no format that a source has: named, with what to do.

Signatures: https://en.wikipedia.org/wiki/List_of_file_signatures; those of Office Open XML and OpenDocument are names
of members of a zip archive, which stand in it as they are.
"""

from __future__ import annotations

import re

from batch_assets.snapshot.source.errors import SourceError

LOOKED_AT = 1 << 12
_EXPORT = "export its sheet as CSV (in Excel: CSV UTF-8)"
_UNPACK = "unpack it, and pack it with gzip or zstd if it is to stay packed"
_CONVERT = "write its rows to a Parquet, JSONL or CSV file"
_AGAIN = "what was downloaded is a page, such as one for signing in; download the file again"
_SIGNATURES: tuple[tuple[str, str, str], ...] = (
    (
        r"PK\x03\x04.{26}(?:\[Content_Types\]|_rels/|docProps/|xl/)",
        "an Office document such as an Excel workbook",
        _EXPORT,
    ),
    (r"PK\x03\x04.{26}mimetypeapplication/vnd\.oasis", "an OpenDocument file", _EXPORT),
    (r"PK(?:\x03\x04|\x05\x06)", "a zip archive", _UNPACK),
    (r"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "an old Office document such as an Excel workbook (xls)", _EXPORT),
    (r"BZh[1-9](?:1AY&SY|\x17\x72\x45\x38)", "a file packed with bzip2", _UNPACK),
    (r"\xfd7zXZ\x00", "a file packed with xz", _UNPACK),
    (r"\x04\x22\x4d\x18", "a file packed with lz4", _UNPACK),
    (r"7z\xbc\xaf\x27\x1c", "a 7z archive", _UNPACK),
    (r"Rar!\x1a\x07", "a rar archive", _UNPACK),
    (r".{257}ustar[\x00 ]", "a tar archive", "unpack it"),
    (r"PAR1[\x00-\x08\x0e-\x1f]", "a Parquet file", "let its name end in .parquet, or write source.format: parquet"),
    (r"ARROW1\x00\x00|\xff\xff\xff\xff.{3}\x00", "an Arrow file", _CONVERT),
    (r"Obj\x01", "an Avro file", _CONVERT),
    (r"ORC[\x00-\x08\x0e-\x1f]", "an ORC file", _CONVERT),
    (r"SQLite format 3\x00", "an SQLite database", _CONVERT),
    (r"\x89HDF\r\n\x1a\n", "an HDF5 file", _CONVERT),
    (r"%PDF-[0-9]\.", "a PDF file", _CONVERT),
    (r"(?i:\s*<(?:!doctype\s+html|html[\s>]))", "an HTML page", _AGAIN),
    (r"\s*<\?xml\s", "an XML file", _CONVERT),
    (r"version https://git-lfs\.github\.com/spec/", "a pointer of Git LFS in place of the file", "run git lfs pull"),
)
_COMPILED = [(re.compile(pattern.encode("latin-1"), re.DOTALL), what, do) for pattern, what, do in _SIGNATURES]
_PACKED = {b"\x1f\x8b": ("gzip", ".gz"), b"\x28\xb5\x2f\xfd": ("zstd", ".zst")}


def other_kind(name: str, data: bytes) -> str | None:
    """What a file called `name` is that begins with these bytes, and what to do; None where they may be text, or are of
    no known kind.
    """
    for mark, (packer, ending) in _PACKED.items():
        if data.startswith(mark):
            called = re.sub(r"(?i)\.(gz|zst)\Z", "", name.rpartition("/")[2])
            parquet = called.lower().endswith((".parquet", ".pq"))
            twice = name.lower().endswith(ending)
            do = (
                "unpack it"
                if parquet
                else "it is packed twice: unpack it once"
                if twice
                else f"call it {called}{ending}"
            )
            return f"a file packed with {packer}; {do}"
    found = ((what, do) for pattern, what, do in _COMPILED if pattern.match(data[:LOOKED_AT]))
    return next((f"{what}; {do}" for what, do in found), None)


def refuse_other_kind(name: str, data: bytes) -> None:
    """Raise SourceError for the beginning of a text that is of another kind of file."""
    if found := other_kind(name, data):
        raise SourceError(f"{name}: expected text, found {found}")


def text_or_other_kind(name: str, data: bytes) -> str | None:
    """As `other_kind`; text counts as one."""
    if found := other_kind(name, data):
        return found
    if data and not re.search(rb"[\x00-\x08\x0e-\x1f]", data) and _is_utf8(data):
        return "text"
    return None


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return error.start > len(data) - 4  # the last character is cut
    return True
