"""Objects in an S3 bucket; keys and region by boto3's usual chain. A create is a PUT with `If-None-Match: *`."""

from __future__ import annotations

import os
from typing import Any

from resources.objects.bucket_objects import BucketObjects
from resources.objects.object_interface import StoreError


class S3Objects(BucketObjects):
    """Objects below a prefix of an S3 bucket (path-style on a custom endpoint)."""

    scheme = "s3"

    def _opened(self) -> Any:
        from obstore.auth.boto3 import Boto3CredentialProvider
        from obstore.store import S3Store

        endpoint = _s3_endpoint()
        config: dict[str, Any] = {"region": _s3_region()}
        if endpoint:
            config |= {"endpoint": endpoint, "virtual_hosted_style_request": False}
        return S3Store(
            self.bucket,
            prefix=self.prefix or None,
            credential_provider=Boto3CredentialProvider(),
            client_options={"allow_http": bool(endpoint and endpoint.startswith("http://")), "timeout": self._timeout},
            retry_config=self._retry,
            **config,
        )

    def storage_options(self) -> dict[str, str]:
        import boto3

        options = {"aws_region": _s3_region()}
        if endpoint := _s3_endpoint():
            options |= {"aws_endpoint_url": endpoint, "aws_virtual_hosted_style_request": "false"}
            if endpoint.startswith("http://"):
                options["aws_allow_http"] = "true"
        credentials = boto3.Session().get_credentials()
        if credentials is not None:
            frozen = credentials.get_frozen_credentials()
            options |= {"aws_access_key_id": frozen.access_key, "aws_secret_access_key": frozen.secret_key}
            if frozen.token:
                options["aws_session_token"] = frozen.token
        return options


def _s3_endpoint() -> str | None:
    """Address of an S3 server that is not Amazon's. Raises StoreError for one with a secret in it: errors show it."""
    name = "AWS_ENDPOINT_URL_S3" if os.environ.get("AWS_ENDPOINT_URL_S3") else "AWS_ENDPOINT_URL"
    found = os.environ.get(name)
    if found and {"@", "?", "#"} & set(found):
        raise StoreError(f"{name}: expected an address without user, password, query or fragment")
    return found


def _s3_region() -> str:
    return os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
