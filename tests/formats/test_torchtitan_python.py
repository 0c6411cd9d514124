"""torchtitan 0.3's configurations in Python: written in words of its classes, read by their syntax,
never executed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from hp_tool import catalog
from hp_tool.cost.parameters import total_parameters
from hp_tool.errors import InputError, UnsupportedError
from hp_tool.formats.exchange import read_configuration, read_query
from hp_tool.formats.python_calls import Call, Functions
from hp_tool.formats.reading import hyphenated, look_up, table
from hp_tool.formats.tools import torchtitan, torchtitan_python
from tests.formats.cases import same_work, setup_of
from tests.formats.test_torchtitan import queries

RECORDED: dict[str, Any] = json.loads(
    Path(__file__).with_name("torchtitan_classes.json").read_text()
)
CLASSES = {
    name: fields for module in RECORDED["modules"].values() for name, fields in module.items()
}
H100 = {"cluster.gpu": "h100-sxm-80gb"}
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (
        "llama-3-8b",
        {"precision": "fp8"},
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 4, "recompute": "per_layer"},
    ),
    (
        "llama-3-70b",
        {},
        {"tensor_parallel_size": 8, "sequence_parallel": True, "recompute": "per_op"},
    ),
    ("llama-3.2-1b", {"cuda_graphs": True}, {"recompute": "none", "zero_stage": 2}),
    (
        "qwen3-32b",
        {},
        {
            "context_parallel_size": 2,
            "context_parallel_communication": "all_gather",
            "recompute": "per_layer",
        },
    ),
    ("qwen3-30b-a3b", {}, {"expert_parallel_size": 8, "recompute": "none"}),
    ("deepseek-v3", {}, {"expert_parallel_size": 8, "recompute": "per_layer"}),
]

REGISTRY = """
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import default_adamw
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.trainer import Trainer

from . import model_registry

LENGTH = 4096


def qwen3_8b() -> Trainer.Config:
    "Eight billion."
    spec = model_registry("8B", attn_backend="flex")
    return Trainer.Config(
        loss=ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=vocabulary(spec))),
        model_spec=spec,
        optimizer=default_adamw(lr=3e-4),
        training=TrainingConfig(local_batch_size=2, seq_len=2 * LENGTH, steps=100),
        parallelism=ParallelismConfig(tensor_parallel_degree=4),
    )


def qwen3_8b_sharded() -> Trainer.Config:
    config = qwen3_8b()
    config.activation_checkpoint = FullAC.Config()
    config.training.disable_cuda_graphs = True
    config.parallelism.data_parallel_replicate_degree = 2
    config.comm.mode = "torchcomms"
    return config
