# docs/reference/api has exactly the pages that api_pages.py makes of the library.
import inspect

import pytest

import transformer_engine.pytorch as te

from .api_meanings import CALL, CONSTRUCTOR, OF
from .api_pages import DOCS, MODULES, pages, refusals

PAGES = pages()


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_up_to_date(page):
    path = DOCS / "api" / page
    assert path.exists() and path.read_text() == PAGES[page], "run `bash qa/regenerate.sh`"


def test_no_page_is_left_over():
    assert {path.name for path in (DOCS / "api").iterdir()} == set(PAGES)


def test_no_meaning_is_left_over():
    """Of an argument that is gone, or of another module."""
    constructors, calls = ({name: set() for name in MODULES} for _ in range(2))
    for name in MODULES:
        for function, found in ((getattr(te, name).__init__, constructors), (getattr(te, name).forward, calls)):
            found[name] = set(inspect.signature(function).parameters)
    assert set(CONSTRUCTOR) <= set().union(*constructors.values())
    assert set(CALL) <= set().union(*calls.values())
    assert all(argument in constructors[name] | calls[name] for name, argument in OF)


def test_refusals_are_read_from_the_compatibility_page():
    document = (DOCS / "compatibility.md").read_text()
    assert refusals(document, "DotProductAttention", "Constructor")["cp_group"] == "context parallelism"
    assert refusals(document, "DotProductAttention", "Call")["inference_params"] == "a key-value cache"
    assert refusals(document, "DotProductAttention", "Call")["query_layer"] == ""
