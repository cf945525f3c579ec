"""links.py DIRECTORY: prints every relative link in the Markdown files of a directory that leads nowhere: a file that
does not exist, or a heading that the file does not have."""
import pathlib
import re
import sys

LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```|^(?: {4}|\t)[^\n]*$|`[^`\n]*`", re.S | re.M)


def anchors(path):
    """Returns the anchors of the headings of a file, as GitHub and GitLab make them."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.S | re.M)
    titles = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken(root):
    """Yields one line per link that leads nowhere."""
    for page in sorted(root.rglob("*.md")):
        for link in LINK.findall(CODE.sub("", page.read_text(encoding="utf-8"))):
            if re.match(r"[a-z]+:", link):
                continue
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page.resolve()
            if root.resolve() not in (target, *target.parents) or not target.exists():
                yield f"{page.relative_to(root)}: {link} does not exist"
            elif anchor and target.suffix == ".md" and anchor not in anchors(target):
                yield f"{page.relative_to(root)}: {link}: no such heading"


def main():
    root = pathlib.Path(sys.argv[1])
    lines = list(broken(root))
    if not list(root.rglob("*.md")):
        lines.append(f"{root} has no Markdown file")
    print("\n".join(lines), end="")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main())
