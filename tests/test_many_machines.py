"""The scripts and manifests of docs/many-machines.md: right in form, and the commands in them run on one machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "many-machines.md").read_text()
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
SCRIPTS = [text for language, text in BLOCK.findall(PAGE) if language == "bash"]
BATCH = {re.findall(r"--job-name=(\S+)", text)[0]: text for text in SCRIPTS if text.startswith("#!")}
OBJECTS = [each for kind, text in BLOCK.findall(PAGE) if kind == "yaml" for each in yaml.safe_load_all(text)]
JOBS = {each["metadata"]["name"]: each for each in OBJECTS if each["kind"] == "Job"}
OPTIONS = r"job-name|array|nodes|ntasks-per-node|cpus-per-task|mem|time|signal|requeue|output"


# The fields of batch/v1 and v1 that the page uses, as the API describes them; any other field is refused.


def record(required: str = "", **fields: Any) -> dict[str, Any]:
    return {"type": "object", "properties": fields, "required": required.split(), "additionalProperties": False}


def array(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1}


NAME = {"type": "string", "pattern": r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"}
TEXT, WHOLE, PATH = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "string", "pattern": "^/"}
QUANTITIES = {"type": "object", "additionalProperties": {"type": "string", "pattern": r"^\d+(m|Mi|Gi)?$"}}
SECRET = record("secretKeyRef", secretKeyRef=record("name key", name=NAME, key=TEXT))
CONTAINER = record(
    "name image",
    name=NAME,
    image=TEXT,
    workingDir=PATH,
    command=array(TEXT),
    args=array(TEXT),
    env=array(record("name", name={"type": "string", "pattern": "^[A-Z_]+$"}, value=TEXT, valueFrom=SECRET)),
    resources=record(requests=QUANTITIES, limits=QUANTITIES),
    volumeMounts=array(record("name mountPath", name=NAME, mountPath=PATH)),
)
VOLUME = record("name", name=NAME, emptyDir=record(), persistentVolumeClaim=record("claimName", claimName=NAME))
POD = record(
    "containers restartPolicy",
    subdomain=NAME,
    restartPolicy={"enum": ["OnFailure", "Never"]},
    containers=array(CONTAINER),
    volumes=array(VOLUME),
)
JOB = record(
    "template",
    completions=WHOLE,
    parallelism=WHOLE,
    completionMode={"enum": ["Indexed", "NonIndexed"]},
    backoffLimit=WHOLE,
    template=record("spec", spec=POD),
)
SERVICE = record(
    "selector",
    clusterIP={"enum": ["None"]},
    publishNotReadyAddresses={"type": "boolean"},
    selector={"type": "object", "additionalProperties": NAME},
)
KINDS = {"Job": ("batch/v1", JOB), "Service": ("v1", SERVICE)}


@pytest.mark.parametrize("text", SCRIPTS)
def test_every_script_passes_the_syntax_check_of_the_shell(text: str) -> None:
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", BATCH)
def test_the_options_of_a_batch_script_come_first_and_are_known(name: str) -> None:
    first, *lines = BATCH[name].splitlines()
    options = [line for line in lines if line.startswith("#SBATCH")]
    assert first == "#!/bin/bash"
    assert lines[: len(options)] == options  # Slurm stops reading at the first command
    assert all(re.fullmatch(rf"#SBATCH --({OPTIONS})(=\S+)?", line) for line in options)


@pytest.mark.parametrize("thing", OBJECTS, ids=lambda thing: f"{thing['kind']} {thing['metadata']['name']}")
def test_every_manifest_fits_the_schema_of_its_kind(thing: dict[str, Any]) -> None:
    version, spec = KINDS[thing["kind"]]
    whole = record("apiVersion kind metadata spec", apiVersion={"const": version}, kind=TEXT, spec=spec)
    whole["properties"]["metadata"] = record("name", name=NAME)
    jsonschema.validate(thing, whole)


def test_what_manifests_refer_to_exists() -> None:
    (service,) = (each for each in OBJECTS if each["kind"] == "Service")
    assert service["spec"]["selector"]["job-name"] in JOBS
    for name, job in JOBS.items():
        pod = job["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        assert {mount["name"] for mount in container["volumeMounts"]} <= {volume["name"] for volume in pod["volumes"]}
        for address in re.findall(r"--rdzv-endpoint=([\w-]+)-0\.([\w-]+):", " ".join(container["args"])):
            assert address == (name, pod["subdomain"]) == (name, service["metadata"]["name"])
        nodes = re.findall(r"--nnodes=(\d+)", " ".join(container["args"]))
        assert nodes in ([], [str(job["spec"]["completions"])])


# --- The commands, on one machine --------------------------------------------------------------------------------


@pytest.fixture
def tools(elsewhere: None, tmp_path: Path, tiny_flags: list[str]) -> dict[str, str]:
    """An environment with `capsnet` and `torchrun` that train tiny networks, and what stands in for Slurm."""
    tiny = " ".join([*tiny_flags, "--epochs", "1"])
    python = sys.executable
    programs = {
        "capsnet": f'exec {python} -m capsnet "$@" {tiny}',
        "torchrun": f'case "$*" in *--resume*) more="";; *) more="{tiny}";; esac\n'
        f'exec {python} -m torch.distributed.run "$@" $more',
        "srun": 'exec "$@"',
        "scontrol": "echo localhost",
    }
    (tmp_path / "bin").mkdir()
    for name, code in programs.items():
        path = tmp_path / "bin" / name
        path.write_text(f"#!/bin/bash\n{code}\n")
        path.chmod(0o755)
    slurm = {"CPUS_PER_TASK": "1", "JOB_NODELIST": "one", "JOB_NUM_NODES": "1", "JOB_ID": str(os.getpid())}
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    return os.environ | {"PATH": path, "STORAGE": "trials.db"} | {f"SLURM_{key}": v for key, v in slurm.items()}


def run(command: list[str] | str, tools: dict[str, str]) -> None:
    words = ["bash", "-c", command] if isinstance(command, str) else command
    done = subprocess.run(words, env=tools, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def smaller(text: str) -> str:
    """A search of two trials, a training on one machine with few images, and a free port."""
    for long, short in (
        (r"--trials[ =]60", "--trials=2"),
        ("--space training", "--space class_dim=2,3"),
        (r"--storage=\S+", "--storage=trials.db"),
        (r"(--rdzv-endpoint[ =]\"?)[^\s\"]+", r"\1localhost:0"),
        (r"--nnodes=2", "--nnodes=1"),
    ):
        text = re.sub(long, short, text)
    return text


@pytest.mark.slow
def test_the_batch_scripts_run(tools: dict[str, str]) -> None:
    run(smaller(BATCH["capsnet-search"]), tools)
    assert Path("trials.db").exists()
    assert Path("results/search/digits.json").exists()
    run(smaller(BATCH["capsnet-train"]).replace("--preset cifar10", "--preset own-images"), tools)
    assert Path("runs/cifar10/model.safetensors").exists()


@pytest.mark.slow
def test_the_commands_in_the_manifests_run(tools: dict[str, str]) -> None:
    for job in JOBS.values():
        (container,) = job["spec"]["template"]["spec"]["containers"]
        words = smaller(" ".join([*container["command"], *container["args"]]))
        run(words.replace("--preset=cifar10", "--preset=own-images"), tools)
    assert Path("results/search/digits.json").exists()
    assert Path("runs/cifar10/model.safetensors").exists()
