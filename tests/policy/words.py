# Lists identifiers and file names that were replaced (REPLACED) and turns of prose that are not plain English (PROSE).
# test_words.py fails if there is one; `python tests/policy/words.py FOLDER` lists those of a folder.
import io
import re
import sys
import tokenize
from pathlib import Path

import functions
import prose

REPO = Path(__file__).parents[2]
TOPS = ["transformer_engine", "transformer_engine_torch", "tests", "benchmarks", "examples", "build_backend"]
PROSE_TOPS = [*TOPS, "cmake", "qa", "docs", ".ci", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "CMakeLists.txt"]
CODE = functions.CPP | {".py"}
TEXT = CODE | {".md", ".sh", ".cmake", ".toml", ".txt"}
GENERATED = ("docs/reference/api/", "docs/reference/compatibility.md", "docs/reference/results.md")
# These files spell the words themselves: the patterns and their tests, and the glossary, which explains some of them.
LEFT_OUT = ("tests/policy/words.py", "tests/policy/test_words.py", "docs/develop/glossary.md")

PYTORCH, CSRC, ENGINE = "transformer_engine/pytorch/", "transformer_engine/pytorch/csrc/", "transformer_engine/common/"
SUITES = "tests/pytorch/"
SAVED = (CSRC + "saved_hooks/", PYTORCH + "saved/", SUITES + "saved/", PYTORCH + "stash/", CSRC + "stash/")
GRAPH = (PYTORCH + "graph/", SUITES + "graph/")
STASH = (CSRC + "stash/", PYTORCH + "stash/", SUITES + "stash/")
PRODUCT = ("transformer_engine/",)
C_API = ENGINE + "include/"

# (names that were, where, the names of the field). A name is a whole token; a file's name has it between underscores.
REPLACED = [
    ("Source", (CSRC,), "Prologue"),
    ("make_again take_back keeps_width brings_operand_back SourceInput TakenBack", ("",), "recompute, backward, ..."),
    ("Exchange Transfer Passing Arriving", ("",), "TPComm, CommOp, PendingResult, GatherFuture"),
    ("expect room take next", (CSRC + "layer/tp_comm",), "plan_chunks, output_buffer, store_chunk, next_chunk"),
    ("Quantizing kBefore kTogether kBehind", (CSRC,), "QuantizeAt kBeforeGather, kWithSharedAmax, kAfterGather"),
    ("Stage Chain Call number", (CSRC + "layer/",), "LayerConfig, LayerChain, LayerArgs, layer_idx"),
    ("Products WeightProduct", (CSRC,), "GemmPolicy, WgradTask"),
    ("WeightGradSink", (CSRC, PYTORCH), "GradAccumulator"),
    ("sink", (CSRC + "wgrad/", CSRC + "layer/", PYTORCH + "module/"), "GradAccumulator"),  # attention has sinks
    ("Keeper Kept Fate Keeping", (CSRC, PYTORCH + "saved/", PYTORCH + "probe/"), "SaveContext, SavedInfo, SaveMode"),
    ("words tell", (CSRC + "core/", CSRC + "layer/", PYTORCH + "saved/"), "reason, recompute_cost"),
    ("door Client Offered Taken Foreign Composed", SAVED, "saved_tensor_hooks, StorageHandler, SaveRequest, ..."),
    ("lease leases Lease Leases lent loans", ("",), "CommBufferPool, ScopedBuffer, is_pooled, AliasedGrads"),
    ("settle", GRAPH, "AliasedGrads"),
    ("flight Pass spoilt_by untouched draft own_call installed writes", GRAPH, "in_flight, CapturedMicrobatch, ..."),
    ("retelling surroundings", ("",), "error_context, autocast_state"),
    ("lane lanes point visit front members pieces park", STASH, "stream, event, scope, api, tensors, segments, ..."),
    ("Take Give Room Held", (ENGINE + "ops/stash/",), "PageAlloc, PageFree, FreeSpace, StoredEntry"),
    ("faces Faces route Route made onward Onward directions Directions", (CSRC,), "op_registration, DispatchMode, ..."),
    ("joining", ("",), "flat_params"),  # row_units() is public
    ("porch walls rooms floors card", ("",), "fused-store header, required files, op folders, layers, how-to"),
    ("depth cols slab line block sums Ring Notes Extent Job Plan hold", (ENGINE + "ops/gemm/",), "K, N, MmaAtom, ..."),
    ("again whole both how behind here there", PRODUCT, "recompute_operand, total_rows, keep_high_precision, ..."),
]

# (parts of names that are deeds of persons, where). The C API's names are public and stay.
DEEDS = [
    ("asks believes forgets hears knows lends loan loans owes remembers says speaks tells wants", ("",)),
    ("asked asking heard lent said tell told unasked", PRODUCT),
]

