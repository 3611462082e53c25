"""Every key of a run, in the sections of the YAML file. Data only: frozen, typed, closed.

A key left out keeps the default written here. `auto` means "what suits the device and the layout": `resolve.py`
replaces it, so the config.yaml that a run leaves behind holds no `auto` in what decides the result. Leaf keys are
unique across sections, because every leaf is also a command-line flag. No rule between keys lives here:
`problems.py` has them all.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Auto = Literal["auto"]
Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Probability = Annotated[float, Field(ge=0.0, lt=1.0)]
Positive = Annotated[float, Field(gt=0.0)]
PositiveOrZero = Annotated[float, Field(ge=0.0)]

Schedule = Literal["GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBV", "DualPipeV"]


def _split_ratios(value: object) -> object:
    """`949,50,1` as the seeds write it, or a YAML list."""
    return value.split(",") if isinstance(value, str) else value


def _words(value: object) -> object:
    """`first,head`, or `none`, or a YAML list."""
    if not isinstance(value, str):
        return value
    return [] if value == "none" else [word.strip() for word in value.split(",")]


def _seconds(value: object) -> object:
    """`2-12:30:00`, `12:30:00` or `30:00` as Slurm writes a time limit, in seconds."""
    if not isinstance(value, str) or ":" not in value:
        return value
    days, dash, clock = value.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    if len(parts) > 3 or (dash and len(parts) != 3):
        raise ValueError(value)
    seconds = 0
    for part in parts:
        seconds = 60 * seconds + part
    return seconds + 86400 * int(days or 0)


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, protected_namespaces=()
    )


class Global(Section):
    device: Literal["auto", "cpu", "gpu"] = "auto"
    """Where to compute: `auto` takes a GPU if the machine has one."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1234
    """Fixes initial weights, data order and dropout."""
    global_batch_size: Count = 64
    """Sequences in one update, over all processes."""
    micro_batch_size: Count | Auto = "auto"
    """Sequences in one forward of one process; `auto` takes as many as the layout allows and, on GPUs, as are forecast
    to fit 90 % of the smallest one's memory. The result is the same."""


class Model(Section):
    model_name_or_path: str | None = None
    """A preset such as `gpt3-1.3B`, or a checkpoint to start from its weights; keys written beside a preset win."""
    model_type: Literal["gpt"] = "gpt"
    """The family of models; there is one."""
    hidden_size: Count = 768
    """Width of the residual stream."""
    num_layers: Count = 12
    """Transformer blocks."""
    num_attention_heads: Count = 12
    """Heads per block; they divide hidden_size."""
    ffn_hidden_size: Count | Auto = "auto"
    """Width inside the feed-forward part; `auto` is 4 * hidden_size."""
    vocab_size: Count | Auto = "auto"
    """Tokens the model knows, before padding to a multiple of 128; `auto` takes the tokenizer's."""
    max_position_embeddings: Count | Auto = "auto"
    """Learned positions; `auto` is max_seq_len."""
    hidden_dropout_prob: Probability = 0.0
    """Dropout after the embedding, attention and feed-forward."""
    attention_probs_dropout_prob: Probability = 0.0
    """Dropout on attention weights."""
    initializer_range: Positive = 0.02
    """Standard deviation of the initial weights."""
    tie_word_embeddings: bool = True
    """The output head shares the token embedding's weight."""
    use_recompute: bool = False
    """Compute activations again in backward instead of keeping them."""
    recompute_granularity: Literal["full", "full_attn", "core_attn"] = "full"
    """What is computed again: whole blocks, attention with its projections, or the attention product alone."""


class Data(Section):
    input_dir: str | dict[str, Positive] | None = None
    """Text or token files: a file, a prefix, a folder, `builtin:pydoc`; or paths of token files and their weights."""
    split: Annotated[tuple[PositiveOrZero, PositiveOrZero, PositiveOrZero], BeforeValidator(_split_ratios)] = (
        949,
        50,
        1,
    )
    """Shares of training, validation and test, in any unit."""
    split_by: Literal["position", "window", "file"] = "position"
    """`position` cuts the text (or its documents) into three contiguous parts; `window` deals windows at random, so the
    parts overlap; `file` goes by the words train, val and test in the names of token files."""
    max_seq_len: Count = 1024
    """Tokens per sequence."""
    sample_stride: Count | Auto = "auto"
    """Tokens between the starts of neighbouring samples; `auto` is max_seq_len, 1 makes every window a sample."""
    truncate: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Keeps only this first fraction of the text."""
    tokenizer: str = "auto"
    """`characters`, or the path of a tokenizer.json, a folder with vocab.json and merges.txt, or a tiktoken ranks file;
    `auto` takes the one beside token files, and characters for text."""
    eos_token_id: CountOrZero | Auto = "auto"
    """The token that ends a document; `auto` takes the tokenizer's."""
    eod_mask_loss: bool = False
    """Does not count the loss of guessing a document's first token from the end of the one before it."""
    reset_position_ids: bool = False
    """Starts positions again with every document."""
    reset_attention_mask: bool = False
    """Keeps attention within documents."""
    cache_dir: str | None = None
    """Where indexes of large corpora are kept; by default beside the data, else in ~/.cache/fourfold."""
    num_workers: CountOrZero = 1
    """Threads that prepare batches ahead of the step; 0 prepares them inside it."""


