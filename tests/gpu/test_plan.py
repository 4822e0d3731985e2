"""The scripts of this directory as tests, with a card (`pytest -m gpu`); tests/gpu_rehearsal runs them without one."""

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


def run(script: str, ranks: int = 2, check: bool = True) -> Result:
    return run_ranks(HERE / f"{script}.py", ranks, timeout=240, check=check)


def facts(result: Result, check: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("FACT ") for line in result.stdout.splitlines() if line.startswith("FACT ")]
    found = [fact for fact in map(json.loads, lines) if fact["check"] == check]
    assert found, result
    return found


@pytest.mark.gpu
@on_a_card[1]
def test_weights_equal_ddps_bit_for_bit():
    found = facts(run("equals_ddp"), "equals DDP")
    assert [(fact["autocast"], fact["set_to_none"]) for fact in found] == [
        (False, True), (False, False), (True, True), (True, False),
    ]  # fmt: skip
    assert all(fact["bitwise"] for fact in found), found
    assert all(fact["gradient_places"] == 1 for fact in found if not fact["set_to_none"]), found


@pytest.mark.gpu
@on_a_card[1]
def test_the_survivor_of_a_killed_peer_hears_of_it():
    (found,) = facts(run("killed_peer", check=False), "killed peer")
    assert "rank 1" in found["said"]


@pytest.mark.gpu
@on_a_card[1]
def test_the_cost_on_the_host_is_measured():
    result = run("host_cost")
    (costs,) = facts(result, "host us a bucket")
    assert costs.keys() >= {"main, 1 tensor", "main, 10 tensors", "torch's group", "thread, 1 tensor"}
    assert [fact["how"] for fact in facts(result, "calls of a step")] == ["plain", "ring", "DDP"]


@pytest.mark.gpu
@on_a_card[1]
@pytest.mark.parametrize("processes", [1, 2])
def test_lightning_equals_plain_torch(processes):
    pytest.importorskip("lightning")
    found = facts(run("lightning_fit", processes), "Lightning")
    assert [(fact["precision"], fact["same_on_all_ranks"], fact["close"]) for fact in found] == [
        ("32-true", True, True), ("bf16-mixed", True, True),
    ], found  # fmt: skip


@pytest.mark.gpu
@on_a_card[1]
def test_compiled_models_equal_eager_ones():
    found = facts(run("compiled_models"), "compiled")
    assert [(fact["how"], fact["same_on_all_ranks"], fact["close"]) for fact in found] == [
        ("whole", True, True), ("layers", True, True),
    ], found  # fmt: skip


@pytest.mark.gpu
@on_a_card[1]
def test_keras_on_torch_equals_one_process():
    pytest.importorskip("keras")
    found = facts(run("keras_on_torch"), "Keras on torch")
    assert all(fact["same_on_all_ranks"] and fact["close"] for fact in found), found


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
