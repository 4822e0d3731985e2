"""What a host says of itself, on this host, and as `preflight` runs it there."""

import hashlib
import json
import socket
import subprocess
import sys
from pathlib import Path

import ring_plugins
from ring_plugins.core.linux.process import cores
from ring_plugins.launcher import probe


def test_what_a_host_says_of_its_packages():
    packages = ["numpy", "no-such-package-anywhere"]
    found = probe.report({"packages": packages, "paths": ["/", "/nowhere"], "program": None, "listener": None})
    assert set(found["packages"]) == {"numpy"} and found["missing"] == ["/nowhere"] and found["reaches"]
    assert (found["ring_plugins"], found["trouble"], found["cores"]) == (ring_plugins.__version__, "", cores())


def test_a_digest_is_that_of_the_files_contents(tmp_path):
    file = tmp_path / "train.py"
    file.write_bytes(b"print(1)\n")
    assert probe.digest(str(file)) == hashlib.sha256(b"print(1)\n").hexdigest()
    assert probe.digest(str(tmp_path)) is None and probe.digest(None) is None


def test_a_port_that_nobody_serves_is_not_reached():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert not probe.reaches(["127.0.0.1", str(port), "secret"])
    assert probe.reaches(None)


def test_a_listener_must_prove_that_it_knows_the_secret():
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(10)
        port = server.getsockname()[1]
        script = f"from ring_plugins.launcher.probe import reaches; print(reaches(['127.0.0.1', '{port}', 'secret']))"
        asking = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        connection, _ = server.accept()
        connection.close()  # as a stranger's server may
        assert asking.communicate(timeout=30)[0] == "False\n"


def test_it_runs_from_standard_input_and_prints_one_line_of_json(tmp_path):
    question = {"packages": ["numpy"], "paths": ["/", str(tmp_path / "none")], "program": None, "listener": None}
    source = f"{Path(probe.__file__).read_text()}\nmain({json.dumps(question)!r})\n"
    found = subprocess.run([sys.executable, "-"], input=source, capture_output=True, text=True, timeout=60, check=True)
    (line,) = found.stdout.splitlines()
    prefix, _, said = line.partition("ring probe: ")
    answer = json.loads(said)
    assert not prefix and answer["missing"] == [str(tmp_path / "none")] and answer["reaches"] is True
    assert answer["ring_plugins"] == ring_plugins.__version__ and answer["name"] == socket.gethostname()
