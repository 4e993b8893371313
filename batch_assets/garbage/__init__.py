"""What in the store nobody needs any more: `unreferenced` finds it, `collect` deletes it when it is told to."""

__all__ = ["collect", "unreferenced"]
