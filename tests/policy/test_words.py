# The source uses the words of its field (docs/develop/glossary.md has its own) and plain sentences: words.py has the
# names that were replaced and the turns of prose that are not plain.
import prose
import pytest
import words


def refuse(hits):
    shown = "\n".join(": ".join(map(str, hit)) for hit in hits[:40])
    assert not hits, f"{len(hits)} hits, wanted none (`python tests/policy/words.py` lists all):\n{shown}"


def test_replaced_identifiers_and_file_names_stay_away():
    refuse(words.identifier_hits())


def test_prose_is_plain():
    refuse(words.prose_hits())


def test_there_are_twenty_patterns_and_one_meaning_for_each_name():
    assert len(words.PROSE) == 20
    assert all(replacement for _, _, replacement in words.REPLACED)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("a person", "a tensor that nobody reads"),
        ("who", "Who computes is selected here"),
        ("says, tells", "the comment says why"),
        ("knows", "the engine knows streams"),
        ("wants", "what the kernel wants"),
        ("hears, forgets, believes", "a rank hears of the error"),
        ("without a word", "lost without a word"),
        ("its word, its door", "the choice is gemm_path's word"),
        ("X is Y's", "the memory is the caller's."),
        ("what is none", "memory that is none of ours"),
        ("What ... as a subject", "What runs before the GEMM."),
        ("is what", "the result is what was saved"),
        ("of what is", "a list of what is saved"),
        ("goes back from", "outputs that the backward goes back from"),
        ("is to have", "a part that is to have one scale"),
        ("behind, in time", "a wait behind the copy"),
        ("anew", "the graph is made anew"),
        ("that one's", "the memory is that one's alone"),
        ("lies, stands", "the tensor lies in a pool"),
        ("Nor, So is", "Gradients are equal. Nor does it allocate."),
    ],
)
def test_each_pattern_finds_its_turn_and_leaves_plain_words(what, text):
    assert words.PATTERNS[what].search(text)
    plain = (
        "Returns null if this operand cannot be gathered asynchronously; the copy waits for the event after the GEMM."
    )
    assert not any(pattern.search(plain) for pattern in words.PATTERNS.values())


def write(folder, name, text):
    path = folder / name
    path.write_text(text)
    return path


def test_prose_of_code_is_comments_texts_and_names_of_tests(tmp_path):
    code = 'x = behind_it\n# One line\n# and `its code` more.\ny = "a text" + "word"\n'
    code += 'def test_of_a_name():\n    """Doc."""\n'
    found = prose.prose(write(tmp_path, "a.py", code))
    assert found == ["One line and ` more.", "a text", "test of a name"]
    code = "y = f\"text {told['says']!r:{told}} more\" f'{told} end'\n"
    assert prose.prose(write(tmp_path, "a.py", code)) == []
    assert prose.prose(write(tmp_path, "a.py", code.replace("more", "more text"))) == ["more text"]
    code = 'int x; // one\n  // comment\nf("a text", \'"\'); /* a block */\nTEST(Some, NameOfIt) {}\n'
    assert prose.prose(write(tmp_path, "a.cpp", code)) == ["one comment", "a text", "a block", "name of it"]
    assert prose.prose(write(tmp_path, "a.md", "# Head\nand\n```\ncode behind it\n```\n")) == ["# Head and `"]


def test_identifiers_are_code_alone(tmp_path):
    path = write(tmp_path, "a.cpp", '// sink\nint lease = f("sink");  /* sink */\n')
    assert [name for _, name in words.identifiers(path)] == ["int", "lease", "f"]
    path = write(tmp_path, "a.h", "struct T { int cols; };\nint n = t.cols + p->depth;\n")
    assert [name for _, name in words.identifiers(path) if name in ("cols", "depth")] == ["cols"]
    path = write(tmp_path, "a.py", '# sink\nlease = "sink"\n')
    assert words.identifiers(path) == [(2, "lease")]
    assert set(words.replaced_in("transformer_engine/pytorch/csrc/layer/tp_comm.h")) >= {"lease", "room", "Call"}
    assert "room" not in words.replaced_in("transformer_engine/pytorch/csrc/layer/forward.cpp")
    header = "transformer_engine/common/include/transformer_engine/stash.h"
    assert words.replaced_in(header) == {} and words.deeds_in(header) == set()


def test_deeds_of_persons_are_found_as_parts_of_names():
    found = words.deeds_in("transformer_engine/pytorch/module/linear.py")
    for name in ("every_rank_says", "WantsGrad", "find_unasked", "NOT_ASKED", "kLoan"):
        assert words.parts(name) & found, name
    for name in ("masks_of", "essays", "is_wanted", "unknown_keyword"):
        assert not words.parts(name) & found, name
    assert "told" in found and "told" not in words.deeds_in("tests/policy/words.py")
