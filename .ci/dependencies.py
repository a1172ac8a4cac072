"""Checks dependencies against deny.toml: licences, bans and sources of the crates, licences and hashes of the npm packages.

`cargo deny check` reads the same file and also looks up advisories, for which it needs its database. This needs neither.
"""

import json
import re
import subprocess
import sys
import tomllib

REGISTRIES = {"registry+https://github.com/rust-lang/crates.io-index", "sparse+https://index.crates.io/"}
# The values that this script understands. Others need `cargo deny` itself.
BANS = {"multiple-versions": "allow", "wildcards": "deny"}
SOURCES = {"unknown-registry": "deny", "unknown-git": "deny"}

# Tools of the browser tests under other licences. They are used unmodified and are not distributed.
TEST_TOOLS = {"axe-core": "MPL-2.0", "lightningcss": "MPL-2.0"}

deny = tomllib.load(open("deny.toml", "rb"))
allowed = set(deny["licenses"]["allow"])
if deny["bans"] != BANS or deny["sources"] != SOURCES:
    sys.exit(f".ci/dependencies.py checks [bans] {BANS} and [sources] {SOURCES}; deny.toml has others: extend the script")


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


def crates():
    """What is wrong with the crates, a line each."""
    command = ["cargo", "metadata", "--format-version", "1", "--locked", "--all-features"]
    packages = json.loads(subprocess.check_output(command))["packages"]
    for p in packages:
        name = f"{p['name']} {p['version']}"
        if p["source"] and p["source"] not in REGISTRIES:
            yield f"{name}: from {p['source']}, which is not the crate registry"
        if p["source"] and not (p["license"] and permitted(p["license"])):
            yield f"{name}: its licence {p['license']} is not allowed"
        if p["source"] is None:
            for d in p["dependencies"]:
                if d["req"] == "*":
                    yield f"{name}: any version of {d['name']} would do; name one"
    print(f"{len(packages)} crates checked")


def npm():
    """What is wrong with the npm packages of the browser tests, a line each."""
    packages = json.load(open("web/package-lock.json"))["packages"]
    for path, p in packages.items():
        licence = p.get("license", "none")
        # A tool's builds for platforms have its name as a prefix.
        tool = any(path.startswith(f"node_modules/{name}") and licence == its for name, its in TEST_TOOLS.items())
        if path and not tool and not permitted(licence):
            yield f"{path}: its licence {licence} is not allowed"
        if path and not p.get("integrity", "").startswith("sha512-"):
            yield f"{path}: package-lock.json has no hash of it"
    print(f"{len(packages) - 1} npm packages checked")


bad = [*crates(), *npm()]
if bad:
    sys.exit("dependencies that deny.toml does not allow:\n" + "\n".join(bad))
