"""The scripts that start jobs on several hosts: real jobs on two emulated ones, the commands, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import PATIENCE
from tests.parallel.launch import BIN, ROOT, environment
from tests.parallel.tiers import thorough
from tests.parallel.two_hosts import two_hosts

pytest.importorskip("horovod.torch")

pytestmark = pytest.mark.timeout(180)

FAMILIES = ("HVD_PERIODIC_", "HOROVOD_", "NCCL_", "UCX_", "FI_", "MPIR_CVAR_", "OMPI_MCA_")

# As with Docker, the address is the same on all hosts, and nobody answers.
_DOCKER = """
set -e
for host in '' 'ssh h2'; do
  $host ip link add docker0 type veth peer name container
  $host ip address add 172.17.0.1/16 dev docker0
  $host ip link set docker0 up
  $host ip link set container up
done
exec "$@"
"""

PROGRAM = """
import json, os, pathlib, socket, sys
import horovod.torch as hvd, torch
import hvd_periodic.torch as hvdp

groups = hvdp.node_groups()
torch.manual_seed(hvd.rank())
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), process_set=groups.local)
optimizer = hvdp.ElasticAverageOptimizer(optimizer, model, 2, process_set=groups.cross)
for _ in range(4):
    optimizer.zero_grad()
    model(torch.randn(4, 2)).square().mean().backward()
    optimizer.step()
optimizer.finalize()
with optimizer.center():
    center = model.weight.tolist()
