"""Two to four hosts on this machine, for tests of what happens between hosts.

    from tests.hosts import hosts

    with hosts(2, rate="10gbit") as cluster:
        result = cluster.mpirun(SCRIPT, ranks_per_host=2)      # Open MPI; also mpich, torchrun, environment
        result.values("sum")                                   # as tests.launch.run_ranks returns it
        cluster.run_on("host2", ["hostname"]).stdout           # any command, there
        cluster.shape("host2", "1gbit")                        # eth0 of one host, both ways; None: unshaped
        with cluster.mpirun_start(SCRIPT) as job: ...          # as tests.launch.start_ranks, to interfere

Each host is a set of namespaces: network, host name, process ids, shared memory and mounts are its own; the files are
shared, as over NFS. They hang on one switch a network. Inside, `ssh HOST COMMAND` works (see login.py), names resolve
through the host's own /etc/hosts, and /sys/class/net and /dev/shm are the host's. To `ring_plugins` they are different
hosts without being told: `shared_memory_domain()` tells hosts apart by name and process-id namespace, which
is also what keeps the processes of two containers apart.

Nothing has a name outside the namespaces, and each host's first process ends when its standard input closes, which the
kernel sees to however the test ends: there is nothing stale to remove.

Networks: `hosts(2, networks={"eth0": "1gbit", "eth1": "10gbit"})` gives every host two; host i has
10.<network>.0.<i> on each, and names resolve to the first. `rate=None` leaves the link as fast as the machine copies.
`docker=True` adds a docker0 bridge with the same address on every host. `loopback_names=True` lets each host know its
own name as 127.0.1.1, as Debian does.

Rates are those of tbf, with bursts of a few frames, so that a rate holds from the first 100 KiB on. Two or four hosts
share this machine's cores: what a test measures on them is bounded by those above about 10 Gbit/s.
"""

import contextlib
import functools
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.launch import REPOSITORY, Job, LaunchFailed, Result
from tests.launchers import clean_environment, find_mpirun

