#!/usr/bin/env python3
"""filter.py HEADER: prints a public header with its comments in the form that Doxygen reads.

The headers have plain comments. This filter makes of them:

- /* ---- 3. Layouts ---- ... */    a group, with all that follows up to the next such comment
- a comment before declarations    their documentation; a blank line ends their list. Functions of one list become a
                                   group of their own, so that they have one manual page
- a comment behind a declaration   the documentation of this declaration, or more of it
- indented lines in a comment      verbatim text, except lists
"""
import pathlib
import re
import sys

SECTION = re.compile(r"^-{2,} *(.*?) *-{2,}\s*")
FUNCTION = re.compile(r"^(?!typedef)[\w \*]*?\b(rsd_\w+)\([^{]*\);\s*$", re.S)
TRAILING = re.compile(r"\s*/\*(.*?)\*/\s*$", re.S)
STRIP = re.compile(r"/\*.*?\*/", re.S)
NUMBER = re.compile(r"^(?:part )?[0-9.]+ ")


def text_of(comment):
    """Returns the lines of a comment without its frame."""
    body = re.sub(r"^/\*|\*/$", "", comment.strip())
    lines = [re.sub(r"^\s*\* ?", "", line) if number else line.strip() for number, line in enumerate(body.split("\n"))]
    return [line.rstrip() for line in lines]


def escaped(line):
    """Returns a line in which nothing is a command of Doxygen."""
    return re.sub(r"([\\@<>#%&$])", r"\\\1", line).replace("::", r"\::")


def formatted(lines):
    """Returns the lines of a comment for Doxygen: indented lines that are not of a list are verbatim."""
    out, verbatim, in_list = [], False, False
    for number, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        item = line.lstrip().startswith(("- ", "1. "))
        in_list = item or in_list and (indent >= 2 and not verbatim)
        wanted = indent >= 2 and not in_list
        if not line:  # a blank line stays inside of verbatim text if such text follows
            following = next((one for one in lines[number:] if one), "")
            wanted = verbatim and following.startswith("  ") and not following.lstrip().startswith("- ")
            in_list = in_list and following.startswith("  ")
        if wanted != verbatim:
            out.append("@verbatim" if wanted else "@endverbatim")
            verbatim = wanted
        out.append(line if verbatim else escaped(line))
    if verbatim:
        out.append("@endverbatim")
    return out


def group_named(title):
    """Returns the name of the group of a section."""
    words = re.findall(r"[a-z0-9]+", re.split(r"[:(]", title.lower())[0])
    return "reshard_" + "_".join(words[:4])


def comment_of(lines):
    """Returns a comment of Doxygen. Its lines have no asterisks, which verbatim text would keep."""
    return "/** " + "\n".join(lines) + "\n */\n"


def units(text):
    """Yields ("comment" | "blank" | "directive" | "declaration", text) for everything at the top level of a header."""
    lines, at = text.split("\n"), 0
    while at < len(lines):
        start = at
        if not lines[at].strip():
            kind = "blank"
        elif lines[at].startswith("/*"):
            kind = "comment"
            while "*/" not in lines[at]:
                at += 1
        elif lines[at].startswith("#"):
            kind = "directive"
            while lines[at].endswith("\\"):
                at += 1
        else:
            kind = "declaration"
            while True:
                unit = "\n".join(lines[start:at + 1])
                bare = STRIP.sub("", unit)
                if "/*" not in bare and bare.rstrip().endswith((";", 'extern "C" {', "}")) and \
                        (bare.count("{") == bare.count("}") or 'extern "C"' in bare or bare.strip() == "}"):
                    break
                at += 1
        at += 1
        yield kind, "\n".join(lines[start:at])


def with_fields(declaration):
    """Returns a declaration whose comments inside of braces are documentation of fields and values."""
    def changed(match):
        behind = declaration[:match.start()].rpartition("\n")[2].strip()
        lines = formatted([line.strip() for line in text_of(match.group())])
        return ("/**< " if behind else "/** ") + "\n".join(lines) + " */"

    return re.sub(r"/\*.*?\*/", changed, declaration, flags=re.S)


def list_of(lead, declarations):
    """Returns the declarations of one list, with the documentation that they share."""
    shared = formatted(text_of(lead)) if lead else []
    functions = [FUNCTION.match(STRIP.sub("", one)) for one in declarations]
    names = [found.group(1) for found in functions if found]
    out = []
    if names:
        out.append(comment_of([f"@defgroup {names[0]} {', '.join(names)}", *shared, "@{"]))
        shared = []
    for declaration in declarations:
        own = TRAILING.search(declaration)
        more = []
        if own and "{" not in declaration:
            declaration = declaration[:own.start()]
            more = formatted(text_of("/*" + own.group(1) + "*/"))
        macro = re.search(r"^#define (\w+)", declaration, re.M)
        lines = ([f"@def {macro.group(1)}"] if macro else []) + shared + ([""] if shared and more else []) + more
        out += [comment_of(lines)] if lines else []
        out.append((with_fields(declaration) if "{" in declaration else declaration) + "\n")
    if names:
        out.append("/** @} */\n")
    return "".join(out)


def main():
    path = pathlib.Path(sys.argv[1])
    out, lead, found, opened = [], None, [], False

    def flush():
        nonlocal lead, found
        if found:
            out.append(list_of(lead, found))
        lead, found = None, []

    text = path.read_text(encoding="ascii")
    text = re.sub(r"/\* clang-format \w+ \*/\n|^/\* -- [\w ]+ -- \*/\n", "", text, flags=re.M)
    text = re.sub(r"^#ifdef __cplusplus\n#define.*?^#else\n(.*?)^#endif\n", r"\1", text, flags=re.M | re.S)
    for kind, unit in units(text):
        lines = text_of(unit) if kind == "comment" else []
        section = SECTION.match(lines[0]) if lines else None
        if kind == "comment" and not out:
            title = NUMBER.sub("", lines[0].partition(" - ")[2].rstrip("."))
            out.append(comment_of([f"@file {path.name}", f"@brief {escaped(title)}", "", *formatted(lines[1:])]))
            if path.name == "reshard.h":
                out.append(comment_of(["@mainpage reshard", *formatted(lines)]))
        elif section:
            flush()
            out.append("/** @} */\n" if opened else "")
            title = NUMBER.sub("", section.group(1))
            lines[0] = lines[0][section.end():]
            out.append(comment_of([f"@defgroup {group_named(title)} {escaped(title)}", *formatted(lines), "@{"]))
            opened = True
        elif kind == "comment":
            flush()
            lead = unit
        elif kind == "blank":
            flush()
        elif kind == "directive" and not unit.startswith("#define RSD") and not lead:
            out.append(unit + "\n")
        elif unit.strip() == "}" or 'extern "C"' in unit:
            flush()
            out.append(unit + "\n")
        else:
            if not opened and "struct rsd_transport;" not in unit:
                opened = True
                title = NUMBER.sub("", next(line for line in text_of(text[:text.index("*/") + 2]))
                                   .partition(" - ")[2].partition(".")[0])
                out.append(comment_of([f"@defgroup {group_named(title)} {escaped(title)}", "@{"]))
            found.append(unit)
    flush()
    out.append("/** @} */\n" if opened else "")
    sys.stdout.write("".join(out))


if __name__ == "__main__":
    main()
