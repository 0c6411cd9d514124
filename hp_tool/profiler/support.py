"""What this profiler runs. Everything else is refused by name: a number measured on something else would be worse than none."""

from __future__ import annotations

from collections.abc import Iterator

from hp_tool.domain.measurement import ProfileRequest
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.errors import InputError, UnsupportedError


def check(request: ProfileRequest) -> None:
    """Raise UnsupportedError for what is not run, InputError for sizes that do not fit together."""
    for unsupported, what in (*_model(request.model), *_training(request.training), *_parallel(request.parallel)):
        if unsupported:
            raise UnsupportedError(f"the profiler does not run {what}")
    for wrong, message in _sizes(request):
        if wrong:
            raise InputError(message)


def _model(model: ModelSpec) -> Iterator[tuple[bool, str]]:
    yield model.architecture != "decoder", f"architecture: {model.architecture}"
    yield model.num_experts is not None, "mixture-of-experts models (num_experts)"
    yield model.kv_lora_rank is not None, "multi-head latent attention (kv_lora_rank)"
    yield model.num_nextn_predict_layers > 0, "multi-token prediction (num_nextn_predict_layers)"
    yield model.positions == "relative", "position_embedding: relative"
    yield model.has_mlp_bias and not model.has_attention_bias, "mlp_bias without attention_bias"


def _training(training: TrainingWorkload) -> Iterator[tuple[bool, str]]:
    yield training.framework != "megatron-core", f"framework: {training.framework}"
    yield training.precision not in ("bf16", "fp16", "fp32"), f"precision: {training.precision}"
    yield training.task != "pretrain" or training.lora is not None, f"task: {training.task}"
    yield training.packed or training.sequence_lengths is not None, "packed or unequal sequences"
    yield training.offload not in (None, "none"), f"offload: {training.offload}"
    yield training.optimizer not in ("adam", "sgd"), f"optimizer: {training.optimizer}"
    yield training.parameter_precision not in (None, training.precision), "a parameter_precision other than precision"
    yield (
        training.gradient_precision not in (None, "fp32", training.precision),
        f"gradient_precision: {training.gradient_precision}",
    )
    yield training.optimizer_precision not in (None, "fp32"), f"optimizer_precision: {training.optimizer_precision}"


def _parallel(parallel: ParallelConfig) -> Iterator[tuple[bool, str]]:
    recompute = parallel.recompute if isinstance(parallel.recompute, str) else parallel.recompute.granularity
    yield parallel.context_parallel_size > 1, "context parallelism (context_parallel_size)"
    yield parallel.expert_parallel_size > 1 or parallel.expert_tensor_parallel_size > 1, "expert parallelism"
    yield parallel.zero_stage not in (0, 1), f"zero_stage: {parallel.zero_stage}"
    yield recompute not in ("none", "selective", "full"), f"recompute: {recompute}"


def _sizes(request: ProfileRequest) -> Iterator[tuple[bool, str]]:
    model, training, parallel = request.model, request.training, request.parallel
    t, p, d = parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.data_parallel_size
    batch = d * parallel.micro_batch_size
    chunks = p * parallel.virtual_pipeline_parallel_size
    yield model.num_hidden_layers % chunks != 0, f"num_hidden_layers {model.num_hidden_layers} is not divisible by {chunks}"
    yield t * p * d != request.num_gpus, f"TP {t} x PP {p} x DP {d} is not num_gpus {request.num_gpus}"
    yield training.global_batch_size % batch != 0, f"global_batch_size {training.global_batch_size} is not divisible by {batch}"
    yield model.vocab_size % t != 0, f"vocab_size {model.vocab_size} is not divisible by tensor_parallel_size {t}"
    rows = model.max_position_embeddings
    learned = model.positions == "learned" and rows is not None
    yield learned and (rows or 0) < training.sequence_length, f"max_position_embeddings {rows} is below sequence_length"
    yield request.steps < 1 or request.warmup_steps < 0, "steps must be at least 1 and warmup_steps at least 0"
