"""Bounded reading over HTTP: bytes, seconds and encodings; keys; addresses never connected to; TLS files."""

__all__ = ["addresses", "bounded_read", "key_variables", "small_pages", "tls_files"]
