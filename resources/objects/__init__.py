"""Objects in a folder or in a bucket of S3, behind one small interface.

`opening` is where to begin: it opens a folder (`local_objects`) or a bucket (`s3_objects`) by its address, and tests
it; `object_interface` says what both can do; `store_folder` notices a folder that is gone or another one;
`objects_below` are those of a folder in it; `object_read_ahead` reads many objects at once; `store_health` says
whether they answer.
"""

__all__ = ["object_interface", "object_read_ahead", "objects_below", "opening", "store_health"]