class Optimizer(Section):
    weight_decay: PositiveOrZero = 0.1
    """Decay of matrices and embeddings; biases and norms never decay."""
    decay_embeddings: bool = True
    """Whether token and position embeddings decay too (minGPT: no)."""
    adam_beta1: Probability = 0.9
    """Decay of the first moment."""
    adam_beta2: Probability = 0.95
    """Decay of the second moment."""
    adam_epsilon: Positive = 1e-8
    """Added to the denominator."""
    max_lr: Positive = 3e-4
    """Learning rate after warm-up."""
    min_lr: PositiveOrZero = 3e-5
    """Learning rate after decay_steps."""
    warmup_rate: Fraction = 0.01
    """Part of decay_steps spent warming up linearly from zero."""
    decay_steps: Count | Auto = "auto"
    """Update at which min_lr is reached; `auto` is the last one."""
    lr_decay_style: Literal["cosine", "linear", "constant"] = "cosine"
    """The curve between warm-up and decay_steps."""
    grad_clip: PositiveOrZero = 1.0
    """Largest global gradient norm; 0 leaves gradients as they are."""


class Sharding(Section):
    sharding_degree: Count | Auto = "auto"
    """Processes that share one copy of the optimizer state (and more, by stage)."""
    sharding_stage: Literal[1, 2, 3] = 1
    """1 shards the optimizer state, 2 the gradients too, 3 the parameters too."""
    sharding_offload: bool = False
    """Keeps parameters, gradients and optimizer state in host memory."""


class Distributed(Section):
    dp_degree: Count | Auto = "auto"
    """Data parallel replicas. One degree left out is inferred from the number of processes."""
    mp_degree: Count | Auto = "auto"
    """Processes that split each layer's tensors."""
    pp_degree: Count | Auto = "auto"
    """Pipe stages that split the layers."""
    sharding: Sharding = Sharding()
    sequence_parallel: bool = False
    """Splits activations between mp ranks along the sequence where they would be copies."""
    virtual_pp_degree: Count = 1
    """Pipe stages per process, for interleaved schedules."""
    pp_schedule: Schedule = "1F1B"
    """The order of forwards and backwards in the pipe."""
    timeout: Annotated[Positive, BeforeValidator(_seconds)] = 1800.0
    """How long a rank waits for another before the run is given up: seconds, or `HH:MM:SS`. For the slowest disk among
    them at least six hours."""


class Engine(Section):
    max_steps: Count | None = None
    """Updates in all. Give this or num_train_epochs."""
    num_train_epochs: Count | None = None
    """Passes over the training samples. Give this or max_steps; one pass if neither is given."""
    logging_freq: Count = 10
    """Steps between log lines."""
    eval_freq: CountOrZero = 500
    """Steps between evaluations; 0 evaluates only at the end."""
    eval_iters: Annotated[int, Field(ge=-1)] = 10
    """Global batches per evaluation; -1 takes the whole validation part, 0 never evaluates."""
    save_steps: CountOrZero = 1000
    """Steps between checkpoints; 0 saves only at the end."""
    save_epochs: CountOrZero = 0
    """Epochs between checkpoints, besides save_steps; 0 never."""
    keep_last: CountOrZero = 3
    """Checkpoints kept; 0 keeps all."""
    keep_best: bool = False
    """Also keeps the checkpoint with the lowest evaluation loss, and evaluates whenever it saves."""
    async_save: bool = True
    """Writes checkpoints while training goes on, from one copy in host memory; `false` waits for the disk."""
    max_time: Annotated[Positive, BeforeValidator(_seconds)] | None = None
    """Saves and stops before the process is this old: seconds, or `HH:MM:SS`, or `D-HH:MM:SS` as Slurm writes it."""
    hang_timeout: Positive = 600.0
    """Seconds in which no rank finishes a step, an evaluation's batch or a write, after which the run hangs: all ranks'
    stacks are shown, and the job ends with exit code 70."""
    output_dir: str = "output"
    """Where the run leaves its config, metrics, logs and checkpoints: a folder, or an address like `s3://bucket/run`."""
    resume: str = "auto"
    """`auto` goes on from the newest checkpoint in output_dir, `never` starts anew, a path goes on from there."""
    use_amp: bool | Auto = "auto"
    """Compute in amp_dtype, keep weights in float32; `auto` does so on a GPU."""
    amp_dtype: Literal["bfloat16", "float16", "float8"] = "bfloat16"
    """The lower precision of use_amp; float16 scales its loss; float8 multiplies in 8 bits and is bfloat16 between."""
    float8_except: Annotated[tuple[Literal["first", "last", "head"], ...], BeforeValidator(_words)] = ("head",)
    """What float8 leaves in bfloat16: any of `first,last,head` (the first block, the last one, the head), or `none`."""
    scale_loss: Positive = 32768.0
    """First loss scale under float16."""
    compile: bool | Auto = "auto"
    """`true` compiles the model into a static graph, `false` runs it eagerly; `auto` compiles on a GPU."""


class Profiler(Section):
    enable: bool = False
    """Writes a torch profiler trace for start_step to stop_step."""
    start_step: Count = 5
    """First profiled step."""
    stop_step: Count = 8
    """Last profiled step."""
    memory_snapshot: bool = False
    """On a GPU, writes a memory snapshot as well."""


class Config(Section):
    global_: Global = Field(default=Global(), alias="global")
    model: Model = Model()
    data: Data = Data()
    optimizer: Optimizer = Optimizer()
    distributed: Distributed = Distributed()
    engine: Engine = Engine()
    profiler: Profiler = Profiler()
