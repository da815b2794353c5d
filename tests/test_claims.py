"""Each claim of README is in ``benchmarks/CLAIMS.md``, with what shows it."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CLAIM = re.compile(r"(?<!\w)\d|\b(never|every|exact|exactly|always|nothing|no)\b", re.IGNORECASE)


def prose(text):
    """The paragraphs of a page, each in one line, without programs, headings and targets of links."""
    text = re.sub(r"^```.*?^```", "\n\n", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^#+ .*$", "\n", text, flags=re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)", "]", text).replace("**", "")
    return [" ".join(part.split()) for part in re.split(r"\n\s*\n|^- ", text, flags=re.MULTILINE)]


def sentences(paragraph):
    """Where each sentence begins and ends."""
    ends = [found.end() for found in re.finditer(r"[.:;?!](?= [A-Z\[`])", paragraph)]
    return zip([0, *ends], [*ends, len(paragraph)], strict=True)


README = prose((ROOT / "README.md").read_text("utf-8"))
ROWS = re.findall(
    r"^\| (?!claim)(.+?) \| (.+) \|$", (ROOT / "benchmarks/CLAIMS.md").read_text("utf-8"), re.M
)
PATTERNS = [re.compile(re.escape(claim).replace(r"\.\.\.", ".{1,60}?")) for claim, _ in ROWS]
SHOWN = sorted({shown for _, by in ROWS for shown in re.findall(r"`([\w./:-]+)`", by)})


def test_each_claim_stands_in_readme():
    gone = [p.pattern for p in PATTERNS if not any(p.search(part) for part in README)]
    assert gone == []


def test_every_claim_of_readme_is_listed():
    missing = []
    for part in README:
        listed = [found.span() for pattern in PATTERNS for found in pattern.finditer(part)]
        for start, end in sentences(part):
            claims = CLAIM.search(re.sub("`[^`]*`", "", part[start:end]))
            if claims and not any(a < end and start < b for a, b in listed):
                missing.append(part[start:end].strip())
    assert missing == []


def exists(shown):
    """A path, or a path and the name of a test in it."""
    path, _, name = shown.partition("::")
    file = ROOT / path
    return file.exists() and (not name or f"def {name}(" in file.read_text("utf-8"))


def test_what_shows_a_claim_exists():
    assert [shown for shown in SHOWN if "/" in shown and not exists(shown)] == []
    assert not exists("tests/test_claims.py::test_of_no_such_name")


def test_each_claim_is_shown_by_a_test_a_benchmark_a_page_or_a_source():
    assert [
        c for c, by in ROWS if not re.search(r"`(tests|benchmarks|docs)/|scikit-learn", by)
    ] == []


def test_sentences_with_numbers_and_absolutes_are_claims():
    said = ["It takes 3 s.", "Never so.", "at M4's hours", "Exactly.", "HDF5 and R2", "noon"]
    assert [bool(CLAIM.search(text)) for text in said] == [True, True, False, True, False, False]
