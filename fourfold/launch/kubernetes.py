"""A job for Kubernetes: a JobSet with a pod per node, torchrun in each, and a ConfigMap that carries the config file.

The pods find the first one by the name that the headless service of the JobSet gives it. No cluster is talked to.
"""

import re
from typing import Any

import yaml

from fourfold.checkpoint.paths import is_local, locate
from fourfold.errors import ConfigError
from fourfold.launch.job import Job, as_flags

CONFIG_FOLDER = "/etc/fourfold"
WORK_FOLDER = "/workspace"
"""Where the claim is mounted; relative paths of the config, output_dir among them, lie there."""
PORT = 29400
COMPLETION_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
SAVE_S = 120
"""How long processes that are told to end may take to save before torchrun kills them."""


def write_manifest(job: Job, image: str, namespace: str, claim: str, max_restarts: int, config_text: str) -> str:
    """The ConfigMap and the JobSet, as YAML for `kubectl apply`."""
    name = resource_name(job.name)
    output = locate(job.output_dir)
    if is_local(output) and output.is_absolute() and not output.is_relative_to(WORK_FOLDER):
        raise ConfigError(
            f"engine.output_dir = {job.output_dir} would be lost with the pod; write a folder relative to the claim, "
            f"which is mounted at {WORK_FOLDER}, or an address like s3://bucket/run"
        )
    documents = [config_map(name, namespace, config_text), job_set(job, name, image, namespace, claim, max_restarts)]
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=1000)


def resource_name(text: str) -> str:
    """A name that Kubernetes takes, short enough for the pods' own, which have it in front."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40].strip("-")
    return name if name[:1].isalpha() else f"run-{name}".strip("-")


def config_map(name: str, namespace: str, config_text: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(name, namespace),
        "data": {"config.yaml": config_text},
    }


def job_set(job: Job, name: str, image: str, namespace: str, claim: str, max_restarts: int) -> dict[str, Any]:
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": SAVE_S + 30,
        "containers": [container(job, name, image)],
        "volumes": [
            {"name": "config", "configMap": {"name": name}},
            {"name": "work", "persistentVolumeClaim": {"claimName": claim}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
        ],
    }
    template = {
        "parallelism": job.nodes,
        "completions": job.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,  # one pod cannot come back alone: the JobSet starts all of them again
        "template": {"spec": pod},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata(name, namespace),
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": name},
            "failurePolicy": {"maxRestarts": max_restarts},
            "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": template}}],
        },
    }


def container(job: Job, name: str, image: str) -> dict[str, Any]:
    resource, count = ("nvidia.com/gpu" if job.uses_gpus else "cpu"), str(job.processes_per_node)
    return {
        "name": "train",
        "image": image,
        "workingDir": WORK_FOLDER,
        "command": ["torchrun"],
        "args": [
            f"--nnodes={job.nodes}",
            f"--nproc_per_node={job.processes_per_node}",
            f"--master_addr={name}-node-0-0.{name}",
            f"--master_port={PORT}",
            "-m",
            "fourfold",
            "train",
            f"{CONFIG_FOLDER}/config.yaml",
            *as_flags(job.settings),
        ],
        "env": [
            # torchrun's --node_rank: the static form waits for the first pod's name, c10d would look it up only once
            {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": COMPLETION_INDEX}}},
            {"name": "OMP_NUM_THREADS", "value": "1"},
            {"name": "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "value": str(SAVE_S)},
        ],
        "resources": {"limits": {resource: count}},
        "volumeMounts": [
            {"name": "config", "mountPath": CONFIG_FOLDER},
            {"name": "work", "mountPath": WORK_FOLDER},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
    }


def metadata(name: str, namespace: str) -> dict[str, str]:
    return {"name": name, "namespace": namespace} if namespace else {"name": name}


class _Dumper(yaml.SafeDumper):
    """Writes a text of several lines as a block, so that the config stays readable."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)
