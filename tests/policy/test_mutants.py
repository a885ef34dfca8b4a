# The mutants of tests/mutants.toml fit the source: each changes one place that exists, and names a test that exists.
# Whether that test finds it, `python tests/mutants.py` shows.
import collections
import re

import pytest

import mutants

ALL = mutants.read()
FIELDS = {"name", "file", "find", "replace", "test", "build"}


def test_names_are_unique():
    assert ALL and collections.Counter(mutant["name"] for mutant in ALL).most_common(1)[0][1] == 1


@pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: mutant["name"])
def test_a_mutant_fits_the_source(mutant):
    assert set(mutant) == FIELDS and mutant["build"] in mutants.BUILDS
    assert mutant["find"] != mutant["replace"]
    assert (mutants.REPO / mutant["file"]).read_text().count(mutant["find"]) == 1, (
        f"`find` of {mutant['name']!r} in tests/mutants.toml has to be in {mutant['file']} once: write it as it is now"
    )
    compiled = mutant["file"].endswith((".cpp", ".h", ".cu", ".cuh")) and not mutant["test"].startswith("tests/policy/")
    assert (mutant["build"] == "python") == (not compiled)
    file, _, test = mutant["test"].partition("::")
    text = (mutants.REPO / file).read_text()
    assert not test or re.search(rf"^def {re.escape(test.partition('[')[0])}\(", text, re.M), mutant["test"]
