"""Reading a page as a browser would, as far as its structure goes."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

from draftsmith.report import write_report

HOSTILE = "\"'><script>alert(1)</script><img src=x onerror=alert(2)>{{ 7 * 7 }}&amp;</title></svg>"
VOID = {"meta", "link", "br", "hr", "img", "input"}


@dataclass
class Element:
    tag: str
    attributes: dict[str, str | None]
    children: list[Element | str] = field(default_factory=list)

    def all(self, *tags: str) -> list[Element]:
        """Every element below this one with one of the tags, in order."""
        found = []
        for child in self.children:
            if isinstance(child, Element):
                found += ([child] if not tags or child.tag in tags else []) + child.all(*tags)
        return found

    def by_id(self, id: str) -> Element:
        (found,) = (one for one in self.all() if one.attributes.get("id") == id)
        return found

    @property
    def text(self) -> str:
        return "".join(child if isinstance(child, str) else child.text for child in self.children)

    @property
    def numbers(self) -> set[float]:
        """What its <data> elements say to machines."""
        return {float(one.attributes["value"] or "nan") for one in self.all("data")}


class _Tree(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.root = Element("document", {})
        self.open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, dict(attrs))
        self.open[-1].children.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open[-1].children.append(Element(tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1].tag == tag, f"</{tag}> closes <{self.open[-1].tag}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.open[-1].children.append(data)


def parse(html: str) -> Element:
    """The page's elements. Fails where one is not closed by its own end."""
    tree = _Tree()
    tree.feed(html)
    tree.close()
    assert len(tree.open) == 1, f"<{tree.open[-1].tag}> is not closed"
    return tree.root


def page_of(run: Path, against: Path | None = None) -> Element:
    return parse(Path(write_report(run, against)["page"]).read_text(encoding="utf-8"))


def load(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def numbers_in(data: object) -> set[float]:
    """Every number inside a JSON document."""
    if isinstance(data, dict):
        return set().union(*map(numbers_in, data.values()))
    if isinstance(data, list):
        return set().union(*map(numbers_in, data))
    return {float(data)} if isinstance(data, int | float) and not isinstance(data, bool) else set()
