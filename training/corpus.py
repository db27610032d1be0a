# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501 - tables of texts and templates, one entry a line
"""Turns the downloaded packages (DATA.md names them) into plain-text documents, one generator per source, without duplicates.

A document is (source, name, text). Whether it is held out depends only on a hash of its name, so every run holds out the same ones.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sysconfig
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple

DEBIAN_PACKAGES = ("wordnet-base", "bible-kjv", "bible-kjv-text", "python3.11-doc", "sqlite3-doc", "postgresql-doc-15", "apache2-doc",
                   "python-django-doc", "rust-doc", "llvm-15-doc")  # fmt: skip
HELD_OUT_PERCENT = 2


RUST_BOOKS = ("book", "reference", "rust-by-example", "nomicon", "edition-guide", "cargo", "rustc", "rustdoc", "embedded-book")


class Document(NamedTuple):
    source: str
    name: str
    text: str

    @property
    def held_out(self) -> bool:
        return int(hashlib.sha256(f"{self.source}/{self.name}".encode()).hexdigest()[:8], 16) % 100 < HELD_OUT_PERCENT


def fetch(raw_dir: Path) -> None:
    """Download and unpack the Debian packages (needs apt and dpkg; nothing is installed)."""
    raw_dir.mkdir(parents=True, exist_ok=True)
    subprocess.run(["apt-get", "download", *DEBIAN_PACKAGES], cwd=raw_dir, check=True)
    for package in raw_dir.glob("*.deb"):
        subprocess.run(["dpkg", "-x", package.name, package.name.split("_")[0]], cwd=raw_dir, check=True)


def documents(raw_dir: Path) -> Iterator[Document]:
    """All documents of all sources; paragraphs of 200 characters or more that were seen before are dropped."""
    seen: set[bytes] = set()
    for document in _all(raw_dir):
        paragraphs = []
        for paragraph in document.text.split("\n\n"):
            key = hashlib.blake2b(paragraph.strip().encode(), digest_size=12).digest()
            if len(paragraph) >= 200 and key in seen:
                continue
            seen.add(key)
            paragraphs.append(paragraph)
        text = "\n\n".join(paragraphs).strip()
        if len(text) >= 200:
            yield document._replace(text=text + "\n")


def _all(raw_dir: Path) -> Iterator[Document]:
    yield from python_sources()
    yield from python_docs(raw_dir)
    yield from html_docs(raw_dir / "sqlite3-doc/usr/share/doc/sqlite3", "sqlite-docs")
    yield from html_docs(raw_dir / "postgresql-doc-15/usr/share/doc/postgresql-doc-15/html", "postgresql-docs")
    yield from html_docs(raw_dir / "apache2-doc/usr/share/doc/apache2-doc/manual/en", "apache-docs")
    yield from html_docs(
        raw_dir / "python-django-doc/usr/share/doc/python-django-doc/html",
        "django-docs",
        skip=("_modules", "_static", "releases", "genindex", "_sources"),
    )
    for book in RUST_BOOKS:
        yield from html_docs(raw_dir / "rust-doc/usr/share/doc/rust-doc/html" / book, "rust-books", skip=("print.html", "edition/"))
    yield from sphinx_sources(raw_dir / "llvm-15-doc/usr/share/doc/llvm-15-doc/html/_sources", "llvm-docs")
    yield from bible(raw_dir)
    yield from wordnet(raw_dir)


def python_sources() -> Iterator[Document]:
    """The standard library; of its tests only a third, and no data tables of more than 200 kB."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        name = str(path.relative_to(root))
        is_test = "/test" in f"/{name}"
        if "site-packages" in name or path.stat().st_size > 200_000 or (is_test and sum(name.encode()) % 3):
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        if "\ufffd" not in text and len(set(text)) < 400:
            yield Document("python-tests" if is_test else "python-stdlib", name, text)


def python_docs(raw_dir: Path) -> Iterator[Document]:
    return sphinx_sources(raw_dir / "python3.11-doc/usr/share/doc/python3.11/html/_sources", "python-docs")