"""


@pytest.mark.parametrize(
    ("name", "flavor", "model"),
    [
        ("qwen3_8b", "8B", "qwen3-8b"),
        ("qwen3_30b_a3b_long", "30B-A3B", "qwen3-30b-a3b"),
        ("qwen3_0_6b", "0.6B", "qwen3-0.6b"),
        ("deepseek_v3_671b", "671B", "deepseek-v3"),
        ("gpt_oss_20b", "20b", "gpt-oss-20b"),
        ("qwen35_9b", "9B", "qwen3.5-9b"),
        ("qwen3_5_27b", "27B", "qwen3.5-27b"),
        ("sft_qwen3_8b_math", "8B", "qwen3-8b"),
        ("qwen36_9b", "9B", None),
        ("qwen3_vl_8b", "8B", None),
        ("llama31_8b", "8B", None),
    ],
)
def test_a_function_names_its_model_in_full_or_the_model_is_asked_for(
    name: str, flavor: str, model: str | None
) -> None:
    text = (
        REGISTRY.partition("\n\ndef qwen3_8b_sharded")[0]
        .replace("qwen3_8b", name)
        .replace('"8B"', f'"{flavor}"')
    )
    if model is not None:
        assert read_query(text, num_gpus=32, overrides=H100)["model"] == model
        return
    with pytest.raises(
        UnsupportedError,
        match=r"model; the file does not name the package of model_registry\('\d+B'\); add --model",
    ):
        read_query(text, num_gpus=32, overrides=H100)
    assert (
        read_query(text, num_gpus=32, overrides={**H100, "model": "qwen3-4b"})["model"]
        == "qwen3-4b"
    )


def query_of(model: str, training: dict[str, Any], parallel: dict[str, Any]) -> dict[str, Any]:
    work = {
        "sequence_length": 8192,
        "global_batch_size": 128,
        "framework": "torch-fsdp",
        **training,
    }
    cluster = {"gpu": "h100-sxm-80gb", "num_gpus": 64}
    split = {"micro_batch_size": 1, "zero_stage": 3, **parallel}
    return {
        "kind": "training",
        "model": model,
        "cluster": cluster,
        "training": work,
        "parallel": split,
    }


@given(queries())
def test_what_was_exported_comes_back_the_same(query: dict[str, Any]) -> None:
    setup = setup_of(query)
    if (
        setup.strategy.context_parallel_communication == "p2p"
        and setup.parallel.context_parallel_size > 1
    ):
        with pytest.raises(UnsupportedError, match="gathers keys"):
            torchtitan_python.text(setup)
        return
    again = read_query(torchtitan_python.text(setup), num_gpus=128, overrides=H100)
    same_work(setup_of(again), setup)


def calls(value: Any) -> list[Call]:
    if isinstance(value, list):
        return [each for item in value for each in calls(item)]
    return (
        [value, *calls([*value.words, *value.arguments.values()])]
        if isinstance(value, Call)
        else []
    )


def hold_to_its_classes(text: str) -> None:
    """Assert that each name, field and choice of a module that was written is one of
    torchtitan's.
    """
    functions = Functions(text)
    for name, module in functions.modules.items():
        assert any(each.partition(".")[0] == name for each in RECORDED["modules"][module]), (
            module,
            name,
        )
    written = calls(functions.value("run"))
    for call in written:
        for key, value in call.arguments.items():
            assert key in CLASSES[call.name], (call.name, key)
            choices = CLASSES[call.name][key]
            assert not choices or value in choices, (call.name, key, value)
    spec = next(each for each in written if each.name == "model_registry")
    assert (
        spec.words[0] in RECORDED["flavors"][functions.modules["model_registry"].rpartition(".")[2]]
    )


@pytest.mark.parametrize(("model", "training", "parallel"), CASES)
def test_each_word_written_is_one_of_torchtitans(
    model: str, training: dict[str, Any], parallel: dict[str, Any]
) -> None:
    hold_to_its_classes(torchtitan_python.text(setup_of(query_of(model, training, parallel))))


def test_every_field_of_its_classes_has_its_line() -> None:
    arguments = table("torchtitan-python")
    named = [f"training.{each}" for each in CLASSES["TrainingConfig"]]
    named += [f"parallelism.{each}" for each in CLASSES["ParallelismConfig"]]
    named += [
        f"model_spec.{each}"
        for module in RECORDED["modules"].values()
        for each in module.get("model_registry", ())
    ]
    named += [
        each
        for each in CLASSES["Trainer.Config"]
        if each not in ("model_spec", "training", "parallelism")
    ]
    assert [each for each in named if look_up(hyphenated(each), arguments) is None] == []


HELPERS = """
from torchtitan.trainer import Trainer
from . import model_registry


def _debug(backend: str = "varlen", *, length: int = 1024) -> Trainer.Config:
    return Trainer.Config(
        model_spec=model_registry("debugmodel", attn_backend=backend),
        training=TrainingConfig(local_batch_size=2, seq_len=length),
    )


def first() -> Trainer.Config:
    return _debug("flex", length=512)


def second() -> Trainer.Config:
    config = _debug()
    config.model_spec = model_registry("{flavor}", converters=[{converters}])
    return config


def deepseek_v3_16b() -> Trainer.Config:
    return Trainer.Config(model_spec=model_registry("16B"))
