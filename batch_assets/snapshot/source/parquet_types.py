"""Types of Parquet columns: as the snapshot keeps them, as Python has them, and what those of several files have in
common."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa

# Of each row, a type holds all values of those before it, which Python has as the same ones. Time stamps in nanoseconds
# are in none: they are written with nine digits.
_WIDER = (
    (pa.int8(), pa.int16(), pa.int32(), pa.int64()),
    (pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()),
    (pa.uint8(), pa.int16(), pa.int32(), pa.int64()),
    (pa.uint16(), pa.int32(), pa.int64()),
    (pa.uint32(), pa.int64()),
    (pa.float16(), pa.float32(), pa.float64()),
    (pa.time32("s"), pa.time32("ms"), pa.time64("us"), pa.time64("ns")),
    (pa.timestamp("s"), pa.timestamp("ms"), pa.timestamp("us")),
    (pa.duration("s"), pa.duration("ms"), pa.duration("us")),
)


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


def may_widen(kind: pa.DataType) -> bool:
    """Whether another file may have a type that holds its values and more: it is, or holds, the type of nothing but
    nulls, or one of less than 64 bits, or of coarser times than microseconds."""
    bare = [pa.timestamp(one.unit) if pa.types.is_timestamp(one) else one for one in parts(kind)]
    return any(pa.types.is_null(one) or any(one in row[:-1] for row in _WIDER) for one in bare)


def joined(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """The first type, with those of the second where it knows only nulls, or has fewer bits; None where the second has
    other values. Offsets, dictionaries, names of list elements and the order of fields make no difference.
    """
    if pa.types.is_null(one) or pa.types.is_null(other):
        return other if pa.types.is_null(one) else one
    if _is_list(one) and _is_list(other):
        inner = joined(one.value_type, other.value_type)
        return None if inner is None else one if inner == one.value_type else pa.list_(inner)
    if pa.types.is_struct(one) and pa.types.is_struct(other):
        return _joined_struct(one, other)
    mine, theirs = _within(one, plain_type), _within(other, plain_type)
    return one if mine == theirs else _wider(mine, theirs)


def _wider(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """The type that holds the values of both, and writes them in a prompt as each does by itself; None without one."""
    if pa.types.is_timestamp(one) and pa.types.is_timestamp(other) and one.tz is not None and one.tz == other.tz:
        finer = _wider(pa.timestamp(one.unit), pa.timestamp(other.unit))
        return None if finer is None else pa.timestamp(finer.unit, one.tz)
    rows = [row for row in _WIDER if one in row and other in row]
    return max(one, other, key=lambda kind: rows[0].index(kind)) if rows else None


def _joined_struct(one: pa.StructType, other: pa.StructType) -> pa.DataType | None:
    mine, theirs = ([field.name for field in kind] for kind in (one, other))
    if sorted(mine) != sorted(theirs) or (mine != theirs and len(set(mine)) < len(mine)):
        return None
    fields = list(other) if mine == theirs else [other.field(name) for name in mine]
    kinds = [joined(field.type, same.type) for field, same in zip(one, fields, strict=True)]
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
    if pa.types.is_time64(kind):
        return pa.time64("us")
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
