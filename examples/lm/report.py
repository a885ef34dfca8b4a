"""The output of a run: lines on the terminal, metrics.csv and the two plots. Decides nothing about the training."""

import contextlib
import csv
import os
import platform
import sys
from pathlib import Path
from statistics import mean, median

import torch
from matplotlib.figure import Figure
from tqdm import tqdm

import transformer_engine

from .config import Config, ExampleError
from .train import MEMORY_MEANING, Step

COLUMNS = (
    *("step", "loss", "tokens_per_s", "memory_mib", "plain_loss", "plain_tokens_per_s", "plain_memory_mib"),
    *("grad_norm", "plain_grad_norm"),
)
LATER = COLUMNS[-2:]  # not in the files of earlier versions


def columns(config: Config) -> tuple[str, ...]:
    """Of metrics.csv; with experts also their loss and the share of the tokens that each expert has."""
    return COLUMNS + (("aux_loss", *share_columns(config)) if config.experts else ())


def share_columns(config: Config) -> list[str]:
    return [f"expert{i}_share" for i in range(config.experts)]


LAST = 20  # steps whose mean loss is compared
MOST_NAMED = 16  # curves in a legend


def series(config: Config) -> tuple[tuple[str, str, str], tuple[str, str, str]]:
    """(prefix of the columns, name, color) of the run's model and of its twin."""
    ours, twin = ("transformer_engine", "plain PyTorch")
    if config.fp8:
        ours, twin = f"FP8, {config.fp8} scaling", f"the same in {config.dtype}"
    elif config.experts:
        ours, twin = f"{config.experts} experts, {config.topk} a token", "the dense twin"
    return ("", ours, "tab:blue"), ("plain_", twin, "tab:orange")


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):  # not Linux, or an architecture that names no model
        name = platform.processor() or platform.machine()
    return f"CPU {name}, {torch.get_num_threads()} threads"


def header(name: str, config: Config, device: torch.device, text: str, replicas: int) -> str:
    repeats = config.deterministic or device.type == "cpu"
    resume = "bit-equal" if repeats else "exact state, but attention's backward does not repeat its bits"
    microbatches = f" in {config.accumulate} microbatches" if config.accumulate > 1 else ""
    tokens = ", tokens too (sequence parallelism)" if config.sequence_parallel else ""
    head = "the tied embedding and head" if config.tied else "embedding and head"
    active = f"{config.parameters_with(config.topk) / 1e6:.1f}M of them a token's" if config.experts else ""
    mlps = f"{config.experts} experts of SwiGLU {config.expert_hidden}, {active}" if config.experts else ""
    mlps = mlps or f"SwiGLU {config.ffn_hidden}"
    divided = f"divided over {config.tp} ranks: layers, and {head} by the vocabulary{tokens}\n" if config.tp > 1 else ""
    on = [name for name in ("sharded", "overlap", "reproducible") if getattr(config, name)]
    replicated = f"data parallel: {replicas} replicas{''.join(f', {o}' for o in on)}\n" if config.data_parallel else ""
    return (
        f"transformer_engine {transformer_engine.__version__}, torch {torch.__version__}, "
        f"Python {platform.python_version()}, {device_name(device)}\n"
        f"{name}: {config.parameters / 1e6:.1f}M parameters ({config.layers} layers of {config.hidden}, "
        f"{config.heads} heads in {config.kv_groups} groups, {mlps}), {config.dtype}"
        f"{f' with FP8 products ({config.fp8} scaling)' if config.fp8 else ''}, "
        f"{config.optimizer} AdamW on fp32 weights, "
        f"{config.batch} x {config.seq} bytes a step{microbatches}, resume: {resume}\n"
        f"{divided}{replicated}"
        f"text: {text}\n"
        f"memory: {MEMORY_MEANING[device.type]}"
    )


@contextlib.contextmanager
def writing(path: Path):
    """Names the file when the disk refuses."""
    try:
        yield
    except OSError as error:
        raise ExampleError(f"{path}: cannot be written ({error.strerror}): free that disk or choose --out") from error


