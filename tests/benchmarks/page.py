"""The interactive page of large programs: bytes, seconds to write and to open, frames a second while it moves.

The models are whole steps after a fused update and recomputation, with every snapshot on the page; the GPT is fitted
into 70 % of its peak, so that its page has the slider over all plans. The chain is one program of 20,000 calls. Seconds
to write are from the snapshots to the file. Before that comes the story: tracing the optimizer once more, for the
program without passes. Opening and moving are measured in the installed Chromium, headless, 1280 by 800 pixels. Frames
a second depend on what else the machine does; what one move of the slider takes of the CPU does not: script, layout and
style of the page's own thread, without painting (``drag cpu``, with painting ``all``).
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import example_models, make_table, parser, show
from playwright.sync_api import Browser, Page, sync_playwright
from torch import fx

import graphopt
from graphopt import Phase, _torch
from graphopt.capture import CaptureSession
from graphopt.ir.node import InputSpec, NodeInfo, OutputSpec, set_info
from graphopt.report.page import Story, page_of_story, story_of_program, story_of_snapshots
from graphopt.rewriting.pipeline import Pipeline
from graphopt.runtime.programs.rewrite import Rewritten, rewrite

models = example_models()

SECONDS = 2.0
"""How long the picture is moved for."""

_MOVE = """async ([seconds, distance]) => {
  const started = performance.now();
  let frames = 0;
  while (performance.now() - started < seconds * 1000) {
    window.graphoptPage.pan(0, Math.floor(frames / 40) % 2 ? distance : -distance);
    await new Promise((next) => requestAnimationFrame(next));
    frames += 1;
  }
  return frames * 1000 / (performance.now() - started);
}"""


_DRAG = """async (seconds) => {
  const slider = document.getElementById("budget-slider");
  const started = performance.now();
  let frames = 0, longest = 0, last = started;
  while (performance.now() - started < seconds * 1000) {
    const most = Number(slider.max) * 2, place = frames % (most || 1);
    slider.value = place > most / 2 ? most - place : place;
    slider.dispatchEvent(new Event("input"));
    await new Promise((next) => requestAnimationFrame(next));
    longest = Math.max(longest, performance.now() - last);
    last = performance.now();
    frames += 1;
  }
  return [frames * 1000 / (performance.now() - started), longest];
}"""


_MOVES = """async (moves) => {
  const slider = document.getElementById("budget-slider");
  for (let move = 0; move < moves; move++) {
    const most = Number(slider.max) * 2, place = move % (most || 1);
    slider.value = place > most / 2 ? most - place : place;
    slider.dispatchEvent(new Event("input"));
    await new Promise((next) => requestAnimationFrame(next));
  }
}"""

MOVES = 100
"""How many moves of the slider the CPU's time is taken over."""