"""


def read_helpers(name: str, *converters: str, flavor: str = "debugmodel") -> dict[str, Any]:
    text = HELPERS.format(converters=", ".join(converters), flavor=flavor)
    return read_query(text, num_gpus=8, overrides=H100, variables={"CONFIG": name})


def test_a_function_with_parameters_is_followed_and_its_package_is_that_of_the_others() -> None:
    query = read_helpers("first", "Float8LinearConverter.Config()")
    assert query["training"]["sequence_length"] == 512
    assert query["model"]["n_routed_experts"] == 8 and query["model"]["hidden_size"] == 256


def test_experts_are_converted_with_the_matrices_or_not_at_all() -> None:
    linear, grouped = "MXFP8LinearConverter.Config()", "MXFP8GroupedExpertsConverter.Config()"
    assert read_helpers("second", linear, grouped)["training"]["precision"] == "mxfp8"
    with pytest.raises(UnsupportedError, match="experts that stay in 16 bits"):
        read_helpers("second", linear)
    with pytest.raises(UnsupportedError, match="experts alone"):
        read_helpers("second", grouped)


@pytest.mark.parametrize(
    ("arguments", "refused"),
    [
        ('fqns=["layers"]', ""),
        ('fqns=["attention", "feed_forward", "shared_experts"]', ""),
        ('filter_fqns=["lm_head"]', ""),
        ('fqns=["layers.0", "layers.1"]', "part of the matrices"),
        ("fqns=leading(0.85)", "part of the matrices"),
        ('filter_fqns=["attention"]', "part of the matrices"),
        ("emulate=True", "emulation"),
    ],
)
def test_a_converter_of_part_of_a_layer_is_refused(arguments: str, refused: str) -> None:
    kind = f"NVFP4LinearConverter.Config({arguments})"
    text = (
        "from torchtitan.models.llama3 import model_registry\n"
        "from torchtitan.trainer import Trainer\n\n\n"
        "def run() -> Trainer.Config:\n"
        f'    return Trainer.Config(model_spec=model_registry("8B", converters=[{kind}]))\n'
    )
    if not refused:
        query = read_query(text, num_gpus=8, overrides=H100)
        assert query["training"]["precision"] == "nvfp4"
        return
    with pytest.raises(UnsupportedError, match=refused):
        read_query(text, num_gpus=8, overrides=H100)


def test_an_untied_copy_of_a_model_has_an_output_layer_of_its_own() -> None:
    text = (
        "from torchtitan.models.qwen3_5 import model_registry\n"
        "from torchtitan.trainer import Trainer\n\n\n"
        "def load():\n    return MMDataLoader.Config()\n\n\n"
        "def run() -> Trainer.Config:\n"
        '    return Trainer.Config(model_spec=model_registry("2B"), dataloader=load())\n'
    )
    reading = read_configuration(text, num_gpus=8, overrides=H100)
    assert any("MMDataLoader" in each.flag for each in reading.ignored)
    untied = catalog.model_from_mapping(reading.query["model"])
    tied = catalog.model("qwen3.5-2b")
    head = tied.vocab_size * tied.hidden_size
    assert total_parameters(untied) == total_parameters(tied) + head


def test_debug_models_have_the_size_that_torchtitan_prints() -> None:
    models = torchtitan.models_by_flavor()
    counted = total_parameters(catalog.model_from_mapping(models["llama3", "debugmodel"]))
    assert counted == 6_163_712


def test_a_registry_is_read_by_the_function_that_is_named() -> None:
    query = read_query(
        REGISTRY, num_gpus=16, overrides=H100, variables={"CONFIG": "qwen3_8b_sharded"}
    )
    assert query["model"] == "qwen3-8b"
    work = {
        "sequence_length": 8192,
        "global_batch_size": 8,
        "cross_entropy": "chunked",
        "cuda_graphs": False,
    }
    assert {key: query["training"][key] for key in work} == work
    split = {
        "tensor_parallel_size": 4,
        "data_parallel_shard_size": 2,
        "micro_batch_size": 2,
        "recompute": "per_layer",
    }
    assert {key: query["parallel"][key] for key in split} == split
    query = read_query(REGISTRY, num_gpus=16, overrides=H100, variables={"CONFIG": "qwen3_8b"})
    assert (query["training"]["cuda_graphs"], query["parallel"]["recompute"]) == (True, "per_op")
    with pytest.raises(InputError, match=r"--var CONFIG=.*qwen3_8b, qwen3_8b_sharded"):
        read_query(REGISTRY, num_gpus=16, overrides=H100)


MUON = "[P(optimizer_name='DistMuon'), P(optimizer_name='AdamW')]"
RUN = """
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer
def run() -> Trainer.Config:
    config = Trainer.Config(model_spec=model_registry("8B"{0}){1})
    {2}
    return config
