"""The `finetune` command and run.py as a person meets them: help, mistakes, exit codes, ranks on the CPU."""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from finetune.cli import COMMANDS, main
from finetune.errors import EXIT_PREEMPTED, EXIT_USER_ERROR
from tests.ranks import ROOT, environment, run_command, run_python

FINETUNE = ("python", "-m", "finetune")
RUN = ("python", "finetune/run.py")
# What a command may import that answers without torch, beside Python's own: what reads recipes and names hardware takes 0.1 s.
LIGHT = {
    "finetune",
    "yaml",
    "pydantic",
    "pydantic_core",
    "annotated_types",
    "typing_extensions",
    "typing_inspection",
    "xxhash",
}


def answer(*command: str) -> tuple[int, str]:
    """The exit code and the message of a command that has to answer without importing torch or another large package."""
    finished = run_command(command, timeout=60, env={"PYTHONPROFILEIMPORTTIME": "1"})
    timed = re.findall(r"^import time:[^|]*\|[^|]*\|\s+([a-z]\w*)", finished.stderr, re.M)
    said = "".join(
        line for line in finished.stderr.splitlines(True) if not line.startswith("import time:")
    )
    check_light(set(timed), said)
    return finished.returncode, finished.stdout + said


def answers(folder: Path, commands: Sequence[Sequence[str]]) -> list[tuple[int, str]]:
    """What `answer` returns for each of many commands, in processes forked from one that has read Python and our configuration."""
    folder.mkdir(exist_ok=True)
    (folder / "commands.json").write_text(json.dumps(commands))
    finished = run_command(("python", "-m", "tests.light_commands", str(folder)))
    assert finished.returncode == 0, finished.stderr
    given = json.loads((folder / "answers.json").read_text())
    assert len(given) == len(commands)
    for _, _, said, modules in given:
        check_light({name.partition(".")[0] for name in modules.splitlines()}, said)
    return [(code, stdout + said) for code, stdout, said, _ in given]


@cache
def installed_packages() -> frozenset[str]:
    """All that can be imported of them; read from thousands of files."""
    return frozenset(packages_distributions())


def check_light(modules: set[str], said: str) -> None:
    heavy = {name for name in modules & installed_packages() if name[0] != "_"} - LIGHT - {"tests"}
    assert modules and not heavy, f"{heavy}: {said}"
    assert "Traceback" not in said


@pytest.mark.parametrize("command", [FINETUNE, RUN], ids=" ".join)
def test_help_answers_at_once(command: tuple[str, ...]) -> None:
    code, said = answer(*command, "--help")
    assert code == 0
    assert said.startswith("usage: ")


def test_help_of_every_command_answers_at_once(tmp_path: Path) -> None:
    commands = [(*FINETUNE, name, "--help") for name in COMMANDS]
    for command, (code, said) in zip(commands, answers(tmp_path, commands), strict=True):
        assert code == 0, command
        assert said.startswith(f"usage: finetune {command[3]} ")


