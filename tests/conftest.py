"""What every test takes for granted. Runs before anything imports torch, in this process and in those it starts."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# Tiny models on few cores: more threads per process only fight each other, most of all in multi-process runs.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Triton decides when it is imported whether its code is compiled or, where there is no GPU, interpreted.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A test run started inside a job allocation is not one of that job's workers.
WORKER = {"RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
for name in list(os.environ):
    if name in WORKER or name.startswith(("SLURM_", "TORCHELASTIC_")):
        del os.environ[name]

# A busy machine is not a failed property.
settings.register_profile("fourfold", deadline=None)
settings.load_profile("fourfold")


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """The address of a bucket on a server of our own: one for all tests, since clients remember its port."""
    from moto.server import ThreadedMotoServer

    from fourfold.checkpoint.paths import locate

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    locate("s3://fourfold").mkdir()
    yield "s3://fourfold"
    server.stop()