"""


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (
            RUN.format("", "", "for each in config.layers:\n        each.x = 1"),
            "for each in config.layers",
        ),
        (RUN.format("", "", "change(config)"), r"change\(config\)"),
        (
            RUN.format("", "", "config.training.seq_len = length()"),
            r"training.seq_len.*length\(...\)",
        ),
        (RUN.format("", "", "config.training.seq_len *= 2"), r"config.training.seq_len \*= 2"),
        (RUN.format("", "", "config.training.sequence = 4096"), "training.sequence"),
        (
            RUN.format("", "", "config.activation_checkpoint = MemoryBudgetAC.Config()"),
            "MemoryBudgetAC",
        ),
        (RUN.format("", "", "config.loss = MTPLoss.Config()"), "MTPLoss"),
        (RUN.format("", "", "config.override.imports = ['mine']"), "override"),
        (RUN.format("", "", "config.model_spec.model.layers = []"), "model_spec.model.layers"),
        (RUN.format(", converters=[LoRAConverter.Config(rank=8)]", "", ""), "LoRAConverter"),
        (RUN.format(', moe_comm_backend="minimal_async_ep"', "", ""), "moe_comm_backend"),
        (RUN.format("", ", **others", ""), "returns"),
        (RUN.format("", ", optimizer=MuonContainer.Config()", ""), "optimizer"),
        (
            RUN.format("", f", optimizer=OptimizersContainer.Config(param_groups={MUON})", ""),
            "param_groups.optimizer_name",
        ),
        (RUN.format("", "", "return run()"), "calls itself"),
        (RUN.format("", "", "config = undefined"), "returns undefined"),
        ("from torchtitan.trainer import Trainer\n", "no function returns"),
        ("from torchtitan.trainer import Trainer\ndef run(", "not a Python file"),
    ],
)
def test_what_cannot_be_read_is_named(text: str, word: str) -> None:
    with pytest.raises(InputError, match=word):
        read_query(text, num_gpus=8, overrides=H100)


def test_nothing_is_executed(tmp_path: Path) -> None:
    touch = f"open({str(tmp_path / 'ran')!r}, 'w')"
    query = read_query(
        f"{touch}\n" + RUN.format("", f", dump_folder={touch}", ""), num_gpus=8, overrides=H100
    )
    assert query["model"] == "llama-3-8b"
    assert list(tmp_path.iterdir()) == []


def test_numbers_and_calls_stay_small() -> None:
    doubled = (
        "n = 9\n    " + "\n    ".join(["n = n * n"] * 40) + "\n    config.training.seq_len = n"
    )
    with pytest.raises(InputError, match=r"training\.seq_len"):
        read_query(RUN.format("", "", doubled), num_gpus=8, overrides=H100)
    tower = "".join(f"def f{i}():\n    return [f{i + 1}(), f{i + 1}()]\n" for i in range(40))
    with pytest.raises(InputError, match="expressions"):
        read_query(
            tower + RUN.format("", "", "config.training.steps = f0()"), num_gpus=8, overrides=H100
        )


def test_the_words_that_were_read_say_their_line() -> None:
    reading = read_configuration(
        RUN.format("", "", "config.training.seq_len = 4096"), num_gpus=8, overrides=H100
    )
    words = {each.flag: each.value for each in reading.read}
    assert words == {"model_spec.flavor": "8B", "training.seq_len": "4096"}


def test_after_0_3_a_batch_is_counted_in_tokens() -> None:
    text = """
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer


def llama3_8b() -> Trainer.Config:
    return Trainer.Config(
        model_spec=model_registry("8B"),
        training=TrainingConfig(
            num_tokens_per_microbatch_per_dp_rank=4 * 8192,
            max_context_length=8192,
            num_tokens_per_train_step=64 * 8192,
        ),
        parallelism=ParallelismConfig(pipeline_parallel_degree=2, num_pp_microbatches=4),
    )
"""
    given = {"cluster.gpu": "h100-sxm-80gb"}
    found = read_query(text, num_gpus=8, overrides=given)
    training, parallel = found["training"], found["parallel"]
    assert (training["sequence_length"], training["global_batch_size"]) == (8192, 64)
    assert parallel["micro_batch_size"] == 4
    plain = text.replace("num_tokens_per_train_step=64 * 8192,\n", "\n")
    local = read_query(plain, num_gpus=8, overrides=given)["training"]["global_batch_size"]
    assert local == 4 * 4 * 4  # rows of a forward pass, passes, replicas
    with pytest.raises(
        InputError,
        match="is not a multiple of max_context_length 8192",
    ):
        read_query(text.replace("4 * 8192", "5000"), num_gpus=8, overrides=given)
