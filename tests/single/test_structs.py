"""The ctypes mirror of the C interface: fields, sizes, offsets and functions."""

import ctypes
import os
import re
import shutil
import subprocess

import pytest
from helpers.tree import ROOT

from tfdist.core import library, structs

HEADER = ROOT / "tfdist_ops" / "runtime" / "c_api.h"
COMPILER = shutil.which(os.environ.get("CXX") or "c++") or shutil.which("g++")

_TYPES = {
    "int32_t": ctypes.c_int32,
    "uint32_t": ctypes.c_uint32,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
    "double": ctypes.c_double,
    "const char*": ctypes.c_char_p,
    "const void*": ctypes.c_void_p,
    "void*": ctypes.c_void_p,
    "const uint8_t*": ctypes.c_char_p,  # bytes of a key
    "const int32_t*": ctypes.POINTER(ctypes.c_int32),
    "const int64_t*": ctypes.POINTER(ctypes.c_int64),
    "const char* const*": ctypes.POINTER(ctypes.c_char_p),
    "const tfdist_tensor*": ctypes.POINTER(structs.Tensor),
    "const tfdist_link*": ctypes.POINTER(structs.Link),
    "const tfdist_tuning_rule*": ctypes.POINTER(structs.TuningLine),
}
_STRUCTS = {
    "tfdist_status": structs.Status,
    "tfdist_link": structs.Link,
    "tfdist_world": structs.World,
    "tfdist_tuning_rule": structs.TuningLine,
    "tfdist_tensor": structs.Tensor,
    "tfdist_request": structs.Request,
    "tfdist_record": structs.Record,
}


def header():
    text = HEADER.read_text()
    return re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)


def fields_in_c(name):
    body = re.search(rf"typedef struct {name} \{{(.*?)\}} {name};", header(), re.DOTALL)
    found = []
    for declaration in body[1].split(";"):
        line = " ".join(declaration.split())
        if pointer := re.match(r".*\(\*(\w+)\)\(", line):
            found.append((pointer[1], "function"))
        elif array := re.fullmatch(r"char (\w+)\[(\d+)\]", line):
            found.append((array[1], f"char {array[2]}"))
        elif line:
            kind, names = re.fullmatch(r"(.*?[ *])(\w+(?:, \w+)*)", line).groups()
            found += [(n, kind.strip()) for n in names.split(", ")]
    return found


@pytest.mark.parametrize("name", _STRUCTS)
def test_structures_mirror_the_header(name):
    mirrored = _STRUCTS[name]._fields_
    declared = fields_in_c(name)
    assert [field for field, _ in mirrored] == [field for field, _ in declared]
    for (field, kind), (_, c_kind) in zip(mirrored, declared, strict=True):
        if c_kind == "function":
            assert kind in (structs.DoneCallback, structs.AllocateCallback), field
        elif c_kind.startswith("char "):
            assert kind is ctypes.c_char * int(c_kind[5:]), field
        else:
            assert kind is _TYPES[c_kind], field


def test_every_function_of_the_header_is_declared():
    names = set(re.findall(r"TFDIST_EXPORT [^;]*?(tfdist_\w+)\(", header()))
    assert names == set(library.SIGNATURES)
    version = re.search(r"#define TFDIST_API_VERSION (\d+)", header())
    assert int(version[1]) == library.API_VERSION


@pytest.fixture(scope="module")
def layout_in_c(tmp_path_factory):
    """Size of each structure; offset and size of its fields, as C++ has them."""
    lines = []
    for name, structure in _STRUCTS.items():
        lines.append(f'  put("{name}", 0, sizeof({name}));')
        lines += [
            f'  put("{name}.{field}", offsetof({name}, {field}), '
            f"sizeof({name}::{field}));"
            for field, _ in structure._fields_
        ]
    folder = tmp_path_factory.mktemp("layout")
    source = folder / "layout.cc"
    source.write_text(
        f"""#include "{HEADER}"
#include <cstddef>
#include <cstdio>
static void put(const char* name, size_t offset, size_t size) {{
  std::printf("%s %zu %zu\\n", name, offset, size);
}}
int main() {{
"""
        + "\n".join(lines)
        + "\n}\n"
    )
    program = folder / "layout"
    subprocess.run([COMPILER, "-std=c++17", source, "-o", program], check=True)
    printed = subprocess.run([program], capture_output=True, text=True, check=True)
    rows = (line.split() for line in printed.stdout.splitlines())
    return {name: (int(offset), int(size)) for name, offset, size in rows}


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("name", _STRUCTS)
def test_sizes_and_offsets_are_those_of_the_compiler(name, layout_in_c):
    structure = _STRUCTS[name]
    assert ctypes.sizeof(structure) == layout_in_c[name][1]
    for field, _ in structure._fields_:
        own = getattr(structure, field)
        assert (own.offset, own.size) == layout_in_c[f"{name}.{field}"], field
