"""`/v1/files`: uploads streamed to the store, and what is said of files.

`routes` has the calls, `upload` reads multipart bodies in bounded memory, `contents` moves bytes between the store and
temporary files.
"""

__all__ = ["contents", "routes", "upload"]
