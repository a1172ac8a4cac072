"""Fails if a dependency's licence is not on the list of deny.toml, which `cargo deny check licenses` reads too."""

import json
import re
import subprocess
import sys
import tomllib

allowed = set(tomllib.load(open("deny.toml", "rb"))["licenses"]["allow"])
metadata = json.loads(subprocess.check_output(["cargo", "metadata", "--format-version", "1", "--locked"]))


def permitted(expression):
    """SPDX expressions of licences, OR, AND, WITH and parentheses; '/' is an old way to write OR."""
    tokens = re.findall(r"\(|\)|[^\s()]+", expression.replace("/", " OR "))

    def disjunction(i):
        ok, i = conjunction(i)
        while i < len(tokens) and tokens[i] == "OR":
            other, i = conjunction(i + 1)
            ok = ok or other
        return ok, i

    def conjunction(i):
        ok, i = atom(i)
        while i < len(tokens) and tokens[i] == "AND":
            other, i = atom(i + 1)
            ok = ok and other
        return ok, i

    def atom(i):
        if tokens[i] == "(":
            ok, i = disjunction(i + 1)
            return ok, i + 1
        name, i = tokens[i], i + 1
        if i < len(tokens) and tokens[i] == "WITH":
            name, i = f"{name} WITH {tokens[i + 1]}", i + 2
        return name in allowed, i

    return disjunction(0)[0]


bad = [
    f"{p['name']} {p['version']}: {p['license']}"
    for p in metadata["packages"]
    if p["source"] and not (p["license"] and permitted(p["license"]))
]
if bad:
    sys.exit("licences that deny.toml does not allow:\n" + "\n".join(bad))
print(f"{len(metadata['packages'])} packages, all licences allowed")
