"""TLS from files: certificates and keys in PEM, read again when the files change, so that nothing has to be restarted.

Whoever makes a connection asks `RotatingContext.current` for a context; connections that are open keep theirs. New
files are taken when all of them fit together: what a rotation has half written is not used, and tried again.
"""

from __future__ import annotations

import functools
import logging
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from gpu_runner.bounded_http.small_pages import read_file
from gpu_runner.errors import ExitStatus, UserFacingError

log = logging.getLogger(__name__)

MOST_BYTES = 4 << 20  # a bundle of all public authorities has about 250 KB
LOOK_SECONDS = 1.0

Signature = tuple[tuple[int, int, int], ...]


class TlsFilesError(UserFacingError):
    """The files of a certificate, its key or the authorities cannot be used."""

    exit_status = ExitStatus.WRONG_REQUEST


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """`certificate`: ours, with the authorities between it and the root; `key`: its private key, not encrypted.

    `ca`: authorities that the other end's certificate must come from; None: those of the system.
    """

    certificate: Path | None = None
    key: Path | None = None
    ca: Path | None = None

    @property
    def paths(self) -> tuple[Path, ...]:
        """Those that are named."""
        return tuple(path for path in (self.certificate, self.key, self.ca) if path is not None)


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """For a server that shows `certificate`. TLS 1.2 and later. Raises TlsFilesError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _load(context, files)
    return context


def client_context(files: TlsFiles) -> ssl.SSLContext:
    """For a client that checks names and authorities, and shows `certificate` when asked. Raises TlsFilesError."""
    context = _with_authorities(files.ca) if files.ca else ssl.create_default_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if files.certificate is not None:
        _load(context, files)
    return context


class RotatingContext:
    """The context of some files as they are now. Safe to use from several threads. `clock`: monotonic seconds.

    `current` looks at the files at most every `look_seconds`; files that cannot be used leave the context as it is, and
    are logged once.
    """

    def __init__(
        self,
        files: TlsFiles,
        make: Callable[[TlsFiles], ssl.SSLContext],
        *,
        clock: Callable[[], float] = time.monotonic,
        look_seconds: float = LOOK_SECONDS,
    ) -> None:
        self.files, self._make, self._clock, self._look_seconds = files, make, clock, look_seconds
        self._lock = threading.Lock()
        self._signature = _signature(files)
        self._context = make(files)
        self.ends_at = _end_of(files.certificate)  # Unix seconds; None without a certificate
        self._looked_at = clock()
        self._refused: Signature | None = None

    def current(self) -> ssl.SSLContext:
        """For a new connection. Raises nothing."""
        with self._lock:
            now = self._clock()
            if now - self._looked_at >= self._look_seconds:
                self._looked_at = now
                self._look()
            return self._context

    def _look(self) -> None:
        found = None
        try:
            found = _signature(self.files)  # before the files are read: what changes meanwhile is looked at again
            if found in (self._signature, self._refused):
                return
            context, ends_at = self._make(self.files), _end_of(self.files.certificate)
        except TlsFilesError as error:
            if found is None or found != self._refused:
                log.error("TLS files were changed and cannot be used, those of before stay in use: %s", error)
            self._refused = found
            return
        self._context, self._signature, self._refused, self.ends_at = context, found, None, ends_at
        log.warning("TLS files were changed and are in use: %s", ", ".join(str(path) for path in self.files.paths))

    def for_handshakes(self) -> ssl.SSLContext:
        """A context for a server that keeps one for ever: every handshake gets the current certificate."""
        outer = self._make(self.files)

        def choose(connection: ssl.SSLSocket | ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
            connection.context = self.current()

        outer.sni_callback = choose  # OpenSSL calls it without a server name in the handshake, too
        return outer


@functools.cache
def client_tls(files: TlsFiles) -> RotatingContext:
    """The one context of this process for these files. Raises TlsFilesError."""
    return RotatingContext(files, client_context)


def ssl_of(files: TlsFiles | None) -> ssl.SSLContext | bool:
    """What aiohttp's `ssl` is to be for a request made now: other files mean another connection. Raises TlsFilesError
    the first time that the files are used.
    """
    return True if files is None else client_tls(files).current()


def _signature(files: TlsFiles) -> Signature:
    """Other than before when a file was written, replaced, or a link to it was turned. Raises TlsFilesError."""
    return tuple(_stat(path) for path in files.paths)


def _stat(path: Path) -> tuple[int, int, int]:
    try:
        found = path.stat()
    except OSError as error:
        raise _unreadable(path, error) from None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _load(context: ssl.SSLContext, files: TlsFiles) -> None:
    certificate, key = files.certificate, files.key
    assert certificate is not None
    if "PRIVATE KEY" not in _text(key or certificate):
        raise TlsFilesError(f"{key or certificate}: expected a private key in PEM, found none")
    ends_at = _end_of(certificate)
    if ends_at is not None and ends_at <= time.time():
        ended = datetime.fromtimestamp(ends_at, UTC)
        raise TlsFilesError(
            f"{certificate}: expected a certificate that is valid, found one that ended {ended:%F %R} UTC"
        )
    try:
        context.load_cert_chain(certificate, key, password=lambda: "")
    except ssl.SSLError as error:
        said = "found one that is not the certificate's, encrypted or damaged"
        raise TlsFilesError(
            f"{key or certificate}: expected the private key of {certificate}, {said} ({error.reason})"
        ) from None
    except OSError as error:
        raise _unreadable(certificate, error) from None


def _with_authorities(path: Path) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cadata=_text(path))
    except ssl.SSLError:
        raise TlsFilesError(f"{path}: expected certificates of authorities in PEM, found something else") from None


def _end_of(certificate: Path | None) -> float | None:
    """When the first certificate of the file ends, in Unix seconds. Raises TlsFilesError."""
    if certificate is None:
        return None
    from cryptography import x509  # slow to import, and wanted by those who have a certificate

    try:
        found = x509.load_pem_x509_certificates(_text(certificate).encode())
    except ValueError:
        raise TlsFilesError(f"{certificate}: expected certificates in PEM, found something else") from None
    return found[0].not_valid_after_utc.timestamp()


def _text(path: Path) -> str:
    try:
        text = read_file(path, MOST_BYTES).decode("ascii", "ignore")  # comments may be of any letters
    except OSError as error:
        raise _unreadable(path, error) from None
    if "-----BEGIN " not in text:
        raise TlsFilesError(f"{path}: expected PEM (-----BEGIN …), found something else")
    return text


def _unreadable(path: Path, error: OSError) -> TlsFilesError:
    return TlsFilesError(f"{path}: expected a file that can be read, found: {error.strerror or type(error).__name__}")
