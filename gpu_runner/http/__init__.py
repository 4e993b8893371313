"""Bounded reading over HTTP: bytes, seconds and encodings; which addresses are never connected to; TLS from files."""

__all__ = ["addresses", "bounded_read", "small_pages", "tls_files"]
