# reference/compatibility.md equals the result of compatibility.py, every name that clients import is there, a name that
# waits for its capability can be imported, subclassed and asked about, and its use raises an error that names it.
import inspect

import pytest
import torch
from api_names import TE, TOP_LEVEL
from support import refused

import transformer_engine.pytorch as te
from transformer_engine.pytorch import permutation
from transformer_engine.pytorch._internal.absent import absent as mark_absent

from .compatibility import DOCUMENT, absent, document, reason


def test_the_document_is_up_to_date():
    wanted, found = DOCUMENT.read_text().splitlines(), document().splitlines()
    differing = [line for line in found if line not in wanted] + [f"no longer: {w}" for w in wanted if w not in found]
    assert found == wanted, "run `bash qa/regenerate.sh`: " + "\n".join(differing)


def absent_names():
    names = {name for group in TOP_LEVEL.values() for name in group.split()}
    return sorted(name for name in names if absent(getattr(te, name, None)))


@pytest.mark.parametrize("name", absent_names())
def test_an_absent_name_is_named_for_any_arguments(name):
    target = getattr(te, name)
    assert target.__module__.startswith(TE) and target.__name__ == name and target.__doc__
    for args, kwargs in (((), {}), ((torch.ones(2), "x"), {"unknown": 1})):
        with refused(NotImplementedError, name, "not available in this version"):
            target(*args, **kwargs)
    if isinstance(target, type):
        assert not isinstance(torch.ones(1), target)
        client = type("Client", (target,), {})
        with refused(NotImplementedError, name):
            client()


def test_an_absent_module_keeps_its_signature_and_its_subclasses():
    class Client(te.FusedMLAQUpProjRopeQuant):
        def __init__(self, config, *args, **kwargs):
            self.config = config
            super().__init__(*args, **kwargs)

    assert issubclass(Client, torch.nn.Module)
    with refused(NotImplementedError, "FusedMLAQUpProjRopeQuant"):
        Client({}, 2, 8, 8)
    assert inspect.signature(permutation.moe_permute).parameters["map_type"].default == "mask"


def test_the_bases_of_quantized_tensors_are_not_made_by_themselves():
    for base in (te.QuantizedTensorStorage, te.QuantizedTensor):
        for data in ((torch.ones(2), torch.float32), ([1.0], torch.float32)):
            with refused(TypeError, base.__name__, "by a quantizer"):
                base(*data)
    assert not isinstance(torch.nn.Parameter(torch.ones(1)), te.QuantizedTensor)


def test_the_decorator():
    @mark_absent("teleportation is", "walk")
    def travel(to, *, fast=False):
        """Goes there."""

    with pytest.raises(NotImplementedError) as caught:
        travel("home", fast=True)
    assert str(caught.value).endswith("travel: teleportation is not available in this version; walk.")
    assert reason(caught.value) == "teleportation"
    assert travel.__doc__ == "Goes there." and list(inspect.signature(travel).parameters) == ["to", "fast"]


def test_top_level_has_no_name_that_the_table_does_not_know():
    """A new public name gets its line in api_names.py."""
    known = {name for group in TOP_LEVEL.values() for name in group.split()}
    public = {name for name, value in vars(te).items() if not name.startswith("_") and not inspect.ismodule(value)}
    assert len(public) > 60 and not public - known
