"""The dynamic symbols of a shared library, read without binutils."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

_ELF64_LITTLE_ENDIAN = b"\x7fELF\x02\x01"
_SHT_DYNAMIC, _SHT_DYNSYM = 6, 11
_DT_NEEDED = 1
_SHN_UNDEF = 0


@dataclass(frozen=True)
class Dynamic:
    """What a library needs from other libraries, and what it offers to them.

    Attributes:
        needed: The names of the libraries that it is linked against, in order.
        undefined: The symbols that other libraries must define.
        defined: The symbols that it defines itself.
    """

    needed: tuple[str, ...]
    undefined: frozenset[str]
    defined: frozenset[str]


def read(path: Path) -> Dynamic:
    """Read the dynamic section and symbol table of an ELF64 little-endian file (x86_64, aarch64).

    Raises:
        ValueError: If *path* is something else.
    """
    data = path.read_bytes()
    if not data.startswith(_ELF64_LITTLE_ENDIAN):
        raise ValueError(f"{path} is no 64-bit little-endian ELF file")
    (table,) = struct.unpack_from("<Q", data, 40)
    size, count = struct.unpack_from("<HH", data, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, table + number * size) for number in range(count)]
    needed: list[str] = []
    undefined: set[str] = set()
    defined: set[str] = set()
    for _, kind, _, _, start, length, link, _, _, _ in sections:
        strings = sections[link][4]
        if kind == _SHT_DYNSYM:
            for at in range(start, start + length, 24):
                name, _, _, section = struct.unpack_from("<IBBH", data, at)
                (undefined if section == _SHN_UNDEF else defined).add(_string(data, strings + name))
        elif kind == _SHT_DYNAMIC:
            for at in range(start, start + length, 16):
                tag, value = struct.unpack_from("<QQ", data, at)
                if tag == _DT_NEEDED:
                    needed.append(_string(data, strings + value))
    return Dynamic(tuple(needed), frozenset(undefined) - {""}, frozenset(defined) - {""})


def _string(data: bytes, at: int) -> str:
    return data[at : data.index(b"\0", at)].decode()
