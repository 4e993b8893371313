"""Which folders Dagster's component loader reads: one that it cannot read stops no other."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def leave_out_folders(folders: Collection[Path]) -> Iterator[dict[Path, Exception]]:
    """While the body loads a folder of definitions, these folders in it are passed over.

    So is what cannot be read: yields a mapping that fills with the paths of that, and why. Dagster itself would load
    nothing at all (dagster/components/core/decl.py).
    """
    from dagster.components.core import component_tree, decl
    from dagster.components.core.defs_module import ComponentPath

    read = decl.build_filesystem_component_decl_from_context
    left_out = {_place(folder) for folder in folders}
    failed: dict[Path, Exception] = {}

    def read_or_leave_out(context: Any) -> Any:
        if _place(context.path) in left_out:
            return None
        try:
            return read(context)
        except Exception as error:
            failed[context.path] = error
            return None

    def read_root(context: Any) -> Any:
        """Where nothing is left in the folder, Dagster would raise an error."""
        place = ComponentPath.from_path(context.path)
        empty = decl.DefsFolderDecl(
            context=context, loc=place, children={}, source_tree=None, component_file_model=None
        )
        return read(context) or empty

    with _replaced(decl, read.__name__, read_or_leave_out), _replaced(component_tree, read.__name__, read_root):
        yield failed


@contextlib.contextmanager
def _replaced(module: Any, name: str, value: object) -> Iterator[None]:
    """Set what a module has under a name while the body runs. Raises AttributeError when Dagster names it otherwise."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def _place(path: Path) -> Path:
    """The path without links on the way to it; itself, it may be one."""
    return path.parent.resolve() / path.name
