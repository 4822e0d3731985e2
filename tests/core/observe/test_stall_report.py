"""The stall report as text, from made-up facts."""

import os

from ring_plugins.core.base.member import Member, Members
from ring_plugins.core.collectives.api import Activity
from ring_plugins.core.observe.stall_report import (
    Absent,
    Waiting,
    likely_cause,
    process_snapshot,
    process_state,
    stall_report,
    without_arrived_gpus,
)

MEMBERS = Members(0, [Member(rank, rank, f"host{rank // 2}", 100 + rank, f"host{rank // 2}") for rank in range(4)])


def wait(rank, missing, what="ring: barrier()", part_of=""):
    return Waiting(rank, what.split(":", 1)[0], what, 4, part_of, missing, 10.0, 10.0, "12:00:00")


def snapshot(*stack, step=5):
    return {"activities": [], "step": step, "stack": [[file, 1, function, ""] for file, function in stack]}


def test_a_report_names_the_bucket_and_stops_at_the_packages_own_frames():
    stack = [["train.py", 3, "<module>", "step()"], ["/x/ring_plugins/core/waiting.py", 9, "until", "sleep()"]]
    found = Absent(
        {**snapshot(), "stack": [*stack, ["/x/ring_plugins/core/inner.py", 1, "deep", ""]]}, {"state": "S", "text": ""}
    )
    waits = [wait(0, (3,), "gradients: all_reduce(8 x float32, average) between hosts", "bucket 1 of 2 (w … b)")]
    text = stall_report(waits, {3: found}, MEMBERS, 5, 50.0, 30.0)
    assert "stalled for 40 s" in text
    assert "in gradients: all_reduce(8 x float32, average), part of bucket 1 of 2 (w … b), for rank 3" in text
    assert "missing: rank 3 (process 103 on host1)" in text
    assert "waiting.py" in text
    assert "inner.py" not in text


def test_gpus_wait_only_for_gpus_that_have_not_arrived():
    def on_gpu(rank, number):
        others = tuple(other for other in range(4) if other != rank)
        what = "gradients: all_reduce on the GPU"
        return Waiting(rank, "gradients", what, number, "bucket 0 of 2 (a)", others, 10.0, 0.0, "12:00:00", on_gpu=True)

    found = without_arrived_gpus([on_gpu(0, 7), on_gpu(1, 7), on_gpu(3, 6), wait(2, (0, 1, 3))])
    assert [waiting.missing for waiting in found] == [(2, 3), (2, 3), (2,), (0, 1, 3)]
    all_arrived = without_arrived_gpus([on_gpu(rank, 7) for rank in range(4)])
    text = stall_report(all_arrived, {}, MEMBERS, 5, 50.0, 30.0)
    assert "ranks 0, 1, 2, 3 have been waiting since 12:00:00 in gradients: all_reduce on the GPU, part of" in text
    assert "which all ranks have reached: NCCL makes no progress" in text


def test_many_ranks_are_counted():
    waits = [wait(rank, (0,)) for rank in range(1, 300)]
    members = Members(0, [Member(rank, rank, "h", rank, "h") for rank in range(300)])
    text = stall_report(waits, {0: Absent(None, None)}, members, 0, 50.0, 30.0)
    assert "and 291 more have been waiting since" in text
    assert len(text) < 1000


def test_causes_follow_from_stacks_and_process_states():
    state = {"state": "S", "text": ""}
    at = lambda *stack, **more: likely_cause(snapshot(("train.py", "main"), *stack, **more), state, 5, "")  # noqa: E731
    assert "data loader" in at(("/lib/torch/utils/data/dataloader.py", "_next_data"))
    assert "data loader" in at(("mine.py", "__getitem__"), ("numpy.py", "load"))
    assert "checkpoint" in at(("/lib/torch/serialization.py", "save"))
    assert "checkpoint" in at(("mine.py", "save_checkpoint"), ("shutil.py", "copy"))
    assert "is evaluating" in at(("/lib/lightning/pytorch/loops/evaluation_loop.py", "run"), ("model.py", "forward"))
    assert "debugger" in at(("/usr/lib/python3/pdb.py", "interaction"))
    assert "is compiling" in at(("/lib/torch/_inductor/compile_fx.py", "compile"))
    assert "has ended" in at(("/usr/lib/threading.py", "_shutdown"))
    assert "2 more steps" in at(("mine.py", "plot"), step=7)
    assert "is computing" in at(("mine.py", "plot"))
    assert "another path" in likely_cause(snapshot(("train.py", "main")), state, 5, "ring: barrier()")
    assert "stopped" in likely_cause(None, {"state": "T", "text": ""}, 5, "")
    assert "dead" in likely_cause(None, {"state": "", "text": ""}, 5, "")
    assert "cut off" in likely_cause(None, None, 5, "")


def test_the_state_of_a_process_is_read_from_the_kernel():
    assert process_state(os.getpid())["state"] in "RS"
    assert process_state(2**22 + 1) == {"state": "", "text": "gone"}


def test_a_snapshot_has_the_latest_activity_first():
    def activity(name, ended):
        return Activity(name, "barrier()", "", 1.0, ended, 1)

    found = process_snapshot([activity("old", 2.0), activity("now", 0.0), activity("new", 3.0)])
    assert [latest["communicator"] for latest in found["activities"]] == ["now", "new", "old"]
    assert found["activities"][0]["ended"] is None