class Log:
    """The steps of a run: kept, appended to metrics.csv, shown as lines and, on a terminal, under a progress bar."""

    def __init__(self, folder: Path, config: Config, first: int):
        """`first`: steps already done; rows of metrics.csv beyond them were never saved and are dropped."""
        self.config, self.path = config, folder / "metrics.csv"
        self.every = max(1, config.steps // 20)
        self.rows = [row for row in self._read() if row["step"] <= first] if first else []
        self.first = first
        beside = self.path.with_suffix(".csv.tmp")
        with writing(self.path):
            folder.mkdir(parents=True, exist_ok=True)
            with open(beside, "w", newline="") as file:
                writer = csv.DictWriter(file, columns(config))
                writer.writeheader()
                writer.writerows(self.rows)
            os.replace(beside, self.path)
        self.bar = tqdm(total=config.steps, initial=first, unit="step", disable=None, dynamic_ncols=True)

    def _read(self) -> list[dict]:
        if not self.path.exists():
            return []
        try:
            with open(self.path, newline="") as file:
                rows = [dict.fromkeys(LATER) | row for row in csv.DictReader(file)]
                keys = columns(self.config)
                return [{key: float(row[key]) if row[key] else "" for key in keys} for row in rows]
        except (KeyError, ValueError, TypeError) as error:
            raise ExampleError(f"{self.path}: not this script's metrics ({error!r}): move it away to go on") from error

    def step(self, number: int, ours: Step, plain: Step | None) -> None:
        row = {"step": number}
        line = f"step {number:>4}/{self.config.steps}"
        for (prefix, name, _), step in zip(series(self.config), (ours, plain), strict=True):
            speed = memory = loss = norm = ""
            if step is not None:
                loss, speed, memory = step.loss, self.config.tokens / step.seconds, step.memory / 2**20
                norm = step.norm
                of = f" | {name}:" if prefix else " "
                line += f"{of} loss {loss:.4f}, {speed:,.0f} tokens/s, {memory:,.0f} MiB"
            row |= {f"{prefix}loss": loss, f"{prefix}tokens_per_s": speed, f"{prefix}memory_mib": memory}
            row[f"{prefix}grad_norm"] = norm
        if self.config.experts:
            row |= {"aux_loss": ours.aux_loss} | dict(zip(share_columns(self.config), ours.load, strict=True))
            line += f" | aux loss {ours.aux_loss:.4f}, most loaded expert {self.config.experts * max(ours.load):.2f}x"
        self.rows.append(row)
        with writing(self.path), open(self.path, "a", newline="") as file:
            csv.DictWriter(file, columns(self.config)).writerow(row)
        self.bar.update()
        if number % self.every == 0 or number in (self.first + 1, self.config.steps):
            self.say(line)

    def say(self, text: str) -> None:
        """A line above the bar, or just a line if there is no bar."""
        tqdm.write(text)
        sys.stdout.flush()

    def close(self) -> None:
        self.bar.close()

    def speeds(self) -> tuple[float, float, float] | None:
        """Median tokens/s of both models, and the median of their ratio step by step, over this call's steps less the
        first tenth (caches, compilation). Steps are taken in turn, so a busy machine slows both of a pair."""
        rows = [row for row in self.rows if row["step"] > self.first and row["plain_loss"] != ""]
        rows = rows[(len(rows) + 9) // 10 :]
        if not rows:
            return None
        ours, plain = ([row[f"{prefix}tokens_per_s"] for row in rows] for prefix, *_ in series(self.config))
        return median(ours), median(plain), median(a / b for a, b in zip(ours, plain))

    def plots(self) -> None:
        shown = series(self.config)
        model = f"{self.config.parameters / 1e6:.1f}M parameters, {self.config.dtype}"
        for name, column, label, title, from_zero in (
            ("loss", "loss", "loss, nats per byte", f"Training loss, {model}", False),
            ("memory", "memory_mib", "memory, MiB", f"Memory of a step, {model}", True),
        ):
            _plot(self.path.with_name(name), self.rows, shown, column, label, title, from_zero=from_zero)
        if self.config.experts:
            experts = [(f"expert{i}_", f"expert {i}", f"C{i % 10}") for i in range(self.config.experts)]
            title = f"Load of the experts, mean of {self.config.layers} layers, {model}"
            label = f"share of the tokens (even: {1 / self.config.experts:.4g})"
            _plot(self.path.with_name("load"), self.rows, experts, "share", label, title, from_zero=True)


class Silent(Log):
    """The report of other ranks: shows and writes nothing."""

    def __init__(self, config: Config):
        self.config, self.rows, self.first = config, [], 0

    def step(self, number: int, ours: Step, plain: Step | None) -> None:
        pass

    say = close = plots = lambda self, *_: None


def _plot(stem: Path, rows: list[dict], shown: tuple, column: str, label: str, title: str, *, from_zero: bool) -> None:
    """<stem>.svg and <stem>.png"""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(title=title, xlabel="step", ylabel=label)
    for prefix, name, color in shown:
        points = [(row["step"], row[prefix + column]) for row in rows if row[prefix + column] != ""]
        if points:
            x, y = zip(*points, strict=True)
            # The twin is dashed and on top: where the curves agree both are seen.
            axes.plot(
                x,
                y,
                ".--" if prefix == "plain_" else ".-",
                markersize=2,
                color=color,
                label=f"{name}: last {y[-1]:,.4g}",
            )
    axes.xaxis.get_major_locator().set_params(integer=True)
    if from_zero:
        axes.margins(y=0.2)  # curves that are nearly flat stay off the frame and the legend
        axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    if rows and len(shown) <= MOST_NAMED:
        axes.legend()
    for kind in ("svg", "png"):
        with writing(path := stem.with_suffix(f".{kind}")):
            figure.savefig(path, format=kind)


def sample(text: bytes) -> str:
    """Generated bytes as lines for a terminal; bytes that are not printable are escaped (a young model writes
    anything)."""
    characters = text.decode(errors="backslashreplace")
    shown = "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in characters)
    return "sample:\n  " + shown.replace("\n", "\n  ")


def comparison(log: Log, held_out: tuple[float, float]) -> str:
    """The lines that compare the model with its twin."""
    (_, name, _), (_, twin, _) = series(log.config)
    same = "same work for a token, seed and batches" if log.config.experts and not log.config.fp8 else ""
    lines = [f"{name} / {twin} ({same or 'same model, seed, init and batches'}):"]
    both = [row for row in log.rows if row["plain_loss"] != ""]
    if both:
        last = both[-1]
        ours, plain = last["loss"], last["plain_loss"]
        most = max(abs(row["loss"] - row["plain_loss"]) for row in both)
        lines.append(
            f"  last loss  {ours:.4f} / {plain:.4f}, difference {ours - plain:+.5f} (at most {most:.5f} in a step)"
        )
        ours, plain = (mean(row[f"{prefix}loss"] for row in both[-LAST:]) for prefix in ("", "plain_"))
        lines.append(f"  last {len(both[-LAST:])}    {ours:.4f} / {plain:.4f}, mean loss, {ours / plain - 1:+.2%}")
    ours, plain = held_out
    lines.append(f"  held out   {ours:.4f} / {plain:.4f} bits per byte, difference {ours - plain:+.5f}")
    if speeds := log.speeds():
        ours, plain, ratio = speeds
        lines.append(f"  speed      {ours:,.0f} / {plain:,.0f} tokens/s: {ratio:.2f}x (medians; steps taken in turn)")
    return "\n".join(lines)


def costs(log: Log) -> str:
    """Time and memory of a step, also of the twin if there is one."""
    lines = []
    for prefix, name, _ in series(log.config):
        rows = [row for row in log.rows if row["step"] > log.first and row[f"{prefix}loss"] != ""]
        if rows:
            fused = log.config.optimizer == "fused" and (not prefix or log.config.twin_is_fused)
            optimizer = "fused" if fused else "torch"
            step = median(
                log.config.tokens / row[f"{prefix}tokens_per_s"] for row in rows[(len(rows) + 9) // 10 :] or rows
            )
            peak = max(row[f"{prefix}memory_mib"] for row in rows)
            lines.append(f"{name}, {optimizer} AdamW: {step * 1e3:,.1f} ms a step, peak memory {peak:,.0f} MiB")
    return "\n".join(lines)
