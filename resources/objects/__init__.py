"""Objects in a folder, or in a bucket of S3 or of Google Cloud Storage, behind one small interface.

`opening` is where to begin: it opens a folder (`local_objects`) or a bucket (`bucket_objects`: what `s3_objects` and
`gcs_objects` have in common) by its address, and tests it; `object_interface` says what all can do; `store_folder`
notices a folder that is gone or another one; `objects_below` are those of a folder in it; `object_read_ahead` reads
many objects at once; `store_health` says whether they answer. `ranged_file` makes a file of what is read in ranges;
`hub_client` is the way to the Hugging Face hub, whose files are read, but which is no store.
"""

__all__ = [
    "hub_client",
    "object_interface",
    "object_read_ahead",
    "objects_below",
    "opening",
    "ranged_file",
    "store_health",
]
