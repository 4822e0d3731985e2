"""The scripts of this directory as tests: with a card as they are (`pytest -m gpu`), elsewhere with the stand-ins."""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.launch import REPOSITORY, Result, run_ranks  # noqa: E402  # without torch nothing here can run

HERE = Path(__file__).parent
SCRIPTS = sorted(path.stem for path in HERE.glob("*.py") if path.stem not in ("card", "test_plan"))

on_a_card = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA GPU here"),
]
on_the_stand_in = pytest.mark.slow
both = pytest.mark.parametrize(
    "stand_in", [pytest.param("1", marks=on_the_stand_in), pytest.param("", marks=on_a_card)]
)


def run(script: str, stand_in: str = "", ranks: int = 2, check: bool = True) -> Result:
    return run_ranks(
        HERE / f"{script}.py",
        ranks,
        env={"TEST_GPU_STAND_IN": stand_in, "TEST_COMPILER": "aot_eager" if stand_in else ""},
        timeout=240,
        check=check,
    )


def facts(result: Result, check: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("FACT ") for line in result.stdout.splitlines() if line.startswith("FACT ")]
    found = [fact for fact in map(json.loads, lines) if fact["check"] == check]
    assert found, result
    return found


@both
def test_weights_equal_ddps_bit_for_bit(stand_in):
    found = facts(run("equals_ddp", stand_in), "equals DDP")
    assert [(fact["autocast"], fact["set_to_none"]) for fact in found] == [
        (False, True), (False, False), (True, True), (True, False),
    ]  # fmt: skip
    assert all(fact["bitwise"] for fact in found), found
    assert all(fact["gradient_places"] == 1 for fact in found if not fact["set_to_none"]), found


@both
def test_the_survivor_of_a_killed_peer_hears_of_it(stand_in):
    (found,) = facts(run("killed_peer", stand_in, check=False), "killed peer")
    assert "rank 1" in found["said"]


@both
def test_the_cost_on_the_host_is_measured(stand_in):
    result = run("host_cost", stand_in)
    (costs,) = facts(result, "host us a bucket")
    assert costs.keys() >= {"main, 1 tensor", "main, 10 tensors", "torch's group", "thread, 1 tensor"}
    assert [fact["how"] for fact in facts(result, "calls of a step")] == ["plain", "ring", "DDP"]


@both
@pytest.mark.parametrize("processes", [1, 2])
def test_lightning_equals_plain_torch(stand_in, processes):
    pytest.importorskip("lightning")
    found = facts(run("lightning_fit", stand_in, processes), "Lightning")
    assert [(fact["precision"], fact["same_on_all_ranks"], fact["close"]) for fact in found] == [
        ("32-true", True, True), ("bf16-mixed", True, True),
    ], found  # fmt: skip


@both
def test_compiled_models_equal_eager_ones(stand_in):
    found = facts(run("compiled_models", stand_in), "compiled")
    assert [(fact["how"], fact["same_on_all_ranks"], fact["close"]) for fact in found] == [
        ("whole", True, True), ("layers", True, True),
    ], found  # fmt: skip


@both
def test_keras_on_torch_equals_one_process(stand_in):
    pytest.importorskip("keras")
    found = facts(run("keras_on_torch", stand_in), "Keras on torch")
    assert all(fact["same_on_all_ranks"] and fact["close"] and fact["by_nccl"] for fact in found), found


@pytest.mark.gpu
@on_a_card[1]
def test_buckets_wait_for_all_streams_of_forward():
    assert [fact["equal"] for fact in facts(run("two_streams"), "two streams")] == [True, True]


@pytest.mark.gpu
@on_a_card[1]
def test_a_script_ends_while_its_graph_lives():
    assert facts(run("graph_at_exit"), "captured step")[0]["equal"]


@pytest.mark.gpu
@on_a_card[1]
def test_peak_memory_is_not_above_ddps():
    mib = {fact["how"]: fact["mib"] for fact in facts(run("peak_memory"), "peak memory")}
    assert mib["ring"] <= mib["DDP"], mib


STEPS = """
import sys

import torch

from tests.gpu.card import DEVICE, NCCL_STAND_IN, init_torch_group
from tests.launch import REPOSITORY
from tests.worker import report

sys.path.insert(0, str(REPOSITORY / "benchmarks"))
import gpu_step

init_torch_group()
made, peaks = gpu_step.variants("perceptron", 4, DEVICE)
times = gpu_step.measure(made, 0.1)
report("times", {variant: len(both["done"]) for variant, both in times.items()})
report("launched", sum(call == ["all_reduce"] for call in NCCL_STAND_IN.log))
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_the_benchmark_forces_our_hooks_on_a_single_rank():
    result = run_ranks(STEPS, 1, env={"TEST_GPU_STAND_IN": "1"}, timeout=120)
    times = result.reports[0]["times"]
    assert list(times) == ["no communication", "ring_plugins", "DDP (NCCL)", "DDP, bucket views"]
    assert min(times.values()) >= 1
    assert result.reports[0]["launched"] >= 2 * 6


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
@pytest.mark.parametrize("script", ["two_streams", "graph_at_exit", "peak_memory", "compiled_models", "keras_on_torch"])
def test_what_needs_a_card_says_so_elsewhere(script):
    assert "not run here: torch sees no CUDA GPU" in run(script, ranks=1).stdout


def test_the_plan_names_scripts_and_tests_that_exist(tmp_path):
    planned = ""
    for calls in (["A"], ["B"], ["C"], ["D"], []):
        before, planned = planned, ""
        done = subprocess.run(
            ["bash", HERE / "run.sh", *calls],
            env=os.environ | {"DRY": "1", "PYTHON": "python", "OUT": str(tmp_path)},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert sum(map(int, re.findall(r"\((\d+) s\)", done.stdout))) < 600 or not calls
        planned = before + done.stdout if calls else done.stdout
        assert planned.startswith(before)  # without an argument, all four
    for script in SCRIPTS:
        assert f"tests/gpu/{script}.py" in planned
    named = [word for word in planned.split() if word.startswith(("tests/", "benchmarks/"))]
    assert named
    assert [word for word in named if not (REPOSITORY / word).exists()] == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_the_plan_says_what_it_would_run(tmp_path):
    done = subprocess.run(
        ["bash", HERE / "run.sh", "A"],
        env=os.environ | {"PYTHON": "python", "OUT": str(tmp_path)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    said, *planned = done.stdout.splitlines()
    assert said == "not run here: torch sees no CUDA GPU; with one, call A would run:"
    assert [line.split()[0] for line in planned] == ["versions", "one_rank", "two_ranks", "two_streams"]
    assert not (tmp_path / "facts.jsonl").exists()
