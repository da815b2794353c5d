"""Check the built documentation: ``python docs/check_links.py build/docs``.

Every link and picture within the site has to lead to a file, and to an anchor in it. Sphinx's own
builder ``linkcheck`` looks at links that lead out: ``python -m sphinx -b linkcheck docs
build/links``.
"""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """What a page links to, and its anchors."""

    def __init__(self, text):
        super().__init__()
        self.links, self.anchors = set(), {""}
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.links.add(value)
            elif name in ("id", "name") and value:
                self.anchors.add(value)


def dead_links(site):
    """Lines "page: link" for all that lead nowhere, and the number of links that were checked."""
    pages = {path: Page(path.read_text("utf-8")) for path in sorted(site.rglob("*.html"))}
    dead, n = [], 0
    for path, page in pages.items():
        for link in sorted(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            n += 1
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchors = pages[target].anchors if target in pages else {"", parts.fragment}
            if not target.is_file() or unquote(parts.fragment) not in anchors:
                dead.append(f"{path.relative_to(site)}: {link}")
    return dead, n


if __name__ == "__main__":
    dead, n = dead_links(Path(sys.argv[1]).resolve())
    print(*dead, f"{n} links within the site, {len(dead)} dead", sep="\n")
    sys.exit(bool(dead) or n == 0)