def sphinx_sources(root: Path, source: str) -> Iterator[Document]:
    """The reStructuredText a manual was made from, except change logs."""
    for path in sorted(root.rglob("*.txt")):
        if "changelog" not in path.name and path.stat().st_size < 1_000_000:
            yield Document(source, str(path.relative_to(root)), path.read_text(encoding="utf-8"))


class _Text(HTMLParser):
    """Keeps the text of a page: block tags break lines, <pre> keeps its spaces, navigation and scripts are dropped."""

    BLOCK = frozenset(
        ["p", "div", "h1", "h2", "h3", "h4", "h5", "h6", "li", "tr", "table", "dl", "dt", "dd", "ul", "ol", "pre", "blockquote", "section"]
    )
    VOID = frozenset(["br", "img", "hr", "meta", "link", "input", "area", "base", "col", "embed", "source", "track", "wbr"])
    DROP = frozenset(["script", "style", "head", "nav", "svg", "button", "form"])
    DROP_MARKS = (
        "navheader",
        "navfooter",
        "page-header",
        "path",
        "toplang",
        "bottomlang",
        "footer",
        "quickview",
        "nosearch",
        "toc",
        "menu",
        "indexterm",
    )

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self.dropping: list[str] = []
        self.pre = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        marks = {value for key, value in attrs if key in ("class", "id") and value}
        if self.dropping:
            if tag == self.dropping[0]:
                self.dropping.append(tag)
            return
        if tag in self.DROP or (tag in ("div", "table", "span") and marks & set(self.DROP_MARKS)):
            self.dropping.append(tag)
            return
        self.pre += tag == "pre"
        if tag in self.BLOCK:
            self.parts.append("\n\n" if tag not in ("li", "tr", "dt", "dd") else "\n")
        elif tag == "br":
            self.parts.append("\n")
        if tag == "li":
            self.parts.append("- ")
        elif tag in ("td", "th"):
            self.parts.append(" ")

    def handle_endtag(self, tag: str) -> None:
        if self.dropping:
            if tag == self.dropping[0]:
                self.dropping.pop()
            return
        if tag == "pre":
            self.pre = max(0, self.pre - 1)
        if tag in self.BLOCK and tag not in ("li", "tr", "dt", "dd"):
            self.parts.append("\n\n")

    def handle_data(self, data: str) -> None:
        if not self.dropping:
            self.parts.append(data if self.pre else re.sub(r"\s+", " ", data))

    def text(self) -> str:
        lines = (line.rstrip() for line in "".join(self.parts).replace("\xa0", " ").split("\n"))
        return re.sub(r"\n{3,}", "\n\n", "\n".join(line[1:] if line[:1] == " " and line[1:2].strip() else line for line in lines)).strip()


def html_docs(root: Path, source: str, skip: tuple[str, ...] = ()) -> Iterator[Document]:
    for path in sorted(root.rglob("*.html")):
        if any(part in str(path.relative_to(root)) for part in skip):
            continue
        parser = _Text()
        parser.feed(path.read_text(encoding="utf-8", errors="replace"))
        if "\ufffd" not in parser.text():
            yield Document(source, str(path.relative_to(root)), parser.text())


def bible(raw_dir: Path) -> Iterator[Document]:
    """The King James Version, one document per chapter, verse numbers kept ("3:16 For God so loved ...")."""
    command = [
        str((raw_dir / "bible-kjv/usr/bin/bible").resolve()),
        "-p",
        str((raw_dir / "bible-kjv-text/usr/lib").resolve()),
        "-f",
        "gen1:1-rev22:21",
    ]
    dump = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    chapters: dict[tuple[str, str], list[str]] = {}
    for line in dump.splitlines():
        if match := re.match(r"(\d?[A-Za-z]+)(\d+):(\d+) (.*)", line):
            chapters.setdefault((match[1], match[2]), []).append(f"{match[2]}:{match[3]} {match[4]}")
    for (book, chapter), verses in chapters.items():
        yield Document("bible-kjv", f"{book}{chapter}", "\n".join([f"{BOOKS.get(book, book)}, chapter {chapter}", "", *verses]))


