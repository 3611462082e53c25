"""What every test takes for granted. Runs before anything imports torch, in this process and in those it starts."""

import os

from hypothesis import settings

# Tiny models on few cores: more threads per process only fight each other, most of all in multi-process runs.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A test run started inside a job allocation is not one of that job's workers.
WORKER = {"RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
for name in list(os.environ):
    if name in WORKER or name.startswith(("SLURM_", "TORCHELASTIC_")):
        del os.environ[name]

# A busy machine is not a failed property.
settings.register_profile("fourfold", deadline=None)
settings.load_profile("fourfold")
