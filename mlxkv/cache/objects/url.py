"""The URL of an object store: what may be one."""

from __future__ import annotations

from urllib.parse import urlsplit

from ...errors import ConfigError

SCHEMES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "file")


def check_url(url: str) -> str:
    """The URL of a store, if it may be one. Raises ConfigError."""
    example = "It looks like s3://bucket/prefix, gs://bucket/prefix, az://container/prefix or file:///folder."
    try:
        parts = urlsplit(url)
    except ValueError as e:
        raise ConfigError(f"The object store {url!r} is no URL: {e}.", example) from None
    if parts.scheme == "file" and (parts.query or parts.fragment):
        raise ConfigError(
            f"The object store {url!r} has a ? or # in it, which ends a path.", "In a folder's name: %3F and %23."
        )
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ConfigError(
            "The object store's URL has credentials or parameters in it.",
            "They belong in the environment: AWS_ACCESS_KEY_ID, GOOGLE_…, AZURE_…; see docs/object-store.md.",
        )
    if parts.scheme not in SCHEMES:
        raise ConfigError(f"The object store {url!r} is of no kind that is known.", example)
    if parts.scheme == "file" and (parts.netloc or not parts.path.startswith("/") or not parts.path.strip("/")):
        raise ConfigError(f"The object store {url!r} names no folder.", "A folder is named from the root: file:///…")
    if parts.scheme != "file" and not parts.netloc:
        raise ConfigError(f"The object store {url!r} names no bucket.", example)
    return url
