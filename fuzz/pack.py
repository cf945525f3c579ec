#!/usr/bin/env python3
"""Packs checkpoints into inputs of fuzz_checkpoint (see packed.h): pack.py OUT DIRECTORY_OR_FILE ...

A checkpoint that is too long is left out. Archives become lists of their records, so that the fuzzer changes what
is in them, and lengths and CRC-32s stay right.
"""

import hashlib
import io
import os
import re
import struct
import sys
import zipfile

HERE = os.path.dirname(os.path.abspath(__file__))
MOST_NBYTES, OWN_NAME = 1 << 19, 127
TRAINER_OPTIONS = 1 | 2 | 4 | 512  # of fuzz_checkpoint.c: the lowest rank, the model's dtype, single layers, rules
FORM_RAW, FORM_ARCHIVE, FORM_MANIFEST, FORM_NODE = range(4)


def known_names():
    with open(os.path.join(HERE, "packed.h"), encoding="ascii") as file:
        table = file.read().split("packed_names[] = {")[1].split("};")[0]
    return re.findall(r'"(.*)"', table)


NAMES = known_names()


def records(content):
    """The records of an archive that is written as zipfile reads it; None: it is not such an archive."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            parts = [(entry.filename.encode(), archive.read(entry)) for entry in archive.infolist()]
    except Exception:  # any damage: it stays as it is
        return None
    if any(len(name) > 255 or len(data) > 65535 for name, data in parts):
        return None
    return b"".join(struct.pack("<BH", len(name), len(data)) + name + data for name, data in parts)


def frames(content, magic):
    """The frames of OCDBT in a file, without what surrounds them."""
    out, at = [], 0
    while at < len(content):
        if content[at:at + 4] != magic or len(content) - at < 17:
            return None
        length = struct.unpack_from("<Q", content, at + 4)[0]
        if length < 17 or length > len(content) - at:
            return None
        out.append(content[at + 13:at + length - 4])
        at += length
    return out


def packed_file(name, content):
    match = re.fullmatch(r"__(\d+)_0\.distcp", name)
    number, head = OWN_NAME, struct.pack("<B", len(name.encode())) + name.encode()
    if name in NAMES:
        number, head = NAMES.index(name), b""
    elif match and int(match[1]) < 128:
        number, head = 128 + int(match[1]), b""
    form, body = FORM_RAW, content
    if content[:4] == b"PK\3\4" and not name.endswith("distcp"):
        parts = records(content)
        form, body = (FORM_ARCHIVE, parts) if parts is not None else (form, body)
    elif name.endswith("manifest.ocdbt") and (parts := frames(content, bytes.fromhex("0cdb3a2a"))):
        form, body = FORM_MANIFEST, parts[0]
    elif name.endswith("d/0") and (parts := frames(content, bytes.fromhex("0cdb20de"))):
        if all(len(part) < 65536 for part in parts):
            form, body = FORM_NODE, b"".join(struct.pack("<H", len(part)) + part for part in parts)
    body = head + body
    return struct.pack("<BBH", number, form, len(body)) + body if len(body) < 65536 else None


def pack(path, options=0):
    """The input with all files of a directory, or with one file; None if it cannot be packed."""
    out = struct.pack("<HB", options, 0)
    if os.path.isfile(path):
        alias = {".safetensors": "model.safetensors"}.get(os.path.splitext(path)[1], "pytorch_model.bin")
        entries = [(path, alias)]
    else:
        entries = [(os.path.join(folder, file), os.path.relpath(os.path.join(folder, file), path))
                   for folder, _, files in sorted(os.walk(path)) for file in sorted(files)]
    for source, name in entries:
        with open(source, "rb") as file:
            part = packed_file(name, file.read())
        if part is None:
            return None
        out += part
    return out if 3 < len(out) <= MOST_NBYTES else None


def main():
    target, n = sys.argv[1], 0
    os.makedirs(target, exist_ok=True)
    for i, path in enumerate(sys.argv[2:]):
        trainer = re.search("/(ds|mcore|verl|fsdp)_", path) is not None
        for options in (0, TRAINER_OPTIONS) if trainer else ((0, 1, 6, 32, 64, 192, 24, 104)[i % 8],):
            content = pack(path, options)
            if content:
                with open(os.path.join(target, hashlib.sha1(content).hexdigest()[:12]), "wb") as file:
                    file.write(content)
        n += content is not None
    print(f"packed {n} of {len(sys.argv) - 2}")


if __name__ == "__main__":
    main()