def test_a_mistake_is_one_message_and_exit_code_2(
    tmp_path: Path, tiny_recipe: Callable[..., Path]
) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("model_name_or_path: some/model\ndatasets: [{path: some/data}]\n")
    config = str(ROOT / "accelerate_configs" / "ddp.yaml")
    mistakes = [
        (
            ["learning_rat=1"],
            "command line: learning_rat: no such key; did you mean learning_rate?",
        ),
        (
            ["--max_steps", "soon"],
            'command line: max_steps: "soon" does not fit; a whole number is expected',
        ),
        (
            ["datasets=[{path: ./missing.jsonl}]"],
            "command line: path: ./missing.jsonl: no such file or folder, here or ",
        ),
        (
            ["--config", str(recipe)],
            f"{recipe}: this is a recipe; pass it as --recipe, and an Accelerate config as --config",
        ),
        (
            ["--recipe", config],
            f"{config}: this is an Accelerate config; pass it as --config, and a recipe as --recipe",
        ),
        (
            ["--recipe", "quickstar"],
            "quickstar: no such recipe; did you mean quickstart? give a path, or one of: ",
        ),
        (["--config", ""], "the name of an Accelerate config is empty; give a path, or a name of "),
        (["--config", "fsdp_ful"], "fsdp_ful: no such Accelerate config; did you mean "),
        (["--recipie", "mine"], "command line: --recipie: no such option; did you mean --recipe?"),
        (["--dryrun"], "command line: --dryrun: no such option; did you mean --dry-run?"),
        (
            ["quickstart"],
            "command line: quickstart: an override is written key=value; --recipe names a recipe, ",
        ),
    ]
    given = [
        [*each] if "--recipe" in each else ["--recipe", str(recipe), *each] for each, _ in mistakes
    ]
    for command in ((*FINETUNE, "launch"), RUN):
        said_of_each = answers(
            tmp_path / "answers", [(*command, *arguments) for arguments in given]
        )
        assert said_of_each[0] == answer(*command, *given[0]), "a process of its own says the same"
        for (_, message), (code, said) in zip(mistakes, said_of_each, strict=True):
            assert (code, said.count("\n")) == (EXIT_USER_ERROR, 1), said
            assert said.startswith(message)
    file = tmp_path / "of_eight.yaml"
    file.write_text("distributed_type: MULTI_GPU\nnum_processes: 8\n")
    in_backward = ["optim_in_backward=true", "max_grad_norm=null"]
    no_ranks, two_of_one, eight = answers(
        tmp_path / "answers",
        [
            (*FINETUNE, "launch", "--num-processes", "0"),
            (*FINETUNE, "launch", "--num-processes", "2", "--config", "single"),
            (*FINETUNE, "launch", "--recipe", str(recipe), "--config", str(file), *in_backward),
        ],
    )
    assert no_ranks == (2, "--num-processes 0: a run has at least one rank\n")
    code, said = two_of_one
    assert code == 2
    assert "this layout is for one process, but 2 were launched" in said
    code, said = eight
    assert (
        code == 2
        and "num_processes: 8 is not read; 1 rank starts, one for each GPU; --num-processes 8"
        in said
    )


def test_the_launcher_passes_on_exit_codes_and_sets_threads(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, time\n"
        "rank, code = int(os.environ['RANK']), int(sys.argv[1])\n"
        "os.write(1, f'threads {os.environ[\"OMP_NUM_THREADS\"]} rank {rank}\\n'.encode())\n"  # a line in one piece
        "if code == 9: os.kill(os.getpid(), 9) if rank == 1 else time.sleep(60)\n"
        "sys.exit(code if rank == 1 else 0)\n"
    )
    program = (
        "import sys, os; from finetune.run import _launch, count_cores\n"
        "os.environ.pop('OMP_NUM_THREADS')\n"
        f"codes = [_launch(2, None, 'no', [{str(script)!r}, code]) for code in ('0', '2', '75', '1', '7', '9')]\n"
        "print('cores', count_cores(), 'codes', codes, flush=True)\n"
    )
    finished = run_command(("python", "-c", program))
    lines = finished.stdout.splitlines()
    assert lines[-1].endswith("codes [0, 2, 75, 1, 7, 137]"), finished.stderr
    cores = int(lines[-1].split()[1])
    assert sorted(lines[:2]) == [f"threads {max(1, cores // 2)} rank {rank}" for rank in range(2)]
    resumes = "the same command resumes from the last checkpoint, if one was saved"
    assert finished.stderr.splitlines() == [  # the ranks have reported the rest themselves
        f"rank 1 was the first to end, with exit code 7; {resumes}",
        f"rank 1 was the first to end, by SIGKILL (often because the machine ran out of memory); {resumes}",
    ]