BOOKS = {
    "Ge": "Genesis", "Exo": "Exodus", "Lev": "Leviticus", "Num": "Numbers", "Deu": "Deuteronomy", "Josh": "Joshua", "Jdgs": "Judges", "Prv": "Proverbs", "Psa": "Psalms",
    "Eccl": "Ecclesiastes", "Isa": "Isaiah", "Jer": "Jeremiah", "Lam": "Lamentations", "Eze": "Ezekiel", "Dan": "Daniel", "Hos": "Hosea", "Est": "Esther", "Neh": "Nehemiah",
    "Mat": "Matthew", "Rom": "Romans", "Gal": "Galatians", "Eph": "Ephesians", "Col": "Colossians", "Heb": "Hebrews", "Jas": "James", "Rev": "Revelation", "Phi": "Philippians",
}  # fmt: skip


class Synset(NamedTuple):
    offset: str
    kind: str
    words: list[str]
    gloss: str
    examples: list[str]
    hypernyms: list[str]
    antonyms: list[tuple[int, str, int]]


class PrimarySense(NamedTuple):
    offset: str
    is_common: bool


KINDS = {"n": "noun", "v": "verb", "a": "adjective", "s": "adjective", "r": "adverb"}


def synsets(raw_dir: Path) -> Iterator[Synset]:
    for part in ("noun", "verb", "adj", "adv"):
        for line in (raw_dir / f"wordnet-base/usr/share/wordnet/data.{part}").read_text(encoding="latin-1").splitlines():
            if not line.startswith("  "):
                yield _synset(line)


def primary_senses(raw_dir: Path) -> dict[tuple[str, str], PrimarySense]:
    """(kind, lower-case word) -> its most frequent sense; common words are those WordNet's own tagged texts contain."""
    senses = {}
    for part, kind in (("noun", "noun"), ("verb", "verb"), ("adj", "adjective"), ("adv", "adverb")):
        for line in (raw_dir / f"wordnet-base/usr/share/wordnet/index.{part}").read_text(encoding="latin-1").splitlines():
            if not line.startswith("  "):
                fields = line.split()
                count = int(fields[2])
                senses[(kind, fields[0].replace("_", " "))] = PrimarySense(fields[-count], int(fields[-count - 1]) > 0)
    return senses


def _synset(line: str) -> Synset:
    head, _, gloss = line.partition(" | ")
    fields = head.split()
    count = int(fields[3], 16)
    words = [re.sub(r"\(\w+\)$", "", word).replace("_", " ") for word in fields[4 : 4 + 2 * count : 2]]
    pointers = fields[4 + 2 * count + 1 :]
    hypernyms, antonyms = [], []
    for at in range(0, 4 * int(fields[4 + 2 * count]), 4):
        symbol, target, _, ends = pointers[at : at + 4]
        if symbol in ("@", "@i"):
            hypernyms.append(target)
        elif symbol == "!":
            antonyms.append((int(ends[:2], 16), target, int(ends[2:], 16)))
    examples = re.findall(r'"([^"]{3,})"', gloss)
    meaning = re.sub(r"\s+", " ", re.split(r'[;,:]?\s*"', gloss)[0]).strip(" ;")
    return Synset(fields[0], KINDS[fields[2]], words, meaning, examples, hypernyms, antonyms)


def wordnet(raw_dir: Path) -> Iterator[Document]:
    """Glosses as a dictionary, 25 neighbouring entries to a document."""
    entries: list[str] = []
    for synset in synsets(raw_dir):
        entry = f"{', '.join(synset.words)} ({synset.kind}): {synset.gloss}."
        entries.append(entry + "".join(f' "{example}"' for example in synset.examples))
        if len(entries) == 25:
            yield Document("wordnet", f"{synset.kind}-{synset.offset}", "\n".join(entries))
            entries = []
