"""examples/with_*.py do what they say, each in a process of its own, and name the `pip install` of an extra that is not
there. Those whose extra this machine lacks are skipped, by name (qa/setup.sh installs all of them where it can), and
fail where CI=true."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torchrun import TORCHRUN

import with_fsdp2
import with_hf_llama
import with_lora

EXAMPLES = Path(with_lora.__file__).parent
EXTRAS = {"accelerate": "accelerate", "lightning": "lightning", "hf_llama": "transformers"}


def needs_extra(extra):
    there = importlib.util.find_spec(extra) is not None
    return pytest.mark.skipif(
        not there and os.environ.get("CI") != "true",
        reason=f"needs the extra: pip install 'transformer_engine[{extra}]'",
    )


def run(*command, **options):
    done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, timeout=300, **options)
    return done.returncode, done.stdout, done.stderr


def losses(text):
    return [float(number) for number in re.findall(r"loss (\d+\.\d+)", text)]


@needs_extra("accelerate")
def test_accelerate_replaces_and_trains(tmp_path):
    code, out, error = run(EXAMPLES / "with_accelerate.py", "--cpu", cwd=tmp_path)
    assert code == 0, error
    assert "in the model: LayerNorm, Linear, Linear" in out
    first, last = losses(out)
    assert last < first / 2


@needs_extra("lightning")
def test_lightning_replaces_and_trains(tmp_path):
    code, out, error = run(EXAMPLES / "with_lightning.py", "--cpu", cwd=tmp_path)
    assert code == 0, error
    assert "in the model: LayerNorm, Linear, Linear" in out
    first, last = losses(out)
    assert last < first / 2


@needs_extra("transformers")
def test_llama_has_its_logits_and_trains_in_fp8(capsys):
    assert with_hf_llama.main([]) == 0
    out = capsys.readouterr().out
    off = float(re.search(r"off by at most (\S+) of", out)[1])
    # fp32: two layers of four products in a row, sums of at most 176 terms, each rounded by 2^-24.
    assert off <= 2 * 4 * 176 * 2**-24
    first, last = losses(out)
    assert last < first / 2


@needs_extra("transformers")
def test_llama_refuses_what_it_would_get_wrong():
    import transformers

    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16}
    for options, words in (
        ({"attention_bias": True}, "without biases"),
        ({"hidden_act": "gelu"}, "with silu"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "rope_type 'dynamic'"),
    ):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **options))
        layer = model.model.layers[0]
        with pytest.raises(NotImplementedError, match=words):
            with_hf_llama.fuse(model)
        assert model.model.layers[0] is layer
    model = with_hf_llama.fuse(transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)))
    device = model.lm_head.weight.device
    tokens = torch.zeros(2, 4, dtype=torch.int64, device=device)
    padding = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]], device=device)
    with pytest.raises(NotImplementedError, match="attention_mask"):
        model(tokens, attention_mask=padding)


@pytest.mark.dist
def test_fsdp2_trains_the_same_on_two_ranks(tmp_path, capsys):
    """Two ranks with half of the batch each have the loss of one rank with all of it, but for rounding."""
    assert with_fsdp2.main([]) == 0
    alone = capsys.readouterr().out
    for _ in range(2):
        code, together, error = run(*TORCHRUN[1:], EXAMPLES / "with_fsdp2.py", cwd=tmp_path)
        if "terminate called without an active exception" not in error:  # torch's threads, as a process ends: once more
            break
    assert code == 0, error
    assert "1 ranks" in alone and "2 ranks" in together
    first, last = losses(alone)
    assert last < 0.9 * first
    assert losses(together) == pytest.approx([first, last], rel=1e-3)


def test_lora_trains_beside_a_frozen_fp8_weight(capsys, monkeypatch):
    made = []
    monkeypatch.setattr(with_lora, "LoRA", lambda given, make=with_lora.LoRA: made.append(make(given)) or made[0])
    assert with_lora.main(["--hidden", "128"]) == 0
    out = capsys.readouterr().out
    first, last = losses(out)
    assert last < first / 2
    assert "frozen: 16384 weights, 8192 bytes of optimizer state" in out  # two moments of A and B, 2 x 4 x 128 floats
    frozen = made[0].frozen.weight
    assert frozen.grad is None and not frozen.requires_grad and type(frozen).__name__ == "Float8Tensor"


@pytest.mark.parametrize("script, extra", EXTRAS.items())
def test_a_missing_extra_is_named_with_its_command(script, extra, tmp_path):
    code = "import sys, runpy; sys.modules[sys.argv.pop()] = None; runpy.run_path(sys.argv.pop(), run_name='__main__')"
    status, _, error = run("-c", code, EXAMPLES / f"with_{script}.py", extra, cwd=tmp_path)
    assert status == 1 and "Traceback" not in error
    assert f"this example needs {extra}" in error and f"pip install 'transformer_engine[{extra}]'" in error


def test_what_an_extra_misses_itself_is_not_mistaken_for_it(tmp_path):
    (tmp_path / "half_there.py").write_text("import surely_not_installed\n")
    code = "import sys; sys.path[:0] = sys.argv[1:]; import extras; extras.need('half_there', 'half')"
    status, _, error = run("-c", code, EXAMPLES, tmp_path)
    assert status == 1 and "No module named 'surely_not_installed'" in error and "Traceback" in error
