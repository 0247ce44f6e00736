"""Pictures of the interactive page for the documents: a GPT, a U-Net and a BERT, light, dark and on a phone.

``--pages FOLDER`` keeps the pages themselves; without ``--write`` no picture is written into ``examples/``.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from harness import example_models
from playwright.sync_api import Browser, sync_playwright
from torch import nn

from graphopt.capture import CaptureSession
from graphopt.report.page import page_of_story, story_of_snapshots
from graphopt.rewriting.pipeline import Pipeline
from graphopt.runtime.programs.rewrite import rewrite

models = example_models()

EXAMPLES = Path(__file__).parents[2] / "examples"
LOOKS = {
    "light": ((1280, 1080), False),
    "dark": ((1280, 1080), True),
    "phone": ((390, 1200), False),
    "first": ((1280, 2300), False),
}
"""The size of the window in pixels, and whether the system is set to dark."""

PARTS = {"light": "budget", "dark": "budget-bar", "phone": "budget-bar"}
"""What is at the top of the window."""

FIT = "fit-memory{budget=55% cost=roofline allow=recompute}"


class Level(nn.Module):
    """Two convolutions of a U-Net, each normalised: ``[batch, channels, height, width]`` in the same size."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


class UNet(nn.Module):
    """Levels down, a bottom, and levels up that read what the same level made on the way down."""

    def __init__(self, width: int, levels: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels)]
        self.down = nn.ModuleList(Level(*pair) for pair in zip([3, *widths], widths, strict=False))
        self.bottom = Level(widths[-1], 2 * widths[-1])
        self.grow = nn.ModuleList(nn.ConvTranspose2d(2 * width, width, 2, 2) for width in reversed(widths))
        self.up = nn.ModuleList(Level(2 * width, width) for width in reversed(widths))
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for level in self.down:
            skips.append(level(x))
            x = F.max_pool2d(skips[-1], 2)
        x = self.bottom(x)
        for grow, level, skip in zip(self.grow, self.up, reversed(skips), strict=True):
            x = level(torch.cat([skip, grow(x)], 1))
        return self.head(x)


def pixel_loss(model: nn.Module, images: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    """The mean cross entropy of each pixel's class, in nats."""
    return F.cross_entropy(model(images), classes)


def _step(model: nn.Module, batch: tuple[torch.Tensor, ...], loss: Callable[..., torch.Tensor]) -> str:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    session = CaptureSession(model, batch, None, loss=loss, optimizer=optimizer)
    return _page(session)


def _page(session: CaptureSession) -> str:
    result = rewrite(session, Pipeline(FIT), until="step")
    return page_of_story(story_of_snapshots(result.snapshots, result.records))


def gpt() -> str:
    """The page of the examples' GPT with six blocks and dropout."""
    config = models.GPTConfig(vocab=512, context=128, d=128, layers=6, heads=4, dropout=0.1)
    batch = tuple(torch.randint(config.vocab, (2, 8, config.context)))
    return _step(models.GPT(config), batch, models.next_token_loss)


def unet() -> str:
    """The page of a U-Net with four levels on images of 96 by 96 pixels."""
    batch = torch.randn(16, 3, 96, 96), torch.randint(2, (16, 96, 96))
    return _step(UNet(16, 4), batch, pixel_loss)


def bert() -> str:
    """The page of a BERT for masked language modelling, from its configuration in transformers."""
    import transformers

    config = transformers.BertConfig(
        vocab_size=1024, hidden_size=128, num_hidden_layers=6, num_attention_heads=4, intermediate_size=512
    )
    model = transformers.BertForMaskedLM(config).train()
    tokens = torch.zeros(8, 128, dtype=torch.long)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    session = CaptureSession(model, (), {"input_ids": tokens, "labels": tokens}, loss=True, optimizer=optimizer)
    return _page(session)


PAGES: dict[str, Callable[[], str]] = {
    "gpt": gpt,
    "unet": unet,
    "bert": bert,
}


def shoot(browser: Browser, file: Path, look: str, picture: Path) -> None:
    """A picture of the page's budget and program, in one of ``LOOKS``."""
    (width, height), dark = LOOKS[look]
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme="dark" if dark else "light",
        device_scale_factor=0.8 if look == "first" else 1,
        offline=True,
    )
    page = context.new_page()
    page.goto(file.resolve().as_uri())
    page.wait_for_selector("main:not([hidden])")
    page.evaluate("part => document.getElementById(part).scrollIntoView()", PARTS.get(look, "title"))
    page.wait_for_timeout(200)
    page.screenshot(path=picture)
    context.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Make the pages, and the pictures where they are asked for."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--pages", type=Path, default=Path("build") / "pages", help="where the pages go")
    options.add_argument("--models", nargs="+", choices=PAGES, default=list(PAGES))
    options.add_argument("--write", action="store_true", help="write the pictures into examples/")
    given = options.parse_args(argv)
    given.pages.mkdir(parents=True, exist_ok=True)
    (EXAMPLES / "pages").mkdir(exist_ok=True)
    for name in given.models:
        torch.manual_seed(0)
        (given.pages / f"{name}.html").write_text(PAGES[name](), encoding="ascii")
    if not given.write:
        return 0
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name in given.models:
            for look in PARTS:
                shoot(browser, given.pages / f"{name}.html", look, EXAMPLES / "pages" / f"{name}-{look}.png")
        if "gpt" in given.models:
            shoot(browser, given.pages / "gpt.html", "first", EXAMPLES / "page.png")
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