def test_the_users_own_default_of_accelerate_is_not_read(tmp_path: Path) -> None:
    """`accelerate config` writes one. Accelerate passes its ranks a layout by these variables, and none is asked for."""
    script = tmp_path / "script.py"
    script.write_text(
        "import json, os\n"
        "given = {k: v for k, v in os.environ.items() if k.startswith(('ACCELERATE_', 'FSDP_'))}\n"
        "given = {k: v for k, v in given.items() if 'DYNAMO' not in k}\n"
        "os.write(1, (json.dumps(given, sort_keys=True) + chr(10)).encode())\n"  # a line in one piece
    )
    program = (
        "import sys; from pathlib import Path; from finetune.run import _launch\n"
        "config = Path(sys.argv[1]) if sys.argv[1] else None\n"
        f"sys.exit(_launch(2, config, 'no', [{str(script)!r}]))\n"
    )
    own = tmp_path / "cache" / "accelerate" / "default_config.yaml"
    own.parent.mkdir(parents=True)
    own.write_text(
        "distributed_type: FSDP\nnum_machines: 2\nmachine_rank: 1\ngpu_ids: '0'\n"
        "fsdp_config: {fsdp_version: 2, fsdp_offload_params: true}\n"
    )
    for config in ("", "deepspeed.json"):  # which the ranks read themselves
        home = ("env", f"HF_HOME={tmp_path / 'cache'}")
        ended = run_command((*home, "python", "-c", program, config))
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout.splitlines() == ['{"ACCELERATE_MIXED_PRECISION": "no"}'] * 2


def test_the_launchers_variables_of_a_shell_are_read_as_the_ranks_read_them(
    tiny_recipe: Callable[..., Path],
) -> None:
    """The launcher passed the precision of a launch without them."""
    given = {"USE_FSDP": "true", "MIXED_PRECISION": "bf16", "USE_CPU": "true"}
    variables = [f"ACCELERATE_{name}={value}" for name, value in given.items()]
    command = ("launch", "--num-processes", "1", "--recipe", str(tiny_recipe()), "--dry-run")
    ended = run_command(("env", "FSDP_VERSION=2", *variables, *FINETUNE, *command))
    assert ended.returncode == 0, ended.stderr
    assert "fsdp2 FULL_SHARD on 1 rank (the launcher's settings)" in ended.stdout
    assert "compute bfloat16" in ended.stdout


def test_a_launch_does_not_wait_for_other_machines(tmp_path: Path) -> None:
    config = tmp_path / "two.yaml"
    config.write_text("distributed_type: MULTI_GPU\nmixed_precision: no\nnum_machines: 2\n")
    command = (*FINETUNE, "launch", "--num-processes", "2", "--config", str(config))
    code, said = answer(*command)
    assert code == EXIT_USER_ERROR
    assert said.startswith(
        f"{config}:3: num_machines: 2: `finetune launch` starts the ranks of one "
    )


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_before_the_ranks_start_ends_the_launcher(name: str) -> None:
    program = (
        "import os, signal, sys; from finetune.run import _forward_to_children\n"
        "with _forward_to_children():\n"
        "    os.kill(os.getpid(), signal.SIGUSR1)\n"  # asks ranks for a save: there is nothing to save
        f"    os.kill(os.getpid(), signal.{name})\n"
        "    sys.exit('swallowed')\n"
    )
    assert run_command(("python", "-c", program)).returncode == 128 + getattr(signal, name)