# {what it is: pattern} of prose.
PROSE = {
    "a person": r"(?i:\b(nobody|somebody|anybody|everybody|whoever|someone|anyone|everyone)\b)",
    "who": r"(?<!people )(?<!users )(?<!those )(?<!readers )(?<!user )\b[Ww]hom?\b",
    "says, tells": r"\b(says|said|tells|told)\b",
    "knows": r"\b(knows|knew)\b",
    "wants": r"\bwants\b",
    "hears, forgets, believes": r"\b(hears?|heard|forgets?|forgot|remembers?|believes?|learns|notices|thinks|cares|asks"
    r"|speaks|lends|owes)\b",
    "without a word": r"\bwithout a word\b|\bin silence\b",
    "its word, its door": r"(\w's|s'|\bits|\btheir) (words?|business|affair|wish|door|mind)\b|\bdoors?\b",
    "X is Y's": r"\b(is|are|was|were|be) (?:not |also |both )?(?:the |a |an |its |their |another |one |each )?"
    r"(?:\w+ )?\w+(?:'s|s')(?=[.,;:)]| and | or | alone|$)",
    "what is none": r"\b(what|that) (is|are|was|were) (no|none)\b|\b(is|are) none of\b",
    "What ... as a subject": r"(?:^|[.;] )What (?![^.?]*\?)",
    "is what": r"\b(is|are|was|were) what\b",
    "of what is": r"\b(of|from|with|than|beside|behind|by|to|for|in) what "
    r"(is|are|was|were|has|have|had|comes?|lies|stands)\b",
    "goes back from": r"\b(go|goes|went|going|gone) back (from|through)\b",
    "is to have": r"\b(is|are|was|were) to (have|be|become|get|go|come|hold|keep|leave|take|do|run)\b",
    "behind, in time": r"\bbehind (?:(?:it|them|that|this|which|the (?:\w+ )?(?:step|backward|forward|call|capture|copy"
    r"|wait|launch|replay|loss|first|last|forwards?|backwards?|run|constructor|pass|gather|collective))\b"
    r"|(?:an?|each|every) )",
    "anew": r"\banew\b",
    "that one's": r"\b(that|this|other|first|last|next|second|each|any|former) one's\b|\bthe other's\b",
    "lies, stands": r"\b(lie|lies|lay|stands?|stood) (there|in|at|on|where|beside|between|by|as|behind|here)\b",
    "Nor, So is": r"(?:^|[.;:] )(Nor|So (is|are|do|does|has|have|was|were|can|may|must)|Neither)\b",
}
PATTERNS = {name: re.compile(pattern) for name, pattern in PROSE.items()}


def files(tops, suffixes):
    for top in tops:
        found = [REPO / top] if (REPO / top).is_file() else sorted((REPO / top).rglob("*"))
        for path in found:
            name = path.relative_to(REPO).as_posix()
            wanted = path.suffix in suffixes and path.is_file() and "__pycache__" not in path.parts
            if wanted and not name.startswith((*GENERATED, *LEFT_OUT)):
                yield name, path


def identifiers(path):
    """(line, name) of each name in the code of a file; a C++ member counts where its struct declares it."""
    text = path.read_text()
    if path.suffix == ".py":
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        return [(t.start[0], t.string) for t in tokens if t.type == tokenize.NAME]
    code = functions.BLANKED.sub(lambda m: m[0] if "#" in m[0][:9] else re.sub(r"[^\n]", " ", m[0]), text)
    return [
        (n, name)
        for n, line in enumerate(code.splitlines(), 1)
        for name in re.findall(r"(?<![\w.])(?<!->)[A-Za-z_]\w*", line)
    ]


def replaced_in(path):
    """{name that was: names that are} where this file may not have it. The names of the C API are public and stay."""
    if path.startswith(C_API):
        return {}
    return {was: now for names, scopes, now in REPLACED if path.startswith(scopes) for was in names.split()}


def parts(name):
    """The words of a name, with underscores or in camel case."""
    return {part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


def deeds_in(path):
    """The parts that no name in this file may have."""
    if path.startswith(C_API):
        return set()
    return {part for names, scopes in DEEDS if path.startswith(scopes) for part in names.split()}


def identifier_hits():
    """[(file, line, name, what it becomes)]; line 0 is the file's name."""
    found = []
    for name, path in files(TOPS, CODE):
        replaced = replaced_in(name)
        stem = f"_{path.stem}_"
        found += [
            (name, 0, was, now)
            for was, now in replaced.items()
            if f"_{was}_" in stem and path.stem not in now.split(", ")
        ]
        names, deeds = identifiers(path), deeds_in(name)
        found += [(name, line, was, replaced[was]) for line, was in names if was in replaced]
        found += [(name, line, was, "the field's word") for line, was in names if parts(was) & deeds]
    return found


def prose_hits():
    """[(file, what it is, the words around it)]"""
    found = []
    for name, path in files(PROSE_TOPS, TEXT):
        for text in prose.prose(path):
            for what, pattern in PATTERNS.items():
                for m in pattern.finditer(text):
                    found.append((name, what, text[max(0, m.start() - 40) : m.end() + 40]))
    return found


if __name__ == "__main__":
    wanted = tuple(sys.argv[1:]) or ("",)
    for name, line, was, now in identifier_hits():
        if name.startswith(wanted):
            print(f"{name}:{line}: {was} -> {now}")
    for name, what, text in prose_hits():
        if name.startswith(wanted):
            print(f"{name}: [{what}] {text}")
