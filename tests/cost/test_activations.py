from functools import partial
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import schedules
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fourfold.config.load import load_config
from fourfold.config.resolve import legal_micro_batch_sizes, resolve, with_micro_batch_size
from fourfold.config.schedules import INTERLEAVED, is_count_legal
from fourfold.config.schema import Config, Schedule
from fourfold.cost import activations
from fourfold.cost.activations import forwards_in_flight, stage_bytes
from fourfold.cost.memory import device_state_bytes, state_bytes
from fourfold.cost.peak import candidate_sizes, fitting_micro_batch_size, largest_peak, peak_bytes
from fourfold.layout.layout import Coordinate, Layout
from fourfold.layout.stages import stage_indices, stages_per_rank, whole_model
from fourfold.model.linear import PlainHead
from fourfold.model.loss import summed_cross_entropy
from fourfold.parallelize.apply import compiled_forward, parallelize
from fourfold.parallelize.tensor import local
from fourfold.train.rehearse import fake_processes
from tests.tiny import random_tokens

GIB = 2**30
FIRST = Coordinate(0, 0, 0, 0)

# torch.cuda.max_memory_allocated on one H200, in GiB: compiled, one micro batch of sequences of 1,024 tokens, bfloat16
# unless a key says otherwise
MEASURED: list[tuple[str, int, dict[str, object], float]] = [
    ("gpt2-en", 64, {}, 21.06),
    ("gpt2-en", 64, {"hidden_dropout_prob": 0.1}, 21.62),
    ("gpt3-345M", 64, {}, 54.30),
    ("gpt3-1.3B", 16, {}, 42.27),
    ("gpt3-1.3B", 16, {"amp_dtype": "float8"}, 33.65),
    ("gpt3-6.7B", 4, {}, 100.14),
    ("gpt3-6.7B", 4, {"amp_dtype": "float8"}, 100.09),
]


def config_of(world_size: int = 1, has_gpu: bool = True, **keys: object) -> Config:
    """Resolved for so many processes; of 1.3 billion parameters and 32 sequences unless keys say otherwise."""
    defaults = {"model_name_or_path": "gpt3-1.3B", "global_batch_size": 32}
    config = load_config(None, [(key, str(value)) for key, value in (defaults | keys).items()])
    return resolve(config, world_size, has_gpu)


def peak_of(world_size: int = 1, **keys: object) -> float:
    config = config_of(world_size, **keys)
    degrees = config.distributed
    sharding = degrees.sharding.sharding_degree
    layout = Layout(degrees.pp_degree, degrees.dp_degree, sharding, degrees.mp_degree)  # type: ignore[arg-type]
    return largest_peak(config, layout) / GIB


@pytest.mark.parametrize(("preset", "batch", "keys", "measured"), MEASURED)
def test_the_forecast_is_within_a_fiftieth_of_what_was_measured(
    preset: str, batch: int, keys: dict[str, object], measured: float
) -> None:
    found = peak_of(model_name_or_path=preset, global_batch_size=batch, **keys)
    assert found == pytest.approx(measured, rel=0.02)


def test_a_machine_without_a_gpu_forecasts_the_same_for_one() -> None:
    elsewhere = config_of(has_gpu=False, device="gpu")
    assert elsewhere == config_of(has_gpu=True, device="gpu")
    assert elsewhere.engine.use_amp and elsewhere.engine.compile
    assert largest_peak(elsewhere, Layout()) == largest_peak(config_of(), Layout())


