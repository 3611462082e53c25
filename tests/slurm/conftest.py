from collections.abc import Iterator

import pytest

from tests.require import require, require_root
from tests.slurm.cluster import PROGRAMS, Cluster, running_cluster


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    require(*PROGRAMS)
    require_root()
    with running_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster
