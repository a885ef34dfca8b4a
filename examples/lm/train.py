"""The training of one model, step by step, with loss, time and memory of each step, and the contents of its checkpoint.
Reads no files and prints nothing."""

import contextlib
import math
import time
from dataclasses import dataclass, replace

import torch
from torch import nn

from .config import Config, ExampleError
from .data import Batches
from .data_parallel import DataParallelAdamW
from .moe import shares
from .optimizer import OPTIMIZERS
from .parallel import ALONE

MEMORY_MEANING = {
    "cuda": "weights, optimizer state and the peak of torch.cuda.max_memory_allocated in a step",
    "cpu": "weights, optimizer state and the bytes kept for backward (saved-tensor hooks)",
}


@dataclass(frozen=True)
class Step:
    """The measurements of one training step."""

    loss: float  # nats per byte
    seconds: float
    memory: int  # bytes, in the meaning of MEMORY_MEANING
    norm: float  # of the gradient, before it is clipped
    aux_loss: float | None = None  # of the experts, which `loss` does not contain
    load: tuple[float, ...] = ()  # each expert's share


def set_determinism(config: Config, device: torch.device) -> None:
    """Attention's backward on CUDA repeats its bits only under torch's switch (and is 2.5 times slower there).
    That switch needs CUBLAS_WORKSPACE_CONFIG for torch's own products; it is read when CUDA starts."""
    torch.use_deterministic_algorithms(config.deterministic and device.type == "cuda")
    # Filling fresh memory with NaN finds bugs and costs bandwidth; every op here writes all of its output.
    torch.utils.deterministic.fill_uninitialized_memory = False


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Mean negative log likelihood in nats per byte of tokens [batch, seq + 1], each predicted from those before it."""
    return model(tokens[:, :-1], tokens[:, 1:])


class Trainer:
    """A model, its optimizer and its progress: `done` steps. Step i trains on batches[i], at a rate that depends on i
    alone, so a run may be stopped and extended."""

    def __init__(self, model: nn.Module, config: Config, device: torch.device, compiled: bool = False):
        self.model, self.config, self.device = model, config, device
        self.ranks = getattr(model, "ranks", ALONE)
        self.forward = torch.compile(model, dynamic=False) if compiled else model
        if config.data_parallel:
            self.optimizer = DataParallelAdamW(model, config, self.ranks)
            self.forward = self.optimizer.ddp
        else:
            self.optimizer = OPTIMIZERS[config.optimizer](model)
        self.mixtures = getattr(model, "mixtures", None)
        if self.mixtures and config.stashed:
            self.mixtures.stash(config)
        if self.mixtures and config.graphed:
            self.mixtures.capture(config, model.recipe)
        self._scaled = model.scaled_modules() if hasattr(model, "scaled_modules") else {}
        self.done = 0

    def learning_rate(self) -> float:
        """Linear warm-up, then the inverse square root of the step."""
        step, warmup = self.done + 1, self.config.warmup
        return self.config.lr * min(step / warmup, math.sqrt(warmup / step))

    def step(self, batches: Batches) -> Step:
        tokens = batches[self.done].to(self.device)
        meter = _Meter(self.device, self.model)
        begin = time.perf_counter()
        losses, aux_losses, tokens_per_expert = [], [], []
        microbatches = self.ranks.own_windows(tokens).chunk(self.config.accumulate)
        for number, microbatch in enumerate(microbatches, 1):
            if self.mixtures:
                self.mixtures.begin()
            with self.optimizer.accumulating(is_last=number == len(microbatches)):
                with meter:
                    loss = loss_of(self.forward, microbatch)
                    if self.config.accumulate > 1:
                        loss = loss / self.config.accumulate
                    objective = loss
                    if self.mixtures:
                        aux_losses.append(self.mixtures.aux_loss() / self.config.accumulate)
                        tokens_per_expert.append(self.mixtures.tokens())
                        objective = loss + aux_losses[-1]
                objective.backward()
            losses.append(loss.detach())
        norm = self.optimizer.step(self.learning_rate())
        value = self.ranks.mean_over_replicas(sum(losses)).item()  # waits for the device: the time is that of all
        seconds = time.perf_counter() - begin
        if not math.isfinite(value):
            raise ExampleError(
                f"the loss is {value} in step {self.done + 1}: training stops and saves nothing; the last checkpoint, "
                "if there is one, is from before"
            )
        self.done += 1
        step = Step(value, seconds, meter.bytes() + self.optimizer.state_bytes(), norm.item())
        if self.mixtures:
            aux_loss, load = sum(aux_losses).item(), shares(sum(tokens_per_expert))
            step = replace(step, aux_loss=aux_loss, load=tuple(load))
        return step

    @contextlib.contextmanager
    def _evaluating(self):
        """Graphs are replayed in train mode alone."""
        self.model.train(not self.config.graphed)
        try:
            yield
        finally:
            self.model.train()

    @torch.no_grad()
    def bits_per_byte(self, held_out: list[torch.Tensor]) -> float:
        with self._evaluating():
            losses = [loss_of(self.model, tokens.to(self.device)).item() * len(tokens) for tokens in held_out]
        return sum(losses) / sum(map(len, held_out)) / math.log(2)

    @torch.no_grad()
    def sample(self, prompt: bytes, length: int) -> bytes:
        """The prompt continued byte by byte at temperature 0.8. Leaves the global random state as it is."""
        chance = torch.Generator().manual_seed(self.config.seed)
        text = list(prompt)
        for _ in range(length):
            window = torch.tensor([text[-self.config.seq :]], device=self.device)
            with self._evaluating():
                logits = self.ranks.next_logits(self.model, window).float().cpu()
            text.append(torch.multinomial(torch.softmax(logits / 0.8, 0), 1, generator=chance).item())
        return bytes(text)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The contents of a checkpoint besides `done`, on this rank: weights, optimizer, random
        states."""
        tensors = self.optimizer.tensors()
        tensors |= self._scales()
        tensors["random.cpu"] = torch.get_rng_state()
        if self.device.type == "cuda":
            tensors["random.cuda"] = torch.cuda.get_rng_state(self.device)
        return tensors

    def _scales(self) -> dict[str, torch.Tensor]:
        """Delayed scaling's state: the _extra_state of a state_dict."""
        return {f"scales.{name}": module.get_extra_state() for name, module in self._scaled.items()}

    def restored(self, tensors: dict[str, torch.Tensor], done: int) -> None:
        """Call it after a checkpoint has been written into `tensors`, the result of tensors()."""
        self.done = done
        self.optimizer.set_step_count(done)
        for name, module in self._scaled.items():
            module.set_extra_state(tensors[f"scales.{name}"])
        torch.set_rng_state(tensors["random.cpu"])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(tensors["random.cuda"], self.device)


class _Meter(contextlib.AbstractContextManager):
    """Memory of one step beyond the model's state; a context around each forward. On CUDA it is the allocator's peak
    above the start, so the other model's state does not count; on a CPU it is the bytes that the last forward keeps."""

    def __init__(self, device: torch.device, model: nn.Module):
        self.cuda = device.type == "cuda"
        self.kept = {}
        if self.cuda:
            torch.cuda.reset_peak_memory_stats(device)
            self.device, self.before = device, torch.cuda.memory_allocated(device)
        else:
            self.parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.parameters:
            self.kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    def __enter__(self):
        if not self.cuda:
            self.kept = {}
            self.hooks = torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor)
            self.hooks.__enter__()
        return self

    def __exit__(self, *error):
        if not self.cuda:
            self.hooks.__exit__(*error)

    def bytes(self) -> int:
        if self.cuda:
            return torch.cuda.max_memory_allocated(self.device) - self.before
        return sum(self.kept.values())
