"""Types of Parquet columns: as the snapshot keeps them, as Python has them, and what those of several files have in
common."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa


def plain_type(kind: pa.DataType) -> pa.DataType:
    """The type without dictionary encoding, extension or 64-bit offsets: what the snapshot keeps."""
    if isinstance(kind, pa.BaseExtensionType):
        return plain_type(kind.storage_type)
    if pa.types.is_dictionary(kind):
        return plain_type(kind.value_type)
    if pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind):
        return pa.binary()
    return kind


def parts(kind: pa.DataType) -> list[pa.DataType]:
    """The types of its values, and of values within them."""
    found: list[pa.DataType] = []

    def note(one: pa.DataType) -> pa.DataType:
        found.append(one)
        return one

    _within(kind, note)
    return found


def holds_null(kind: pa.DataType) -> bool:
    """Whether it is, or holds, the type of nothing but nulls."""
    return any(map(pa.types.is_null, parts(kind)))


def joined(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """The first type, with those of the second where it knows only nulls; None where the second has other values.
    Offsets, dictionaries and names of list elements make no difference.
    """
    if pa.types.is_null(one) or pa.types.is_null(other):
        return other if pa.types.is_null(one) else one
    if _is_list(one) and _is_list(other):
        inner = joined(one.value_type, other.value_type)
        return None if inner is None else one if inner == one.value_type else pa.list_(inner)
    if pa.types.is_struct(one) and pa.types.is_struct(other):
        return _joined_struct(one, other)
    return one if _within(one, plain_type) == _within(other, plain_type) else None


def _joined_struct(one: pa.StructType, other: pa.StructType) -> pa.DataType | None:
    if [field.name for field in one] != [field.name for field in other]:
        return None
    kinds = [joined(mine.type, theirs.type) for mine, theirs in zip(one, other, strict=True)]
    if None in kinds:
        return None
    if all(kind == field.type for kind, field in zip(kinds, one, strict=True)):
        return one
    return pa.struct([field.with_type(kind) for kind, field in zip(kinds, one, strict=True)])


def python_type(kind: pa.DataType) -> pa.DataType:
    """The type whose values Python has without pandas, which pyarrow takes for nanoseconds where it is installed: the
    same prompt on every machine."""
    return _within(kind, _microseconds)


def _microseconds(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_duration(kind) and kind.unit == "ns":
        return pa.duration("us")
    if pa.types.is_timestamp(kind) and kind.unit == "ns":
        return pa.timestamp("us", kind.tz)
    return kind


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _within(kind: pa.DataType, change: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    """The type with each part that has no parts changed; the same one where nothing is."""
    if not pa.types.is_nested(kind):
        return change(kind)
    if pa.types.is_struct(kind):
        kinds = [_within(field.type, change) for field in kind]
        if all(found == field.type for found, field in zip(kinds, kind, strict=True)):
            return kind
        return pa.struct([field.with_type(found) for found, field in zip(kinds, kind, strict=True)])
    if pa.types.is_map(kind):
        key, item = _within(kind.key_type, change), _within(kind.item_type, change)
        return kind if (key, item) == (kind.key_type, kind.item_type) else pa.map_(key, item)
    if not hasattr(kind, "value_type"):
        return kind
    inner = _within(kind.value_type, change)
    if inner == kind.value_type:
        return kind
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(inner, kind.list_size)
    return pa.large_list(inner) if pa.types.is_large_list(kind) else pa.list_(inner)
