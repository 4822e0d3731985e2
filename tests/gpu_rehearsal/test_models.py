import pytest

pytestmark = [pytest.mark.gpu_rehearsal, pytest.mark.timeout(1200)]


def differences(output: str) -> dict[str, float]:
    lines = [line for line in output.splitlines() if ": largest difference " in line]
    return {line.split(": ")[0]: float(line.rsplit(" ", 1)[1]) for line in lines}


def test_models_train_as_on_the_cpu(rehearse):
    runs = [
        "mlp:sgd:float32",
        "mlp:adam-foreach:bfloat16",
        "mlp:sgd:float16",
        "cnn:adamw-fused:float32",
        "cnn:sgd:scaled",
        "transformer:adam-foreach:float32",
    ]
    result = rehearse("one_process", *runs, ranks=1, lag=100)
    found = differences(result.stdout)
    assert list(found) == runs
    # Products of half floats round otherwise where their memory begins at another address.
    assert all(difference == 0 for run, difference in found.items() if "float16" not in run), found
    assert max(found.values()) < 1e-2, found


def test_what_hardware_shows_and_a_cpu_hides(rehearse):
    """A wait that is missing, memory given back too early, a kernel that nothing simulates."""
    result = rehearse("sharp_edges", ranks=1, lag=300)
    assert "with waits and record_stream: 0 of 20 are wrong" in result.stdout
    for mistake in ("without a wait", "without record_stream"):
        line = next(line for line in result.stdout.splitlines() if line.startswith(mistake))
        assert int(line.split()[-5]) > 0, line
    assert "nothing simulates the kernel void at::native" in result.stdout
    assert "lstm_cell_forward" in result.stdout


def test_injected_faults_are_torchs_errors(rehearse):
    result = rehearse("fault", "memory", ranks=1, faults="cudaMalloc:+2:2")
    assert "OutOfMemoryError" in result.stdout
    result = rehearse("fault", "kernel", ranks=1, faults="kernel:20:719")
    assert "AcceleratorError" in result.stdout and "719" in result.stdout
