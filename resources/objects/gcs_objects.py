"""Objects in a bucket of Google Cloud Storage. Keys come from the environment: GOOGLE_APPLICATION_CREDENTIALS, or
GOOGLE_SERVICE_ACCOUNT with the path of a service account's key, or what a machine of Google's has. A create is a PUT
with `x-goog-if-generation-match: 0`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from resources.objects.bucket_objects import BucketObjects

_KEYS = ("google_service_account", "google_application_credentials")


class GcsObjects(BucketObjects):
    """Objects below a prefix of a bucket of Google Cloud Storage."""

    scheme = "gs"

    def _opened(self) -> Any:
        from obstore.store import GCSStore

        return GCSStore(
            self.bucket,
            prefix=self.prefix or None,
            client_options={"allow_http": True, "timeout": self._timeout},
            retry_config=self._retry,
        )

    def delete_many(self, paths: Sequence[str]) -> None:
        self.delete(paths)  # there is no request for many, and of many that run beside each other one may be gone

    def storage_options(self) -> dict[str, str]:
        found = {name: os.environ.get(name.upper(), "") for name in _KEYS}
        return {name: value for name, value in found.items() if value} or {"google_skip_signature": "false"}
