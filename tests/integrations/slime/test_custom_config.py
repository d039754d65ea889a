"""Tests ``rl-accel slime-config``: the file that it writes turns features on, and errors in a file are named."""

import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from omegaconf import OmegaConf

from rl_accel.errors import ConfigError
from rl_accel.integrations.slime import custom_config, hooks
from rl_accel.integrations.slime.launch_line import FINE_TUNING, SCRIPT, read_flags, words_of_flags

LINE = "python3 train.py --rollout-batch-size 8 --num-rollout 3 --hf-checkpoint m --actor-num-gpus-per-node 1 --num-layers 2"


@pytest.fixture
def check(tmp_path):
    """``check(content, slime_root=None)`` returns the warnings about a file of this content."""

    def checked(content, slime_root=None, line=None):
        (tmp_path / "x.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(content)))
        return custom_config.check(tmp_path / "x.yaml", slime_root, line)

    return checked


def test_the_file_holds_the_paths_that_its_features_need(check):
    content = custom_config.make(["gae", "tail_batching"], {"tail_batching": {"prompt_ratio": 1.5}})
    assert content["custom_megatron_init_path"] == "rl_accel.integrations.slime.hooks.megatron_init"
    assert content["data_source_path"] == "rl_accel.integrations.slime.hooks.data_source"
    assert content.keys() == {"custom_megatron_init_path", "data_source_path", "rl_accel"}, "the line keeps the rest"
    assert content["rl_accel"] == {"gae": {"enable": True}, "tail_batching": {"enable": True, "prompt_ratio": 1.5}}
    assert check(content) == []
    assert "data_source_path" not in custom_config.make(["advantages"], {})


def test_every_path_can_be_imported_as_slime_does(slime_root):
    from slime.utils.misc import load_function

    for paths in (custom_config.make(custom_config.SLIME_ARGUMENTS, {}), *custom_config.SLIME_ARGUMENTS.values()):
        for path in [path for key, path in paths.items() if key.endswith("_path")]:
            assert all(callable(load_function(each)) for each in (path if isinstance(path, list) else [path]))


def test_drafts_are_sglangs_own(check):
    content = custom_config.make(["drafts"], {"drafts": {"max_tokens": 5}})
    assert (content["sglang_speculative_algorithm"], content["sglang_speculative_num_draft_tokens"]) == ("NGRAM", 6)
    assert check(content) == []
    with pytest.raises(ConfigError, match="drafts wants sglang_speculative_num_draft_tokens: 6, found 9"):
        check({**content, "sglang_speculative_num_draft_tokens": 9})
    with pytest.raises(ConfigError, match=r"rl_accel\.drafts\.batch_limit wants 32 on slime, found 4"):
        custom_config.make(["drafts"], {"drafts": {"batch_limit": 4}})


def test_arguments_of_sglang_are_looked_up_in_the_installed_version(slime_root, check):
    pytest.importorskip("sglang", reason="sglang, whose arguments are looked up, is absent")
    content = custom_config.make(["drafts"], {})
    assert check(content, slime_root) == []
    (warning,) = check({**content, "sglang_speculative_ngram_min_bfs_bredth": 1}, slime_root)
    assert "did you mean sglang_speculative_ngram_min_bfs_breadth?" in warning


def test_an_unknown_feature_is_named():
    with pytest.raises(ConfigError, match=r"unknown feature 'gea' \(did you mean gae\?\)"):
        custom_config.make(["gea"], {})
    known = "sampler, gae, advantages, stall, tail_batching, reward_timeout, drafts"
    with pytest.raises(ConfigError, match=f"telemetry has no part for slime; there are {known}"):
        custom_config.make(["telemetry"], {})


@pytest.mark.parametrize(
    ("feature", "settings", "message"),
    [
        ("gae", {"backend": "nunba"}, "gae.backend .*found 'nunba'"),
        ("gae", {"chunks": 3}, r"unknown key rl_accel\.gae\.chunks"),
        ("tail_batching", {"prompt_ration": 1.5}, r"unknown key rl_accel\.tail_batching\.prompt_ration"),
        ("reward_timeout", {"minimum": 40, "maximum": 30}, "timeout: maximum must be at least minimum = 40, found 30"),
        ("sampler", {"max_delay_s": 0.5}, r"rl_accel\.sampler\.max_delay_s wants 0\.02 on slime, found 0\.5"),
    ],
)
def test_wrong_settings_are_refused_as_a_file_is_made_checked_and_used(check, arguments_of, feature, settings, message):
    with pytest.raises(ConfigError, match=message):
        custom_config.make([feature], {feature: settings})
    content = custom_config.make([feature], {})
    content["rl_accel"][feature].update(settings)
    for use in (check, lambda content: hooks.megatron_init(arguments_of(**content))):
        with pytest.raises(ConfigError, match=message):
            use(content)


@pytest.mark.parametrize(
    ("feature", "change", "message"),
    [
        ("tail_batching", {"data_source_path": None}, r"tail_batching wants data_source_path: rl_accel.*, found None"),
        ("tail_batching", {"rl_accel": None, "rl_acel": {}}, "has no rl_accel section; is rl_acel meant for it"),
        ("sampler", {"data_source_path": "my.Source"}, r"sampler wants data_source_path: rl_.*found my\.Source"),
        ("gae", {"custom_megatron_init_path": "my.init"}, r"gae wants custom_megatron_init_path: rl_.*found my\.init"),
        ("tail_batching", {"partial_rollout": True}, "--partial-rollout = unset"),
        ("tail_batching", {"rollout_function_path": "my.own"}, "--rollout-function-path = unset"),
    ],
)
def test_errors_that_slime_would_take_without_a_word_are_found(check, feature, change, message):
    content = custom_config.make([feature], {})
    assert check(content) == []
    with pytest.raises(ConfigError, match=message):
        check({key: value for key, value in {**content, **change}.items() if value is not None})


def test_other_keys_are_looked_up_in_the_checkout(check, tmp_path):
    arguments = tmp_path / "slime" / "utils" / "arguments.py"
    arguments.parent.mkdir(parents=True)
    arguments.write_text('add("--rollout-function-path")\nadd("--rollout-batch-size", type=int)\n')
    content = {"rollout_batch_sise": 3, "rollout_batch_size": 3, "rl_accel": {}}
    assert check(content, tmp_path) == [
        "rollout_batch_sise is no flag of slime's own (did you mean rollout_batch_size?); slime sets it all the same"
    ]
    with pytest.raises(ConfigError, match="SLIME_ROOT wants a checkout of slime, found '/nowhere'"):
        check(content, Path("/nowhere"))


def test_a_file_is_read_as_slime_reads_it_and_no_feature_of_the_command_is_lost(tmp_path, invoke):
    file, hook = tmp_path / "x.yaml", "data_source_path: rl_accel.integrations.slime.hooks.data_source\n"
    file.write_text(f"{hook}note: at ${{now}}\ncommon: &on {{enable: true}}\nrl_accel: {{sampler: *on}}\n")
    assert len(custom_config.check(file)) == 0
    file.write_text(f"{hook}rl_accel: {{reward_timeout: {{enable: true, slack: 1e-1}}}}\n")
    with pytest.raises(ConfigError, match=r"slack wants float, found '1e-1' \(str\)"):  # also what the run would say
        custom_config.check(file)
    file.write_text(f"{hook}{hook}rl_accel: {{}}\n")
    with pytest.raises(ConfigError, match="found duplicate key data_source_path"):
        custom_config.check(file)
    written = invoke(custom_config.slime_config, "--enable", "gae", "--enable", "sampler,drafts")
    assert {*OmegaConf.create(written).rl_accel} == {"gae", "sampler", "drafts"}


def test_a_file_that_is_no_mapping_or_not_there_is_named(check, tmp_path):
    with pytest.raises(ConfigError, match="wants a mapping of slime's arguments, found list"):
        check([1])
    with pytest.raises(ConfigError, match="is not a readable YAML file"):
        custom_config.check(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("feature", "words", "code", "says"),
    [
        (
            "reward_timeout",
            "--custom-rm-path slime_test_plugins.score",
            0,
            "score is now rl_accel.reward_timeout.grader",
        ),
        ("reward_timeout", "--custom-rm-path my.rm", 1, "wants grader = a function that can be imported, found my.rm"),
        ("tail_batching", "", 1, "tail_batching wants --prompt-data = a data set, found None"),
        ("sampler", "", 0, "sampler has nothing to do here: slime aborts no request without"),
        ("drafts", "--debug-train-only", 0, "drafts has nothing to do here: --debug-train-only generates nothing"),
        ("gae", "", 0, "gae has nothing to do"),
        ("gae", "--advantage-estimator ppo --custom-megatron-init-path my.init", 0, "my.init is called after ours"),
        ("reward_timeout", "--custom-config-path my.yaml", 1, "found my.yaml and rl_accel.yaml: put their keys in"),
        ("drafts", "--sglang-speculative-algorithm EAGLE", 1, "--sglang-speculative-algorithm = NGRAM, found EAGLE"),
        ("tail_batching", "--over-sampling-batch-size 16", 1, "--over-sampling-batch-size = unset, found 16"),
        ("tail_batching", "--over-sampling-batch-size 4", 1, "found 4"),
        ("gae", "--over-sampling-batch-size 4", 1, "train.py itself stops: AssertionError.*greater than or equal to"),
        ("gae", "--rollout-batch-size eight", 2, "invalid int value: 'eight'"),
        ("gae", "--rollout-max-respons-len 8", 0, "max-respons-len is no .*mean --rollout-max-response-len.*skips"),
        ("gae", "--sglang-mem-fraction-statc=0.5", 0, "fraction-statc is no .*mean --sglang-mem-fraction-static"),
        ("gae", "--megatron-config-path roles.yaml", 0, "my.init of the critic in roles.yaml must call rl_accel"),
        ("gae", "--megatron-config-path none.yaml", 1, "train.py itself stops: none.yaml: FileNotFound"),
        ("sampler", "--over-sampling-batch-size 9 --megatron-config-path roles.yaml", 0, ""),
        ("gae", "--Rm-Type math", 0, "--Rm-Type is no .*mean --rm-type.*skips"),
        ("gae", "--rm_type math", 0, "--rm_type is no .*mean --rm-type.*skips"),
        ("gae", "\N{EN DASH}rm-type math", 0, "rm-type is no .*mean --rm-type.*skips"),
        ("gae", "--advantage-estimator ppo", 0, ""),
        ("gae", "--advantage-estimator ppo --custom-config-path ./rl_accel.yaml", 0, ""),
        ("gae", "--advantage-estimator ppo --custom-config-path $NOT_SET/rl_accel.yaml", 0, ""),
        ("tail_batching", "--partial-rollout --prompt-data data.py", 1, "--partial-rollout = unset"),
    ],
)
@pytest.mark.slow
def test_a_launch_line_is_read_by_slimes_own_parser(slime_root, tmp_path, monkeypatch, feature, words, code, says):
    pytest.importorskip("sglang", reason="sglang, which slime's parser imports, is absent")
    monkeypatch.chdir(tmp_path)
    Path("rl_accel.yaml").write_text(OmegaConf.to_yaml(custom_config.make([feature], {})))
    init = {"custom_megatron_init_path": "my.init"}
    roles = {"megatron": [{"role": "critic", "overrides": init}, {"role": "actor", "overrides": {"lr": 1e-6}}]}
    Path("roles.yaml").write_text(OmegaConf.to_yaml(roles))
    monkeypatch.setattr("sys.argv", ["pytest"])
    words = ["--check", "rl_accel.yaml", "--", *LINE.split(), *words.split()]
    done = CliRunner().invoke(custom_config.slime_config, words)
    assert re.search(says, f"{done.output}{done.exception}", re.DOTALL)
    assert done.exit_code == code
    if not says:
        assert done.output == "rl_accel.yaml is right\n"


@pytest.mark.parametrize(
    ("line", "flags"),
    [
        ("python3 -u train.py --save tool.py", "train.py --save tool.py"),
        ("ray job submit --working-dir x.py -- python3 train_async.py --save x", "train_async.py --save x"),
        ("--save x", "--save x"),
    ],
)
def test_a_launch_line_begins_with_the_script(line, flags):
    assert list(words_of_flags(line.split())) == flags.split()


def test_a_launch_line_wants_slime_and_a_file(check, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "slime.utils.arguments", None)
    monkeypatch.setitem(__import__("sys").modules, "slime.utils", None)
    with pytest.raises(ConfigError, match="a launch line wants slime"):
        check(custom_config.make(["gae"], {}), line=["--rm-type", "math"])
    done = CliRunner().invoke(custom_config.slime_config, ["--enable", "gae", "--", "train.py"])
    assert "a launch line goes with --check FILE" in str(done.exception)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["bash", "-c", "python3 train.py --save x"], "wants separate words, .* found 'python3 train.py --save x'"),
        (["ray", "job", "submit", "--", "bash", "-c", "cd x; python3 train.py --save x"], "wants separate words"),
        (["python3", "train.py", "--save x", "--load=y"], "wants separate words, .* found '--save x'"),
        (["python3", "train.py", "${ROLLOUT_ARGS[@]}", "--save", "x"], r"has expanded, found \$\{ROLLOUT_ARGS\[@\]\}"),
        (["bash", "train.sh", "$@"], r"has expanded, found \$@"),
        (["python3", "train.py", "--save", "x", "$ARGS"], r"has expanded, found \$ARGS"),
        (["bash", "run.sh"], "wants slime's flags, found bash run.sh: flags within a script are not read"),
        (["ray", "job", "submit", "--no-wait", "--", "./run.sh"], "wants slime's flags, found ./run.sh"),
    ],
)
def test_a_launch_line_that_hides_its_flags_is_refused_in_one_line(words, message):
    with pytest.raises(ConfigError, match=message):
        words_of_flags(words)
    for value in ("$X/y", "$X", "${X}"):
        assert list(words_of_flags(["python3", "train.py", "--save", value, "--a=b c"])) == [
            "train.py",
            "--save",
            value,
            "--a=b c",
        ]


