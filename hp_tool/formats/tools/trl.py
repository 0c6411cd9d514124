"""Read TRL 1.16's YAML file, and write a script that fine-tunes with FSDP2."""

from typing import Any

from hp_tool.domain.setups import TrainingSetup
from hp_tool.formats import fine_tuning
from hp_tool.formats.fine_tuning import adapter_targets, trainer_arguments
from hp_tool.formats.registry import Format, register
from hp_tool.formats.signs import Evidence, Sign
from hp_tool.formats.trainer.scripts import read_file
from hp_tool.formats.writing import DTYPES, Values, option_words

TOOL = "TRL 1.16"


def text(setup: TrainingSetup) -> str:
    """Return a script that writes Accelerate's file and starts `trl.scripts.sft`.

    Raises:
        UnsupportedError: TRL cannot express the setup.
    """
    fine_tuning.check_setup(setup, tool=TOOL, loss="chunked", chooses_width=True)
    return fine_tuning.launch_script(
        setup, tool=TOOL, program="-m trl.scripts.sft", options=option_words(arguments(setup))
    )


def arguments(setup: TrainingSetup) -> Values:
    """Return the arguments of `trl.scripts.sft`."""
    w = setup.workload
    options: dict[str, Any] = {
        f"--{name}": str(value) for name, value in trainer_arguments(setup).items()
    }
    options |= {
        "--max_length": w.sequence_length,
        "--attn_implementation": "sdpa" if w.attention == "flash" else "eager",
    }
    options["--loss_type"] = "chunked_nll"  # TRL's name for the chunked loss.
    wide = "fp32" in (w.precision, w.parameter_precision)
    options["--dtype"] = "float32" if wide else DTYPES[w.precision]
    if w.lora is not None:
        options |= {
            "--use_peft": True,
            "--lora_r": w.lora.rank,
            "--lora_dropout": str(w.lora.dropout),
            "--lora_target_modules": list(adapter_targets(setup, tool=TOOL)),
        }
        if w.frozen_precision == "nf4":
            options |= {
                "--load_in_4bit": True,
                "--bnb_4bit_quant_type": "nf4",
                "--use_bnb_nested_quant": True,
                # FSDP shards tensors of a single dtype.
                "--bnb_4bit_quant_storage": options["--dtype"],
            }
    return options


def _is_its_file(evidence: Evidence) -> bool:
    """Return True if the keys are the Trainer's, and one of them names the model as TRL does."""
    trainers = {"per_device_train_batch_size", "learning_rate", "num_train_epochs", "max_steps"}
    return "model_name_or_path" in evidence.keys and not evidence.keys.isdisjoint(trainers)


register(
    Format(
        name="trl",
        title="TRL",
        signs=(Sign(place="keys", rank=55, matches=_is_its_file),),
        logs=("trainer",),
        read=read_file,
        reads="TRL's YAML file (`trl sft --config`), with `--file` for the file of Accelerate "
        "or DeepSpeed",
        write=text,
        usual_of="hf-trainer",
        framework="hf-trainer",
        axes=fine_tuning.AXES,
        trained_weights="fp32",
        loss="chunked",
        writes="a script that writes Accelerate's file and starts `trl.scripts.sft`: full "
        "fine-tuning, LoRA or QLoRA",
        checked="the fields of TRL 1.16's and transformers' classes; read back by `import`",
    )
)
