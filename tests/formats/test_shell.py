"""Launch scripts as people write them, held to bash itself; nothing is executed, and no word is
dropped in silence.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import tempfile

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hp_tool.errors import InputError
from hp_tool.formats import shell
from hp_tool.formats.exchange import read_configuration
from hp_tool.formats.reading import ImportRefusedError

FORMS = (
    "torchtrain {words}",
    'A=({words}); torchtrain "${{A[@]}}"',
    "A=({words}); torchtrain ${{A[@]}}",
    'A=(); A+=({words}); B=("${{A[@]}}"); torchtrain "${{B[@]}}"',
    "A='{words}'; torchtrain $A",
    'A="{words}"; A="$A"; A+=" --last"; torchtrain $A',
    'CMD="torchtrain {words}"; $CMD',
    'CMD="torchtrain {words}"; eval $CMD',
    'f() {{ torchtrain "$@" --n $#; }}; f {words}',
    'f() {{ local a=${{1:-8}} b=${{9:-none}}; torchtrain "${{@:1}}" --a $a --b "$b"; }}; f {words}',
    'set -- {words}; while [ $# -gt 0 ]; do A+=("$1"); shift; done; torchtrain "${{A[@]}}"',
    'for w in {words}; do A="$A $w"; done; torchtrain $A',
    'X=${{Y:-7}}; if [ "$X" = 7 ]; then B="--yes"; else B="--no"; fi; torchtrain {words} $B --x '
    "$((X*2+1))",
    'M=13b; case "$M" in 7b|8b) L=32;; 1*b) L=40;; *) L=1;; esac; torchtrain --l $L {words}',
    "S=a.b.c; torchtrain {words} --s ${{S%.*}} ${{S##*.}} ${{#S}} ${{S,,}} ${{S:2:3}} "
    "${{N:+gone}} ${{S:+there}}",
    'torchtrain {words} --q "a  b" \'c $d\' e\\ f "" --z=1 \\\n  --next 2 # a comment',
    'declare -A M=([k]=v [l]=w); torchtrain {words} --m "${{M[k]}}" "${{M[l]}}"',
    'bash -c "torchtrain {words}"',
    "cat > run.sh <<EOF\ntorchtrain {words} --h\nEOF\nbash run.sh",
    '[[ -n "x" && 3 -gt 2 ]] && torchtrain {words} || torchtrain --never',
    'i=1; until (( i > 3 )); do A+=" --u$i"; i=$((i + 1)); done; torchtrain $A {words}',
    'R=A; A=deep; torchtrain {words} --r ${{!R}} "${{R}}x" --c $((2**5 % 7)) $((4 > 3 && 2 > 1))',
)
"""Ways to write a command, with the words of it in one place."""
WORDS = st.lists(
    st.from_regex(r"--[a-z]{1,6}(=[0-9a-z.]{1,4})?|[a-z0-9./,:_+-]{1,8}", fullmatch=True).filter(
        lambda w: w not in ("-", "--")
    ),
    min_size=1,
    max_size=8,
)


def by_bash(script: str) -> list[str]:
    """What bash itself passes to a program called torchtrain."""
    program = 'torchtrain() { printf "%s\\0" "$@"; printf "\\1"; }; export -f torchtrain;\n'
    with tempfile.TemporaryDirectory() as folder:
        ran = subprocess.run(
            ["bash", "-c", program + script],
            capture_output=True,
            check=True,
            timeout=20,
            cwd=folder,
            env={},
        )
    return ran.stdout.decode().split("\1")[0].split("\0")[:-1]


def by_us(script: str) -> list[str]:
    read = shell.read_script(script)
    return next(
        [word.text for word in command.words[1:]]
        for command in read.commands
        if command.words[0].text == "torchtrain"
    )


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
@settings(suppress_health_check=list(HealthCheck))
@given(form=st.sampled_from(FORMS), words=WORDS)
def test_words_are_those_that_bash_passes_on(form: str, words: list[str]) -> None:
    script = form.format(words=" ".join(words))
    assert by_us(script) == by_bash(script)


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
@pytest.mark.parametrize("form", FORMS)
def test_each_form_is_read_as_bash_reads_it(form: str) -> None:
    """The property above draws only some of the forms."""
    script = form.format(words="--first a=b --second=1 c")
    assert by_us(script) == by_bash(script)


@settings(suppress_health_check=list(HealthCheck))
@given(form=st.sampled_from([form for form in FORMS if "bash" not in form]), words=WORDS)
def test_no_word_is_dropped_in_silence(form: str, words: list[str]) -> None:
    """Every word of the command is read, ignored with a reason or refused by name, however it is
    written.
    """
    script = form.replace(
        "torchtrain", "torchrun --nproc_per_node 8 pretrain_gpt.py --tensor-model-parallel-size 2"
    ).format(words=" ".join(words))
    with pytest.raises((ImportRefusedError, InputError)) as caught:
        read_configuration(script, format="megatron-lm")
    if not isinstance(caught.value, ImportRefusedError):
        assert re.search(
            r"--[a-z-]+ takes|--\w", caught.value.message
        )  # a flag's value is malformed
        return
    reading = caught.value.reading
    said = " ".join(
        [f"{each.flag} {each.value}" for each in reading.read]
        + [each.flag for each in reading.ignored]
        + reading.refused
    )
    for word in shell.read_script(script).commands[-1].words[4:]:
        name = word.text.partition("=")[0]
        assert name in said, word


SCRIPT = """#!/bin/bash
#SBATCH --nodes=4
#SBATCH --gpus-per-node=8
NUM_NODES=${SLURM_NNODES:-1}
WORLD_SIZE=$((8*$NUM_NODES))
DISTRIBUTED_ARGS=(
    --nproc_per_node 8   # one a GPU
    --nnodes $NUM_NODES
    --master_addr $MASTER_ADDR
)
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py --global-batch-size $((WORLD_SIZE * 2)) --data-path $DATA "$@"
"""  # noqa: E501


def test_slurm_tells_the_script_its_nodes_and_unset_variables_stay_marked() -> None:
    (command,) = shell.read_script(SCRIPT).commands
    texts = [word.text for word in command.words]
    assert texts[texts.index("--nnodes") + 1] == "4"
    assert texts[texts.index("--global-batch-size") + 1] == "64"
    assert [word.unknown for word in command.words if word.unknown] == [
        ("$MASTER_ADDR",),
        ("$DATA",),
    ]
    assert command.words[1].line == 7


def test_nothing_is_executed_and_quotes_must_close() -> None:
    (command,) = shell.read_script('x --name "$(touch /tmp/never)" `date` <(ls)').commands
    assert [word.unknown for word in command.words if word.unknown] == [
        ("$(touch /tmp/never)",),
        ("`date`",),
        ("<(ls)",),
    ]
    with pytest.raises(InputError, match="line 2 is not valid bash: x --name 'open"):
        shell.read_script("y\nx --name 'open")


def test_what_only_running_would_tell_is_noted() -> None:
    read = shell.read_script(
        "if [ -d /data ]; then A=--there; fi\nx $A\nif [ -z $1 ]; then exit 1; fi"
    )
    assert [note.line for note in read.notes] == [1, 3]
    assert "only known at run time" in read.notes[0].reason


@pytest.mark.parametrize(
    "text",
    [
        "A=$A\nx --n $A",
        "A=$B\nB=$A\nx --n $A",
        "A=$((A*A*A))\nx --n $A",
        "x --n $((1/0))",
        "f() { f; }; f",
        "eval 'eval x'",
        "x --n $((2**63))",
    ],
)
def test_circles_end(text: str) -> None:
    try:
        shell.read_script(text)
    except InputError as error:
        assert error.code in ("syntax", "too_large")


@pytest.mark.parametrize(
    ("text", "line", "construct"),
    [
        ("N=2\nfor ((i=0; i<3; i++)); do N=$i; done\nx --n $N", 2, "for"),
        ("N=2\n\n(( N += 1 ))\nx --n $N", 3, "a sum that sets a variable"),
        ("N=2\nM=$((N++))\nx --n $N", 2, "a sum that sets a variable"),
        ("N=2\nM=$((UNKNOWN + N++))\nx --n $N", 2, "a sum that sets a variable"),
        ("N=2\nlet N=N+1\nx --n $N", 2, "let"),
        ("A=\nwhile read -r w; do A+=$w; done <<EOF\n4\nEOF\nx --n $A", 2, "a loop over the lines"),
    ],
)
def test_what_is_not_followed_is_refused_by_name_and_line(
    text: str, line: int, construct: str
) -> None:
    with pytest.raises(InputError, match=re.escape(f"line {line}: {construct}")):
        shell.read_script(text)


@pytest.mark.parametrize(
    "word",
    ["$((1 << 3))", "$((-N + 1))", "$((N & 1))", "$((N ? 4 : 5))", "${S//a/b}", "${S^^}", "$((M))"],
)
def test_rare_sums_and_substitutions_stay_unknown(word: str) -> None:
    (command,) = shell.read_script(f"N=2\nM=N*2\nS=a\nx --n {word}").commands
    assert command.words[2].unknown == (word,)


@pytest.mark.parametrize(
    "text",
    [
        "while :; do x; done",
        "a=xxxxxxxx\n" + "a=$a$a$a$a$a$a$a$a\n" * 9,
        "((" * 40_000,
        "if x; then " * 9_000,
        '"$(' * 30_000,
        f"if [ {2000 * '! '} x ]; then y; fi",
    ],
)
def test_what_asks_for_too_much_is_refused(text: str) -> None:
    with pytest.raises(InputError):
        shell.read_script(text)


@given(st.text(alphabet=st.sampled_from("AB$(){}[]@=+*\"' -\n#\\1;&|<>!:%/"), max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(InputError):
        read_configuration(text, format="megatron-lm", num_gpus=8)


@pytest.mark.parametrize(
    ("script", "value"),
    [
        ("if [ -f conf ]; then TP=8; else TP=2; fi", None),
        ("TP=2\nif [ -f conf ]; then TP=8; fi", None),
        ("TP=2\n[ -f conf ] && TP=8", None),
        ("TP=2\n[ -f conf ] || TP=8", None),
        ("TP=2\ncase $(hostname) in big*) TP=8;; *) ;; esac", None),
        ("TP=2\nif [ -f a ]; then TP=4; elif [ -f b ]; then TP=8; fi", None),
        (
            "set_tp() { TP=8; }\nTP=2\nif [[ $(nvidia-smi -L | wc -l) -gt 4 ]]; then set_tp; fi",
            None,
        ),
        (f"TP=2\nif [ {31 * '! '} x ]; then TP=8; fi", None),
        (f"TP=2\nif [ {30 * '! '} x ]; then TP=8; fi", "8"),
        ("TP=2\nif [ ! -f conf ]; then TP=8; exit 1; fi", "2"),
        ("TP=2\nif [ -f conf ]; then TP=2; mkdir -p out; fi", "2"),
        ("TP=2\nif [ -f a ] || [ 1 = 1 ]; then TP=8; fi", "8"),
        ("TP=2\nif [ 1 = 2 ]; then TP=8; fi", "2"),
        ("TP=2\nif [ -f conf ]; then CHECKPOINT='--load last'; fi", "2"),
    ],
)
def test_a_value_that_an_unknown_condition_decides_is_unknown(
    script: str, value: str | None
) -> None:
    command = shell.read_script(f"{script}\nx --n $TP\n").commands[-1]
    assert [word.text for word in command.words[:2]] == ["x", "--n"]
    word = command.words[2]
    assert (
        (word.text, word.unknown) == (value, ())
        if value
        else word.unknown[0].startswith("$TP (by ")
    )


def test_a_branch_that_is_not_taken_leaves_nothing_behind() -> None:
    script = (
        "f() { echo one; }\nif [ -f conf ]; then f() { echo two; }; torchrun a.py; cat > b "
        "<<X\ntext\nX\nfi\nf\n"
    )
    read = shell.read_script(script)
    assert [[word.text for word in command.words] for command in read.commands] == [["echo", "one"]]
    assert "b" not in read.files and len(read.notes) == 1


@pytest.mark.parametrize(("use", "line"), [("$A", 1), ('"$A"', 1), ("${A}", 1), ("5", 3)])
def test_a_word_is_of_the_line_that_wrote_its_value(use: str, line: int) -> None:
    """An error about a value leads to the assignment, not to where it is used."""
    (command,) = shell.read_script(f"A=5\n\nx --n {use}").commands
    assert (command.words[2].text, command.words[2].line) == ("5", line)
