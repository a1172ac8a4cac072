"""Reads a bundle (docs/bundle.md) with nothing but Python, and prints what it holds.

    python3 examples/read_bundle.py FILE.bundle

With the package `blake3` installed, the checksums are compared too.
"""

import array
import json
import struct
import sys

FORMATS = {"F32": ("f", 4), "U32": ("I", 4), "BF16": ("H", 2), "F16": ("e", 2), "U8": ("B", 1)}


class Bundle:
    def __init__(self, path):
        self.file = open(path, "rb")
        start = self.file.read(8)
        (length,) = struct.unpack("<Q", start)
        text = self.file.read(length)
        self.header = start + text
        self.tensors = json.loads(text)
        self.meta = self.tensors.pop("__metadata__")
        if (self.meta["format"], self.meta["version"]) != ("selkie-bundle", "1"):
            raise ValueError(f"{path}: not a bundle of version 1")

    def raw(self, name):
        begin, end = self.tensors[name]["data_offsets"]
        self.file.seek(len(self.header) + begin)
        return self.file.read(end - begin)

    def values(self, name):
        """All values of a tensor in one flat list; its sizes are in `tensors[name]["shape"]`."""
        code, size = FORMATS[self.tensors[name]["dtype"]]
        data = self.raw(name)
        values = struct.unpack(f"<{len(data) // size}{code}", data)
        if self.tensors[name]["dtype"] != "BF16":
            return list(values)
        return array.array("f", b"".join(struct.pack("=I", v << 16) for v in values)).tolist()

    def altered(self):
        """Names of tensors whose checksum is wrong."""
        from blake3 import blake3

        sums = self.raw("checksums")
        pieces = [("header", self.header)] + [(n, self.raw(n)) for n in self.tensors if n != "checksums"]
        return [n for i, (n, data) in enumerate(pieces) if blake3(data).digest() != sums[32 * i : 32 * i + 32]]


if __name__ == "__main__":
    bundle = Bundle(sys.argv[1])
    print(json.dumps(bundle.meta, indent=2))
    print("tokens", bundle.values("tokens")[:10], "... messages end at", bundle.values("ends"))
    for name, tensor in bundle.tensors.items():
        if name.startswith("layers."):
            print(f"{name:<28} {tensor['dtype']:<4} {tensor['shape']} begins with {bundle.values(name)[:3]}")
    try:
        print("altered:", bundle.altered() or "nothing")
    except ImportError:
        print("the checksums were not compared: `pip install blake3`")