def test_a_bad_row_is_reported_alone(tmp_path: Path, tiny_recipe: Callable[..., Path]) -> None:
    data = tmp_path / "bad.jsonl"
    data.write_text(
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n{"mess\n'
    )
    recipe = tiny_recipe(datasets=[{"path": str(data)}])
    config = tmp_path / "ddp.yaml"
    config.write_text(
        "distributed_type: MULTI_CPU\nmixed_precision: no\n"
    )  # which YAML reads as false
    given = ["--recipe", str(recipe), "--config", str(config), "--num-processes", "2"]
    finished = run_python(["-m", "finetune", "launch", *given])
    assert finished.returncode == EXIT_USER_ERROR
    assert finished.stderr.count("\n") == 1, finished.stderr
    assert finished.stderr.startswith(f"{data}:2: ")


@pytest.mark.slow
def test_ranks_on_the_cpu_stopped_by_a_signal_and_started_again(
    tmp_path: Path, tiny_recipe: Callable[..., Path]
) -> None:
    recipe = tiny_recipe(max_steps=40)
    command = [
        sys.executable,
        "-m",
        "finetune",
        "launch",
        "--config",
        "fsdp_full_shard",
        "--num-processes",
        "2",
    ]
    command += ["--recipe", str(recipe)]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(),
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and not (
        metrics.exists() and '"loss"' in metrics.read_text()
    ):
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    try:
        stdout, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == EXIT_PREEMPTED, stdout + stderr
    assert "Traceback" not in stderr
    checkpoints = list((tmp_path / "run" / "checkpoints").glob("step-*"))
    assert len(checkpoints) == 1
    stopped_at = int(checkpoints[0].name.removeprefix("step-"))

    assert f"stopped by a signal after step {stopped_at} of 40" in stderr

    finished = run_python(command[1:])
    assert finished.returncode == 0, finished.stderr
    steps = [
        line["step"] for line in map(json.loads, metrics.read_text().splitlines()) if "loss" in line
    ]
    assert steps == list(range(1, 41)), "nothing repeated, nothing lost"


def test_a_mistake_in_an_export_is_reported_at_once(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model, file = tmp_path / "model", tmp_path / "file"
    model.mkdir()
    file.write_text("")
    out = tmp_path / "not" / "yet" / "there"
    mistakes = [
        (
            [str(tmp_path / "gone")],
            out,
            [],
            f"{tmp_path / 'gone'}: no such folder; give a run's folder or a checkpoint",
        ),
        ([str(file)], out, [], f"{file}: a file; give the folder that holds it"),
        ([str(model)], model, [], f"{model}: holds what is exported; choose another --output"),
        ([str(tmp_path / "model")], file, [], f"{file}: exists; choose another --output"),
        (
            [str(model)],
            file,
            ["--overwrite"],
            f"{file}: not an exported model, so --overwrite does not replace it",
        ),
        (
            [str(model)],
            file / "out",
            [],
            f"{file / 'out'}: cannot be written: Not a directory; choose another --output",
        ),
        ([str(model)], Path("/proc/out"), [], "/proc/out: cannot be written: "),
        (
            [str(model)],
            out,
            ["--max-shard-size", "lots"],
            "--max-shard-size: lots: not a size; write a number",
        ),
        ([str(model)], out, ["--max-shard-size", "0GB"], "--max-shard-size: 0GB: not a size"),
    ]
    exports = [
        (*FINETUNE, "export", *source, "--output", str(output), *options)
        for source, output, options, _ in mistakes
    ]
    exports.append((*FINETUNE, "export", str(model), "--output", str(out), "--dtype", "float8"))
    *said_of_each, (code_of_dtype, said_of_dtype) = answers(
        tmp_path_factory.mktemp("answers"), exports
    )
    for (*_, message), (code, said) in zip(mistakes, said_of_each, strict=True):
        assert (code, said.count("\n")) == (EXIT_USER_ERROR, 1), said
        assert said.startswith(message)
    code, said = code_of_dtype, said_of_dtype
    assert code == EXIT_USER_ERROR
    assert "--dtype: invalid choice: 'float8'" in said
    assert sorted(tmp_path.iterdir()) == [file, model]


@pytest.mark.parametrize("command", ["report", "convert", "chat", "checkpoints"])
def test_a_name_too_long_for_a_file_is_one_sentence(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "x" * 300]) == 2
    assert (
        capsys.readouterr().err == f"{'x' * 60}...: too long for a file's name; name another file\n"
    )
