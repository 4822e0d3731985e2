"""`ring run` takes the options of `horovodrun`: each becomes ours, or is named once with what to do instead."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand

from ring_plugins.core.base import config

_NO_CYCLES = "there are no cycles and no coordinator here"
_RETRIES = "each rank is replaced at most 5 times an hour (docs/fault_tolerance.md)"
_BUCKETS = "use bucket_bytes= of the optimizer, or RING_AUTOTUNE=1"
_DATA_PATH = "the way of the data is chosen for each network (docs/networks.md)"
_ONE_TRIAL = "RING_AUTOTUNE=1 needs no settings"
_LOG = "use logging.getLogger('ring_plugins') in the script"


class Option(NamedTuple):
    """What an option of `horovodrun` is here.

    Attributes:
        words: how many words follow it.
        ours: our option with the same meaning, "" if there is none.
        variable: or the RING_* variable with the same meaning.
        value: of this option or variable; with `joins`, what goes before the word that follows.
        instead: or what to do instead.
        joins: what joins the values of all options with the same `ours`, "" where the last one counts.
    """

    words: int = 1
    ours: str = ""
    variable: str = ""
    value: str = ""
    instead: str = ""
    joins: str = ""


def _without(instead: str, words: int = 1) -> Option:
    return Option(words, instead=instead)


#: All options of `horovodrun` that `ring run` itself does not have.
OPTIONS = {
    "--num-proc": Option(ours="--ranks"),
    "-hostfile": Option(ours="--hostfile"),
    "--network-interface": Option(ours="--interface", joins=","),
    "--network-interfaces": Option(ours="--interface", joins=","),
    "--output-filename": Option(ours="--output-dir"),
    "--min-np": Option(ours="--min-ranks"),
    "--min-num-proc": Option(ours="--min-ranks"),
    "--max-np": Option(ours="--max-ranks"),
    "--max-num-proc": Option(ours="--max-ranks"),
    "--mpi": Option(0, ours="--with", value="mpirun"),
    "--mpi-args": Option(ours="--mpirun-options", joins=" "),
    "--binding-args": Option(ours="--mpirun-options", joins=" "),
    "-p": Option(ours="--agent", value="-p", joins=" "),
    "--ssh-port": Option(ours="--agent", value="-p", joins=" "),
    "-i": Option(ours="--agent", value="-i", joins=" "),
    "--ssh-identity-file": Option(ours="--agent", value="-i", joins=" "),
    "--tcp": Option(0, variable=config.TRANSPORT.name, value="tcp"),
    "--autotune": Option(0, variable=config.AUTOTUNE.name, value="1"),
    "--no-autotune": Option(0, variable=config.AUTOTUNE.name, value="0"),
    "--start-timeout": Option(variable=config.START_TIMEOUT.name),
    "--stall-check": Option(0, variable=config.STALL_WARNING.name, value="60"),
    "--no-stall-check": Option(0, variable=config.STALL_WARNING.name, value="1e9"),
    "--stall-check-warning-time-seconds": Option(variable=config.STALL_WARNING.name),
    "--stall-check-shutdown-time-seconds": Option(variable=config.STALL_ABORT.name),
    "--timeline-filename": _without("use RING_TIMELINE=directory, into which rank 0 writes the timeline"),
    "--timeline-mark-cycles": _without(_NO_CYCLES, 0),
    "--no-timeline-mark-cycles": _without(_NO_CYCLES, 0),
    "--fusion-threshold-mb": _without(_BUCKETS),
    "--cycle-time-ms": _without(_NO_CYCLES),
    "--cache-capacity": _without(_NO_CYCLES),
    "--hierarchical-allreduce": _without(_DATA_PATH, 0),
    "--no-hierarchical-allreduce": _without(_DATA_PATH, 0),
    "--hierarchical-allgather": _without(_DATA_PATH, 0),
    "--no-hierarchical-allgather": _without(_DATA_PATH, 0),
    "--torus-allreduce": _without(_DATA_PATH, 0),
    "--no-torus-allreduce": _without(_DATA_PATH, 0),
    "--autotune-log-file": _without(_ONE_TRIAL),
    "--autotune-warmup-samples": _without(_ONE_TRIAL),
    "--autotune-steps-per-sample": _without(_ONE_TRIAL),
    "--autotune-bayes-opt-max-samples": _without(_ONE_TRIAL),
    "--autotune-gaussian-process-noise": _without(_ONE_TRIAL),
    "--elastic-timeout": _without("the other ranks do not wait for a new process"),
    "--reset-limit": _without(_RETRIES),
    "--blacklist-cooldown-range": _without(
        "nothing: each rank is replaced at most 5 times an hour (docs/fault_tolerance.md)", 2
    ),
    "--slots-per-host": _without("write slots as in -H host1:4,host2:4, and print them as host1:4"),
    "--gloo": _without("ranks need no MPI, and on one host --with python starts them without mpirun", 0),
    "--jsrun": _without("use -H or --hostfile, whose hosts are reached by ssh or --agent", 0),
    "--verbose": _without("the command is always printed", 0),
    "--disable-cache": _without("hosts are checked at each start", 0),
    "--mpi-threads-disable": _without("no thread of a rank calls MPI beside it", 0),
    "--no-mpi-threads-disable": _without("no thread of a rank calls MPI beside it", 0),
    "--num-nccl-streams": _without("use NCCL's own variables (docs/gpu.md)"),
    "--thread-affinity": _without("use --bind core"),
    "--gloo-timeout-seconds": _without("use RING_NETWORK_TIMEOUT and RING_TIMEOUT"),
    "--log-level": _without(_LOG),
    "--log-with-timestamp": _without(_LOG, 0),
    "--log-without-timestamp": _without(_LOG, 0),
    "--log-hide-timestamp": _without(_LOG, 0),
    "--no-log-hide-timestamp": _without(_LOG, 0),
    "-prefix-timestamp": _without("use --tag-output", 0),
    "--prefix-output-with-timestamp": _without("use --tag-output", 0),
}
#: Those without which the call would mean something else, so that they are refused.
REFUSED = {
    "-cb": "write `ring doctor`",
    "--check-build": "write `ring doctor`",
    "-v": "write `ring --version`",
    "--version": "write `ring --version`",
}
#: How the options begin whose rest the settings in a section of a --config-file are.
_SECTIONS = {
    "params": "", "autotune": "autotune-", "timeline": "timeline-", "stall_check": "stall-check-",
    "library_options": "", "logging": "log-", "controller": "",
}  # fmt: skip
#: With one of these, `horovodrun` lets the others go on when a rank is lost, and starts new ones.
_ELASTIC = {"--min-np", "--min-num-proc", "--max-np", "--max-num-proc", "--host-discovery-script"}
#: What an agent is by default, for further options of ssh.
_SSH = "ssh -o BatchMode=yes -o ConnectTimeout=8"


class HorovodrunCommand(TyperCommand):
    """A command that takes these options, too; its help shows only its own."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        has_value = {
            name: not getattr(param, "is_flag", False) for param in self.params for name in param.opts if name[0] == "-"
        }
        words, notes = translate(args, has_value)
        for note in notes:
            typer.echo(f"ring run: {note}", err=True)
        return super().parse_args(ctx, words)