class Allocations(TorchDispatchMode):
    """Every storage that is made while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        given = {tensor.untyped_storage()._cdata for tensor in tree_leaves((args, kwargs)) if torch.is_tensor(tensor)}
        for tensor in tree_leaves(result):
            if torch.is_tensor(tensor) and tensor.untyped_storage()._cdata not in given:
                storage = tensor.untyped_storage()
                self.made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return result

    @property
    def live_bytes(self) -> int:
        return sum(size for storage, size in self.made.values() if not storage.expired())


SMALL = {
    "model_name_or_path": "gpt2-en",
    "hidden_size": 64,
    "ffn_hidden_size": 320,
    "num_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 200,
    "max_seq_len": 32,
    "global_batch_size": 8,
    "device": "cpu",
}
LAYOUTS: dict[str, dict[str, object]] = {
    "one process": {"mp_degree": 1},
    "mp": {"mp_degree": 2},
    "mp and sequence_parallel": {"mp_degree": 2, "sequence_parallel": True},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("recomputed", [None, "full", "full_attn", "core_attn"])
def test_the_table_is_what_autograd_keeps(recomputed: str | None, layout: str) -> None:
    keys = SMALL | LAYOUTS[layout] | {"hidden_dropout_prob": 0.1}
    keys |= {"use_recompute": recomputed is not None, "recompute_granularity": recomputed or "full"}
    assert_kept_as_forecast(keys)


def test_the_table_is_what_autograd_keeps_where_attention_stays_within_documents() -> None:
    assert_kept_as_forecast(SMALL | {"mp_degree": 1, "reset_attention_mask": True})


def test_the_table_is_what_autograd_keeps_in_float8() -> None:
    """On a CPU attention keeps all four of its tensors in float32, and out its input beside them: 10 bytes more of a
    hidden size than on a GPU."""
    float8 = {"mp_degree": 1, "use_amp": True, "amp_dtype": "float8"}
    assert_kept_as_forecast(SMALL | float8, more_bytes=10 * 3 * 8 * 32 * 64)


def assert_kept_as_forecast(keys: dict[str, Any], more_bytes: int = 0) -> None:
    """Of the first rank, whose exchanges with others go nowhere."""
    layout = Layout(mp=keys["mp_degree"])
    config = config_of(layout.world_size, has_gpu=False, **keys)
    tokens = random_tokens(8, 32, 200)
    documents = tokens // 100 if config.data.reset_attention_mask else None
    with fake_processes(0, layout.world_size):
        gpt = parallelize(config, layout, 0, torch.device("cpu"), timeout_s=60.0).parts[0]
        with Allocations() as allocations:
            summed = gpt(tokens, tokens, torch.arange(8), documents_bt=documents)
        kept = allocations.live_bytes
    assert summed.requires_grad
    forecast = stage_bytes(config, layout, whole_model(3)) - tokens.nbytes  # which were there before
    assert kept == pytest.approx(forecast + more_bytes, rel=0.02)


@pytest.mark.parametrize("name", ["one process", "mp and sequence_parallel"])
@pytest.mark.parametrize("recomputed", [None, "full", "full_attn", "core_attn"])
def test_the_table_is_what_a_compiled_model_keeps(
    recomputed: str | None, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is decided before code is made for any device. Masks of dropout are looked at alone: all of them are less
    than the whole may be off."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager_decomp_partition"))
    keys = SMALL | LAYOUTS[name] | {"compile": True, "attention_probs_dropout_prob": 0.0}
    keys |= {"use_recompute": recomputed is not None, "recompute_granularity": recomputed or "full"}
    layout = Layout(mp=2 if name != "one process" else 1)
    without, config = (
        config_of(layout.world_size, has_gpu=False, **keys, hidden_dropout_prob=dropout) for dropout in (0.0, 0.1)
    )
    tokens = random_tokens(8, 32, 200)
    saved: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(local(tensor))
        return tensor

    torch.compiler.reset()
    compiled_forward.cache_clear()
    with fake_processes(0, layout.world_size):
        gpt = parallelize(config, layout, 0, torch.device("cpu"), timeout_s=60.0).parts[0]
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            gpt(tokens, tokens, torch.arange(8))
    compiled_forward.cache_clear()
    weights = {local(parameter).untyped_storage().data_ptr() for parameter in gpt.parameters()}
    kept = {
        tensor.untyped_storage().data_ptr(): tensor
        for tensor in saved
        if tensor.dtype != torch.uint8  # a generator's state: 16 bytes on a GPU
    }
    kept_bytes = sum(tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in weights)
    masks = [tensor for tensor in kept.values() if tensor.dtype == torch.bool and tensor.shape[-1] == 64]
    forecast, forecast_without = (stage_bytes(each, layout, whole_model(3)) for each in (config, without))
    assert kept_bytes == pytest.approx(forecast, rel=0.02)
    assert sum(mask.nbytes for mask in masks) == forecast - forecast_without


def test_the_loss_holds_one_chunk_of_logits_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "CHUNK_LOGITS", 2 * 128)
    made: list[StorageWeakRef] = []
    alive: list[int] = []

    class Watched(PlainHead):
        def logits(self, x_nd: torch.Tensor) -> torch.Tensor:
            found = super().logits(x_nd)
            made.append(StorageWeakRef(found.untyped_storage()))
            alive.append(sum(not each.expired() for each in made))
            return found

    x_btd, weight_vd = torch.randn(1, 64, 8, requires_grad=True), torch.randn(128, 8, requires_grad=True)
    summed_cross_entropy(x_btd, weight_vd, random_tokens(1, 64, 128), 128, products=Watched)
    assert len(made) == activations.MOST_CHUNKS
    assert max(alive) == 1


# What makes it more and what less


def test_the_more_is_recomputed_the_less_is_kept() -> None:
    recomputed = [
        peak_of(use_recompute=True, recompute_granularity=part) for part in ("full", "full_attn", "core_attn")
    ]
    assert sorted(recomputed) == recomputed
    assert recomputed[-1] < peak_of()
    assert recomputed[0] < 0.5 * peak_of()


def test_float8_keeps_less_and_float32_more_than_bfloat16() -> None:
    keeps = {dtype: peak_of(amp_dtype=dtype) for dtype in ("float8", "bfloat16")}
    assert keeps["float8"] < keeps["bfloat16"] < peak_of(use_amp=False)
    assert keeps["float8"] < peak_of(amp_dtype="float8", float8_except="first,last") < keeps["bfloat16"]


def test_mp_divides_what_lies_inside_of_a_layer_and_sequence_parallel_most_of_the_rest() -> None:
    one, two = config_of(), config_of(2, mp_degree=2)
    both = config_of(2, mp_degree=2, sequence_parallel=True)
    stage = whole_model(24)
    whole, cut, cut_twice = (
        stage_bytes(one, Layout(), stage),
        stage_bytes(two, Layout(mp=2), stage),
        stage_bytes(both, Layout(mp=2), stage),
    )
    assert whole / 2 < cut_twice < cut < whole
    # of 16 hidden sizes per token and layer, 12 are features; of the others norms' inputs can be cut along the sequence
    assert cut / whole == pytest.approx(10 / 16, abs=0.02)
    assert cut_twice / whole == pytest.approx(9 / 16, abs=0.02)


def test_more_micro_batches_leave_fewer_activations_and_a_block_of_new_gradients() -> None:
    """A compiled backward has the new gradients of one block beside those that they will be added to, not of all."""
    config = config_of(micro_batch_size=1)
    state = state_bytes(config, Layout(), FIRST)
    peak = peak_bytes(config, Layout(), FIRST)
    assert state.total < peak.total < state.total + state.gradients


def test_offloaded_state_is_not_on_the_device() -> None:
    keys = {"use_recompute": True, "global_batch_size": 1}
    assert peak_of(sharding_offload=True, **keys) < 4.0
    assert peak_of(**keys) > 19.0


def test_offloaded_gradients_are_on_the_device_as_long_as_they_are_summed() -> None:
    keys = {"sharding_offload": True, "micro_batch_size": 1}
    states = [device_state_bytes(config_of(global_batch_size=size, **keys), Layout(), FIRST) for size in (1, 2)]
    assert states[0].total == 0
    assert states[1] == (0, state_bytes(config_of(), Layout(), FIRST).gradients, 0)


def test_sharding_takes_less_by_stage() -> None:
    keys = {"sharding_degree": 8, "use_recompute": True, "micro_batch_size": 1}
    stages = [peak_of(8, sharding_stage=stage, **keys) for stage in (1, 2, 3)]
    assert stages[0] > stages[1] > stages[2]
    assert stages[2] < 4.0


# The pipe


def forwards_waiting(actions: list[Any]) -> int:
    """The most at a time, in what torch plans for one rank; an activation waits until its weight has its gradient."""
    waiting = most = 0
    for action in actions:
        for each in getattr(action, "sub_actions", None) or [action]:
            if each is not None:
                kind = each.computation_type.name
                waiting += {"FORWARD": 1, "FULL_BACKWARD": -1, "BACKWARD_WEIGHT": -1}.get(kind, 0)
                most = max(most, waiting)
    assert waiting == 0
    return most


def planned(name: str, pp: int, virtual: int, micro_batches: int) -> dict[int, list[Any]]:
    kinds: dict[str, Any] = {
        "Interleaved1F1B": schedules.ScheduleInterleaved1F1B,
        "InterleavedZeroBubble": schedules.ScheduleInterleavedZeroBubble,
        "ZBV": schedules.ScheduleZBVZeroBubble,
        "DualPipeV": schedules.ScheduleDualPipeV,
    }
    last = pp * stages_per_rank(name, virtual) - 1
    stages = [
        SimpleNamespace(
            group_size=pp,
            group_rank=0,
            num_stages=last + 1,
            stage_index=index,
            submod=nn.Identity(),
            is_first=index == 0,
            is_last=index == last,
            has_backward=True,
        )
        for index in stage_indices(0, pp, name, virtual)
    ]
    return kinds[name](stages, micro_batches).pipeline_order


@pytest.mark.parametrize("name", [name for name in get_args(Schedule) if name not in ("GPipe", "1F1B")])
def test_as_many_forwards_wait_as_torch_plans_or_a_few_more(name: Schedule) -> None:
    for pp in (2, 3, 4):
        for virtual in (1, 2, 3) if name in INTERLEAVED else (2,):
            config = config_of(pp, pp_degree=pp, pp_schedule=name, virtual_pp_degree=virtual)
            for micro_batches in (count for count in range(1, 13) if is_count_legal(name, pp, count)):
                plan = planned(name, pp, virtual, micro_batches)
                found = [forwards_waiting(plan[rank]) for rank in range(pp)]
                said = [forwards_in_flight(config, Layout(pp=pp), rank, micro_batches) for rank in range(pp)]
                assert all(a <= b for a, b in zip(found, said, strict=True)), (pp, virtual, micro_batches)
                assert max(said) <= max(found) + 3, (pp, virtual, micro_batches)


def test_the_first_pipe_rank_holds_the_most_micro_batches_unless_all_wait() -> None:
    config = config_of(4, pp_degree=4, micro_batch_size=1)
    assert [forwards_in_flight(config, Layout(pp=4), rank, 32) for rank in range(4)] == [4, 3, 2, 1]
    config = config_of(4, pp_degree=4, micro_batch_size=1, pp_schedule="GPipe")
    assert [forwards_in_flight(config, Layout(pp=4), rank, 32) for rank in range(4)] == [32] * 4


# The largest that fits


@pytest.mark.parametrize(("memory_gib", "size"), [(139.8, 64), (79.1, 16), (47.5, 8), (28.0, 1), (23.6, None)])
def test_the_largest_size_that_leaves_some_room_is_taken(memory_gib: float, size: int | None) -> None:
    config = config_of(global_batch_size=64)
    config = config.model_copy(update={"global_": config.global_.model_copy(update={"micro_batch_size": "auto"})})
    found = fitting_micro_batch_size(config, Layout(), int(memory_gib * GIB))
    assert found == size
    if found:
        assert largest_peak(with_micro_batch_size(config, found), Layout()) <= 0.9 * memory_gib * GIB


def test_a_pipe_is_filled_before_memory_is() -> None:
    config = config_of(4, pp_degree=4, global_batch_size=64)
    assert max(candidate_sizes(config, Layout(pp=4))) == 8
    assert max(legal_micro_batch_sizes(config, Layout(pp=4))) == 16


def test_float8_takes_only_sizes_whose_rows_its_matrices_take() -> None:
    config = config_of(max_seq_len=8, max_position_embeddings=8, amp_dtype="float8", global_batch_size=8)
    assert candidate_sizes(config, Layout()) == [2, 4, 8]
