"""Files beside a script are found by the names it gives them, and no others."""

from pathlib import Path

from hp_tool.cli.script_files import find_script_files


def test_what_a_script_names_is_found_below_its_folder_alone(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / "configs").mkdir(parents=True)
    (tmp_path / "outside.sh").write_text("A=1\n")
    (folder / "models.env").write_text("source configs/more.sh\n")
    (folder / "configs" / "more.sh").write_text("B=2\n")
    (folder / "configs" / "zero3.yaml").write_text("zero_stage: 3\n")
    (folder / "other.sh").write_text("python train.py\n")
    (folder / "linked.json").symlink_to(tmp_path / "outside.sh")
    (folder / "binary.json").write_bytes(b"\xff\xfe\0")
    script = folder / "train.sh"
    text = (
        'source "${HERE}/models.env"; . ../outside.sh; run --config_file configs/$ACCELERATOR.yaml '
        "--deepspeed linked.json\n"
        "bash $NAME.sh binary.json absent.json train.sh\n"
    )
    script.write_text(text)
    assert find_script_files(script, text) == {
        "models.env": "source configs/more.sh\n",
        "configs/more.sh": "B=2\n",
        "configs/zero3.yaml": "zero_stage: 3\n",
    }
