"""The manifest for Kubernetes, against the schema of a JobSet and of the pods in it."""

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet
from pydantic import ValidationError

from fourfold.commands.launch import kubernetes_command
from fourfold.errors import ConfigError
from fourfold.launch.kubernetes import resource_name

CONFIG = """
global: {device: gpu, global_batch_size: 64}
model: {num_layers: 4, hidden_size: 64, num_attention_heads: 4}
data: {input_dir: data/text, max_seq_len: 16}
distributed: {mp_degree: 4, pp_degree: 1, sharding: {sharding_degree: 2}}
engine: {max_steps: 3, output_dir: output/GPT_small}  # kept as it is
"""


def manifest_of(folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[dict[str, Any]]:
    monkeypatch.chdir(folder)
    Path("run.yaml").write_text(CONFIG, encoding="utf-8")
    kubernetes_command("run.yaml", image="registry/fourfold:1", **options)
    text = Path("output/GPT_small/job.yaml").read_text(encoding="utf-8")
    return list(yaml.safe_load_all(text))


def misfits(manifest: dict[str, Any]) -> bool:
    """Whether the schema's models refuse the manifest, or do not know a part of it: those they silently drop."""
    try:
        read = JobsetV1alpha2JobSet.from_dict(manifest)
    except (ValidationError, ValueError):
        return True
    return read is None or read.to_dict() != manifest


def test_the_manifest_is_a_valid_job_set_and_misspelled_fields_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, job_set = manifest_of(tmp_path, monkeypatch, nodes=2, namespace="research")
    assert not misfits(job_set)
    job = ("spec", "replicatedJobs", 0, "template", "spec")
    container = (*job, "template", "spec", "containers", 0)
    for place, right in (
        (("spec",), "failurePolicy"),
        (("spec", "failurePolicy"), "maxRestarts"),
        (job, "completionMode"),
        ((*job, "template", "spec"), "restartPolicy"),
        (container, "volumeMounts"),
        ((*container, "resources"), "limits"),
    ):
        wrong = copy.deepcopy(job_set)
        part: Any = wrong
        for name in place:
            part = part[name]
        part[right.lower() + "x"] = part.pop(right)
        assert misfits(wrong), f"{right} was misspelled and nobody noticed"
    wrong = copy.deepcopy(job_set)
    wrong["spec"]["replicatedJobs"][0]["replicas"] = "two"
    assert misfits(wrong)


def test_pods_meet_at_the_first_of_them_and_keep_what_they_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config_map, job_set = manifest_of(tmp_path, monkeypatch, nodes=2, settings=["max_steps=9"], claim="disk")
    name = job_set["metadata"]["name"]
    assert name == config_map["metadata"]["name"] == "gpt-small"
    assert config_map["data"]["config.yaml"] == CONFIG
    (replicated,) = job_set["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    assert job["parallelism"] == job["completions"] == 2
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    # <JobSet>-<replicated job>-<its replica>-<its pod>.<subdomain> is how a JobSet names its pods
    assert (
        f"--master_addr={name}-{replicated['name']}-0-0.{job_set['spec']['network']['subdomain']}"
        in (container["args"])
    )
    settings = container["args"][container["args"].index("/etc/fourfold/config.yaml") + 1 :]
    assert settings == ["-o", "max_steps=9", "-o", "dp_degree=2"]
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert mounted.keys() == volumes.keys()
    assert volumes["work"]["persistentVolumeClaim"] == {"claimName": "disk"}
    assert mounted["work"] == container["workingDir"]
    assert volumes["shared-memory"]["emptyDir"] == {"medium": "Memory"} and mounted["shared-memory"] == "/dev/shm"


def test_an_output_that_would_be_lost_with_the_pod_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="output_dir = /scratch/run would be lost with the pod"):
        manifest_of(tmp_path, monkeypatch, nodes=2, settings=["output_dir=/scratch/run"])


@pytest.mark.parametrize(
    ("text", "name"), [("GPT3_1.3B dp8", "gpt3-1-3b-dp8"), ("175B", "run-175b"), ("x" * 99, "x" * 40), ("__", "run")]
)
def test_a_folder_becomes_a_name_that_kubernetes_takes(text: str, name: str) -> None:
    assert resource_name(text) == name
