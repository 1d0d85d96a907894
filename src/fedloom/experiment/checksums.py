"""Checksums in what a run writes, so that damage is an error and never another number.

A JSON object carries its checksum as the last key, a YAML file as a comment in its last line (its
first line says so, so that a file that was cut at the end of a line is noticed too), a table in the
metadata of its Parquet file. All of them stay readable for other programs. What has none was
written by an older version and is read as it is.
"""

from __future__ import annotations

import io
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

_JSON = re.compile(r', "crc": "([0-9a-f]{8})"\}\Z')
_SEALED = "# the last line is a checksum of those above\n"
_YAML = re.compile(r"# crc32 ([0-9a-f]{8})\n\Z")
_TABLE = re.compile(rb"fedloom-crc32:([0-9a-f]{8})")
_BLANK = b"00000000"


class Damaged(ValueError):
    """Something is not as it was written; the text says what."""


def checksum(content: bytes, start: int = 0) -> str:
    return f"{zlib.crc32(content, start):08x}"


def seal_json(value: Mapping[str, Any], **how: Any) -> str:
    """The object as JSON text that ends with its own checksum.

    >>> seal_json({"round": 1})
    '{"round": 1, "crc": "d9f40321"}'
    """
    text = json.dumps(value, **how)
    return f'{text[:-1]}, "crc": "{checksum(text.encode())}"}}'


def open_json(text: str) -> tuple[dict[str, Any], bool]:
    """The object, and whether it had a checksum."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise Damaged("it is not valid JSON") from None
    if not isinstance(value, dict):
        raise Damaged("it is not a JSON object")
    found = _JSON.search(text)
    if found is None:
        return value, False
    if checksum((text[: found.start()] + "}").encode()) != found[1]:
        raise Damaged("its checksum does not match")
    del value["crc"]
    return value, True


def seal_names(names: Sequence[str]) -> str:
    """Clients' names; a list has no place for a checksum, so it is in an object."""
    return seal_json({"names": list(names)}, ensure_ascii=False)


def open_names(text: str) -> tuple[str, ...]:
    """What `seal_names` made, or the plain list that older versions wrote."""
    found = json.loads(text) if text.startswith("[") else open_json(text)[0].get("names")
    if not isinstance(found, list):
        raise Damaged("it is not a list of names")
    return tuple(map(str, found))


def seal_yaml(text: str) -> str:
    text = _SEALED + text
    return f"{text}# crc32 {checksum(text.encode())}\n"


def open_yaml(text: str) -> bool:
    """Check the text; whether it had a checksum."""
    start = text.rstrip("\n").rfind("\n") + 1
    if not text.startswith("#", start):
        if text.startswith(_SEALED):
            raise Damaged("its end is missing")
        return False
    found = _YAML.match(text, start)
    if found is None or checksum(text[:start].encode()) != found[1]:
        raise Damaged("its checksum does not match")
    return True


def seal_table(table: pd.DataFrame) -> bytes:
    """The table as a Parquet file, with the checksum of the file (zeros in its place) in it."""
    import pyarrow as pa  # here: only tables need it
    import pyarrow.parquet as pq

    content = pa.Table.from_pandas(table, preserve_index=False, nthreads=1)
    about = {**(content.schema.metadata or {}), b"fedloom": b"fedloom-crc32:" + _BLANK}
    file = io.BytesIO()
    pq.write_table(content.replace_schema_metadata(about), file)
    blank = file.getvalue()
    found = _TABLE.search(blank)
    assert found is not None
    return blank[: found.start(1)] + checksum(blank).encode() + blank[found.end(1) :]


def open_table(content: bytes) -> pd.DataFrame:
    import pyarrow as pa
    import pyarrow.parquet as pq

    found = _TABLE.search(content)
    if found is not None:
        blank = content[: found.start(1)] + _BLANK + content[found.end(1) :]
        if checksum(blank).encode() != found[1]:
            raise Damaged("its checksum does not match")
    try:
        # On this thread alone: pyarrow's own now and then abort a process that ends after a read.
        file = pq.ParquetFile(pa.BufferReader(content), pre_buffer=False)
        return file.read(use_threads=False).to_pandas(use_threads=False)
    except (pa.ArrowException, ValueError, OSError, KeyError, TypeError) as e:
        why = " ".join(str(e).split()).removesuffix(".")
        raise Damaged(f"it is not a table: {why}") from None