HERE = Path(__file__).resolve().parent
NAMESPACES = ["unshare", "--net", "--uts", "--mount", "--pid", "--ipc", "--fork", "--mount-proc", "--kill-child"]
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@functools.cache
def why_not() -> str:
    """Why this machine cannot build test hosts, or "" if it can."""
    for tool in ("ip", "tc", "unshare", "nsenter", "mount"):
        if shutil.which(tool, path=SYSTEM_PATH) is None:
            return f"no hosts for tests here: {tool} is not installed (apt-get install iproute2 util-linux)"
    try:
        with hosts(2, rate="1gbit"):
            return ""
    except (OSError, LaunchFailed, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", "") or str(error)
        return f"no hosts for tests here: this machine does not allow namespaces ({said.strip().splitlines()[-1]})"


@contextlib.contextmanager
def hosts(
    number: int,
    rate: str | None = None,
    networks: Mapping[str, str | None] | None = None,
    docker: bool = False,
    loopback_names: bool = False,
) -> Iterator["Cluster"]:
    """Build hosts, yield them, and remove them.

    Args:
        number: 2 to 4 (more work too, and share the cores).
        rate: of eth0, in tc's words ("10gbit", "100mbit"); None for no limit.
        networks: interface to rate, instead of one eth0 at `rate`.
        docker: add a docker0 to every host, with the same address everywhere.
        loopback_names: let each host's own name be 127.0.1.1 to itself.
    """
    directory = Path(tempfile.mkdtemp(prefix="hosts-"))
    cluster = Cluster(directory, number)
    try:
        cluster._build(networks or {"eth0": rate}, docker, loopback_names)
        yield cluster
    finally:
        cluster._remove()
        shutil.rmtree(directory, ignore_errors=True)


class Cluster:
    """Hosts that are up.

    Attributes:
        hosts: their names, host1 first.
        hostfile: a hostfile for mpirun with as many slots a host as it may ever get.
    """

    def __init__(self, directory: Path, number: int) -> None:
        self.directory = directory
        self.hosts = [f"host{i}" for i in range(1, number + 1)]
        self.hostfile = directory / "hostfile"
        self._machines: dict[str, subprocess.Popen[str]] = {}
        self._pids: dict[str, int] = {}
        self._networks: list[str] = []

    def address(self, host: str, interface: str = "eth0") -> str:
        """Of an interface of a host."""
        return f"10.{self._networks.index(interface) + 1}.0.{self.hosts.index(host) + 1}"

    # Building -------------------------------------------------------------------------------------

    def _build(self, networks: Mapping[str, str | None], docker: bool, loopback_names: bool) -> None:
        self._networks = list(networks)
        names = [f"10.1.0.{i} {host}\n" for i, host in enumerate(self.hosts, start=1)]
        self.hostfile.write_text("".join(f"{host} slots=8\n" for host in self.hosts))
        ssh = self.directory / "bin" / "ssh"
        ssh.parent.mkdir()
        ssh.write_text(
            f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -IS {shlex.quote(str(HERE / "login.py"))} "$@"\n'
        )
        ssh.chmod(0o755)
        for i, host in enumerate([*self.hosts, "switch"]):
            own = [line if j != i or not loopback_names else f"127.0.1.1 {host}\n" for j, line in enumerate(names)]
            file = self.directory / f"{host}.hosts"
            file.write_text("127.0.0.1 localhost\n" + "".join(own))
            self._machines[host] = subprocess.Popen(
                [*NAMESPACES, sys.executable, "-IS", str(HERE / "machine.py"), host, str(file)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={"PATH": SYSTEM_PATH},
            )
        for host, machine in self._machines.items():
            assert machine.stdout is not None and machine.stderr is not None
            if machine.stdout.readline() != "ready\n":
                raise LaunchFailed(f"{host} did not start: {machine.stderr.read()}")
            self._pids[host] = psutil.Process(machine.pid).children()[0].pid
        for number, interface in enumerate(networks, start=1):
            self._network("switch", [f"link add net{number} type bridge", f"link set net{number} up"])
            for i, host in enumerate(self.hosts, start=1):
                port = f"net{number}-{i}"
                here, switch = self._pids[host], self._pids["switch"]
                pair = f"link add {interface} netns {here} type veth peer name {port} netns {switch}"
                subprocess.run(["ip", *pair.split()], check=True, capture_output=True, text=True)
                self._network("switch", [f"link set {port} master net{number}", f"link set {port} up"])
                self._network(host, [f"addr add 10.{number}.0.{i}/16 dev {interface}", f"link set {interface} up"])
        if docker:
            for host in self.hosts:
                self._network(
                    host,
                    ["link add docker0 type bridge", "addr add 172.17.0.1/16 dev docker0", "link set docker0 up"],
                )
        for interface, rate in networks.items():
            for host in self.hosts:
                self.shape(host, rate, interface)

    def _network(self, host: str, commands: Sequence[str], tool: str = "ip") -> None:
        """Commands of ip or tc in the network of a host."""
        subprocess.run(
            ["nsenter", "-t", str(self._pids[host]), "-n", tool, "-batch", "-"],
            input="\n".join(commands) + "\n",
            check=True,
            capture_output=True,
            text=True,
        )

    def _remove(self) -> None:
        for machine in self._machines.values():
            assert machine.stdin is not None
            machine.stdin.close()
        for machine in self._machines.values():
            try:
                machine.wait(timeout=10)
            except subprocess.TimeoutExpired:
                machine.kill()
                machine.wait()
            for stream in (machine.stdout, machine.stderr):
                assert stream is not None
                stream.close()

    # The network ----------------------------------------------------------------------------------

    def shape(self, host: str, rate: str | None, interface: str = "eth0") -> None:
        """Limit what a host sends and receives on an interface; None lifts the limit."""
        port = f"net{self._networks.index(interface) + 1}-{self.hosts.index(host) + 1}"
        for place, device in ((host, interface), ("switch", port)):
            with contextlib.suppress(subprocess.CalledProcessError):  # there was none
                self._network(place, [f"qdisc del dev {device} root"], "tc")
            if rate is not None:
                limit = f"qdisc add dev {device} root tbf rate {rate} burst {burst(rate)} limit 16mb"
                self._network(place, [limit], "tc")

    def cut(self, host: str, interface: str = "eth0") -> None:
        """Pull a host's cable; `mend` puts it back. Connections notice nothing by themselves."""
        self._network("switch", [f"link set {self._port(host, interface)} nomaster"])

    def mend(self, host: str, interface: str = "eth0") -> None:
        """Undo `cut`."""
        port = self._port(host, interface)
        self._network("switch", [f"link set {port} master {port.partition('-')[0]}"])

    def _port(self, host: str, interface: str) -> str:
        return f"net{self._networks.index(interface) + 1}-{self.hosts.index(host) + 1}"

    @contextlib.contextmanager
    def firewall(self, host: str, ports: str, how: str = "blackhole", sources: str = "1-65534") -> Iterator[None]:
        """Drop what comes in at a host for TCP ports ("5000", "1024-65535,22"), as a firewall does, without a word.

        Args:
            host: whose incoming packets.
            ports: of TCP, each one or a range.
            how: "blackhole" drops, "prohibit" sends back that it is forbidden.
            sources: ports of the senders; "1024-65534" lets answers of sshd in, as a firewall does that keeps state.
        """
        rules = [
            f"iif {name} ipproto tcp sport {sources} dport {port} pref 10 {how}"
            for name in self._networks
            for port in ports.split(",")
        ]
        # Packets for the host itself are decided by the first rule, which has to come after these.
        self._network(host, ["rule add pref 100 lookup local", "rule del pref 0"])
        self._network(host, [f"rule add {rule}" for rule in rules])
        try:
            yield
        finally:
            self._network(host, [f"rule del {rule}" for rule in rules])
            self._network(host, ["rule add pref 0 lookup local", "rule del pref 100"])

    # Running --------------------------------------------------------------------------------------

    def enter(self, host: str) -> list[str]:
        """What to type before a command so that it runs on a host."""
        return ["nsenter", "-t", str(self._pids[host]), "-n", "-u", "-m", "-p", "-i"]

    def environment(self) -> dict[str, str]:
        """What a shell on a host has: this process's environment, with the hosts' own ssh on PATH."""
        path = f"{self.directory / 'bin'}:{Path(sys.executable).parent}:{SYSTEM_PATH}"
        python_path = f"{REPOSITORY}:{REPOSITORY / 'tests' / 'python_path'}"
        own = {"PATH": path, "TEST_HOSTS_PATH": path, "PYTHONPATH": python_path, "OMP_NUM_THREADS": "1"}
        return {**clean_environment(), **own}

    def run_on(
        self,
        host: str,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        timeout: float = 60,
        check: bool = True,
    ) -> "subprocess.CompletedProcess[str]":
        """Run a command on a host and return what it said."""
        return subprocess.run(
            [*self.enter(host), *command],
            env={**self.environment(), **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=check,
        )

    @contextlib.contextmanager
    def start(
        self,
        command: Sequence[str],
        script: str | Path,
        ranks: int,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        on: str = "host1",
    ) -> Iterator["HostsJob"]:
        """Start `command... script args...` on one host, which starts `ranks` ranks by itself; yields the `Job`."""
        directory = Path(tempfile.mkdtemp(prefix="test-"))
        try:
            whole = [*self.enter(on), *command]
            job = HostsJob(directory, script, ranks, whole, args, {**self.environment(), **(env or {})})
            try:
                yield job
            finally:
                job.kill()
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def mpirun_start(
        self,
        script: str | Path,
        ranks_per_host: int | Sequence[int] = 2,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        interface: str = "eth0",
        options: Sequence[str] = (),
    ) -> "contextlib.AbstractContextManager[HostsJob]":
        """Open MPI's mpirun on host1, over all hosts; extra `options` come before the script."""
        mpirun = find_mpirun()
        assert mpirun is not None
        each = [ranks_per_host] * len(self.hosts) if isinstance(ranks_per_host, int) else ranks_per_host
        ranks = sum(each)
        file = self.directory / f"hostfile-{'-'.join(map(str, each))}"
        file.write_text("".join(f"{host} slots={number}\n" for host, number in zip(self.hosts, each, strict=True)))
        placed = ["--hostfile", str(file), "--map-by", "slot:oversubscribe"]
        networks = ["--prtemca", "prte_if_include", interface, "--mca", "btl_tcp_if_include", interface]
        transports = ["--bind-to", "none", "--mca", "pml", "ob1", "--mca", "btl", "tcp,self,sm", "--mca", "osc", "^ucx"]
        exported = [word for name in (env or {}) for word in ("-x", name)]
        command = [mpirun, *placed, *networks, *transports, *exported, *options, "-n", str(ranks), sys.executable]
        return self.start(command, script, ranks, args, env)

    def mpich_start(
        self,
        script: str | Path,
        ranks_per_host: int = 2,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        interface: str = "eth0",
        options: Sequence[str] = (),
    ) -> "contextlib.AbstractContextManager[HostsJob]":
        """MPICH's mpiexec on host1, over all hosts."""
        home = find_mpich()
        assert home is not None
        # Two namespaces of one kernel look like one host to UCX: leave it TCP only.
        own = {"MPI4PY_LIBMPI": str(home / "lib" / "libmpi.so.12"), "UCX_TLS": "tcp,self", **(env or {})}
        ranks = ranks_per_host * len(self.hosts)
        placed = ["-hosts", ",".join(self.hosts), "-ppn", str(ranks_per_host), "-iface", interface]
        command = [str(home / "bin" / "mpiexec"), "-launcher", "ssh", *placed, *options, "-n", str(ranks)]
        return self.start([*command, sys.executable], script, ranks, args, own)

    def torchrun_start(
        self,
        script: str | Path,
        ranks_per_host: int = 2,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        port: int = 29500,
    ) -> "contextlib.AbstractContextManager[HostsJob]":
        """torchrun on every host, as a user types it on each."""
        meeting = ["--nnodes", str(len(self.hosts)), "--master-addr", "host1", "--master-port", str(port)]
        each = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks_per_host), *meeting]
        return self._everywhere([*each, "--node-rank", "{node}"], script, ranks_per_host, 1, args, env)

    def environment_start(
        self,
        script: str | Path,
        ranks_per_host: int = 2,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        port: int = 29500,
    ) -> "contextlib.AbstractContextManager[HostsJob]":
        """Nothing but RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as schedulers set them."""
        size = ranks_per_host * len(self.hosts)
        meeting = ["RANK={rank}", f"WORLD_SIZE={size}", "MASTER_ADDR=host1", f"MASTER_PORT={port}"]
        each = ["env", *meeting, "LOCAL_RANK={local}", sys.executable]
        return self._everywhere(each, script, ranks_per_host, ranks_per_host, args, env)

    def _everywhere(
        self,
        each: Sequence[str],
        script: str | Path,
        ranks_per_host: int,
        commands_per_host: int,
        args: Sequence[str],
        env: Mapping[str, str] | None,
    ) -> "contextlib.AbstractContextManager[HostsJob]":
        exported = [f"{name}={value}" for name, value in (env or {}).items()]
        everywhere = [sys.executable, "-IS", str(HERE / "everywhere.py"), ",".join(self.hosts), str(commands_per_host)]
        command = [*everywhere, "env", *exported, *each]
        return self.start(command, script, ranks_per_host * len(self.hosts), args, env)

    def mpirun(self, script: str | Path, *args: Any, timeout: float = 60, check: bool = True, **kwargs: Any) -> Result:
        """As `mpirun_start`, to the end."""
        return _finish(self.mpirun_start(script, *args, **kwargs), timeout, check)

    def mpich(self, script: str | Path, *args: Any, timeout: float = 60, check: bool = True, **kwargs: Any) -> Result:
        """As `mpich_start`, to the end."""
        return _finish(self.mpich_start(script, *args, **kwargs), timeout, check)

    def torchrun(
        self, script: str | Path, *args: Any, timeout: float = 60, check: bool = True, **kwargs: Any
    ) -> Result:
        """As `torchrun_start`, to the end."""
        return _finish(self.torchrun_start(script, *args, **kwargs), timeout, check)

    def with_environment(
        self, script: str | Path, *args: Any, timeout: float = 60, check: bool = True, **kwargs: Any
    ) -> Result:
        """As `environment_start`, to the end."""
        return _finish(self.environment_start(script, *args, **kwargs), timeout, check)


class HostsJob(Job):
    """A launch over several hosts. Ranks report process ids of their own host; here they are this machine's."""

    def pids(self, timeout: float = 60) -> dict[int, int]:
        reported = self.wait_for("pid", timeout)
        found = {}
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                environment = process.environ()
                ranks = [environment[n] for n in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK") if n in environment]
                if ranks and reported.get(int(ranks[0])) == inner_pid(process.pid):
                    found[int(ranks[0])] = process.pid
        return found

    def signal_parent(self, number: signal.Signals) -> None:
        for child in psutil.Process(self.process.pid).children():  # of nsenter, which passes nothing on
            child.send_signal(number)


def _finish(started: "contextlib.AbstractContextManager[HostsJob]", timeout: float, check: bool) -> Result:
    with started as job:
        result = job.wait(timeout)
    if check and result.returncode != 0:
        raise LaunchFailed(f"the launch ended with status {result.returncode}\n{result}")
    return result


def inner_pid(pid: int) -> int:
    """What a process of this machine is called on its host."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("NSpid:"):
            return int(line.split()[-1])
    raise psutil.NoSuchProcess(pid)


def burst(rate: str) -> int:
    """Bytes that tbf lets through at once: what the rate moves in 200 µs, and one segment of 64 KiB at least."""
    scale = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
    return max(70_000, int(float(rate[:-4]) * scale[rate[-4:]] / 8 * 200e-6))


def find_mpich() -> Path | None:
    """Where MPICH's wheel lies: TEST_MPICH, or `mpich` beside this environment's bin.

    Add it with `pip install --prefix DIR mpich`, as .ci/run does: it cannot share an environment with Open MPI's wheel,
    since both bring an mpirun. mpi4py's wheel serves both.
    """
    places = [os.environ.get("TEST_MPICH"), str(Path(sys.prefix) / "mpich")]
    return next((Path(place) for place in places if place and (Path(place) / "bin" / "mpiexec").exists()), None)


__all__ = ["Cluster", "HostsJob", "find_mpich", "hosts", "why_not"]
