# The structure of the source is the one that docs/develop/architecture.md describes (house.py measures it).
import re

import house
import pytest
import walks

KNOWN = house.modules()
ARROWS = house.arrows(KNOWN)
DOCUMENT = (house.REPO / "docs/develop/architecture.md").read_text()


def test_every_folder_is_in_a_layer():
    assert {house.folder_of(name) for name in KNOWN} <= set(house.LAYER)
    assert len(ARROWS) > 500, "the search found hardly anything"


def test_no_file_imports_itself_by_way_of_others():
    assert not house.circles(ARROWS)


def test_imports_run_down():
    assert not house.upward(ARROWS)


def test_folders_of_one_layer_import_each_other_in_one_direction():
    assert not house.circles(house.sideways(ARROWS))


def test_nothing_of_the_package_is_imported_inside_of_a_function():
    assert not house.imports_in_functions(KNOWN)


def test_helpers_of_tests_are_few():
    """A helper of one folder of tests is in that folder: tests/pytorch/README.md."""
    assert 1 <= len(list((house.REPO / "tests/pytorch/helpers").glob("*.py"))) <= 15


def test_nothing_is_written_twice():
    assert not house.repeats()


def test_the_walk_is_the_one_of_the_document():
    assert walks.as_text("swiglu") in DOCUMENT, "run `bash qa/regenerate.sh`"


def test_layers_are_those_of_the_document():
    assert house.layers_as_text() in DOCUMENT, "run `bash qa/regenerate.sh`"


NAMED = re.findall(r"`((?:transformer_engine|tests|benchmarks|qa|docs)/[\w./]+)`", DOCUMENT)


@pytest.mark.parametrize("where", sorted(set(NAMED)))
def test_what_the_document_names_is_there(where):
    assert where.endswith("/_C") or (house.REPO / where).exists()  # which a build makes