report = {
    "host": socket.gethostname()[-2:],
    "local rank": hvd.local_rank(),
    "groups": groups.ranks,
    "local": groups.local.ranks,
    "center": center,
    "argument": sys.argv[2],
    "variable": os.environ.get("SPECIAL"),
}
(pathlib.Path(sys.argv[1]) / f"{hvd.rank()} of {hvd.size()}.json").write_text(json.dumps(report))
"""


@pytest.fixture(scope="module")
def hosts() -> list[str]:
    """Words that run a command on host h1, from where ssh leads to h2."""
    return [*two_hosts(), "bash", "-c", _DOCKER, "bash"]


def run(words: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in environment().items() if not key.startswith(FAMILIES)}
    venv = {"HVD_PERIODIC_VENV": sys.prefix} if (Path(sys.prefix) / "bin" / "python3").exists() else {}
    env = clean | venv | variables
    return subprocess.run(
        words, env=env, cwd=os.sep, capture_output=True, text=True, timeout=PATIENCE * 120, check=False
    )


def script(name: str, *arguments: str) -> list[str]:
    return ["bash", str(ROOT / "run_scripts" / f"hosts_{name}.sh"), *arguments]


def require(name: str) -> None:
    """Skip where the environment has another MPI than a script wants."""
    found = subprocess.run(["mpirun", "--version"], env=environment(), capture_output=True, text=True, check=False)
    has = "mpirun" if "Open MPI" in found.stdout else "mpich"
    if name in ("mpirun", "mpich") and name != has:
        pytest.skip(f"The MPI here is {'Open MPI' if has == 'mpirun' else 'not Open MPI'}")
    if name == "horovodrun --mpi" and has != "mpirun":
        pytest.skip("horovodrun --mpi starts Open MPI here")


@pytest.mark.parametrize(
    ("launcher", "slots", "as_file"),
    [
        thorough("mpirun", [2, 2], False),
        ("mpirun", [2, 1], True),
        thorough("mpich", [2, 2], False),
        ("mpich", [2, 1], True),
        ("horovodrun --gloo", [1, 1], False),
        thorough("horovodrun --mpi", [1, 1], True),
    ],
)
def test_two_hosts(launcher: str, slots: list[int], as_file: bool, hosts: list[str], tmp_path: Path) -> None:
    """Ranks inside of a host average gradients, and hosts exchange."""
    require(launcher)
    (tmp_path / "train.py").write_text(PROGRAM)
    given = ",".join(f"h{host}:{count}" for host, count in enumerate(slots, 1))
    if as_file:
        (tmp_path / "hostfile").write_text(f"# all of them\n\nh1 slots={slots[0]}\nh2  slots = {slots[1]} # the last\n")
        given = str(tmp_path / "hostfile")
    name, _, controller = launcher.partition(" --")
    variables = {"HVD_PERIODIC_INTERFACE": "eth0", "HVD_PERIODIC_PASS": "SPECIAL", "SPECIAL": "a b"}
    variables["OMPI_MCA_mpi_yield_when_idle"] = "1"  # The hosts share the cores of this one.
    words = script(name, given, str(tmp_path / "train.py"), str(tmp_path), "an argument")
    finished = run([*hosts, *words], HVD_PERIODIC_CONTROLLER=controller, **variables)
    assert finished.returncode == 0, finished.stdout + finished.stderr

    ranks = sum(slots)
    assert len(list(tmp_path.glob("*.json"))) == ranks
    reports = [json.loads((tmp_path / f"{rank} of {ranks}.json").read_text()) for rank in range(ranks)]
    groups = [list(range(slots[0])), list(range(slots[0], ranks))]
    for rank, report in enumerate(reports):
        host = int(rank >= slots[0])
        assert report["host"] == f"h{host + 1}", "rank by rank, host by host"
        assert report["local rank"] == groups[host].index(rank)
        assert report["groups"] == groups
        assert report["local"] == groups[host]
        assert report["center"] == reports[0]["center"]
        assert report["argument"] == "an argument"
        assert report["variable"] == "a b"


@pytest.mark.parametrize("launcher", ["mpirun", "mpich", thorough("horovodrun --gloo")])
def test_what_launchers_write_themselves(launcher: str, hosts: list[str], tmp_path: Path) -> None:
    """Their own hostfiles, without the scripts."""
    require(launcher)
    file = tmp_path / "hostfile"
    file.write_text("h1:2\nh2:1\n" if launcher == "mpich" else "h1 slots=2\nh2 slots=1\n")
    command = {
        "mpirun": [f"{BIN}/mpirun", "--hostfile", str(file), "--mca", "oob_tcp_if_include", "eth0", "hostname"],
        "mpich": ["mpiexec.hydra", "-f", str(file), "-n", "3", "-iface", "eth0", "hostname"],
        "horovodrun --gloo": [
            *("horovodrun", "--gloo", "--hostfile", str(file), "-np", "3", "--network-interface", "eth0"),
            *("bash", "-c", "hostname"),
        ],
    }[launcher]
    finished = run([*hosts, *command])
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert sorted(line[-2:] for line in finished.stdout.splitlines()) == ["h1", "h1", "h2"]


@pytest.mark.parametrize("launcher", ["mpirun", "mpich", thorough("horovodrun --mpi")])
def test_pinning(launcher: str, tmp_path: Path) -> None:
    require(launcher)
    (tmp_path / "cores.py").write_text(
        "import os, sys; open(sys.argv[1], 'w').write(str(len(os.sched_getaffinity(0))))"
    )
    name, _, controller = launcher.partition(" --")
    words = script(name, "localhost:1", str(tmp_path / "cores.py"), str(tmp_path / "cores"))
    for cores, expected in (("", len(os.sched_getaffinity(0))), ("1", 1)):
        finished = run(words, HVD_PERIODIC_CONTROLLER=controller, HVD_PERIODIC_CORES=cores)
        assert finished.returncode == 0, finished.stdout + finished.stderr
        assert (tmp_path / "cores").read_text() == str(expected)
    refused = run(words, HVD_PERIODIC_CONTROLLER=controller, HVD_PERIODIC_CORES="4096")
    assert refused.returncode != 0, "more than there are"


@pytest.mark.parametrize("name", ["mpirun", "mpich"])
def test_the_exit_code_is_that_of_the_ranks(name: str, tmp_path: Path) -> None:
    require(name)
    (tmp_path / "fails.py").write_text("raise SystemExit(7)")
    assert run(script(name, "localhost:1", str(tmp_path / "fails.py"))).returncode == 7


OPTIONS = {
    "HVD_PERIODIC_CORES": "4",
    "HVD_PERIODIC_INTERFACE": "ib0",
    "HVD_PERIODIC_PASS": "SPECIAL NOT_SET",
    "SPECIAL": "1",
    "UCX_TLS": "tcp",
}
PLAIN = ["LD_LIBRARY_PATH", "OMP_NUM_THREADS", "PATH", "PYTHONPATH", "TF_CPP_MIN_LOG_LEVEL"]
PASSED = sorted([*PLAIN, "HOROVOD_GLOO_IFACE", "NCCL_SOCKET_IFNAME", "SPECIAL", "UCX_TLS"])


@pytest.mark.parametrize(
    ("launcher", "plain", "pinned"),
    [
        (
            "mpirun",
            "{mpirun} -np 8 -H h0:4,h1:4 --map-by slot --bind-to none {x}",
            "{mpirun} -np 8 -H h0:4,h1:4 --map-by slot:PE=4 --bind-to core "
            "--mca btl_tcp_if_include ib0 --mca oob_tcp_if_include ib0 {x}",
        ),
        (
            "mpich",
            "mpiexec.hydra -n 8 -hosts h0:4,h1:4 -bind-to none -genvlist {commas}",
            "mpiexec.hydra -n 8 -hosts h0:4,h1:4 -bind-to core:4 -iface ib0 -genvlist {commas}",
        ),
        (
            "horovodrun --mpi",
            "horovodrun --mpi -np 8 -H h0:4,h1:4 '--mpi-args=--prefix {prefix}'",
            "horovodrun --mpi -np 8 -H h0:4,h1:4 --network-interface ib0 "
            "'--mpi-args=--prefix {prefix} --mca oob_tcp_if_include ib0' "
            "'--binding-args=--map-by slot:PE=4 --bind-to core'",
        ),
    ],
)
def test_commands(launcher: str, plain: str, pinned: str, tmp_path: Path) -> None:
    if launcher != "mpich":
        require(launcher)
    (tmp_path / "train.py").touch()
    name, _, controller = launcher.partition(" --")
    mpirun = shutil.which("mpirun", path=environment()["PATH"])
    for expected, options, passed in ((plain, {}, PLAIN), (pinned, OPTIONS, PASSED)):
        variables = {"HVD_PERIODIC_DRY_RUN": "1", "HVD_PERIODIC_CONTROLLER": controller, "LD_LIBRARY_PATH": "lib"}
        shown = run(script(name, "h0:4,h1:4", str(tmp_path / "train.py"), "--flag", "a b"), **variables, **options)
        command = expected.format(
            mpirun=mpirun,
            prefix=str(mpirun).removesuffix("/bin/mpirun"),
            x=" ".join(f"-x {variable}" for variable in passed),
            commas=",".join(passed),
        )
        assert shown.stdout == f"{command} python3 {tmp_path}/train.py --flag 'a b'\n", shown.stderr


@pytest.mark.parametrize("name", ["mpirun", "mpich", "horovodrun"])
def test_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    for file, text in (("empty", "# none\n\n"), ("without", "h0\n"), ("more", "h0 slots=4 max_slots=8\n")):
        (tmp_path / file).write_text(text)
    train = str(tmp_path / "train.py")
    for arguments, message in (
        ([], "hosts and a script are needed. Received: nothing"),
        (["h0:4"], "hosts and a script are needed. Received: h0:4"),
        (["", train], "there are no hosts in ''"),
        (["hostfile", train], "there is no hostfile hostfile; in a list, each host has its slots: hostfile:4"),
        (["h0:4,h1", train], "a host and its slots are h0:4, or 'h0 slots=4' in a file. Received: h1"),
        (["h0:0", train], "Received: h0:0"),
        ([str(tmp_path / "empty"), train], f"there are no hosts in '{tmp_path}/empty'"),
        ([str(tmp_path / "without"), train], "Received: h0"),
        ([str(tmp_path / "more"), train], "Received: max_slots=8"),
        (["h0:4", "no_such_file.py"], "there is no file no_such_file.py"),
    ):
        refused = run(script(name, *arguments))
        assert refused.returncode == 2
        assert f"{message}\n" in refused.stderr
        assert refused.stderr.count("error:") == 1
        assert f"run_scripts/hosts_{name}.sh HOSTS" in refused.stderr, "how it is used"
    refused = run(script(name, "h0:4", train), HVD_PERIODIC_CORES="all")
    assert refused.returncode == 2
    assert "HVD_PERIODIC_CORES is a number of cores. Received: all" in refused.stderr


def test_gloo_does_not_pin(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    refused = run(script("horovodrun", "h0:4", str(tmp_path / "train.py")), HVD_PERIODIC_CORES="2")
    assert refused.returncode == 2
    assert "Gloo pins no ranks: set HVD_PERIODIC_CONTROLLER=mpi, or unset HVD_PERIODIC_CORES" in refused.stderr


def test_ranks_of_open_mpi_are_not_started_by_mpich(tmp_path: Path) -> None:
    """Each would train alone, without a word."""
    require("mpirun")
    (tmp_path / "train.py").touch()
    refused = run(script("mpich", "localhost:2", str(tmp_path / "train.py")))
    assert refused.returncode == 1
    assert "the MPI of this environment is Open MPI, whose ranks would each run alone; use" in refused.stderr


def test_emulated_hosts() -> None:
    """They have names, a link of the given rate, and end with the command, or with the script."""
    words = [*two_hosts()[:-1], "100mbit"]
    shown = run([*words, "sh", "-c", "hostname; ssh -p 22 root@h2 hostname; tc qdisc show dev eth0; exit 7"])
    assert shown.returncode == 7, shown.stderr
    first, second, link = shown.stdout.splitlines()
    assert (first, second) == ("h1", "h2")
    assert "tbf" in link
    assert "rate 100Mbit" in link
    for end in (signal.SIGTERM, signal.SIGKILL):
        waiting = [*words, "sh", "-c", "echo begun; exec sleep 1000"]
        with subprocess.Popen(waiting, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "begun\n"
            process.send_signal(end)
            assert process.stdout.read() == "", "what still runs would keep this open"
        assert process.returncode in (128 + end, -end)


def test_emulated_hosts_refused() -> None:
    words = ["bash", str(ROOT / "run_scripts" / "two_hosts.sh")]
    for arguments, code, message in (
        (["1gbit"], 2, "two_hosts.sh RATE COMMAND"),
        (["fast", "true"], 1, "RATE is 1gbit, 100mbit or the like, or unlimited. Received: fast"),
    ):
        refused = run([*words, *arguments])
        assert refused.returncode == code
        assert message in refused.stdout + refused.stderr