def drag_cpu(page: Page) -> dict[str, float]:
    """Milliseconds of the CPU that one move of the budget slider takes in the page's thread."""
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})

    def taken() -> dict[str, float]:
        return {metric["name"]: metric["value"] for metric in session.send("Performance.getMetrics")["metrics"]}

    page.evaluate(_MOVES, MOVES // 5)
    before = taken()
    page.evaluate(_MOVES, MOVES)
    after = taken()
    session.detach()
    own = ("ScriptDuration", "LayoutDuration", "RecalcStyleDuration")
    each = {name: (after[name] - before[name]) * 1e3 / MOVES for name in (*own, "TaskDuration")}
    return {"drag_cpu_ms": sum(each[name] for name in own), "drag_task_ms": each["TaskDuration"]}


def gpt(layers: int) -> Rewritten:
    """A narrow GPT: the size of the page depends on the number of calls, not on the tensors'."""
    config = models.GPTConfig(vocab=64, context=16, d=16, layers=layers, heads=2)
    model = models.GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batch = tuple(torch.randint(config.vocab, (2, 64, config.context)))
    session = CaptureSession(model, batch, None, loss=models.next_token_loss, optimizer=optimizer)
    return rewrite(session, Pipeline("fuse-update,fit-memory{budget=70% cost=roofline time-limit=60}"), until="step")


def bert_large() -> Rewritten:
    """BERT-Large for masked language modelling, in its published size."""
    import transformers

    config = transformers.BertConfig(
        vocab_size=30522, hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    )
    model = transformers.BertForMaskedLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.zeros(1, 128, dtype=torch.long)
    session = CaptureSession(model, (), {"input_ids": tokens, "labels": tokens}, loss=True, optimizer=optimizer)
    return rewrite(session, Pipeline("recompute{checkpoints=bert.encoder.layer.*},fuse-update"), until="step")


def chain(layers: int) -> Story:
    """One program put together by hand: layers of five modules with four calls forward and four backward each."""
    program = graphopt.Program(fx.Graph(), "joint", [], [], title=f"Chain of {layers} layers")
    program.graph.output(())
    with _torch.FakeTensorMode(allow_non_fake_inputs=True):
        value = program.add_input("x", torch.empty(64), InputSpec("input", "x"))
    places = [f"layers.{layer}.{part}" for layer in range(layers) for part in ("norm", "in", "act", "out", "drop")]
    made = [(place, [value := _call(program, "gelu", (value,), place) for _ in range(4)]) for place in places]
    gradient = _call(program, "ones_like", (value,), "", Phase.BACKWARD)
    for place, results in reversed(made):
        for result in reversed(results):
            gradient = _call(program, "gelu_backward", (gradient, result.args[0]), place, Phase.BACKWARD)
    program.set_outputs([gradient], [OutputSpec("gradient", "x")])
    return story_of_program(program)


def _call(
    program: graphopt.Program, op: str, args: tuple[Any, ...], module: str, phase: Phase = Phase.FORWARD
) -> fx.Node:
    target = getattr(torch.ops.aten, op).default
    node = program.insert(target, args, before=program.output_node, phase=phase, origin="benchmark")
    set_info(node, NodeInfo(phase, module, (f"{module}::{node.name}",), f"chain.py:{len(module)} in forward"))
    return node


def told(result: Rewritten) -> Story:
    """The story of a rewritten model; this traces its optimizer once more, for the program without passes."""
    return story_of_snapshots(result.snapshots, result.records)


MODELS: dict[str, Callable[[], Callable[[], Story]]] = {
    "gpt-48": lambda: partial(told, gpt(48)),
    "bert-large": lambda: partial(told, bert_large()),
    "chain-20000": lambda: partial(chain, 500),
}
"""For each model what captures it, and returns what makes its story."""


def measure(name: str, make: Callable[[], Callable[[], Story]], browser: Browser, folder: Path) -> dict[str, Any]:
    """The figures of one model."""
    tell = make()
    started = time.perf_counter()
    story = tell()
    telling = time.perf_counter() - started
    started = time.perf_counter()
    text = page_of_story(story)
    file = folder / f"{name}.html"
    file.write_text(text, encoding="ascii")
    written = time.perf_counter() - started
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    started = time.perf_counter()
    page.goto(file.as_uri())
    page.wait_for_selector("main:not([hidden])")
    opened = time.perf_counter() - started
    program = story.snapshots[story.after].program
    figures = {
        "model": name,
        "calls": sum(node.op not in ("placeholder", "output") for node in program.graph.nodes),
        "snapshots": len(story.snapshots),
        "page_bytes": file.stat().st_size,
        "story_seconds": telling,
        "writing_seconds": written,
        "opening_seconds": opened,
        **frames(page),
    }
    page.close()
    return figures


def frames(page: Page) -> dict[str, float]:
    """Frames a second while the budget is dragged, one plan a frame, and while the picture moves.

    The picture moves as it opens, with every call shown, and with all of it in view.
    """
    page.locator("#graph").scroll_into_view_if_needed()
    dragging = {}
    if page.locator("#budget-slider").is_visible():
        rate, longest = page.evaluate(_DRAG, SECONDS)
        dragging = {"drag_fps": rate, "drag_longest_ms": longest, "plans": page.locator("#budget-ticks option").count()}
        dragging |= drag_cpu(page)
        page.click("#budget-back")
    figures = dragging | {"folded_fps": page.evaluate(_MOVE, [SECONDS, 31])}
    page.click("#open-all")
    figures["open_fps"] = page.evaluate(_MOVE, [SECONDS, 53])
    for _ in range(20):
        page.click("#zoom-out")
    figures["far_fps"] = page.evaluate(_MOVE, [SECONDS, 3])
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("--models", nargs="+", choices=MODELS, help="which (default: all; a GPT of 2 with --quick)")
    given = options.parse_args(argv)
    torch.set_num_threads(given.threads)
    chosen = given.models or ([] if given.quick else list(MODELS))
    cases = {name: MODELS[name] for name in chosen} or {"gpt-2": lambda: partial(told, gpt(2))}
    gpt(1)  # what torch imports and compiles once is not counted
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        results = [measure(name, make, browser, Path(folder)) for name, make in cases.items()]
        browser.close()
    rows = [
        (
            row["model"], f"{row['calls']:,}", f"{row['page_bytes'] / 1e6:.2f} MB", f"{row['story_seconds']:.2f} s",
            f"{row['writing_seconds']:.2f} s", f"{row['opening_seconds']:.2f} s",
            *(f"{row[kind]:.1f} ms" if kind in row else "–" for kind in ("drag_cpu_ms", "drag_task_ms")),
            *(f"{row[kind]:.0f}" if kind in row else "–" for kind in ("drag_fps", "folded_fps", "open_fps", "far_fps")),
        )
        for row in results
    ]  # fmt: skip
    headings = (
        "model",
        "calls",
        "page",
        "story",
        "write",
        "open",
        "drag cpu",
        "all",
        "drag",
        "folded",
        "every call",
        "far",
    )
    show(
        {"results": results},
        [make_table("The interactive page; frames a second at the right", headings, rows)],
        as_json=given.json,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