def translate(
    words: Sequence[str], has_value: Mapping[str, bool], environment: Mapping[str, str] = os.environ
) -> tuple[list[str], list[str]]:
    """Replace options of `horovodrun` by ours.

    Args:
        words: after `ring run`; options end where the program begins.
        has_value: our options, and whether a word follows each.
        environment: of this process; what it says about lost ranks counts.

    Returns:
        The words in our terms, and a line for each option that has no effect.

    Raises:
        typer.BadParameter: an option is refused, or lacks its value.
    """
    ours: list[str] = []
    notes: list[str] = []
    given: list[str] = []
    of_file: list[str] = []
    joined: dict[tuple[str, str], list[str]] = {}
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] != "--":
        word = rest.pop(0)
        name, is_joined, value = word.partition("=")
        given.append(name)
        if name in REFUSED:
            raise typer.BadParameter(f"{name} is an option of horovodrun: {REFUSED[name]}.")
        option = OPTIONS.get(name, Option(int(has_value.get(name, name == "--config-file"))))
        values = [value] if is_joined else [_next(rest, name) for _ in range(option.words)]
        if name == "--config-file":
            of_file, of_its_own = translate(read_config_file(values[0]), has_value, environment)
            notes += of_its_own
        elif name not in OPTIONS:
            ours += [word, *([] if is_joined else values)]
        elif option.instead:
            notes.append(f"{' '.join([name, *values])} has no effect here: {option.instead}.")
        elif option.joins:
            joined.setdefault((option.ours, option.joins), []).extend(filter(None, [option.value, *values]))
        elif option.ours:
            ours += [option.ours, option.value or values[0]]
        elif option.value or values[0] != "0":  # seconds, of which 0 stands for never
            ours += ["-x", f"{option.variable}={option.value or values[0]}"]
    for (name, between), values in joined.items():
        before = [_SSH] if name == "--agent" else []
        ours += [name, between.join([*before, *values])] if name not in given else []
    is_told = "--on-failure" in given or config.ON_FAILURE.is_set(environment)
    if not is_told and not _ELASTIC.isdisjoint(given):
        ours += ["--on-failure", "replace"]
    return [*of_file, *ours, *rest], notes


def read_config_file(path: str) -> list[str]:
    """The options that a --config-file of `horovodrun` stands for; those of the command line count more.

    Raises:
        typer.BadParameter: it cannot be read, has a setting that Horovod 0.28 does not know, or PyYAML is missing.
    """
    try:
        yaml = importlib.import_module("yaml")
    except ImportError:
        raise typer.BadParameter(
            f"--config-file {path} needs PyYAML: pip install pyyaml, or write its settings as options."
        ) from None
    try:
        sections = yaml.safe_load(Path(path).read_text()) or {}
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        raise typer.BadParameter(f"--config-file {path} cannot be read: {error}.") from None
    words: list[str] = []
    for section, found in sections.items() if isinstance(sections, dict) else [("", sections)]:
        settings = {f"{found}".lower(): True} if section == "controller" else found  # the only one that is a value
        if settings is None:
            continue  # all of them are comments
        for name, value in settings.items() if isinstance(settings, dict) else [("", settings)]:
            option = f"{_SECTIONS.get(section, '?')}{name}".replace("_", "-").removesuffix("-enabled")
            if value is False:
                option = "log-without-timestamp" if option == "log-with-timestamp" else f"no-{option}"
            if f"--{option}" not in OPTIONS:
                raise typer.BadParameter(
                    f"--config-file {path}: horovodrun knows no {section}: {name or settings}; write it as an option."
                )
            if value is not None:
                words += [f"--{option}", *([] if isinstance(value, bool) else [str(value)])]
    return words


def _next(words: list[str], option: str) -> str:
    if not words:
        raise typer.BadParameter(f"{option} needs a value behind it.")
    return words.pop(0)
