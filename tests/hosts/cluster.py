"""Two to four hosts on this machine, for tests of what happens between hosts.

    from tests.hosts import hosts

    with hosts(2, rate="10gbit") as cluster:
        result = cluster.mpirun(SCRIPT, ranks_per_host=2).run()  # also mpich and environment
        result.values("sum")                                     # as tests.launch.run_ranks returns it
        with cluster.mpirun(SCRIPT) as job: ...                  # as tests.launch.start_ranks, to interfere
        cluster.run_on("host2", ["hostname"]).stdout             # any command on a host
        cluster.shape("host2", "1gbit")                          # limit eth0 of a host; None lifts the limit

A host is a set of Linux namespaces with its own network, host name, process ids, shared memory and mounts. The file
system is the machine's, as if all hosts mounted it by NFS. One bridge per network connects the hosts. On a host,
`ssh HOST COMMAND` works (login.py stands in for ssh), names resolve through its own /etc/hosts, and /sys/class/net and
/dev/shm show what is its own. `ring_plugins` takes them for different hosts by itself, because it tells hosts apart by
host name and process-id namespace.

Nothing stays behind, however a test ends: the first process of each host exits when its standard input closes, and the
kernel then removes the host's processes, interfaces and mounts.

`hosts(2, networks={"eth0": "1gbit", "eth1": "10gbit"})` gives every host two interfaces. Host i has the address
10.N.0.i on the Nth network, and names resolve to the first. Rates are enforced by tc's token bucket filter with bursts
of a few frames, so that they hold from the first 100 KiB on. All hosts share this machine's cores, which become the
bottleneck above about 10 Gbit/s.
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

import psutil

from tests.launch import REPOSITORY, Job, LaunchFailed, Result
from tests.launchers import clean_environment, find_mpirun

HERE = Path(__file__).resolve().parent
NAMESPACES = ["unshare", "--net", "--uts", "--mount", "--pid", "--ipc", "--fork", "--mount-proc", "--kill-child"]
FAKE_SRUN = REPOSITORY / "tests" / "core" / "rendezvous" / "fake_srun.py"
#: The state of a socket in /proc/net/tcp.
_LISTENS = "0A"
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

Env = Mapping[str, str] | None


@functools.cache
def why_not() -> str:
    """Why this machine cannot build test hosts, or "" if it can."""
    for tool in ("ip", "tc", "unshare", "nsenter", "mount"):
        if shutil.which(tool, path=SYSTEM_PATH) is None:
            return f"no test hosts: {tool} is not installed (apt-get install iproute2 util-linux)"
    try:
        with hosts(2, rate="1gbit"):
            return ""
    except (OSError, LaunchFailed, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", "") or str(error)
        return f"no test hosts: this machine does not allow namespaces ({reason.strip().splitlines()[-1]})"


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
        number: number of hosts, 2 to 4.
        rate: rate of eth0 as tc writes it ("10gbit", "100mbit"); None for no limit.
        networks: interface name to rate, instead of one eth0 at `rate`.
        docker: add a docker0 bridge to every host, with the same address on each.
        loopback_names: resolve a host's own name to 127.0.1.1 on that host, as Debian does.
    """
    directory = Path(tempfile.mkdtemp(prefix="hosts-"))
    cluster = Cluster(directory, number)
    try:
        cluster.build(networks or {"eth0": rate}, docker, loopback_names)
        yield cluster
    finally:
        cluster.remove()
        shutil.rmtree(directory, ignore_errors=True)


