"""Hooks of mkdocs: links out of docs become paths, each page has a Markdown twin, and llms.txt lists them."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

RESULTS = Path(__file__).resolve().parents[1] / "recipes" / "results"
IMAGE = re.compile(r"^!\[[^\]]*\]\([^)]*\)\n", re.MULTILINE)
LOCAL = re.compile(r"(?<!!)\[([^\]\n]+)\]\(((?!https?:|#)[^)\s]+)\)")
LINK = re.compile(r"(?<!!)\[([^\]\n]+)\]\(((?:\.\./)+[^)\s]*)\)")
MARKER = re.compile(r"<!--/?(?:[nt]:?[\w.]*)-->|^<!-- run.*-->\n", re.MULTILINE)


def on_files(files: Any, config: Any, **_: Any) -> Any:
    """Adds the pages of recipes/results, so that each number leads to its run."""
    for page in sorted(RESULTS.glob("*/README.md")):
        files.append(File.generated(config, f"results/{page.parent.name}.md", abs_src_path=str(page)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page with links that lead somewhere on the site."""
    return linked(markdown, page.file.src_uri)


def linked(markdown: str, uri: str) -> str:
    """Links to filed results lead to their pages; to other files of the repository outside of docs: the text, with the path."""
    home = (
        posixpath.join("recipes", uri.removesuffix(".md"))
        if uri.startswith("results/")
        else posixpath.join("docs", uri, "..")
    )

    def local(match: re.Match[str]) -> str:
        place, _, anchor = match[2].partition("#")
        path = posixpath.normpath(posixpath.join(home, place))
        result = re.fullmatch(r"recipes/results/([\w-]+)(?:/README\.md)?", path)
        if result:
            target = posixpath.relpath(f"results/{result[1]}.md", posixpath.dirname(uri))
            return f"[{match[1]}]({target}{'#' * bool(anchor)}{anchor})"
        if path.startswith("docs/"):
            return match[0]
        words = match[1].strip("`")
        return match[1] if path.endswith(words) else f"{match[1]} (`{path}`)"

    text = IMAGE.sub(lambda match: "", markdown) if uri.startswith("results/") else markdown
    return (LOCAL if uri.startswith("results/") else LINK).sub(local, text)


def on_post_build(config: Any, **_: Any) -> None:
    """Writes the Markdown twins and llms.txt."""
    source, site = Path(config["docs_dir"]), Path(config["site_dir"])
    pages = {page.relative_to(source).as_posix(): page for page in source.rglob("*.md")}
    pages |= {f"results/{page.parent.name}.md": page for page in RESULTS.glob("*/README.md")}
    for uri, page in pages.items():
        twin = site / uri
        twin.parent.mkdir(parents=True, exist_ok=True)
        twin.write_text(MARKER.sub("", linked(page.read_text(), uri)))
    (site / "llms.txt").write_text(llms(config["site_name"], config["site_description"], config["nav"], source))


def llms(name: str, about: str, nav: list[Any], source: Path) -> str:
    """The list of pages in the form of llmstxt.org."""
    lines = [f"# {name}", "", f"> {about}", ""]
    for title, uri in entries(nav):
        if uri is None:
            lines += ["", f"## {title}", ""]
        else:
            lines.append(f"- [{title}]({uri}): {first_sentence(source / uri)}")
    return "\n".join(lines) + "\n"


def entries(nav: list[Any], above: str = "") -> list[tuple[str, str | None]]:
    """(title, page) of each entry; (title, None) of a section, before its pages. ``above``: the section around them."""
    found: list[tuple[str, str | None]] = []
    for entry in nav:
        ((title, value),) = entry.items()
        if isinstance(value, str):
            found.append((title, value))
            continue
        section = f"{above}: {title}" if above else title
        has_pages = any(isinstance(page, str) for one in value for page in one.values())
        found += [*([(section, None)] if has_pages else []), *entries(value, section)]
    return found


def first_sentence(page: Path) -> str:
    """The first sentence of a page after its title."""
    body = MARKER.sub("", page.read_text()).partition("\n")[2]
    paragraph = next((part for part in body.split("\n\n") if re.match(r"\s*[A-Za-z`*]", part)), "")
    return re.split(r"(?<=[.:])\s", " ".join(paragraph.split()))[0]
