"""Checks Python files: the package has the syntax of Python 3.9, no import is unused, lines have at most 120
characters, and every file has a docstring. Prints findings and exits 1 if there are any."""
import ast
import os
import re
import sys

LONGEST = 120


def names_used(tree):
    """Returns all names in a file, including those in strings such as annotations and __all__."""
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 200:
            used |= set(re.findall(r"\w+", node.value))
    return used


def imported(tree):
    """Yields (name, line) of imports at the top of a file. Dotted modules may be imported for effect, so not those."""
    for node in tree.body:
        if isinstance(node, (ast.Import, ast.ImportFrom)) and getattr(node, "module", "") != "__future__":
            for one in node.names:
                if one.asname or "." not in one.name:
                    yield (one.asname or one.name), node.lineno


def problems(path):
    with open(path, encoding="utf-8") as file:
        text = file.read()
    package = path.startswith("python/") or path == "setup.py"
    try:
        tree = ast.parse(text, path, feature_version=(3, 9) if package else None)
    except SyntaxError as error:
        yield error.lineno, f"{error.msg}{' in Python 3.9' if package else ''}"
        return
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > LONGEST:
            yield number, f"{len(line)} characters"
        if line != line.rstrip() or "\t" in line:
            yield number, "a tab, or spaces at the end"
    if text and not ast.get_docstring(tree):
        yield 1, "says not what it is"
    used = names_used(tree)
    for name, number in imported(tree):
        if name not in used:
            yield number, f"imports {name}, and does not use it"


def main():
    bad = 0
    for path in sys.argv[1:]:
        if os.path.exists(path):
            for number, what in problems(path):
                print(f"{path}:{number}: {what}")
                bad = 1
    return bad


if __name__ == "__main__":
    sys.exit(main())