def test_slimes_parser_is_read_where_sglang_lacks_packages_for_gpus(python, tmp_path):
    """In the environment of ``make sglang``, SGLang imports torchvision, which has no build for its torch."""
    sources = {
        "sglang/__init__": "from torchvision.io import decode_jpeg",
        "slime/utils/arguments": "import sglang, sgl_kernel.elementwise",
        "slime/__init__": "",
        "slime/utils/__init__": "",
    }
    for name, source in sources.items():
        file = tmp_path / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)
    lines = "from rl_accel.integrations.slime import custom_config\ncustom_config.parsed([], {})"
    done = python(lines, PYTHONPATH=str(tmp_path), code=1)
    assert (
        "AttributeError: module 'slime.utils.arguments' has no attribute 'get_slime_extra_args_provider'" in done.stderr
    )


@pytest.mark.slow
def test_no_launch_line_of_slimes_own_loses_anything(slime_root, monkeypatch):
    """Each of them with each feature, as ``python docs/corpus.py --slime-root`` counts them."""
    pytest.importorskip("sglang", reason="sglang, which slime's parser imports, is absent")
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "docs")
    from corpus_slime import verdicts

    results = [(name, found, told, read_flags(line)) for line, name, found, told in verdicts(slime_root) if name]
    assert len(results) > 7 * 70
    for feature, outcome, told, line in results:
        estimator, size = line.get("advantage_estimator", "grpo"), line["rollout_batch_size"]
        refused = {"rollout_function_path", "partial_rollout", "buffer_filter_path"} & {*line}
        refused |= {line[SCRIPT]} & {"train_async.py"}
        aborts = "dynamic_sampling_filter_path" in line or line.get("over_sampling_batch_size", size) != size
        refused |= {size} - {line.get("over_sampling_batch_size", size)}
        distils = line.get("custom_rm_path", "").startswith("slime.rollout.on_policy_distillation.")
        said = {
            "gae": estimator != "ppo" and "without effect",
            "advantages": estimator != "reinforce_plus_plus" and "without effect",
            "stall": False,
            "sampler": not aborts and "without effect",
            "reward_timeout": distils and "refused",
            "tail_batching": refused and "refused",
            "drafts": "sglang_speculative_algorithm" in line and "refused",
        }
        modes = {"debug_train_only", "load_debug_rollout_data"} & {*line}
        if modes or line.get("rollout_function_path") == FINE_TUNING:
            idle = ("sampler", "stall", "reward_timeout", "tail_batching", "drafts")
            said |= {name: said.get(name) or "without effect" for name in idle}
        wanted = "refused" if "custom_config_path" in line else said[feature] or "accepted"
        assert outcome == wanted, (feature, told, line)
        if feature == "reward_timeout" and outcome == "accepted":
            assert ("grader" in told) == ("custom_rm_path" in line)
