"""``--device``: programs for a device that need not be here, also of models by their configuration (``hf:``)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.command import Command, target

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 128,
    "max_position_embeddings": 64,
}


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


def config(folder: Path, **changes: Any) -> str:
    """A configuration as a target."""
    path = folder / "config.json"
    path.write_text(json.dumps({key: value for key, value in {**LLAMA, **changes}.items() if value is not None}))
    return f"hf:{path}"


@pytest.mark.sweep
def test_a_model_of_transformers_is_planned_by_its_configuration(run: Command, tmp_path: Path) -> None:
    options = ("--batch", 256, "--tokens", 64, "--device", "h100-80gb")
    done = run("plan", config(tmp_path, num_hidden_layers=1), *options, "--budget", "90%", "--json")
    assert done.code == 0, done.err
    (budget,) = done.data["budgets"]
    assert budget["feasible"]
    assert done.data["device"].startswith("h100-80gb, 84.4 GB of 84.9 GB for tensors: unmodified, the program fits")
    assert done.data["plain"]["resident_bytes"] < done.data["smallest_peak_bytes"] <= budget["peak_bytes"]
    text = run("dump", config(tmp_path), *options).out
    assert "bf16[128, 64],  # parameter model.embed_tokens.weight" in text
    assert "aten._scaled_dot_product_flash_attention(" in text
    assert "aten._fused_adamw_.tensor_lr(" in text


@pytest.mark.sweep
def test_the_dtype_is_that_of_the_file_or_the_one_given(run: Command, tmp_path: Path) -> None:
    options = ("--tokens", 8, "--device", "a100-40gb")
    assert "f16[128, 64]" in run("dump", config(tmp_path, torch_dtype="float16"), *options).out
    assert "f32[128, 64]" in run("dump", config(tmp_path), *options, "--dtype", "float32").out


def test_a_factory_is_captured_for_a_device_without_data(run: Command) -> None:
    done = run("dump", target("step"), "--device", "h200")
    assert done.code == 0, done.err
    assert "# device: h200, captured without data" in done.out
    assert run("memory", target("step"), "--device", "h200", "--json").data["program"]["peak_bytes"] > 0


@pytest.mark.sweep
def test_several_devices_share_the_optimizer_without_their_processes(run: Command, tmp_path: Path) -> None:
    options = ("--tokens", 8, "--device", "h100-80gb", "--json")
    alone = run("memory", config(tmp_path), *options).data["program"]
    done = run("memory", config(tmp_path), *options, "--devices", 4, "-p", "data-parallel, shard-optimizer")
    shared = done.data["after"]
    state = alone["resident_bytes"] - shared["resident_bytes"]
    assert 0.6 * 0.75 < state / alone["resident_bytes"] < 0.75
    assert not torch.distributed.is_initialized()


def test_a_page_shows_when_they_wait_for_a_link(run: Command) -> None:
    options = ("--device", "h100-80gb", "--devices", 4, "-p", "data-parallel, shard-optimizer", "--format", "ranks")
    pages = {
        link: run("dump", target("step"), *options, *link).out
        for link in [(), ("--bandwidth", "1Mbit"), ("--bandwidth", "25GB/s", "--latency", "1ms")]
    }
    assert "over a link of 10 Gbit/s per rank, 0 us per round" in pages[()]
    assert "over a link of 1 Mbit/s per rank, 0 us per round" in pages["--bandwidth", "1Mbit"]
    assert "over a link of 200 Gbit/s per rank, 1000 us per round" in pages["--bandwidth", "25GB/s", "--latency", "1ms"]
    assert "what each of 4 ranks holds" in pages[()]
    assert not torch.distributed.is_initialized()


def test_a_link_is_for_a_page_of_ranks(run: Command) -> None:
    done = run("dump", target("step"), "--latency", "1ms")
    assert (done.code, "--latency is for --format ranks or perfetto" in done.err) == (2, True)


@pytest.mark.sweep(cases=("changes7-",))
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "lama"}, "transformers has no model_type 'lama'; did you mean"),
        ({"model_type": None}, "it needs a 'model_type'"),
        ({"auto_map": {"AutoModel": "evil.Model"}}, "'auto_map' names code outside of transformers"),
        ({"quantization_config": {"bits": 4}}, "'quantization_config' is for inference"),
        ({"torch_dtype": "int8"}, "'int8' is no dtype of parameters: one of float32, bfloat16, float16"),
        ({"max_position_embeddings": 4}, "--tokens 8"),
        ({"hidden_size": "wide"}, "transformers refuses this configuration"),
        ({"num_hidden_layers": -1}, ""),
        ({"model_type": "vit"}, "transformers has no language model for 'vit'"),
    ],
)
def test_what_is_no_configuration_is_refused_with_the_reason(
    changes: dict[str, Any], said: str, run: Command, tmp_path: Path
) -> None:
    done = run("plan", config(tmp_path, **changes), "--tokens", 8, "--device", "h100-80gb")
    assert done.code == (2 if said else done.code)
    assert said in done.err
    assert "Traceback" not in done.err


def test_a_file_that_is_not_there_or_no_json(run: Command, tmp_path: Path) -> None:
    config(tmp_path)
    options = ("--tokens", 8, "--device", "h100-80gb")
    assert "did you mean 'config.json'" in run("plan", f"hf:{tmp_path}/confg.json", *options).err
    (tmp_path / "broken.json").write_text("{")
    assert "is not JSON" in run("plan", f"hf:{tmp_path}/broken.json", *options).err
    (tmp_path / "list.json").write_text("[1]")
    assert "is no configuration of transformers" in run("plan", f"hf:{tmp_path}/list.json", *options).err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("plan", "hf:c.json", "--tokens", "8"), "name the device that it is for with --device"),
        (("plan", "hf:c.json", "--device", "h200"), "a configuration without a batch: give --tokens"),
        (("plan", target("step"), "--tokens", "8"), "--tokens is for a target such as hf:config.json"),
        (("plan", target("step"), "--devices", "8"), "--devices 8 are of the kind that --device names"),
        (("plan", target("step"), "--device", "h200", "--remeasure"), "--remeasure measures on this device"),
        (("dump", target("step"), "--device", "h200", "--verify", "numerics"), "--verify numerics runs the program"),
        (("plan", target("step"), "--device", "h200", "--cost", "measured"), "--cost measured runs ops here"),
        (("plan", target("step"), "--device", "h20"), "did you mean 'h200'"),
    ],
)
def test_arguments_that_do_not_go_together(argv: tuple[str, ...], said: str, run: Command) -> None:
    done = run(*argv)
    assert done.code == 2
    assert said in " ".join(done.err.split())