class Cluster:
    """Hosts and the networks between them.

    Attributes:
        directory: for files of the cluster.
        hosts: names of the hosts, host1 first.
    """

    def __init__(self, directory: Path, number: int) -> None:
        self.directory = directory
        self.hosts = [f"host{i}" for i in range(1, number + 1)]
        self._first_processes: dict[str, subprocess.Popen[str]] = {}
        self._pids: dict[str, int] = {}
        self._networks: list[str] = []

    def build(self, networks: Mapping[str, str | None], docker: bool, loopback_names: bool) -> None:
        """Start the hosts and connect them; the arguments are those of `hosts`."""
        self._networks = list(networks)
        self._write_ssh()
        self._start_hosts(loopback_names)
        for number, interface in enumerate(networks, start=1):
            self._add_network(number, interface)
        if docker:
            bridge = ["link add docker0 type bridge", "addr add 172.17.0.1/16 dev docker0", "link set docker0 up"]
            for host in self.hosts:
                self._configure(host, bridge)
        for interface, rate in networks.items():
            if rate is not None:
                for host in self.hosts:
                    self.shape(host, rate, interface)

    def _write_ssh(self) -> None:
        ssh = self.directory / "bin" / "ssh"
        ssh.parent.mkdir()
        ssh.write_text(
            f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -IS {shlex.quote(str(HERE / "login.py"))} "$@"\n'
        )
        ssh.chmod(0o755)

    def _start_hosts(self, loopback_names: bool) -> None:
        """Start the first process of each host, and of the switch, which is a host too."""
        names = {host: f"10.1.0.{i} {host}\n" for i, host in enumerate(self.hosts, start=1)}
        for host in [*self.hosts, "switch"]:
            own = {**names, host: f"127.0.1.1 {host}\n"} if loopback_names and host in names else names
            hosts_file = self.directory / f"{host}.hosts"
            hosts_file.write_text("127.0.0.1 localhost\n" + "".join(own.values()))
            self._first_processes[host] = subprocess.Popen(
                [*NAMESPACES, sys.executable, "-IS", str(HERE / "machine.py"), host, str(hosts_file)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={"PATH": SYSTEM_PATH},
            )
        for host, process in self._first_processes.items():
            assert process.stdout is not None and process.stderr is not None
            if process.stdout.readline() != "ready\n":
                raise LaunchFailed(f"{host} did not start: {process.stderr.read()}")
            self._pids[host] = psutil.Process(process.pid).children()[0].pid  # unshare's child

    def _add_network(self, number: int, interface: str) -> None:
        """Connect an interface of every host to a bridge on the switch."""
        self._configure("switch", [f"link add net{number} type bridge", f"link set net{number} up"])
        for i, host in enumerate(self.hosts, start=1):
            port = f"net{number}-{i}"
            ends = (self._pids[host], self._pids["switch"])
            pair = f"link add {interface} netns {ends[0]} type veth peer name {port} netns {ends[1]}"
            subprocess.run(["ip", *pair.split()], check=True, capture_output=True, text=True)
            self._configure("switch", [f"link set {port} master net{number}", f"link set {port} up"])
            self._configure(host, [f"addr add 10.{number}.0.{i}/16 dev {interface}", f"link set {interface} up"])

    def _configure(self, host: str, commands: Sequence[str], tool: str = "ip") -> None:
        """Run commands of ip or tc in a host's network namespace."""
        subprocess.run(
            ["nsenter", "-t", str(self._pids[host]), "-n", tool, "-batch", "-"],
            input="\n".join(commands) + "\n",
            check=True,
            capture_output=True,
            text=True,
        )

    def remove(self) -> None:
        """End all hosts."""
        for process in self._first_processes.values():
            assert process.stdin is not None
            process.stdin.close()
        for process in self._first_processes.values():
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            for stream in (process.stdout, process.stderr):
                assert stream is not None
                stream.close()

    def address(self, host: str, interface: str = "eth0") -> str:
        """The address of an interface of a host."""
        return f"10.{self._networks.index(interface) + 1}.0.{self.hosts.index(host) + 1}"

    def _port(self, host: str, interface: str) -> str:
        """The switch's end of a host's interface."""
        return f"net{self._networks.index(interface) + 1}-{self.hosts.index(host) + 1}"

    def shape(self, host: str, rate: str | None, interface: str = "eth0") -> None:
        """Limit what a host sends and receives on an interface; None lifts the limit."""
        for place, device in ((host, interface), ("switch", self._port(host, interface))):
            with contextlib.suppress(subprocess.CalledProcessError):  # there was no limit before
                self._configure(place, [f"qdisc del dev {device} root"], "tc")
            if rate is not None:
                limit = f"qdisc add dev {device} root tbf rate {rate} burst {_burst(rate)} limit 16mb"
                self._configure(place, [limit], "tc")

    def cut(self, host: str, interface: str = "eth0") -> None:
        """Unplug a host's cable at the switch. The host's own interface stays up, so connections just go silent."""
        self._configure("switch", [f"link set {self._port(host, interface)} nomaster"])

    def mend(self, host: str, interface: str = "eth0") -> None:
        """Undo `cut`."""
        port = self._port(host, interface)
        self._configure("switch", [f"link set {port} master {port.partition('-')[0]}"])

    @contextlib.contextmanager
    def firewall(self, host: str, ports: str, action: str = "blackhole", sources: str = "1-65534") -> Iterator[None]:
        """Drop packets that arrive at a host for some TCP ports.

        Args:
            host: the host.
            ports: destination ports or ranges ("5000", "1024-65535,22").
            action: "blackhole" drops silently, "prohibit" answers with an error.
            sources: source ports; "1024-65534" lets answers from port 22 in, as a stateful firewall does.
        """
        rules = [
            f"iif {name} ipproto tcp sport {sources} dport {port} pref 10 {action}"
            for name in self._networks
            for port in ports.split(",")
        ]
        # The first rule delivers local packets, so it has to move behind the firewall's.
        self._configure(host, ["rule add pref 100 lookup local", "rule del pref 0"])
        self._configure(host, [f"rule add {rule}" for rule in rules])
        try:
            yield
        finally:
            self._configure(host, [f"rule del {rule}" for rule in rules])
            self._configure(host, ["rule add pref 0 lookup local", "rule del pref 100"])

    def enter(self, host: str) -> list[str]:
        """The words before a command that run it on a host."""
        return ["nsenter", "-t", str(self._pids[host]), "-n", "-u", "-m", "-p", "-i"]

    def environment_variables(self) -> dict[str, str]:
        """The environment of a shell on a host: this process's, with the stand-in for ssh on PATH."""
        path = f"{self.directory / 'bin'}:{Path(sys.executable).parent}:{SYSTEM_PATH}"
        python_path = f"{REPOSITORY}:{REPOSITORY / 'tests' / 'python_path'}"
        own = {"PATH": path, "TEST_HOSTS_PATH": path, "PYTHONPATH": python_path, "OMP_NUM_THREADS": "1"}
        return {**clean_environment(), **own}

    def run_on(
        self, host: str, command: Sequence[str], env: Env = None, timeout: float = 60, check: bool = True
    ) -> "subprocess.CompletedProcess[str]":
        """Run a command on a host."""
        return subprocess.run(
            [*self.enter(host), *command],
            env={**self.environment_variables(), **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=check,
        )

    def start(
        self, command: Sequence[str], script: str | Path, ranks: int, args: Sequence[str] = (), env: Env = None
    ) -> "HostsLaunch":
        """`command... script args...` on host1, which is to start `ranks` ranks."""
        whole = [*self.enter("host1"), *command]
        return HostsLaunch(script, ranks, whole, args, {**self.environment_variables(), **(env or {})})

    def mpirun(
        self,
        script: str | Path,
        ranks_per_host: int | Sequence[int] = 2,
        args: Sequence[str] = (),
        env: Env = None,
        interface: str = "eth0",
        options: Sequence[str] = (),
    ) -> "HostsLaunch":
        """Open MPI's mpirun on host1, over all hosts. `options` come before the script."""
        mpirun = find_mpirun()
        assert mpirun is not None
        each = [ranks_per_host] * len(self.hosts) if isinstance(ranks_per_host, int) else ranks_per_host
        file = self.directory / f"hostfile-{'-'.join(map(str, each))}"
        file.write_text("".join(f"{host} slots={number}\n" for host, number in zip(self.hosts, each, strict=True)))
        placement = ["--hostfile", str(file), "--map-by", "slot:oversubscribe", "--bind-to", "none"]
        networks = ["--prtemca", "prte_if_include", interface, "--mca", "btl_tcp_if_include", interface]
        transports = ["--mca", "pml", "ob1", "--mca", "btl", "tcp,self,sm", "--mca", "osc", "^ucx"]
        exported = [word for name in (env or {}) for word in ("-x", name)]
        command = [mpirun, *placement, *networks, *transports, *exported, *options, "-n", str(sum(each))]
        return self.start([*command, sys.executable], script, sum(each), args, env)

    def mpich(
        self,
        script: str | Path,
        ranks_per_host: int = 2,
        args: Sequence[str] = (),
        env: Env = None,
        interface: str = "eth0",
        options: Sequence[str] = (),
    ) -> "HostsLaunch":
        """MPICH's mpiexec on host1, over all hosts."""
        home = find_mpich()
        assert home is not None
        # UCX takes two namespaces of one kernel for one host; only TCP works between them.
        own = {"MPI4PY_LIBMPI": str(home / "lib" / "libmpi.so.12"), "UCX_TLS": "tcp,self", **(env or {})}
        ranks = ranks_per_host * len(self.hosts)
        placement = ["-hosts", ",".join(self.hosts), "-ppn", str(ranks_per_host), "-iface", interface]
        command = [str(home / "bin" / "mpiexec"), "-launcher", "ssh", *placement, *options, "-n", str(ranks)]
        return self.start([*command, sys.executable], script, ranks, args, own)

    def environment(
        self,
        script: str | Path,
        ranks_per_host: int = 2,
        args: Sequence[str] = (),
        env: Env = None,
        port: int = 29500,
    ) -> "HostsLaunch":
        """Plain Python with only RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, as schedulers set them."""
        size = ranks_per_host * len(self.hosts)
        variables = ["RANK={rank}", f"WORLD_SIZE={size}", "MASTER_ADDR=host1", f"MASTER_PORT={port}"]
        command = ["env", *variables, "LOCAL_RANK={local}", sys.executable]
        exported = [f"{name}={value}" for name, value in (env or {}).items()]
        whole = [*everywhere(self.hosts, ranks_per_host), "env", *exported, *command]
        return self.start(whole, script, size, args, env)

    def torchrun(
        self, script: str | Path, ranks_per_host: int = 2, args: Sequence[str] = (), env: Env = None
    ) -> "HostsLaunch":
        """A torchrun on each host."""
        options = [f"--nnodes={len(self.hosts)}", f"--nproc-per-node={ranks_per_host}", "--node-rank={node}"]
        options += ["--master-addr=host1", "--master-port=29500"]
        command = [sys.executable, "-m", "torch.distributed.run", *options]
        return self._on_each_host(command, script, ranks_per_host, args, env)

    def srun(
        self, script: str | Path, ranks_per_host: int = 2, args: Sequence[str] = (), env: Env = None
    ) -> "HostsLaunch":
        """A stand-in for srun, as SLURM's daemons start a step on each host."""
        command = [sys.executable, str(FAKE_SRUN), f"{ranks_per_host}@{{node}}/{len(self.hosts)}", sys.executable]
        return self._on_each_host(command, script, ranks_per_host, args, env, {"TEST_KILL_ON_BAD_EXIT": "1"})

    def _on_each_host(
        self,
        command: Sequence[str],
        script: str | Path,
        ranks_per_host: int,
        args: Sequence[str],
        env: Env,
        own: Env = None,
    ) -> "HostsLaunch":
        exported = [f"{name}={value}" for name, value in (env or {}).items()]
        whole = [*everywhere(self.hosts, 1), "env", *exported, *command]
        return self.start(whole, script, ranks_per_host * len(self.hosts), args, own)

    def left_behind(self) -> list[str]:
        """Ports on which processes listen, and files in shared memory: nothing, once a job has ended."""
        found = []
        for host in self.hosts:
            root = Path("/proc") / str(self._pids[host])
            for table in ("tcp", "tcp6"):
                rows = (line.split() for line in (root / "net" / table).read_text().splitlines()[1:])
                ports = [int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == _LISTENS]
                found += [f"port {port} on {host}" for port in ports if port != 22]  # which machine.py has opened
            found += [f"/dev/shm/{file.name} on {host}" for file in (root / "root" / "dev" / "shm").iterdir()]
        return found


def everywhere(names: Sequence[str], commands_per_host: int) -> list[str]:
    """The words before a command that run it on each host so many times; see everywhere.py."""
    return [sys.executable, "-IS", str(HERE / "everywhere.py"), ",".join(names), str(commands_per_host)]


class HostsLaunch:
    """A launch over several hosts that has not started yet: `run` it to its end, or enter it to get the running job."""

    def __init__(
        self, script: str | Path, ranks: int, command: Sequence[str], args: Sequence[str], env: Mapping[str, str]
    ) -> None:
        self._arguments = (script, ranks, command, args, env)
        self._stack = contextlib.ExitStack()  # removes what the job leaves

    def __enter__(self) -> "HostsJob":
        with contextlib.ExitStack() as stack:
            directory = Path(tempfile.mkdtemp(prefix="test-"))
            stack.callback(shutil.rmtree, directory, ignore_errors=True)
            job = HostsJob(directory, *self._arguments)
            stack.callback(job.kill)
            self._stack = stack.pop_all()
        return job

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self, timeout: float = 60, check: bool = True) -> Result:
        """Run to the end, as `tests.launch.run_ranks` does."""
        with self as job:
            result = job.wait(timeout)
        if check and result.returncode != 0:
            raise LaunchFailed(f"the launch ended with status {result.returncode}\n{result}")
        return result


class HostsJob(Job):
    """A running launch over several hosts. `pids` are process ids of this machine; ranks report those of their host."""

    def pids(self, timeout: float = 60) -> dict[int, int]:
        reported = self.wait_for("pid", timeout)
        found = {}
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                environment = process.environ()
                ranks = [environment[n] for n in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK") if n in environment]
                if ranks and reported.get(int(ranks[0])) == _pid_on_its_host(process.pid):
                    found[int(ranks[0])] = process.pid
        return found

    def signal_parent(self, number: signal.Signals) -> None:
        for child in psutil.Process(self.process.pid).children():  # of nsenter, which does not forward signals
            child.send_signal(number)


def _pid_on_its_host(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("NSpid:"):
            return int(line.split()[-1])
    raise psutil.NoSuchProcess(pid)


def _burst(rate: str) -> int:
    """Bytes that tbf lets through at once: what the rate moves in 200 µs, but at least one segment of 64 KiB."""
    bits = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
    return max(70_000, int(float(rate[:-4]) * bits[rate[-4:]] / 8 * 200e-6))


def find_mpich() -> Path | None:
    """The directory of MPICH's wheel: TEST_MPICH, or `mpich` beside this environment's bin; None if there is none.

    `pip install --prefix DIR mpich` installs it, as .ci/run does. It cannot share an environment with Open MPI's wheel,
    since both bring an mpirun. mpi4py's wheel serves both.
    """
    places = [os.environ.get("TEST_MPICH"), str(Path(sys.prefix) / "mpich")]
    return next((Path(place) for place in places if place and (Path(place) / "bin" / "mpiexec").exists()), None)
