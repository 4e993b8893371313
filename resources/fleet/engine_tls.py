"""Certificates for connections to engines: of an engine in fleet.yaml, and of the engine that the environment names."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, model_validator

from gpu_runner.bounded_http.tls_files import TlsFiles
from gpu_runner.errors import ExitStatus, UserFacingError

CA, CERTIFICATE, KEY = "BATCH_ASSETS_ENGINE_CA", "BATCH_ASSETS_ENGINE_CERTIFICATE", "BATCH_ASSETS_ENGINE_KEY"


class EngineTlsError(UserFacingError):
    """The environment names one of two files that belong together."""

    exit_status = ExitStatus.WRONG_REQUEST


class EngineTls(BaseModel):
    """Files in PEM, read again when they change. Relative paths start at the folder of `fleet.yaml`."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    ca: Path | None = Field(default=None, description="authorities of the engine's certificate; none: the system's")
    certificate: Path | None = Field(default=None, description="what we show to an engine that asks for a certificate")
    key: Path | None = Field(default=None, description="its private key, not encrypted")

    @model_validator(mode="after")
    def _belong_together(self) -> EngineTls:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("certificate, key: expected both or none")
        return self

    def below(self, folder: Path) -> EngineTls:
        """The same with paths from `folder` on."""
        named = {name: path for name in ("ca", "certificate", "key") if (path := getattr(self, name)) is not None}
        return self.model_copy(update={name: folder.resolve() / path.expanduser() for name, path in named.items()})

    def files(self) -> TlsFiles:
        """What connections use."""
        return TlsFiles(self.certificate, self.key, self.ca)


def tls_of_environment() -> TlsFiles | None:
    """Files for the engine of `--endpoint` and BATCH_ASSETS_ENDPOINT; None: the system's. Raises EngineTlsError."""
    named = {name: os.environ.get(name, "").strip() for name in (CERTIFICATE, KEY, CA)}
    certificate, key, ca = (Path(value) if value else None for value in named.values())
    if (certificate is None) != (key is None):
        missing = CERTIFICATE if certificate is None else KEY
        raise EngineTlsError(f"{missing}: expected a file, because {CERTIFICATE} and {KEY} belong together")
    return TlsFiles(certificate, key, ca) if certificate or ca else None
