#!/usr/bin/env python3
"""Checks names and words: prints one line per finding, and exits 1 if there is one.

In src/:
- The name of a function has at least two words. That of a static one has 7 to 32 characters and is unique.
- The name of a struct is unique.
- No identifier contains a banned word.

In comments and strings of all sources, and in all documents: no banned word or phrase.
"""
import collections
import pathlib
import re
import subprocess
import sys

NAME_LENGTHS = range(7, 33)  # of static functions

# Words of an older source tree, and what replaced them:
#   haul: transfer; draft: manifest; deal: dedup, assign; lane: channel, queue; berth, board: ring buffer, shared
#   header; roll call: liveness; nest, cell, shares: program, box group, split; spread, portion: operation,
#   partition; said, heard, give, get: sent, received, send, receive; near: same host; room, door, house: module,
#   header, tree; parcel: message; meeting, greet: gather, vote; seen: partial CRC; tally: stats; held: shard;
#   carrier: backend; team, seat: thread group, thread rank; folder: directory; poke: progress.
BANNED = re.compile(r"(haul|draft|deal|lane|berth|board|rollcall|cell|spread|said|heard|giver?|getter|near|whom|room"
                    r"|door|house|portion|parcel|meeting|greet|seen|tally|carrier|team|seat|folder|poke)s?"
                    r"|nests|shares|held")
PHRASES = re.compile(r"\b(?:(?:haul|draft|deal|lane|berth|board|roll ?call|nest|cell|spread|giver|getter|room|door"
                     r"|house|portion|parcel|meeting|greet|carrier|team|seat|folder|poke)s?|dealt|said|heard|near|whom"
                     r"|seen|tally|gives?|gave|held|(?<!there )(?:is|are|was|were) no|there is something)\b", re.I)
# What the words of PHRASES mean elsewhere. A finding is ignored if one of these patterns covers it.
ALLOWED = re.compile(
    r"\"draft 2\"|folder\.[ch]|(?:is|are) no longer|\blanes\b|\bcells?\b|nest(?= of loops)|near-linear", re.I)

C_CODE = re.compile(r'/\*.*?\*/|"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\'|^[ \t]*#(?:\\\n|[^\n])*', re.S | re.M)
C_TEXT = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"', re.S)
PYTHON_TEXT = re.compile(r'""".*?"""|#[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.S)
FUNCTION = re.compile(r"^static [^;={}()]*?(?:__attribute__\(\(.*?\)\)[^;={}()]*?)?\b(\w+)\([^;]*?\)\s*\{", re.M | re.S)
SHARED = re.compile(r"^(?!static|typedef)[a-z][\w ]*[ *](\w+)\([^;{}]*?\)\s*\{", re.M | re.S)
STRUCT = re.compile(r"\b(?:struct|union) (\w+)\s*\{")


def blank(match):
    """Replaces text by spaces, so that line numbers stay."""
    return re.sub(r"[^\n]", " ", match.group())


def line_at(text, position):
    """The number of a line, from 1."""
    return text.count("\n", 0, position) + 1


def check_names(findings):
    """Functions, structs and identifiers of src/."""
    functions, structs = collections.defaultdict(list), collections.defaultdict(list)
    for path in sorted(map(str, pathlib.Path("src").glob("*/*.[ch]"))):
        text = C_CODE.sub(blank, pathlib.Path(path).read_text())
        for found, places in ((FUNCTION, functions), (STRUCT, structs)):
            for match in found.finditer(text):
                places[match.group(1)].append((path, line_at(text, match.start(1))))
        for match in SHARED.finditer(text):
            if "_" not in match.group(1) and match.group(1) != "main":
                findings.append((path, line_at(text, match.start(1)), f"function '{match.group(1)}' has one word"))
        first_uses = {}
        for match in re.finditer(r"[A-Za-z_]\w*", text):
            first_uses.setdefault(match.group(), line_at(text, match.start()))
        for name, line in first_uses.items():
            if any(BANNED.fullmatch(word) for word in name.lower().split("_")):
                findings.append((path, line, f"'{name}' contains a banned word"))
    for name, places in functions.items():
        for path, line in places:
            if "_" not in name.strip("_"):
                findings.append((path, line, f"static function '{name}' has one word"))
            elif len(name) not in NAME_LENGTHS:
                findings.append((path, line, f"the name of static function '{name}' has {len(name)} characters"))
    for kind, names in (("static functions", functions), ("structs", structs)):
        for name, places in names.items():
            for path, line in places if len(places) > 1 else []:
                findings.append((path, line, f"{len(places)} {kind} are named '{name}'"))


def text_of(path):
    """The text that people read, with all else blank; None for a file that has none."""
    kind = path.suffix
    if kind == ".md":  # without code, such as old names in the changelog
        return re.sub(r"`[^`\n]*`", blank, path.read_text())
    if kind in (".1", ".mk", ".sh", ".bash") or path.name in ("Makefile", "_reshard"):
        return path.read_text()
    if kind not in (".c", ".h", ".cpp", ".py"):
        return None
    text, kept, end = path.read_text(), [], 0
    for match in (PYTHON_TEXT if kind == ".py" else C_TEXT).finditer(text):
        kept += [re.sub(r"[^\n]", " ", text[end:match.start()]), match.group()]
        end = match.end()
    return "".join(kept)


def check_words(findings):
    """Comments, strings and documents."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], stdout=subprocess.PIPE, check=True,
                            text=True)
    data = ("tests/golden/", "fuzz/corpus/")  # files of other programs
    for name in sorted({one for one in listed.stdout.split("\n") if not one.startswith(data)}):
        path = pathlib.Path(name)
        text = text_of(path) if path.is_file() and path != pathlib.Path("tools/names.py") else None
        text = ALLOWED.sub(blank, text or "")
        for match in PHRASES.finditer(text):
            findings.append((name, line_at(text, match.start()), f"\"{match.group()}\" is banned in text"))


def main():
    """Prints the findings in order of files and lines."""
    findings = []
    check_names(findings)
    check_words(findings)
    for path, line, text in sorted(findings):
        print(f"names: {path}:{line}: {text}")
    return bool(findings)


sys.exit(main())
