"""The parity table: every named layout, and the keys that make it. Each must give the losses and gradient norms of the
same config on one process.

Cases of one world size share a launch. `slow` ones run in CI and with `make test ARGS="-m slow"`.
"""

from dataclasses import dataclass
from math import prod

BASE: dict[str, object] = {
    "input_dir": "builtin:pydoc",
    "truncate": 0.2,
    "split": "90,10,0",
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "vocab_size": 200,  # padded to 256, so that the padding lies on the last mp rank alone
    "max_seq_len": 16,
    "global_batch_size": 16,
    "max_steps": 10,
    "max_lr": 1e-2,
    "warmup_rate": 0.0,
    "grad_clip": 0.5,
    "weight_decay": 0.1,
    "eval_iters": 2,
    "resume": "never",
}

DEGREES = ("pp_degree", "dp_degree", "sharding_degree", "mp_degree")
LAYOUT_KEYS = (
    *DEGREES,
    "sharding_stage",
    "sharding_offload",
    "sequence_parallel",
    "virtual_pp_degree",
    "pp_schedule",
    "micro_batch_size",
    "use_recompute",
    "recompute_granularity",
    "compile",
)


@dataclass(frozen=True)
class Case:
    name: str
    keys: dict[str, object]
    tolerance: float = 1e-5
    is_slow: bool = False

    @property
    def world_size(self) -> int:
        return prod(int(str(self.keys.get(degree, 1))) for degree in DEGREES)

    @property
    def reference(self) -> dict[str, object]:
        """The same config on one process: what is left without the layout."""
        return {key: value for key, value in self.keys.items() if key not in LAYOUT_KEYS}


def layout(pp: int = 1, dp: int = 1, sd: int = 1, mp: int = 1, stage: int = 1) -> dict[str, object]:
    keys: dict[str, object] = {"pp_degree": pp, "dp_degree": dp, "sharding_degree": sd, "mp_degree": mp}
    if sd > 1:
        keys["sharding_stage"] = stage
    if pp > 1:
        keys["micro_batch_size"] = 16 // (dp * sd) // (2 * pp) or 1
    return keys


SP = {"sequence_parallel": True}
TWICE = {"pp_schedule": "Interleaved1F1B", "virtual_pp_degree": 2}
SCHEDULES: dict[str, dict[str, object]] = {
    "gpipe": {"pp_schedule": "GPipe"},
    "1f1b": {"pp_schedule": "1F1B"},
    "interleaved": TWICE,
    "interleaved-zb": {"pp_schedule": "InterleavedZeroBubble", "virtual_pp_degree": 2},
    "zbv": {"pp_schedule": "ZBV"},
    "dualpipev": {"pp_schedule": "DualPipeV"},
}
DROPOUT = {"hidden_dropout_prob": 0.1}
RECOMPUTE = {"use_recompute": True}
UNTIED = {"tie_word_embeddings": False}
BF16 = {"use_amp": True, "amp_dtype": "bfloat16"}
FP16 = {"use_amp": True, "amp_dtype": "float16"}
FLOAT8 = {"use_amp": True, "amp_dtype": "float8"}
# overflows whatever the layout, so every step is skipped, on all ranks or the run hangs
OVERFLOW = {"scale_loss": 2.0**100}
# a space ends a document here, so that every sequence holds several
DOCUMENTS = {"eos_token_id": 1, "eod_mask_loss": True, "reset_position_ids": True, "reset_attention_mask": True}
EIGHT_LAYERS = {"num_layers": 8}
EIGHT_HEADS = {"num_attention_heads": 8}


