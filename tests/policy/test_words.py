# The extension speaks of a layer in the words of its field (docs/glossary.md): names that were replaced do not come
# back, in code, comments or file names. Mutant: a class `Keeper` in csrc turns these red.
import re
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
CSRC = REPO / "transformer_engine/pytorch/csrc"

# The name that was, and the one that is; in the folder, or in all of csrc where there is none.
REPLACED = [
    ("Source", "Prologue", "layer"),
    ("SourceInput", "PrologueInput", ""),
    ("TakenBack", "PrologueBackward", ""),
    ("take_back", "backward", ""),
    ("brings_operand_back", "recomputes_operand", ""),
    ("keeps_width", "is_identity", ""),
    ("Exchange", "TPComm", ""),
    ("Transfer", "CommOp", ""),
    ("Passing", "PendingResult", ""),
    ("Arriving", "GatherFuture", ""),
    ("Quantizing", "QuantizeAt", ""),
    ("Stage", "LayerConfig", ""),
    ("Chain", "LayerChain", "layer"),
    ("Call", "LayerArgs", "layer"),
    ("Products", "GemmPolicy", "layer"),
    ("WeightProduct", "WgradTask", ""),
    ("WeightGradSink", "GradAccumulator", ""),
    ("sink", "grad_accumulator", ""),
    ("Keeper", "SaveContext", ""),
    ("Kept", "SavedInfo", "core"),
    ("Fate", "SaveMode", ""),
    ("Keeping", "SaveFor", ""),
    ("Lease", "ScopedBuffer", ""),
    ("Leases", "ScopedBuffers", ""),
    ("Route", "DispatchMode", ""),
    ("Directions", "QuantizeUsage", ""),
    ("Faces", "OpRegistration", ""),
    ("Offered", "SaveRequest", ""),
    ("Taken", "PackedStorage", "saved_hooks"),
]


@pytest.mark.parametrize(("was", "now", "folder"), REPLACED)
def test_replaced_names_stay_away(was, now, folder):
    sources = [p for p in (CSRC / folder).rglob("*") if p.suffix in {".h", ".cpp"}]
    texts = {p.relative_to(CSRC).as_posix(): p.read_text() for p in sources}
    assert any(re.search(rf"\b{now}\b", text) for text in texts.values()), f"{now!r} is not there"
    found = [name for name, text in texts.items() if re.search(rf"\b{was}\b", text)]
    assert not found, f"{was!r} in {found}: the word is {now!r}"
