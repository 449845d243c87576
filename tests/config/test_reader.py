"""What the reader says of every kind of mistake: the file, the line, the key, what was meant, what to do."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from finetune.config.accelerate_file import read_sharding
from finetune.config.keys import keys_of
from finetune.config.reader import RECIPES, add_hints, read_recipe, to_dict, write_recipe
from finetune.config.schema import DatasetSource, recipe_keys
from finetune.convert import hints
from finetune.errors import UserError
from finetune.training.callbacks import list_trackers

add_hints(hints)  # as each command does

GOOD = "model_name_or_path: some/model\ndatasets:\n  - path: some/data\n"


@pytest.fixture
def problems(tmp_path: Path) -> Callable[..., list[str]]:
    """What is wrong with a recipe of this text: the lines of the error, the file named F; [] where nothing is."""

    def read(text: str | bytes, *overrides: str) -> list[str]:
        file = tmp_path / "r.yaml"
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        try:
            read_recipe(str(file), overrides)
        except UserError as error:
            return str(error).replace(str(file), "F").splitlines()
        return []

    return read


def test_a_good_recipe_is_read_in_the_types_of_the_schema(tmp_path: Path) -> None:
    file = tmp_path / "math.yaml"
    file.write_text(
        GOOD
        + "learning_rate: 2e-5\nmax_steps: 1_000\nuse_peft: true\nlora_target_modules: [q_proj, v_proj]\nseed: 0x10\n"
    )
    recipe = read_recipe(str(file))
    assert recipe.optimization.learning_rate == 2e-5
    assert recipe.optimization.max_steps == 1000
    assert recipe.lora.lora_target_modules == ("q_proj", "v_proj")
    assert recipe.run.seed == 16
    assert recipe.data.datasets[0].path == "some/data"
    assert recipe.places.keys() == {
        "model_name_or_path",
        "datasets",
        "learning_rate",
        "max_steps",
        "lora_target_modules",
        "use_peft",
        "seed",
    }


def test_the_command_line_wins_over_the_file_and_the_file_over_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text(GOOD + "seed: 1\nmax_steps: 5\n")
    recipe = read_recipe(
        str(file), ["seed=2", "--max_grad_norm=null", "datasets=[{path: a/b, weight: 0.5}]"]
    )
    assert (recipe.run.seed, recipe.optimization.max_steps, recipe.run.logging_steps) == (2, 5, 10)
    assert recipe.optimization.max_grad_norm is None
    assert (recipe.data.datasets[0].path, recipe.data.datasets[0].weight) == ("a/b", 0.5)


def test_forms_that_peers_take_are_read(tmp_path: Path) -> None:
    recipe = read_recipe(
        None, ["model_name_or_path=a/b", "datasets=[{path: a/b}]", "resume_from_checkpoint=true"]
    )
    assert recipe.checkpoint.resume_from_checkpoint == "auto"
    for written, expected in (
        ("[wandb]", ("wandb",)),
        ("[wandb, mlflow]", ("wandb", "mlflow")),
        ("[]", ()),
        ("none", ()),
    ):
        read = read_recipe(
            None, ["model_name_or_path=a/b", "datasets=[{path: a/b}]", f"report_to={written}"]
        )
        assert list_trackers(read.run.report_to) == expected
        write_recipe(read, tmp_path / "again.yaml")
        assert list_trackers(read_recipe(str(tmp_path / "again.yaml")).run.report_to) == expected
    assert "tensorboard" in list_trackers("all"), "which the tests have installed"


def test_what_is_written_reads_back_as_the_same(tmp_path: Path) -> None:
    recipe = read_recipe("quickstart", ["chat_template='{{ x }}\n- é'", "learning_rate=1e-7"])
    write_recipe(recipe, tmp_path / "again.yaml")
    assert to_dict(read_recipe(str(tmp_path / "again.yaml"))) == to_dict(recipe)


def test_a_checkpoint_as_the_model_is_its_model_folder(tmp_path: Path) -> None:
    checkpoint = tmp_path / "step-00000100"
    (checkpoint / "model").mkdir(parents=True)
    for name in ("manifest.json", "model/config.json"):
        (checkpoint / name).write_text("{}")
    recipe = read_recipe(None, [f"model_name_or_path={checkpoint}", "datasets=[{path: a/b}]"])
    assert recipe.model.model_name_or_path == str(checkpoint / "model")


FOLDERS = (
    "output_dir: PATH\n",
    "optim_offload: nvme\noffload_dir: PATH\n",
    "dataset_cache_dir: PATH\n",
    "resume_from_checkpoint: PATH\n",
    "eval_datasets:\n  - path: some/data\n    image_folder: PATH\n",
)


@pytest.mark.parametrize("text", FOLDERS, ids=range(len(FOLDERS)))
def test_a_folder_is_one_of_this_machine_and_home_is_meant_by_a_tilde(
    text: str, tmp_path: Path, problems: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    file = tmp_path / "folder.yaml"
    file.write_text(GOOD + text.replace("PATH", "~/a run"))
    read = json.dumps(to_dict(read_recipe(str(file))))
    assert '"/home/someone/a run"' in read and "~" not in read
    (problem,) = problems(GOOD + text.replace("PATH", "s3://bucket/a"))
    assert "s3://bucket/a: a URL; name a folder of this machine" in problem


def test_every_key_of_a_folder_is_among_them() -> None:
    """A key that is one by its name, or is marked as one."""
    every = {**recipe_keys(), **keys_of(DatasetSource)}
    folders = {name for name, key in every.items() if key.is_local_folder}
    assert folders >= {name for name in every if name.endswith(("_dir", "_folder"))}
    assert all(any(f"{name}: PATH" in text for text in FOLDERS) for name in folders)


def test_the_home_of_nobody_is_no_traceback(problems: Callable[..., list[str]]) -> None:
    (problem,) = problems(GOOD.replace("some/model", "~nobody-here/m"))
    assert "~nobody-here/m: no such file or folder" in problem


def test_a_file_is_looked_for_here_and_beside_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "a.jsonl").touch()
    (tmp_path / "b.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    recipe = tmp_path / "beside" / "r.yaml"
    recipe.write_text(
        "model_name_or_path: m\ndatasets: [{path: a.jsonl}, {path: b.jsonl}, {path: '*.jsonl'}, {path: ~/b.jsonl}]"
    )
    assert [source.path for source in read_recipe(str(recipe)).data.datasets] == [
        str(tmp_path / "beside" / "a.jsonl"),
        "b.jsonl",
        "*.jsonl",
        str(tmp_path / "b.jsonl"),
    ]


def test_a_folder_takes_the_place_of_no_template_and_no_accelerate_file(tmp_path: Path) -> None:
    for name in ("alpaca", "ddp"):
        (tmp_path / name).mkdir()
    recipe = tmp_path / "r.yaml"
    recipe.write_text(GOOD + "chat_template: alpaca\naccelerate_config: ddp\n")
    read = read_recipe(str(recipe))
    assert (read.data.chat_template, read.run.accelerate_config) == ("alpaca", "ddp")


MISTAKES = {
    # text after GOOD (three lines), or the whole where it starts with "!" -> what is said
    "learning_rat: 1": ["F:4: learning_rat: no such key; did you mean learning_rate?"],
    "max_samples: 5": [
        "F:4: max_samples: a key of each entry of datasets; write it there, as in datasets=[{path: ..., max_samples: ...}]"
    ],
    "torch_compile: true\nactivation_checkpointing_keeps: attention\nactivation_offload: true": [
        "F:6: activation_offload: of compiled layers only the inputs are offloaded, not what activation_checkpointing_keeps "
        "names; remove one of them, or torch_compile"
    ],
    "chat_template_date: today": [
        "F:4: chat_template_date: today: not a date; use the form 2026-01-31"
    ],
    "profile_steps: [3]": [
        "F:4: profile_steps: [3] does not fit; a list with one more entry is expected"
    ],
    "peft_type: LORA": [
        "F:4: peft_type: peft's name; use_peft: true trains LoRA adapters, with oft_block_size OFT's rotations"
    ],
    "max_tokens: 9": ["F:4: max_tokens: no such key; max_length is the number of tokens in a row"],
    "batch_size: 8": [
        "F:4: batch_size: torchtune's and Axolotl's name; per_device_train_batch_size is the rows of a micro-batch, "
        "global_batch_size those of a step"
    ],
    "load_best_model_at_end: true": [
        "F:4: load_best_model_at_end: Transformers' name; here it is keep_best_checkpoint, with eval_steps"
    ],
    "train_on_responses_only: true": [
        "F:4: train_on_responses_only: Unsloth's name; here it is assistant_only_loss, true by default"
    ],
    "num_gpus: 2": [
        "F:4: num_gpus: no such key; --num-processes N says how many ranks run on this machine"
    ],
    "nproc: 2": [
        "F:4: nproc: no such key; --num-processes N says how many ranks run on this machine"
    ],
    "warmup_steps: 0.1": [
        "F:4: warmup_steps: 0.1: a number of steps is expected; a share of them is warmup_ratio: 0.1"
    ],
    "temperature: 0": [
        "F:4: temperature: 0: the likeliest token alone gives nothing to compare; set 1, or less, such as 0.5"
    ],
    "loss_type: dappo": [
        "F:4: loss_type: dappo: no such loss; there are sigmoid, hinge, ipo, apo_zero for method: dpo; grpo, dapo, dr_grpo, "
        "cispo, rloo, reinforce++, dppo for method: grpo; dapo, grpo for method: ppo; grpo, dapo, dr_grpo, cispo, reinforce++, dppo for method: on_policy_distill; "
        "pointwise, pairwise, listwise, listnet for method: rerank"
    ],
    "resume_from_checkpoint: false": [
        "F:4: resume_from_checkpoint: false: write none to start over, or auto to resume where there is a checkpoint"
    ],
    "ep_size: 2": ["F:4: ep_size: no such key; here it is expert_parallel_size"],
    "sequence_parallel_size: 2": [
        "F:4: sequence_parallel_size: no such key; write parallelism_config_sp_size in a copy of the Accelerate file"
    ],
    "tp_config: {size: 2}": [
        "F:4: tp_config: no such key; write parallelism_config_tp_size in a copy of the Accelerate file"
    ],
    "cpu_offload: true": [
        "F:4: cpu_offload: no such key; write fsdp_offload_params in a copy of the Accelerate file"
    ],
    "zzz: 1": [
        "F:4: zzz: no such key; they are listed in docs/recipes.md in a clone of the repository"
    ],
    "sequence_len: 9": ["F:4: sequence_len: Axolotl's name; here it is max_length"],
    "max_prompt_length: 9": [
        "F:4: max_prompt_length: TRL's name; no such key: max_length bounds prompt and answer together here, and cuts the end; "
        "a longer prompt loses its beginning there"
    ],
    "method: ipo": [
        "F:4: method: ipo: another tool's name; here it is method: dpo with loss_type: ipo"
    ],
    "mixed_precision: bf16": [
        "F:4: mixed_precision: Accelerate's key; it belongs in the Accelerate file that accelerate_config or --config names"
    ],
    "seed: 1\nseed: 2": ["F:5: seed: given twice, first at line 4; keep one"],
    "max_length: 1000000000000": [
        "F:4: max_length: 1000000000000 does not fit; a number of at most 1e+09 is expected"
    ],
    'max_steps: "8"': [
        'F:4: max_steps: "8" does not fit; a whole number is expected; in quotes it is text: write 8'
    ],
    "max_steps: 0": ["F:4: max_steps: 0 does not fit; a number above 0, or -1, is expected"],
    "max_steps: 1e9": [
        "F:4: max_steps: 1000000000.0 does not fit; a whole number is expected; write 1000000000"
    ],
    "max_steps: 1.5": ["F:4: max_steps: 1.5 does not fit; a whole number is expected"],
    "eval_datasets: [{path: a/b, weight: 1e300}]": [
        "F:4: weight: 1e+300 does not fit; a number of at most 100000 is expected"
    ],
    "learning_rate: fast": ['F:4: learning_rate: "fast" does not fit; a number is expected'],
    "learning_rate: nan": ["F:4: learning_rate: nan does not fit; a finite number is expected"],
    "learning_rate: .nan": ["F:4: learning_rate: NaN does not fit; a finite number is expected"],
    "learning_rate: .inf": [
        "F:4: learning_rate: Infinity does not fit; a finite number is expected"
    ],
    "learning_rate: -1e-5": [
        "F:4: learning_rate: -1e-05 does not fit; a number above 0 is expected"
    ],
    "lora_dropout: 1": ["F:4: lora_dropout: 1 does not fit; a number below 1 is expected"],
    "packing: 1": ["F:4: packing: 1 does not fit; true or false is expected"],
    'packing: "True"': [
        'F:4: packing: "True" does not fit; true or false is expected; in quotes it is text: write true'
    ],
    "overlength: truncat": [
        'F:4: overlength: "truncat" does not fit; one of truncate, drop, split, error is expected; did you mean truncate?'
    ],
    "run_name: [a]": ['F:4: run_name: ["a"] does not fit; text is expected'],
    "eval_datasets: some/data": [
        "F:4: eval_datasets: a list of sources is expected; write [{path: some/data}]"
    ],
    "eval_datasets: {path: some/data}": [
        'F:4: eval_datasets: a list of sources is expected; write [{"path": "some/data"}]'
    ],
    "eval_datasets: {math: a/b, code: {path: c/d}}": [
        'F:4: eval_datasets: a list of sources is expected; write [{path: a/b}, {"path": "c/d"}]'
    ],
    "max_grad_norm: 0": ["F:4: max_grad_norm: 0: write null, and gradients are not clipped"],
    "report_to: 'wandb, tensorboard'": [
        'F:4: report_to: "wandb, tensorboard" does not fit; one of none, all, tensorboard, wandb, mlflow, trackio or a list is '
        "expected; write [wandb, tensorboard]"
    ],
    "report_to: comet_ml": [
        'F:4: report_to: "comet_ml" does not fit; one of none, all, tensorboard, wandb, mlflow, trackio or a list is expected'
    ],
    "dataset_name: some/data": [
        "F:4: dataset_name: TRL's name; here it is datasets: [{path: FILE_OR_NAME}]"
    ],
    "train_file: data.jsonl": [
        "F:4: train_file: no such key; here it is datasets: [{path: FILE_OR_NAME}]"
    ],
    "packing: 'yes'": [
        'F:4: packing: "yes" does not fit; true or false is expected; in quotes it is text: write true'
    ],
    "rewards: exact_answer": [
        'F:4: rewards: "exact_answer" does not fit; a list is expected; write [exact_answer]'
    ],
    "use_peft: true\nlora_target_modules: q_proj,v_proj": [
        'F:5: lora_target_modules: "q_proj,v_proj" does not fit; one of all-linear or a list is expected; write [q_proj, '
        "v_proj]"
    ],
    "use_lora: true": [
        "F:4: use_lora: no such key; use_peft: true trains LoRA adapters, with load_in_4bit: true on a base in 4 bits "
        "(QLoRA)"
    ],
    "per_device_batch_size: 4": [
        "F:4: per_device_batch_size: no such key; here it is per_device_train_batch_size"
    ],
    "r: 16": ["F:4: r: no such key; here it is lora_r"],
    "method: rlhf": ["F:4: method: rlhf: another tool's name; here it is method: ppo"],
    "method: qlora": [
        "F:4: method: qlora: another tool's name; here it is use_peft: true with load_in_4bit: true, of every method"
    ],
    **{
        f"{name}: true": [
            f"F:4: {name}: no such key; accelerate_config: fsdp_full_shard_auto recomputes activations, or under DDP "
            "ddp_checkpointing; in an Accelerate file of your own it is fsdp_activation_checkpointing: true"
        ]
        for name in ("gradient_checkpointing", "use_gradient_checkpointing")
    },
    "eval_datasets: [some/data]": [
        "F:4: eval_datasets: each entry is a mapping with at least a path, such as `- path: data.jsonl`"
    ],
    "eval_datasets:\n  - split: test": [
        "F:5: eval_datasets: an entry without a path; name its file, folder or hub name"
    ],
    "eval_datasets:\n  - path: a/b\n    wieght: 2": [
        "F:6: wieght: no such key; did you mean weight?"
    ],
    "eval_datasets:\n  - path: a/b\n    path: c/d": ["F:6: path: given twice; keep one"],
    "eval_datasets:\n  - path: data/missing.jsonl": [
        "F:5: path: data/missing.jsonl: no such file or folder, here or in the recipe's folder"
    ],
    "tokenizer_name_or_path: ./missing": [
        "F:4: tokenizer_name_or_path: ./missing: no such file or folder, here or in the recipe's folder"
    ],
    "streaming: true": ["F:4: streaming has no known end; set max_steps"],
    "streaming: true\nmax_steps: 1\neval_split_size: 0.1": [
        "F:6: eval_split_size cannot be combined with streaming: no rows are held out of a stream; eval_datasets can "
        "name some; remove eval_split_size, or remove streaming"
    ],
    "use_dora: true": [
        "F:4: use_dora has no effect without use_peft: true; set it, or remove use_dora"
    ],
    "lora_r: 8": ["F:4: lora_r has no effect without use_peft: true; set it, or remove lora_r"],
    "load_in_4bit: true": [
        "F:4: load_in_4bit: a quantized base is frozen, so it cannot be fine-tuned in full; set use_peft: true, or remove "
        "load_in_4bit"
    ],
    "use_peft: true\nload_in_4bit: true\nload_in_8bit: true": [
        "F:6: load_in_8bit cannot be combined with load_in_4bit: both say how the base is kept; remove load_in_8bit, or "
        "remove load_in_4bit"
    ],
    "use_peft: true\nload_in_8bit: true\nbnb_4bit_use_double_quant: true": [
        "F:6: bnb_4bit_use_double_quant has no effect without load_in_4bit: true; set it, or remove "
        "bnb_4bit_use_double_quant"
    ],
    "model_config: {model_type: llama}": [
        "F:4: model_name_or_path and model_config both name a model; keep one",
        "F:4: model_config brings no tokenizer; set tokenizer_name_or_path",
    ],
    "use_peft: true\nmodel_config: {model_type: llama}": [
        "F:5: model_name_or_path and model_config both name a model; keep one",
        "F:5: model_config brings no tokenizer; set tokenizer_name_or_path",
        "F:4: use_peft adapts a trained model, but model_config starts from random weights; set model_name_or_path",
    ],
    "drop_vision: true\nuse_peft: true": [
        "F:4: drop_vision cannot be combined with use_peft: adapters are opened on the checkpoint, whose own class has "
        "other names for their layers; remove drop_vision, or remove use_peft"
    ],
    "use_peft: true\nadapters: [{name: 1, lora_r: 4}, {name: two}]": [
        "F:5: adapters: name: 1 does not fit; each adapter needs a name of its own, a text of letters, digits, - and _, "
        "which is that of its folder"
    ],
    "tokenizer_name_or_path: ''": [
        "F:4: tokenizer_name_or_path: empty text names no file and no folder; name one, or remove the key"
    ],
    "eval_datasets: [{path: ''}]": [
        "F:4: path: empty text names no file and no folder; name one, or remove the key"
    ],
    "resume_from_checkpoint: ''": [
        'F:4: resume_from_checkpoint: "" does not fit; a file\'s name is expected'
    ],
    "timeout_seconds: 1e10": [
        "F:4: timeout_seconds: 10000000000.0 does not fit; a number of at most 1e+09 is expected"
    ],
    'run_name: "a\\0b"': [
        "F:4: run_name: holds a NUL character, which no text and no name has; remove it"
    ],
    'sample_prompts: ["a", "a\\0b"]': [
        "F:4: sample_prompts: holds a NUL character, which no text and no name has; remove it"
    ],
    "train_mtp: true": [
        "F:4: train_mtp: no model class of transformers has layers for multi-token prediction, and its MtpModel, which "
        "drafts with them, computes no loss; remove it; an export carries over those of the base"
    ],
    "eval_datasets: [{path: a/b}]\neval_split_size: 0.1": [
        "F:5: eval_split_size cannot be combined with eval_datasets: both name the held-out rows; remove eval_split_size, "
        "or remove eval_datasets"
    ],
    "seed: &a 1\nlogging_steps: *a": [
        "F:5: not YAML: aliases (*name) are not read here; write the value out"
    ],
    "seed: !!python/object:os.system 1": [
        "F:4: seed: could not determine a constructor for the tag 'tag:yaml.org,2002:python/object:os.system'"
    ],
    "seed: !!int abc": ["F:4: seed: invalid literal for int() with base 10: 'abc'"],
    "seed: [1": ["F:4: not YAML: expected ',' or ']', but got '<stream end>'"],
    "!model_config: {hidden_size: 8}\ntokenizer_name_or_path: a/b\ndatasets: [{path: a/b}]": [
        "F:1: model_config: model_type is missing; for example model_type: llama"
    ],
    "!model_config:\n  model_type: llama\n  model_type: llama\ntokenizer_name_or_path: a/b\ndatasets: [{path: a/b}]": [
        "F:3: model_type: given twice; keep one"
    ],
    "!": [
        "F: no model; set model_name_or_path (a hub name or folder) or model_config (an architecture)",
        "F: no data; set datasets, a list with at least `- path: FILE`",
    ],
    "!- a\n- b": ["F: a file of `key: value` lines is expected"],
    "!just text": ["F: a file of `key: value` lines is expected"],
    "!distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}": [
        "F: this is an Accelerate config; pass it as --config, and a recipe as --recipe"
    ],
}


@pytest.mark.parametrize(("text", "said"), MISTAKES.items(), ids=range(len(MISTAKES)))
def test_a_mistake_is_told_in_one_sentence(
    text: str, said: list[str], problems: Callable[..., list[str]]
) -> None:
    assert problems(text[1:] if text.startswith("!") else GOOD + text) == said


@pytest.mark.parametrize(
    ("override", "said"),
    {
        "learning_rat=1": ["command line: learning_rat: no such key; did you mean learning_rate?"],
        "max_steps": [
            "command line: max_steps: an override is written key=value; --recipe names a recipe, --config an Accelerate config"
        ],
        "max_steps=soon": [
            'command line: max_steps: "soon" does not fit; a whole number is expected'
        ],
        "datasets=[{path: a/b, wieght: 1}]": [
            "command line: wieght: no such key; did you mean weight?"
        ],
        "seed=[1": [
            "command line: seed: not a YAML value: expected ',' or ']', but got '<stream end>'"
        ],
    }.items(),
)
def test_so_is_one_on_the_command_line(
    override: str, said: list[str], problems: Callable[..., list[str]]
) -> None:
    assert problems(GOOD, override) == said


def test_all_mistakes_are_told_at_once_and_none_twice(problems: Callable[..., list[str]]) -> None:
    text = "base_model: some/model\ndataset: [{path: a/b}]\nlearning_rate: fast\nseed: -1\n"
    assert problems(text, "packing=maybe") == [
        "F:1: base_model: Axolotl's name; here it is model_name_or_path",
        "F:2: dataset: LLaMA-Factory's and torchtune's name; here it is datasets: [{path: FILE_OR_NAME}] (each name is looked "
        "up in dataset_info.json, in the folder dataset_dir)",
        'F:3: learning_rate: "fast" does not fit; a number is expected',
        "F:4: seed: -1 does not fit; a number of at least 0 is expected",
        'command line: packing: "maybe" does not fit; true or false is expected',
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"seed: \xff\xfe", "F: not text in UTF-8 (byte 6); save it as UTF-8"),
        (b"seed: \x00", "F: not YAML: "),
        (b"a: " + b"[" * 5000, "F: nested too deep to be read"),
        (b"seed: " + b"9" * 5000, "F:1: seed: "),
        (b"# a" * 2**17, "F: more than 256 KiB of YAML; name a folder or a glob of files instead"),
        (b"? [a, b]\n: c", "F:1: "),
        (b"- \t\n ]:", "F:"),
    ],
)
def test_a_hostile_file_is_told_in_a_sentence_too(
    text: bytes, said: str, problems: Callable[..., list[str]]
) -> None:
    assert problems(text)[0].startswith(said)


def test_a_byte_order_mark_is_not_part_of_the_first_key(problems: Callable[..., list[str]]) -> None:
    assert problems(b"\xef\xbb\xbf" + GOOD.encode()) == []


def test_a_recipe_that_is_not_there_is_looked_for_among_the_shipped_ones() -> None:
    with pytest.raises(
        UserError,
        match=r"^llama31_8b_ful: no such recipe; did you mean llama31_8b_full\? give a path",
    ):
        read_recipe("llama31_8b_ful")
    assert Path(read_recipe("quickstart.yaml").path).resolve() == RECIPES / "quickstart.yaml"


def test_a_folder_is_no_recipe(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=rf"^{tmp_path}: a folder, not a recipe; name the recipe's file$"
    ):
        read_recipe(str(tmp_path))
    (tmp_path / "recipe.yaml").touch()
    with pytest.raises(
        UserError,
        match=rf"^{tmp_path}: a folder, not a recipe; did you mean {tmp_path}/recipe.yaml\?$",
    ):
        read_recipe(str(tmp_path))
    with pytest.raises(UserError, match=rf"^{tmp_path}: a folder, not an Accelerate config; name"):
        read_sharding(str(tmp_path), None, {})
    with pytest.raises(
        UserError, match=r"^the name of an Accelerate config is empty; give a path, or a name of"
    ):
        read_sharding("", None, {})


@pytest.mark.parametrize("ending", ["\n", ""])
def test_an_inline_chat_template_is_no_path(
    problems: Callable[..., list[str]], ending: str
) -> None:
    template = "{% for m in messages %}{{ m['role'] + m['content'] }}{% endfor %}" * 5 + ending
    assert len(template) > 255 and problems(GOOD + f"chat_template: {json.dumps(template)}\n") == []


def test_text_that_spells_a_nul_is_no_nul() -> None:
    sampled = read_recipe("quickstart", [r"sample_prompts=['C:\x00']"]).run.sample_prompts
    assert sampled == (r"C:\x00",)