def _cases() -> list[Case]:
    cases: list[Case] = []

    def add(name: str, *parts: dict[str, object], tolerance: float = 1e-5, is_slow: bool = False) -> None:
        keys: dict[str, object] = {}
        for part in parts:
            keys |= part
        cases.append(Case(name, keys, tolerance, is_slow))

    # each axis alone, at 2 and 4
    for n in (2, 4):
        add(f"dp{n}", layout(dp=n))
        add(f"mp{n}", layout(mp=n))
        add(f"mp{n}-sp", layout(mp=n), SP)
        add(f"pp{n}", layout(pp=n))
        for stage in (1, 2, 3):
            add(f"sd{n}-stage{stage}", layout(sd=n, stage=stage))
    # all pairs at 2 x 2
    add("dp2-mp2", layout(dp=2, mp=2))
    add("dp2-pp2", layout(dp=2, pp=2))
    add("mp2-pp2", layout(mp=2, pp=2))
    add("mp2-pp2-sp", layout(mp=2, pp=2), SP)
    for stage in (1, 2, 3):
        add(f"dp2-sd2-stage{stage}", layout(dp=2, sd=2, stage=stage), {"micro_batch_size": 2})
        add(f"sd2-mp2-stage{stage}", layout(sd=2, mp=2, stage=stage), {"micro_batch_size": 4})
        add(f"sd2-pp2-stage{stage}", layout(sd=2, pp=2, stage=stage))
    # every schedule, alone and where sharding could go wrong under it
    for name, keys in SCHEDULES.items():
        add(f"pp2-{name}", layout(pp=2), keys)
        add(f"sd2-pp2-stage3-{name}", layout(sd=2, pp=2, stage=3), keys)
    add("pp4-zbv-8-layers", layout(pp=4), SCHEDULES["zbv"], EIGHT_LAYERS)
    add("mp2-pp2-interleaved-zb-sp", layout(mp=2, pp=2), SCHEDULES["interleaved-zb"], SP)
    # what a user combines with a layout
    add("dp2-accumulation", layout(dp=2), {"micro_batch_size": 1})
    add("sd2-stage2-accumulation", layout(sd=2, stage=2), {"micro_batch_size": 2})
    add("sd2-stage3-offload", layout(sd=2, stage=3), {"sharding_offload": True, "micro_batch_size": 4})
    add("sd2-stage1-offload", layout(sd=2, stage=1), {"sharding_offload": True})
    add("sd2-mp2-stage3-offload", layout(sd=2, mp=2, stage=3), {"sharding_offload": True})
    for granularity in ("full", "full_attn", "core_attn"):
        part = RECOMPUTE | {"recompute_granularity": granularity}
        add(f"sd2-stage3-recompute-{granularity}", layout(sd=2, stage=3), part, DROPOUT)
        add(f"mp2-sp-recompute-{granularity}", layout(mp=2), part, SP, DROPOUT)
        add(f"pp2-recompute-{granularity}", layout(pp=2), part, DROPOUT)
    add("pp2-interleaved-zb-recompute", layout(pp=2), SCHEDULES["interleaved-zb"], RECOMPUTE)
    for name, keys in {
        "dp2": layout(dp=2),
        "mp2": layout(mp=2),
        "mp2-sp": layout(mp=2) | SP,
        "pp2": layout(pp=2),
        "sd2-pp2-stage3": layout(sd=2, pp=2, stage=3),
        "sd2-mp2-stage3": layout(sd=2, mp=2, stage=3),
    }.items():
        add(f"{name}-dropout", keys, DROPOUT)
        add(f"{name}-untied", keys, UNTIED)
        add(f"{name}-bf16", keys, BF16, tolerance=5e-3)
        add(f"{name}-fp16", keys, FP16, tolerance=5e-3)
    # each rank scales what it has; what differs then is the rounding of the smallest numbers
    for name, keys in {"dp2": layout(dp=2), "mp2-sp": layout(mp=2) | SP}.items():
        add(f"{name}-float8", keys, FLOAT8, tolerance=5e-3)
    add("sd2-pp2-stage3-float8", layout(sd=2, pp=2, stage=3), FLOAT8, tolerance=5e-3)
    add("sd2-pp2-stage2-fp16-overflow", layout(sd=2, pp=2, stage=2), FP16, OVERFLOW)
    add("pp2-uneven", layout(pp=2), {"num_layers": 5})
    add("pp4-uneven", layout(pp=4), {"num_layers": 7})
    add("pp2-interleaved-uneven", layout(pp=2), TWICE, {"num_layers": 5})
    # 8 processes: each triple, and the layouts that PaddlePaddle tests
    add("pp2-sd2-mp2-stage1", layout(pp=2, sd=2, mp=2))
    add("pp2-sd2-mp2-stage2-sp", layout(pp=2, sd=2, mp=2, stage=2), SP)
    add("pp2-sd2-mp2-stage3-sp-dropout", layout(pp=2, sd=2, mp=2, stage=3), SP, DROPOUT)
    add("pp2-dp2-mp2-recompute", layout(pp=2, dp=2, mp=2), RECOMPUTE)
    add("pp2-dp2-sd2-stage2", layout(pp=2, dp=2, sd=2, stage=2))
    add("pp2-dp2-sd2-stage3-zbv", layout(pp=2, dp=2, sd=2, stage=3), SCHEDULES["zbv"])
    add("dp2-sd2-mp2-stage1", layout(dp=2, sd=2, mp=2))
    add("dp2-sd2-mp2-stage3-sp", layout(dp=2, sd=2, mp=2, stage=3), SP)
    add("mp2-sd4-stage2", layout(mp=2, sd=4, stage=2))
    add("mp2-sp-documents", layout(mp=2), SP, DOCUMENTS)
    add("pp2-documents", layout(pp=2), DOCUMENTS)
    add("pp2-zbv-documents", layout(pp=2), SCHEDULES["zbv"], DOCUMENTS)
    add("sd2-stage3-documents", layout(sd=2, stage=3), DOCUMENTS, {"micro_batch_size": 2})
    add("mp2-recompute-documents", layout(mp=2), RECOMPUTE | {"recompute_granularity": "core_attn"}, DOCUMENTS)
    for name, keys in {
        "dp8": layout(dp=8),
        "mp8": layout(mp=8) | EIGHT_HEADS,
        "pp8": layout(pp=8) | EIGHT_LAYERS,
        "mp2-pp4": layout(mp=2, pp=4),
        "mp4-pp2": layout(mp=4, pp=2),
        "dp2-mp4-sp": layout(dp=2, mp=4) | SP,
        "dp2-pp4": layout(dp=2, pp=4),
        "sd8-stage1": layout(sd=8),
        "sd8-stage2": layout(sd=8, stage=2),
        "sd8-stage3-offload": layout(sd=8, stage=3) | {"sharding_offload": True},
    }.items():
        add(name, keys, is_slow=True)
    for name, keys in {
        "dp2-sd2-mp2-stage2": layout(dp=2, sd=2, mp=2, stage=2),
        "pp2-dp2-sd2-stage1": layout(pp=2, dp=2, sd=2),
        "pp2-dp2-sd2-stage3": layout(pp=2, dp=2, sd=2, stage=3),
        "pp2-dp2-mp2": layout(pp=2, dp=2, mp=2),
        "dp2-mp4": layout(dp=2, mp=4),
        "sd8-stage2-offload": layout(sd=8, stage=2) | {"sharding_offload": True},
        "sd8-stage3": layout(sd=8, stage=3),
    }.items():
        add(name, keys, is_slow=True)
    compiled = {"compile": True}
    add("sd2-stage3-compiled", layout(sd=2, stage=3), compiled, is_slow=True)
    add("mp2-sp-compiled", layout(mp=2), SP, compiled, is_slow=True)
    add("mp2-sp-documents-compiled", layout(mp=2), SP, DOCUMENTS, compiled, is_slow=True)
    add("pp2-compiled", layout(pp=2), compiled, is_slow=True)
    add("pp2-interleaved-compiled", layout(pp=2), TWICE, compiled, is_slow=True)
    for granularity in ("full", "full_attn", "core_attn"):
        part = RECOMPUTE | {"recompute_granularity": granularity}
        add(f"mp2-compiled-recompute-{granularity}", layout(mp=2), part, compiled, is_slow=True)
        add(f"sd2-stage2-compiled-recompute-{granularity}", layout(sd=2, stage=2), part, compiled, is_slow=True)
    add("pp4-vpp2-mp2-dp2", layout(pp=4, mp=2, dp=2), TWICE, EIGHT_LAYERS, is_slow=True)
    return cases


CASES = {case.name: case for case in _cases()}
